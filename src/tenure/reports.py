"""What operators read about a namespace, as plain values: ``--json`` of the command line, and the dashboard.

Both show the same, so both have it from here.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import zip_longest

from tenure import (
    Candidate,
    JobRecord,
    LeaderInfo,
    MemberInfo,
    NotLeader,
    Overview,
    Registry,
    RoleInfo,
    RunRecord,
    TermRecord,
    WaitInfo,
)
from tenure.base.clock import now
from tenure.base.durations import duration, exact
from tenure.databases.doctor import Finding, diagnosed, examination_of
from tenure.events import EndReason
from tenure.settings import NodeSettings


def to_json(value: object, indent: int | None = 2) -> str:
    """Return values as JSON."""
    return json.dumps(value, default=_jsonable, indent=indent)


def _jsonable(value: object) -> object:
    if isinstance(value, datetime):
        return value.isoformat()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    raise TypeError(type(value).__name__)


@dataclass(frozen=True)
class Status:
    """A namespace: every role with its leader, every living member, and what the nodes are waiting for."""

    namespace: str
    as_of: datetime
    roles: list[RoleInfo]
    members: list[MemberInfo]
    waits: list[WaitInfo]
    unattended: str | None
    """That no member renews any more; None if one does."""

    @classmethod
    def of(cls, registry: Registry) -> Status:
        """Read the namespace from the database."""
        return cls.made(registry.overview(), registry.waits())

    @classmethod
    def made(cls, overview: Overview, waits: list[WaitInfo]) -> Status:
        """Put together what was read."""
        return cls(overview.namespace, overview.as_of, overview.roles, overview.members, waits, overview.unattended)


def state_of_role(role: RoleInfo) -> str:
    """Return the state of a role: overdue, vacant (though it has candidates), led, or idle (it has no candidates)."""
    if role.leader is not None:
        return "overdue" if role.overdue else "led"
    return "vacant" if role.candidates else "idle"


def standing_by(role: RoleInfo) -> int:
    """Return how many candidates do not lead. The leader is one of the candidates, unless it is about to leave."""
    return max(0, role.candidates - (role.leader is not None))


LATE = 0.5
"""After which part of its TTL a member is late: a node renews every quarter of it, and no setting lets it wait for
half of it."""


def is_overdue(member: MemberInfo | Candidate) -> bool:
    """Whether a member has not renewed within its TTL."""
    return member.renewed_ago > member.ttl


def is_late(member: MemberInfo | Candidate) -> bool:
    """Whether a member has missed a renewal or more: it may hang, and others notice that when its lease is over."""
    return not is_overdue(member) and member.renewed_ago > LATE * member.ttl


def by_name(members: Iterable[MemberInfo]) -> list[MemberInfo]:
    """Return members in the order of their names, the overdue ones before all others."""
    return sorted(members, key=lambda member: (not member.overdue, member.name))


@dataclass(frozen=True)
class RoleDetail:
    """One role: its leader, its candidates and its last terms."""

    namespace: str
    as_of: datetime
    role: RoleInfo
    candidates: list[Candidate]
    terms: list[HistoryRow]
    """The last terms, newest first."""
    waits: list[WaitInfo]
    unattended: str | None
    """As in :class:`Status`."""

    @classmethod
    def of(cls, registry: Registry, name: str, terms: int) -> RoleDetail:
        """Read a role from the database; raise ConfigError if there is no such role."""
        role = registry.role(name)
        waits = [wait for wait in registry.waits() if wait.role in (None, name)]
        candidates, last = registry.candidates(name), last_terms(registry, name, terms)
        overview = registry.overview()
        return cls(registry.namespace, overview.as_of, role, candidates, last, waits, overview.unattended)


@dataclass(frozen=True)
class Reading:
    """One line of ``tenure watch --json``. While the database cannot be reached, only ``error`` has a value."""

    namespace: str
    as_of: datetime | None
    roles: list[RoleInfo] | None
    members: list[MemberInfo] | None
    error: str | None
    unattended: str | None
    """As in :class:`Status`."""

    @classmethod
    def of(cls, namespace: str, look: Overview | str) -> Reading:
        """Return what was read, or why it could not be read."""
        if isinstance(look, str):
            return cls(namespace, None, None, None, look, None)
        return cls(namespace, look.as_of, look.roles, look.members, None, look.unattended)


@dataclass(frozen=True)
class HandOver:
    """What came of a request to resign."""

    role: str
    before: TermRecord | None
    """The term that ended; None if the history has lost it."""
    after: LeaderInfo | None
    """Who leads now; None if there is no other candidate."""
    seconds: float
    """How long that took, from the request on."""

    @classmethod
    def ask(cls, registry: Registry, role: str, to: str | None, timeout: float) -> HandOver:
        """Ask the leader to resign, and wait until it has. Raise NotLeader if no member renews any more."""
        if (unattended := registry.overview().unattended) is not None:
            raise NotLeader(f"nothing was done: {unattended}")
        asked = now()
        after = registry.resign(role, to, timeout)
        seconds = now() - asked
        ended = (term for term in registry.history(role, 5) if after is None or term.token < after.token)
        return cls(role, next(ended, None), after, seconds)


# Terms -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HistoryRow:
    """A term of the history, and how long the role was without a leader before it."""

    token: int
    name: str
    member_id: str
    began: datetime
    ended: datetime | None
    reason: str | None
    gap: float | None
    """Seconds since the end of the previous term, as it was recorded."""
    last_seen: datetime | None
    """The last sign of life of a leader that died or fell silent. If the term has not ended, its leader is silent."""
    silence: float | None
    """Seconds since the last sign of life of the previous leader: the longest possible time without a leader."""

    def lasted(self, as_of: datetime) -> float:
        """Return for how many seconds the term is known to have lasted: until the leader's last sign of life."""
        return ((self.last_seen or self.ended or as_of) - self.began).total_seconds()

    def gap_before(self) -> str:
        """Return how long no node led before the term: one time, or the shortest and the longest possible.

        It is unknown if the term before lapsed, or is not recorded any more.
        """
        if self.silence is None or self.gap is None:
            return "-" if self.token == 1 else "unknown"
        shortest, longest = duration(self.gap), duration(self.silence)
        return shortest if shortest == longest else f"{shortest} to {longest}"

    def end(self, as_of: datetime) -> str:
        """Return how the term ended, for people."""
        if self.ended is None and self.last_seen is not None:
            return f"silent {duration((as_of - self.last_seen).total_seconds())}"
        return self.reason or "goes on"


