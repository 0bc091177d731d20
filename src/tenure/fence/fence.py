"""The fence: a check, inside a transaction of the application, that a term is the latest.

The database decides. The statements depend only on the database; the adapter of a driver runs them.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tenure.databases.sqlite.filesystem import file_id
from tenure.errors import ConfigError
from tenure.fence.adapter import Adapter, adapt, run_at_once
from tenure.fence.verdicts import AUTOCOMMIT, SAVEPOINT, TermIdentity, refused
from tenure.settings import check_bound, check_choice, check_name, check_schema
from tenure.store import dialects, guards, statements
from tenure.store.session import Result, Step


def fence(connection: Any, term: TermIdentity, bound_s: float, *steps: Step) -> Any:
    """Check that the term is the latest, and keep it so until the transaction of ``connection`` ends.

    Raises Fenced if the term is over; the transaction then cannot commit. The steps run after the check, in the same
    transaction; their results are returned.
    """
    return run_at_once(adapt(connection, term).run(lambda adapter: _run(adapter, bound_s, steps)))


async def fence_async(connection: Any, term: TermIdentity, bound_s: float, *steps: Step) -> Any:
    """Do the same as ``fence``, on a connection whose driver is asynchronous."""
    return await adapt(connection, term, to_async=True).run(lambda adapter: _run(adapter, bound_s, steps))


async def _run(adapter: Adapter, bound_s: float, steps: Sequence[Step]) -> list[Result]:
    if not adapter.ever_commits:
        await _find(adapter, statements.FENCE_BY_LOOK)
    elif adapter.dialect.name == "postgresql":
        parameters = _parameters(adapter.term) | {"bound_ms": _milliseconds(bound_s)}
        await adapter.execute(Step(_CALL, parameters))
    else:
        if adapter.in_savepoint():
            raise ConfigError(SAVEPOINT)
        await (_lock_on_sqlite(adapter) if adapter.dialect.name == "sqlite" else _lock_on_mysql(adapter, bound_s))
        adapter.mark_fenced()
    if not adapter.in_transaction():
        raise ConfigError(AUTOCOMMIT)
    return [await adapter.execute(step) for step in steps]


async def _find(adapter: Adapter, text: str) -> None:
    found = await adapter.execute(Step(text, _parameters(adapter.term)))
    if not found.rows:
        raise refused(adapter.term)


_CALL = "select {schema}fence(:namespace, :role, :token, :id, :bound_ms)"
"""PostgreSQL's fence is a function in the schema of Tenure's tables. It raises an error if the term is over."""


def _parameters(term: TermIdentity) -> dict[str, Any]:
    return {"namespace": term.namespace, "role": term.role, "token": term.token, "id": term.member_id}


def _milliseconds(bound_s: float) -> int:
    return max(1, round(bound_s * 1000))


# --- SQLite -------------------------------------------------------------------------------------------------


async def _lock_on_sqlite(adapter: Adapter) -> None:
    """Fence with a write that changes nothing: it holds SQLite's only write lock until the transaction ends."""
    term = adapter.term
    changed = await adapter.execute(Step(statements.FENCE_BY_UPDATE, _parameters(term)))
    if changed.count != 1:
        raise refused(term)
    # Refuse every file but the term's: in a copy that replaced it, the term may still be the latest.
    found = await adapter.execute(Step(_FILE_OF_ROLES, {}))
    if term.file and not any(path and _is_file(term.file, path) for (path,) in found.rows):
        raise refused(term)


_FILE_OF_ROLES = """
select d.file from pragma_database_list as d where exists (select 1 from pragma_table_info('{roles}', d.name))
order by d.name <> 'temp', d.seq limit 1
"""
"""The file whose table a statement uses that names no file, in the order in which SQLite looks for it: the application
may have attached several, and a copy among them."""


def _is_file(wanted: str, path: str | bytes) -> bool:
    try:
        return file_id(os.fsdecode(path)) == wanted
    except OSError:
        return False


# --- MariaDB and MySQL --------------------------------------------------------------------------------------


async def _lock_on_mysql(adapter: Adapter, bound_s: float) -> None:
    """Fence with a share lock on the role's row."""
    # Set the bound before taking the lock: a process that is paused right after the lock must already be bounded.
    # Forget the term that an earlier fence noted: if this one is refused, guarded tables must refuse what follows.
    noted = guards.variable_of(adapter.term.namespace, adapter.term.role)
    await adapter.execute(Step(f"{_bound_on_mysql(bound_s)}, {noted} = null", {}))
    await _find(adapter, guards.fence_by_share(adapter.term.namespace, adapter.term.role))
    # This comes last also because its answer, unlike one with rows, shows PyMySQL whether a transaction is open.
    await adapter.execute(Step(_NO_XA, {}))


def _bound_on_mysql(bound_s: float) -> str:
    """Return the statement that limits how long a transaction may be idle on MariaDB; a stricter limit is kept.

    MySQL has no such setting. SET must set something, so ``sql_notes`` is set to its own value.
    """
    seconds = math.ceil(bound_s)
    return (
        "set /*M! session idle_transaction_timeout = "
        f"if(@@idle_transaction_timeout between 1 and {seconds}, @@idle_transaction_timeout, {seconds}), */ "
        "session sql_notes = @@sql_notes"
    )


_NO_XA = (
    "/*M! begin not atomic declare continue handler for 1399 begin end; begin xa end 'tenure looks for XA'; */ "
    "do 0 /*M! ; end; end */"
)
"""Fails inside an XA transaction of MariaDB and does nothing elsewhere.

``XA END`` with an unknown name changes nothing. It fails with 1397 inside an XA transaction, and with 1399 outside one;
the handler ignores 1399. The inner block is for ``sql_mode=ORACLE``. MySQL runs only ``do 0``.
"""


# --- the statement for other languages ----------------------------------------------------------------------


def fence_sql(
    role: str, *, namespace: str = "default", schema: str = "tenure", bound: float = 10.0, database: str = "postgresql"
) -> str:
    """Return the fence as a statement, for programs in other languages; ``database`` is postgresql, sqlite or mysql.

    Its parameters are a term's token and member id: ``$1`` and ``$2`` on PostgreSQL, ``?1`` and ``?2`` on SQLite, two
    ``?`` on MariaDB. It must run inside the transaction that it fences, before any savepoint. PostgreSQL raises
    SQLSTATE TN001 if the term is over, and ends a transaction that lasts longer than ``bound`` seconds. If the term is
    the latest, the statement changes one row on SQLite and returns one row on MariaDB; if it is not, roll back.
    """
    names = {"namespace": check_name("namespace", namespace), "role": check_name("role", role)}
    places = {"bound_ms": str(_milliseconds(check_bound(bound)))}
    dialect = dialects.for_name(check_choice("database", database, dialects.NAMES), check_schema(schema))
    statement, places["token"], places["id"] = {
        "postgresql": (_CALL, "$1", "$2"),
        "sqlite": (statements.FENCE_BY_UPDATE, "?1", "?2"),
        "mysql": (guards.fence_by_share(names["namespace"], names["role"]), "?", "?"),
    }[dialect.name]
    places |= {name: dialects.literal(dialect.name, value) for name, value in names.items()}
    text = replace(dialect, parameter="%({})s").text(statement)
    return re.sub(r"%\((\w+)\)s", lambda match: places[match[1]], text).strip()
