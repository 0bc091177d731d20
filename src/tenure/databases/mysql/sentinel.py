"""Sentinels as MariaDB's user-level locks (``GET_LOCK``), and what the watcher can do to other connections.

The lock belongs to the connection, so the server frees it when the process dies. The differences from PostgreSQL:

- A lock's name is valid on the whole server, so it identifies the database. It has at most 64 characters.
- There is no shared mode. A waiter is granted the lock for a moment and releases it in the same statement, so nothing
  stays held whatever becomes of the waiter. A look in that moment sees the lock as held; the next look does not.
- A connection may end other connections of its database user without any privilege, but cannot see what they wait
  for. So a transaction that keeps a role locked is ended by its own bound only.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Sequence

from tenure.base import clock
from tenure.core import messages
from tenure.core.messages import Sighting
from tenure.databases.mysql.session import TRIES, MySqlSession
from tenure.store.dialects import listed
from tenure.store.session import Failed, Result, Step
from tenure.store.watch import WatchActions, WatchStore

log = logging.getLogger("tenure.user_locks")

GONE_S = 0.5
"""How long a connection may take to disappear after it was killed."""
NOT_THERE = 1094
INTERRUPTED = 1317

_REGISTERED = """
select {kind}_pid from {{members}} m
where m.namespace = :namespace and m.{kind}_start = :started and m.{kind}_pid <> connection_id() and m.id in {{listed}}
"""
_EVICTED = """ and m.ended_at is not null and not exists (select 1 from {{members}} o where o.ended_at is null
    and o.{kind}_start = m.{kind}_start and o.{kind}_pid = m.{kind}_pid)"""
"""Spares the connections of a node that has woken up and joined again on them."""
_OUSTED = " and m.ended_at is null and m.renewals = :renewals"


class UserLockSentinel:
    """Holds, waits for and reads user-level locks on one connection."""

    def __init__(self, session: MySqlSession) -> None:
        self._session = session
        digest = hashlib.sha256(session.database.encode()).hexdigest()
        self._prefix = f"tenure_{digest[:32]}_"

    def name(self, key: int) -> str:
        """Return the name of a lock, which is valid on the whole server."""
        return f"{self._prefix}{key}"

    def hold(self, key: int) -> bool:
        step = Step("select get_lock(:name, 0)", {"name": self.name(key)})
        return bool(self._session.read(step)[0].rows[0][0])

    def end(self, pid: int) -> bool:
        """Kill a connection of the same user; return False if it is gone already."""
        try:
            self._session.read(Step("kill connection :pid", {"pid": pid}))
        except Failed as error:
            if _is(error, NOT_THERE):
                return False
            raise
        return True

    def terminate_silent_member(self, namespace: str, member_id: str, renewals: int | None) -> None:
        """Kill the connections of a member that has been silent at this count of renewals for its TTL.

        Its trust is over, so it only loses the transaction in which it hangs.
        """
        ended = self.end_all(_OUSTED, namespace, (member_id,), renewals=renewals)
        until = clock.now() + GONE_S
        while ended and self._alive(ended) and clock.now() < until:
            time.sleep(GONE_S / 50)
        if ended:
            log.info("ended %d connections of a member that fell silent in a transaction: %s", len(ended), member_id)

    def end_all(self, which: str, namespace: str, member_ids: tuple[str, ...], **more: object) -> list[int]:
        """Kill the connections that some members have to this server; return their numbers."""
        parameters = {"namespace": namespace, "started": self._session.started, "names": listed(member_ids), **more}
        steps = [Step((_REGISTERED + which).format(kind=kind), parameters) for kind in ("control", "watch")]
        pids = {pid for found in self._session.read(*steps) for (pid,) in found.rows}
        return [pid for pid in sorted(pids) if self.end(pid)]

    def _alive(self, pids: list[int]) -> bool:
        step = Step("select 1 from information_schema.processlist where id in :pids", {"pids": pids})
        return bool(self._session.read(step)[0].rows)

    def release(self, key: int) -> None:
        self._session.read(Step("do release_lock(:name)", {"name": self.name(key)}))

    def sweep(self, keys: set[int]) -> None:
        """Do nothing: the server frees a lock with its connection."""

    def abandon(self) -> None:
        """Do nothing: the lock belongs to the connection."""

    def duplicates(self) -> list[int]:
        """Return a duplicate of the connection's socket: for the server, the connection lasts until that is closed."""
        return [os.dup(self._session.fileno())]

    def wait(self, key: int, seconds: float) -> None:
        """Wait until the lock is free, or until another node ends the wait because a role is vacant (R24)."""
        wait = "do if(get_lock(:name, :seconds), release_lock(:name), 0)"
        try:
            self._session.read(Step(wait, {"name": self.name(key), "seconds": seconds}))
        except Failed as error:
            if not _is(error, INTERRUPTED):
                raise

    def standing(self, keys: Sequence[int]) -> set[int]:
        if not keys:
            return set()
        looks = " union all ".join(f"select {int(key)}, is_used_lock('{self.name(key)}')" for key in keys)
        return {key for key, holder in self._session.read(Step(looks, {}))[0].rows if holder is not None}


def _is(failure: Failed, number: int) -> bool:
    """Whether the server gave this number for a failure."""
    return failure.__cause__ is not None and failure.__cause__.args[:1] == (number,)


class UserLockWatch(WatchStore):
    """The watch lane, on a connection where another node may end a statement because a role is vacant (R24)."""

    def _survey(self, request: messages.Look, roster: Step, vacancy: Step) -> tuple[tuple[Sighting, ...], Result]:
        """Wait, then read. If that was meant to end the wait, and came too late, read again: the role may be missed."""
        if request.wait_for is not None:
            self.sentinel.wait(request.wait_for, request.seconds)
        for last in (*[False] * (TRIES - 1), True):
            try:
                return super()._survey(request._replace(wait_for=None), roster, vacancy)
            except Failed as error:
                if last or not _is(error, INTERRUPTED):
                    raise
        raise AssertionError


class UserLockActions(WatchActions):
    """What the watch connection can do to others: end those of ended members.

    It cannot unblock the control connection: only privileged users see which transaction blocks another one.
    """

    def __init__(self, sentinel: UserLockSentinel) -> None:
        self._sentinel = sentinel

    def evict(self, namespace: str, member_ids: tuple[str, ...]) -> None:
        try:
            ended = self._sentinel.end_all(_EVICTED, namespace, member_ids)
        except Failed as error:
            log.warning("cannot end the connections of a member that was ended: %s", error)
            return
        if ended:
            log.info("closed connections (%d) that former members had left: %s", len(ended), ", ".join(member_ids))
