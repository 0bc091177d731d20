"""Sentinels as PostgreSQL session advisory locks, and what the watcher can do to other connections.

The lock belongs to the connection, so the server frees it when the process dies. Six traps, all measured:

- A server process that waits holds back the vacuum horizon. So waits are short slices.
- A wait that times out writes an error into the server's log, unless PL/pgSQL catches it. So it does.
- A session lock that is granted in the moment in which the wait for it times out stays, error or not, and blocks the
  key for good. So a wait takes a lock that ends with its transaction.
- Holding and waiting on one connection would make the ring of watchers a deadlock. So the control connection holds, and
  the watch connection waits.
- Any database user can take any key. A lock counts as a sentinel only if the process that the member's row names holds
  it. A stranger that waited for the key of a dead member holds it from then on. Only the server's list of locks shows
  who holds a lock, and reading it costs the more, the more locks there are, and stops the lock manager for a moment.
  So a look reads the list the more seldom, the longer it is. In between it tries to lock the keys, which shows only
  whether a key is free.
- A wait may outlive its time-out (seen when the server's clock was stepped, under libfaketime), and a server process
  that waits does not notice that its client is gone. So a new watch connection ends the one that it replaces, and a
  node that leaves ends its own wait.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tenure.base import clock
from tenure.core import messages, timing
from tenure.core.messages import Sighting
from tenure.databases.postgres.knock import BeginKnock
from tenure.databases.postgres.session import PostgresSession
from tenure.store.dialects import listed
from tenure.store.session import Failed, Gone, Result, Session, Step
from tenure.store.watch import ROSTER, WatchActions, WatchStore, sighting

CLASS_ID = 0x54454E55
"""The first half of every key: "TENU". The second half is the member's random number."""

EARLY_PAUSE_S = 0.2
"""How long to wait before the next look, after a wait that the server has ended too early."""
READ_LOCK_S = 0.01
"""How long looks leave out the server's list of locks, for each entry that it had. Every look reads a short list."""
COMPLAIN_EVERY_S = 60.0
LOOK_FOR_BLOCKERS_S = 0.3
"""How long to search for blockers: longer than the control connection's pause between two waits for a busy role."""

log = logging.getLogger("tenure.advisory")

