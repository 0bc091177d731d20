"""What people ask about a role: plain values, as the database answered."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any, Protocol

from tenure import statements
from tenure.errors import ConfigError, StoreUnavailable
from tenure.session import Session, Step

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


class Tables(Protocol):
    """Where to look: the tables of one namespace, on an open connection."""

    @property
    def namespace(self) -> str:
        """The namespace."""
        ...

    @property
    def session(self) -> Session:
        """The connection."""
        ...


@dataclass(frozen=True)
class LeaderInfo:
    """Who holds a role."""

    role: str
    token: int
    member_id: str
    name: str
    since: datetime
    """When the term began, by the database's clock."""
    renewed_ago: float
    """Seconds since the leader's last renewal, by the database's clock. For people: nothing is decided by it."""


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
    """One term of a role's history, newest first. ``ended`` and ``reason`` are None while it goes on."""

    role: str
    token: int
    member_id: str
    name: str
    began: datetime
    ended: datetime | None
    reason: str | None


@dataclass(frozen=True)
class JobRecord:
    """What is known of the runs of a job."""

    job: str
    anchor: datetime | None
    """The moment from which its interval is counted, if one was set."""
    claimed: datetime | None
    """When the latest run that was claimed was due."""
    done: datetime | None
    """When the latest run that was marked as done was due."""
    token: int
    """The term that changed this last."""


@contextlib.contextmanager
def legible() -> Iterator[None]:
    """Say what is the matter where rows hold what nobody can read: SQLite takes anything anywhere."""
    try:
        yield
    except ConfigError:
        raise
    except (TypeError, ValueError, OverflowError) as error:
        raise StoreUnavailable(
            f"a row of Tenure's tables holds what nobody can read ({error}): somebody has written it by hand"
        ) from None


@legible()
def leader(tables: Tables, role: str) -> LeaderInfo | None:
    """Return who holds ``role``, or None."""
    for member_id, name, token, began, renewed, now in _read(tables, statements.LEADER, role=role):
        return LeaderInfo(role, token, member_id, name, time_of(began), seconds_between(renewed, now))
    return None


@legible()
def candidates(tables: Tables, role: str) -> list[Candidate]:
    """Return who stands for ``role``, in the order in which they joined."""
    return [
        Candidate(
            member_id, name, host, pid, takeover, ttl_ms / 1000, seconds_between(renewed, now), _metadata(metadata)
        )
        for member_id, name, host, pid, takeover, ttl_ms, renewed, now, metadata in _read(
            tables, statements.CANDIDATES, role=role
        )
    ]


@legible()
def history(tables: Tables, role: str, limit: int) -> list[TermRecord]:
    """Return the last terms of ``role``, newest first. A term whose end nobody wrote down ended with the next."""
    records: list[TermRecord] = []
    for token, member_id, name, began, ended, told in _read(tables, statements.HISTORY, role=role, limit=limit):
        end, reason = (time_of(ended) if ended is not None else None), told
        after = records[-1] if records else None
        if after is not None and (end is None or end >= after.began):
            end = after.began
            if after.member_id == member_id and told != "resigned":  # what is written down is the end of the member
                reason = "lapsed"
            reason = reason or "superseded"
        records.append(TermRecord(role, token, member_id, name, time_of(began), end, reason))
    return records


def candidate_id(role: str, to: str, others: list[Candidate]) -> str:
    """Return the id of the one candidate of that name (or id), or say why there is none."""
    ids = [candidate.member_id for candidate in others if to in (candidate.name, candidate.member_id)]
    if not ids:
        names = ", ".join(repr(candidate.name) for candidate in others) or "none"
        raise ConfigError(f"role {role!r}: nobody else named {to!r} stands for it; others are {names}")
    if len(ids) > 1:
        raise ConfigError(f"role {role!r}: {len(ids)} candidates are named {to!r}; give an id: {', '.join(ids)}")
    return ids[0]


def _metadata(text: str) -> dict[str, Any]:
    """Return a member's metadata; none, where somebody has written by hand what is no such thing."""
    try:
        metadata = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return metadata if isinstance(metadata, dict) else {}


@legible()
def jobs(tables: Tables, role: str) -> list[JobRecord]:
    """Return the jobs of ``role``, by name."""
    return job_records(_read(tables, statements.JOBS, role=role))


def job_records(rows: Iterable[tuple[Any, ...]]) -> list[JobRecord]:
    """Return what rows of the table of jobs say."""
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
    """Return a time as the database gave it, with its zone; MariaDB's have none, and are in UTC."""
    time = value if isinstance(value, datetime) else datetime.fromisoformat(value.replace("Z", "+00:00"))
    return time if time.tzinfo else time.replace(tzinfo=timezone.utc)


def moment(us: int) -> datetime:
    """Return the moment that a number of microseconds since 1970 stands for, in UTC."""
    return EPOCH + timedelta(microseconds=us)


def seconds_between(earlier: datetime | str, later: datetime | str) -> float:
    """Return the seconds from one time to another."""
    return (time_of(later) - time_of(earlier)).total_seconds()
