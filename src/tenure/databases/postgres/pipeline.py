"""Statements that are sent together, by libpq's pipeline mode.

psycopg gives access to libpq in ``psycopg.pq``. Its cursors can do the same, but they take several times the CPU time
for each statement (measured: 2.7 ms for the five statements of a takeover, after a second at rest). A node mostly sends
the same few statements, so this module does no more than those need: each is prepared once, parameters travel as text,
and the server infers their types. psycopg converts the values in the answers.
"""

from __future__ import annotations

import itertools
import os
import re
from collections import deque
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from tenure.databases.connecting import load
from tenure.store.session import Failed, wait_readable

if TYPE_CHECKING:
    import psycopg

MOST_PREPARED = 200
"""How many statements a connection prepares, at most. Later ones are sent unprepared: a few texts differ each time."""

LONGEST_WAIT_S = 0.5 if os.name == "nt" else None
"""The longest single wait for the server: on Windows, Ctrl-C does not interrupt one."""

_PARAMETER = re.compile(r"%\((\w+)\)s")


class Reply:
    """The result of a statement. Reading it waits for the reply; until then, more statements are sent with it."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self.result: Any = None
        """The result as libpq has it; None before it is received, and if the statement failed."""
        self.error: Exception | None = None
        self._rows: Sequence[tuple[Any, ...]] | None = None

    @property
    def rows(self) -> Sequence[tuple[Any, ...]]:
        if self._rows is None:
            self._rows = self._pipeline.rows(self)
        return self._rows

    @property
    def count(self) -> int:
        self._pipeline.receive(self)
        return self.result.ntuples if self.result.nfields else self.result.command_tuples or 0

    @property
    def status(self) -> bytes:
        """The server's word for what it has done, such as ``COMMIT``; empty if the statement has not succeeded."""
        return b"" if self.result is None else self.result.command_status or b""


