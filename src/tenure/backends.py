"""Puts a node's settings and a database together: what to open for each lane."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sqlite3
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Protocol

from tenure import schema, timing
from tenure.advisory import AdvisorySentinel, AdvisoryWatch, AdvisoryWatcher, end_replaced
from tenure.asks import End, Opened, Verdict
from tenure.connector import PostgresConnector
from tenure.errors import ConfigError, PoolerDetected, StoreUnavailable
from tenure.locking import LockBook, LockStore, LockWatch
from tenure.mysql import in_transaction
from tenure.mysql_connector import MySqlConnector
from tenure.postgres import PostgresSession
from tenure.session import Failed, Sentinel, Session
from tenure.settings import NodeSettings, check_encoding
from tenure.sqlite import FileSentinel, SqliteConnector
from tenure.store import Identity, Oust, Store
from tenure.user_locks import UserLockSentinel, UserLockWatcher
from tenure.version import __version__
from tenure.watch import Bystander, NoSentinel, Watch

log = logging.getLogger("tenure.backends")


class LaneSession(Session, Protocol):
    """A session that a lane can wait on and that another thread can cut."""

    def idle(self, waker: socket.socket, seconds: float | None) -> list[str]:
        """Wait for the waker, notifications, or the end of the connection."""
        ...

    def abort(self) -> None:
        """Make whatever hangs on this connection fail at once, from any thread."""
        ...


class Backend(Protocol):
    """One node's way to its database."""

    mode: str | None
    """How leaders are elected: ``hybrid``, ``lease`` or ``lock``; None before the first connection has shown it."""
    book: LockBook | None
    """The locks of roles in mode ``lock``; None in every other mode."""

    def open_control(self, met: Callable[[str], None] = ...) -> tuple[Store, LaneSession, Opened]:
        """Connect the control lane; create the tables if need be. Tell ``met`` the server's start time at once."""
        ...

    def open_watch(self) -> tuple[Watch, LaneSession]:
        """Connect the watch lane."""
        ...

    def open_session(self) -> LaneSession:
        """Connect, for a look; create nothing."""
        ...

    def interrupt(self) -> None:
        """Let go of every wait, and of connections that are being opened: the node is closed."""
        ...

    def transaction(self) -> contextlib.AbstractContextManager[Any]:
        """Open a transaction on a connection of its own, for the application; yield the driver's connection."""
        ...


LOOK_TIMEOUT_S = 10.0
OPEN_TIMEOUT_S = 30.0
"""How long the tables may take to be found or made: longer than the wait for another node that makes them."""
WATCH_SPARE_S = 60
"""How much longer than the control connection a server keeps the watch connection, which may have nothing to do."""
_REHEARSAL = End("", (Verdict("", "death", "", epoch=0, server_start=""),))
"""Ends nobody. A connection is quicker at what it has done before, and this must be quick when it counts."""


def _nobody(server_start: str) -> None:
    """Tell nobody."""


