"""Sentinels as PostgreSQL session advisory locks, and what the watcher may do to other connections.

The lock belongs to the connection, so the server frees it when the process dies. Five traps, all measured:

- A backend that waits holds back the vacuum horizon: waits are short slices.
- A wait that times out writes an error into the server's log, unless it is caught inside PL/pgSQL: it is.
- A session's lock that is granted in the moment in which the wait for it times out stays, error or not, and keeps
  everybody from the key for good: waits are for a lock of their own transaction.
- Holding and waiting on one connection makes the ring a deadlock: holding is the control connection's, waiting the
  watch connection's.
- A wait may outlive its time-out (seen when the server's clock was stepped, under libfaketime), and a backend that
  waits does not see its client go. A new watch connection ends the one that it replaces.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Sequence
from typing import NamedTuple

from tenure import clock, timing
from tenure.dialects import listed
from tenure.postgres import PostgresSession
from tenure.session import Failed, Result, Session, Step
from tenure.watch import Watch

CLASS_ID = 0x54454E55
"""The first half of every key: "TENU". The second half is the member's random number."""

COMPLAIN_EVERY_S = 60.0
LOOK_FOR_BLOCKERS_S = 0.3
"""Longer than the control connection's pause between two waits for a busy role."""

log = logging.getLogger("tenure.advisory")

_TRY = "select pg_catalog.pg_try_advisory_lock({class_id}, :key)"
_RELEASE = "select pg_catalog.pg_advisory_unlock({class_id}, :key)"
_LOCK_TIMEOUT = "select pg_catalog.set_config('lock_timeout', :value, false)"
_WAIT = """
do $wait$ begin
    perform pg_catalog.pg_advisory_xact_lock_shared({lock});
exception when lock_not_available then null;
end $wait$
"""
"""A lock of the transaction's, not the session's: one that is granted as the wait times out goes with the error."""
_IS_HELD = """
    l.locktype = 'advisory' and l.classid = {class_id} and l.objsubid = 2 and l.granted
    and l.mode = 'ExclusiveLock'
    and l.database = (select oid from pg_catalog.pg_database where datname = pg_catalog.current_database())
"""
_STANDING = (
    """
select l.objid, s.log_lock_waits, s.deadlock_timeout, s.log_min_duration
from (select
        pg_catalog.current_setting('log_lock_waits') as log_lock_waits,
        extract(epoch from cast(pg_catalog.current_setting('deadlock_timeout') as interval)) as deadlock_timeout,
        case pg_catalog.current_setting('log_min_duration_statement') when '-1' then 0 else extract(epoch from
            cast(pg_catalog.current_setting('log_min_duration_statement') as interval)) end as log_min_duration) s
left join pg_catalog.pg_locks l on"""
    + _IS_HELD
)
_TERMINATE_OLDER = (
    """
select pg_catalog.pg_terminate_backend(a.pid, 1000)
from pg_catalog.pg_locks l join pg_catalog.pg_stat_activity a on a.pid = l.pid
where l.objid = :key and extract(epoch from a.backend_start) < cast(:started as numeric) and"""
    + _IS_HELD
)
_TERMINATE_REPLACED = """
select pg_catalog.pg_terminate_backend(a.pid) from pg_catalog.pg_stat_activity a
where a.pid = :pid and cast(extract(epoch from a.backend_start) as text) = :started
"""
_REGISTERED = """
    (a.pid = m.control_pid and cast(extract(epoch from a.backend_start) as text) = m.control_start
     or a.pid = m.watch_pid and cast(extract(epoch from a.backend_start) as text) = m.watch_start)
"""
_EVICT = (
    """
select a.pid, pg_catalog.pg_terminate_backend(a.pid)
from {{members}} m join pg_catalog.pg_stat_activity a on a.datname = pg_catalog.current_database() and"""
    + _REGISTERED
    + """
where m.namespace = :namespace and m.id in {{listed}} and m.ended_at is not null
  and not exists (select 1 from {{members}} m where m.ended_at is null and"""
    + _REGISTERED
    + """)
"""
)
"""Not where the node has woken and joined again on the same connections."""
_OUST = (
    """
select a.pid, pg_catalog.pg_terminate_backend(a.pid, 500)
from {{members}} m join pg_catalog.pg_stat_activity a on a.datname = pg_catalog.current_database() and"""
    + _REGISTERED
    + """
where m.namespace = :namespace and m.id = :id and m.ended_at is null and m.renewals = :renewals
"""
)
_UNBLOCK = (
    """
select b.pid, case when
    a.usename = session_user
    and a.xact_start < pg_catalog.clock_timestamp() - pg_catalog.make_interval(secs => :bound_s)
    and not exists (select 1 from {{members}} m where m.ended_at is null and"""
    + _REGISTERED
    + """)
    then pg_catalog.pg_terminate_backend(b.pid) end
from pg_catalog.unnest(pg_catalog.pg_blocking_pids(:control_pid)) as b(pid)
left join pg_catalog.pg_stat_activity a on a.pid = b.pid
"""
)

