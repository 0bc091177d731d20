"""One interface to every driver's connections, and the table that finds the adapter for a connection's class.

The fence and the steps after it are written once, as coroutines. With a blocking driver such a coroutine never waits,
so ``run_at_once`` can run it to its end.
"""

from __future__ import annotations

import abc
import importlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from tenure.errors import ConfigError
from tenure.fence.verdicts import TermIdentity, translate_errors
from tenure.store.dialects import Dialect, postgresql
from tenure.store.session import Result, Step

DRIVERS = {
    "aiosqlite": "sqlite",
    "asyncpg": "asyncpg",
    "django": "django",
    "psycopg": "psycopg",
    "pymysql": "pymysql",
    "sqlalchemy": "sqlalchemy",
    "sqlite3": "sqlite",
}
"""The package of a connection's class, and the module of ``drivers`` whose ``KINDS`` lists that class.

The table has names and no imports, so Tenure imports no driver that the application has not imported, and no adapter
that it does not use.
"""

Work = Callable[["Adapter"], Awaitable[Any]]


class Adapter(abc.ABC):
    """A connection of the application, used for one term. The methods of this class are those for PostgreSQL."""

    is_async = False
    """Whether the driver's calls must be awaited."""
    ever_commits = True
    """False if the transaction is certain to be rolled back, so that a lock would protect nothing."""

    def __init__(self, connection: Any, term: TermIdentity) -> None:
        self.connection = connection
        self.term = term
        self.dialect = self.find_dialect()

    def find_dialect(self) -> Dialect:
        """Return the SQL dialect for this driver."""
        return postgresql(self.term.schema)

    async def check_transaction(self) -> None:
        """Raise ConfigError if there is no transaction to fence, for drivers that know before the first statement."""

    @abc.abstractmethod
    async def execute(self, step: Step) -> Result:
        """Run one step, with a plain cursor: a cursor that the connection creates may return rows of any form."""

    def in_savepoint(self) -> bool:
        """Whether the fence would be inside a savepoint that may be undone. PostgreSQL's server checks that itself."""
        return False

    def mark_fenced(self) -> None:
        """Remember that the transaction is fenced, so that a later fence inside a savepoint is permitted."""

    def in_transaction(self) -> bool:
        """Whether the transaction of the last statement is still open: in autocommit mode it is not."""
        return True

    def roll_back(self) -> None:
        """Make sure that the transaction cannot commit. PostgreSQL does that itself after an error."""

    async def run(self, work: Work) -> Any:
        """Call ``work`` with this adapter; if that fails, the transaction cannot commit."""
        await self.check_transaction()
        try:
            with translate_errors(self.term):
                return await work(self)
        except Exception:
            self.roll_back()
            raise


def adapt(connection: Any, term: TermIdentity, *, to_async: bool = False) -> Adapter:
    """Return the adapter for a connection, or raise ConfigError; ``to_async`` means that the caller can await it."""
    kind = kind_of(connection)
    if kind is None or kind.is_async != to_async:
        name = f"{type(connection).__module__}.{type(connection).__qualname__}"
        raise ConfigError(
            f"{name} cannot be fenced synchronously: use an AsyncNode and `await term.fence(connection)`"
            if is_async(connection)
            else f"cannot fence {name}: pass a connection of psycopg, asyncpg, PyMySQL, sqlite3, aiosqlite or Django, "
            "or SQLAlchemy's Connection or Session"
        )
    return kind(connection, term)


def is_async(connection: Any) -> bool:
    """Whether the calls of the connection's driver must be awaited."""
    kind = kind_of(connection)
    return kind is not None and kind.is_async


def run_at_once(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that never waits, because its driver blocks instead."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("a blocking driver was awaited")


def kind_of(connection: Any) -> type[Adapter] | None:
    """Return the adapter of the connection's class, or of its nearest base class that has one."""
    for base in type(connection).__mro__:
        package = base.__module__.partition(".")[0]
        if package in DRIVERS:
            kinds = importlib.import_module(f"tenure.fence.drivers.{DRIVERS[package]}").KINDS
            kind: type[Adapter] | None = kinds.get(f"{package}.{base.__name__}")
            if kind is not None:
                return kind
    return None
