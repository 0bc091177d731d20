"""The fence on a connection of the caller's, of whatever driver.

The database judges; what stands here carries the question in and the verdict out. Three things hold for every kind of
connection:

- the check is part of the caller's transaction. Where there is none (autocommit) it would hold for nothing, and is
  refused;
- after a refusal the transaction cannot commit, even if the caller swallows the exception: on PostgreSQL because the
  refusal is an error of the server, on SQLite and MariaDB because it has been rolled back;
- a driver's error becomes one of ours in one place, by its SQLSTATE (``_verdict``).

A kind is known by the names of its classes, so that no driver is imported that the caller has not imported.
"""

from __future__ import annotations

import contextlib
import math
import re
import sqlite3
import sys
import weakref
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Protocol, TypeVar

from tenure import atomic, mysql, statements
from tenure import schema as tables
from tenure.dialects import MYSQL, SQLITE, postgresql
from tenure.dialing import load, shut_down
from tenure.errors import ConfigError, Fenced, TenureError
from tenure.session import Step
from tenure.settings import check_bound, check_name, check_schema


class Claim(Protocol):
    """The term that a fence speaks for."""

    @property
    def role(self) -> str: ...
    @property
    def token(self) -> int: ...
    @property
    def member_id(self) -> str: ...
    @property
    def namespace(self) -> str: ...
    @property
    def schema(self) -> str: ...


_AUTOCOMMIT = (
    "a fence needs a transaction, and this connection is in autocommit mode: begin one first, or use term.transaction()"
)
_ELSEWHERE = "this connection leads to another database than the node's: fence where Tenure's tables are"
_SAVEPOINT = (
    "a fence inside a savepoint does not hold (a rollback to it would drop the lock): call term.fence() in the "
    "outermost transaction, before any savepoint"
)


def fence(connection: Any, claim: Claim, bound_s: float) -> None:
    """Check, inside the transaction of ``connection``, that the claim is the latest; keep it so until it ends.

    Raises Fenced if it is not; the transaction then cannot commit.
    """
    how = kind_of(connection, _KINDS)
    if how is None:
        raise unknown(connection)
    how(connection, claim, bound_s)


async def fence_async(connection: Any, claim: Claim, bound_s: float) -> None:
    """Do as ``fence`` does, on a connection whose driver is asynchronous."""
    how = kind_of(connection, _ASYNC_KINDS)
    if how is None:
        raise unknown(connection)
    await how(connection, claim, bound_s)


def is_async(connection: Any) -> bool:
    """Whether the connection is one for ``fence_async``."""
    return kind_of(connection, _ASYNC_KINDS) is not None


def cut(connection: Any) -> None:
    """Make what is under way on a connection of ``term.transaction()`` fail, from another thread, within a second."""
    if isinstance(connection, sqlite3.Connection):
        connection.interrupt()
        return
    if _is_pymysql(connection):
        mysql.interrupt(connection)
        return
    try:  # on the server: it would go on with the statement, and keep the role's row from a successor
        connection.cancel_safe(timeout=1)
    except Exception:  # noqa: BLE001 - the server cannot be reached, or does not hear
        shut_down(connection)


def in_transaction(connection: Any) -> bool:
    """Whether a transaction is open on the connection."""
    if isinstance(connection, sqlite3.Connection):
        return connection.in_transaction
    if _is_pymysql(connection):
        return mysql.in_transaction(connection)
    return bool(connection.info.transaction_status != load().pq.TransactionStatus.IDLE)


def execute(connection: Any, sql: str, parameters: Any = ()) -> Any:
    """Run a statement on a connection of ``term.transaction()``; return the cursor."""
    if _is_pymysql(connection):
        return mysql.execute(connection, sql, parameters)
    # Not even an empty tuple where there is nothing to fill in, or psycopg takes every % for a placeholder.
    return connection.execute(sql, parameters) if parameters else connection.execute(sql)


def _is_pymysql(connection: Any) -> bool:
    return kind_of(connection, {"pymysql.Connection": True}) is not None


