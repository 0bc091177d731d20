"""PostgreSQL by psycopg: the node's own connections, and everything that is particular to them.

The URL goes to libpq as it is, so its parameters (sslmode, service, …) work as everywhere. Each connection sets what it
needs for itself and trusts nothing that the server or the role may have set: time-outs, search_path, isolation.

Both ends watch the network. On the server's side the keepalive settings make it give up a connection whose client is
unreachable, not before the owner has stopped trusting itself and not much later; libpq's own settings do the same for
the client. Unix sockets need neither.
"""

from __future__ import annotations

import codecs
import contextlib
import logging
import os
import re
import socket
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tenure import timing
from tenure.asks import Server
from tenure.dialects import Dialect, postgresql
from tenure.errors import ConfigError, StoreUnavailable, TenureError
from tenure.schema import ANOTHER_SERVER
from tenure.session import Failed, Gone, Result, Run, Step, wait_readable
from tenure.settings import Password, check_password

if TYPE_CHECKING:
    import psycopg

log = logging.getLogger("tenure.postgres")

CONNECT_TIMEOUT_S = 5
SECRETS = ("password", "sslpassword", "oauth_client_secret")
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


class Backend(NamedTuple):
    """The server's process behind a connection, and the server, as a fresh connection finds them."""

    pid: int
    started: str
    server_start: str
    in_recovery: bool
    synchronous_commit: str


def load() -> Any:
    """Import psycopg, or say which extra brings it."""
    try:
        import psycopg  # noqa: PLC0415
    except ImportError:
        msg = "PostgreSQL needs psycopg 3: pip install 'tenure[postgres]'"
        raise ConfigError(msg) from None
    return psycopg


def shut_down(connection: psycopg.Connection[Any]) -> None:
    """Make whatever hangs on a connection fail at once, from any thread."""
    with contextlib.suppress(Exception):
        duplicate = socket.socket(fileno=socket.dup(connection.fileno()))
        with duplicate:
            duplicate.shutdown(socket.SHUT_RDWR)


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


_connections: weakref.WeakSet[psycopg.Connection[Any]] = weakref.WeakSet()
_attempts: set[object] = set()
_forking: set[int] = set()
"""All connections; those on their way, which have no object yet; the threads that fork at this moment."""


def _before_fork() -> None:
    _forking.add(threading.get_ident())


def _after_fork() -> None:
    _attempts.clear()
    _forking.discard(threading.get_ident())


def _after_fork_in_child() -> None:
    """Let go of every inherited connection, without a word to the server.

    Closing politely would end the parent's session; keeping the socket would keep a dead parent's sentinel. The
    descriptor is replaced, so that whatever the driver writes later goes nowhere.
    """
    for connection in list(_connections):
        with contextlib.suppress(Exception), open(os.devnull, "r+b", buffering=0) as nowhere:  # noqa: PTH123
            os.dup2(nowhere.fileno(), connection.fileno(), inheritable=False)
    _connections.clear()
    _attempts.clear()
    _forking.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)


