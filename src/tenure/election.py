"""An election: this node's candidacy for one role, and what can be asked about it."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Generic, TypeVar

import tenure
from tenure.base.clock import now
from tenure.engine.candidacy import Candidacy
from tenure.errors import NotLeader, WaitTimeout
from tenure.events import Event
from tenure.settings import check_callback, check_limit, check_name, check_timeout
from tenure.term import BaseTerm, Term

HAND_OVER_S = 2.0
"""How long giving up a term waits until the database has recorded it."""
EVENTS_KEPT = 1000
"""How many events an idle reader may fall behind before it loses the oldest."""


T = TypeVar("T")
TermT = TypeVar("TermT", bound=BaseTerm)


class BaseElection(Generic[TermT]):
    """What :class:`Election` and :class:`AsyncElection` have in common: a view of the node's candidacy for a role."""

    _make_term: type[TermT]

    def __init__(self, candidacy: Candidacy, call: Callable[[Callable[[], object]], object]) -> None:
        """Only a node creates elections. ``call`` runs callbacks on the node's callback thread or event loop."""
        self._candidacy = candidacy
        self._engine = candidacy.engine
        self._call = call

    def __repr__(self) -> str:
        """Show the role and whether this node leads."""
        return f"<{type(self).__name__} role={self.role!r} is_leader={self.is_leader}>"

    @property
    def role(self) -> str:
        """The role that this node stands for."""
        return self._candidacy.role

    @property
    def is_leader(self) -> bool:
        """Whether this node leads, at this moment. No I/O and no lock: a deadline is compared with the clock."""
        # Written out, as in Holding.valid: applications read this in tight loops, and each call costs a clock read. In
        # this form it is the quickest.
        latest = self._candidacy.latest
        return False if latest is None or latest.lease.deadline <= now() else latest.reason is None

    @property
    def term(self) -> TermT | None:
        """The term that this node holds and that is valid now; else None."""
        holding = self._candidacy.holding
        if holding is None:
            return None
        views: dict[object, TermT] = holding.views
        return views.get(self) or views.setdefault(self, self._make_term(self, holding))

    @property
    def standing(self) -> bool:
        """Whether this node stands for the role; False after :meth:`withdraw`."""
        return self._candidacy.standing

    def on_event(self, callback: Callable[[Event], object]) -> None:
        """Call ``callback(event)`` for every event of this role, on the thread that :meth:`BaseTerm.on_lost` names."""
        check_callback(callback)
        self._candidacy.listen(lambda event: event and self._call(partial(callback, event)))

    @property
    def _elected(self) -> bool:
        """Whether a wait for a term ends: this node leads, or is not running."""
        return self.is_leader or not self._engine.running

    def _check_standing(self) -> None:
        self._engine.check_running()
        if not (self.standing or self._candidacy.of_services):
            raise NotLeader(f"role {self.role!r}: this node has withdrawn; stand again with node.election()")

    def _not_elected(self, timeout: float | None) -> WaitTimeout:
        return WaitTimeout(f"role {self.role!r}: not elected within {timeout:g} s")

    def _successor(self, to: str | None) -> str | None:
        """Return the id of the member to hand over to.

        Raise if this node does not lead, or if ``to`` does not name one other candidate.
        """
        holding = self._candidacy.latest
        if holding is None or holding.reason is not None:
            raise NotLeader(f"role {self.role!r}: this node does not lead, so it cannot resign")
        if to is None:
            return None
        name, me = check_name("to", to), self._engine.member_id
        others = [candidate for candidate in self._candidates() if candidate.member_id != me]
        from tenure.store.records import candidate_id  # noqa: PLC0415 - as below

        return candidate_id(self.role, name, others)

    # What is read in the database about the role. The calling thread imports the functions, before the node's thread
    # calls them: they are slow to import, and a node leads without them. So the types are named by the package, which
    # loads them when the type hints are resolved. A forked child must not import them: if a thread of the parent was
    # importing them at that moment, the child would wait for that thread for ever.

    def _leader(self) -> tenure.LeaderInfo | None:
        self._engine.check_running()
        from tenure.store.records import leader  # noqa: PLC0415

        return self._read(leader)

    def _candidates(self) -> list[tenure.Candidate]:
        self._engine.check_running()
        from tenure.store.records import candidates  # noqa: PLC0415

        return self._read(candidates)

    def _history(self, limit: int) -> list[tenure.TermRecord]:
        self._engine.check_running()
        from tenure.store.records import history  # noqa: PLC0415

        return self._read(history, limit)

    def _jobs(self) -> list[tenure.JobRecord]:
        self._engine.check_running()
        from tenure.store.records import jobs  # noqa: PLC0415

        return self._read(jobs)

    def _read(self, read: Callable[..., T], *arguments: int) -> T:
        return self._engine.query(lambda store: read(store, self.role, *arguments))


class Election(BaseElection[Term]):
    """This node's candidacy for one role."""

    _make_term = Term

    def wait(self, timeout: float | None = None) -> Term:
        """Return the term as soon as this node leads; raise WaitTimeout after ``timeout`` seconds."""
        timeout = check_timeout(timeout)
        deadline = None if timeout is None else now() + timeout
        while True:
            self._check_standing()
            left = None if deadline is None else max(0.0, deadline - now())
            elected = self._engine.wait_for(lambda: self._elected, left)
            if (term := self.term) is not None:
                return term
            if not elected:
                raise self._not_elected(timeout)

    def leader(self) -> tenure.LeaderInfo | None:
        """Return the holder of the role, as the database knows it; None if the role is vacant."""
        return self._leader()

    def candidates(self) -> list[tenure.Candidate]:
        """Return the candidates for the role, in the order in which they joined."""
        return self._candidates()

    def history(self, limit: int = 20) -> list[tenure.TermRecord]:
        """Return the last terms of the role, newest first."""
        return self._history(check_limit(limit))

    def jobs(self) -> list[tenure.JobRecord]:
        """Return the jobs of the role whose runs were claimed (:meth:`Term.claim`), sorted by name."""
        return self._jobs()

    def resign(self, to: str | None = None) -> None:
        """Hand over now, to the candidate named ``to`` (its name or member id) if one is given.

        The node stands back for a TTL, or until it is the only candidate. Raises NotLeader if this node does not lead,
        and ConfigError if no other candidate has that name, or several have it; then nothing happens.
        """
        self._candidacy.resign(self._successor(to))
        self._wait_released()

    def withdraw(self) -> None:
        """Stop standing for the role; hand over first if this node leads."""
        self._candidacy.withdraw()
        self._wait_released()

    def _wait_released(self) -> None:
        self._engine.wait_for(lambda: self._candidacy.released, HAND_OVER_S)

    def events(self) -> Iterator[Event]:
        """Yield the events of this role from now on, until the node is closed."""
        events = _LatestEvents()
        return self._drain(events, self._candidacy.listen(events.put))

    def _drain(self, events: _LatestEvents, forget: Callable[[], None]) -> Iterator[Event]:
        try:
            while True:
                self._engine.check_own()
                event = events.get()
                if event is None:
                    return
                yield event
        finally:
            forget()


class _LatestEvents(queue.Queue[Event | None]):
    """A queue whose ``put()`` never waits: a reader that has fallen too far behind loses its oldest event."""

    def _init(self, _: int) -> None:
        self.queue = deque(maxlen=EVENTS_KEPT)