def last_terms(registry: Registry, role: str, count: int) -> list[HistoryRow]:
    """Read the last terms of a role, newest first."""
    return with_gaps(registry.history(role, count + 1))[:count]


def with_gaps(records: list[TermRecord]) -> list[HistoryRow]:
    """Return the terms, each with the time since the end of the previous term."""
    rows = []
    for record, earlier in zip_longest(records, records[1:]):
        # If a term lapsed, only its leader knows when.
        end = earlier.ended if earlier and earlier.reason != EndReason.LAPSED else None
        gap = (record.began - end).total_seconds() if end else None
        seen = (earlier.last_seen or end) if earlier and end else None
        silence = (record.began - seen).total_seconds() if seen else None
        term = record.token, record.name, record.member_id, record.began, record.ended, record.reason
        rows.append(HistoryRow(*term, gap, record.last_seen, silence))
    return rows


# Jobs --------------------------------------------------------------------------------------------------------------


def newest_tokens(jobs: Iterable[JobRecord]) -> dict[str, int]:
    """Return, for each role, the token of the last leader that had a schedule."""
    newest: dict[str, int] = {}
    for job in jobs:
        newest[job.role] = max(newest.get(job.role, 0), job.listed or 0)
    return newest


def led_roles(overview: Overview) -> set[str]:
    """Return the roles that have a leader that renews."""
    return {role.role for role in overview.roles if state_of_role(role) == "led"}


def state_of(job: JobRecord, newest: int, led: Collection[str]) -> str:
    """Return the state of a job, for people.

    ``newest`` is the token of the last leader that had a schedule, and ``led`` has the roles whose leader renews.
    """
    if job.paused is not None:
        return "paused" + (f": {job.paused_reason}" if job.paused_reason else "")
    if job.ahead:
        return "ahead"
    if not is_listed(job, newest):
        return "unknown"
    if job.overdue or awaits_leader(job, led):
        return "overdue" if job.overdue else "no leader"
    if job.last is not None and job.last.outcome in ("begun", "failed", "lost"):
        return "running" if job.last.outcome == "begun" else job.last.outcome
    return "ok"


