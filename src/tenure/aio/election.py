"""An election for async code: this node's candidacy for one role, and what one can ask about it."""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from tenure.async_term import AsyncTerm
from tenure.clock import now
from tenure.election import EVENTS_KEPT, HAND_OVER_S, BaseElection, T
from tenure.engine import Engine
from tenure.events import Event
from tenure.loops import Loop, run, until
from tenure.settings import check_timeout
from tenure.values import Candidate, JobRecord, LeaderInfo, TermRecord

if TYPE_CHECKING:
    from typing_extensions import Self


class AsyncElection(BaseElection[AsyncTerm]):
    """This node's candidacy for one role."""

    make_term = AsyncTerm

    def __init__(self, engine: Engine, role: str, loop: Loop) -> None:
        """Made by the node, not by you."""
        super().__init__(engine, role, loop.call)
        self._loop = loop

    async def wait(self, timeout: float | None = None) -> AsyncTerm:
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
        self._engine.check_own()
        self._check_over(after)
        await self.wait_for(lambda: self._newer(after) is not None or not self._engine.running)
        return self._newer(after)

    async def leader(self) -> LeaderInfo | None:
        """Return who holds the role, as the database knows it; None if nobody does."""
        return await self._ask(self._leader)

    async def candidates(self) -> list[Candidate]:
        """Return who stands for the role, in the order in which they joined."""
        return await self._ask(self._candidates)

    async def history(self, limit: int = 20) -> list[TermRecord]:
        """Return the last terms of the role, newest first."""
        return await self._ask(lambda: self._history(limit))

    async def jobs(self) -> list[JobRecord]:
        """Return the jobs of the role whose runs were claimed (:meth:`AsyncTerm.claim`), by name."""
        return await self._ask(self._jobs)

    async def resign(self, to: str | None = None) -> None:
        """Hand over now, to the candidate named ``to`` if one is given; see :meth:`Election.resign`."""
        check = functools.partial(self._check_resign, to)
        member_id = check() if to is None else await self._ask(check)
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

    async def _ask(self, question: Callable[[], T]) -> T:
        self._engine.check_running()
        return await run(question, abandon=True)

    # For the term and the node ---------------------------------------------------------------------------------

    async def wait_for(self, condition: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until the condition holds; False if ``timeout`` seconds pass first."""
        self._engine.check_own()
        return condition() or await until(lambda wake: self._engine.call_when(condition, wake), timeout)

    def call_when(self, condition: Callable[[], bool], action: Callable[[], object]) -> Callable[[], None]:
        """Call ``action`` once on this event loop when the condition holds; return what takes that back."""
        loop = Loop()
        return self._engine.call_when(condition, lambda: loop.call(action))

    def finalise(self, action: Callable[[], object]) -> None:
        """Call ``action`` from where garbage is collected; later, on the node's loop, if it cannot be now."""
        if not self._engine.attempt(action):
            self._loop.call(action)

    def check_own(self) -> None:
        """Raise NodeClosed in a forked child."""
        self._engine.check_own()

    def read(self, reader: Callable[[Event | None], object]) -> Callable[[], None]:
        """Tell ``reader`` every event, from the engine's threads; return what ends that."""
        self._observe(reader)
        return lambda: self._readers.remove(reader)


class AsyncEvents:
    """The events of one role, as an async iterator. An idle reader may fall behind and lose the oldest."""

    def __init__(self, election: AsyncElection) -> None:
        """Hear from now on. The election holds no more than a weak reference: who breaks off its loop is forgotten."""
        self._election = election
        self._events: deque[Event | None] = deque(maxlen=EVENTS_KEPT)
        self._waiting: list[Callable[[], object]] = []
        myself = weakref.ref(self)

        def reader(event: Event | None) -> None:
            events = myself()
            if events is not None:
                events._events.append(event)  # noqa: SLF001
                for wake in list(events._waiting):  # noqa: SLF001
                    wake()

        weakref.finalize(self, election.read(reader)).atexit = False

    def __aiter__(self) -> Self:
        """Return itself."""
        return self

    async def __anext__(self) -> Event:
        """Wait for the next event."""
        self._election.check_own()
        while not self._events:
            await until(self._when_more)
        event = self._events.popleft()
        if event is None:
            self._events.append(None)  # the end stays the end
            raise StopAsyncIteration
        return event

    def _when_more(self, wake: Callable[[], object]) -> Callable[[], None]:
        self._waiting.append(wake)
        if self._events:  # one may have come before the bell hung
            wake()
        return lambda: self._waiting.remove(wake)
