"""A session on a transaction of the caller's: SQLAlchemy's Session or Connection, whatever driver is underneath.

Nothing is committed or rolled back here: what is done belongs to the caller's transaction, and goes or stays with it.
An error of the database is the caller's as well, as SQLAlchemy raised it, but for those that have a remedy here.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from tenure.asks import Server
from tenure.dialects import MYSQL, SQLITE, Dialect, postgresql
from tenure.errors import ConfigError, StoreUnavailable
from tenure.postgres import notification
from tenure.schema import no_tables
from tenure.session import Result, Run, Step
from tenure.sqlite import FetchedResult
from tenure.statements import LOCK_DATABASE

_AUTOCOMMIT = "session= must be in a transaction, and this one is in autocommit mode: begin one, or leave session= out"


class BorrowedSession:
    """Runs our statements on a connection of SQLAlchemy's, inside the transaction that is open there."""

    pid = 0
    started = ""
    encoding = "utf-8"

    def __init__(self, connection: Any, schema: str) -> None:
        """Look which database it is."""
        self._connection = connection
        self.dialect = _dialect(connection.dialect.name, schema)
        self._server: Server | None = None

    @property
    def engine(self) -> Any:
        """The engine that the connection came from."""
        return self._connection.engine

    def write(self) -> None:
        """Make sure, by a write that changes nothing, that there is a transaction and that it may write.

        On SQLite that must come before anything is read: a transaction that reads first cannot write any more as soon
        as somebody else has.
        """
        if self.dialect.name == "sqlite":
            self._run(Step(LOCK_DATABASE, {}))
            there = self._connection.connection.driver_connection.in_transaction
        else:
            *_, present = self._run(*(Step(text, {}) for text in _IN_TRANSACTION[self.dialect.name]))
            ((there,),) = present.rows
        if not there:
            raise ConfigError(_AUTOCOMMIT)
        if self.dialect.name == "mysql" and self._connection.get_isolation_level() in _AS_IT_WAS:
            raise ConfigError(
                "session= must be at READ COMMITTED on MariaDB, or it shows who led when its transaction began: "
                "create_engine(…, isolation_level='READ COMMITTED')"
            )

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Run]:
        """Run steps in the caller's transaction."""
        yield self._run

    def run(self, *steps: Step) -> Sequence[Result]:
        """Run some steps in the caller's transaction."""
        return self._run(*steps)

    def read(self, *steps: Step) -> Sequence[Result]:
        """Run some queries in the caller's transaction."""
        return self._run(*steps)

    def notify(self, namespace: str, payload: str) -> Step | None:
        """Return the step that tells the nodes when the caller commits; None where they have to look."""
        return notification(self.dialect, namespace, payload) if self.dialect.name == "postgresql" else None

    def listen(self, namespace: str, kind: str) -> None:
        """Do nothing: the connection is not ours to listen on."""

    def server(self) -> Server:
        """Return which server this is."""
        if self._server is None:
            ((incarnation,),) = self._run(Step("select {incarnation}", {}))[0].rows
            timeline = 1 if self.dialect.name == "sqlite" else int(incarnation.rsplit(":", 1)[1])
            self._server = Server("", incarnation, timeline)
        return self._server

    def close(self) -> None:
        """Do nothing: the connection is the caller's."""

    def _run(self, *steps: Step) -> Sequence[Result]:
        results = []
        for step in steps:
            with _explained():
                result = self._execute(self.dialect.text(step.text), self.dialect.arguments(step.parameters))
                rows = [tuple(row) for row in result] if result.returns_rows else []
            results.append(FetchedResult(rows, result.rowcount))
        return results

    def _execute(self, text: str, parameters: dict[str, Any]) -> Any:
        if self.dialect.name == "mysql":  # its driver takes lists apart
            return self._connection.exec_driver_sql(text, parameters)
        return self._connection.execute(sys.modules["sqlalchemy"].text(text), parameters)


_IN_TRANSACTION = {
    # A write, and in a statement of its own whether its transaction is still there.
    "postgresql": (
        "select pg_catalog.pg_current_xact_id()",
        "select pg_catalog.pg_current_xact_id_if_assigned() is not null",
    ),
    "mysql": ("select not @@autocommit /*M! or @@in_transaction */",),
}
_AS_IT_WAS = ("REPEATABLE READ", "SERIALIZABLE")
"""PostgreSQL refuses a write there if what it rests on has changed; the others do not."""


def borrow(session: Any, schema: str) -> BorrowedSession:
    """Return a session on the transaction of SQLAlchemy's Session or Connection, or say what is wrong with it."""
    sqlalchemy, orm, asyncio = (
        sys.modules.get(name) for name in ("sqlalchemy", "sqlalchemy.orm", "sqlalchemy.ext.asyncio")
    )
    if asyncio and isinstance(session, (asyncio.AsyncSession, asyncio.AsyncConnection, asyncio.async_scoped_session)):
        raise ConfigError(
            f"session={type(session).__name__} is asynchronous: await session.run_sync(lambda session: "
            "manual.elect(…, session=session))"
        )
    if orm and isinstance(session, (orm.Session, orm.scoped_session)):
        try:
            connection = session.connection()
        except sqlalchemy.exc.InvalidRequestError as error:  # type: ignore[union-attr]
            raise ConfigError(f"session= cannot be used: {error}") from None
    elif sqlalchemy and isinstance(session, sqlalchemy.Connection):
        connection = session
    else:
        raise ConfigError(f"session= must be a Session or Connection of SQLAlchemy, not a {type(session).__name__}")
    if connection.closed:
        raise ConfigError("session= is closed: give an open one, or leave it out")
    return BorrowedSession(connection, schema)


def _dialect(name: str, schema: str) -> Dialect:
    known = {
        "postgresql": replace(postgresql(schema), parameter=":{}"),
        "sqlite": SQLITE,
        "mysql": MYSQL,
        "mariadb": MYSQL,
    }
    if name not in known:
        raise ConfigError(f"session= leads to {name}, where Tenure has no tables: use PostgreSQL, MariaDB or SQLite")
    return known[name]


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Turn the errors that have a remedy here into ours."""
    try:
        yield
    except sys.modules["sqlalchemy"].exc.DBAPIError as error:
        original: Any = error.orig
        sqlstate = getattr(original, "sqlstate", None) or getattr(original, "pgcode", None)
        if "no such table: tenure_meta" in str(original):
            raise ConfigError(no_tables(SQLITE)) from error
        if sqlstate in _READ_ONLY or original.args[:1] in _READ_ONLY_MYSQL or "readonly database" in str(original):
            raise StoreUnavailable(
                "session= leads to a database that cannot be written (a hot standby, or a read-only transaction): "
                "leaders are elected on the primary"
            ) from error
        raise


_READ_ONLY_MYSQL = ((1290,), (1792,))
_READ_ONLY = ("25006", "55000")  # read_only_sql_transaction; no transaction id is assigned during recovery
