"""PyMySQL, for MariaDB and MySQL.

If a savepoint is set before the first statement, InnoDB's transaction begins there, and a rollback to it releases the
fence's lock. PyMySQL does not track savepoints, so a fence after such a savepoint is not refused here.
"""

from __future__ import annotations

from tenure.databases.mysql import session
from tenure.fence.adapter import Adapter
from tenure.store.dialects import MYSQL, Dialect
from tenure.store.session import FetchedResult, Result, Step


class PyMySqlAdapter(Adapter):
    """pymysql.Connection."""

    def find_dialect(self) -> Dialect:
        return MYSQL

    async def execute(self, step: Step) -> Result:
        cursor = session.load().cursors.Cursor(self.connection)
        count = cursor.execute(self.dialect.text(step.text), self.dialect.arguments(step.parameters) or None)
        return FetchedResult(list(cursor.fetchall()), count)

    def in_transaction(self) -> bool:
        return session.in_transaction(self.connection)

    def roll_back(self) -> None:
        session.roll_back(self.connection)


KINDS = {"pymysql.Connection": PyMySqlAdapter}