class PostgresConnector:
    """Opens connections to one URL."""

    def __init__(self, url: str, schema: str, ttl: float, label: str, password: Password | None = None) -> None:
        """Check the URL without connecting. The password stays inside and is shown nowhere."""
        self.dialect = postgresql(schema)
        self._ttl = ttl
        self._label = label
        self._parameters = _parse(url)
        self._password = password
        if password is not None and "password" in self._parameters:
            raise ConfigError("the URL has a password, and password= gives another: leave one of them out")

    def __repr__(self) -> str:
        """Show where it leads, without the password."""
        parts = {"at": "host", "port": "port", "database": "dbname", "as": "user"}
        shown = [f"{word} {self._parameters[key]}" for word, key in parts.items() if key in self._parameters]
        return " ".join(["PostgreSQL", *shown])

    def connect(self, purpose: str) -> psycopg.Connection[Any]:
        """Open a plain connection in autocommit mode; raise StoreUnavailable with a message without secrets."""
        connection = self._dial(purpose)
        if isinstance(connection, str):
            raise StoreUnavailable(f"cannot connect to {self!r}: {connection}")
        _warn_of_eavesdroppers(connection)
        return connection

    def _dial(self, purpose: str) -> psycopg.Connection[Any] | str:
        """Return a connection, or why there is none.

        The reason is returned and not raised: the driver's error would go along as the context of ours, and the
        variables of this call in its traceback, both with the password inside.
        """
        psycopg = load()
        parameters: dict[str, Any] = {
            "connect_timeout": CONNECT_TIMEOUT_S,
            "application_name": f"tenure {purpose} {self._label}"[:63],
            **self._parameters,
            **self._present_password(),
            **self._client_keepalive(),
        }
        if purpose != "transaction":  # that one is the application's
            parameters["client_encoding"] = "UTF8"  # or a database in SQL_ASCII would answer with bytes
        try:
            return _connect(parameters)
        except (psycopg.Error, OSError) as error:
            return _without(parameters, str(error).strip())

    def _present_password(self) -> dict[str, str]:
        """Return the password that holds now, if one was given beside the URL; a function is asked each time."""
        if self._password is None:
            return {}
        if isinstance(self._password, str):
            return {"password": self._password}
        try:
            password = self._password()
        except Exception as error:  # noqa: BLE001 - the application's own
            kind = type(error).__name__
        else:
            return {"password": check_password(password)}
        raise StoreUnavailable(f"the function given as password= raised {kind}: call it by itself to see why")

    def open(self, purpose: str, statement_timeout_s: float) -> PostgresSession:
        """Open a session of the node's own, with everything set that it relies on."""
        connection = self.connect(purpose)
        try:
            backend = Backend(*connection.execute(_WHO).fetchone())  # type: ignore[misc]
            self._check(connection, backend)
            settings = self._settings(backend, statement_timeout_s)
            if connection.info.backend_pid != backend.pid:
                connection.prepare_threshold = None
                return PooledSession(connection, self.dialect, backend, settings)
            connection.prepare_threshold = 0  # the same few statements again and again
            self._set(connection, settings)
            return PostgresSession(connection, self.dialect, backend)
        except TenureError:
            connection.close()
            raise
        except Exception as error:  # noqa: BLE001 - raised below, without the driver's error and what hangs on it
            complaint = str(error)
        connection.close()
        raise StoreUnavailable(f"cannot use {self!r}: {complaint}")

    def knock(self) -> str | None:
        """Open a fresh connection and return the server's start time; None if the server will not have it."""
        psycopg = load()
        try:
            with self.connect("knock") as connection:
                row = connection.execute(_START).fetchone()
                return row[0] if row else None
        except (TenureError, psycopg.Error, OSError):
            return None

    def _check(self, connection: psycopg.Connection[Any], backend: Backend) -> None:
        version = connection.info.server_version
        if version < OLDEST_VERSION:
            msg = f"{self!r} is PostgreSQL {version // 10000}; Tenure needs 14 or newer"
            raise ConfigError(msg)
        if backend.in_recovery:
            msg = (
                f"{self!r} is a hot standby; leaders are elected on the primary: give Tenure the primary's URL, or one "
                "of all hosts with target_session_attrs=read-write"
            )
            raise StoreUnavailable(msg)

    def _settings(self, backend: Backend, statement_timeout_s: float) -> dict[str, str]:
        """Return what every transaction relies on; who set what elsewhere does not matter."""
        settings = {
            "search_path": "pg_catalog",
            "statement_timeout": f"{round(statement_timeout_s * 1000)}ms",
            "lock_timeout": "100ms",
            # Not before the owner has stopped trusting itself: the sentinel falls with the connection.
            "idle_in_transaction_session_timeout": f"{round(timing.server_patience(self._ttl) * 1000)}ms",
            # Young tables have no statistics, and nested loops over thousands of roles take as long as they are many
            # times many. Hash joins never do.
            "enable_nestloop": "off",
            "jit": "off",
        }
        if backend.synchronous_commit == "off":
            settings["synchronous_commit"] = "local"  # a token must not come back after a crash
        return settings

    def _set(self, connection: psycopg.Connection[Any], settings: dict[str, str]) -> None:
        """Set, for as long as the connection lasts, what it relies on."""
        lasting = {
            **settings,
            "default_transaction_isolation": "read committed",
            "default_transaction_read_only": "off",
            "default_transaction_deferrable": "off",
            "idle_session_timeout": "0",
            **self._server_keepalive(),
        }
        with connection.pipeline():
            for name, value in lasting.items():
                connection.execute(_SET, (name, value))
        if not connection.info.host.startswith("/") and self._read_back(connection) != lasting["tcp_user_timeout"]:
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
    def _read_back(connection: psycopg.Connection[Any]) -> str:
        query = "select setting from pg_catalog.pg_settings where name = 'tcp_user_timeout'"
        row = connection.execute(query).fetchone()
        return str(row[0]) if row else ""


