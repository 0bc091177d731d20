"""MariaDB and MySQL by PyMySQL: a session for the node, and what PyMySQL's connections lack.

Statements that belong together are sent in one packet, with BEGIN and COMMIT. The server stops at the first that fails,
so a node that is cut off leaves no transaction open. There are no notifications, so waiting nodes poll. A
server that ends a connection closes the socket before it frees the sentinel, and the socket is watched all the time.
"""

from __future__ import annotations

import contextlib
import socket
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tenure.databases.connecting import shut_down_socket
from tenure.databases.mysql.schema import MySqlSchema
from tenure.errors import ConfigError
from tenure.store.dialects import MYSQL
from tenure.store.session import Failed, FetchedResult, Gone, LaneSession, Result, Run, Step, wait_readable

TRIES = 3
"""How often a transaction is tried if the server rolls it back to end a deadlock."""

DEADLOCK = 1213
LOCK_WAIT_TIMEOUT = 1205
OVER = (1053, 1290, 1836, 1927, 2006, 2013, 2014, 2055, 4031)
"""Errors that end a session: the server shuts down or refuses writes, or it has ended or lost the connection."""


def load() -> Any:
    """Import PyMySQL, or raise an error that names the extra to install."""
    try:
        # The first connection would load the codec of host names, in a thread of the node.
        import encodings.idna  # noqa: F401, PLC0415

        import pymysql  # noqa: PLC0415
    except ImportError:
        raise ConfigError("MariaDB and MySQL need PyMySQL: pip install 'tenure[mysql]'") from None
    return pymysql


class LaterResult:
    """A result that is fetched when it is read: until then its statement can be sent with others."""

    def __init__(self, fetch: Callable[[], None]) -> None:
        self._fetch = fetch
        self.fetched: Result | None = None

    @property
    def rows(self) -> Sequence[tuple[Any, ...]]:
        return self._now().rows

    @property
    def count(self) -> int:
        return self._now().count

    def _now(self) -> Result:
        if self.fetched is None:
            self._fetch()
        assert self.fetched is not None
        return self.fetched


_WATCH = """
select watch_pid from {members}
where id = :id and watch_start = :started and ended_at is null and left(version, 4) <> '0.1.'
"""
"""A server never gives the number of a connection twice, so no other connection can be meant. Nodes of release 0.1 send
several statements together, and could hang."""


