"""The one place that knows how to run a text on a connection of the caller's."""

from __future__ import annotations

import sqlite3
from typing import Any, Protocol

from tenure import schema, statements
from tenure.dialects import SQLITE, postgresql
from tenure.errors import ConfigError, Fenced
from tenure.postgres import load


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
    modules = {kind.__module__.partition(".")[0] for kind in type(connection).__mro__}
    if isinstance(connection, sqlite3.Connection):
        _fence_sqlite(connection, claim)
    elif "psycopg" in modules and hasattr(connection, "pgconn") and not hasattr(connection, "__aenter__"):
        _fence_psycopg(connection, claim, bound_s)
    else:
        raise ConfigError(
            f"cannot fence a {type(connection).__module__}.{type(connection).__qualname__}: pass a psycopg or sqlite3 "
            "connection"
        )


def in_transaction(connection: Any) -> bool:
    """Whether a transaction is open on the connection."""
    if isinstance(connection, sqlite3.Connection):
        return connection.in_transaction
    return bool(connection.info.transaction_status != load().pq.TransactionStatus.IDLE)


def _fence_psycopg(connection: Any, claim: Claim, bound_s: float) -> None:
    psycopg = load()
    status = connection.info.transaction_status
    if connection.autocommit and status == psycopg.pq.TransactionStatus.IDLE:
        raise ConfigError(_AUTOCOMMIT)
    text = f"select {postgresql(claim.schema).prefix}fence(%s, %s, %s, %s, %s)"
    parameters = (claim.namespace, claim.role, claim.token, claim.member_id, max(1, round(bound_s * 1000)))
    try:
        # A cursor of our own, whatever kind of cursor and rows the caller's connection makes; the fetch waits for the
        # verdict where the caller is in pipeline mode.
        cursor = psycopg.Cursor(connection, row_factory=psycopg.rows.tuple_row)
        cursor.execute(text, parameters, prepare=False).fetchone()
    except psycopg.Error as error:
        if error.sqlstate == schema.FENCED:
            raise _refused(claim) from None
        if error.sqlstate == schema.NOT_FENCED_HERE:
            raise ConfigError(_SAVEPOINT) from None
        if error.sqlstate in ("3F000", "42883", "42P01"):
            raise ConfigError(_ELSEWHERE) from None
        if error.sqlstate == "40001":
            raise Fenced(f"role {claim.role!r}: a term changed since this transaction began", retryable=True) from error
        raise


def _fence_sqlite(connection: sqlite3.Connection, claim: Claim) -> None:
    """Fence by a write that changes nothing: it takes the one write lock, until the transaction ends.

    SQLite keeps that lock through a rollback to a savepoint, so savepoints do no harm here.
    """
    automatic = getattr(connection, "autocommit", None) is True or connection.isolation_level is None
    if automatic and not connection.in_transaction:
        raise ConfigError(_AUTOCOMMIT)
    parameters = {"namespace": claim.namespace, "role": claim.role, "token": claim.token, "id": claim.member_id}
    try:
        fenced = connection.execute(SQLITE.text(statements.FENCE_BY_UPDATE), parameters).rowcount
    except sqlite3.OperationalError as error:
        connection.rollback()
        if "no such table" in str(error):
            raise ConfigError(_ELSEWHERE) from None
        if "locked" not in str(error):  # busy, that is; anything else is not about the term
            raise
        raise Fenced(f"role {claim.role!r}: the database is busy ({error})", retryable=True) from error
    if not fenced:
        connection.rollback()
        raise _refused(claim)


def _refused(claim: Claim) -> Fenced:
    return Fenced(f"role {claim.role!r}: the term with token {claim.token} is over; this transaction cannot commit")