class PostgresBackend:
    """PostgreSQL, reached directly or through a pooler."""

    mode: str | None = None
    book: LockBook | None = None

    def __init__(self, settings: NodeSettings) -> None:
        """Check the URLs; connect later."""
        self._settings = settings
        self._application = _connector(settings, settings.url)
        self._connector = _connector(settings, settings.direct_url) if settings.direct_url else self._application
        self._compared = False
        self._watching: tuple[int, str] | None = None
        self.stop = threading.Event()

    def open_control(self, met: Callable[[str], None] = _nobody) -> tuple[Store, LaneSession, Opened]:
        """Connect, create the tables, and listen."""
        session = self._open("control", self._settings.renew_every)
        met(session.server_start)
        with _closing_on_error(session), self._connector.limited(session.connection, OPEN_TIMEOUT_S):
            if session.pooled:
                self._picked("lease", "the URL leads through a connection pooler")
                store, opened = _prepared(session, NoSentinel(self.stop), self._settings)
                return store, session, replace(opened, sentinels=False)
            sentinel = AdvisorySentinel(session)
            holds = sentinel.holds()
            if not holds and self._settings.mode == "hybrid":
                raise StoreUnavailable(
                    "mode='hybrid' needs advisory locks, and they lock nothing on this server: use mode='lease', or "
                    "'auto', which picks it"
                )
            if self._settings.mode == "lease" or not holds:
                self._picked("lease", "advisory locks lock nothing on this server")
            else:
                self._picked("hybrid", "the connection is direct and advisory locks hold")
            store, opened = _prepared(session, sentinel, self._settings, sentinel.oust)
            self._compare_urls()
            session.listen(self._settings.namespace, "vacant")
            store.perform(_REHEARSAL)
        return store, session, replace(opened, sentinels=holds)

    def open_session(self) -> LaneSession:
        """Connect, for a look."""
        return self._connector.open("registry", LOOK_TIMEOUT_S)

    def interrupt(self) -> None:
        """Let go of every wait, and of connections that are being opened."""
        self.stop.set()
        self._connector.abort()

    def _open(self, purpose: str, statement_timeout_s: float) -> PostgresSession:
        """Connect a lane; raise where a lock of the session's is wanted and the session is not the node's own."""
        session = self._connector.open(purpose, statement_timeout_s)
        settings = self._settings
        if session.pooled and (settings.direct_url or settings.mode in ("hybrid", "lock")):
            session.close()
            given = "direct_url" if settings.direct_url else "the URL"
            what = given if settings.direct_url else f"mode={settings.mode!r} needs a direct connection, and {given}"
            raise PoolerDetected(
                f"{what} leads through a connection pooler, where a session's lock belongs to nobody: give a "
                "direct_url= that leads to PostgreSQL itself, or use mode='lease'"
            )
        return session

    def _open_watch_session(self) -> PostgresSession:
        """Connect the watch lane, and end what it replaces: a wait in there may hang on the server."""
        session = self._open("watch", timing.SLICE_S + self._settings.renew_every)
        if not session.pooled:
            with _closing_on_error(session):
                if self._watching is not None:
                    end_replaced(session, *self._watching)
                self._watching = session.pid, session.started
        return session

    def _compare_urls(self) -> None:
        """Raise if ``url`` leads to another database than ``direct_url``: no transaction there could be fenced."""
        if self._settings.direct_url is None or self._compared:
            return
        self._compared = True
        try:
            theirs = self._application.which()
        except StoreUnavailable:  # it need not be there yet
            return
        if theirs != self._connector.which():
            raise ConfigError("url and direct_url lead to different databases: give two ways to the same one")

    def _picked(self, mode: str, why: str) -> None:
        """Say once which mode was picked and why, and what it costs if it is not the best one."""
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
                "node %s: mode lease: %s, so a crash is noticed after the TTL instead of at once; direct_url= with a "
                "URL that leads to PostgreSQL itself brings that back",
                self._settings.name,
                why,
                extra=fields,
            )

    def open_watch(self) -> tuple[Watch, LaneSession]:
        """Connect for looking and waiting."""
        session = self._open_watch_session()
        namespace = self._settings.namespace
        if session.pooled:  # no knock counts: the pooler accepts connections whatever the server does
            return Watch(session, NoSentinel(self.stop), Bystander(), namespace, _never_open), session
        sentinel = AdvisorySentinel(session)
        watcher = AdvisoryWatcher(session, sentinel)
        return AdvisoryWatch(session, sentinel, watcher, namespace, self._connector.knock), session

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Any]:
        """Connect for the application and open a transaction."""
        with self._application.connect("transaction") as connection:
            # A pooler would give what is prepared here to its next client, who cannot prepare the same again.
            connection.prepare_threshold = None
            connection.read_only = False  # whatever the server's default is: one writes under a term
            with connection.transaction():
                yield connection


