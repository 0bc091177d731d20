"""The application of tests/integrations/asgi_app.py in FastAPI, and a path with a dependency."""

from __future__ import annotations

from typing import Annotated

import fastapi

import tenure
from tenure.integrations.asgi import term_of
from tests.integrations.asgi_app import lifespan, node, routes

app = fastapi.FastAPI(lifespan=lifespan)
app.router.routes.extend(routes)


@app.post("/jobs")
async def jobs(term: Annotated[tenure.AsyncTerm, fastapi.Depends(term_of(node, "scheduler"))]) -> dict[str, object]:
    return {"token": term.token, "kind": type(term).__name__}