def fence_sql(
    role: str, *, namespace: str = "default", schema: str = "tenure", bound: float = 10.0, database: str = "postgresql"
) -> str:
    """Return the fence as a statement, for programs in other languages; ``database`` is postgresql, sqlite or mysql.

    It takes a term's token and member id, as ``$1`` and ``$2`` on PostgreSQL, as ``?1`` and ``?2`` on SQLite, as two
    ``?`` on MariaDB, and must run inside the transaction that it fences, before any savepoint. PostgreSQL raises
    SQLSTATE TN001 if the term is over, and ends a transaction that lasts longer than ``bound`` seconds. SQLite changes
    one row if the term is the latest, MariaDB returns one; if it is none, roll back.
    """
    names = check_name("namespace", namespace), check_name("role", role)
    prefix, bound_ms = postgresql(check_schema(schema)).prefix, _milliseconds(check_bound(bound))
    if database == "postgresql":
        return _call(prefix, *map(_postgres_literal, names), "$1", "$2", str(bound_ms))
    if database == "sqlite":
        places = dict(
            zip(("namespace", "role", "token", "id"), (*map(_sqlite_literal, names), "?1", "?2"), strict=True)
        )
        return re.sub(r":(\w+)", lambda match: places[match[1]], SQLITE.text(statements.FENCE_BY_UPDATE)).strip()
    if database == "mysql":
        literals = dict(zip(("namespace", "role"), map(_mysql_literal, names), strict=True))
        text = MYSQL.text(statements.FENCE_BY_SHARE)
        return re.sub(r"%\((\w+)\)s", lambda match: literals.get(match[1], "?"), text).strip()
    raise ConfigError(f"database={database!r} must be 'postgresql', 'sqlite' or 'mysql'")


# --- verdicts -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def judged(claim: Claim) -> Iterator[None]:
    """Turn a driver's error into what it says about the claim; leave alone what says nothing about it."""
    try:
        yield
    except Exception as error:
        verdict = _verdict(claim, _sqlstate(error))
        if verdict is None:
            raise
        raise verdict from error


def _verdict(claim: Claim, sqlstate: str | None) -> TenureError | None:
    if sqlstate == tables.FENCED:
        return _refused(claim)
    if sqlstate == tables.NOT_FENCED_HERE:
        return ConfigError(_SAVEPOINT)
    if sqlstate in ("3F000", "42883", "42P01"):  # no such schema, function, table
        return ConfigError(_ELSEWHERE)
    if sqlstate == "25006":
        return ConfigError("a fence needs a transaction that may write, and this one is read-only: begin it READ WRITE")
    if sqlstate == "40001":
        msg = (
            f"role {claim.role!r}: a term changed since this transaction began, or the database is busy: try a new one"
        )
        return Fenced(msg, role=claim.role, token=claim.token, retryable=True)
    return None


def _refused(claim: Claim) -> Fenced:
    msg = f"role {claim.role!r}: the term with token {claim.token} is over; this transaction cannot commit"
    return Fenced(msg, role=claim.role, token=claim.token)


def _sqlstate(error: Exception) -> str | None:
    """Return the SQLSTATE of a driver's error, or the one that an error of SQLite amounts to."""
    original = getattr(error, "orig", None) or error  # SQLAlchemy wraps the driver's
    if isinstance(original.__cause__, Exception) and type(original).__module__ == "django.db.utils":
        original = original.__cause__  # and so does Django
    if isinstance(original, sqlite3.OperationalError):
        return "42P01" if "no such table" in str(original) else "40001" if "locked" in str(original) else None
    if original.args and isinstance(original.args[0], int):  # PyMySQL
        return _MYSQL_STATES.get(original.args[0])
    if original.args and isinstance(original.args[0], dict):  # pg8000
        return original.args[0].get("C")
    return getattr(original, "sqlstate", None) or getattr(original, "pgcode", None)


_MYSQL_STATES = {
    **dict.fromkeys((1046, 1109, 1146), "42P01"),  # no database, no such table
    **dict.fromkeys((1020, 1205, 1213), "40001"),  # the row has changed; a lock that did not come, or never could
    1792: "25006",
}


# --- the question -------------------------------------------------------------------------------------------


def _call(prefix: str, *arguments: str) -> str:
    return f"select {prefix}fence({', '.join(arguments)})"


def _question(claim: Claim, bound_s: float, place: str) -> tuple[str, dict[str, Any]]:
    """Return PostgreSQL's question and its parameters; ``place`` is how the driver writes one."""
    parameters = _parameters(claim) | {"bound_ms": _milliseconds(bound_s)}
    places = (place.format(name=name, number=number) for number, name in enumerate(parameters, start=1))
    return _call(postgresql(claim.schema).prefix, *places), parameters


