"""Roles with a ``lock_id``: the control connection also holds an advisory lock of PostgreSQL (R21).

A program that takes the lock by hand and a node exclude each other: the node leads only with the role's row and the
lock. It takes the lock first, so that it never has the row while it waits for the lock, and it releases the lock after
it has vacated the row. Candidates wait for a lock that a program has on the watch connection, as for a sentinel.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from tenure.base import clock
from tenure.core import messages, timing
from tenure.core.backoff import Backoff
from tenure.databases.postgres.sentinel import REGISTERED, AdvisorySentinel, AdvisoryWatch
from tenure.databases.postgres.session import PostgresSession
from tenure.errors import ConfigError
from tenure.store import statements
from tenure.store.control import ControlStore
from tenure.store.session import Failed, Gone, Step

log = logging.getLogger("tenure.advisory")

ROLE_LOCKS = """
from pg_catalog.pg_locks l
where l.locktype = 'advisory' and l.objsubid = 1 and l.mode = 'ExclusiveLock' and l.granted
  and l.database = (select oid from pg_catalog.pg_database where datname = pg_catalog.current_database())
"""
NUMBER = "(cast(l.classid as bigint) << 32 | cast(l.objid as bigint))"
"""The number of a lock in ``ROLE_LOCKS``, which are the locks of this database that have one number."""
TRY = "pg_catalog.pg_try_advisory_lock(cast(:lock_id as bigint))"
UNLOCK = "select pg_catalog.pg_advisory_unlock(cast(:lock_id as bigint))"

_HOLDERS = f"select l.pid {ROLE_LOCKS} and {NUMBER} = :lock_id"
_MINE = f"exists ({_HOLDERS} and l.pid = pg_catalog.pg_backend_pid())"
_TAKE = f"""
select case when {_MINE} then 'mine' when {TRY} then 'taken' else 'refused' end
from {{roles}} r left join {{members}} m on m.id = r.holder and m.ended_at is null
where r.namespace = :namespace and r.name = :role and (m.id is null or m.id = :id)
"""
"""A lock is tried only if the role's row is free: a candidate must not keep it from the leader, not even for a moment.
A session can take a lock several times, and must not."""
_RELEASE = f"{UNLOCK} where {_MINE}"
_FREE = f"""
select pg_catalog.pg_terminate_backend(a.pid, 500)
from {{members}} m join pg_catalog.pg_stat_activity a on a.datname = pg_catalog.current_database() and {REGISTERED}
where m.namespace = :namespace and a.pid in ({_HOLDERS}) and a.pid <> pg_catalog.pg_backend_pid()
  and (m.id = :id or m.ended_at is not null and not exists (
    select 1 from {{members}} m where m.ended_at is null and {REGISTERED}))
"""
"""Ends the connection of an ended member that still has the lock: its process may be paused. The member's own earlier
connection may have it as well, if the server has not noticed that it is broken."""
_LEADS_WITHOUT = f"""
select m.name
from {{roles}} r join {{members}} m on m.id = r.holder and m.ended_at is null and m.id <> :id
join pg_catalog.pg_stat_activity a
  on a.pid = m.control_pid and cast(extract(epoch from a.backend_start) as text) = m.control_start
