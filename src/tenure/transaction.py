"""The transaction of ``term.transaction()``: fenced, on the node's connection, and committed as a whole or not at all.

A fence holds for one transaction. If that transaction ends inside the block, what the block does next belongs to
another transaction, which is not fenced. The block can end it (COMMIT, and on MariaDB every statement that commits
implicitly), and so can the database (a failed statement on PostgreSQL, a deadlock on MariaDB, some errors on SQLite).
So each transaction carries a mark that ends with it, and the commit checks the mark first:

- PostgreSQL: the transaction's id. The check and COMMIT are one message, and the server stops at the first error.
- MariaDB and SQLite: a savepoint, set after the fence and released before COMMIT. On PostgreSQL a savepoint would
  turn everything that the block does into a subtransaction.

If the mark is gone, the open transaction is rolled back and NotCommitted is raised.

A claim in the block needs the fence, too. On PostgreSQL the check of the mark and the claim are one message. If the
mark is there, so is the fence's lock: it was taken before every savepoint of the block, so only the end of the
transaction releases it. On MariaDB and SQLite the only way to check the mark is to release it, and with it the block's
later savepoints. So a claim fences again there.
"""

from __future__ import annotations

import abc
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from tenure.databases.connecting import load, shut_down_socket
from tenure.databases.mysql import session
from tenure.errors import NotCommitted, StoreUnavailable
from tenure.fence import fence
from tenure.fence.adapter import Adapter, adapt
from tenure.fence.drivers.psycopg import run_together
from tenure.fence.verdicts import TermIdentity, translate_errors, translate_unfenced
from tenure.store.session import Step

if TYPE_CHECKING:
    import sqlite3

_MARK = "tenure_fence"


