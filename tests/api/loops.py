"""What the tests of the async facade share: tests on both event loops, and nodes in several states.

`test_async_*.py` show what the facade adds to the one that tests/support/async_as_sync.py shows to be the same. A loss
cancels, a cancellation hands over, and a blocked event loop costs nothing. Nothing that a task does wrong leaves a
thread, a waiter or an open transaction behind.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading

import anyio
import anyio.lowlevel
import pytest

import tenure
from tests.support.store_by_hand import QUICK

LOOPS = ["asyncio", "trio"]
PATIENCE_S = 30


def looped(test=None, *, on=LOOPS):
    """Run an async test on each of the event loops; a hang is a failure."""
    if test is None:
        return functools.partial(looped, on=on)

    @pytest.mark.parametrize("loop", on)
    def run_test(loop, **fixtures):
        async def guarded():
            with anyio.fail_after(PATIENCE_S):
                await test(**fixtures)

        anyio.run(guarded, backend=loop)

    parameters = [
        *inspect.signature(test).parameters.values(),
        *list(inspect.signature(run_test).parameters.values())[:1],
    ]
    run_test.__signature__ = inspect.Signature(parameters)
    run_test.__name__ = test.__name__
    run_test.__doc__ = test.__doc__
    return run_test


native = looped(on=["asyncio"])
"""For what only asyncio has: tasks that any code may cancel, drivers of its own."""


def tenures_threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("tenure-")]


def node(url, name="a", **settings):
    return tenure.AsyncNode(url, name=name, **(QUICK | settings))


@contextlib.asynccontextmanager
async def raises(error, match=None):
    """As pytest.raises, to stand in one line with the block that raises."""
    with pytest.raises(error, match=match):
        yield


async def eventually(condition):
    """Look again and again until the condition holds, shielded from whatever was cancelled."""
    with anyio.CancelScope(shield=True), anyio.fail_after(20):
        while not condition():  # noqa: ASYNC110 - for what sends no signal
            await anyio.sleep(0.005)


async def stand(candidate):
    """Stand for role r beside node a, and wait until the database knows."""
    election = candidate.election("r")
    await only(election, "a", candidate.name)
    return election


async def only(election, *names):
    """Wait until exactly these stand."""
    with anyio.fail_after(20):
        while {candidate.name for candidate in await election.candidates()} != set(names):  # noqa: ASYNC110 - as above
            await anyio.sleep(0.005)
