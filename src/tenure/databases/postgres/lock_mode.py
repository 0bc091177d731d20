"""Mode ``lock``: an advisory lock of PostgreSQL is the authority. No table, no privilege, and no token.

Who holds the lock with a role's number leads. Anybody who knows the number can take part: a program that calls
``pg_try_advisory_lock`` by hand and a node exclude each other. The protocol is the same as everywhere; here its asks
are answered from the server's list of locks:

- the node's own connection carries the locks, so a connection that broke is a term that is over, at once;
- a renewal is a look at that list: it proves that the connection stands and the locks with it. Trust ends before the
  server gives up on a connection, as everywhere;
- the watch connection waits until one of the locks that others hold is free.

A process that is paused keeps its lock for as long as it is paused, and nothing refuses a stale write: that is what the
lease and the token are for.
"""

from __future__ import annotations

import threading
from collections import defaultdict

from tenure import asks, clock, timing
from tenure.advisory import AdvisorySentinel
from tenure.asks import Confirmed, Held, Server, Sighting, Vacancy
from tenure.candidacy import LONG_AGO
from tenure.errors import ConfigError
from tenure.postgres import PostgresSession
from tenure.session import Session, Step
from tenure.store import Identity, Store
from tenure.watch import Bystander, Watch

FOREVER = float("inf")
LEFT_FREE_S = 2 * timing.SLICE_S
"""How long a lock that was given up is left to others. One who waits for it takes it in far less."""

_TRY = "select pg_catalog.pg_try_advisory_lock(cast(:lock_id as bigint))"
_RELEASE = "select pg_catalog.pg_advisory_unlock(cast(:lock_id as bigint))"
_RELEASE_ALL = "select pg_catalog.pg_advisory_unlock_all()"
_LOCKS = """
select cast(l.classid as bigint) << 32 | cast(l.objid as bigint), l.pid
from pg_catalog.pg_locks l
where l.locktype = 'advisory' and l.objsubid = 1 and l.mode = 'ExclusiveLock' and l.granted
  and l.database = (select oid from pg_catalog.pg_database where datname = pg_catalog.current_database())
"""


class LockBook:
    """Which lock stands for which role, and which roles the node stands for: what the two lanes share."""

    def __init__(self, namespace: str) -> None:
        """Know no role yet."""
        self.standing: set[str] = set()
        self.left_free_until: dict[str, float] = defaultdict(lambda: LONG_AGO)
        """Until when a lock that was given up is left to others: who else wants it cannot be seen."""
        self._namespace = namespace
        self._ids: dict[str, int] = {}
        self._lock = threading.Lock()

    def assign(self, role: str, lock_id: int | None) -> None:
        """Give the role its lock: the one named, the one it has, or one made of its name."""
        with self._lock:
            known = self._ids.get(role)
            number = lock_id if lock_id is not None else known if known is not None else self._derived(role)
            if known not in (None, number):
                raise ConfigError(f"role {role!r} has lock_id={known} in this node already, not {lock_id}")
            if other := next((name for name, taken in self._ids.items() if taken == number and name != role), None):
                raise ConfigError(f"lock_id={number} is the lock of role {other!r}: give role {role!r} another")
            self._ids[role] = number

    def __getitem__(self, role: str) -> int:
        """Return the role's lock."""
        return self._ids[role]

    def _derived(self, role: str) -> int:
        import hashlib  # noqa: PLC0415 - it loads OpenSSL, which nobody needs who does not come here

        digest = hashlib.sha256(f"tenure {self._namespace}\0{role}".encode()).digest()
        return int.from_bytes(digest[:8], "big", signed=True)


def holders(session: Session) -> dict[int, int]:
    """Return which advisory locks of this database are held, and by which process of the server's."""
    return dict(session.read(Step(_LOCKS, {}))[0].rows)


