"""Translates a driver's error, by its SQLSTATE, into an error of Tenure about the term or the connection.

No other module does that. The messages about connections that cannot be fenced, and the attributes of a term that the
fence uses, are here as well.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Protocol

from tenure.errors import ConfigError, Fenced, TenureError, Unfenced
from tenure.store.guards import MESSAGE_LENGTH, REMEDIES, UNFENCED, UNFENCED_ON_MYSQL
from tenure.store.tables import FENCED, NOT_FENCED_HERE

AUTOCOMMIT = (
    "a fence needs a transaction, but this connection is in autocommit mode: begin one first, or use term.transaction()"
)
DJANGO_AUTOCOMMIT = (
    "a fence needs a transaction, but Django's connection is in autocommit mode: fence inside "
    "`with transaction.atomic():`, or use term.transaction()"
)
SESSION_AUTOCOMMIT = (
    "session= must be in a transaction, but it is in autocommit mode: begin a transaction, or leave session= out"
)
SAVEPOINT = (
    "a fence inside a savepoint does not hold (a rollback to it would release the lock): call term.fence() in the "
    "outermost transaction, before any savepoint"
)
_ELSEWHERE = "this connection's database does not have Tenure's tables: fence on a connection to the node's database"
_XA = (
    "a fence does not hold in an XA transaction (XA PREPARE would release the lock): use an ordinary transaction (in "
    "SQLAlchemy, one without twophase)"
)
_READ_ONLY = "a fence needs a transaction that may write, but this one is read-only: begin it READ WRITE"
_MISUSES = {
    NOT_FENCED_HERE: SAVEPOINT,
    # The schema, the function or the table does not exist.
    **dict.fromkeys(("3F000", "42883", "42P01"), _ELSEWHERE),
    **dict.fromkeys(("XAE04", "XAE07"), _XA),
    "25006": _READ_ONLY,
}
"""The messages for SQLSTATEs that concern the connection, not the term."""

_MYSQL_STATES = {
    # The statement names no database, or a table that does not exist.
    **dict.fromkeys((1046, 1109, 1146), "42P01"),
    # The row has changed, a lock wait timed out, or the server ended a deadlock.
    **dict.fromkeys((1020, 1205, 1213), "40001"),
    # No XA transaction has this name, because the connection is in another one.
    1397: "XAE04",
    # This state of an XA transaction does not allow the statement.
    1399: "XAE07",
    1792: "25006",
    UNFENCED_ON_MYSQL: UNFENCED,
}


class TermIdentity(Protocol):
    """The term whose token the fence checks."""

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
    @property
    def file(self) -> str:
        """The file in which the term was acquired (SQLite), as ``sqlite.file_id`` names it; empty if unknown."""
        ...


def refused(term: TermIdentity) -> Fenced:
    """Return the error for a term that is over."""
    msg = f"role {term.role!r}: the term with token {term.token} is over; this transaction cannot commit"
    return Fenced(msg, role=term.role, token=term.token)


@contextlib.contextmanager
def translate_errors(term: TermIdentity) -> Iterator[None]:
    """Turn a driver's error about the term or the connection into one of Tenure; leave every other error alone."""
    try:
        yield
    except Exception as error:
        verdict = _verdict(term, sqlstate(error))
        if verdict is None:
            raise
        raise verdict from error


def _verdict(term: TermIdentity, state: str | None) -> TenureError | None:
    if state == FENCED:
        return refused(term)
    if state in _MISUSES:
        return ConfigError(_MISUSES[state])
    if state == "40001":
        msg = f"role {term.role!r}: the database is busy, or a term changed after this transaction began: try a new one"
        return Fenced(msg, role=term.role, token=term.token, retryable=True)
    return None


@contextlib.contextmanager
def translate_unfenced() -> Iterator[None]:
    """Turn the error with which a guarded table refuses a write into ``Unfenced``, whatever the driver.

    Every other error leaves the block as it is. The block may await.
    """
    try:
        yield
    except Exception as error:
        if sqlstate(error) != UNFENCED:
            raise
        original = _original(error)
        on_mysql = original.args[:1] == (UNFENCED_ON_MYSQL,)
        # PyMySQL's errors show the message as a literal of Python, with escapes.
        message = str(original.args[1] if on_mysql else original)
        found = _GUARDED.search(message)
        if found is None:
            raise Unfenced(message, role=None) from error
        # In an older trigger, a message of this length may have been cut, and the role with it.
        is_cut = on_mysql and len(message) == MESSAGE_LENGTH and message.endswith(REMEDIES[0])
        raise Unfenced(found[0], role=None if is_cut else found[1]) from error


_GUARDED = re.compile(r"[A-Z]+ on .+ is guarded by role (.+?)(?: of namespace .+)?: call [^\n\"']+")


def sqlstate(error: Exception) -> str | None:
    """Return the SQLSTATE of a driver's error, or the one that corresponds to an error of SQLite or PyMySQL."""
    original = _original(error)
    # Not by isinstance(): a node on a server starts without sqlite3.
    if (type(original).__module__, type(original).__name__) == ("sqlite3", "OperationalError"):
        return "42P01" if "no such table" in str(original) else "40001" if "locked" in str(original) else None
    # PyMySQL puts the number of the error first.
    if original.args and isinstance(original.args[0], int):
        return _MYSQL_STATES.get(original.args[0])
    # pg8000 puts the fields of the error first.
    if original.args and isinstance(original.args[0], dict):
        return original.args[0].get("C")
    return getattr(original, "sqlstate", None) or getattr(original, "pgcode", None)


def _original(error: Exception) -> Exception:
    """Return the driver's error that SQLAlchemy or Django has wrapped."""
    original: Exception = getattr(error, "orig", None) or error
    if isinstance(original.__cause__, Exception) and type(original).__module__ == "django.db.utils":
        return original.__cause__
    return original
