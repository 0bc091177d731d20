"""Reads what operators want to know about a role, and returns it as plain values."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol

from tenure.base.durations import duration
from tenure.base.moments import moment, seconds_between, time_of
from tenure.errors import ConfigError, StoreUnavailable
from tenure.events import EndReason
from tenure.store import job_statements, statements
from tenure.store.session import Session, Step

FOUND_BY_OTHERS = (EndReason.DEATH, EndReason.SILENCE)
"""Why a term ended whose leader could not say so itself."""
SILENT = 1.25
"""A member that has not renewed for so many TTLs does not run."""


class Tables(Protocol):
    """The tables of one namespace, on an open connection."""

    @property
    def namespace(self) -> str:
        """The name of the namespace to which the rows belong."""

    @property
    def session(self) -> Session:
        """The connection on which the statements run."""


@dataclass(frozen=True)
class LeaderInfo:
    """The leader of a role."""

    role: str
    token: int
    member_id: str
    name: str
    since: datetime
    """When the term began, by the database's clock."""
    renewed_ago: float
    """Seconds since the leader's last renewal, by the database's clock. For display only: no election depends on it."""


@dataclass(frozen=True)
class Candidate:
    """A living member that stands for a role."""

    member_id: str
    name: str
    host: str
    pid: int
    takeover: str
    ttl: float
    renewed_ago: float
    metadata: dict[str, Any]


@dataclass(frozen=True)
class RoleInfo:
    """A role, its leader, and the number of its candidates."""

    role: str
    token: int
    leader: LeaderInfo | None
    overdue: bool
    """Whether the leader has not renewed within its TTL: it is dead, paused or cut off, and has no successor yet."""
    candidates: int


@dataclass(frozen=True)
class MemberInfo:
    """A living member, where it runs, and what it holds."""

    member_id: str
    name: str
    host: str
    pid: int
    version: str
    mode: str
    takeover: str
    ttl: float
    joined: datetime
    renewed_ago: float
    """Seconds since its last renewal, by the database's clock. Only for display: no decision uses it."""
    overdue: bool
    """Whether the member has not renewed within its TTL."""
    leads: tuple[str, ...]


@dataclass(frozen=True)
class Overview:
    """A namespace: every role with its leader, and every living member."""

    namespace: str
    as_of: datetime
    """When this was read, by the database's clock."""
    roles: list[RoleInfo]
    members: list[MemberInfo]

    @property
    def unattended(self) -> str | None:
        """What to tell people if no member renews any more, so that no node takes over; None if one does."""
        if not self.members or any(renews(member.renewed_ago, member.ttl) for member in self.members):
            return None
        last = min(self.members, key=lambda member: member.renewed_ago)
        return (
            f"no member of {self.namespace!r} has renewed within its TTL (last: {last.name}, "
            f"{duration(last.renewed_ago)} ago): no replica is running; start one"
        )


@dataclass(frozen=True)
class TermRecord:
    """One term in a role's history. ``ended`` and ``reason`` are None while the term goes on."""

    role: str
    token: int
    member_id: str
    name: str
    began: datetime
    ended: datetime | None
    reason: str | None
    last_seen: datetime | None = None
    """The last sign of life of a leader that died or fell silent: its last renewal. None for other reasons, and where
    it is not known any more. ``ended`` is when its death was noticed: None as long as no node has noticed it."""


@dataclass(frozen=True)
class JobRecord:
    """What is recorded about a job. The fields after ``token`` are those of a job in a :class:`~tenure.Schedule`."""

    job: str
    anchor: datetime | None
    """The moment from which the job's intervals are counted, if one was set."""
    claimed: datetime | None
    """The due time of the latest run that was claimed."""
    done: datetime | None
    """The due time of the latest run that was marked as done."""
    token: int
    """The token of the term that last changed this record."""
    role: str = ""
    spec: str | None = None
    """When the job is due: ``cron 30 2 * * * Europe/Paris`` or ``every 300``; None if it is in no schedule."""
    since: datetime | None = None
    """When this definition was first seen. Due times count from then on."""
    zone_data: str | None = None
    """What identifies the time zone data of the host that last led."""
    paused: datetime | None = None
    """When the job was paused; None if it is not."""
    paused_reason: str | None = None
    requested: datetime | None = None
    """When a run was asked for that has not begun yet."""
    listed: int | None = None
    """The token of the last term whose leader had the job in its schedule."""
    as_of: datetime | None = field(default=None, compare=False)
    """When this was read, by the database's clock."""
    jitter: float = 0.0
    """By how many seconds runs may be delayed."""
    next_due: datetime | None = None
    """When the next run is due; None if that is not known. Only a Registry fills it in."""
    overdue: bool = False
    """Whether a run should have begun more than a minute ago. Only a Registry fills it in."""
    last: RunRecord | None = field(default=None, compare=False)
    """The latest run, or the latest due times that were skipped. Only a Registry fills it in."""

    @property
    def ahead(self) -> bool:
        """Whether the last claimed run is in the future: the database's clock was ahead then, and is right again."""
        return self.claimed is not None and self.as_of is not None and self.claimed > self.as_of


