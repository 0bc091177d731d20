"""Django's connections: its cursor, its atomic blocks, and those of its TestCase.

Everything goes through Django's own cursor, so the driver underneath may be any that Django knows. Nothing is rolled
back behind Django's back: a block that must not commit is marked, as Django itself marks one (``set_rollback``). Django
then refuses further statements in it, and leaving it rolls back, the hooks of ``on_commit`` included.

A TestCase wraps everything in a transaction that is never committed, so an ``atomic()`` block of the application is a
savepoint there. The application's outermost block counts as its transaction then, as it does for Django's ``durable``.
The fence only asks in there, and does not lock: nothing will be committed that a lock could protect, and it would last
until the test is over.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tenure.dialects import MYSQL, SQLITE, Dialect, postgresql
from tenure.errors import ConfigError
from tenure.session import Result, Step
from tenure.sqlite import FetchedResult

_AUTOCOMMIT = (
    "a fence needs a transaction, and Django's connection is in autocommit mode: call it inside "
    "`with transaction.atomic():`, or use term.transaction()"
)
_SQLITE = replace(SQLITE, parameter="%({})s")  # which Django turns into what sqlite3 writes


def in_test(connection: Any) -> bool:
    """Whether the application's transaction is one inside a TestCase's; raise ConfigError where there is none."""
    blocks = connection.atomic_blocks
    own = [block for block in blocks if not block._from_testcase]  # noqa: SLF001
    if not own and (blocks or connection.get_autocommit()):
        raise ConfigError(_AUTOCOMMIT)
    return len(own) < len(blocks)


def in_savepoint(connection: Any) -> bool:
    """Whether an atomic block is a savepoint of a transaction that is not fenced itself."""
    return any(connection.savepoint_ids) and not any(hook is _fenced for _, hook, _ in connection.run_on_commit)


def mark_fenced(connection: Any) -> None:
    """Remember that the present transaction is fenced, for as long as it lasts: what Django forgets with it."""
    if connection.in_atomic_block and not any(connection.savepoint_ids):
        connection.on_commit(_fenced)


def _fenced() -> None:
    """Do nothing on commit."""


@contextlib.contextmanager
def spoiled(connection: Any) -> Iterator[None]:
    """Let the transaction not commit where anything is raised."""
    try:
        yield
    except Exception:
        if connection.in_atomic_block:
            connection.set_rollback(True)
        else:
            connection.rollback()
        raise


def run(connection: Any, schema: str, *steps: Step) -> list[Result]:
    """Run some steps in the open transaction."""
    dialect = _dialect(connection.vendor, schema)
    return [execute(connection, dialect.text(step.text), step.parameters) for step in steps]


def execute(connection: Any, text: str, parameters: dict[str, Any] | None = None) -> Result:
    """Run a statement in the open transaction."""
    with connection.cursor() as cursor:
        cursor.execute(text, parameters)
        return FetchedResult(list(cursor.fetchall()) if cursor.description else [], cursor.rowcount)


def _dialect(vendor: str, schema: str) -> Dialect:
    if vendor == "postgresql":
        return postgresql(schema)
    if vendor in ("sqlite", "mysql"):
        return _SQLITE if vendor == "sqlite" else MYSQL
    raise ConfigError(f"cannot fence on {vendor}: Tenure's tables are on PostgreSQL, MariaDB or SQLite")
