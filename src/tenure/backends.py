"""Puts a node's settings and a database together: what to open for each lane."""

from __future__ import annotations

import contextlib
import os
import socket
import sqlite3
import threading
from collections.abc import Iterator
from typing import Any, Protocol

from tenure import schema, timing
from tenure.advisory import AdvisorySentinel, AdvisoryWatcher
from tenure.asks import End, Opened, Verdict
from tenure.errors import ConfigError, StoreUnavailable
from tenure.postgres import PostgresConnector
from tenure.session import Failed, Sentinel, Session
from tenure.settings import NodeSettings
from tenure.sqlite import FileSentinel, SqliteConnector, SqliteWatcher
from tenure.store import Identity, Oust, Store
from tenure.version import __version__
from tenure.watch import Watch


class LaneSession(Session, Protocol):
    """A session that a lane can wait on and that another thread can cut."""

    def idle(self, waker: socket.socket, seconds: float | None) -> list[str]:
        """Wait for the waker, notifications, or the end of the connection."""
        ...

    def abort(self) -> None:
        """Make whatever hangs on this connection fail at once, from any thread."""
        ...

    def abandon(self) -> None:
        """Let go of what a forked child inherited, without a word to the server."""
        ...


class Backend(Protocol):
    """One node's way to its database."""

    def open_control(self) -> tuple[Store, LaneSession, Opened]:
        """Connect the control lane; create the tables if need be."""
        ...

    def open_watch(self) -> tuple[Watch, LaneSession]:
        """Connect the watch lane."""
        ...

    def transaction(self) -> contextlib.AbstractContextManager[Any]:
        """Open a transaction on a connection of its own, for the application; yield the driver's connection."""
        ...


_REHEARSAL = End("", (Verdict("", "death", "", epoch=0, server_start=""),))
"""Ends nobody. A connection is quicker at what it has done before, and this must be quick when it counts."""


class PostgresBackend:
    """PostgreSQL, reached directly."""

    def __init__(self, settings: NodeSettings) -> None:
        """Check the URL; connect later."""
        self._settings = settings
        self._connector = PostgresConnector(
            settings.url, settings.schema, settings.ttl, label=f"{settings.namespace}/{settings.name}"
        )

    def open_control(self) -> tuple[Store, LaneSession, Opened]:
        """Connect, create the tables, and listen."""
        session = self._connector.open("control", self._settings.renew_every)
        with _closing_on_error(session):
            sentinel = AdvisorySentinel(session)
            store, opened = _prepared(session, sentinel, self._settings, sentinel.oust)
            session.listen(self._settings.namespace, "vacant")
            store.perform(_REHEARSAL)
        return store, session, opened

    def open_watch(self) -> tuple[Watch, LaneSession]:
        """Connect for looking and waiting."""
        session = self._connector.open("watch", timing.SLICE_S + self._settings.renew_every)
        sentinel = AdvisorySentinel(session)
        watcher = AdvisoryWatcher(session, sentinel)
        return Watch(session, sentinel, watcher, self._settings.namespace, self._connector.knock), session

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Any]:
        """Connect for the application and open a transaction."""
        with self._connector.connect("transaction") as connection, connection.transaction():
            yield connection


class SqliteBackend:
    """A SQLite file on this machine."""

    def __init__(self, settings: NodeSettings) -> None:
        """Name the file; create it later."""
        if os.name != "posix":
            raise ConfigError("SQLite needs file locks of POSIX: use PostgreSQL on this system")
        self._settings = settings
        self._connector = SqliteConnector(settings.sqlite_path, settings.renew_every)
        self.stop = threading.Event()

    def open_control(self) -> tuple[Store, LaneSession, Opened]:
        """Open the file and create the tables."""
        session = self._connector.open()
        with _closing_on_error(session):
            store, opened = _prepared(
                session, FileSentinel(self._connector.sentinels, session, self.stop), self._settings
            )
            self._connector.hurry(session)
        return store, session, opened

    def open_watch(self) -> tuple[Watch, LaneSession]:
        """Open the file for looking."""
        session = self._connector.open()
        self._connector.hurry(session)
        sentinel = FileSentinel(self._connector.sentinels, session, self.stop)
        return Watch(session, sentinel, SqliteWatcher(), self._settings.namespace, _always_open), session

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


def backend_for(settings: NodeSettings) -> Backend:
    """Return the way to the database that the settings name."""
    return SqliteBackend(settings) if settings.database == "sqlite" else PostgresBackend(settings)


def _prepared(
    session: Session, sentinel: Sentinel, settings: NodeSettings, oust: Oust | None = None
) -> tuple[Store, Opened]:
    try:
        schema.prepare(session)
    except Failed as error:
        raise StoreUnavailable(
            f"cannot prepare the tables: {str(error).splitlines()[0]} (the database user needs CREATE on the database, "
            f"or, once the tables are there, USAGE on schema {settings.schema!r} and all rights on its tables)"
        ) from None
    identity = Identity(socket.gethostname(), os.getpid(), __version__)
    store = Store(session, sentinel, settings.namespace, identity, oust)
    server, confirmed = store.open(max(settings.ttl, timing.DEFAULT_MAX_TTL_S))
    if settings.ttl > confirmed.max_ttl:
        raise ConfigError(
            f"ttl={settings.ttl:g} is above the largest permitted in namespace {settings.namespace!r}, "
            f"{confirmed.max_ttl:g}: use a shorter one, or raise it: "
            f"update {session.dialect.prefix}namespaces set max_ttl_ms = {settings.ttl * 1000:.0f}"
        )
    return store, Opened(server, confirmed)


def _always_open() -> str:
    """Return SQLite's one server: a file does not shut down."""
    return "sqlite"


@contextlib.contextmanager
def _closing_on_error(session: Session) -> Iterator[None]:
    try:
        yield
    except BaseException:
        session.close()
        raise
