"""A replica of an application that one of its replicas may do the work of: by hand, by a service, or in FastAPI.

    python -m tests.cluster.lock_replica KIND URL DIRECTORY NAME [LOCK_ID]

At work, a replica holds a lock on a file that the others would need, and records a beat every few milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import tenure

BEAT_S = 0.01
POLL_S = 0.1
TTL_S = 5.0


class Work:
    """What only one replica may do at a time, on record."""

    def __init__(self, directory: Path, name: str) -> None:
        self._witness = (directory / "at-work").open("a")
        self._record = (directory / f"{name}.record").open("a", buffering=1)

    def beat(self) -> None:
        self._record.write(f"beat {time.monotonic()}\n")

    @contextlib.contextmanager
    def done_alone(self) -> Iterator[None]:
        try:
            fcntl.flock(self._witness, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._record.write(f"overlap {time.monotonic()}\n")
        try:
            yield
        finally:
            fcntl.flock(self._witness, fcntl.LOCK_UN)


def by_hand(url: str, work: Work, lock_id: int | None) -> None:
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        while not connection.execute("select pg_try_advisory_lock(%s)", [lock_id]).fetchone()[0]:  # type: ignore[index]
            time.sleep(POLL_S)
        with work.done_alone():
            while True:
                work.beat()
                time.sleep(BEAT_S)


def by_service(url: str, name: str, work: Work, lock_id: int | None) -> None:
    node = tenure.Node(url, name=name, ttl=TTL_S)

    @node.leader_only("r", lock_id=lock_id)
    def works(term: tenure.Term) -> None:
        with work.done_alone():
            while not term.wait_lost(BEAT_S):
                work.beat()

    node.run()


def by_fastapi(url: str, name: str, work: Work, lock_id: int | None) -> None:
    import fastapi
    import uvicorn

    from tenure.integrations.asgi import tenure_lifespan, term_of

    node = tenure.AsyncNode(url, name=name, ttl=TTL_S)

    @node.leader_only("r", lock_id=lock_id)
    async def works() -> None:
        with work.done_alone():
            while True:
                work.beat()
                await asyncio.sleep(BEAT_S)

    app = fastapi.FastAPI(lifespan=tenure_lifespan(node))

    @app.get("/", dependencies=[fastapi.Depends(term_of(node, "r", lock_id=lock_id))])
    def leads() -> bool:
        return True

    uvicorn.run(app, port=0, log_level="warning")


def main(kind: str, url: str, directory: str, name: str, lock_id: str = "") -> None:
    work, number = Work(Path(directory), name), int(lock_id) if lock_id else None
    if kind == "hand":
        by_hand(url, work, number)
    else:
        {"service": by_service, "fastapi": by_fastapi}[kind](url, name, work, number)


if __name__ == "__main__":
    main(*sys.argv[1:])
