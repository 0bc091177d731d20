"""A Starlette application as a user would write it, and what tests need to see.

Its scheduler writes a run every EVERY seconds, with its due time, under the fence. tests/integrations/fastapi_app.py is
the same for FastAPI, which takes longer to import.
"""

from __future__ import annotations

import asyncio
import os
import time
from datetime import datetime, timezone

from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route

import tenure
from tenure.base.clock import now
from tenure.integrations.asgi import LeaderOnly, health, tenure_lifespan
from tests.integrations.cluster import INSERT_RUN

EVERY_S = float(os.environ.get("EVERY", "1"))
KIND = {"AsyncNode": tenure.AsyncNode, "Node": tenure.Node}[os.environ.get("NODE_CLASS", "AsyncNode")]

node = KIND(start=os.environ.get("START", "raise"))
lifespan = tenure_lifespan(node, linger=float(os.environ.get("LINGER", "0")))


@node.leader_only("scheduler")
async def scheduler(term: tenure.AsyncTerm) -> None:
    while True:
        due = (time.time() // EVERY_S + 1) * EVERY_S
        await asyncio.sleep(due - time.time())
        async with term.transaction() as transaction:
            moment = datetime.fromtimestamp(due, timezone.utc)
            await transaction.execute(INSERT_RUN, ("tick", moment, term.token, node.name, os.getpid()))


async def query(request):
    return JSONResponse({"pid": os.getpid()})


async def instant(request):
    """Whether this node leads, between two readings of a clock that all processes of this machine share."""
    election, before = node.election("scheduler"), now()
    token = election.term.token if election.is_leader else None
    return JSONResponse({"pid": os.getpid(), "from": before, "token": token, "to": now()})


async def guarded(scope, receive, send):
    await JSONResponse({})(scope, receive, send)


routes = [
    *(Route("/", query), Route("/instant", instant)),
    *(Mount("/tenure", health(node)), Mount("/guarded", LeaderOnly(guarded, node, "scheduler"))),
]
app = Starlette(routes=routes, lifespan=lifespan)
