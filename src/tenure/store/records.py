"""Reads what operators want to know about a role, and returns it as plain values."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any, Protocol

from tenure.errors import ConfigError, StoreUnavailable
from tenure.store import statements
from tenure.store.session import Session, Step

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


class Tables(Protocol):
    """The tables of one namespace, on an open connection."""

    @property
    def namespace(self) -> str:
        """The namespace."""

    @property
    def session(self) -> Session:
        """The connection."""


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
class TermRecord:
    """One term in a role's history. ``ended`` and ``reason`` are None while the term goes on."""

    role: str
    token: int
    member_id: str
    name: str
    began: datetime
    ended: datetime | None
    reason: str | None


@dataclass(frozen=True)
class JobRecord:
    """What is recorded about the runs of a job."""

    job: str
    anchor: datetime | None
    """The moment from which the job's intervals are counted, if one was set."""
    claimed: datetime | None
    """The due time of the latest run that was claimed."""
    done: datetime | None
    """The due time of the latest run that was marked as done."""
    token: int
    """The token of the term that last changed this record."""


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
    for token, member_id, name, began, ended, recorded in _read(tables, statements.HISTORY, role=role, limit=limit):
        end, reason = (time_of(ended) if ended is not None else None), recorded
        after = records[-1] if records else None
        if after is not None and (end is None or end >= after.began):
            end = after.began
            # The recorded end is that of the membership. The member had lost the role before that, and won it again.
            if after.member_id == member_id and recorded != "resigned":
                reason = "lapsed"
            reason = reason or "superseded"
        records.append(TermRecord(role, token, member_id, name, time_of(began), end, reason))
    return records


def candidate_id(role: str, to: str, others: list[Candidate]) -> str:
    """Return the id of the one candidate whose name or id is ``to``; raise ConfigError if none or several match."""
    ids = [candidate.member_id for candidate in others if to in (candidate.name, candidate.member_id)]
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
    return job_records(_read(tables, statements.JOBS, role=role))


def job_records(rows: Iterable[tuple[Any, ...]]) -> list[JobRecord]:
    """Return rows of the table of jobs as records."""
    return [
        JobRecord(job, _moment(anchor), _moment(claimed), _moment(done), token)
        for job, anchor, claimed, done, token in rows
    ]


def _moment(us: int | None) -> datetime | None:
    return None if us is None else moment(us)


def _read(tables: Tables, text: str, **parameters: object) -> Any:
    step = Step(text, {"namespace": tables.namespace, **parameters})
    return tables.session.read(step)[0].rows


def time_of(value: datetime | str) -> datetime:
    """Return a time from the database with its time zone. MariaDB's times have no zone and are in UTC."""
    time = value if isinstance(value, datetime) else datetime.fromisoformat(value.replace("Z", "+00:00"))
    return time if time.tzinfo else time.replace(tzinfo=timezone.utc)


def moment(us: int) -> datetime:
    """Return microseconds since 1970 as a time in UTC."""
    return EPOCH + timedelta(microseconds=us)


def overdue(silent_s: float, ttl_ms: int) -> bool:
    """Whether a member has not renewed within its TTL. For display only: no election depends on it."""
    return silent_s * 1000 > ttl_ms


def seconds_between(earlier: datetime | str, later: datetime | str) -> float:
    """Return the seconds from one time to another."""
    return (time_of(later) - time_of(earlier)).total_seconds()