def is_listed(job: JobRecord, newest: int) -> bool:
    """Whether the last leader that had a schedule has the job in it, as far as that is recorded."""
    return job.listed is None or job.listed >= newest


def awaits_leader(job: JobRecord, led: Collection[str]) -> bool:
    """Whether a job of a schedule has a next run, which does not begin before a node leads."""
    return job.next_due is not None and job.spec is not None and job.role not in led


def without_stale_next(jobs: Iterable[JobRecord], newest: Mapping[str, int]) -> list[JobRecord]:
    """Return jobs, without the next due time of those that the last leader's program does not have."""
    return [job if is_listed(job, newest[job.role]) else dataclasses.replace(job, next_due=None) for job in jobs]


def about_states(states: Iterable[str]) -> list[str]:
    """Return what has to be known about the states of jobs."""
    text = "unknown: the last leader's program does not have the job; it continues when a program leads that has it"
    return [text] if "unknown" in states else []


def definition(spec: str | None) -> str:
    """Return when a job is due. A job without a schedule is claimed by hand."""
    if spec is None:
        return "by hand"
    kind, _, text = spec.partition(" ")
    try:
        return f"every {exact(float(text))}" if kind == "every" else spec.removeprefix("cron ")
    except (ValueError, OverflowError):
        # The row was written by hand.
        return spec


def is_many(run: RunRecord) -> bool:
    """Whether a row is about due times that were not run, or about old rows."""
    return run.outcome in ("skipped", "folded")


def attempt(run: RunRecord) -> str:
    """Return which attempt a run was."""
    return "by request" if run.attempt == 0 else "-" if is_many(run) else str(run.attempt)


def first_line(detail: str) -> str:
    r"""Return the first line of what is recorded about a run: a driver's message may have many.

    A line break is recorded as ``\n``, and a backslash as two.
    """
    found = re.match(r"(?:[^\\\n]|\\[^n])*", detail)
    return found[0].rstrip() if found else detail


def took(run: RunRecord) -> str:
    """Return how long a run took. The end of a lost run is when another node found it, which says nothing."""
    if run.ended is None or run.outcome == "lost" or is_many(run):
        return "-"
    return duration((run.ended - run.began).total_seconds())


# Waits -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wait:
    """Something that does not happen yet, and why."""

    what: str
    """``role``, ``job`` or ``namespace``."""
    name: str
    reason: str
    seconds: float | None = None
    """For how long it has been waiting, by the database's clock; None if that is not recorded."""
    ends: datetime | None = None
    """When the wait ends, by the database's clock; None if that is not known."""


def all_waits(overview: Overview, of_nodes: Iterable[WaitInfo], jobs: Iterable[JobRecord]) -> list[Wait]:
    """Return every wait that is going on: those of the nodes, roles without a leader, and jobs."""
    found = [
        Wait("namespace" if wait.role is None else "role", wait.role or overview.namespace, wait.reason, ends=wait.ends)
        for wait in of_nodes
    ]
    if overview.unattended is not None:
        found.insert(0, Wait("namespace", overview.namespace, overview.unattended))
    vacant = [Wait("role", role.role, _vacant(role)) for role in overview.roles if role.leader is None]
    return [*found, *vacant, *(wait for job in jobs for wait in _job_waits(job, overview.as_of))]


def _vacant(role: RoleInfo) -> str:
    standing = "1 candidate stands" if role.candidates == 1 else f"{role.candidates or 'no'} candidates stand"
    return f"no leader; {standing} for it"


def _job_waits(job: JobRecord, as_of: datetime) -> Iterable[Wait]:
    if job.paused is not None:
        reason = "paused" + (f": {job.paused_reason}" if job.paused_reason else "")
        yield Wait("job", job.job, reason, (as_of - job.paused).total_seconds())
    elif job.overdue and job.next_due is not None:
        reason = f"the run that was due has not begun; role {job.role!r} has to have a leader with this schedule"
        yield Wait("job", job.job, reason, (as_of - job.next_due).total_seconds())
    if job.requested is not None:
        waiting = (as_of - job.requested).total_seconds()
        yield Wait("job", job.job, "a run was asked for, and the leader has not begun it yet", waiting)


# The database ------------------------------------------------------------------------------------------------------


def findings(settings: NodeSettings) -> list[Finding]:
    """Return what ``tenure doctor`` finds about a database."""
    return diagnosed(examination_of(settings))