class LockStore(Store):
    """The control lane's asks, answered by locks on the control connection."""

    def __init__(self, session: PostgresSession, namespace: str, identity: Identity, book: LockBook) -> None:
        """Work on an open, direct session."""
        super().__init__(session, AdvisorySentinel(session), namespace, identity)
        self._book = book
        self._server = lock_server(session)
        self._terms: dict[str, int] = {}
        self._count = 0

    def open(self, default_max_ttl: float) -> tuple[Server, Confirmed]:
        """Return which server this is. There are no tables that could be lost."""
        return self._server, Confirmed(self._server.incarnation, 0, FOREVER)

    def _join(self, ask: asks.Join) -> asks.Joined:
        self._leave(ask)
        self._book.standing.clear()
        return asks.Joined(sentinel=True)

    def _renew(self, ask: asks.Renew) -> asks.Standing:
        held = holders(self.session)
        mine = {role: token for role, token in self._terms.items() if self._holds(held, role)}
        return asks.Standing(
            alive=True,
            held=tuple(Held(role, token) for role, token in mine.items()),
            vacant=tuple(Vacancy(role, 0) for role in sorted(self._book.standing) if self._book[role] not in held),
            alone_in=tuple(role for role in ask.alone_in if clock.now() >= self._book.left_free_until[role]),
        )

    def _resume(self, ask: asks.Resume) -> asks.Standing:
        """Refuse: the locks are gone with the connection, and others may have them."""
        return asks.Standing(alive=False)

    def _stand(self, ask: asks.Stand) -> asks.Done:
        self._book.standing.update(ask.roles)
        self._book.standing.difference_update(ask.withdrawn)
        return asks.Done()

    def _acquire(self, ask: asks.Acquire) -> asks.Acquired:
        """Try each lock once; one that this connection has already is not taken twice."""
        held = holders(self.session)
        missing = [role for role in ask.roles if not self._holds(held, role)]
        for role in ask.roles:  # before the tries: where one of them fails, the locks that the others took stay
            self._count += 1
            self._terms[role] = self._count
        tries = self.session.read(*(Step(_TRY, {"lock_id": self._book[role]}) for role in missing))
        refused = {role for role, tried in zip(missing, tries, strict=True) if not tried.rows[0][0]}
        for role in refused:
            del self._terms[role]
        return asks.Acquired({role: self._terms[role] for role in ask.roles if role not in refused})

    def _vacate(self, ask: asks.Vacate) -> asks.Vacated:
        if ask.role in self._terms:
            self._book.left_free_until[ask.role] = clock.now() + LEFT_FREE_S
            self.session.read(Step(_RELEASE, {"lock_id": self._book[ask.role]}))
            del self._terms[ask.role]  # not before: a release that failed is asked for again
        return asks.Vacated(done=True)

    def _leaders(self, ask: asks.Leaders) -> asks.LeadersAre:
        """Know nobody: a lock has no name."""
        return asks.LeadersAre(())

    def _tidy(self, ask: asks.Tidy) -> asks.Done:
        return asks.Done()

    def _leave(self, ask: asks.Leave | asks.Join) -> asks.Done:
        self.session.read(Step(_RELEASE_ALL, {}))
        self._terms.clear()
        return asks.Done()

    def _holds(self, held: dict[int, int], role: str) -> bool:
        return held.get(self._book[role]) == self.session.pid


class LockSentinel(AdvisorySentinel):
    """Waits for a role's lock instead of a member's."""

    def lock(self, key: int) -> str:
        """Return a lock as the server's functions want it."""
        return f"cast({int(key)} as bigint)"


class LockWatch(Watch):
    """The watch lane's asks: who else has a lock is somebody to wait for."""

    def __init__(self, session: PostgresSession, namespace: str, book: LockBook) -> None:
        """Work on an open, direct session."""
        self._waiter = LockSentinel(session)
        super().__init__(session, self._waiter, Bystander(), namespace, lambda: None)
        self._book = book
        self._server = lock_server(session)

    def look(self, member_id: str, wait_for: int | None = None, seconds: float = 0.0) -> asks.Looked:
        """Wait for a lock to be freed, so long at most; then see which are held by others, and which by nobody."""
        if wait_for is not None:  # not in one round trip with the rest: what it was granted would show as held
            self._waiter.wait(wait_for, seconds)
        (locks,), _ = self._waiter.survey(None, 0, Step(_LOCKS, {}))
        held = dict(locks.rows)
        keys = [(role, self._book[role]) for role in sorted(self._book.standing)]
        others = tuple(
            # Nobody's silence or death is judged here: the server knows who has a lock.
            Sighting(role, FOREVER, 0, key, 0, "", sentinel_stands=True)
            for role, key in keys
            if held.get(key, self.control_pid) != self.control_pid
        )
        vacancy = any(key not in held for _, key in keys)
        return asks.Looked(self._server, others, vacancy, self._waiter.slice_s)


def lock_server(session: PostgresSession) -> Server:
    """Return which server this is: its locks live as long as it runs, and nothing else matters here."""
    return Server(session.server_start, "lock")
