"""What people ask about a role: plain values, as the database answered."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tenure import statements
from tenure.session import Step
from tenure.store import Store


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


def leader(store: Store, role: str) -> LeaderInfo | None:
    """Return who holds ``role``, or None."""
    for member_id, name, token, began, renewed, now in _read(store, statements.LEADER, role=role):
        return LeaderInfo(role, token, member_id, name, _time(began), _seconds(renewed, now))
    return None


def candidates(store: Store, role: str) -> list[Candidate]:
    """Return who stands for ``role``, in the order in which they joined."""
    return [
        Candidate(member_id, name, host, pid, takeover, ttl_ms / 1000, _seconds(renewed, now), json.loads(metadata))
        for member_id, name, host, pid, takeover, ttl_ms, renewed, now, metadata in _read(
            store, statements.CANDIDATES, role=role
        )
    ]


def history(store: Store, role: str, limit: int) -> list[TermRecord]:
    """Return the last terms of ``role``, newest first. A term whose end nobody wrote down ended with the next."""
    records: list[TermRecord] = []
    next_began: datetime | None = None
    for token, member_id, name, began, ended, reason in _read(store, statements.HISTORY, role=role, limit=limit):
        end = _time(ended) if ended is not None else next_began
        records.append(
            TermRecord(role, token, member_id, name, _time(began), end, reason or ("superseded" if end else None))
        )
        next_began = _time(began)
    return records


def _read(store: Store, text: str, **parameters: object) -> Any:
    step = Step(text, {"namespace": store.namespace, **parameters})
    return store.session.read(step)[0].rows


def _time(value: datetime | str) -> datetime:
    return value if isinstance(value, datetime) else datetime.fromisoformat(value.replace("Z", "+00:00"))


def _seconds(earlier: datetime | str, later: datetime | str) -> float:
    return (_time(later) - _time(earlier)).total_seconds()
