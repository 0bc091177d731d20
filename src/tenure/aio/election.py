"""An election for async code: this node's candidacy for one role, and what can be asked about it."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import tenure
from tenure.aio.bridge import Loop, run_in_thread, wait_for, wait_for_wakeup
from tenure.aio.term import AsyncTerm
from tenure.base.clock import now
from tenure.election import EVENTS_KEPT, HAND_OVER_S, BaseElection, T
from tenure.engine.candidacy import Candidacy
from tenure.events import Event
from tenure.settings import check_limit, check_timeout

if TYPE_CHECKING:
    from typing_extensions import Self


class AsyncElection(BaseElection[AsyncTerm]):
    """This node's candidacy for one role."""

    _make_term = AsyncTerm

    def __init__(self, candidacy: Candidacy, loop: Loop) -> None:
        """Only a node creates elections."""
        super().__init__(candidacy, loop.call)

    async def wait(self, timeout: float | None = None) -> AsyncTerm:
        """Return the term as soon as this node leads; raise WaitTimeout after ``timeout`` seconds."""
        timeout = check_timeout(timeout)
        deadline = None if timeout is None else now() + timeout
        while True:
            self._check_standing()
            left = None if deadline is None else deadline - now()
            elected = await wait_for(self._engine, lambda: self._elected, left)
            if (term := self.term) is not None:
                return term
            if not elected:
                raise self._not_elected(timeout)

    async def leader(self) -> tenure.LeaderInfo | None:
        """Return the holder of the role, as the database knows it; None if the role is vacant."""
        return await self._ask(self._leader)

    async def candidates(self) -> list[tenure.Candidate]:
        """Return the candidates for the role, in the order in which they joined."""
        return await self._ask(self._candidates)

    async def history(self, limit: int = 20) -> list[tenure.TermRecord]:
        """Return the last terms of the role, newest first."""
        return await self._ask(self._history, check_limit(limit))

    async def jobs(self) -> list[tenure.JobRecord]:
        """Return the jobs of the role whose runs were claimed (:meth:`AsyncTerm.claim`), sorted by name."""
        return await self._ask(self._jobs)

    async def resign(self, to: str | None = None) -> None:
        """Hand over now, to the candidate named ``to`` if one is given; see :meth:`Election.resign`."""
        self._candidacy.resign(self._successor(to) if to is None else await self._ask(self._successor, to))
        await self._wait_released()

    async def withdraw(self) -> None:
        """Stop standing for the role; hand over first if this node leads."""
        self._candidacy.withdraw()
        await self._wait_released()

    async def _wait_released(self) -> None:
        await wait_for(self._engine, lambda: self._candidacy.released, HAND_OVER_S)

    def events(self) -> AsyncIterator[Event]:
        """Yield the events of this role from now on, until the node is closed."""
        return AsyncEvents(self._candidacy)

    async def _ask(self, question: Callable[..., T], *arguments: Any) -> T:
        self._engine.check_running()
        return await run_in_thread(partial(question, *arguments), abandon=True)


class AsyncEvents:
    """The events of one role, as an async iterator. A reader that falls too far behind loses the oldest."""

    def __init__(self, candidacy: Candidacy) -> None:
        """Listen from now on. The candidacy keeps only a weak reference, so a loop that was left stops listening."""
        self._engine = candidacy.engine
        self._events: deque[Event | None] = deque(maxlen=EVENTS_KEPT)
        self._waiting: list[Callable[[], object]] = []
        myself = weakref.ref(self)

        def reader(event: Event | None) -> None:
            events = myself()
            if events is not None:
                events._events.append(event)  # noqa: SLF001
                for wake in list(events._waiting):  # noqa: SLF001
                    wake()

        weakref.finalize(self, candidacy.listen(reader)).atexit = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        """Wait for the next event."""
        self._engine.check_own()
        while not self._events:
            await wait_for_wakeup(self._when_more)
        event = self._events.popleft()
        if event is None:
            # The next call must find the end as well.
            self._events.append(None)
            raise StopAsyncIteration
        return event

    def _when_more(self, wake: Callable[[], object]) -> Callable[[], None]:
        self._waiting.append(wake)
        # An event may have come before this method was called.
        if self._events:
            wake()
        return lambda: self._waiting.remove(wake)
