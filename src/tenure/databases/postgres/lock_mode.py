"""Mode ``lock``: an advisory lock of PostgreSQL is the authority. No table, no privilege, and no token.

The node that holds the lock with a role's number leads. Any program that knows the number can take part: one that
calls ``pg_try_advisory_lock`` by hand and a node exclude each other. The protocol is the same as in the other modes.
Here the server's list of locks answers its requests:

- the control connection holds the locks, so a term ends at once when that connection breaks;
- a renewal reads that list, which proves that the connection and its locks still exist. As in every mode, trust ends
  before the server gives up on a connection;
- the watch connection waits until a lock that another process holds is free.

A process that is paused keeps its lock for as long as it is paused, and nothing refuses a stale write. That is what the
lease and the token of the other modes are for.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict

from tenure.base import clock
from tenure.core import messages, timing
from tenure.core.messages import Held, Opened, Sighting, Vacancy
from tenure.core.servers import Confirmed, Server
from tenure.core.timing import LONG_AGO
from tenure.databases import backend
from tenure.databases.postgres.backend import PostgresBackend
from tenure.databases.postgres.role_locks import NUMBER, ROLE_LOCKS, TRY, UNLOCK, NumberedSentinel, RoleLocks
from tenure.databases.postgres.sentinel import AdvisorySentinel
from tenure.databases.postgres.session import PostgresSession
from tenure.errors import StoreUnavailable
from tenure.settings import NodeSettings
from tenure.store.control import ControlStore, Identity
from tenure.store.session import Session, Step
from tenure.store.watch import WatchActions, WatchStore

FOREVER = float("inf")
LEFT_FREE_S = 2 * timing.SLICE_S
"""How long a lock that was given up is left to other processes. One that waits for it takes it far sooner."""

_RELEASE_ALL = "select pg_catalog.pg_advisory_unlock_all()"
_LOCKS = f"select {NUMBER}, l.pid {ROLE_LOCKS}"


class DerivedLocks(RoleLocks):
    """The locks of all roles, and which roles the node stands for."""

    def __init__(self, namespace: str) -> None:
        super().__init__(namespace)
        self.standing: set[str] = set()
        self.left_free_until: dict[str, float] = defaultdict(lambda: LONG_AGO)
        """Until when a lock that was given up is left to others: the server does not show which processes want it."""

    def _default(self, role: str) -> int:
        digest = hashlib.sha256(f"tenure {self._namespace}\0{role}".encode()).digest()
        return int.from_bytes(digest[:8], "big", signed=True)


def holders(session: Session) -> dict[int, int]:
    """Return which advisory locks of this database are held, each with the server's process that holds it."""
    return dict(session.read(Step(_LOCKS, {}))[0].rows)