@dataclass(frozen=True)
class RunRecord:
    """One row of the record of runs: an attempt at a run, or due times that were not run."""

    role: str
    job: str
    due: datetime
    """When the run was due; of several due times, the last."""
    first: datetime
    """Of several due times, the first; else the same as ``due``."""
    covers: int
    """For how many due times this accounts; 0 for a second attempt, and for a run that an operator asked for."""
    attempt: int
    """1 for the first attempt; 0 for a run that an operator asked for."""
    outcome: str
    """``begun``, ``done``, ``failed``, ``interrupted``, ``lost``, ``skipped``; or ``folded``, for old rows."""
    detail: str | None
    """Why it failed or was skipped."""
    token: int
    member: str | None
    """The node that wrote this."""
    began: datetime
    ended: datetime | None


@dataclass(frozen=True)
class GuardedTable:
    """A table of the application that only the leader of a role may write to."""

    table: str
    namespace: str
    role: str
    leaks: tuple[str, ...]
    """The ways in which a write could pass without the fence, each with its remedy."""


@contextlib.contextmanager
def readable() -> Iterator[None]:
    """Raise StoreUnavailable if a row holds a value of the wrong type: SQLite accepts any value in any column."""
    try:
        yield
    except ConfigError:
        raise
    except (TypeError, ValueError, OverflowError) as error:
        raise StoreUnavailable(
            f"a row of Tenure's tables cannot be read ({error}): it was written by hand; delete or correct it"
        ) from None


@readable()
def leader(tables: Tables, role: str) -> LeaderInfo | None:
    """Return the leader of ``role``, or None if it has none."""
    for member_id, name, token, began, renewed, now in _read(tables, statements.LEADER, role=role):
        return LeaderInfo(role, token, member_id, name, time_of(began), seconds_between(renewed, now))
    return None


@readable()
def overview(tables: Tables) -> Overview:
    """Return every role, sorted by name, and the living members, in the order in which they joined."""
    namespace = {"namespace": tables.namespace}
    steps = Step(statements.CLOCK, {}), Step(statements.ROLES, namespace), Step(statements.MEMBERS, namespace)
    clock, roles, members = tables.session.read(*steps)
    found = [_role(*row) for row in roles.rows]
    leads: dict[str, list[str]] = {}
    for info in found:
        if info.leader is not None:
            leads.setdefault(info.leader.member_id, []).append(info.role)
    living = [_member(row, tuple(leads.get(row[0], ()))) for row in members.rows]
    return Overview(tables.namespace, time_of(clock.rows[0][0]), found, living)


def _role(role: str, token: int, id_: str | None, *more: Any) -> RoleInfo:
    name, began, renewed, ttl_ms, now, candidates = more
    if id_ is None:
        return RoleInfo(role, token, None, overdue=False, candidates=candidates)
    ago = seconds_between(renewed, now)
    leader = LeaderInfo(role, token, id_, name, time_of(began), ago)
    return RoleInfo(role, token, leader, overdue(ago, ttl_ms), candidates)


def _member(row: tuple[Any, ...], leads: tuple[str, ...]) -> MemberInfo:
    id_, name, host, pid, version, key, takeover, ttl_ms, joined, renewed, now = row
    mode, ago = "lease" if key is None else "hybrid", seconds_between(renewed, now)
    what = id_, name, host, pid, version, mode, takeover, ttl_ms / 1000, time_of(joined), ago
    return MemberInfo(*what, overdue(ago, ttl_ms), leads)


@readable()
def candidates(tables: Tables, role: str) -> list[Candidate]:
    """Return the candidates for ``role``, in the order in which they joined."""
    return [
        Candidate(
            member_id, name, host, pid, takeover, ttl_ms / 1000, seconds_between(renewed, now), _metadata(metadata)
        )
        for member_id, name, host, pid, takeover, ttl_ms, renewed, now, metadata in _read(
            tables, statements.CANDIDATES, role=role
        )
    ]


