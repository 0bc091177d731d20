"""The node for async code, on asyncio and trio.

The engine is the same, in threads of its own: a blocked event loop costs nothing but its own answer time.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

from tenure.async_election import AsyncElection
from tenure.async_term import AsyncTerm
from tenure.errors import NodeClosed
from tenure.jobs import Job
from tenure.loops import Loop, done, run
from tenure.node import BaseNode, Campaign

if TYPE_CHECKING:
    from typing_extensions import Self


class AsyncNode(BaseNode[AsyncElection]):
    """Stands for any number of roles, on two connections and in threads of its own.

    Use it as an async context manager, or call :meth:`start` and :meth:`close`::

        async with tenure.AsyncNode("postgresql://localhost/app") as node:
            async with node.lead("scheduler") as term:
                await run_scheduler(term)  # cancelled when leadership is lost

    The settings are those of :class:`Node`.
    """

    _loop: Loop

    async def start(self) -> Self:
        """Connect and start the node's threads; callbacks are called on the event loop that this is called on."""
        if self._crews is not None:
            self._engine.keep_back(self._crews.stop_within)
        self._engine.launch()
        self._loop = Loop()
        try:
            await done(self._engine.opened)
            self._engine.opened.result()
        except BaseException:
            await self.close()
            raise
        if self._crews is not None:
            self._crews.begin()
            self._running_crews = Job(self._crews.run)
        return self

    async def run(self) -> None:
        """Start, run the services until SIGINT or SIGTERM, and close. For the event loop of the main thread."""
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals, anyio.CancelScope() as scope:

            async def end() -> None:
                async for _ in signals:
                    scope.cancel()

            waiting = Job(end)
            try:
                async with self:
                    await anyio.sleep_forever()
            finally:
                waiting.cancel()

    async def close(self) -> None:
        """Hand over every role, leave, and close everything; not cut short by a cancellation. May be called twice."""
        if self._engine.running:
            await run(self._leave)

    def _leave(self) -> None:
        if self._crews is not None:
            self._crews.close()
        self._engine.close()
        for election in list(self._elections.values()):
            election.close()

    async def __aenter__(self) -> Self:
        """Start."""
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        await self.close()

    @contextlib.asynccontextmanager
    async def lead(
        self,
        role: str,
        timeout: float | None = None,  # noqa: ASYNC109
        *,
        lock_id: int | str | None = None,
    ) -> AsyncIterator[AsyncTerm]:
        """Wait until this node leads, run the block, and hand over on leaving it.

        A loss cancels the block, and LeadershipLost is raised outside of it. A block that swallows its cancellation
        changes nothing but its own end: the term is over, and another node leads.
        """
        campaign = self._begin_campaign(role, lock_id)
        try:
            term = await campaign.election.wait(timeout)
            term.on_lost(campaign.stand_down)
            with term.cancelling():
                yield term
            await anyio.lowlevel.checkpoint_if_cancelled()  # whoever cancels from outside is obeyed first
            term.raise_if_lost()
        finally:
            campaign.end()
            with anyio.CancelScope(shield=True), contextlib.suppress(NodeClosed):  # as in Node
                await campaign.election.wait_told()

    def terms(self, role: str, *, lock_id: int | str | None = None) -> AsyncIterator[AsyncTerm]:
        """Yield every term that this node gets, for as long as it runs; leaving the loop hands over."""
        return AsyncTerms(lambda: self._begin_campaign(role, lock_id))

    def _call(self, action: Callable[[], object]) -> None:
        self._loop.call(action)

    def _make_election(self, role: str) -> AsyncElection:
        return AsyncElection(self._engine, role, self._loop)


class AsyncTerms:
    """The terms of one node for one role, as an async iterator.

    Not an async generator: who breaks off a loop over one leaves it behind, to be finished by the event loop at some
    time. This one hands over at once.
    """

    _campaign: Campaign[AsyncElection] | None = None

    def __init__(self, begin: Callable[[], Campaign[AsyncElection]]) -> None:
        """Begin a campaign and yield its terms."""
        self._begin = begin
        self._campaign = begin()
        self._term: AsyncTerm | None = None

    def __aiter__(self) -> Self:
        """Return itself."""
        return self

    async def __anext__(self) -> AsyncTerm:
        """Wait for the next term. Who is cancelled while waiting stands no more, unless it asks again."""
        if self._campaign is None:
            self._campaign = self._begin()
        try:
            self._term = await self._campaign.election.next_term(after=self._term)
        except BaseException:  # its traceback keeps this object for as long as anybody keeps it
            self._campaign.end()
            self._campaign = None
            raise
        if self._term is None:
            raise StopAsyncIteration
        return self._term

    def __del__(self) -> None:
        """Hand over."""
        if self._campaign is not None:
            self._campaign.election.finalise(self._campaign.end)
