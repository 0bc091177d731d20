"""The numbers that a node has measured about itself, as users read them; ``engine/recorder.py`` records them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tenure.base import clock

if TYPE_CHECKING:
    from tenure.engine.candidacy import Candidacy
    from tenure.engine.engine import Engine
    from tenure.engine.recorder import Latency, StatsRecorder


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
        roles=tuple(
            _role_stats(recorder, engine.candidacy(role), now, running=running) for role in list(recorder.transitions)
        ),
        jobs=_job_stats(recorder, now),
    )


def _role_stats(recorder: StatsRecorder, candidacy: Candidacy, now: float, *, running: bool) -> RoleStats:
    """Return what is known about a role now."""
    role, holding, standing = candidacy.role, candidacy.holding, running and candidacy.standing
    seen_ago = max(0.0, now - recorder.seen[role]) if holding is None else 0.0
    token, transitions = holding.token if holding else 0, recorder.transitions[role].copy()
    return RoleStats(role, standing, holding is not None, token, transitions, seen_ago if standing else None)


def _job_stats(recorder: StatsRecorder, now: float) -> tuple[JobStats, ...]:
    """Return what is known about the jobs of this node's schedules."""
    found = []
    for (role, job), runs in list(recorder.runs.items()):
        succeeded = recorder.succeeded.get((role, job))
        overdue = recorder.overdue.get((role, job))
        found.append(
            JobStats(
                *(role, job, runs.copy(), None if succeeded is None else now - succeeded),
                overdue=0.0 if overdue is None else overdue(),
            )
        )
    return tuple(found)