def _parameters(claim: Claim) -> dict[str, Any]:
    return {"namespace": claim.namespace, "role": claim.role, "token": claim.token, "id": claim.member_id}


def _milliseconds(bound_s: float) -> int:
    return max(1, round(bound_s * 1000))


def _postgres_literal(text: str) -> str:
    """Quote a text so that no setting of the server, and no driver in search of placeholders, mistakes any of it."""
    escaped = re.sub(r"[!-,/:-@[-^`{-~]", lambda match: f"\\u{ord(match[0]):04x}", text)
    return f"'{text}'" if escaped == text else f"E'{escaped}'"


def _sqlite_literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _mysql_literal(text: str) -> str:
    """Quote a text so that neither the server's mode nor the connection's character set matters."""
    return f"'{text}'" if re.fullmatch(r"[\w .-]*", text, re.ASCII) else f"_utf8mb4 x'{text.encode().hex()}'"


# --- psycopg and asyncpg ------------------------------------------------------------------------------------


def _fence_psycopg(connection: Any, claim: Claim, bound_s: float) -> None:
    psycopg = load()
    if connection.autocommit and connection.pgconn.pipeline_status:
        with connection.pipeline() as pipeline:
            pipeline.sync()  # until then nothing tells whether a transaction was begun
    _check_autocommit(connection)
    text, parameters = _question(claim, bound_s, "%({name})s")
    with judged(claim):
        # A cursor of our own, whatever kind of cursor and rows the caller's connection makes; the fetch waits for the
        # verdict where the caller is in pipeline mode.
        cursor = psycopg.Cursor(connection, row_factory=psycopg.rows.tuple_row)
        cursor.execute(text, parameters, prepare=False).fetchone()


async def _fence_psycopg_async(connection: Any, claim: Claim, bound_s: float) -> None:
    psycopg = load()
    if connection.autocommit and connection.pgconn.pipeline_status:
        async with connection.pipeline() as pipeline:
            await pipeline.sync()
    _check_autocommit(connection)
    text, parameters = _question(claim, bound_s, "%({name})s")
    with judged(claim):
        cursor = psycopg.AsyncCursor(connection, row_factory=psycopg.rows.tuple_row)
        await cursor.execute(text, parameters, prepare=False)
        await cursor.fetchone()


def _check_autocommit(connection: Any) -> None:
    if connection.autocommit and not in_transaction(connection):
        raise ConfigError(_AUTOCOMMIT)


async def _fence_asyncpg(connection: Any, claim: Claim, bound_s: float) -> None:
    if not connection.is_in_transaction():
        raise ConfigError(_AUTOCOMMIT)
    text, parameters = _question(claim, bound_s, "${number}")
    with judged(claim):
        await connection.fetchval(text, *parameters.values())


# --- SQLite -------------------------------------------------------------------------------------------------


def _fence_sqlite(connection: sqlite3.Connection, claim: Claim, _: float) -> None:
    """Fence by a write that changes nothing: it takes the one write lock, until the transaction ends.

    SQLite keeps that lock through a rollback to a savepoint, so savepoints do no harm here.
    """
    with undone(lambda: roll_back(connection)), judged(claim):
        if not connection.execute(SQLITE.text(statements.FENCE_BY_UPDATE), _parameters(claim)).rowcount:
            raise _refused(claim)
    if not connection.in_transaction:
        raise ConfigError(_AUTOCOMMIT)


def roll_back(connection: sqlite3.Connection) -> None:
    """Roll back, in whichever mode the connection is."""
    if getattr(connection, "autocommit", None) is not True:
        connection.rollback()
    elif connection.in_transaction:
        connection.execute("rollback")  # rollback() does nothing in this mode


@contextlib.contextmanager
def undone(*roll_backs: Callable[[], object]) -> Iterator[None]:
    """Roll back where anything is raised: SQLite itself would let the transaction go on."""
    try:
        yield
    except Exception:
        for roll_back in roll_backs:
            roll_back()
        raise


async def _fence_aiosqlite(connection: Any, claim: Claim, bound_s: float) -> None:
    """Do it all on the one thread that may use the sqlite3 connection inside."""
    await connection._execute(_fence_sqlite, connection._conn, claim, bound_s)  # noqa: SLF001


