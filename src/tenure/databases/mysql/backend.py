"""How a node reaches MariaDB or MySQL."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from tenure.core import timing
from tenure.databases import backend
from tenure.databases.mysql.connect import MySqlConnector
from tenure.databases.mysql.sentinel import UserLockActions, UserLockSentinel, UserLockWatch
from tenure.databases.mysql.session import MySqlSession, cut
from tenure.settings import NodeSettings

WATCH_SPARE_S = 60
"""How much longer than a control connection the server keeps a watch connection, which may have nothing to do."""


class MySqlBackend(backend.Backend):
    """MariaDB or MySQL."""

    def __init__(self, settings: NodeSettings) -> None:
        super().__init__(settings)
        self._connector = MySqlConnector(
            settings.url, settings.ttl, f"{settings.namespace}/{settings.name}", settings.password
        )

    def open_control(self, server_answered: backend.TellStart = backend.ignore_start) -> backend.Control:
        session = self._connector.open("control")
        server_answered(session.server_start)
        with backend.closing_on_error(session), self._connector.time_limit(session.connection, backend.OPEN_TIMEOUT_S):
            sentinel = UserLockSentinel(session)
            store, opened = self._open_store(session, sentinel, sentinel.terminate_silent_member)
            store.perform(backend.REHEARSAL)
            self._connector.set_statement_timeout(session, self._settings.renew_every)
            self._connector.set_idle_timeout(session)
        self.mode = "lease" if self._settings.mode == "lease" else "hybrid"
        return store, session, opened

    def open_watch(self) -> backend.Watch:
        session = self._connector.open("watch")
        with backend.closing_on_error(session):
            self._connector.set_statement_timeout(session, timing.SLICE_S + self._settings.renew_every)
            self._connector.set_idle_timeout(session, WATCH_SPARE_S)
            session.one_by_one = True
            sentinel = UserLockSentinel(session)
        watcher, knock = UserLockActions(sentinel), lambda: self._connector.knock(session)
        return UserLockWatch(session, sentinel, watcher, self._settings.namespace, knock), session

    def open_session(self) -> MySqlSession:
        session = self._connector.open("registry")
        with backend.closing_on_error(session):
            self._connector.set_statement_timeout(session, backend.LOOK_TIMEOUT_S)
        return session

    def interrupt(self) -> None:
        super().interrupt()
        self._connector.abort()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Any]:
        # Without autocommit, what a block does after it has ended the transaction is rolled back as well.
        with contextlib.closing(self._connector.connect("transaction", autocommit=False)) as connection:
            # Read-write whatever the server's default is: a term's holder writes.
            connection.query("start transaction read write")
            try:
                yield connection
            finally:
                with contextlib.suppress(Exception):
                    # This undoes what the block did not commit.
                    connection.rollback()

    def cut(self, connection: Any) -> None:
        cut(connection)
