"""The store's session in the application's transaction: SQLAlchemy's Session or Connection, with any driver.

For ``tenure.manual`` only. Nothing is committed or rolled back here: the application does that. An error of the
database reaches the application as SQLAlchemy raised it, unless this module can name a remedy.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from tenure.databases.schema import schema_for
from tenure.errors import ConfigError, StoreUnavailable
from tenure.fence.adapter import kind_of
from tenure.fence.drivers import sqlalchemy as driver
from tenure.fence.verdicts import SESSION_AUTOCOMMIT, sqlstate
from tenure.store import manual_statements
from tenure.store.dialects import durably
from tenure.store.migrations import no_tables
from tenure.store.session import Result, Run, Session, Step


class BorrowedSession(Session):
    """Runs Tenure's statements on SQLAlchemy's connection, inside the transaction that is open there.

    It notifies no node: a full queue of notifications would make the application's COMMIT fail.
    """

    def __init__(self, connection: Any, schema: str) -> None:
        self._connection = connection
        self.dialect = driver.dialect_of(connection, schema)
        self.schema = schema_for(self.dialect)

    @property
    def engine(self) -> Any:
        """The engine that the connection came from."""
        return self._connection.engine

    def write(self) -> None:
        """Make sure, by a write that changes nothing, that there is a transaction and that it may write.

        On SQLite the write must come before any read: a transaction that has read can no longer write once another
        transaction has written.
        """
        if self.dialect.name in _WRITES:
            self.run(Step(_WRITES[self.dialect.name], {}))
        if not driver.in_transaction(self._connection, self.dialect):
            raise ConfigError(SESSION_AUTOCOMMIT)
        if self.dialect.name == "mysql" and self._connection.get_isolation_level() in _AS_IT_WAS:
            raise ConfigError(
                "session= must be at READ COMMITTED on MariaDB, or it sees who led when its transaction began: use "
                "create_engine(…, isolation_level='READ COMMITTED')"
            )

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Run]:
        """Run steps in the application's transaction."""
        yield self.run

    def run(self, *steps: Step) -> Sequence[Result]:
        """Run some steps in the application's transaction."""
        with _explain_errors():
            return [driver.execute(self._connection, self.dialect, step) for step in steps]

    read = run

    def close(self) -> None:
        """Do nothing: the connection is the application's."""


_WRITES = {
    "postgresql": f"select pg_catalog.pg_current_xact_id(), {durably('true')}",
    "sqlite": manual_statements.LOCK_DATABASE,
}
"""Statements that give a transaction an id, or the write lock, and change nothing. MariaDB needs no such write.

On PostgreSQL the transaction also has to be on disk when it is committed: it may issue a token."""
_AS_IT_WAS = ("REPEATABLE READ", "SERIALIZABLE")
"""Isolation levels at which a transaction sees the rows as they were at its beginning. At these, PostgreSQL refuses a
write to a row that has changed since; MariaDB does not."""


def borrow(session: Any, schema: str) -> BorrowedSession:
    """Return a session on the transaction of SQLAlchemy's Session or Connection, or raise ConfigError."""
    kind, connection = kind_of(session), session
    if kind in (driver.AsyncAdapter, driver.AsyncScopedAdapter):
        raise ConfigError(
            f"session={type(session).__name__} is asynchronous: use await session.run_sync(lambda session: "
            "manual.elect(…, session=session))"
        )
    if kind is driver.SessionAdapter:
        try:
            connection = session.connection()
        except sys.modules["sqlalchemy"].exc.InvalidRequestError as error:
            raise ConfigError(f"session= cannot be used: {error}") from None
    elif kind is not driver.ConnectionAdapter:
        raise ConfigError(f"session= must be a Session or Connection of SQLAlchemy, not {type(session).__name__}")
    if connection.closed:
        raise ConfigError("session= is closed: pass an open one, or leave it out")
    return BorrowedSession(connection, schema)


@contextlib.contextmanager
def _explain_errors() -> Iterator[None]:
    """Turn errors into errors of Tenure if there is a remedy to name."""
    try:
        yield
    except sys.modules["sqlalchemy"].exc.DBAPIError as error:
        original: Any = error.orig
        if "no such table: tenure_meta" in str(original):
            raise ConfigError(no_tables()) from error
        if (
            sqlstate(error) in _READ_ONLY
            or original.args[:1] == (_READ_ONLY_MYSQL,)
            or "readonly database" in str(original)
        ):
            raise StoreUnavailable(
                "session= cannot write to its database (a hot standby, or a read-only transaction): use a session that "
                "can write, on the primary"
            ) from error
        raise


_READ_ONLY_MYSQL = 1290
"""The error of a server that is read-only as a whole."""
_READ_ONLY = ("25006", "55000")
"""The errors of a read-only transaction, and of a standby, which assigns no transaction id during recovery."""