class OwnTransaction(abc.ABC):
    """A fenced transaction on the node's connection; databases differ in how it is marked and committed."""

    def __init__(self, adapter: Adapter, bound_s: float) -> None:
        """Fence the transaction that is open on the connection, and mark it."""
        self.connection = adapter.connection
        self._dialect = adapter.dialect
        self._term = adapter.term
        self._bound_s = bound_s
        self._using = threading.RLock()
        """Held during each statement. Tasks may share a transaction, and PyMySQL mixes up their results."""
        self._undone_by: Exception | None = None
        """The error with which the database undid the transaction."""
        self._fence()

    @abc.abstractmethod
    def _fence(self) -> None:
        """Fence and mark the open transaction."""

    @abc.abstractmethod
    def _execute(self, sql: str, parameters: Any) -> Any:
        """Run a statement and return the cursor."""

    @abc.abstractmethod
    def _is_open(self) -> bool:
        """Whether some transaction is open, as far as the driver knows."""

    @abc.abstractmethod
    def _was_undone_by(self, error: Exception) -> bool:
        """Whether the database undid the whole transaction when it raised this error."""

    def commit(self) -> None:
        """Commit if this still is the fenced transaction; raise NotCommitted if it is not.

        Wait for a statement that another thread runs, because drivers mix up the answers.
        """
        with self._using:
            self._commit()

    @abc.abstractmethod
    def _commit(self) -> None:
        """Commit while no other thread uses the connection."""

    @abc.abstractmethod
    def cut(self) -> None:
        """Make a statement that is under way fail, from another thread, within a second."""

    def execute(self, sql: str, parameters: Any) -> Any:
        """Run a statement and return the cursor."""
        with translate_unfenced(), self.used():
            return self._execute(sql, parameters)

    def run(self, *steps: Step) -> Any:
        """Run statements that need the fence; return their results."""
        return fence.fence(self.connection, self._term, self._bound_s, *steps)

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Use the connection in the block, unless the transaction has been ended already."""
        with self._using:
            if not self._is_open():
                raise self._ended() from self._undone_by
            try:
                yield
            except Exception as error:
                if self._undone_by is None and self._was_undone_by(error):
                    self._undone_by = error
                raise

    def _ended(self) -> NotCommitted:
        """Return the error for a missing mark: an error was swallowed, or a statement ended the transaction."""
        if self._undone_by is not None:
            return self._not_committed(
                "the database rolled this fenced transaction back because a statement in it failed, so nothing of it "
                "was committed: let the statement's error leave the block, or run the statement inside a savepoint and "
                "roll back to that"
            )
        return self._not_committed(
            "this fenced transaction was ended inside its block, by COMMIT, ROLLBACK or a statement that commits "
            "implicitly, so what followed was not fenced, and what was still open was rolled back: leave COMMIT and "
            "ROLLBACK to the block"
        )

    def _not_committed(self, what: str) -> NotCommitted:
        return NotCommitted(f"role {self._term.role!r}, token {self._term.token}: {what}")

    def _lost(self) -> NotCommitted:
        return self._not_committed(
            "the connection was lost before the block was committed, so what was open then was rolled back: try again"
        )

    def _in_doubt(self) -> StoreUnavailable:
        return StoreUnavailable(
            f"role {self._term.role!r}, token {self._term.token}: the connection was lost during the commit, so it is "
            "unknown whether this fenced transaction was committed: before you repeat it, check what it has written"
        )


class PostgresTransaction(OwnTransaction):
    """The fenced transaction on PostgreSQL, with psycopg."""

    _committing = False

    def _fence(self) -> None:
        self._cutting = threading.Lock()
        # The pipeline sends this query in one message with BEGIN.
        with self.connection.pipeline():
            asked = self._cursor().execute(_XID, prepare=False)
        ((self._id,),) = asked.fetchall()
        # The fence is not in the pipeline: psycopg ends a pipeline with a Flush, and that message stops the server's
        # timer for idle transactions until the next statement. The fence's bound would not hold.
        fence.fence(self.connection, self._term, self._bound_s)

    def _execute(self, sql: str, parameters: Any) -> Any:
        # Without parameters not even an empty tuple: psycopg would take every % for a placeholder.
        return self.connection.execute(sql, parameters) if parameters else self.connection.execute(sql)

    def _status(self) -> Any:
        return self.connection.info.transaction_status

    def _is_open(self) -> bool:
        return bool(self._status() != load().pq.TransactionStatus.IDLE)

    def _was_undone_by(self, error: Exception) -> bool:  # noqa: ARG002 - every error undoes it
        return bool(self._status() == load().pq.TransactionStatus.INERROR)

    def run(self, *steps: Step) -> Any:
        """Run the statements if this still is the fenced transaction."""
        try:
            with translate_errors(self._term):
                return run_together(self.connection, self._dialect, Step(self._if_fenced(), {}), *steps)[1:]
        except load().Error as error:
            if _MARK not in str(error):
                raise
            self.connection.rollback()
            raise self._ended() from error

    def _if_fenced(self) -> str:
        return _IF_FENCED.format(id=self._id, mark=_MARK)

    def _commit(self) -> None:
        psycopg = load()
        if self.connection.closed:
            raise self._lost()
        if self._status() != psycopg.pq.TransactionStatus.INTRANS:
            raise self._ended() from self._undone_by
        # A cancel request that is under way must not reach the commit.
        with self._cutting:
            self._committing = True
        try:
            self._cursor().execute(self._if_fenced() + "; commit")
        except psycopg.Error as error:
            if _MARK in str(error):
                raise self._ended() from self._undone_by
            if self.connection.closed:
                raise (self._lost() if error.sqlstate in _TOO_LONG else self._in_doubt()) from error
            raise

    def cut(self) -> None:
        """Cancel the statement on the server, which would otherwise finish it and keep the role's row locked.

        A commit that waits for a replica is not cancelled: the server would report it as successful, although it is on
        no replica. Its connection is cut instead, and its outcome is unknown.
        """
        with self._cutting:
            if not self._committing:
                # It fails if the server cannot be reached, or does not react.
                with contextlib.suppress(Exception):
                    self.connection.cancel_safe(timeout=1)
                    return
        shut_down_socket(self.connection)

    def _cursor(self) -> Any:
        """Return a plain cursor, whatever kind of cursors the block has set for the connection."""
        psycopg = load()
        return psycopg.Cursor(self.connection, row_factory=psycopg.rows.tuple_row)


_XID = "select pg_catalog.pg_current_xact_id()::pg_catalog.text::pg_catalog.int8"
"""As a number, because psycopg returns text as bytes if the database is in SQL_ASCII."""
_IF_FENCED = (
    "select cast(case when coalesce(pg_catalog.pg_current_xact_id_if_assigned() operator(pg_catalog.=) "
    "cast('{id}' as pg_catalog.xid8), false) then '0' else '{mark}: this is another transaction than the fenced one' "
    "end as pg_catalog.int4)"
)
"""Fails by a cast if this is another transaction: a SELECT cannot raise otherwise. Every name is qualified, because the
block may have set the search path."""
_TOO_LONG = ("25P03", "25P04")
"""The errors of idle_in_transaction_session_timeout and transaction_timeout."""


class MySqlTransaction(OwnTransaction):
    """The fenced transaction on MariaDB, with PyMySQL."""

    def _fence(self) -> None:
        fence.fence(self.connection, self._term, self._bound_s)
        self.connection.query(f"savepoint {_MARK}")

    def _execute(self, sql: str, parameters: Any) -> Any:
        return session.execute(self.connection, sql, parameters)

    def _is_open(self) -> bool:
        return session.in_transaction(self.connection)

    def _was_undone_by(self, error: Exception) -> bool:
        # Only these errors undo it: a statement that commits implicitly has committed even if it fails.
        return not self._is_open() and error.args[:1] in ((session.DEADLOCK,), (session.LOCK_WAIT_TIMEOUT,))

    def _commit(self) -> None:
        error_type = session.load().err.Error
        try:
            self.connection.query(f"release savepoint {_MARK}")
        except error_type as error:
            if session.is_lost(self.connection, error):
                raise self._lost() from error
            raise self._ended() from self._undone_by
        try:
            self.connection.commit()
        except error_type as error:
            if session.is_lost(self.connection, error):
                raise self._in_doubt() from error
            raise

    def cut(self) -> None:
        """End the statement on the server."""
        session.interrupt(self.connection)


class SqliteTransaction(OwnTransaction):
    """The fenced transaction on SQLite."""

    connection: sqlite3.Connection

    def _fence(self) -> None:
        fence.fence(self.connection, self._term, self._bound_s)
        self.connection.execute(f"savepoint {_MARK}")

    def _execute(self, sql: str, parameters: Any) -> Any:
        return self.connection.execute(sql, parameters)

    def _is_open(self) -> bool:
        return self.connection.in_transaction

    def _was_undone_by(self, error: Exception) -> bool:  # noqa: ARG002 - the state tells
        return not self._is_open()

    def _commit(self) -> None:
        try:
            self.connection.execute(f"release {_MARK}")
        except self.connection.OperationalError as error:
            if _MARK in str(error):
                raise self._ended() from self._undone_by
            raise
        self.connection.execute("commit")

    def cut(self) -> None:
        """Interrupt the statement."""
        self.connection.interrupt()


_KINDS: dict[str, Callable[[Adapter, float], OwnTransaction]] = {
    "postgresql": PostgresTransaction,
    "mysql": MySqlTransaction,
    "sqlite": SqliteTransaction,
}


def fenced(connection: Any, term: TermIdentity, bound_s: float) -> OwnTransaction:
    """Fence the transaction that is open on a connection of the node."""
    adapter = adapt(connection, term)
    return _KINDS[adapter.dialect.name](adapter, bound_s)
