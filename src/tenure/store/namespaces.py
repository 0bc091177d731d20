"""What operators set for a namespace as a whole, and what its nodes are waiting for."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from tenure.base.durations import exact
from tenure.base.moments import seconds_between, time_of
from tenure.core import timing
from tenure.errors import ConfigError, StoreUnavailable
from tenure.settings import LOSES_NOTHING
from tenure.store import manual_statements, migrations, records, statements
from tenure.store.control import confirmed
from tenure.store.records import Tables
from tenure.store.session import Step

VERSION = 6
"""The version of the tables in which a namespace shows what its nodes are waiting for."""


@dataclass(frozen=True)
class WaitInfo:
    """Something that the nodes of a namespace are waiting for."""

    reason: str
    role: str | None
    """The role that has to wait; None if all roles do, or if the wait delays no election."""
    ends: datetime | None
    """When the wait ends, by the database's clock, as far as the tables show it; None if it has not begun yet."""


def limit_ttl(tables: Tables, seconds: float) -> None:
    """Set the largest TTL of the namespace, as an operator."""
    _run(tables, statements.SET_MAX_TTL, max_ttl_ms=round(seconds * 1000))


def set_promotion(tables: Tables, word: str) -> None:
    """Record whether a promotion loses commits; raise ConfigError while an earlier promotion is waited for."""
    if word == LOSES_NOTHING:
        _refuse_manual_candidates(tables)
    _, before, changed, _ = _run(tables, *statements.SET_PROMOTION, promotion=word, oldest=migrations.oldest())
    if before.rows[0][0] == LOSES_NOTHING and tables.session.unreplicated:
        raise StoreUnavailable(
            f"promotion={word!r} is set for namespace {tables.namespace!r}, but the wait for the replica was "
            "cancelled; the replica may still say that a promotion loses nothing: do not promote it before it has "
            "caught up"
        )
    if not changed.count:
        raise ConfigError(
            f"promotion={word!r} cannot be set while namespace {tables.namespace!r} waits for leases that an earlier "
            "promotion may have lost: `tenure status` shows the wait; try again when it is over"
        )


def promotion_is_kept(tables: Tables) -> bool:
    """Whether commits wait for a replica, if an operator said that a promotion loses nothing."""
    (found,) = tables.session.read(Step(statements.CONFIRMED, {"namespace": tables.namespace}))
    row = confirmed(found, tables.session.server())
    return row.replicated or not row.loses_nothing


def _refuse_manual_candidates(tables: Tables) -> None:
    """Raise ConfigError while candidates of ``tenure.manual`` live: they rely on commits that may be lost."""
    names = [row[1] for row in _run(tables, manual_statements.MANUAL_MEMBERS)[0].rows]
    if names:
        raise ConfigError(
            f"promotion='loses-nothing' cannot be set while namespace {tables.namespace!r} has step-by-step "
            "candidates, which do not support it: unregister them, or give them another namespace "
            f"({', '.join(sorted(names))})"
        )


def _run(tables: Tables, *texts: str, **parameters: Any) -> Any:
    return tables.session.run(*(Step(text, {"namespace": tables.namespace, **parameters}) for text in texts))


@records.readable()
def waits(tables: Tables) -> list[WaitInfo]:
    """Return what the nodes of the namespace are waiting for, by the tables."""
    # Tables that no node of this release has brought up to date yet lack the columns.
    if migrations.require(tables.session) < VERSION:
        return []
    names = {"namespace": tables.namespace}
    texts = (
        *(statements.CONFIRMED, manual_statements.FIRST_JOINED, manual_statements.LIMIT_SET),
        *(statements.ROLES, statements.MEMBERS),
    )
    found, joined, limit_set, roles, members = tables.session.read(*(Step(text, names) for text in texts))
    if not found.rows:
        return []
    server = tables.session.server()
    row = confirmed(found, server)
    ((first, now),) = joined.rows
    waiting = []
    if row.line != server.line and not row.lacks_nothing(row, server):
        why = "a promotion may have lost" if row.made_on_a_promoted_server else "another server may have given"
        # A token of this timeline during the wait: a leader that still trusted its lease took its role here (R22).
        floor = row.base + server.floor
        led = server.floor > 0 and any(id_ is not None and token >= floor for _, token, id_, *_ in roles.rows)
        who = "no other node" if led else "no node"
        reason = f"{who} is elected before every lease that {why} is over"
        waiting.append(WaitInfo(reason, None, _later(first, timing.silence(row.longest_lease), now)))
    if row.ripe_ttl < row.max_ttl:
        ((since, _),) = limit_set.rows
        reason = (
            f"the largest TTL was raised to {exact(row.max_ttl)}: until a node has seen that for "
            f"{exact(timing.RIPENS_AFTER_S)}, nodes join with {exact(row.ripe_ttl)} at most"
        )
        waiting.append(WaitInfo(reason, None, _later(since, timing.RIPENS_AFTER_S * (1 + timing.DRIFT), now)))
    # If no member renews, no other node waits for the leases of the leaders.
    attended = any(
        records.renews(seconds_between(renewed, now), ttl_ms / 1000) for *_, ttl_ms, _, renewed, now in members.rows
    )
    for role, _, id_, name, _, renewed, ttl_ms, at, _ in roles.rows if attended else ():
        if id_ is not None and records.overdue(seconds_between(renewed, at), ttl_ms):
            reason = f"leader {name!r} has not renewed within its TTL: the others wait until its lease is over"
            waiting.append(WaitInfo(reason, role, _later(renewed, timing.silence(ttl_ms / 1000), at)))
    return waiting


def _later(since: Any, seconds: float, now: Any) -> datetime | None:
    """Return when a wait ends that began then. A wait that should be over already ends at any moment."""
    if since is None:
        return None
    return max(time_of(since) + timedelta(seconds=seconds), time_of(now))
