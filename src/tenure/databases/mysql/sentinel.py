"""Sentinels as MariaDB's user-level locks (``GET_LOCK``), and what the watcher may do to other connections.

The lock belongs to the connection, so the server frees it when the process dies. What is different from PostgreSQL:

- A name is the whole server's, so it says which database it is for; it has 64 characters at most.
- There is no shared mode. Who waits is granted the lock for a moment, and lets go of it in the same packet: whatever
  becomes of the waiter, nothing stays held. A look in that very moment sees a lock that stands, and the next does not.
- A connection may end others of its own user without any privilege, but not see what they wait for: transactions that
  keep a role locked are ended by their own bound only.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence

from tenure import clock, timing
from tenure.dialects import listed
from tenure.mysql import MySqlSession
from tenure.session import Failed, Step

log = logging.getLogger("tenure.user_locks")

MOMENT_S = 0.1
"""Longer than somebody who waited has a lock, and shorter than anybody cares."""
RETAKE_S = 1.0
GONE_S = 0.5
"""How long a connection that was ended may take to be gone."""
NOT_THERE = 1094

_REGISTERED = """
select {kind}_pid from {{members}} m
where m.namespace = :namespace and m.{kind}_start = :started and m.{kind}_pid <> connection_id() and m.id in {{listed}}
"""
_EVICTED = """ and m.ended_at is not null and not exists (select 1 from {{members}} o where o.ended_at is null
    and o.{kind}_start = m.{kind}_start and o.{kind}_pid = m.{kind}_pid)"""
"""Not where the node has woken and joined again on the same connections."""
_OUSTED = " and m.ended_at is null and m.renewals = :renewals"


class UserLockSentinel:
    """Holds, waits for and looks at user-level locks on one connection."""

    def __init__(self, session: MySqlSession) -> None:
        """Use the session's connection; its life is the locks' life."""
        import hashlib  # noqa: PLC0415 - it loads OpenSSL, which nobody needs who does not come here

        self._session = session
        digest = hashlib.sha256(session.database.encode()).hexdigest()
        self._prefix = f"tenure_{digest[:32]}_"

    def name(self, key: int) -> str:
        """Return the name of a lock, on the whole server."""
        return f"{self._prefix}{key}"

    def hold(self, key: int) -> bool:
        """Take the lock; False if somebody else has it."""
        return self._take(key, 0)

    def _take(self, key: int, seconds: float) -> bool:
        step = Step("select get_lock(:name, :seconds)", {"name": self.name(key), "seconds": seconds})
        return bool(self._session.read(step)[0].rows[0][0])

    def retake(self, key: int) -> bool:
        """Take the lock again; an older connection of ours that still has it is ended first.

        Only an older one: a request that was delayed on its way must not end the connection that replaced it.
        """
        if self._take(key, MOMENT_S):
            return True
        ((holder,),) = self._session.read(Step("select is_used_lock(:name)", {"name": self.name(key)}))[0].rows
        if holder is not None and holder < self._session.pid:
            self.end(holder)
        return self._take(key, RETAKE_S)

    def end(self, pid: int) -> bool:
        """End a connection of the same user; False if it is gone already."""
        try:
            self._session.read(Step("kill connection :pid", {"pid": pid}))
        except Failed as error:
            if error.__cause__ is not None and error.__cause__.args[0] == NOT_THERE:
                return False
            raise
        return True

    def oust(self, namespace: str, member_id: str, renewals: int | None) -> None:
        """End the connections of a member that has been silent at this count of renewals for its TTL.

        Its trust is over, so nothing is lost by it but the transaction in which it stands still.
        """
        ended = self.end_all(_OUSTED, namespace, (member_id,), renewals=renewals)
        until = clock.now() + GONE_S
        while ended and self._alive(ended) and clock.now() < until:
            time.sleep(GONE_S / 50)
        if ended:
            log.info("ended %d connections of a member that fell silent in a transaction: %s", len(ended), member_id)

    def end_all(self, which: str, namespace: str, member_ids: tuple[str, ...], **more: object) -> list[int]:
        """End those connections of some members that are this server's; return which there were."""
        parameters = {"namespace": namespace, "started": self._session.started, "names": listed(member_ids), **more}
        steps = [Step((_REGISTERED + which).format(kind=kind), parameters) for kind in ("control", "watch")]
        pids = {pid for found in self._session.read(*steps) for (pid,) in found.rows}
        return [pid for pid in sorted(pids) if self.end(pid)]

    def _alive(self, pids: list[int]) -> bool:
        step = Step("select 1 from information_schema.processlist where id in :pids", {"pids": pids})
        return bool(self._session.read(step)[0].rows)

    def release(self, key: int) -> None:
        """Let go of the lock."""
        self._session.read(Step("do release_lock(:name)", {"name": self.name(key)}))

    def sweep(self, keys: set[int]) -> None:
        """Do nothing: the server forgets a lock with its connection."""

    def abandon(self) -> None:
        """Do nothing: the lock is the connection's."""

    def duplicates(self) -> list[int]:
        """Return a duplicate of the connection's socket: to the server, the connection stands until it is closed."""
        return [os.dup(self._session.fileno())]

    def wait(self, key: int, seconds: float) -> None:
        """Wait until nobody holds the lock, for so long at most, and leave nothing held."""
        name = {"name": self.name(key)}
        self._session.read(
            Step("do get_lock(:name, :seconds)", {**name, "seconds": seconds}), Step("do release_lock(:name)", name)
        )

    def standing(self, keys: Sequence[int]) -> set[int]:
        """Return which of the locks are held."""
        if not keys:
            return set()
        looks = " union all ".join(f"select {int(key)}, is_used_lock('{self.name(key)}')" for key in keys)
        return {key for key, holder in self._session.read(Step(looks, {}))[0].rows if holder is not None}


class UserLockWatcher:
    """What the watch connection may do to others: end zombies."""

    def __init__(self, sentinel: UserLockSentinel) -> None:
        """Act on the watch connection."""
        self._sentinel = sentinel

    def slice_s(self) -> float:
        """Return the longest wait between two looks: nothing is logged about a wait."""
        return timing.SLICE_S

    def evict(self, namespace: str, member_ids: tuple[str, ...]) -> None:
        """End the connections of members that were ended; best effort, the lease stands anyway."""
        try:
            ended = self._sentinel.end_all(_EVICTED, namespace, member_ids)
        except Failed as error:
            log.warning("cannot end the connections of a member that was ended: %s", error)
            return
        if ended:
            log.info("ended %d connections of members that were ended: %s", len(ended), ", ".join(member_ids))

    def unblock(self, namespace: str, control_pid: int, bound_s: float) -> None:
        """Do nothing: who blocks whom is shown to privileged users only."""