class MySqlSession(LaneSession):
    """One connection of the node."""

    dialect = MYSQL
    schema = MySqlSchema(MYSQL)
    database = ""
    """The database's name, which is part of the names of locks: those are valid on the whole server."""

    def __init__(self, connection: Any) -> None:
        """Use an open connection in autocommit mode."""
        self.connection = connection
        self.one_by_one = False
        """Whether to send each query by itself, because another node may end one of them (R24). After KILL QUERY
        between two statements of a packet, MariaDB never answers the second one."""
        self._vacated: list[Step] = []

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Run]:
        """Run steps in one transaction. Steps whose results are not read are sent together, with BEGIN and COMMIT."""
        waiting: list[tuple[str, LaterResult | None]] = [("begin", None)]

        def fetch() -> None:
            sent, waiting[:] = waiting[:], []
            for (_, later), result in zip(sent, self._query(*(text for text, _ in sent)), strict=True):
                if later is not None:
                    later.fetched = result

        def run(*steps: Step) -> Sequence[Result]:
            results = [LaterResult(fetch) for _ in steps]
            waiting.extend(zip(map(self._filled, steps), results, strict=True))
            return results

        with self._translated():
            try:
                yield run
                waiting.append(("commit", None))
                fetch()
            except BaseException:
                self._vacated.clear()
                self._roll_back()
                raise
        self._wake()

    def run(self, *steps: Step) -> Sequence[Result]:
        """Run some steps as one transaction, in one round trip. Repeat it if it was rolled back in a deadlock."""
        for last in (*[False] * (TRIES - 1), True):
            with self._translated():
                try:
                    results = self._query("begin", *map(self._filled, steps), "commit")[1:-1]
                    self._wake()
                    return results
                except Exception as error:
                    self._roll_back()
                    if last or error.args[:1] != (DEADLOCK,):
                        self._vacated.clear()
                        raise
        raise AssertionError

    def read(self, *steps: Step) -> Sequence[Result]:
        """Run some queries in order, in one round trip unless each is sent by itself."""
        texts = [self._filled(step) for step in steps]
        with self._translated():
            if self.one_by_one:
                return [self._query(text)[0] for text in texts]
            return self._query(*texts)

    def notify_successors(self, namespace: str, me: str, roles: Step) -> None:
        """Wake the successors after the commit (R24). MariaDB cannot tell them anything."""
        self._vacated.append(roles)

    def _wake(self) -> None:
        """End the wait on the watch connection of each successor, so that it looks at once. Best effort."""
        vacated, self._vacated = self._vacated, []
        with contextlib.suppress(Failed):
            heirs = {heir for step in vacated for _, heir in self.read(step)[0].rows if heir}
            for member_id in heirs:
                for (pid,) in self.read(Step(_WATCH, {"id": member_id, "started": self.started}))[0].rows:
                    self.read(Step("kill query :pid", {"pid": pid}))

    def _filled(self, step: Step) -> str:
        parameters = self.dialect.arguments(step.parameters)
        return str(self.connection.cursor().mogrify(self.dialect.text(step.text), parameters or None))

    def _query(self, *texts: str) -> list[Result]:
        """Send the statements together; the server stops at the first that fails."""
        if not texts:
            return []
        results: list[Result] = []
        with self.connection.cursor() as cursor:
            cursor.execute(";\n".join(texts))
            while True:
                results.append(FetchedResult(cursor.fetchall(), cursor.rowcount))
                if not cursor.nextset():
                    return results

    def _roll_back(self) -> None:
        with contextlib.suppress(Exception):
            self.connection.rollback()

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """Turn the driver's errors into ``Gone`` and ``Failed``."""
        try:
            yield
        except (load().err.Error, OSError) as error:
            if is_lost(self.connection, error):
                raise Gone(error_text(error)) from error
            raise Failed(error_text(error)) from error
        except (AttributeError, ValueError) as error:
            # The driver raises these errors on a closed connection.
            if self.connection.open:
                raise
            raise Gone("the connection is closed") from error

    def idle(self, waker: socket.socket, seconds: float | None) -> list[str]:
        """Wait for the waker or the end of the connection: everything else that a server sends is a reply."""
        with self._translated():
            wait_readable([self.fileno(), waker], seconds)
            if self._hung_up():
                raise Gone("the server ended the connection")
        return []

    def _hung_up(self) -> bool:
        """Whether the server closed the socket, or sent data unasked. TLS records without content do not count."""
        line = wire(self.connection)
        patience = line.gettimeout()
        line.settimeout(0)
        try:
            line.recv(1)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            return type(error).__name__ != "SSLWantReadError"
        finally:
            line.settimeout(patience)
        return True

    def fileno(self) -> int:
        """Return the descriptor of the connection's socket."""
        line = wire(self.connection)
        if line is None:
            raise Gone("the connection is closed")
        return int(line.fileno())

    def abort(self) -> None:
        cut(self.connection)

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.connection.close()


def error_text(error: BaseException) -> str:
    """Return the driver's message, without the number of the error."""
    return str(error.args[-1]) if error.args and error.args[-1] else "the connection is closed"


def is_lost(connection: Any, error: Exception) -> bool:
    """Whether an error means that the connection cannot be used any more."""
    return not connection.open or (bool(error.args) and error.args[0] in OVER)


def wire(connection: Any) -> Any:
    """Return a connection's socket."""
    return connection._sock  # noqa: SLF001 - PyMySQL has no public name for it


def is_local_socket(connection: Any) -> bool:
    """Whether a connection goes through a Unix socket, which Windows lacks."""
    return hasattr(socket, "AF_UNIX") and wire(connection).family == socket.AF_UNIX


def cut(connection: Any) -> None:
    """Make a call that hangs on a connection fail at once, from any thread."""
    shut_down_socket(wire(connection))


beside: weakref.WeakKeyDictionary[Any, Callable[[], Any]] = weakref.WeakKeyDictionary()
"""For each connection, how to open another one to the same server."""


def interrupt(connection: Any) -> None:
    """Make a statement that is under way fail, from another thread, within a second.

    The statement must end on the server too, or it would go on there and keep a successor waiting for the role's row.
    """
    try:
        with contextlib.closing(beside[connection]()) as other:
            other.query(f"kill query {connection.thread_id()}")
    except Exception:  # noqa: BLE001 - the server cannot be reached, or does not answer
        cut(connection)


def execute(connection: Any, sql: str, parameters: Any) -> Any:
    """Run a statement and return the cursor. After an error, ask the server whether the transaction is still open."""
    cursor = connection.cursor()
    try:
        cursor.execute(sql, parameters or None)
    except load().err.Error:
        with contextlib.suppress(Exception):
            connection.ping(reconnect=False)
        raise
    return cursor


def roll_back(connection: Any) -> None:
    """Roll back. If the server refuses (XA), cut the connection, so that the server rolls back by itself."""
    try:
        connection.rollback()
    except load().err.Error:
        cut(connection)


def in_transaction(connection: Any) -> bool:
    """Whether a transaction is open, as of the last reply."""
    return bool(connection.server_status & load().constants.SERVER_STATUS.SERVER_STATUS_IN_TRANS)