_STRANGERS = """
select k.name, cast(l.objid as bigint), l.pid, coalesce(a.usename, ''), coalesce(a.application_name, ''), l.granted
from pg_catalog.pg_locks l
left join pg_catalog.pg_stat_activity a on a.pid = l.pid
left join {{members}} k on k.sentinel_key = cast(l.objid as bigint) and k.ended_at is null
where l.locktype = 'advisory' and l.classid = {class_id} and l.objsubid = 2
  and (l.granted or l.mode = 'ExclusiveLock') and l.pid <> pg_catalog.pg_backend_pid()
  and l.database = (select oid from pg_catalog.pg_database where datname = pg_catalog.current_database())
  and not exists (select 1 from {{members}} m where m.ended_at is null
    and (a.pid = m.control_pid or a.pid = m.watch_pid)
    and (a.backend_start is null
         or cast(extract(epoch from a.backend_start) as text) in (m.control_start, m.watch_start)))
order by l.pid, l.objid
"""
"""When a connection began shows to its own database user only; then its pid has to do."""


class Stranger(NamedTuple):
    """A connection that holds a key of ours, or waits for it, and belongs to no living member."""

    member: str | None
    """The name of the member whose key it is; None if it is nobody's."""
    key: int
    pid: int
    user: str
    application: str
    granted: bool


def strangers(session: Session) -> list[Stranger]:
    """Return who has keys of ours at this moment; a node that is just starting may be among them."""
    return [Stranger(*row) for row in session.read(Step(_STRANGERS.format(class_id=CLASS_ID), {}))[0].rows]


def end_replaced(session: PostgresSession, pid: int, started: str) -> None:
    """End the watch connection that this one replaces, if the server still has it; best effort."""
    try:
        session.read(Step(_TERMINATE_REPLACED, {"pid": pid, "started": started}))
    except Failed as error:
        log.warning("cannot end the watch connection before this one: %s", error)


