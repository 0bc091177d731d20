"""Counts what a node does, for :class:`tenure.NodeStats`.

The engine writes a few numbers per renewal, under its lock. Any thread reads them without a lock, because numbers that
belong together are replaced as a whole. Nothing here asks the database: the reply to a renewal names the vacant roles,
so all others have a leader.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from tenure.base import clock
from tenure.core import messages, timing
from tenure.core.roles import Roles
from tenure.events import Deposed, Elected, EndReason, Event, LeaderChanged, Suspended

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""The upper bounds of the histogram of latencies, in seconds."""

OF_THE_HISTORY = (EndReason.SILENCE, EndReason.DEATH, EndReason.SUPERSEDED)
"""The reasons that only the database knows."""
REASONS: dict[str, str] = {reason: reason.name.lower() for reason in EndReason if reason not in OF_THE_HISTORY}
"""The reasons for the end of a term, as in ``Deposed.reason``, and the word under which each is counted."""
OUTCOMES = ("done", "failed", "interrupted", "lost", "skipped")
TRANSITIONS = ("elected", "suspended", "resumed", *REASONS.values())


@dataclass(frozen=True)
class Latency:
    """How long successful renewals took, from the request to the reply.

    ``buckets`` are pairs of an upper bound in seconds and how many renewals took no longer. The last bound is infinite.
    """

    count: int
    seconds: float
    buckets: tuple[tuple[float, int], ...]

    def plus(self, seconds: float) -> Latency:
        """Return this with one more renewal."""
        first = bisect_left(BUCKETS_S, seconds)
        buckets = tuple((bound, n + (at >= first)) for at, (bound, n) in enumerate(self.buckets))
        return Latency(self.count + 1, self.seconds + seconds, buckets)


class StatsRecorder:
    """The numbers of one node."""

    def __init__(self) -> None:
        self.renewals = Latency(0, 0.0, tuple((bound, 0) for bound in (*BUCKETS_S, float("inf"))))
        self.renewals_failed = 0
        self.renewed_at = timing.LONG_AGO
        self.transitions: dict[str, dict[str, int]] = {}
        self.seen: dict[str, float] = {}
        self.runs: dict[tuple[str, str], dict[str, int]] = {}
        self.succeeded: dict[tuple[str, str], float] = {}
        self.overdue: dict[tuple[str, str], Callable[[], float]] = {}
        """For each job, by role, whose schedule runs here: a function that returns for how long it is overdue."""

    # Under the engine's lock

    def started(self, now: float) -> None:
        """Record that the node was started."""
        self.renewed_at = now

    def stood(self, role: str, now: float) -> None:
        """Record that the node stands for ``role`` from now on."""
        self.seen[role] = now
        # Written last: readers take the roles from here, and expect to find each of them in ``seen``.
        self.transitions.setdefault(role, dict.fromkeys(TRANSITIONS, 0))

    def answered(
        self, request: messages.ControlRequest, answer: messages.ControlReply, roles: Roles, seconds: float, now: float
    ) -> None:
        """Record a reply, after the protocol has processed it. Only a reply that renews the lease counts.

        A role that is not vacant has a living holder, with two exceptions. A role for which this node has not
        registered yet was not asked about. And a role whose row still names this node, with a token that the node has
        dropped, has no leader.
        """
        if isinstance(answer, messages.Joined) and answer.sentinel:
            self.renewed_at = now
        elif isinstance(answer, messages.Standing) and answer.alive:
            self.renewed_at = now
            self.renewals = self.renewals.plus(seconds)
            vacant = {vacancy.role for vacancy in answer.vacant}
            dropped = {mine.role for mine in answer.held} - roles.holding.keys()
            self.seen.update(dict.fromkeys(roles.standing - roles.unregistered - vacant - dropped, now))
        elif isinstance(answer, messages.Standing):
            self.failed(request)

    def failed(self, request: messages.ControlRequest) -> None:
        """Record that a request failed."""
        if isinstance(request, (messages.Renew, messages.Resume)):
            self.renewals_failed += 1

    def happened(self, event: Event, now: float, trusted_before: float) -> None:
        """Record an event. This node led until ``trusted_before``, the deadline that was public before the event."""
        if isinstance(event, LeaderChanged) or event.role not in self.transitions:
            return
        if isinstance(event, Elected):
            self.seen[event.role] = now
        elif isinstance(event, (Suspended, Deposed)):
            self.seen[event.role] = max(self.seen[event.role], min(now, trusted_before))
        kind = REASONS.get(event.reason, "other") if isinstance(event, Deposed) else type(event).__name__.lower()
        counts = self.transitions[event.role]
        counts[kind] = counts.get(kind, 0) + 1

    # From the event loop of a schedule

    def scheduled(self, role: str, job: str) -> None:
        """Record that a job is in a schedule of this node."""
        self.runs.setdefault((role, job), dict.fromkeys(OUTCOMES, 0))

    def ran(self, role: str, job: str, outcome: str, number: int = 1) -> None:
        """Record how a run ended, or that due times were skipped."""
        self.runs[role, job][outcome] += number
        if outcome == "done":
            self.succeeded[role, job] = clock.now()