# --- PyMySQL ------------------------------------------------------------------------------------------------


def _fence_pymysql(connection: Any, claim: Claim, bound_s: float) -> None:
    """Fence by a share lock on the role's row.

    A savepoint set before anything else is the transaction's beginning to InnoDB, and a rollback to it drops the lock;
    the driver does not know of savepoints, so that cannot be refused here.
    """
    cursor = mysql.load().cursors.Cursor(connection)  # one of our own, whatever kind the caller's connection makes
    with undone(connection.rollback), judged(claim):
        cursor.execute(_mysql_bound(bound_s))  # first: who is paused behind the lock has a bound already
        cursor.execute(MYSQL.text(statements.FENCE_BY_SHARE), _parameters(claim))
        if not cursor.fetchall():
            raise _refused(claim)
    connection.ping(reconnect=False)  # rows come without a word about the transaction
    if not in_transaction(connection):
        raise ConfigError(_AUTOCOMMIT)


def _mysql_bound(bound_s: float) -> str:
    """Return the statement that bounds an idle transaction on MariaDB, never loosening what the caller has set.

    MySQL has no such setting, and a SET must set something.
    """
    seconds = math.ceil(bound_s)
    return (
        "set /*M! session idle_transaction_timeout = "
        f"if(@@idle_transaction_timeout between 1 and {seconds}, @@idle_transaction_timeout, {seconds}), */ "
        "session sql_notes = @@sql_notes"
    )


# --- SQLAlchemy ---------------------------------------------------------------------------------------------


def _fence_session(session: Any, claim: Claim, bound_s: float) -> None:
    _fence_sqlalchemy(session.connection(), claim, bound_s, session.rollback)


def _fence_sqlalchemy(connection: Any, claim: Claim, bound_s: float, *roll_backs: Callable[[], object]) -> None:
    """Fence by SQLAlchemy's own means, so that the driver underneath may be any that it knows."""
    if connection.dialect.name == "postgresql":
        _fence_sqlalchemy_postgres(connection, claim, bound_s)
    elif connection.dialect.name == "sqlite":
        with undone(*roll_backs, connection.rollback), judged(claim):
            _fence_sqlalchemy_sqlite(connection, claim)
    elif connection.dialect.name in ("mysql", "mariadb"):
        with undone(*roll_backs, connection.rollback), judged(claim):
            _fence_sqlalchemy_mysql(connection, claim, bound_s)
    else:
        raise ConfigError(
            f"cannot fence on {connection.dialect.name}: Tenure's tables are on PostgreSQL, MariaDB or SQLite"
        )


def _fence_sqlalchemy_postgres(connection: Any, claim: Claim, bound_s: float) -> None:
    text = sys.modules["sqlalchemy"].text
    question, parameters = _question(claim, bound_s, ":{name}")
    with judged(claim):
        connection.scalar(text(question), parameters)  # fetched, in case that the caller streams results
    # Autocommit can be set in many places. In all of them it shows in this: the fence gave its transaction an id, and
    # the transaction at hand has none.
    if not connection.scalar(text("select pg_catalog.pg_current_xact_id_if_assigned() is not null")):
        raise ConfigError(_AUTOCOMMIT)


_fenced: weakref.WeakSet[Any] = weakref.WeakSet()
"""SQLAlchemy's outermost transactions on SQLite and MariaDB that were fenced before any savepoint."""


def _fence_sqlalchemy_sqlite(connection: Any, claim: Claim) -> None:
    """Fence as on a bare connection, but not inside a savepoint that may be the transaction's beginning.

    sqlite3 begins a transaction late, at the first write; so where ``begin_nested()`` comes first the savepoint is the
    transaction, its end commits, and what follows in SQLAlchemy's transaction would not be fenced.
    """
    if connection.in_nested_transaction() and connection.get_transaction() not in _fenced:
        raise ConfigError(_SAVEPOINT)
    update = sys.modules["sqlalchemy"].text(SQLITE.text(statements.FENCE_BY_UPDATE))
    if not connection.execute(update, _parameters(claim)).rowcount:
        raise _refused(claim)
    if not connection.connection.driver_connection.in_transaction:
        raise ConfigError(_AUTOCOMMIT)
    _fenced.add(connection.get_transaction())


