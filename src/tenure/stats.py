"""What a node measures about itself, and the values that it shows of it.

The engine writes, under its lock, a few numbers a renewal; anybody reads, without a lock, for what is read together is
replaced as a whole. Nothing here asks the database: whether somebody leads a role is read off the answer to a renewal,
which names the roles that nobody holds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

from tenure import asks
from tenure.candidacy import LONG_AGO, Candidacy
from tenure.events import Deposed, Elected, Event, LeaderChanged, Suspended

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of the latencies that are counted together, in seconds."""

REASONS = {
    "resigned": "resigned",
    "left": "left",
    "lapsed": "lapsed",
    "the connection was cut": "cut",
    "the server was replaced": "replaced",
    "the membership was ended": "ended",
    "the role was taken": "taken",
}
"""Why a term ends, as the protocol tells it, and the word under which that is counted."""
TRANSITIONS = ("elected", "suspended", "resumed", *REASONS.values())


@dataclass(frozen=True)
class Latency:
    """How long successful renewals took, from the question to the answer.

    ``buckets`` are pairs of an upper bound in seconds and how many took no longer than that, the last one unbounded.
    """

    count: int
    seconds: float
    buckets: tuple[tuple[float, int], ...]

    def plus(self, seconds: float) -> Latency:
        """Return this and one more."""
        first = bisect_left(BUCKETS_S, seconds)
        buckets = tuple((bound, n + (at >= first)) for at, (bound, n) in enumerate(self.buckets))
        return Latency(self.count + 1, self.seconds + seconds, buckets)


@dataclass(frozen=True)
class RoleStats:
    """What a node knows about a role that it stands for, or stood for.

    ``token`` is that of the term held, 0 while none is. ``transitions`` counts since the node was made: ``elected``,
    ``suspended``, ``resumed``, and the ends of terms by reason (``resigned``, ``left``, ``lapsed``, ``cut``,
    ``replaced``, ``ended``, ``taken``).
    """

    role: str
    standing: bool
    is_leader: bool
    token: int
    transitions: Mapping[str, int]
    leader_seen_ago: float | None
    """Seconds since this node last saw the role held, by itself or by another; since it stood, if never; None if it
    does not stand. A follower looks with every renewal."""


@dataclass(frozen=True)
class NodeStats:
    """What a node measured of itself: numbers since it was made, and seconds at the moment of asking."""

    node: str
    namespace: str
    ttl: float
    trust_remaining: float
    """Seconds until the terms of this node lapse unless the lease is renewed; 0 in doubt, and while it has no lease."""
    renewed_ago: float | None
    """Seconds since the lease was last renewed; since the node was started, if never; None while it does not run."""
    renewals: Latency
    renewals_failed: int
    """Renewals that were refused or got no answer. While there is no connection at all, none is sent."""
    roles: tuple[RoleStats, ...]


class Meter:
    """The numbers of one node."""

    def __init__(self) -> None:
        """Begin at zero."""
        self.renewals = Latency(0, 0.0, tuple((bound, 0) for bound in (*BUCKETS_S, float("inf"))))
        self.renewals_failed = 0
        self.renewed_at = LONG_AGO
        self._transitions: dict[str, dict[str, int]] = {}
        self._seen: dict[str, float] = {}

    # Under the engine's lock

    def started(self, now: float) -> None:
        """Take in that the node runs from now on."""
        self.renewed_at = now

    def stood(self, role: str, now: float) -> None:
        """Take in that the node stands for ``role`` from now on."""
        self._seen[role] = now
        self._transitions.setdefault(role, dict.fromkeys(TRANSITIONS, 0))  # last: who reads it asks for the rest

    def answered(
        self, ask: asks.ControlAsk, answer: asks.ControlAnswer, roles: Candidacy, seconds: float, now: float
    ) -> None:
        """Take in the answer to an ask, after the protocol has: only what renews the lease counts.

        A role that is not vacant has a living holder. But what was not asked about yet is not known; and one that the
        row still gives to this node, under a token that was dropped here, is led by nobody.
        """
        if isinstance(answer, asks.Joined) and answer.sentinel:
            self.renewed_at = now
        elif isinstance(answer, asks.Standing) and answer.alive:
            self.renewed_at = now
            self.renewals = self.renewals.plus(seconds)
            vacant = {vacancy.role for vacancy in answer.vacant}
            dropped = {mine.role for mine in answer.held} - roles.holding.keys()
            self._seen.update(dict.fromkeys(roles.standing - roles.unregistered - vacant - dropped, now))
        elif isinstance(answer, asks.Standing):
            self.failed(ask)

    def failed(self, ask: asks.ControlAsk) -> None:
        """Take in that an ask failed."""
        if isinstance(ask, (asks.Renew, asks.Resume)):
            self.renewals_failed += 1

    def happened(self, event: Event, now: float, believed_until: float) -> None:
        """Take in an event. Up to ``believed_until``, the deadline that was public before it, this node led."""
        if isinstance(event, LeaderChanged) or event.role not in self._transitions:
            return
        if isinstance(event, Elected):
            self._seen[event.role] = now
        elif isinstance(event, (Suspended, Deposed)):
            self._seen[event.role] = max(self._seen[event.role], min(now, believed_until))
        kind = REASONS.get(event.reason, "other") if isinstance(event, Deposed) else type(event).__name__.lower()
        counts = self._transitions[event.role]
        counts[kind] = counts.get(kind, 0) + 1

    # From anywhere

    def roles(self) -> list[str]:
        """Return the roles that the node stands or stood for."""
        return list(self._transitions)

    def transitions(self, role: str) -> dict[str, int]:
        """Return how often what happened to this node in ``role``."""
        return dict(self._transitions[role])

    def seen(self, role: str) -> float:
        """Return when ``role`` was last seen to be held."""
        return self._seen[role]
