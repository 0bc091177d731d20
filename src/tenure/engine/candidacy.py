"""This node's candidacy for one role, and the terms that result from it.

Each exists once in a process, whichever facade uses it. Every ``Election`` and ``AsyncElection`` of a role is a view of
one candidacy. Their terms are views of one holding: they have the same token and end at the same moment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from tenure.base import clock
from tenure.core.timing import LONG_AGO
from tenure.errors import LeadershipLost
from tenure.events import Deposed, Elected, Event

if TYPE_CHECKING:
    from tenure.engine.engine import Engine

Listener = Callable[[Event | None], object]


class Lease:
    """The deadline of a node's terms. Only the engine writes it; any thread reads it, without a lock."""

    __slots__ = ("deadline",)

    def __init__(self) -> None:
        self.deadline = LONG_AGO


@dataclass(eq=False, repr=False)
class Holding:
    """What this node knows about one of its terms. Only the candidacy ends it; any thread reads it, without a lock.

    It has everything that a fence needs to know about a term (``TermIdentity``).
    """

    role: str
    token: int
    member_id: str
    namespace: str
    schema: str
    file: str
    lease: Lease
    reason: str | None = None
    """Why the term is over; None while it is not."""
    on_end: list[Callable[[], object]] = field(default_factory=list)
    """Functions that are called when the term is over. They run under the engine's lock, so they must be quick."""
    views: dict[object, Any] = field(default_factory=dict)
    """The ``Term`` or ``AsyncTerm`` that each election shows for it."""

    @property
    def valid(self) -> bool:
        """Whether the term may be acted on at this moment. A term that was given up may still have a trusted lease."""
        # The deadline is read first: this thread may be stopped between the two reads for longer than the lease lasts.
        return self.lease.deadline > clock.now() and self.reason is None

    @property
    def in_doubt(self) -> bool:
        """Whether the node does not know yet if the term goes on or is over."""
        return self.reason is None and not self.valid

    def raise_if_lost(self) -> None:
        """Raise LeadershipLost if the term is over."""
        if self.reason is not None:
            msg = f"role {self.role!r}: the term with token {self.token} is over ({self.reason})"
            raise LeadershipLost(msg, role=self.role, token=self.token)


class Candidacy:
    """This node's candidacy for one role."""

    def __init__(self, engine: Engine, role: str) -> None:
        self.engine = engine
        self.role = role
        self.of_services = False
        """Whether the node's services decide when to stand for the role and when to withdraw."""
        self.latest: Holding | None = None
        """The last term that this node was elected to. It may be over."""
        self.listeners: list[Listener] = []

    @property
    def holding(self) -> Holding | None:
        """The term that this node holds and that is valid now."""
        latest = self.latest
        return latest if latest is not None and latest.valid else None

    @property
    def standing(self) -> bool:
        """Whether the node is a candidate for the role."""
        return self.role in self.engine.protocol.roles.standing

    @property
    def released(self) -> bool:
        """Whether the database has recorded that the term was given up, so no fence passes, or the node is closed."""
        return self.role not in self.engine.protocol.roles.unreleased or not self.engine.running

    def stand(self) -> None:
        """Become a candidate for the role, unless the node already is one."""
        with self.engine.lock:
            self.engine.check_running()
            if not self.standing:
                self.engine.recorder.stood(self.role, clock.now())
            self.engine.command(lambda protocol, _: protocol.stand(self.role))

    def resign(self, to: str | None = None) -> None:
        """Hand over if this node leads, to the member ``to`` if one is given; do not wait for the database."""
        self.engine.command(lambda protocol, now: protocol.resign(self.role, now, to))

    def withdraw(self) -> None:
        """Hand over if this node leads, and stop standing for the role; do not wait for the database."""
        self.engine.command(lambda protocol, now: protocol.withdraw(self.role, now))

    def begin_work(self) -> None:
        """Keep the role from other nodes, even if it is given up, until ``end_work()``."""
        self.engine.command(lambda protocol, _: protocol.roles.held_for_work.add(self.role))

    def end_work(self) -> None:
        """Leave the role to other nodes if it was given up."""
        self.engine.command(lambda protocol, _: protocol.roles.held_for_work.discard(self.role))

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Call ``listener`` with every event of the role, and with None when the node is closed.

        It is called under the engine's lock, so it must be quick. Return a function that removes it.
        """
        # Under the lock, no event comes between these two calls.
        with self.engine.lock:
            self.engine.command(lambda protocol, _: protocol.observe(self.role))
            self.listeners.append(listener)
        return lambda: self.listeners.remove(listener)

    # For the engine, under its lock

    def happened(self, event: Event) -> None:
        """Begin or end the term that the event is about."""
        engine = self.engine
        if isinstance(event, Elected):
            member_id, settings, file = engine.member_id or "", engine.settings, engine.backend.file
            self.latest = Holding(
                self.role, event.token, member_id, settings.namespace, settings.schema, file, engine.lease
            )
        elif isinstance(event, Deposed) and self.latest is not None:
            self.latest.reason = event.reason

    def pass_on(self, event: Event | None) -> None:
        """Pass the event to every listener; at the end of a term, call its ``on_end`` functions first."""
        call = self.engine.call_safely
        if isinstance(event, Deposed) and self.latest is not None:
            callbacks, self.latest.on_end = self.latest.on_end, []
            for callback in callbacks:
                call(callback)
        for listener in list(self.listeners):
            call(partial(listener, event))
