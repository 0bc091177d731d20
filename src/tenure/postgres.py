"""PostgreSQL by psycopg: the node's own connections, and everything that is particular to them.

The URL goes to libpq as it is, so its parameters (sslmode, service, …) work as everywhere. Each connection sets what it
needs for itself and trusts nothing that the server or the role may have set: time-outs, search_path, isolation.

Both ends watch the network. On the server's side the keepalive settings make it give up a connection whose client is
unreachable, not before the owner has stopped trusting itself and not much later; libpq's own settings do the same for
the client. Unix sockets need neither.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tenure import timing
from tenure.asks import Server
from tenure.dialects import Dialect, postgresql
from tenure.errors import ConfigError, PoolerDetected, StoreUnavailable
from tenure.session import Failed, Gone, Result, Run, Step, wait_readable

if TYPE_CHECKING:
    import psycopg

log = logging.getLogger("tenure.postgres")

CONNECT_TIMEOUT_S = 5
OLDEST_VERSION = 140000

_WHO = """
select pg_catalog.pg_backend_pid(),
       (select cast(extract(epoch from backend_start) as text) from pg_catalog.pg_stat_activity
        where pid = pg_catalog.pg_backend_pid()),
       cast(extract(epoch from pg_catalog.pg_postmaster_start_time()) as text),
       pg_catalog.pg_is_in_recovery(),
       pg_catalog.current_setting('synchronous_commit')
"""
_SET = "select pg_catalog.set_config(%s, %s, false)"
_START = "select cast(extract(epoch from pg_catalog.pg_postmaster_start_time()) as text)"


def load() -> Any:
    """Import psycopg, or say which extra brings it."""
    try:
        import psycopg  # noqa: PLC0415
    except ImportError:
        msg = "PostgreSQL needs psycopg 3: pip install 'tenure[postgres]'"
        raise ConfigError(msg) from None
    return psycopg


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
            self._rows = self._cursor.fetchall()
        return self._rows

    @property
    def count(self) -> int:
        """How many rows it changed or returned; known when the transaction is over."""
        return self._cursor.rowcount


class PostgresSession:
    """One connection of the node's own."""

    def __init__(self, connection: psycopg.Connection[Any], dialect: Dialect) -> None:
        """Take over an open connection in autocommit mode."""
        self.connection = connection
        self.dialect = dialect
        self._server: Server | None = None
        self._fatal = False
        self._notes: list[str] = []
        self._heard: set[str] = set()
        connection.add_notice_handler(self._noticed)
        connection.add_notify_handler(lambda note: self._notes.append(note.payload))
        pid, self.started, self.server_start, self.in_recovery, self.synchronous_commit = connection.execute(
            _WHO
        ).fetchone()  # type: ignore[misc]
        self.pid: int = pid

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Run]:
        """Run steps in one transaction; those given together travel together, and BEGIN and COMMIT with them.

        Not by psycopg's own transaction(): it waits for the server after BEGIN and before COMMIT, and a node that is
        cut off in between leaves its transaction open on the server.
        """
        with self._translated():
            try:
                with self._pipeline():
                    self.connection.execute("begin")
                    yield self._run
                    self.connection.execute("commit")
            except BaseException:
                with contextlib.suppress(load().Error):
                    self.connection.rollback()
                raise

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
            if self._fatal or self.connection.closed or self.connection.broken:
                raise Gone(str(error)) from error
            raise Failed(str(error)) from error
        if self._fatal:
            msg = "the server said good-bye"
            raise Gone(msg)

    def notify(self, namespace: str, payload: str) -> Step | None:
        """Return the step that tells the other nodes when the transaction commits."""
        parameters = {"channel": self._channel(namespace, payload.partition(" ")[0]), "payload": payload}
        return Step("select pg_catalog.pg_notify(:channel, :payload)", parameters)

    def listen(self, namespace: str, kind: str) -> None:
        """Hear what the other nodes tell, if it is of this kind. Each has a channel: who need not wake sleeps on."""
        if kind not in self._heard:
            with self._translated():
                self.connection.execute(f'listen "{self._channel(namespace, kind)}"')
            self._heard.add(kind)

    def _channel(self, namespace: str, kind: str) -> str:
        """Return a name of fixed length: LISTEN cuts long names off where NOTIFY refuses them."""
        import hashlib  # noqa: PLC0415 - it loads OpenSSL, which nobody needs who does not come here

        digest = hashlib.sha256(f"{self.dialect.prefix}{kind} {namespace}".encode()).hexdigest()
        return f"tenure_{digest[:32]}"

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

    def abort(self) -> None:
        """Make whatever hangs on this connection fail at once, from any thread."""
        with contextlib.suppress(Exception):
            duplicate = socket.socket(fileno=socket.dup(self.connection.fileno()))
            with duplicate:
                duplicate.shutdown(socket.SHUT_RDWR)

    def abandon(self) -> None:
        """Let go of what a forked child inherited, without a word to the server.

        Closing politely would end the parent's session; keeping the socket would keep a dead parent's sentinel. The
        descriptor is replaced, so that whatever the driver writes later goes nowhere.
        """
        with contextlib.suppress(Exception), open(os.devnull, "r+b", buffering=0) as nowhere:  # noqa: PTH123
            os.dup2(nowhere.fileno(), self.connection.fileno())

    def close(self) -> None:
        """Close the connection."""
        with contextlib.suppress(Exception):
            self.connection.close()