def _fence_sqlalchemy_mysql(connection: Any, claim: Claim, bound_s: float) -> None:
    """Fence as on a bare connection, but not inside a savepoint that may be the transaction's beginning."""
    if connection.in_nested_transaction() and connection.get_transaction() not in _fenced:
        raise ConfigError(_SAVEPOINT)
    connection.exec_driver_sql(_mysql_bound(bound_s))
    if not connection.exec_driver_sql(MYSQL.text(statements.FENCE_BY_SHARE), _parameters(claim)).all():
        raise _refused(claim)
    if not connection.exec_driver_sql("select not @@autocommit /*M! or @@in_transaction */").scalar():
        raise ConfigError(_AUTOCOMMIT)
    _fenced.add(connection.get_transaction())


async def _fence_run_sync(connection: Any, claim: Claim, bound_s: float) -> None:
    await connection.run_sync(fence, claim, bound_s)


async def _fence_scoped(scoped: Any, claim: Claim, bound_s: float) -> None:
    await fence_async(scoped(), claim, bound_s)


# --- Django -------------------------------------------------------------------------------------------------


def _fence_django(connection: Any, claim: Claim, bound_s: float) -> None:
    if atomic.in_test(connection):
        _fence_django_by(statements.FENCE_BY_LOOK, connection, claim)
    elif connection.vendor == "postgresql":
        with atomic.spoiled(connection), judged(claim):
            atomic.execute(connection, *_question(claim, bound_s, "%({name})s"))
    elif atomic.in_savepoint(connection):
        raise ConfigError(_SAVEPOINT)
    else:
        in_mysql = connection.vendor == "mysql"
        if in_mysql:
            atomic.execute(connection, _mysql_bound(bound_s))
        _fence_django_by(statements.FENCE_BY_SHARE if in_mysql else statements.FENCE_BY_UPDATE, connection, claim)
        atomic.mark_fenced(connection)


def _fence_django_by(text: str, connection: Any, claim: Claim) -> None:
    with atomic.spoiled(connection), judged(claim):
        [result] = atomic.run(connection, claim.schema, Step(text, _parameters(claim)))
        if not result.rows and result.count < 1:
            raise _refused(claim)


def _fence_django_proxy(proxy: Any, claim: Claim, bound_s: float) -> None:
    fence(proxy._connections[proxy._alias], claim, bound_s)  # noqa: SLF001 - whichever is this thread's


# --- kinds --------------------------------------------------------------------------------------------------

_KINDS: dict[str, Callable[[Any, Claim, float], None]] = {
    "django.BaseDatabaseWrapper": _fence_django,
    "django.ConnectionProxy": _fence_django_proxy,
    "psycopg.Connection": _fence_psycopg,
    "pymysql.Connection": _fence_pymysql,
    "sqlalchemy.Connection": _fence_sqlalchemy,
    "sqlalchemy.Session": _fence_session,
    "sqlalchemy.scoped_session": _fence_session,
    "sqlite3.Connection": _fence_sqlite,
}
_ASYNC_KINDS: dict[str, Callable[[Any, Claim, float], Awaitable[None]]] = {
    "aiosqlite.Connection": _fence_aiosqlite,
    "asyncpg.Connection": _fence_asyncpg,
    "asyncpg.PoolConnectionProxy": _fence_asyncpg,
    "psycopg.AsyncConnection": _fence_psycopg_async,
    "sqlalchemy.AsyncConnection": _fence_run_sync,
    "sqlalchemy.AsyncSession": _fence_run_sync,
    "sqlalchemy.async_scoped_session": _fence_scoped,
}

_How = TypeVar("_How")


def kind_of(connection: Any, kinds: dict[str, _How]) -> _How | None:
    """Return what the table holds for the connection's class, or for the nearest that it is made of."""
    names = (f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(connection).__mro__)
    return next((kinds[name] for name in names if name in kinds), None)


def unknown(connection: Any) -> ConfigError:
    """Return what to say about a connection of a kind that is in no table."""
    name = f"{type(connection).__module__}.{type(connection).__qualname__}"
    if is_async(connection):
        return ConfigError(
            f"a {name} cannot be fenced synchronously: use an AsyncNode and `await term.fence(connection)`"
        )
    return ConfigError(
        f"cannot fence a {name}: pass a connection of psycopg, asyncpg, PyMySQL, sqlite3, aiosqlite or Django, or "
        "SQLAlchemy's Connection or Session"
    )
