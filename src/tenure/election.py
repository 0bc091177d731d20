"""An election: this node's candidacy for one role, and what one can ask about it."""

from __future__ import annotations

import functools
import queue
import time
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from tenure import values
from tenure.backends import Backend
from tenure.clock import now
from tenure.engine import Engine, Lease
from tenure.errors import ConfigError, NotLeader, WaitTimeout
from tenure.events import Deposed, Elected, Event
from tenure.settings import check_callback, check_limit, check_name, check_timeout
from tenure.store import Store
from tenure.term import BaseTerm, Term
from tenure.values import Candidate, JobRecord, LeaderInfo, TermRecord

HAND_OVER_S = 2.0
"""How long giving up a term waits for the database to hear of it."""
EVENTS_KEPT = 1000
"""How many events an idle reader may fall behind before it loses the oldest."""


T = TypeVar("T")
TermT = TypeVar("TermT", bound=BaseTerm)


class BaseElection(Generic[TermT]):
    """What a candidacy is, whoever waits for it."""

    make_term: Callable[[BaseElection[TermT], int, str, Lease], TermT]

    def __init__(self, engine: Engine, role: str, call: Callable[[Callable[[], object]], object]) -> None:
        """Made by the node, not by you; ``call`` has the application's callbacks called where they belong."""
        self.role = role
        self._engine = engine
        self._call = call
        self._term: TermT | None = None
        self._callbacks: list[Callable[[Event], object]] = []
        self._readers: list[Callable[[Event | None], object]] = []
        self.of_services = False
        """Whether the candidacy is the business of services, which take it up and give it up as they can."""

    def __repr__(self) -> str:
        """Show the role and whether this node leads."""
        return f"<{type(self).__name__} role={self.role!r} is_leader={self.is_leader}>"

    @property
    def is_leader(self) -> bool:
        """Whether this node leads, at this moment. No I/O and no lock: a deadline is compared with the clock."""
        term = self._term
        return term is not None and now() < term._lease.deadline and self._term is term  # noqa: SLF001

    @property
    def term(self) -> TermT | None:
        """The term that this node holds and that is valid now; else None."""
        term = self._term
        return term if term is not None and term.valid else None

    @property
    def standing(self) -> bool:
        """Whether this node stands for the role; False after :meth:`withdraw`."""
        return self.role in self._engine.protocol.roles.standing

    @property
    def settled(self) -> bool:
        """Whether it is decided for now: who looks dead has been dealt with, and the role tried for if it is vacant."""
        return self._engine.protocol.settled

    def on_event(self, callback: Callable[[Event], object]) -> None:
        """Call ``callback(event)`` for every event of this role; where, :meth:`BaseTerm.on_lost` says."""
        check_callback(callback)
        self._callbacks.append(callback)
        self._engine.command(lambda protocol, _: protocol.observe(self.role))

    # For the term and the node ---------------------------------------------------------------------------------

    @property
    def namespace(self) -> str:
        """The namespace of the role."""
        return self._engine.settings.namespace

    @property
    def schema(self) -> str:
        """The schema of Tenure's tables (PostgreSQL)."""
        return self._engine.settings.schema

    @property
    def ttl(self) -> float:
        """The node's TTL."""
        return self._engine.settings.ttl

    @property
    def backend(self) -> Backend:
        """The way to the database."""
        return self._engine.backend

    @property
    def has_no_token(self) -> bool:
        """Whether the role is a lock and nothing else (mode ``lock``)."""
        return self._engine.backend.book is not None

    def check_running(self) -> None:
        """Raise NodeClosed unless the node runs, here in this process."""
        self._engine.check_running()

    def settle(self) -> None:
        """Let a deadline that has passed be announced before anybody asks why."""
        with self._engine.lock:
            self._engine.expire()

    def on_lost(self, term: BaseTerm, callback: Callable[[Any], object]) -> None:
        """Have a term's end reported."""
        check_callback(callback)
        with self._engine.lock:
            if term.lost_reason is None:
                self._engine.check_own()
                term._callbacks.append(callback)  # noqa: SLF001
                return
        self._call(lambda: callback(term))

    def happened(self, event: Event, lease: Lease, member_id: str) -> None:
        """Take in an event of this role, under the engine's lock."""
        if isinstance(event, Elected):
            self._term = type(self).make_term(self, event.token, member_id, lease)
        elif isinstance(event, Deposed) and self._term is not None:
            term, self._term = self._term, None
            for lost in term.lose(event.reason):
                self._call(lambda lost=lost: lost(term))  # type: ignore[misc]
        for callback in self._callbacks:
            self._call(lambda callback=callback: callback(event))  # type: ignore[misc]
        for reader in list(self._readers):
            reader(event)

    def close(self) -> None:
        """End the readers of events."""
        for reader in list(self._readers):
            reader(None)

    def give_up(self, *, withdraw: bool, to: str | None = None) -> None:
        """Hand over if this node leads, and stop standing if ``withdraw``; do not wait for the database."""
        if withdraw:
            self._engine.command(lambda protocol, now: protocol.withdraw(self.role, now))
        else:
            self._engine.command(lambda protocol, now: protocol.resign(self.role, now, to))

    def work(self, *, goes_on: bool) -> None:
        """Tell whether work of the role goes on here: if it is given up meanwhile, others get it when it has ended."""
        working = self._engine.protocol.roles.working
        self._engine.command(lambda *_: working.add(self.role) if goes_on else working.discard(self.role))

    # For the facades -------------------------------------------------------------------------------------------

    @property
    def _told(self) -> bool:
        """Whether the database knows that the term was given up, as far as it can be reached: no fence passes then."""
        return self.role not in self._engine.protocol.roles.untold or not self._engine.running

    @property
    def _elected(self) -> bool:
        """Whether there is nothing to wait for."""
        return self.is_leader or not self._engine.running

    def _check_over(self, term: TermT | None) -> None:
        """Raise if a loop over ``terms()`` goes on while its term stands: it would wait for ever."""
        self.settle()
        if term is not None and term.lost_reason is None:
            raise ConfigError(
                f"role {self.role!r}: the loop over terms() went on while the term with token {term.token} stands: do "
                "the work inside `with term:` (or `async with term:`), which hands over, or call term.resign()"
            )

    def _newer(self, term: TermT | None) -> TermT | None:
        """Return the present term if it is another one."""
        present = self.term
        return present if present is not term else None

    def _check_standing(self) -> None:
        self._engine.check_running()
        if not (self.standing or self.of_services):
            raise NotLeader(f"role {self.role!r}: this node has withdrawn; stand again with node.election()")

    def _not_elected(self, timeout: float | None) -> WaitTimeout:
        return WaitTimeout(f"role {self.role!r}: not elected within {timeout:g} s")

    def _query(self, question: Callable[[Store], T]) -> T:
        if self.has_no_token:
            raise ConfigError(
                "mode='lock' keeps no record of leaders and candidates: the server's pg_locks is all there is"
            )
        return self._engine.query(question)

    def _leader(self) -> LeaderInfo | None:
        return self._query(lambda store: values.leader(store, self.role))

    def _candidates(self) -> list[Candidate]:
        return self._query(lambda store: values.candidates(store, self.role))

    def _history(self, limit: int) -> list[TermRecord]:
        checked = check_limit(limit)
        return self._query(lambda store: values.history(store, self.role, checked))

    def _jobs(self) -> list[JobRecord]:
        return self._query(lambda store: values.jobs(store, self.role))

    def _check_resign(self, to: str | None) -> str | None:
        """Return the id of the member to hand over to; raise if this node does not lead, or there is no such one."""
        if self._term is None:
            raise NotLeader(f"role {self.role!r}: this node does not lead, so it cannot resign")
        return None if to is None else self._candidate(check_name("to", to))

    def _observe(self, reader: Callable[[Event | None], object]) -> None:
        with self._engine.lock:  # events come under it: none is lost between the two
            self._engine.command(lambda protocol, _: protocol.observe(self.role))
            self._readers.append(reader)

    def _candidate(self, to: str) -> str:
        me = self._engine.protocol.member_id
        return values.candidate_id(self.role, to, [one for one in self._candidates() if one.member_id != me])


