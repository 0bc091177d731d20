"""MariaDB and MySQL by PyMySQL: a session of the node's own, and what PyMySQL's connections do not do by themselves.

Statements that belong together travel in one packet, BEGIN and COMMIT with them; the server stops at the first that
fails, so a node that is cut off leaves no transaction open. Nobody can be told anything there: those who wait have to
look. A server that ends a connection hangs up before it frees the sentinel, and the socket is watched all the time.
"""

from __future__ import annotations

import contextlib
import socket
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tenure.asks import Server
from tenure.dialects import MYSQL
from tenure.dialing import shut_down
from tenure.errors import ConfigError
from tenure.session import Failed, Gone, Result, Run, Step, wait_readable

TRIES = 3
"""How often a transaction that lost a deadlock is tried."""

DEADLOCK = 1213
OVER = (1053, 1290, 1836, 1927, 2006, 2013, 2014, 2055, 4031)
"""The server is going, or takes no writes any more; the connection was killed, lost, out of step, or idle too long."""


def load() -> Any:
    """Import PyMySQL, or say which extra brings it."""
    try:
        import pymysql  # type: ignore[import-untyped]  # noqa: PLC0415
    except ImportError:
        raise ConfigError("MariaDB and MySQL need PyMySQL: pip install 'tenure[mysql]'") from None
    return pymysql


@dataclass(frozen=True)
class FetchedResult:
    """A result that is there already."""

    rows: Sequence[tuple[Any, ...]]
    count: int


class LaterResult:
    """A result that is fetched when somebody looks at it: until then its statement waits for company."""

    def __init__(self, fetch: Callable[[], None]) -> None:
        """Remember how to have everything fetched that waits."""
        self._fetch = fetch
        self.fetched: Result | None = None

    @property
    def rows(self) -> Sequence[tuple[Any, ...]]:
        """Its rows."""
        return self._now().rows

    @property
    def count(self) -> int:
        """How many rows it changed or returned."""
        return self._now().count

    def _now(self) -> Result:
        if self.fetched is None:
            self._fetch()
        assert self.fetched is not None
        return self.fetched


class MySqlSession:
    """One connection of the node's own."""

    dialect = MYSQL
    encoding = "utf-8"

    def __init__(self, connection: Any, pid: int, server_start: str, database: str) -> None:
        """Take over an open connection in autocommit mode."""
        self.connection = connection
        self.pid = pid
        self.started = self.server_start = server_start  # a connection's number is never given twice by one server
        self.database = database
        """The database's name, as it stands in the names of locks: those are the whole server's."""
        self._server: Server | None = None

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Run]:
        """Run steps in one transaction; what nobody has looked at travels together, and BEGIN and COMMIT with it."""
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
                self._roll_back()
                raise

    def run(self, *steps: Step) -> Sequence[Result]:
        """Run some steps as one transaction, in one round trip; again if the server undid it to end a deadlock."""
        for last in (*[False] * (TRIES - 1), True):
            with self._translated():
                try:
                    return self._query("begin", *map(self._filled, steps), "commit")[1:-1]
                except Exception as error:
                    self._roll_back()
                    if last or error.args[:1] != (DEADLOCK,):
                        raise
        raise AssertionError

    def read(self, *steps: Step) -> Sequence[Result]:
        """Run some queries in order, in one round trip."""
        with self._translated():
            return self._query(*map(self._filled, steps))

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
        """Turn the driver's errors into the two that matter: the connection is gone, or a statement failed."""
        try:
            yield
        except (load().err.Error, OSError) as error:
            number = error.args[0] if error.args else None
            if not self.connection.open or number in OVER:
                raise Gone(said(error)) from error
            raise Failed(said(error)) from error
        except (AttributeError, ValueError) as error:  # what the driver makes of a connection that is closed
            if self.connection.open:
                raise
            raise Gone("the connection is closed") from error

    def notify(self, namespace: str, payload: str) -> Step | None:
        """Return None: nobody can be told, they have to look."""
        return None

    def listen(self, namespace: str, kind: str) -> None:
        """Do nothing: there is nothing to hear."""

    def idle(self, waker: socket.socket, seconds: float | None) -> list[str]:
        """Wait for the waker or the end of the connection: all else that a server says is an answer."""
        with self._translated():
            wait_readable([self.fileno(), waker], seconds)
            if self._hung_up():
                raise Gone("the server ended the connection")
        return []

    def _hung_up(self) -> bool:
        """Whether anything was said that nobody asked for; TLS has records that say nothing."""
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

    def server(self) -> Server:
        """Return which server this is; it cannot change under a connection."""
        if self._server is None:
            ((incarnation,),) = self.read(Step("select {incarnation}", {}))[0].rows
            self._server = Server(self.server_start, incarnation)
        return self._server

    def fileno(self) -> int:
        """Return the descriptor of the connection's socket."""
        line = wire(self.connection)
        if line is None:
            raise Gone("the connection is closed")
        return int(line.fileno())

    def abort(self) -> None:
        """Make whatever hangs on this connection fail at once, from any thread."""
        cut(self.connection)

    def close(self) -> None:
        """Close the connection."""
        with contextlib.suppress(Exception):
            self.connection.close()


def said(error: BaseException) -> str:
    """Return the driver's message, without its number."""
    return str(error.args[-1]) if error.args and error.args[-1] else "the connection is closed"


def wire(connection: Any) -> Any:
    """Return a connection's socket."""
    return connection._sock  # noqa: SLF001 - PyMySQL shows it nowhere else


def cut(connection: Any) -> None:
    """Make whatever hangs on a connection fail at once, from any thread."""
    shut_down(wire(connection))


beside: weakref.WeakKeyDictionary[Any, Callable[[], Any]] = weakref.WeakKeyDictionary()
"""How to open another connection beside one."""


def interrupt(connection: Any) -> None:
    """Make a statement that is under way fail, from another thread, within a second.

    On the server: it would go on with it, and keep the role's row from a successor.
    """
    try:
        with contextlib.closing(beside[connection]()) as other:
            other.query(f"kill query {connection.thread_id()}")
    except Exception:  # noqa: BLE001 - the server cannot be reached, or does not hear
        cut(connection)


def execute(connection: Any, sql: str, parameters: Any) -> Any:
    """Run a statement and return the cursor. After an error the server is asked what it left of the transaction."""
    cursor = connection.cursor()
    try:
        cursor.execute(sql, parameters or None)
    except load().err.Error:
        with contextlib.suppress(Exception):
            connection.ping(reconnect=False)
        raise
    return cursor


def in_transaction(connection: Any) -> bool:
    """Whether a transaction is open, as of the last answer."""
    return bool(connection.server_status & load().constants.SERVER_STATUS.SERVER_STATUS_IN_TRANS)
