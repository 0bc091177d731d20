"""The node for async code, on asyncio and trio.

The engine is the same, in threads of its own: a blocked event loop costs nothing but its own answer time.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from types import TracebackType
from typing import TYPE_CHECKING

import anyio

from tenure.async_election import AsyncElection
from tenure.async_term import AsyncTerm
from tenure.errors import NodeClosed
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
        self._engine.launch()
        self._loop = Loop()
        try:
            await done(self._engine.opened)
            self._engine.opened.result()
        except BaseException:
            await self.close()
            raise
        return self

    async def close(self) -> None:
        """Hand over every role, leave, and close everything; not cut short by a cancellation. May be called twice."""
        if self._engine.running:
            await run(self._leave)

    def _leave(self) -> None:
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
    async def lead(self, role: str, timeout: float | None = None) -> AsyncIterator[AsyncTerm]:  # noqa: ASYNC109
        """Wait until this node leads, run the block, and hand over on leaving it.

        A loss cancels the block, and LeadershipLost is raised outside of it. A block that swallows its cancellation
        changes nothing but its own end: the term is over, and another node leads.
        """
        campaign = self._begin_campaign(role)
        try:
            term = await campaign.election.wait(timeout)
            with term.cancelling():
                yield term
            term.raise_if_lost()
        finally:
            campaign.end()
            with anyio.CancelScope(shield=True), contextlib.suppress(NodeClosed):  # as in Node
                await campaign.election.wait_told()

    def terms(self, role: str) -> AsyncIterator[AsyncTerm]:
        """Yield every term that this node gets, for as long as it runs; leaving the loop hands over."""
        return AsyncTerms(self._begin_campaign(role))

    def _make_election(self, role: str) -> AsyncElection:
        return AsyncElection(self._engine, role, self._loop)


class AsyncTerms:
    """The terms of one node for one role, as an async iterator.

    Not an async generator: who breaks off a loop over one leaves it behind, to be finished by the event loop at some
    time. This one hands over at once.
    """

    def __init__(self, campaign: Campaign[AsyncElection]) -> None:
        """Yield the terms of a campaign that has begun."""
        self._campaign = campaign
        self._term: AsyncTerm | None = None

    def __aiter__(self) -> Self:
        """Return itself."""
        return self

    async def __anext__(self) -> AsyncTerm:
        """Wait for the next term."""
        self._term = await self._campaign.election.next_term(after=self._term)
        if self._term is None:
            raise StopAsyncIteration
        return self._term

    def __del__(self) -> None:
        """Hand over."""
        self._campaign.election.finalise(self._campaign.end)