class Election(BaseElection[Term]):
    """This node's candidacy for one role."""

    make_term = Term

    def wait(self, timeout: float | None = None) -> Term:
        """Return the term as soon as this node leads; raise WaitTimeout after ``timeout`` seconds."""
        timeout = check_timeout(timeout)
        deadline = None if timeout is None else now() + timeout
        while True:
            self._check_standing()
            elected = self.wait_for(lambda: self._elected, None if deadline is None else max(0.0, deadline - now()))
            term = self.term
            if term is not None:
                return term
            if not elected:
                raise self._not_elected(timeout)

    def next_term(self, after: Term | None) -> Term | None:
        """Wait for another term than ``after``; None if the node was closed meanwhile."""
        self._check_over(after)
        self.wait_for(lambda: self._newer(after) is not None or not self._engine.running, None)
        return self._newer(after)

    def leader(self) -> LeaderInfo | None:
        """Return who holds the role, as the database knows it; None if nobody does."""
        return self._leader()

    def candidates(self) -> list[Candidate]:
        """Return who stands for the role, in the order in which they joined."""
        return self._candidates()

    def history(self, limit: int = 20) -> list[TermRecord]:
        """Return the last terms of the role, newest first."""
        return self._history(limit)

    def jobs(self) -> list[JobRecord]:
        """Return the jobs of the role whose runs were claimed (:meth:`Term.claim`), by name."""
        return self._jobs()

    def resign(self, to: str | None = None) -> None:
        """Hand over now, to the candidate named ``to`` (its name or member id) if one is given.

        The node stands back for a TTL, or until nobody else stands. Raises NotLeader if this node does not lead, and
        ConfigError if nobody else of that name stands, or several do; then nothing happens.
        """
        self.give_up(withdraw=False, to=self._check_resign(to))
        self.wait_told()

    def withdraw(self) -> None:
        """Stop standing for the role; hand over first if this node leads."""
        self.give_up(withdraw=True)
        self.wait_told()

    def wait_told(self) -> None:
        """Wait until the database, if it can be reached, knows of a term that was given up."""
        self.wait_for(lambda: self._told, HAND_OVER_S)

    def wait_for(self, condition: Callable[[], bool], timeout: float | None) -> bool:
        """Wait until the condition holds; False if ``timeout`` seconds pass first."""
        self._engine.check_own()
        with self._engine.changed:
            return self._engine.changed.wait_for(condition, timeout)

    def events(self) -> Iterator[Event]:
        """Yield the events of this role from now on, until the node is closed."""
        events: queue.Queue[Event | None] = queue.Queue(EVENTS_KEPT)
        reader = functools.partial(_put, events)
        self._observe(reader)
        return self._drain(events, reader)

    def _drain(self, events: queue.Queue[Event | None], reader: Callable[[Event | None], object]) -> Iterator[Event]:
        try:
            while True:
                self._engine.check_own()
                event = events.get()
                if event is None:
                    return
                yield event
        finally:
            self._readers.remove(reader)


def _put(reader: queue.Queue[Event | None], event: Event | None) -> None:
    """Put without ever blocking: a reader that has fallen too far behind loses its oldest event."""
    while True:
        try:
            reader.put_nowait(event)
        except queue.Full:
            try:
                reader.get_nowait()
            except queue.Empty:
                time.sleep(0)
        else:
            return
