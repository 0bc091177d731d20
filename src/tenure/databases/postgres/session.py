"""PostgreSQL by psycopg: a session of the node's own, on a direct connection or through a pooler."""

from __future__ import annotations

import codecs
import contextlib
import socket
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tenure.asks import Server
from tenure.dialects import Dialect
from tenure.dialing import load, shut_down
from tenure.schema import ANOTHER_SERVER
from tenure.session import Failed, Gone, Result, Run, Step, wait_readable

if TYPE_CHECKING:
    import psycopg


class Backend(NamedTuple):
    """The server's process behind a connection, and the server, as a fresh connection finds them."""

    pid: int
    started: str
    server_start: str
    in_recovery: bool
    synchronous_commit: str


class PipelinedResult:
    """A result that is fetched when somebody looks at it: until then its statement waits for company."""

    def __init__(self, cursor: psycopg.Cursor[Any]) -> None:
        """Remember the cursor of a statement on its way."""
        self._cursor = cursor
        self._rows: Sequence[tuple[Any, ...]] | None = None

    @property
    def rows(self) -> Sequence[tuple[Any, ...]]:
        """Its rows."""
        # Not a cached_property: before Python 3.12 that holds one lock for all instances while it waits for the server,
        # so that one connection's wait would be every connection's.
        if self._rows is None:
            try:
                self._rows = self._cursor.fetchall()
            except load().DataError as error:  # a time in the year 10000, or `infinity`
                raise Failed(f"a row of the tables cannot be read: {error}") from error
        return self._rows

    @property
    def count(self) -> int:
        """How many rows it changed or returned; known when the transaction is over."""
        return self._cursor.rowcount


class PostgresSession:
    """One connection of the node's own."""

    pooled = False
    """Whether the connection leads through a pooler, so that the server's process behind it changes at will."""

    def __init__(self, connection: psycopg.Connection[Any], dialect: Dialect, backend: Backend) -> None:
        """Take over an open connection in autocommit mode."""
        self.connection = connection
        self.dialect = dialect
        self._server: Server | None = None
        self._fatal = False
        self._notes: list[str] = []
        self._heard: set[str] = set()
        connection.add_notice_handler(self._noticed)
        connection.add_notify_handler(lambda note: self._notes.append(note.payload))
        self.pid, self.started = backend.pid, backend.started
        self.server_start = backend.server_start
        self.encoding = _codec(connection.info.parameter_status("server_encoding") or "UTF8")

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Run]:
        """Run steps in one transaction; those given together travel together, and BEGIN and COMMIT with them.

        Not by psycopg's own transaction(): it waits for the server after BEGIN and before COMMIT, and a node that is
        cut off in between leaves its transaction open on the server.
        """
        with self._translated():
            try:
                with self._pipeline():
                    self._begin()
                    yield self._run
                    self.connection.execute("commit")
            except BaseException:
                with contextlib.suppress(load().Error):
                    self.connection.rollback()
                raise

    def _begin(self) -> None:
        self.connection.execute("begin")

    def run(self, *steps: Step) -> Sequence[Result]:
        """Run some steps as one transaction, in one round trip."""
        with self.transaction() as run:
            return run(*steps)

    def read(self, *steps: Step) -> Sequence[Result]:
        """Run some queries in order, in one round trip."""
        with self._translated(), self._pipeline():
            return self._run(*steps)

    @contextlib.contextmanager
    def _pipeline(self) -> Iterator[None]:
        """Send without waiting. The block's error is raised outside: psycopg would log what follows from it."""
        failure: BaseException | None = None
        try:
            with self.connection.pipeline() as pipeline:
                self._listen_to(pipeline)
                try:
                    yield
                except BaseException as error:  # noqa: BLE001 - raised below
                    failure = error
        except load().Error as consequence:
            failure = failure or consequence
        if failure is not None:
            raise failure

    def _run(self, *steps: Step) -> Sequence[Result]:
        return [
            PipelinedResult(self.connection.execute(self.dialect.text(step.text), step.parameters or None))
            for step in steps
        ]

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """Turn the driver's errors into the two that matter: the connection is gone, or a statement failed."""
        psycopg = load()
        try:
            yield
        except (psycopg.Error, OSError, ValueError) as error:
            if isinstance(error, ValueError) and not self.connection.closed:
                raise
            another_server = isinstance(error, psycopg.Error) and error.sqlstate == ANOTHER_SERVER
            if another_server or self._fatal or self.connection.closed or self.connection.broken:
                raise Gone(str(error)) from error
            raise Failed(str(error)) from error
        if self._fatal:
            msg = "the server said good-bye"
            raise Gone(msg)

    def notify(self, namespace: str, payload: str) -> Step | None:
        """Return the step that tells the other nodes when the transaction commits."""
        return notification(self.dialect, namespace, payload)

    def listen(self, namespace: str, kind: str) -> None:
        """Hear what the other nodes tell, if it is of this kind. Each has a channel: who need not wake sleeps on."""
        if kind not in self._heard:
            with self._translated():
                self.connection.execute(f'listen "{_channel(self.dialect, namespace, kind)}"')
            self._heard.add(kind)

    def idle(self, waker: socket.socket, seconds: float | None) -> list[str]:
        """Wait for the waker, a notification or the end of the connection; return the notifications.

        The socket is watched all the time: a server that ends the connection says so before it frees the sentinel,
        so this node knows before the others can act on it.
        """
        if not self._notes:
            wait_readable([self.connection.fileno(), waker], seconds)
        with self._translated():
            raw = self.connection.pgconn
            raw.consume_input()
            while note := raw.notifies():
                self._notes.append(note.extra.decode())
        notes, self._notes = self._notes, []
        return notes

    def _noticed(self, diagnostic: Any) -> None:
        """Hear a good-bye that came between two calls."""
        if diagnostic.severity_nonlocalized in ("FATAL", "PANIC"):
            self._good_bye()

    def _listen_to(self, pipeline: Any) -> None:
        """Hear a good-bye that comes as the answer to a call.

        psycopg hands its errors over when everything that was asked has been answered, here by the connection's end;
        so the results are looked at on their way. If a release of psycopg has no such way, that is when it is heard.
        """
        pq = load().pq
        process: Any = getattr(pipeline, "_process_results", None)
        if process is None:
            return

        def listening(queued: Any, results: Any) -> None:
            for result in results:
                if result.status == pq.ExecStatus.FATAL_ERROR:
                    severity = result.error_field(pq.DiagnosticField.SEVERITY_NONLOCALIZED)
                    if severity in (b"FATAL", b"PANIC"):
                        self._good_bye()
            process(queued, results)

        pipeline._process_results = listening  # noqa: SLF001 - see above

    def _good_bye(self) -> None:
        """Cut short whatever is on its way: it would wait for the connection's end, and the sentinel falls before."""
        self._fatal = True
        self.abort()

    def server(self) -> Server:
        """Return which server this is; it cannot change under a connection."""
        if self._server is None:
            ((incarnation,),) = self.read(Step("select {schema}incarnation()", {}))[0].rows
            self._server = Server(self.server_start, incarnation, int(incarnation.rsplit(":", 1)[1]))
        return self._server

    def fileno(self) -> int:
        """Return the descriptor of the connection's socket."""
        return self.connection.fileno()

    def abort(self) -> None:
        """Make whatever hangs on this connection fail at once, from any thread."""
        shut_down(self.connection)

    def close(self) -> None:
        """Close the connection."""
        with contextlib.suppress(Exception):
            self.connection.close()