class LockBackend(PostgresBackend):
    """PostgreSQL's advisory locks alone."""

    mode: str | None = "lock"

    def __init__(self, settings: NodeSettings) -> None:
        """Check the URLs; connect later."""
        super().__init__(settings)
        self.book = self._locks = LockBook(settings.namespace)

    def open_control(self, met: Callable[[str], None] = _nobody) -> tuple[Store, LaneSession, Opened]:
        """Connect; create nothing."""
        session = self._open("control", self._settings.renew_every)
        met(session.server_start)
        with _closing_on_error(session), self._connector.limited(session.connection, OPEN_TIMEOUT_S):
            if not AdvisorySentinel(session).holds():
                raise StoreUnavailable("mode='lock' needs advisory locks, and they lock nothing here: use mode='lease'")
        store = LockStore(session, self._settings.namespace, _identity(), self._locks)
        return store, session, Opened(*store.open(timing.DEFAULT_MAX_TTL_S))

    def open_watch(self) -> tuple[Watch, LaneSession]:
        """Connect for looking and waiting."""
        session = self._open_watch_session()
        return LockWatch(session, self._settings.namespace, self._locks), session


class SqliteBackend:
    """A SQLite file on this machine."""

    mode: str | None = None
    book: LockBook | None = None

    def __init__(self, settings: NodeSettings) -> None:
        """Name the file; create it later."""
        if os.name != "posix":
            raise ConfigError("SQLite needs file locks of POSIX: use PostgreSQL on this system")
        self._settings = settings
        self._connector = SqliteConnector(settings.sqlite_path, settings.renew_every)
        self.stop = threading.Event()

    def open_control(self, met: Callable[[str], None] = _nobody) -> tuple[Store, LaneSession, Opened]:
        """Open the file and create the tables."""
        session = self._connector.open()
        met(session.server().start)
        with _closing_on_error(session):
            store, opened = _prepared(
                session, FileSentinel(self._connector.sentinels, session, self.stop), self._settings
            )
            self._connector.hurry(session)
        self.mode = "lease" if self._settings.mode == "lease" else "hybrid"
        return store, session, opened

    def open_watch(self) -> tuple[Watch, LaneSession]:
        """Open the file for looking."""
        session = self._connector.open()
        self._connector.hurry(session)
        sentinel = FileSentinel(self._connector.sentinels, session, self.stop)
        return Watch(session, sentinel, Bystander(), self._settings.namespace, _always_open), session

    def open_session(self) -> LaneSession:
        """Open the file, if there is one."""
        self._connector.require()
        return self._connector.open(as_it_is=True)

    def interrupt(self) -> None:
        """Let go of every wait."""
        self.stop.set()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Open the file for the application and begin a transaction."""
        with contextlib.closing(self._connector.connect()) as connection:
            connection.execute("begin immediate")
            try:
                yield connection
            except BaseException:
                connection.rollback()
                raise
            connection.commit()


class MySqlBackend:
    """MariaDB or MySQL."""

    mode: str | None = None
    book: LockBook | None = None

    def __init__(self, settings: NodeSettings) -> None:
        """Check the URL; connect later."""
        self._settings = settings
        self._connector = MySqlConnector(
            settings.url, settings.ttl, f"{settings.namespace}/{settings.name}", settings.password
        )
        self.stop = threading.Event()

    def open_control(self, met: Callable[[str], None] = _nobody) -> tuple[Store, LaneSession, Opened]:
        """Connect and create the tables."""
        session = self._connector.open("control")
        met(session.server_start)
        with _closing_on_error(session), self._connector.limited(session.connection, OPEN_TIMEOUT_S):
            sentinel = UserLockSentinel(session)
            store, opened = _prepared(session, sentinel, self._settings, sentinel.oust)
            store.perform(_REHEARSAL)
            self._connector.hurry(session, self._settings.renew_every)
            self._connector.guard(session)
        self.mode = "lease" if self._settings.mode == "lease" else "hybrid"
        return store, session, opened

    def open_watch(self) -> tuple[Watch, LaneSession]:
        """Connect for looking and waiting."""
        session = self._connector.open("watch")
        with _closing_on_error(session):
            self._connector.hurry(session, timing.SLICE_S + self._settings.renew_every)
            self._connector.guard(session, WATCH_SPARE_S)
            sentinel = UserLockSentinel(session)
        watcher, knock = UserLockWatcher(sentinel), lambda: self._connector.knock(session)
        return Watch(session, sentinel, watcher, self._settings.namespace, knock), session

    def open_session(self) -> LaneSession:
        """Connect, for a look."""
        session = self._connector.open("registry")
        with _closing_on_error(session):
            self._connector.hurry(session, LOOK_TIMEOUT_S)
        return session

    def interrupt(self) -> None:
        """Let go of every wait, and of connections that are being opened."""
        self.stop.set()
        self._connector.abort()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Any]:
        """Connect for the application and open a transaction."""
        with contextlib.closing(self._connector.connect("transaction")) as connection:
            connection.query("start transaction read write")  # whatever the default is: one writes under a term
            try:
                yield connection
            except BaseException:
                with contextlib.suppress(Exception):
                    connection.rollback()
                raise
            if not in_transaction(connection):
                raise ConfigError(
                    "this fenced transaction ended before its block: a statement of its own did it, or the server, to "
                    "end a deadlock; let errors leave the block, and try anew"
                )
            connection.commit()


def backend_for(settings: NodeSettings) -> Backend:
    """Return the way to the database that the settings name."""
    if settings.mode == "lock":
        return LockBackend(settings)
    kinds: dict[str, Callable[[NodeSettings], Backend]] = {"sqlite": SqliteBackend, "mysql": MySqlBackend}
    return kinds.get(settings.database, PostgresBackend)(settings)


def prepare_tables(session: Session, settings: NodeSettings) -> None:
    """Create the tables if need be; raise StoreUnavailable if that, or working with them, is not permitted."""
    try:
        schema.prepare(session)
        schema.check_privileges(session)
        schema.check_shape(session)
    except Failed as error:
        msg = f"cannot prepare the tables: {str(error).splitlines()[0]}"
        if session.dialect.name == "postgresql":
            msg += (
                " (the database user needs CREATE on the database or, once the tables are there, USAGE on schema "
                f"{settings.schema!r} and SELECT, INSERT, UPDATE and DELETE on its tables)"
            )
        if session.dialect.name == "mysql":
            msg += (
                " (the database user needs CREATE, ALTER and INDEX on the database or, once the tables are there, what "
                "`tenure sql --dialect mysql --grants USER` prints)"
            )
        raise StoreUnavailable(msg) from None


def _prepared(
    session: Session, sentinel: Sentinel, settings: NodeSettings, oust: Oust | None = None
) -> tuple[Store, Opened]:
    prepare_tables(session, settings)
    for what, name in (("namespace", settings.namespace), ("name", settings.name)):
        check_encoding(what, name, session.encoding)
    store = Store(session, sentinel, settings.namespace, _identity(), oust)
    server, confirmed = store.open(max(settings.ttl, timing.DEFAULT_MAX_TTL_S))
    if settings.ttl > confirmed.max_ttl:
        raise ConfigError(
            f"ttl={settings.ttl:g} is above the largest permitted in namespace {settings.namespace!r}, "
            f"{confirmed.max_ttl:g}: use a shorter one, or raise it: tenure init --max-ttl {settings.ttl:g} "
            f"--namespace {settings.namespace}"
        )
    return store, Opened(server, confirmed)


def _connector(settings: NodeSettings, url: str) -> PostgresConnector:
    label = f"{settings.namespace}/{settings.name}"
    return PostgresConnector(url, settings.schema, settings.ttl, label, settings.password)


def _identity() -> Identity:
    return Identity(socket.gethostname(), os.getpid(), __version__)


def _always_open() -> str:
    """Return SQLite's one server: a file does not shut down."""
    return "sqlite"


def _never_open() -> None:
    """Return no server: nothing was learnt."""


@contextlib.contextmanager
def _closing_on_error(session: Session) -> Iterator[None]:
    try:
        yield
    except BaseException:
        session.close()
        raise
