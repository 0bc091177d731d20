"""SQLAlchemy's connections and sessions, on every database of Tenure, with every driver that SQLAlchemy supports."""

from __future__ import annotations

import sys
import weakref
from dataclasses import replace
from typing import Any

from tenure.fence.adapter import Adapter, Work, adapt, run_at_once
from tenure.fence.verdicts import TermIdentity
from tenure.store.dialects import Dialect, for_name
from tenure.store.session import FetchedResult, Result, Step

_IN_TRANSACTION = {
    # Autocommit can be set in many places. This finds all of them: the fence gave its transaction an id, and in
    # autocommit mode the next statement has another transaction, without an id.
    "postgresql": "select pg_catalog.pg_current_xact_id_if_assigned() is not null",
    "mysql": "select not @@autocommit /*M! or @@in_transaction */",
}
_fenced: weakref.WeakSet[Any] = weakref.WeakSet()
"""SQLAlchemy's outermost transactions on SQLite and MariaDB that were fenced before any savepoint."""


class ConnectionAdapter(Adapter):
    """sqlalchemy.Connection."""

    def find_dialect(self) -> Dialect:
        return dialect_of(self.connection, self.term.schema)

    def in_savepoint(self) -> bool:
        # The savepoint may be the beginning of the transaction. sqlite3 begins one only at the first write, so if
        # begin_nested() comes first, the savepoint's end commits. On MariaDB a rollback to it releases the lock.
        return self.connection.in_nested_transaction() and self.connection.get_transaction() not in _fenced

    def mark_fenced(self) -> None:
        _fenced.add(self.connection.get_transaction())

    async def execute(self, step: Step) -> Result:
        return execute(self.connection, self.dialect, step)

    def in_transaction(self) -> bool:
        return in_transaction(self.connection, self.dialect)

    def roll_back(self) -> None:
        """Roll back; if the server refuses (XA), close the connection, so that the server rolls back by itself."""
        if self.dialect.name != "postgresql":
            try:
                self._roll_back()
            except sys.modules["sqlalchemy"].exc.DBAPIError:
                self.connection.invalidate()

    def _roll_back(self) -> None:
        self.connection.rollback()


class SessionAdapter(ConnectionAdapter):
    """sqlalchemy.orm.Session and scoped_session."""

    def __init__(self, session: Any, term: TermIdentity) -> None:
        super().__init__(session.connection(), term)
        self._session = session

    def _roll_back(self) -> None:
        self._session.rollback()
        super()._roll_back()


class AsyncAdapter(Adapter):
    """AsyncConnection and AsyncSession of sqlalchemy.ext.asyncio: uses the blocking object inside, by ``run_sync``."""

    is_async = True

    async def run(self, work: Work) -> Any:
        return await self.connection.run_sync(lambda inner: run_at_once(adapt(inner, self.term).run(work)))

    async def execute(self, step: Step) -> Result:
        result: Result = await self.run(lambda inner: inner.execute(step))
        return result


class AsyncScopedAdapter(AsyncAdapter):
    """sqlalchemy.ext.asyncio.async_scoped_session: the AsyncSession of the current scope."""

    def __init__(self, scoped: Any, term: TermIdentity) -> None:
        super().__init__(scoped(), term)


def dialect_of(connection: Any, schema: str) -> Dialect:
    """Return the SQL dialect for SQLAlchemy's connection."""
    dialect = for_name(connection.dialect.name, schema)
    # If the driver expands lists itself, parameters keep its form (see ``execute``); else they get SQLAlchemy's.
    return dialect if dialect.lists else replace(dialect, parameter=":{}")


def execute(connection: Any, dialect: Dialect, step: Step) -> Result:
    """Run a step on SQLAlchemy's connection."""
    text, parameters = dialect.text(step.text), dialect.arguments(step.parameters)
    if dialect.lists:
        result = connection.exec_driver_sql(text, parameters or None)
    else:
        result = connection.execute(sys.modules["sqlalchemy"].text(text), parameters)
    return FetchedResult([tuple(row) for row in result] if result.returns_rows else [], result.rowcount)


def in_transaction(connection: Any, dialect: Dialect) -> bool:
    """Whether the transaction of the last write is still open: in autocommit mode it is not."""
    if dialect.name == "sqlite":
        return bool(connection.connection.driver_connection.in_transaction)
    ((there,),) = execute(connection, dialect, Step(_IN_TRANSACTION[dialect.name], {})).rows
    return bool(there)


KINDS = {
    "sqlalchemy.Connection": ConnectionAdapter,
    "sqlalchemy.Session": SessionAdapter,
    "sqlalchemy.scoped_session": SessionAdapter,
    "sqlalchemy.AsyncConnection": AsyncAdapter,
    "sqlalchemy.AsyncSession": AsyncAdapter,
    "sqlalchemy.async_scoped_session": AsyncScopedAdapter,
}
