"""An election: this node's candidacy for one role, and what one can ask about it."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from tenure import values
from tenure.backends import Backend
from tenure.clock import now
from tenure.engine import Engine, Lease
from tenure.errors import ConfigError, NotLeader, WaitTimeout
from tenure.events import Deposed, Elected, Event
from tenure.settings import check_limit
from tenure.term import Term
from tenure.values import Candidate, LeaderInfo, TermRecord

if TYPE_CHECKING:
    from tenure.dispatch import Dispatcher

HAND_OVER_S = 2.0
"""How long giving up a term waits for the database to hear of it."""
EVENTS_KEPT = 1000
"""How many events an idle reader may fall behind before it loses the oldest."""


class Election:
    """This node's candidacy for one role."""

    def __init__(self, engine: Engine, dispatcher: Dispatcher, role: str) -> None:
        """Made by the node, not by you."""
        self.role = role
        self._engine = engine
        self._dispatcher = dispatcher
        self._term: Term | None = None
        self._callbacks: list[Callable[[Event], object]] = []
        self._readers: list[queue.Queue[Event | None]] = []

    def __repr__(self) -> str:
        """Show the role and whether this node leads."""
        return f"<Election role={self.role!r} is_leader={self.is_leader}>"

    @property
    def is_leader(self) -> bool:
        """Whether this node leads, at this moment. No I/O and no lock: a deadline is compared with the clock."""
        term = self._term
        return term is not None and now() < term._lease.deadline and self._term is term  # noqa: SLF001

    @property
    def term(self) -> Term | None:
        """The term that this node holds and that is valid now; else None."""
        term = self._term
        return term if term is not None and term.valid else None

    @property
    def standing(self) -> bool:
        """Whether this node stands for the role; False after :meth:`withdraw`."""
        return self.role in self._engine.protocol.roles.standing

    def wait(self, timeout: float | None = None) -> Term:
        """Return the term as soon as this node leads; raise WaitTimeout after ``timeout`` seconds."""
        deadline = None if timeout is None else now() + timeout
        while True:
            self._engine.check_running()
            if not self.standing:
                raise NotLeader(f"role {self.role!r}: this node has withdrawn; stand again with node.election()")
            left = None if deadline is None else max(0.0, deadline - now())
            elected = self.wait_for(lambda: self.is_leader or not self._engine.running, left)
            term = self.term
            if term is not None:
                return term
            if not elected:
                raise WaitTimeout(f"role {self.role!r}: not elected within {timeout:g} s")

    def next_term(self, after: int) -> Term | None:
        """Wait for a term with a token above ``after``; None if the node was closed meanwhile."""

        def newer() -> Term | None:
            term = self.term
            return term if term is not None and term.token > after else None

        self.wait_for(lambda: newer() is not None or not self._engine.running, None)
        return newer()

    def leader(self) -> LeaderInfo | None:
        """Return who holds the role, as the database knows it; None if nobody does."""
        return self._engine.query(lambda store: values.leader(store, self.role))

    def candidates(self) -> list[Candidate]:
        """Return who stands for the role, in the order in which they joined."""
        return self._engine.query(lambda store: values.candidates(store, self.role))

    def history(self, limit: int = 20) -> list[TermRecord]:
        """Return the last terms of the role, newest first."""
        checked = check_limit(limit)
        return self._engine.query(lambda store: values.history(store, self.role, checked))

    def resign(self, to: str | None = None) -> None:
        """Hand over now, to the candidate named ``to`` (its name or member id) if one is given.

        The node stands back for a TTL, or until nobody else stands. Raises NotLeader if this node does not lead, and
        ConfigError if nobody else of that name stands, or several do; then nothing happens.
        """
        if self._term is None:
            raise NotLeader(f"role {self.role!r}: this node does not lead, so it cannot resign")
        member_id = self._candidate(to) if to is not None else None
        self._engine.command(lambda protocol, now: protocol.resign(self.role, now, member_id))
        self._told()

    def withdraw(self) -> None:
        """Stop standing for the role; hand over first if this node leads."""
        self._engine.command(lambda protocol, now: protocol.withdraw(self.role, now))
        self._told()

    def _told(self) -> None:
        """Wait until the database, if it can be reached, knows that the term was given up: no fence passes then."""
        untold = self._engine.protocol.roles.untold
        self.wait_for(lambda: self.role not in untold or not self._engine.running, HAND_OVER_S)

    def on_event(self, callback: Callable[[Event], object]) -> None:
        """Call ``callback(event)`` for every event of this role, on a thread for callbacks."""
        self._callbacks.append(callback)
        self._engine.command(lambda protocol, _: protocol.observe(self.role))

    def events(self) -> Iterator[Event]:
        """Yield the events of this role from now on, until the node is closed."""
        reader: queue.Queue[Event | None] = queue.Queue(EVENTS_KEPT)
        self._readers.append(reader)
        self._engine.command(lambda protocol, _: protocol.observe(self.role))
        return self._drain(reader)

    def _drain(self, reader: queue.Queue[Event | None]) -> Iterator[Event]:
        try:
            while (event := reader.get()) is not None:
                yield event
        finally:
            self._readers.remove(reader)

    def _candidate(self, to: str) -> str:
        me = self._engine.protocol.member_id
        standing = [candidate for candidate in self.candidates() if candidate.member_id != me]
        ids = [candidate.member_id for candidate in standing if to in (candidate.name, candidate.member_id)]
        if not ids:
            names = ", ".join(repr(candidate.name) for candidate in standing) or "none"
            raise ConfigError(f"role {self.role!r}: nobody else named {to!r} stands for it; others are {names}")
        if len(ids) > 1:
            raise ConfigError(
                f"role {self.role!r}: {len(ids)} candidates are named {to!r}; give an id: {', '.join(ids)}"
            )
        return ids[0]

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

    def wait_for(self, condition: Callable[[], bool], timeout: float | None) -> bool:
        """Wait until the condition holds; False if ``timeout`` seconds pass first."""
        with self._engine.changed:
            return self._engine.changed.wait_for(condition, timeout)

    def check_running(self) -> None:
        """Raise NodeClosed unless the node runs, here in this process."""
        self._engine.check_running()

    def settle(self) -> None:
        """Let a deadline that has passed be announced before anybody asks why."""
        with self._engine.lock:
            self._engine.expire()

    def on_lost(self, term: Term, callback: Callable[[Term], object]) -> None:
        """Have a term's end reported."""
        with self._engine.lock:
            if term.lost_reason is None:
                term._callbacks.append(callback)  # noqa: SLF001
                return
        self._dispatcher.call(lambda: callback(term))

    def happened(self, event: Event, lease: Lease, member_id: str) -> None:
        """Take in an event of this role, under the engine's lock."""
        if isinstance(event, Elected):
            self._term = Term(self, event.token, member_id, lease)
        elif isinstance(event, Deposed) and self._term is not None:
            term, self._term = self._term, None
            for lost in term.lose(event.reason):
                self._dispatcher.call(lambda lost=lost: lost(term))  # type: ignore[misc]
        for callback in self._callbacks:
            self._dispatcher.call(lambda callback=callback: callback(event))  # type: ignore[misc]
        for reader in list(self._readers):
            _put(reader, event)

    def close(self) -> None:
        """End the readers of events."""
        for reader in list(self._readers):
            _put(reader, None)


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
