"""The node for async code, on asyncio and trio.

The engine is that of ``Node`` and runs in its own threads, so a blocked event loop does not delay renewals.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

from tenure.aio.bridge import Loop, run_in_thread, wait_for, wait_for_future
from tenure.aio.call import Call
from tenure.aio.election import AsyncElection
from tenure.aio.term import AsyncTerm, cancelled_when_lost
from tenure.campaign import Campaign
from tenure.election import HAND_OVER_S
from tenure.engine.candidacy import Candidacy
from tenure.errors import NodeClosed, TenureError
from tenure.internals import holding_of
from tenure.node import BaseNode

if TYPE_CHECKING:
    from typing_extensions import Self

SIGNAL_POLL_S = 0.2
"""How often ``run()`` asks whether a signal has come, where the event loop does not say so."""


class AsyncNode(BaseNode[AsyncElection]):
    """Stands for any number of roles, on two connections, in threads of the engine.

    Use it as an async context manager, or call :meth:`start` and :meth:`close`::

        async with tenure.AsyncNode("postgresql://localhost/app") as node:
            async with node.lead("scheduler") as term:
                await run_scheduler(term)  # cancelled when leadership is lost

    The settings are those of :class:`Node`.
    """

    _loop: Loop

    async def start(self) -> Self:
        """Connect and start the node's threads and services; callbacks are called on the event loop that runs this."""
        self._engine.launch()
        self._loop = Loop()
        try:
            await wait_for_future(self._engine.opened)
            self._engine.opened.result()
        except TenureError as error:
            await self.close()
            # As in Node.start(), the traceback would hide the line that matters.
            raise error.with_traceback(None) from error.__cause__
        except BaseException:
            await self.close()
            raise
        if self._supervisor is not None:
            self._supervisor.begin()
            self._running_services = Call(self._supervisor.run)
        return self

    async def run(self) -> None:
        """Start, run the services until SIGINT or SIGTERM, and close. For the event loop of the main thread."""
        self._warn_without_services()
        with _ending_signals() as signalled, anyio.CancelScope() as scope:

            async def end() -> None:
                await signalled()
                scope.cancel()

            waiting = Call(end)
            try:
                async with self:
                    await anyio.sleep_forever()
            finally:
                waiting.cancel()

    async def close(self) -> None:
        """Hand over every role, leave, and close everything, even if cancelled. May be called twice."""
        if self._engine.running:
            await run_in_thread(self._leave)

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @contextlib.asynccontextmanager
    async def lead(
        self,
        role: str,
        timeout: float | None = None,  # noqa: ASYNC109
        *,
        lock_id: int | str | None = None,
    ) -> AsyncIterator[AsyncTerm]:
        """Wait until this node leads, run the block, and hand over when the block is left.

        A loss cancels the block, and LeadershipLost is raised outside it. Swallowing the cancellation only keeps the
        block running: the term is over all the same, and another node may lead.
        """
        campaign = self._begin_campaign(role, lock_id)
        try:
            term = await campaign.election.wait(timeout)
            term.on_lost(campaign.stand_down)
            with cancelled_when_lost(self._engine, holding_of(term)):
                yield term
            # A cancellation from outside takes precedence over the loss of the term.
            await anyio.lowlevel.checkpoint_if_cancelled()
            self._raise_if_lost(term)
        finally:
            campaign.end()
            # A forked child leaves the parent's term alone.
            with anyio.CancelScope(shield=True), contextlib.suppress(NodeClosed):
                await wait_for(self._engine, lambda: campaign.candidacy.released, HAND_OVER_S)

    def terms(self, role: str, *, lock_id: int | str | None = None) -> AsyncIterator[AsyncTerm]:
        """Yield every term that this node gets, for as long as the node runs; leaving the loop hands over."""
        return AsyncTerms(lambda: self._begin_campaign(role, lock_id), self._finalise)

    def _call(self, action: Callable[[], object]) -> None:
        self._loop.call(action)

    def _make_election(self, candidacy: Candidacy) -> AsyncElection:
        return AsyncElection(candidacy, self._loop)

    def _finalise(self, action: Callable[[], object]) -> None:
        """Call ``action`` for a finaliser: at once if that is possible, else later on the node's event loop."""
        if not self._engine.attempt(action):
            self._loop.call(action)


class AsyncTerms:
    """The terms of one node for one role, as an async iterator.

    It is not an async generator: breaking out of a loop over an async generator leaves it for the event loop to finish
    later. This one hands over at once.
    """

    _campaign: Campaign[AsyncElection] | None = None

    def __init__(
        self, begin: Callable[[], Campaign[AsyncElection]], finalise: Callable[[Callable[[], object]], None]
    ) -> None:
        """Begin a campaign and yield its terms."""
        self._begin = begin
        self._finalise = finalise
        self._campaign = begin()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> AsyncTerm:
        """Wait for the next term. If the wait is cancelled, the node stops standing until the next call."""
        campaign = self._campaign = self._campaign or self._begin()
        term: AsyncTerm | None = None
        try:
            campaign.check_over()
            while term is None and campaign.engine.running:
                await wait_for(campaign.engine, lambda: campaign.has_next)
                term = campaign.take_next()
        except BaseException:
            # The traceback may keep this object alive, so `__del__` would come too late.
            campaign.end()
            self._campaign = None
            raise
        if term is None:
            raise StopAsyncIteration
        return term

    def __del__(self) -> None:
        """Hand over after the loop was left."""
        if self._campaign is not None:
            self._finalise(self._campaign.end)


@contextlib.contextmanager
def _ending_signals() -> Iterator[Callable[[], Awaitable[object]]]:
    """Handle SIGINT and SIGTERM; yield a function that returns after the first of them."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    with contextlib.ExitStack() as stack:
        try:
            signals = stack.enter_context(anyio.open_signal_receiver(*numbers))
        except NotImplementedError:
            # On Windows, asyncio has no handlers for signals.
            ended = threading.Event()
            for number in numbers:
                stack.callback(signal.signal, number, signal.signal(number, lambda *_: ended.set()))

            async def poll() -> None:
                while not ended.is_set():  # noqa: ASYNC110 - a signal's handler cannot set an event of anyio
                    await anyio.sleep(SIGNAL_POLL_S)

            yield poll
        else:
            yield lambda: anext(signals)
