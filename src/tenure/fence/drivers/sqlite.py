"""sqlite3 and aiosqlite."""

from __future__ import annotations

import sqlite3
from typing import Any

from tenure.fence.adapter import Adapter, Work, run_at_once
from tenure.store.dialects import SQLITE, Dialect
from tenure.store.session import FetchedResult, Result, Step


class SqliteAdapter(Adapter):
    """sqlite3.Connection.

    SQLite keeps its write lock through a rollback to a savepoint, so savepoints do no harm here.
    """

    def find_dialect(self) -> Dialect:
        return SQLITE

    async def execute(self, step: Step) -> Result:
        cursor = sqlite3.Cursor(self.connection)
        cursor.row_factory = None
        cursor.execute(self.dialect.text(step.text), step.parameters)
        return FetchedResult(cursor.fetchall(), cursor.rowcount)

    def in_transaction(self) -> bool:
        return bool(self.connection.in_transaction)

    def roll_back(self) -> None:
        if getattr(self.connection, "autocommit", None) is not True:
            self.connection.rollback()
        elif self.connection.in_transaction:
            # The connection's method rollback() does nothing in this mode.
            self.connection.execute("rollback")


class AiosqliteAdapter(SqliteAdapter):
    """aiosqlite.Connection: uses the sqlite3 connection inside, in the only thread that may do so."""

    is_async = True

    async def run(self, work: Work) -> Any:
        inner = SqliteAdapter(self.connection._conn, self.term)  # noqa: SLF001
        return await self.connection._execute(lambda: run_at_once(inner.run(work)))  # noqa: SLF001


KINDS = {"sqlite3.Connection": SqliteAdapter, "aiosqlite.Connection": AiosqliteAdapter}