class LockStore(ControlStore):
    """The control lane's requests, answered by locks on the control connection."""

    def __init__(self, session: PostgresSession, namespace: str, identity: Identity, role_locks: DerivedLocks) -> None:
        super().__init__(session, AdvisorySentinel(session), namespace, identity)
        self._locks = role_locks
        self._server = lock_server(session)
        self._terms: dict[str, int] = {}
        self._count = 0

    def open(self, ttl: float | None) -> tuple[Server, Confirmed]:
        """Return which server this is. There are no tables that could get lost."""
        return self._server, Confirmed(self._server.incarnation, 0, FOREVER, FOREVER)

    def _join(self, request: messages.Join) -> messages.Joined:
        self._leave(request)
        self._locks.standing.clear()
        return messages.Joined(sentinel=True)

    def _renew(self, request: messages.Renew) -> messages.Standing:
        held = holders(self.session)
        mine = {role: token for role, token in self._terms.items() if self._holds(held, role)}
        return messages.Standing(
            alive=True,
            held=tuple(Held(role, token) for role, token in mine.items()),
            vacant=tuple(Vacancy(role, 0) for role in sorted(self._locks.standing) if self._locks[role] not in held),
            alone_in=tuple(role for role in request.alone_in if clock.now() >= self._locks.left_free_until[role]),
        )

    def _resume(self, request: messages.Resume) -> messages.Standing:
        """Refuse: the locks ended with the connection, and other processes may have them."""
        return messages.Standing(alive=False)

    def _stand(self, request: messages.Stand) -> messages.Done:
        self._locks.standing.update(request.roles)
        self._locks.standing.difference_update(request.withdrawn)
        return messages.Done()

    def _acquire(self, request: messages.Acquire) -> messages.Acquired:
        """Try each lock once; one that this connection has already is not taken twice."""
        held = holders(self.session)
        missing = [role for role in request.roles if not self._holds(held, role)]
        # The terms are counted before the tries: if one of these fails, the locks that the others took stay.
        for role in request.roles:
            self._count += 1
            self._terms[role] = self._count
        tries = self.session.read(*(Step(f"select {TRY}", {"lock_id": self._locks[role]}) for role in missing))
        refused = {role for role, tried in zip(missing, tries, strict=True) if not tried.rows[0][0]}
        for role in refused:
            del self._terms[role]
        self._locks.block(refused, of=request.roles)
        return messages.Acquired({role: self._terms[role] for role in request.roles if role not in refused})

    def _vacate(self, request: messages.Vacate) -> messages.Vacated:
        if request.role in self._terms:
            self._locks.left_free_until[request.role] = clock.now() + LEFT_FREE_S
            self.session.read(Step(UNLOCK, {"lock_id": self._locks[request.role]}))
            # Deleted after the release: a release that fails is requested again.
            del self._terms[request.role]
        return messages.Vacated(done=True)

    def _leaders(self, request: messages.Leaders) -> messages.LeadersAre:
        """Return no leaders: a lock does not name its holder."""
        return messages.LeadersAre(())

    def _tidy(self, request: messages.Tidy) -> messages.Done:
        return messages.Done()

    def _leave(self, request: messages.Leave | messages.Join) -> messages.Done:
        self.session.read(Step(_RELEASE_ALL, {}))
        self._terms.clear()
        return messages.Done()

    def _holds(self, held: dict[int, int], role: str) -> bool:
        return held.get(self._locks[role]) == self.session.pid


class LockWatch(WatchStore):
    """The watch lane's requests. A role whose lock another process holds counts as a member to wait for."""

    def __init__(self, session: PostgresSession, namespace: str, role_locks: DerivedLocks) -> None:
        self._waiter = NumberedSentinel(session)
        super().__init__(session, self._waiter, WatchActions(), namespace, lambda: None)
        self._locks = role_locks
        self._server = lock_server(session)

    def look(self, request: messages.Look) -> messages.Looked:
        """Wait for a lock to be freed; then read which locks others hold, and which are free."""
        # Not in one round trip with the rest: the lock that the wait is granted would show as held.
        if request.wait_for is not None:
            self._waiter.wait(request.wait_for, request.seconds)
        (locks,) = self._waiter.survey(None, 0, Step(_LOCKS, {}))
        held = dict(locks.rows)
        keys = [(role, self._locks[role]) for role in sorted(self._locks.standing)]
        others = tuple(
            # No silence or death is judged here: the server knows which process has a lock.
            Sighting(role, FOREVER, 0, key, 0, "", sentinel_stands=True)
            for role, key in keys
            if held.get(key, self.control_pid) != self.control_pid
        )
        free = {role for role, key in keys if key not in held}
        vacancy = free > self._locks.paused(free)
        return messages.Looked(self._server, others, vacancy, self._waiter.slice_s)


def lock_server(session: PostgresSession) -> Server:
    """Return which server this is. Its locks last as long as it runs, and nothing else matters here."""
    return Server(session.server_start, "lock")


class LockBackend(PostgresBackend):
    """PostgreSQL's advisory locks alone."""

    mode: str | None = "lock"
    has_tokens = False

    def __init__(self, settings: NodeSettings) -> None:
        super().__init__(settings)
        self._locks: DerivedLocks = DerivedLocks(settings.namespace)

    def assign_lock(self, role: str, lock_id: int | None) -> None:
        self._locks.assign(role, lock_id)

    def open_control(self, server_answered: backend.TellStart = backend.ignore_start) -> backend.Control:
        session = self._open("control", self._settings.renew_every)
        server_answered(session.server_start)
        with backend.closing_on_error(session), self._connector.time_limit(session.connection, backend.OPEN_TIMEOUT_S):
            if not AdvisorySentinel(session).holds():
                raise StoreUnavailable("mode='lock' needs advisory locks, which have no effect here: use mode='lease'")
        store = LockStore(session, self._settings.namespace, backend.this_process(), self._locks)
        return store, session, Opened(*store.open(None))

    def open_watch(self) -> backend.Watch:
        session = self._open_watch_session()
        return LockWatch(session, self._settings.namespace, self._locks), session
