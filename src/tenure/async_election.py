"""An election for async code: this node's candidacy for one role, and what one can ask about it."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

import anyio

from tenure.async_term import AsyncTerm
from tenure.clock import now
from tenure.election import EVENTS_KEPT, HAND_OVER_S, BaseElection
from tenure.engine import Engine
from tenure.events import Event
from tenure.loops import Loop
from tenure.settings import check_timeout
from tenure.values import Candidate, LeaderInfo, TermRecord

if TYPE_CHECKING:
    from typing_extensions import Self


class AsyncElection(BaseElection[AsyncTerm]):
    """This node's candidacy for one role."""

    make_term = AsyncTerm

    def __init__(self, engine: Engine, role: str, loop: Loop) -> None:
        """Made by the node, not by you."""
        super().__init__(engine, role, loop.call)
        self.loop = loop
        """The event loop of the node."""

    async def wait(self, timeout: float | None = None) -> AsyncTerm:  # noqa: ASYNC109 - as in Election
        """Return the term as soon as this node leads; raise WaitTimeout after ``timeout`` seconds."""
        timeout = check_timeout(timeout)
        deadline = None if timeout is None else now() + timeout
        while True:
            self._check_standing()
            elected = await self.wait_for(lambda: self._elected, None if deadline is None else deadline - now())
            term = self.term
            if term is not None:
                return term
            if not elected:
                raise self._not_elected(timeout)

    async def next_term(self, after: AsyncTerm | None) -> AsyncTerm | None:
        """Wait for another term than ``after``; None if the node was closed meanwhile."""
        await self.wait_for(lambda: self._newer(after) is not None or not self._engine.running)
        return self._newer(after)

    async def leader(self) -> LeaderInfo | None:
        """Return who holds the role, as the database knows it; None if nobody does."""
        return await self.loop.run(self._leader, abandon=True)

    async def candidates(self) -> list[Candidate]:
        """Return who stands for the role, in the order in which they joined."""
        return await self.loop.run(self._candidates, abandon=True)

    async def history(self, limit: int = 20) -> list[TermRecord]:
        """Return the last terms of the role, newest first."""
        return await self.loop.run(lambda: self._history(limit), abandon=True)

    async def resign(self, to: str | None = None) -> None:
        """Hand over now, to the candidate named ``to`` if one is given; see :meth:`Election.resign`."""
        member_id = await self.loop.run(lambda: self._check_resign(to), abandon=True)
        self.give_up(withdraw=False, to=member_id)
        await self.wait_told()

    async def withdraw(self) -> None:
        """Stop standing for the role; hand over first if this node leads."""
        self.give_up(withdraw=True)
        await self.wait_told()

    async def wait_told(self) -> None:
        """Wait until the database, if it can be reached, knows of a term that was given up."""
        await self.wait_for(lambda: self._told, HAND_OVER_S)

    def events(self) -> AsyncIterator[Event]:
        """Yield the events of this role from now on, until the node is closed."""
        return AsyncEvents(self)

    # For the term and the node ---------------------------------------------------------------------------------

    async def wait_for(self, condition: Callable[[], bool], timeout: float | None = None) -> bool:  # noqa: ASYNC109
        """Wait until the condition holds; False if ``timeout`` seconds pass first."""
        return condition() or await self.loop.until(lambda wake: self._engine.call_when(condition, wake), timeout)

    def call_when(self, condition: Callable[[], bool], action: Callable[[], object]) -> Callable[[], None]:
        """Call ``action`` once on the event loop when the condition holds; return what takes that back."""
        return self._engine.call_when(condition, lambda: self.loop.call(action))

    def read(self, reader: Callable[[Event | None], object]) -> Callable[[], None]:
        """Tell ``reader`` every event, from the engine's threads; return what ends that."""
        self._observe(reader)
        return lambda: self._readers.remove(reader)


class AsyncEvents:
    """The events of one role, as an async iterator. An idle reader may fall behind and lose the oldest."""

    def __init__(self, election: AsyncElection) -> None:
        """Hear from now on. The election holds no more than a weak reference: who breaks off its loop is forgotten."""
        self._events: deque[Event | None] = deque(maxlen=EVENTS_KEPT)
        self._loop = election.loop
        self._more = anyio.Event()
        myself = weakref.ref(self)

        def reader(event: Event | None) -> None:
            events = myself()
            if events is not None:
                events._events.append(event)  # noqa: SLF001
                events._loop.call(events._more.set)  # noqa: SLF001

        weakref.finalize(self, election.read(reader)).atexit = False

    def __aiter__(self) -> Self:
        """Return itself."""
        return self

    async def __anext__(self) -> Event:
        """Wait for the next event."""
        while not self._events:
            self._more = anyio.Event()
            if not self._events:  # again: one may have come before the new bell hung
                await self._more.wait()
        event = self._events.popleft()
        if event is None:
            self._events.append(None)  # the end stays the end
            raise StopAsyncIteration
        return event
