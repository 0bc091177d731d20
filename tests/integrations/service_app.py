"""A replica with one service and nothing else: `python -m tests.integrations.service_app coroutine`, or `thread`.

The coroutine goes by the clock and claims each second. The thread goes by the table: it does every second after the
last one that is there, so that what a failover delayed is done late, and not left out.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from datetime import datetime, timedelta, timezone

import tenure
from tests.integrations.cluster import INSERT_RUN

SECOND = timedelta(seconds=1)
ME = (os.environ.get("TENURE_NAME"), os.getpid())


def next_second() -> datetime:
    return datetime.now(timezone.utc).replace(microsecond=0) + SECOND


def seconds_until(due: datetime) -> float:
    return max(0.0, (due - datetime.now(timezone.utc)).total_seconds())


async def coroutine(term: tenure.AsyncTerm) -> None:
    while True:
        due = next_second()
        await asyncio.sleep(seconds_until(due))
        async with term.transaction() as transaction:
            if await transaction.claim("tick", due):
                await transaction.execute(INSERT_RUN, ("tick", due, term.token, *ME))


def thread(term: tenure.Term) -> None:
    with term.transaction() as transaction:
        (last,) = transaction.execute("select max(due) from runs").fetchone()
    due = next_second() if last is None else last + SECOND
    while not term.wait_lost(seconds_until(due)):
        with term.transaction() as transaction:
            transaction.execute(INSERT_RUN, ("tick", due, term.token, *ME))
        due += SECOND


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    if sys.argv[1] == "coroutine":
        node = tenure.AsyncNode()
        node.leader_only("scheduler", coroutine)
        asyncio.run(node.run())
    else:
        node = tenure.Node()
        node.leader_only("scheduler", thread)
        node.run()


if __name__ == "__main__":
    main()