_TRY = "select pg_catalog.pg_try_advisory_lock({class_id}, :key)"
_TRY_SHARED = "select pg_catalog.pg_try_advisory_xact_lock_shared({class_id}, :key)"
_RELEASE = "select pg_catalog.pg_advisory_unlock({class_id}, :key)"
_LOCK_TIMEOUT = "select pg_catalog.set_config('lock_timeout', :value, false)"
_WAIT = """
do $wait$ begin
    perform pg_catalog.pg_advisory_xact_lock_shared({lock});
exception when lock_not_available or query_canceled then null;
end $wait$
"""
"""A transaction lock, not a session lock: one that is granted as the wait times out is undone with the error.

The wait is canceled when its node leaves.
"""
_IS_HELD = """
    l.locktype = 'advisory' and l.classid = {class_id} and l.objsubid = 2 and l.granted
    and l.mode = 'ExclusiveLock'
    and l.database = (select oid from pg_catalog.pg_database where datname = pg_catalog.current_database())
"""
_LOGGED = """
select pg_catalog.current_setting('log_lock_waits'),
       extract(epoch from cast(pg_catalog.current_setting('deadlock_timeout') as interval)),
       case pg_catalog.current_setting('log_min_duration_statement') when '-1' then 0 else
           extract(epoch from cast(pg_catalog.current_setting('log_min_duration_statement') as interval)) end
"""
"""Which waits the server logs."""
_HELD = "select cast(l.objid as bigint) as key, l.pid from pg_catalog.pg_locks l where" + _IS_HELD
_ROSTER_TRIED = f"""
with watched as materialized ({ROSTER})
select w.*, not pg_catalog.pg_try_advisory_xact_lock_shared({CLASS_ID}, w.sentinel_key) from watched w
"""
"""The rows are as they were when the statement began, and the keys are tried after that. The lock that shows that a key
is free ends with the transaction. It never delays a node: each membership and resumption has a new key."""
_ROSTER_LISTED = f"""
with watched as materialized ({ROSTER}),
     locks as materialized (select * from pg_catalog.pg_locks)
select w.*, h.pid is not null, (select count(*) from locks)
from watched w
left join ({_HELD.replace("pg_catalog.pg_locks", "locks").format(class_id=CLASS_ID)}) h
    on h.key = w.sentinel_key and h.pid = w.control_pid
"""
"""The same by the list of locks, which is read after the statement began, too; and how long the list is."""
_TERMINATE_REPLACED = """
select pg_catalog.pg_terminate_backend(a.pid) from pg_catalog.pg_stat_activity a
where a.pid = :pid and cast(extract(epoch from a.backend_start) as text) = :started
"""
_END_WAIT = """
select pg_catalog.pg_cancel_backend(a.pid) from pg_catalog.pg_stat_activity a
where a.pid = :pid and cast(extract(epoch from a.backend_start) as text) = :started and a.wait_event_type = 'Lock'
"""
"""Spares everything but a wait: the server would log that another statement was canceled."""
REGISTERED = """
    (a.pid = m.control_pid and cast(extract(epoch from a.backend_start) as text) = m.control_start
     or a.pid = m.watch_pid and cast(extract(epoch from a.backend_start) as text) = m.watch_start)
"""
_EVICT = (
    """
select a.pid, pg_catalog.pg_terminate_backend(a.pid)
from {{members}} m join pg_catalog.pg_stat_activity a on a.datname = pg_catalog.current_database() and"""
    + REGISTERED
    + """
where m.namespace = :namespace and m.id in {{listed}} and m.ended_at is not null
  and not exists (select 1 from {{members}} m where m.ended_at is null and"""
    + REGISTERED
    + """)
"""
)
"""Spares the connections of a node that has woken up and joined again on them."""
_OUST = (
    """
select a.pid, pg_catalog.pg_terminate_backend(a.pid, 500)
from {{members}} m join pg_catalog.pg_stat_activity a on a.datname = pg_catalog.current_database() and"""
    + REGISTERED
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
    + REGISTERED
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
"""Only the database user of a connection sees when it began. For the connections of other users, the pid must do."""


class Stranger(NamedTuple):
    """A connection that holds one of Tenure's keys, or waits for it, and belongs to no living member."""

    member: str | None
    """The name of the member whose key it is; None if no member has it."""
    key: int
    pid: int
    user: str
    application: str
    granted: bool


def foreign_lock_holders(session: Session) -> list[Stranger]:
    """Return which other connections have Tenure's keys; a node that is just starting may be among them."""
    return [Stranger(*row) for row in session.read(Step(_STRANGERS.format(class_id=CLASS_ID), {}))[0].rows]


class AdvisorySentinel:
    """Holds, waits for and reads advisory locks on one connection."""

    def __init__(self, session: PostgresSession) -> None:
        self._session = session
        self._wait_ms = 0
        self.slice_s = timing.SLICE_S
        """How long a wait may last without being written to the server's log."""
        self._ended_early = False
        """Whether the last wait ended long before its time, although the lock was not freed."""
        self._list_at = timing.LONG_AGO

    def hold(self, key: int) -> bool:
        return bool(self._session.read(Step(_TRY.format(class_id=CLASS_ID), {"key": key}))[0].rows[0][0])

    def holds(self) -> bool:
        """Whether advisory locks work: take one and see whether it shows. Look-alikes of PostgreSQL may ignore it."""
        key = random.getrandbits(31)
        mine = {"key": key}
        steps = (Step(_TRY.format(class_id=CLASS_ID), mine), Step(_HELD.format(class_id=CLASS_ID), {}))
        taken, held, _ = self._session.read(*steps, Step(_RELEASE.format(class_id=CLASS_ID), mine))
        return bool(taken.rows[0][0]) and (key, self._session.pid) in held.rows

    def terminate_silent_member(self, namespace: str, member_id: str, renewals: int | None) -> None:
        """Terminate the connections of a member that has been silent at this count of renewals for its TTL.

        Its trust is over, so it only loses the transaction in which it hangs.
        """
        parameters = {"namespace": namespace, "id": member_id, "renewals": renewals}
        rows = self._session.read(Step(_OUST.format(), parameters))[0].rows
        if rows:
            log.info("ended %d connections of a member that fell silent in a transaction: %s", len(rows), member_id)

    def terminate_previous_watch(self, pid: int, started: str) -> None:
        """Terminate the watch connection that this one replaces, if the server still has it. Best effort."""
        try:
            self._session.read(Step(_TERMINATE_REPLACED, {"pid": pid, "started": started}))
        except Failed as error:
            log.warning("cannot end the previous watch connection: %s", error)

    def end_wait(self, pid: int, started: str) -> None:
        """End the wait of this node's watch connection: the node leaves. Best effort."""
        with contextlib.suppress(Failed, Gone):
            self._session.read(Step(_END_WAIT, {"pid": pid, "started": started}))

    def release(self, key: int) -> None:
        self._session.read(Step(_RELEASE.format(class_id=CLASS_ID), {"key": key}))

    def sweep(self, keys: set[int]) -> None:
        """Do nothing: the server frees a lock with its connection."""

    def abandon(self) -> None:
        """Do nothing: the lock belongs to the connection."""

    def duplicates(self) -> list[int]:
        """Return a duplicate of the connection's socket: for the server, the connection lasts until that is closed."""
        return [os.dup(self._session.fileno())]

    def wait(self, key: int, seconds: float) -> None:
        """Wait up to ``seconds`` until the lock is free, and leave nothing held and nothing in the server's log."""
        self.survey(key, seconds)

    def standing(self, keys: Sequence[int]) -> set[int]:
        return {key for key, _ in self._held()}.intersection(keys)

    def _held(self) -> Sequence[tuple[Any, ...]]:
        """Return which keys are held, and by which process."""
        return self._session.read(Step(_HELD.format(class_id=CLASS_ID), {}))[0].rows

    def look(
        self, request: messages.Look, roster: Step, vacancy: Step, fallen: Callable[[], None]
    ) -> tuple[tuple[Sighting, ...], Result]:
        """Wait for a lock, then read the members, whether their sentinels stand, and the other step's result.

        Call ``fallen`` as soon as the lock is free, while the server reads the rest.
        """
        # If the server's clock is set back, and deadlock_timeout is short, PostgreSQL ends each wait far too early.
        if self._ended_early:
            time.sleep(min(EARLY_PAUSE_S, request.seconds))
        began = clock.now()
        text = _ROSTER_TRIED if began < self._list_at else _ROSTER_LISTED
        step = Step(text, roster.parameters)
        members, vacancies = self.survey(request.wait_for, request.seconds, step, vacancy, fallen=fallen)
        took_s = clock.now() - began
        if text == _ROSTER_LISTED and members.rows:
            self._list_at = clock.now() + READ_LOCK_S * members.rows[0][-1]
        seen = tuple(sighting(row[:9], stands=bool(row[9])) for row in members.rows)
        still_stands = any(member.key == request.wait_for and member.sentinel_stands for member in seen)
        self._ended_early = request.wait_for is not None and still_stands and took_s < request.seconds / 2
        return seen, vacancies

    def survey(
        self, wait_for: int | None, seconds: float, *steps: Step, fallen: Callable[[], None] | None = None
    ) -> Sequence[Result]:
        """Wait for a lock, then run some steps, and read how long the next wait may last.

        All in one round trip: a node at rest asks the server once per slice, and once after a death instead of three
        times. What is sent together is one transaction for the server, but every statement has its own view.
        """
        wait_ms = max(1, round(seconds * 1000))
        waiting = []
        if wait_for is not None:
            if wait_ms != self._wait_ms:
                waiting.append(Step(_LOCK_TIMEOUT, {"value": f"{wait_ms}ms"}))
            waiting.append(Step(_WAIT.format(lock=self.lock(wait_for)), {}))
        rest = (*steps, Step(_LOGGED, {}))
        if wait_for is not None and fallen is not None:
            waiting.append(Step(_TRY_SHARED.format(class_id=CLASS_ID), {"key": wait_for}))
            results = self._session.read_early(waiting, lambda free: fallen() if free.rows[0][0] else None, rest)
        else:
            results = self._session.read(*waiting, *rest)[len(waiting) :]
        *results, logged = results
        if wait_for is not None:
            # Remembered after the round trip: a transaction that fails undoes the setting.
            self._wait_ms = wait_ms
        log_lock_waits, deadlock_timeout_s, log_min_duration_s = logged.rows[0]
        self.slice_s = _slice_s(float(deadlock_timeout_s) if log_lock_waits == "on" else 0, float(log_min_duration_s))
        return results

    def lock(self, key: int) -> str:
        """Return a lock as the arguments of the server's functions."""
        return f"{CLASS_ID}, {int(key)}"


def _slice_s(*logged_from_s: float) -> float:
    """Return how long a wait may last, given from which durations on the server logs waits (0: it logs none).

    If the server logs even the shortest slice, the waits are long, so that there are few lines.
    """
    slices_s = (0.8 * seconds for seconds in logged_from_s)
    return min([timing.SLICE_S, *(slice_s for slice_s in slices_s if slice_s >= timing.SHORTEST_SLICE_S)])


class AdvisoryWatch(WatchStore):
    """The watch lane, with each look in one round trip.

    It knocks as soon as the awaited sentinel has fallen, and not only when the protocol asks for it: the server opens
    the connection while it reads the members.
    """

    sentinel: AdvisorySentinel

    def __init__(
        self,
        session: PostgresSession,
        sentinel: AdvisorySentinel,
        watcher: WatchActions,
        namespace: str,
        begin_knock: BeginKnock,
    ) -> None:
        super().__init__(session, sentinel, watcher, namespace, self._knock)
        self._begin_knock = begin_knock
        self._knocking: Callable[[], str | None] | None = None

    def look(self, request: messages.Look) -> messages.Looked:
        """As above; the reply says whether the server has accepted the knock."""
        accepted = False
        try:
            looked = super().look(request)
        finally:
            # Also if the look has failed: the server would log a connection that is closed halfway.
            if self._knocking is not None:
                start, self._knocking = self._knocking(), None
                accepted = start == self.session.server_start
        return looked._replace(knocked=accepted)

    def _survey(self, request: messages.Look, roster: Step, vacancy: Step) -> tuple[tuple[Sighting, ...], Result]:
        return self.sentinel.look(request, roster, vacancy, self._fallen)

    def _fallen(self) -> None:
        self._knocking = self._begin_knock()

    def _knock(self) -> str | None:
        return self._begin_knock()()


class AdvisoryActions(WatchActions):
    """What the watch connection can do to others: end those of ended members, and abandoned transactions."""

    def __init__(self, session: Session, sentinel: AdvisorySentinel) -> None:
        self._session = session
        self._sentinel = sentinel
        self._complain_at = float("-inf")

    def slice_s(self) -> float:
        return self._sentinel.slice_s

    def evict(self, namespace: str, member_ids: tuple[str, ...]) -> None:
        parameters = {"namespace": namespace, "names": listed(member_ids)}
        try:
            rows = self._session.read(Step(_EVICT.format(class_id=CLASS_ID), parameters))[0].rows
        except Failed as error:
            log.warning("cannot end the connections of a member that was ended: %s", error)
            return
        if rows:
            log.info("closed connections (%d) that former members had left: %s", len(rows), ", ".join(member_ids))

    def unblock(self, namespace: str, control_pid: int, bound_s: float) -> None:
        """Terminate transactions that have blocked the control connection for longer than their bound.

        The server shows what blocks the control connection only while it waits, and it waits for a moment at a time.
        The two lanes run in step, so a single look could always come between two waits.
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