class AdvisorySentinel:
    """Holds, waits for and looks at advisory locks on one connection."""

    def __init__(self, session: PostgresSession) -> None:
        """Use the session's connection; its life is the locks' life."""
        self._session = session
        self._wait_ms = 0
        self.slice_s = timing.SLICE_S
        """How long a wait may last without a line in the server's log."""

    def hold(self, key: int) -> bool:
        """Take the lock exclusively; False if somebody else has it."""
        return bool(self._session.read(Step(_TRY.format(class_id=CLASS_ID), {"key": key}))[0].rows[0][0])

    def holds(self) -> bool:
        """Whether a lock that was taken shows in the server's list: on some look-alikes it is a word without effect."""
        key = random.getrandbits(31)
        taken = self.hold(key)
        shows = key in self.standing([key])
        self.release(key)
        return taken and shows

    def retake(self, key: int) -> bool:
        """Take the lock again; an older connection of ours that still has it is terminated first.

        Only an older one: a request that was delayed on its way must not end the connection that replaced it.
        """
        if self.hold(key):
            return True
        parameters = {"key": key, "started": self._session.started}
        self._session.read(Step(_TERMINATE_OLDER.format(class_id=CLASS_ID), parameters))
        return self.hold(key)

    def oust(self, namespace: str, member_id: str, renewals: int | None) -> None:
        """Terminate the connections of a member that has been silent at this count of renewals for its TTL.

        Its trust is over, so nothing is lost by it but the transaction in which it stands still.
        """
        parameters = {"namespace": namespace, "id": member_id, "renewals": renewals}
        rows = self._session.read(Step(_OUST.format(), parameters))[0].rows
        if rows:
            log.info("ended %d connections of a member that fell silent in a transaction: %s", len(rows), member_id)

    def release(self, key: int) -> None:
        """Let go of the lock."""
        self._session.read(Step(_RELEASE.format(class_id=CLASS_ID), {"key": key}))

    def sweep(self, keys: set[int]) -> None:
        """Do nothing: the server forgets a lock with its connection."""

    def abandon(self) -> None:
        """Do nothing: the lock is the connection's."""

    def duplicates(self) -> list[int]:
        """Return a duplicate of the connection's socket: to the server, the connection stands until it is closed."""
        return [os.dup(self._session.fileno())]

    def wait(self, key: int, seconds: float) -> None:
        """Wait until nobody holds the lock, for so long at most, and leave nothing held and nothing in the log."""
        self.survey(key, seconds)

    def standing(self, keys: Sequence[int]) -> set[int]:
        """Return which of the locks are held."""
        return self.survey(None, 0)[1].intersection(keys)

    def survey(self, wait_for: int | None, seconds: float, *steps: Step) -> tuple[Sequence[Result], set[int]]:
        """Wait for a lock, then take some steps, then look which locks are held, and how long the next wait may be.

        All in one round trip: a node at rest asks the server once for every slice, and after a death not three times.
        What travels together is one transaction to the server, but every statement has a view of its own.
        """
        wait_ms = max(1, round(seconds * 1000))
        waiting = []
        if wait_for is not None:
            if wait_ms != self._wait_ms:
                waiting.append(Step(_LOCK_TIMEOUT, {"value": f"{wait_ms}ms"}))
            waiting.append(Step(_WAIT.format(lock=self.lock(wait_for)), {}))
        *results, standing = self._session.read(*waiting, *steps, Step(_STANDING.format(class_id=CLASS_ID), {}))
        if wait_for is not None:
            self._wait_ms = wait_ms  # not before: a transaction that failed takes the setting back
        _, log_lock_waits, deadlock_timeout_s, log_min_duration_s = standing.rows[0]
        self.slice_s = timing.SLICE_S
        if log_lock_waits == "on":
            self.slice_s = min(self.slice_s, 0.8 * float(deadlock_timeout_s))
        if log_min_duration_s > 0:
            self.slice_s = min(self.slice_s, 0.8 * float(log_min_duration_s))
        return results[len(waiting) :], {row[0] for row in standing.rows}

    def lock(self, key: int) -> str:
        """Return a lock as the server's functions want it."""
        return f"{CLASS_ID}, {int(key)}"


class AdvisoryWatch(Watch):
    """The watch lane's looks, each in one round trip."""

    sentinel: AdvisorySentinel

    def _survey(
        self, wait_for: int | None, seconds: float, roster: Step, vacancy: Step
    ) -> tuple[Sequence[Result], set[int]]:
        return self.sentinel.survey(wait_for, seconds, roster, vacancy)


class AdvisoryWatcher:
    """What the watch connection may do to others: end zombies, and abandoned transactions in the way."""

    def __init__(self, session: Session, sentinel: AdvisorySentinel) -> None:
        """Act on the watch connection."""
        self._session = session
        self._sentinel = sentinel
        self._complain_at = float("-inf")

    def slice_s(self) -> float:
        """Return how long a wait may last without a line in the server's log."""
        return self._sentinel.slice_s

    def evict(self, namespace: str, member_ids: tuple[str, ...]) -> None:
        """Terminate the connections of members that were ended; best effort, the lease stands anyway."""
        parameters = {"namespace": namespace, "names": listed(member_ids)}
        try:
            rows = self._session.read(Step(_EVICT.format(class_id=CLASS_ID), parameters))[0].rows
        except Failed as error:
            log.warning("cannot end the connections of a member that was ended: %s", error)
            return
        if rows:
            log.info("ended %d connections of members that were ended: %s", len(rows), ", ".join(member_ids))

    def unblock(self, namespace: str, control_pid: int, bound_s: float) -> None:
        """End transactions that have blocked the control connection for longer than their bound.

        Who blocks it shows only while it waits, and it waits for a moment at a time: one look could always come between
        two waits, for the two lanes march in step.
        """
        parameters = {"namespace": namespace, "control_pid": control_pid, "bound_s": bound_s}
        until = clock.now() + LOOK_FOR_BLOCKERS_S
        while not (rows := self._session.read(Step(_UNBLOCK.format(), parameters))[0].rows) and clock.now() < until:
            time.sleep(LOOK_FOR_BLOCKERS_S / 20)
        for pid, ended in rows:
            if pid == 0:
                self._complain()
            elif ended:
                log.warning("ended connection %d: its transaction kept a role from being acquired", pid)

    def _complain(self) -> None:
        if clock.now() >= self._complain_at:
            self._complain_at = clock.now() + COMPLAIN_EVERY_S
            log.warning("a prepared transaction keeps a role from being acquired: commit it or roll it back")