def _connect(parameters: dict[str, Any]) -> psycopg.Connection[Any]:
    """Connect, again if the process forked meanwhile: the child holds the socket, and nobody there knows of it."""
    while True:
        attempt = object()
        _attempts.add(attempt)
        try:
            connection: psycopg.Connection[Any] = load().connect(autocommit=True, **parameters)
            _connections.add(connection)
            if attempt in _attempts and not _forking:
                return connection
        finally:
            _attempts.discard(attempt)
        connection.close()


def _parse(url: str) -> dict[str, Any]:
    """Return libpq's view of the URL. No message quotes it, nor what may be a piece of a password."""
    psycopg = load()
    parameters: dict[str, Any] | None = None
    if not _STRAY_AT.match(url.partition("://")[2]):
        with contextlib.suppress(psycopg.Error, UnicodeError):  # which quote the URL, password and all
            parameters = psycopg.conninfo.conninfo_to_dict(url)
    if parameters is None:
        raise ConfigError(
            "the PostgreSQL URL is malformed: expected postgresql://user:password@host:port/database, with special "
            "characters in user and password percent-encoded"
        )
    for port in filter(None, str(parameters.get("port", "")).split(",")):
        if not re.fullmatch(r"[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
            raise ConfigError(
                "the port in the PostgreSQL URL must be a number from 1 to 65535 (and a password stands before an @, "
                "with special characters percent-encoded)"
            )
    return parameters


_STRAY_AT = re.compile(r"[^/@]*@[^/?]*@|[^?]*/[^?]*@")
"""An @ in the host or the database: a password with an @ or a / in it, which libpq would cut there."""


def _without(parameters: dict[str, Any], message: str) -> str:
    for secret in filter(None, map(parameters.get, SECRETS)):
        message = message.replace(str(secret), "***")
    return message


def _codec(server_encoding: str) -> str:
    """Return Python's name of a server's encoding. SQL_ASCII takes any bytes, so it holds UTF-8; others are guessed."""
    if server_encoding in ("UTF8", "SQL_ASCII"):
        return "utf-8"
    name = server_encoding.replace("WIN", "cp").replace("KOI8", "koi8_")
    try:
        return codecs.lookup(name).name
    except LookupError:
        return "ascii"  # which all of them hold


_told: set[str] = set()
_telling = threading.Lock()


def _warn_of_eavesdroppers(connection: psycopg.Connection[Any]) -> None:
    """Say once for each server if what is sent there, fenced writes included, can be read and changed on its way."""
    import ipaddress  # noqa: PLC0415 - nobody needs it who does not come here

    info = connection.info
    local = not info.hostaddr or ipaddress.ip_address(info.hostaddr).is_loopback
    server = f"{info.host}:{info.port}"
    with _telling:
        if local or connection.pgconn.ssl_in_use or server in _told:
            return
        _told.add(server)
    log.warning("the connection to %s is not encrypted: add sslmode=require to the URL, or better verify-full", server)
