"""The numbers that a node measures about itself.

The engine writes a few numbers per renewal, under its lock. Any thread reads them without a lock, because numbers that
belong together are replaced as a whole. Nothing here asks the database: the reply to a renewal names the vacant roles,
so all others have a leader.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tenure.base import clock
from tenure.core import messages, timing
from tenure.core.roles import Roles
from tenure.events import Deposed, Elected, EndReason, Event, LeaderChanged, Suspended

if TYPE_CHECKING:
    from tenure.engine.candidacy import Candidacy
    from tenure.engine.engine import Engine

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


@dataclass(frozen=True)
class RoleStats:
    """What a node knows about a role that it stands for, or stood for.

    ``token`` is that of the term held, else 0. ``transitions`` counts since the node was created: ``elected``,
    ``suspended``, ``resumed``, and the ends of terms by reason (``resigned``, ``left``, ``lapsed``, ``cut``,
    ``replaced``, ``ended``, ``taken``).
    """

    role: str
    standing: bool
    is_leader: bool
    token: int
    transitions: Mapping[str, int]
    leader_seen_ago: float | None
    """Seconds since this node last saw the role held, by itself or by another node; if it never did, since it became a
    candidate; None if it is not a candidate. A follower checks this with every renewal."""


@dataclass(frozen=True)
class JobStats:
    """What a node knows about a job of its schedule, while it leads and afterwards.

    ``runs`` counts since the node was created, by outcome: ``done``, ``failed``, ``interrupted``, ``lost`` and
    ``skipped``. The last two count runs and due times that this node has recorded for earlier leaders, too.
    """

    role: str
    job: str
    runs: Mapping[str, int]
    succeeded_ago: float | None
    """Seconds since a run on this node last succeeded; None if none has."""
    overdue: float
    """For how many seconds a run has been due that has not begun, if this node leads; else 0."""


@dataclass(frozen=True)
class NodeStats:
    """What a node measured: counts since it was created, and seconds at the moment of the call."""

    node: str
    namespace: str
    ttl: float
    trust_remaining: float
    """Seconds until the terms of this node lapse unless the lease is renewed; 0 in doubt, and while it has no lease."""
    renewed_ago: float | None
    """Seconds since the lease was last renewed; if it never was, since the start; None if the node is not running."""
    renewals: Latency
    renewals_failed: int
    """Renewals that were refused or got no answer. While there is no connection at all, none is sent."""
    roles: tuple[RoleStats, ...]
    jobs: tuple[JobStats, ...] = ()
    """The jobs of the schedules that this node has run."""


class StatsRecorder:
    """The numbers of one node."""

    def __init__(self) -> None:
        self.renewals = Latency(0, 0.0, tuple((bound, 0) for bound in (*BUCKETS_S, float("inf"))))
        self.renewals_failed = 0
        self.renewed_at = timing.LONG_AGO
        self._transitions: dict[str, dict[str, int]] = {}
        self._seen: dict[str, float] = {}
        self._runs: dict[tuple[str, str], dict[str, int]] = {}
        self._succeeded: dict[tuple[str, str], float] = {}
        self.overdue: dict[tuple[str, str], Callable[[], float]] = {}
        """For each job, by role, whose schedule runs here: a function that returns for how long it is overdue."""

    # Under the engine's lock

    def started(self, now: float) -> None:
        """Record that the node was started."""
        self.renewed_at = now

    def stood(self, role: str, now: float) -> None:
        """Record that the node stands for ``role`` from now on."""
        self._seen[role] = now
        # Written last: readers take the roles from here, and expect to find each of them in _seen.
        self._transitions.setdefault(role, dict.fromkeys(TRANSITIONS, 0))

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
            self._seen.update(dict.fromkeys(roles.standing - roles.unregistered - vacant - dropped, now))
        elif isinstance(answer, messages.Standing):
            self.failed(request)

    def failed(self, request: messages.ControlRequest) -> None:
        """Record that a request failed."""
        if isinstance(request, (messages.Renew, messages.Resume)):
            self.renewals_failed += 1

    def happened(self, event: Event, now: float, trusted_before: float) -> None:
        """Record an event. This node led until ``trusted_before``, the deadline that was public before the event."""
        if isinstance(event, LeaderChanged) or event.role not in self._transitions:
            return
        if isinstance(event, Elected):
            self._seen[event.role] = now
        elif isinstance(event, (Suspended, Deposed)):
            self._seen[event.role] = max(self._seen[event.role], min(now, trusted_before))
        kind = REASONS.get(event.reason, "other") if isinstance(event, Deposed) else type(event).__name__.lower()
        counts = self._transitions[event.role]
        counts[kind] = counts.get(kind, 0) + 1

    # From the event loop of a schedule

    def scheduled(self, role: str, job: str) -> None:
        """Record that a job is in a schedule of this node."""
        self._runs.setdefault((role, job), dict.fromkeys(OUTCOMES, 0))

    def ran(self, role: str, job: str, outcome: str, number: int = 1) -> None:
        """Record how a run ended, or that due times were skipped."""
        self._runs[role, job][outcome] += number
        if outcome == "done":
            self._succeeded[role, job] = clock.now()

    # From any thread, without the lock

    def job_stats(self, now: float) -> tuple[JobStats, ...]:
        """Return what is known about the jobs of this node's schedules."""
        found = []
        for (role, job), runs in list(self._runs.items()):
            succeeded = self._succeeded.get((role, job))
            overdue = self.overdue.get((role, job))
            found.append(
                JobStats(
                    *(role, job, runs.copy(), None if succeeded is None else now - succeeded),
                    overdue=0.0 if overdue is None else overdue(),
                )
            )
        return tuple(found)

    def roles(self) -> list[str]:
        """Return the roles that the node stands or stood for."""
        return list(self._transitions)

    def role_stats(self, candidacy: Candidacy, now: float, *, running: bool) -> RoleStats:
        """Return what is known about a role now."""
        role, holding, standing = candidacy.role, candidacy.holding, running and candidacy.standing
        seen_ago = max(0.0, now - self._seen[role]) if holding is None else 0.0
        token, transitions = holding.token if holding else 0, self._transitions[role].copy()
        return RoleStats(role, standing, holding is not None, token, transitions, seen_ago if standing else None)


def stats_of(engine: Engine) -> NodeStats:
    """Return the numbers that a node has measured. Takes no lock."""
    engine.check_own()
    recorder, now, running = engine.recorder, clock.now(), engine.running
    return NodeStats(
        node=engine.settings.name,
        namespace=engine.settings.namespace,
        ttl=engine.ttl,
        trust_remaining=max(0.0, engine.lease.deadline - now) if running else 0.0,
        renewed_ago=max(0.0, now - recorder.renewed_at) if running else None,
        renewals=recorder.renewals,
        renewals_failed=recorder.renewals_failed,
        roles=tuple(recorder.role_stats(engine.candidacy(role), now, running=running) for role in recorder.roles()),
        jobs=recorder.job_stats(now),
    )