@readable()
def history(tables: Tables, role: str, limit: int) -> list[TermRecord]:
    """Return the last terms of ``role``, newest first. A term whose end was not recorded ended when the next began."""
    records: list[TermRecord] = []
    for token, member_id, name, began, ended, recorded, renewed, ttl_ms, now in _read(
        tables, statements.HISTORY, role=role, limit=limit
    ):
        end, reason = (time_of(ended) if ended is not None else None), recorded
        after = records[-1] if records else None
        if after is not None and (end is None or end >= after.began):
            end = after.began
            # The recorded end is that of the membership. The member had lost the role before that, and won it again.
            if after.member_id == member_id and recorded != EndReason.RESIGNED:
                reason = EndReason.LAPSED
            reason = reason or EndReason.SUPERSEDED
        silent = end is None and renewed is not None and overdue(seconds_between(renewed, now), ttl_ms)
        known = renewed is not None and (silent or reason in FOUND_BY_OTHERS)
        seen = max(time_of(renewed), time_of(began)) if known else None
        records.append(TermRecord(role, token, member_id, name, time_of(began), end, reason, seen))
    return records


def candidate_id(role: str, to: str, others: list[Candidate], before: LeaderInfo | None = None) -> str:
    """Return the id of the one candidate whose name or id is ``to``; raise ConfigError if none or several match."""
    ids = [candidate.member_id for candidate in others if to in (candidate.name, candidate.member_id)]
    if not ids and before is not None and to in (before.name, before.member_id):
        raise ConfigError(f"role {role!r}: {to!r} leads already")
    if not ids:
        names = ", ".join(repr(candidate.name) for candidate in others)
        known = f"the other candidates are {names}" if names else "there are no other candidates"
        raise ConfigError(f"role {role!r}: no other candidate is named {to!r}; {known}")
    if len(ids) > 1:
        raise ConfigError(f"role {role!r}: {len(ids)} candidates are named {to!r}; give an id: {', '.join(ids)}")
    return ids[0]


def _metadata(text: str) -> dict[str, Any]:
    """Return a member's metadata; an empty dict if the column holds something else."""
    try:
        metadata = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return metadata if isinstance(metadata, dict) else {}


@readable()
def jobs(tables: Tables, role: str) -> list[JobRecord]:
    """Return the jobs of ``role``, sorted by name."""
    return job_records(_read(tables, job_statements.JOBS, role=role))


@readable()
def all_jobs(tables: Tables) -> list[JobRecord]:
    """Return the jobs of every role, sorted by role and name."""
    return job_records(_read(tables, job_statements.ALL_JOBS))


@readable()
def runs(tables: Tables, role: str, job: str, limit: int) -> list[RunRecord]:
    """Return the last runs of a job, newest first."""
    return _run_records(_read(tables, job_statements.RUNS, role=role, job=job, limit=limit))


@readable()
def last_runs(tables: Tables) -> dict[tuple[str, str], RunRecord]:
    """Return the last run of each job, by role and job."""
    return {(run.role, run.job): run for run in _run_records(_read(tables, job_statements.LAST_RUNS))}


@readable()
def latest_runs(tables: Tables, limit: int) -> list[RunRecord]:
    """Return the last runs of all jobs, newest first."""
    return _run_records(_read(tables, job_statements.LATEST_RUNS, limit=limit))


def _run_records(rows: Iterable[tuple[Any, ...]]) -> list[RunRecord]:
    return [
        RunRecord(
            *(role, job, moment(due), moment(first), covers, attempt, outcome, detail, token, member, time_of(began)),
            ended=None if ended is None else time_of(ended),
        )
        for role, job, due, attempt, first, covers, outcome, detail, token, member, began, ended in rows
    ]


def job_records(rows: Iterable[tuple[Any, ...]]) -> list[JobRecord]:
    """Return rows of the table of jobs as records."""
    found = []
    for job, anchor, claimed, done, token, spec, since, zone_data, paused, reason, requested, role, *more in rows:
        listed, jitter_us, now = more
        marks = _moment(anchor), _moment(claimed), _moment(done), token
        definition = role, spec, _moment(since), zone_data
        found.append(
            JobRecord(
                *(job, *marks, *definition, _moment(paused), reason, _moment(requested), listed, _moment(now)),
                jitter=(jitter_us or 0) / 1_000_000,
            )
        )
    return found


def _moment(us: int | None) -> datetime | None:
    return None if us is None else moment(us)


def _read(tables: Tables, text: str, **parameters: object) -> Any:
    step = Step(text, {"namespace": tables.namespace, **parameters})
    return tables.session.read(step)[0].rows


def overdue(silent_s: float, ttl_ms: int) -> bool:
    """Whether a member has not renewed within its TTL. For display only: no election depends on it."""
    return silent_s * 1000 > ttl_ms


def renews(silent_s: float, ttl_s: float) -> bool:
    """Whether a member still runs. If none does, nobody notices that the leader has died."""
    return silent_s <= SILENT * ttl_s