class PostgresConnector:
    """Opens connections to one URL."""

    def __init__(self, url: str, schema: str, ttl: float, label: str) -> None:
        """Check the URL without connecting. The password stays inside and is shown nowhere."""
        self.dialect = postgresql(schema)
        self._ttl = ttl
        self._label = label
        self._parameters = _parse(url)

    def __repr__(self) -> str:
        """Show where it leads, without the password."""
        parts = {"at": "host", "port": "port", "database": "dbname", "as": "user"}
        shown = [f"{word} {self._parameters[key]}" for word, key in parts.items() if key in self._parameters]
        return " ".join(["PostgreSQL", *shown])

    def connect(self, purpose: str) -> psycopg.Connection[Any]:
        """Open a plain connection in autocommit mode; raise StoreUnavailable with a scrubbed message."""
        psycopg = load()
        parameters: dict[str, Any] = {
            "connect_timeout": CONNECT_TIMEOUT_S,
            "application_name": f"tenure {purpose} {self._label}"[:63],
            **self._parameters,
            **self._client_keepalive(),
        }
        if purpose != "transaction":  # that one is the application's
            parameters["client_encoding"] = "UTF8"  # or a database in SQL_ASCII would answer with bytes
        try:
            return psycopg.connect(autocommit=True, **parameters)  # type: ignore[no-any-return]
        except (psycopg.Error, OSError) as error:
            msg = f"cannot connect to {self!r}: {self._scrubbed(str(error))}"
            raise StoreUnavailable(msg) from None

    def open(self, purpose: str, statement_timeout_s: float) -> PostgresSession:
        """Open a session of the node's own, with everything set that it relies on."""
        connection = self.connect(purpose)
        try:
            connection.prepare_threshold = 0  # the same few statements again and again, on a direct connection
            session = PostgresSession(connection, self.dialect)
            self._check(session)
            self._set(session, statement_timeout_s)
        except Exception as error:
            connection.close()
            if isinstance(error, (StoreUnavailable, ConfigError)):
                raise
            msg = f"cannot use {self!r}: {self._scrubbed(str(error))}"
            raise StoreUnavailable(msg) from None
        return session

    def knock(self) -> str | None:
        """Open a fresh connection and return the server's start time; None if the server will not have it."""
        psycopg = load()
        try:
            with self.connect("knock") as connection:
                row = connection.execute(_START).fetchone()
                return row[0] if row else None
        except (StoreUnavailable, psycopg.Error, OSError):
            return None

    def _check(self, session: PostgresSession) -> None:
        info = session.connection.info
        if info.server_version < OLDEST_VERSION:
            msg = f"{self!r} is PostgreSQL {info.server_version // 10000}; Tenure needs 14 or newer"
            raise ConfigError(msg)
        if info.backend_pid != session.pid:
            msg = (
                f"{self!r} leads through a connection pooler (the connection says backend {info.backend_pid}, the "
                f"server {session.pid}); give Tenure a URL that leads to PostgreSQL directly"
            )
            raise PoolerDetected(msg)
        if session.in_recovery:
            msg = f"{self!r} is a hot standby; leaders are elected on the primary: give Tenure the primary's URL"
            raise StoreUnavailable(msg)

    def _set(self, session: PostgresSession, statement_timeout_s: float) -> None:
        """Set what this connection relies on; who set what elsewhere does not matter."""
        timeout_ms = f"{round(statement_timeout_s * 1000)}ms"
        values = {
            "search_path": "pg_catalog",
            "statement_timeout": timeout_ms,
            "lock_timeout": "100ms",
            # Not before the owner has stopped trusting itself: the sentinel falls with the connection.
            "idle_in_transaction_session_timeout": f"{round(timing.server_patience(self._ttl) * 1000)}ms",
            "default_transaction_isolation": "read committed",
            "default_transaction_read_only": "off",
            "default_transaction_deferrable": "off",
            "idle_session_timeout": "0",
            # Young tables have no statistics, and nested loops over thousands of roles take as long as they are many
            # times many. Hash joins never do.
            "enable_nestloop": "off",
            "jit": "off",
            **self._server_keepalive(),
        }
        if session.synchronous_commit == "off":
            values["synchronous_commit"] = "local"  # a token must not come back after a crash
        with session.connection.pipeline():
            for name, value in values.items():
                session.connection.execute(_SET, (name, value))
        if self._is_tcp(session) and self._read_back(session) != values["tcp_user_timeout"]:
            log.warning("the server did not take tcp_user_timeout: a lost network is noticed late")

    def _server_keepalive(self) -> dict[str, str]:
        patience_s = timing.server_patience(self._ttl)
        idle_s = max(1, int(patience_s / 2))
        interval_s = max(1, int(patience_s / 10))
        return {
            "tcp_keepalives_idle": str(idle_s),
            "tcp_keepalives_interval": str(interval_s),
            "tcp_keepalives_count": str(int((patience_s - idle_s) / interval_s) + 1),
            "tcp_user_timeout": str(round(patience_s * 1000)),
        }

    def _client_keepalive(self) -> dict[str, Any]:
        idle_s = max(1, int(timing.trust(self._ttl) / 2))
        return {
            "keepalives": 1,
            "keepalives_idle": idle_s,
            "keepalives_interval": max(1, idle_s // 4),
            "keepalives_count": 4,
            "tcp_user_timeout": round(timing.server_patience(self._ttl) * 1000),
        }

    @staticmethod
    def _is_tcp(session: PostgresSession) -> bool:
        return not session.connection.info.host.startswith("/")

    @staticmethod
    def _read_back(session: PostgresSession) -> str:
        query = "select setting from pg_catalog.pg_settings where name = 'tcp_user_timeout'"
        row = session.connection.execute(query).fetchone()
        return str(row[0]) if row else ""

    def _scrubbed(self, message: str) -> str:
        password = self._parameters.get("password")
        return message.replace(str(password), "***").strip() if password else message.strip()


def _parse(url: str) -> dict[str, Any]:
    """Return libpq's view of the URL. Its own message would quote the URL, password and all."""
    psycopg = load()
    scheme, separator, rest = url.partition("://")
    try:
        parameters = psycopg.conninfo.conninfo_to_dict(f"{scheme.split('+')[0]}{separator}{rest}")
    except psycopg.Error:
        msg = (
            "the PostgreSQL URL is malformed: expected postgresql://user:password@host:port/database, with special "
            "characters in user and password percent-encoded"
        )
        raise ConfigError(msg) from None
    port = str(parameters.get("port", ""))
    if port and not all(number.isdigit() for number in port.split(",")):
        raise ConfigError(f"port {port!r} in the PostgreSQL URL must be a number")
    return dict(parameters)