where r.namespace = :namespace and r.name = :role and m.control_pid not in ({_HOLDERS})
"""


class RoleLocks:
    """Which role has which lock, and which locks a program outside keeps this node from. The two lanes share it."""

    def __init__(self, namespace: str) -> None:
        self.blocked: frozenset[str] = frozenset()
        """Roles that are vacant, and whose lock another program had when this node last tried."""
        self._namespace = namespace
        self._ids: dict[str, int] = {}
        self._lock = threading.Lock()
        self._pauses: dict[str, Backoff] = defaultdict(lambda: Backoff(2 * timing.RETRY_S, timing.SLICE_S))

    def assign(self, role: str, lock_id: int | None) -> None:
        """Give the role its lock: the one named, the one it has, or the default."""
        with self._lock:
            known = self._ids.get(role)
            number = lock_id if lock_id is not None else known if known is not None else self._default(role)
            if known not in (None, number):
                raise ConfigError(f"role {role!r} already has lock_id={known} in this node: give that, not {lock_id}")
            if number is None:
                return
            if other := next((name for name, taken in self._ids.items() if taken == number and name != role), None):
                raise ConfigError(f"lock_id={number} is the lock of role {other!r}: give role {role!r} another")
            self._ids[role] = number

    def _default(self, role: str) -> int | None:  # noqa: ARG002
        """Return the lock of a role for which none was named: none."""
        return None

    def __getitem__(self, role: str) -> int:
        return self._ids[role]

    def __contains__(self, role: str) -> bool:
        return role in self._ids

    def __len__(self) -> int:
        return len(self._ids)

    def block(self, roles: Iterable[str], *, of: Iterable[str]) -> None:
        """Record which roles of some are blocked."""
        with self._lock:
            self.blocked = self.blocked.difference(of).union(roles)

    def paused(self, free: Iterable[str]) -> set[str]:
        """Return which of these roles are blocked, and left alone for now, although no session has the lock to itself.

        Programs have the lock in shared mode, or were in its queue before this node. A wait for it would end at once,
        and a try would fail, so the tries become rarer. A role whose pause is over is no longer blocked.
        """
        blocked, now = self.blocked.intersection(free), clock.now()
        paused = {role for role in blocked if now < self._pauses[role].at}
        for role in blocked - paused:
            self._pauses[role].ended(self._pauses[role].at, now)
        self.block(paused, of=blocked)
        return paused


class LockingStore(ControlStore):
    """The control lane's requests, with the locks of roles."""

    session: PostgresSession

    def __init__(self, *args: Any, locks: RoleLocks, **options: Any) -> None:
        super().__init__(*args, **options)
        self._locks = locks
        self._locked: set[str] = set()
        """Roles whose lock this connection holds."""
        self._told: set[tuple[str, str]] = set()

    def _join(self, request: messages.Join) -> messages.Joined:
        self._release(self._locked)
        return super()._join(request)

    def _resume(self, request: messages.Resume) -> messages.Standing:
        """Take the locks, then the row. A role whose lock another program has by now is reported as unlocked."""
        self._take(request.locks, request.member.id)
        return super()._resume(request)

    def _standing(self, *args: Any, **options: Any) -> messages.Standing:
        standing = super()._standing(*args, **options)
        if not self._locks:
            return standing
        held = (
            mine._replace(unlocked=mine.role in self._locks and mine.role not in self._locked) for mine in standing.held
        )
        return standing._replace(held=tuple(held))

    def _acquire(self, request: messages.Acquire) -> messages.Acquired:
        """Take the locks, then the rows; release the locks of roles whose row another node has."""
        bound = [role for role in request.roles if role in self._locks]
        if not bound:
            return super()._acquire(request)
        before = set(self._locked)
        self._take(bound, request.member_id)
        roles = tuple(role for role in request.roles if role not in self._locks or role in self._locked)
        acquired = messages.Acquired({})
        try:
            if roles:
                acquired = super()._acquire(request._replace(roles=roles))
        finally:
            self._release(self._locked.intersection(bound).difference(before, acquired.tokens))
        return acquired

    def _vacate(self, request: messages.Vacate) -> messages.Vacated:
        vacated = super()._vacate(request)
        # Again, since what follows a commit is best effort.
        if vacated.done:
            self._release(self._locked.intersection((request.role,)))
        return vacated

    def _unlock_after(self, vacate: messages.Vacate | None = None) -> None:
        if vacate is None:
            self.session.follow(*(Step(UNLOCK, {"lock_id": self._locks[name]}) for name in sorted(self._locked)))
        elif vacate.role in self._locked:
            term = {"id": vacate.member_id, "role": vacate.role, "token": vacate.token}
            unlock = self._step(f"{UNLOCK} where not exists ({statements.MINE})", **term)
            self.session.follow(unlock._replace(parameters=unlock.parameters | {"lock_id": self._locks[vacate.role]}))

    def _take(self, roles: Sequence[str], member_id: str) -> None:
        """Try each lock whose role is free. Try twice: a candidate that wakes up holds the lock for a moment."""
        if roles and self.session.pooled:
            raise Failed("lock_id= needs a direct connection: give a direct_url= that leads to PostgreSQL itself")
        before = set(self._locked)
        try:
            refused, held = self._try(roles, member_id)
            if refused:
                self._free(refused, member_id)
                refused, more = self._try(refused, member_id)
                held += more
        except Failed:
            # A lock that was granted stays, although the statement after it failed.
            self._release(set(roles).difference(before))
            raise
        self._locks.block(refused, of=roles)
        self._release(self._locked.intersection(held))
        self._warn(held, member_id)

    def _try(self, roles: Sequence[str], member_id: str) -> tuple[list[str], list[str]]:
        """Return the roles whose lock was refused, and those whose row another node has."""
        tries = self._each(_TAKE, roles, member_id)
        refused, held = [], []
        for role, rows in zip(roles, tries, strict=True):
            if not rows:
                held.append(role)
            elif rows[0][0] == "refused":
                refused.append(role)
            else:
                self._locked.add(role)
        return refused, held

    def _free(self, roles: Sequence[str], member_id: str) -> None:
        """End connections of ended members that have the locks. Best effort: the node must be permitted to."""
        try:
            for role, rows in zip(roles, self._each(_FREE, roles, member_id), strict=True):
                if rows:
                    log.info("terminated a connection that a former member had left, with the lock of role %s", role)
        except Failed as error:
            log.warning("cannot end the connection of an ended member that has the lock of a role: %s", error)

    def _release(self, roles: Iterable[str]) -> None:
        """Release locks that this connection may hold. If that fails, the connection is given up, and they with it."""
        roles = sorted(roles)
        if not roles:
            return
        try:
            self._each(_RELEASE, roles, "")
        except Failed as error:
            raise Gone(f"the lock of a role could not be released: {error}") from error
        self._locked.difference_update(roles)

    def _warn(self, roles: Sequence[str], member_id: str) -> None:
        """Log once per leader that it leads without the lock that this node would need."""
        for role, rows in zip(roles, self._each(_LEADS_WITHOUT, roles, member_id), strict=True):
            for (name,) in rows:
                if (role, name) not in self._told:
                    self._told.add((role, name))
                    log.warning(
                        "role %s has lock_id=%d here, but node %s leads it without that lock, so a program that takes "
                        "the lock by hand can work beside it: give every node the same lock_id, unless you are "
                        "removing it now",
                        *(role, self._locks[role], name),
                    )

    def _each(self, text: str, roles: Sequence[str], member_id: str) -> list[Sequence[tuple[Any, ...]]]:
        """Run a statement for each of the roles, in one round trip; return the rows of each."""
        if not roles:
            return []
        steps = (self._step(text, role=role, id=member_id, lock_id=self._locks[role]) for role in roles)
        return [result.rows for result in self.session.read(*steps)]


