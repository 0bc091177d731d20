"""Only the leader runs the scheduler; every replica serves queries.

TENURE_URL=postgresql://localhost/app uvicorn examples.fastapi_app:app --workers 4
"""

import asyncio
from typing import Annotated

from fastapi import Depends, FastAPI

import tenure
from tenure.integrations.asgi import health, tenure_lifespan, term_of

node = tenure.AsyncNode()  # uses the database of TENURE_URL; does not connect yet


@node.leader_only("scheduler")
async def scheduler(term: tenure.AsyncTerm) -> None:  # cancelled when this replica no longer leads
    while True:
        await term.ensure()  # waits if the database is being restarted
        async with term.transaction() as transaction:  # refused by the database if another has taken over
            await transaction.execute("select 1")
        print(f"{node.name}: scheduled, under token {term.token}", flush=True)
        await asyncio.sleep(1)


app = FastAPI(lifespan=tenure_lifespan(node))
app.mount("/health", health(node))  # /health/healthz, /health/readyz, /health/leader


@app.get("/")
async def query() -> dict[str, str]:
    return {"answered by": node.name}


@app.post("/schedules")  # 503 on the others, with the leader's name
async def change(term: Annotated[tenure.AsyncTerm, Depends(term_of(node, "scheduler"))]) -> dict[str, int]:
    return {"changed under token": term.token}
