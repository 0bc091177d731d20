"""Only the leader runs the scheduler; every replica answers. Start it several times, and end one with Ctrl-C.

TENURE_URL=postgresql://localhost/app python examples/plain_asyncio.py
"""

import asyncio

import tenure

node = tenure.AsyncNode()  # the database of TENURE_URL


@node.leader_only("scheduler")
async def scheduler(term: tenure.AsyncTerm) -> None:  # cancelled when this replica leads no more
    while True:
        await term.ensure()  # waits while the database is restarted
        async with term.transaction() as transaction:  # refused by the database if another has taken over
            await transaction.execute("select 1")
        print(f"{node.name}: scheduled, under token {term.token}", flush=True)
        await asyncio.sleep(1)


@node.everywhere
async def answers() -> None:
    while True:
        print(f"{node.name}: answering", flush=True)
        await asyncio.sleep(1)


asyncio.run(node.run())  # until SIGINT or SIGTERM