class NumberedSentinel(AdvisorySentinel):
    """Waits for a lock by its number, instead of a member's sentinel."""

    def lock(self, key: int) -> str:
        return f"cast({int(key)} as bigint)"


class LockingWatch(AdvisoryWatch):
    """The watch lane. While a program outside has the lock of a vacant role, it waits for that lock."""

    def __init__(self, session: PostgresSession, sentinel: AdvisorySentinel, *args: Any, locks: RoleLocks) -> None:
        super().__init__(session, sentinel, *args)
        self._waiter = NumberedSentinel(session)
        self._locks = locks
        self._paused: set[str] = set()
        """Blocked roles for whose lock there is no wait: see ``RoleLocks.paused``."""

    def waits(self, request: messages.Look) -> bool:
        return super().waits(request) or not self._locks.blocked <= self._paused

    def look(self, request: messages.Look) -> messages.Looked:
        """Wait for the first of the locks, if there are any, and look. Roles whose lock is not free do not count."""
        _, held = self._vacant_and_held(request)
        if held:
            # Not in one round trip with the rest: the lock that the wait is granted would show as held.
            self._waiter.wait(self._locks[min(held)], request.seconds)
            request = request._replace(wait_for=None)
        looked = super().look(request)
        # After the look: the control lane may have been refused meanwhile.
        vacant, held = self._vacant_and_held(request)
        self._paused = self._locks.paused(vacant - held)
        return looked._replace(vacancy=looked.vacancy and (not vacant or vacant > held | self._paused))

    def _vacant_and_held(self, request: messages.Look) -> tuple[set[str], set[str]]:
        """If roles are blocked, return which are vacant, and which of these have a lock that is worth a wait.

        Blocked roles that are no longer vacant are unblocked.
        """
        blocked = sorted(self._locks.blocked)
        if not blocked:
            return set(), set()
        vacancies, *holders = self.session.read(
            Step(statements.VACANT, {"namespace": self.namespace, "id": request.member_id}),
            *(Step(_HOLDERS, {"lock_id": self._locks[role]}) for role in blocked),
        )
        vacant = {row[0] for row in vacancies.rows}
        self._locks.block(vacant.intersection(blocked), of=blocked)
        return vacant, vacant.intersection(role for role, rows in zip(blocked, holders, strict=True) if rows.rows)