class PooledSession(PostgresSession):
    """A connection that leads through a pooler: any transaction may run on another connection of the pooler's.

    So nothing may outlive a transaction: every setting is made inside each one and goes with it, nothing is prepared,
    nobody listens. The pooler may be switched to another server, too: each transaction makes sure, on the server, that
    it is the one that was met first; else the session is gone.
    """

    pooled = True

    def __init__(
        self, connection: psycopg.Connection[Any], dialect: Dialect, backend: Backend, settings: dict[str, str]
    ) -> None:
        """Take over an open connection in autocommit mode; ``settings`` hold in every transaction."""
        super().__init__(connection, dialect, backend._replace(pid=0, started=""))
        made = ", ".join(f"pg_catalog.set_config('{name}', '{value}', true)" for name, value in settings.items())
        self._settings = f"select {made}"

    def _begin(self) -> None:
        self.connection.execute("begin isolation level read committed, read write")
        self.connection.execute(self._settings)
        if self._server is not None:
            text = self.dialect.text("select {schema}same_server(:incarnation)")
            self.connection.execute(text, {"incarnation": self._server.incarnation})

    def read(self, *steps: Step) -> Sequence[Result]:
        """Run some queries in order, in a transaction: the settings and the look at the server belong to it."""
        return self.run(*steps)

    def listen(self, namespace: str, kind: str) -> None:
        """Do nothing: the pooler's connection would listen, for whoever has it next."""


def notification(dialect: Dialect, namespace: str, payload: str) -> Step:
    """Return the step that tells the nodes of a namespace when the transaction commits."""
    parameters = {"channel": _channel(dialect, namespace, payload.partition(" ")[0]), "payload": payload}
    return Step("select pg_catalog.pg_notify(:channel, :payload)", parameters)


def _channel(dialect: Dialect, namespace: str, kind: str) -> str:
    """Return a name of fixed length: LISTEN cuts long names off where NOTIFY refuses them."""
    import hashlib  # noqa: PLC0415 - it loads OpenSSL, which nobody needs who does not come here

    digest = hashlib.sha256(f"{dialect.prefix}{kind} {namespace}".encode()).hexdigest()
    return f"tenure_{digest[:32]}"


def _codec(server_encoding: str) -> str:
    """Return Python's name of a server's encoding. SQL_ASCII takes any bytes, so it holds UTF-8; others are guessed."""
    if server_encoding in ("UTF8", "SQL_ASCII"):
        return "utf-8"
    name = server_encoding.replace("WIN", "cp").replace("KOI8", "koi8_")
    try:
        return codecs.lookup(name).name
    except LookupError:
        return "ascii"  # which all of them hold
