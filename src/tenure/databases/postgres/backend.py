"""How a node reaches PostgreSQL, directly or through a pooler."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

from tenure.core import messages, timing
from tenure.databases import backend
from tenure.databases.connecting import shut_down_socket
from tenure.databases.postgres.connect import PostgresConnector
from tenure.databases.postgres.role_locks import LockingStore, LockingWatch, RoleLocks
from tenure.databases.postgres.sentinel import AdvisoryActions, AdvisorySentinel
from tenure.databases.postgres.session import PostgresSession
from tenure.errors import ConfigError, PoolerDetected, StoreUnavailable
from tenure.settings import NodeSettings
from tenure.store import statements
from tenure.store.dialects import listed
from tenure.store.session import Failed, Step
from tenure.store.watch import NoSentinel, WatchActions, WatchStore

log = logging.getLogger("tenure.backends")


class PostgresStore(LockingStore):
    """The control lane, which runs each statement once in advance: PostgreSQL is quicker the second time.

    It does that once the node has joined and taken what is vacant, so that a start does not take longer.
    """

    _joined = ""
    """The member that has joined on this connection. One that joined on an earlier connection renews here first."""
    _rehearsed = False

    def __init__(self, *given: Any, locks: RoleLocks, end_wait: Callable[[], None]) -> None:
        super().__init__(*given, locks=locks)
        self._end_wait = end_wait

    def _leave(self, request: messages.Leave) -> messages.Done:
        done = super()._leave(request)
        self._end_wait()
        return done

    def _join(self, request: messages.Join) -> messages.Joined:
        joined = super()._join(request)
        self._joined = request.member.id
        return joined

    def _renew(self, request: messages.Renew) -> messages.Standing:
        standing = super()._renew(request)
        self._rehearse(request.member_id)
        return standing

    def _tidy(self, request: messages.Tidy) -> messages.Done:
        """Tidy up, which a node that has just started does as soon as nothing else is due."""
        done = super()._tidy(request)
        self._rehearse(self._joined)
        return done

    def _rehearse(self, member_id: str) -> None:
        """Run the steps of a takeover and of a hand-over, once on each connection."""
        if not self._rehearsed:
            self._rehearsed = True
            # The request before the rehearsal has succeeded, whatever becomes of the rehearsal.
            with contextlib.suppress(Failed):
                self.session.run(*self._rehearsal(member_id))
                self._end(backend.REHEARSAL)

    def _rehearsal(self, member_id: str) -> tuple[Step, ...]:
        """Return the steps of a takeover and of a hand-over, with parameters that make them change nothing."""
        nothing: dict[str, Any] = {"names": listed(()), "unreserved": listed(()), "name": "", "floor": 0, "ended": ""}
        nothing |= {"role": "", "token": 0, "reserved_for": None, "renewals": 0, "epoch": 0, "server_start": ""}
        locks = (statements.PROMOTION, statements.LOCK_MEMBER, statements.LOCK_FREE, statements.LOCK_LEFT)
        takeover = (*locks, statements.TAKE, statements.RECORD, statements.TAKEN, statements.VACATED)
        ends = (statements.END_DEAD, statements.MARK_RESIGNED, statements.VACATE)
        reasons = (("vacant", statements.LEFT_OVER), ("changed", statements.HOLDS), ("changed", statements.HOLDS_SOME))
        successor = self._step(statements.SUCCESSOR, id="", **nothing)
        return (
            *(self._step(text, id=member_id, **nothing) for text in takeover),
            *(self._step(text, id="", **nothing) for text in ends),
            *(
                self.session.notification(self.namespace, kind, self._step(text, id="", **nothing))
                for kind, text in reasons
            ),
            self.session.notification_of_successors(self.namespace, "", successor),
        )


class PostgresBackend(backend.Backend):
    """PostgreSQL, reached directly or through a pooler."""

    def __init__(self, settings: NodeSettings) -> None:
        super().__init__(settings)
        self._application = _connector(settings, settings.url)
        self._connector = _connector(settings, settings.direct_url) if settings.direct_url else self._application
        self._compared = False
        self._control: PostgresSession | None = None
        self._watching: tuple[int, str] | None = None
        self._locks = RoleLocks(settings.namespace)

    def assign_lock(self, role: str, lock_id: int | None) -> None:
        if lock_id is not None and "lease" in (self._settings.mode, self.mode):
            raise ConfigError(
                f"role {role!r}: lock_id={lock_id} is a lock of one session, and this node is in mode 'lease', which "
                "works without: use mode='hybrid', with a direct_url= if the URL leads through a pooler, or leave "
                "lock_id out"
            )
        self._locks.assign(role, lock_id)

    def open_control(self, server_answered: backend.TellStart = backend.ignore_start) -> backend.Control:
        session = self._open("control", self._settings.renew_every)
        server_answered(session.server_start)
        with backend.closing_on_error(session), self._connector.time_limit(session.connection, backend.OPEN_TIMEOUT_S):
            if session.pooled:
                self._picked("lease", "the URL leads through a connection pooler")
                store, opened = self._open_store(session, NoSentinel(self.stop), make=self._make_store)
                return store, session, opened._replace(sentinels=False)
            sentinel = AdvisorySentinel(session)
            holds = sentinel.holds()
            if not holds and self._settings.mode == "hybrid":
                raise StoreUnavailable(
                    "mode='hybrid' needs advisory locks, which have no effect on this server: use mode='lease' or "
                    "mode='auto'"
                )
            if not holds and self._locks:
                raise StoreUnavailable(
                    "lock_id= needs advisory locks, which have no effect on this server: leave lock_id out"
                )
            if self._settings.mode == "lease" or not holds:
                self._picked("lease", "advisory locks have no effect on this server")
            else:
                self._picked("hybrid", "the connection is direct and advisory locks hold")
            store, opened = self._open_store(session, sentinel, sentinel.terminate_silent_member, self._make_store)
            self._compare_urls()
            # A server reads no command from a client while notifications for that client arrive without a pause.
            if self._control is not None and self._control.was_cut:
                session.be_deaf("the previous connection did not answer, maybe because of too many notifications")
            self._control = session
            session.listen(self._settings.namespace, "vacant")
        return store, session, opened._replace(sentinels=holds)

    def _make_store(self, *given: Any) -> PostgresStore:
        return PostgresStore(*given, locks=self._locks, end_wait=self._end_wait)

    def _end_wait(self) -> None:
        """End the wait on the watch connection: the server may have forgotten to, and would not see its client go."""
        if self._control is not None and self._watching is not None:
            AdvisorySentinel(self._control).end_wait(*self._watching)

    def open_session(self) -> PostgresSession:
        return self._connector.open("registry", backend.LOOK_TIMEOUT_S)

    def interrupt(self) -> None:
        super().interrupt()
        self._connector.abort()

    def _open(self, purpose: str, statement_timeout_s: float) -> PostgresSession:
        """Connect a lane; raise PoolerDetected if the mode needs session locks and a pooler shares the session."""
        session = self._connector.open(purpose, statement_timeout_s)
        settings = self._settings
        needs_locks = settings.mode in ("hybrid", "lock")
        if session.pooled and (settings.direct_url or needs_locks or self._locks):
            session.close()
            given = "direct_url" if settings.direct_url else "the URL"
            needs = f"mode={settings.mode!r}" if needs_locks else "lock_id="
            what = given if settings.direct_url else f"{needs} needs a direct connection, and {given}"
            remedy = "leave lock_id out" if self._locks else "use mode='lease'"
            raise PoolerDetected(
                f"{what} leads through a connection pooler, where a session's lock protects nothing: give a "
                f"direct_url= that leads to PostgreSQL itself, or {remedy}"
            )
        return session

    def _open_watch_session(self) -> PostgresSession:
        """Connect the watch lane, and end the connection that it replaces: a wait there may hang on the server."""
        session = self._open("watch", timing.SLICE_S + self._settings.renew_every)
        if not session.pooled:
            with backend.closing_on_error(session):
                if self._watching is not None:
                    AdvisorySentinel(session).terminate_previous_watch(*self._watching)
                self._watching = session.pid, session.started
        return session

    def _compare_urls(self) -> None:
        """Raise if ``url`` leads to another database than ``direct_url``: no transaction there could be fenced."""
        if self._settings.direct_url is None or self._compared:
            return
        self._compared = True
        try:
            theirs = self._application.which()
        except StoreUnavailable:
            # The application's URL need not work yet.
            return
        if theirs != self._connector.which():
            raise ConfigError("url and direct_url lead to different databases: give two URLs of the same database")

    def _picked(self, mode: str, why: str) -> None:
        """Log once which mode was picked and why, and what it costs if it is not the best one."""
        if self.mode == mode:
            return
        self.mode = mode
        if self._settings.mode != "auto":
            return
        fields = {"tenure_node": self._settings.name, "tenure_namespace": self._settings.namespace}
        if mode == "hybrid":
            log.info("node %s: mode hybrid: %s", self._settings.name, why, extra=fields)
        else:
            log.warning(
                "node %s: mode lease: %s, so a crash is noticed after the TTL instead of at once; to change that, "
                "give a direct_url= that leads to PostgreSQL itself",
                self._settings.name,
                why,
                extra=fields,
            )

    def open_watch(self) -> backend.Watch:
        session = self._open_watch_session()
        namespace = self._settings.namespace
        if session.pooled:
            # A knock proves nothing: the pooler accepts connections whatever the server does.
            return WatchStore(session, NoSentinel(self.stop), WatchActions(), namespace, lambda: None), session
        sentinel = AdvisorySentinel(session)
        watcher = AdvisoryActions(session, sentinel)
        knock = self._connector.knocker(session)
        return LockingWatch(session, sentinel, watcher, namespace, knock, locks=self._locks), session

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Any]:
        with self._application.connect("transaction") as connection:
            # A pooler would hand a prepared statement to its next client, which could not prepare the same again.
            connection.prepare_threshold = None
            connection.autocommit = False
            # A term's holder writes, whatever the server's default is.
            connection.read_only = False
            yield connection

    def cut(self, connection: Any) -> None:
        shut_down_socket(connection)


def _connector(settings: NodeSettings, url: str) -> PostgresConnector:
    label = f"{settings.namespace}/{settings.name}"
    return PostgresConnector(url, settings.schema, settings.ttl, label, settings.password)