class Pipeline:
    """One connection in pipeline mode, from :meth:`enter` to :meth:`leave`."""

    def __init__(
        self, connection: psycopg.Connection[Any], heard: Callable[[str], None], server_ends: Callable[[], None]
    ) -> None:
        """Work on an open connection, whose ``prepare_threshold`` says whether it can prepare statements.

        ``heard`` is called with each notification, ``server_ends`` when the server says that it ends the connection.
        """
        self._psycopg: Any = load()
        self._connection = connection
        self._libpq = connection.pgconn
        self._heard = heard
        self._server_ends = server_ends
        self._prepared: dict[str, bytes] = {}
        self._numbers = itertools.count()
        self._stale = False
        """Whether the server has refused a prepared statement as outdated."""
        self._ended = False
        """Whether the message that ends the pipeline has been sent."""
        self._pending: deque[tuple[Reply | None, str]] = deque()
        """What was sent and not answered: statements, and texts to be prepared, which have no reply."""
        self._values = self._psycopg.adapt.Transformer(connection)
        status = self._psycopg.pq.ExecStatus
        self._ok = (status.TUPLES_OK, status.COMMAND_OK)
        self._failed, self._synced = status.FATAL_ERROR, status.PIPELINE_SYNC
        errors = self._psycopg.errors
        # The columns of a table have changed, or the prepared statements were dropped, as by DISCARD ALL.
        self._outdated = (errors.FeatureNotSupported, errors.InvalidSqlStatementName)
        self._idle = self._psycopg.pq.TransactionStatus.IDLE

    def enter(self) -> None:
        """Begin to send without waiting for replies."""
        self._pending.clear()
        self._ended = False
        between_transactions = self._libpq.transaction_status == self._idle
        self._libpq.enter_pipeline_mode()
        if self._stale and between_transactions:
            self._stale = False
            self._prepared.clear()
            self._libpq.send_query_params(b"deallocate all", [])
            self._pending.append((Reply(self), ""))

    def send(self, text: str, parameters: dict[str, Any] | None = None) -> Reply:
        """Add a statement to those that are sent when a reply is read, or the pipeline is left."""
        query, names = _numbered(text)
        values = [self._as_text((parameters or {})[name]) for name in names]
        name = self._prepared.get(text)
        if name is None and self._connection.prepare_threshold is not None and len(self._prepared) < MOST_PREPARED:
            name = self._prepared[text] = b"tenure_%d" % next(self._numbers)
            self._libpq.send_prepare(name, query)
            self._pending.append((None, text))
        if name is None:
            self._libpq.send_query_params(query, values)
        else:
            self._libpq.send_query_prepared(name, values)
        reply = Reply(self)
        self._pending.append((reply, text))
        return reply

    def wake_server(self) -> None:
        """Send what there is. A process of the server that has slept wakes up while more is prepared here."""
        self._flush()

    def receive(self, reply: Reply) -> None:
        """Wait until the reply is there; raise the server's error if this statement or an earlier one failed."""
        if reply.error is not None:
            raise reply.error
        if reply.result is None:
            self._libpq.send_flush_request()
            self._flush()
        while reply.result is None:
            self._receive()

    def ask_early(self) -> None:
        """Have the server send the replies so far as soon as it has them, and not with those that follow."""
        self._libpq.send_flush_request()

    def receive_early(self, reply: Reply) -> None:
        """Send everything, with the end of the pipeline, and wait for one reply only. Nothing can be sent after it."""
        self._end()
        while reply.result is None:
            self._receive()

    def rows(self, reply: Reply) -> Sequence[tuple[Any, ...]]:
        """Return the rows of a reply; raise ``Failed`` if Python cannot represent a value."""
        self.receive(reply)
        if not reply.result.ntuples:
            return []
        self._values.set_pgresult(reply.result)
        try:
            rows: Sequence[tuple[Any, ...]] = self._values.load_rows(0, reply.result.ntuples, tuple)
        except self._psycopg.DataError as error:
            # Python has no time in the year 10000, for instance, and no `infinity`.
            raise Failed(f"a row of the tables cannot be read: {error}") from error
        return rows

    def leave(self) -> None:
        """Wait for all replies, and go back to the ordinary mode; raise the error of a statement that failed.

        The message that ends a pipeline is the last that is sent. PgBouncer would reserve a connection for anything
        that came after it.
        """
        try:
            failure = self._finish()
            if not self._connection.closed:
                self._libpq.exit_pipeline_mode()
        except BaseException:
            # What the server may still send would be taken for the answer to the next request.
            self._connection.close()
            raise
        if failure is not None:
            raise failure

    def _finish(self) -> Exception | None:
        """Wait until the server has processed everything, or has ended the connection; return the first error."""
        failure: Exception | None = None
        try:
            self._end()
        except self._psycopg.Error as error:
            failure = error
        finished = self._connection.closed
        while not finished:
            try:
                finished = self._receive()
            except self._psycopg.Error as error:
                failure = failure or error
                finished = self._connection.closed
        return failure

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            self._libpq.pipeline_sync()
            self._flush()

    def _receive(self) -> bool:
        """Receive one result, and raise its error; return whether the server has processed everything."""
        result = self._next()
        if result is None:
            self._connection.close()
            raise self._psycopg.OperationalError("the connection ended before the server had answered")
        if result.status == self._synced:
            return True
        # The server may also fail after the last statement: it ends the connection, or the implicit commit fails.
        reply, text = self._pending.popleft() if self._pending else (None, "")
        # libpq returns None after the result of each statement.
        self._next()
        if result.status in self._ok:
            if reply is not None:
                reply.result = result
            return False
        error = self._failure(result)
        if reply is not None:
            reply.error = error
            self._stale = self._stale or isinstance(error, self._outdated)
        elif text:
            del self._prepared[text]
        raise error

    def _failure(self, result: Any) -> Any:
        """Return the error that a result stands for."""
        psycopg = self._psycopg
        if result.status != self._failed:
            return psycopg.OperationalError("skipped, because a statement before it failed")
        severity = result.error_field(psycopg.pq.DiagnosticField.SEVERITY_NONLOCALIZED)
        if severity in (b"FATAL", b"PANIC"):
            self._server_ends()
        return psycopg.errors.error_from_result(result, "utf-8")

    def _next(self) -> Any:
        """Return the next result that libpq has, after waiting for it."""
        while self._libpq.is_busy():
            wait_readable([self._connection.fileno()], LONGEST_WAIT_S)
            try:
                self._libpq.consume_input()
            except self._psycopg.Error:
                # libpq keeps the connection open after some errors, and the next read would fail as well.
                self._connection.close()
                raise
        self.hear()
        return self._libpq.get_result()

    def hear(self) -> None:
        """Pass on the notifications that have arrived."""
        while note := self._libpq.notifies():
            self._heard(note.extra.decode())

    def _flush(self) -> None:
        """Send what libpq has buffered, and read meanwhile: a server that cannot send its replies does not read."""
        while self._libpq.flush():
            wait_readable([self._connection.fileno()], 0.01)
            self._libpq.consume_input()

    def _as_text(self, value: Any) -> bytes | None:
        """Return a parameter as text; refuse one with a NUL, at which libpq would cut it.

        The value may belong to an enum of the application, whose own ``str`` is the member's name.
        """
        if value is None:
            return None
        if isinstance(value, str):
            if "\0" in value:
                raise self._psycopg.DataError("PostgreSQL text cannot contain NUL (0x00) bytes")
            return value.encode()
        if isinstance(value, int):
            return int.__repr__(value).encode()
        if isinstance(value, float):
            return float.__repr__(value).encode()
        if isinstance(value, datetime):
            return value.isoformat().encode()
        raise TypeError(f"a parameter must be a str, int, float or datetime, not {value!r}")


@lru_cache(maxsize=512)
def _numbered(text: str) -> tuple[bytes, tuple[str, ...]]:
    """Return a statement with numbered parameters, and their names in that order."""
    names: list[str] = []

    def number(match: re.Match[str]) -> str:
        if match[1] not in names:
            names.append(match[1])
        return f"${names.index(match[1]) + 1}"

    return _PARAMETER.sub(number, text).encode(), tuple(names)
