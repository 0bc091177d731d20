"""How a node reaches a SQLite file on this machine."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from functools import partial

from tenure.databases.backend import Backend, Control, TellStart, Watch, closing_on_error, ignore_start
from tenure.databases.sqlite.connect import SqliteConnector
from tenure.databases.sqlite.file_use import FileStore, FileUse
from tenure.databases.sqlite.sentinel import REMEDY, UNSUPPORTED, FileSentinel, is_supported
from tenure.databases.sqlite.session import SqliteSession
from tenure.errors import ConfigError
from tenure.settings import NodeSettings
from tenure.store.watch import WatchActions, WatchStore


class SqliteBackend(Backend):
    """A SQLite file on this machine."""

    def __init__(self, settings: NodeSettings) -> None:
        if not is_supported():
            raise ConfigError(f"{UNSUPPORTED}: {REMEDY}")
        super().__init__(settings)
        self._connector = SqliteConnector(settings.sqlite_path, settings.renew_every)
        self._use = FileUse(self._connector, settings.ttl)

    @property
    def file(self) -> str:
        return self._use.file

    def open_control(self, server_answered: TellStart = ignore_start) -> Control:
        session = self._connector.open()
        server = session.server()
        # If this is another file, the protocol learns of it with the reply.
        if server.file == self.file:
            server_answered(server.start)
        with closing_on_error(session):
            sentinel = FileSentinel(session.file.sentinels, session, self.stop)
            store, opened = self._open_store(session, sentinel, make=partial(FileStore, use=self._use))
            self._connector.set_statement_timeout(session)
        self.mode = "lease" if self._settings.mode == "lease" else "hybrid"
        return store, session, opened

    def open_watch(self) -> Watch:
        session = self._connector.open()
        self._connector.set_statement_timeout(session)
        sentinel = FileSentinel(session.file.sentinels, session, self.stop)
        # A file does not shut down: every knock finds the same server.
        return WatchStore(session, sentinel, WatchActions(), self._settings.namespace, lambda: "sqlite"), session

    def open_session(self) -> SqliteSession:
        self._connector.require()
        return self._connector.open(as_it_is=True)

    def close(self) -> None:
        """Let other nodes know that this node does not use the file any more."""
        self._use.end()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        with contextlib.closing(self._connector.connect()) as connection:
            connection.execute("begin immediate")
            try:
                yield connection
            finally:
                # This undoes what the block did not commit.
                connection.rollback()

    def cut(self, connection: sqlite3.Connection) -> None:
        connection.interrupt()
