"""Opens PostgreSQL sessions, with everything set that a node relies on.

libpq gets the URL as it is, so its parameters (sslmode, service, …) work as usual. No message quotes the URL.

Each connection sets what it needs and relies on nothing that the server or the role may have set: time-outs,
search_path, isolation.

Both ends watch the network. The server's keepalive settings make it give up a connection whose client is unreachable,
not before the owner has stopped trusting itself and not much later. libpq's settings do the same for the client. Unix
sockets need neither.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tenure.base.tracebacks import without_locals
from tenure.core import timing
from tenure.databases import connecting, refusals
from tenure.databases.hosts import Host, Hosts, time_limit_s
from tenure.databases.postgres import servers
from tenure.databases.postgres.knock import BeginKnock, Knock
from tenure.databases.postgres.session import PooledSession, PostgresSession, ServerProcess
from tenure.errors import ConfigError, PoolerDetected, StoreUnavailable
from tenure.settings import Password
from tenure.store.dialects import durably, listed, postgresql
from tenure.store.session import Step

if TYPE_CHECKING:
    import psycopg

log = logging.getLogger("tenure.postgres")

DEFAULT_PORT = 5432
LEAST_TIMEOUT_S = 2
"""libpq's shortest time limit. The connector stops waiting for one of several hosts earlier, if the TTL is short."""
ONE_HOST = {"connect_timeout": connecting.CONNECT_TIMEOUT_S}
ONE_OF_MANY = {"connect_timeout": LEAST_TIMEOUT_S, "target_session_attrs": "primary"}
"""What applies unless the URL says otherwise."""
_LISTS = ("host", "hostaddr", "port")
"""The parameters in which a URL lists its hosts."""

_WHO = """
select pg_catalog.pg_backend_pid(),
       (select cast(extract(epoch from backend_start) as text)
        from pg_catalog.pg_stat_get_activity(pg_catalog.pg_backend_pid())),
       cast(extract(epoch from pg_catalog.pg_postmaster_start_time()) as text),
       pg_catalog.pg_is_in_recovery()
"""
"""The view pg_stat_activity is made of the same function, but takes the server a millisecond to open the first time."""
_SET = (
    _WHO.rstrip()
    + """,
       (select pg_catalog.count(pg_catalog.set_config(wanted.key, wanted.value, false))
        from pg_catalog.json_each_text(%(settings)s) as wanted
        where pg_catalog.pg_backend_pid() = %(pid)s and not pg_catalog.pg_is_in_recovery()),
       case when pg_catalog.pg_backend_pid() = %(pid)s and not pg_catalog.pg_is_in_recovery()
            then """
    + durably("false")
    + """ end,
       pg_catalog.current_setting('tcp_user_timeout')
"""
)
"""Sets what a connection relies on, unless another process answers than the one that accepted the connection. Then a
pooler is in between, and its next client would get the settings. A standby, which is refused, is left as it is. A
server evaluates the columns from left to right."""
_WHICH = """
select oid, datname, pg_catalog.pg_postmaster_start_time() from pg_catalog.pg_database
where datname = pg_catalog.current_database()
"""

_START = "select cast(extract(epoch from pg_catalog.pg_postmaster_start_time()) as text)"


def parse_url(url: str) -> dict[str, Any]:
    """Return the parameters that libpq reads from the URL. No message quotes what may be a part of a password."""
    psycopg = connecting.load()
    parameters: dict[str, Any] | None = None
    if not connecting.STRAY_AT.match(url.partition("://")[2]):
        # These errors quote the URL with its password.
        with contextlib.suppress(psycopg.Error, UnicodeError):
            parameters = psycopg.conninfo.conninfo_to_dict(url)
    if parameters is None:
        raise ConfigError(
            "the PostgreSQL URL is malformed, or has a parameter after the ? that libpq does not know: expected "
            "postgresql://user:password@host:port/database, special characters in user and password percent-encoded"
        )
    for port in filter(None, str(parameters.get("port", "")).split(",")):
        if not re.fullmatch(r"[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
            raise ConfigError(
                "the port in the PostgreSQL URL must be a number from 1 to 65535 (and a password comes before an "
                "@, with special characters percent-encoded)"
            )
    return parameters


def parse_hosts(parameters: dict[str, Any], ttl: float) -> Hosts:
    """Return the hosts that the parameters list; raise ConfigError if the lists do not match."""
    lists = {name: str(parameters[name]).split(",") for name in _LISTS if name in parameters}
    many = max((len(values) for name, values in lists.items() if name != "port"), default=1)
    if any(len(values) not in ((1, many) if name == "port" else (many,)) for name, values in lists.items()):
        counted = ", ".join(f"{name}: {len(values)}" for name, values in lists.items())
        raise ConfigError(
            f"the lists in the PostgreSQL URL differ in length ({counted}): give as many ports as hosts, or one for all"
        )
    each = [{name: values[number % len(values)] for name, values in lists.items()} for number in range(many)]
    names = [
        f"{host.get('host') or host.get('hostaddr') or 'localhost'}:{host.get('port') or DEFAULT_PORT}" for host in each
    ]
    limit_s = time_limit_s(ttl)
    # libpq refuses a value that is not a number.
    with contextlib.suppress(ValueError, OverflowError):
        told_s = int(float(parameters.get("connect_timeout", 0)))
        limit_s = max(LEAST_TIMEOUT_S, told_s) if told_s > 0 else limit_s
    return Hosts(each, names, limit_s)


class PostgresConnector(connecting.Connector):
    """Opens connections to one URL."""

    kind = "postgresql"

    def __init__(self, url: str, schema: str, ttl: float, label: str, password: Password | None = None) -> None:
        parameters = parse_url(url)
        hosts = parse_hosts(parameters, ttl)
        super().__init__(parameters, hosts, ttl, label, password, connecting.shut_down_socket)
        self.dialect = postgresql(schema)

    def __repr__(self) -> str:
        parts = {"at": "host", "port": "port", "database": "dbname", "as": "user"}
        shown = [f"{word} {self._parameters[key]}" for word, key in parts.items() if key in self._parameters]
        return " ".join(["PostgreSQL", *shown])

    def connect(self, purpose: str, only: Host | None = None) -> psycopg.Connection[Any]:
        """Open a plain connection in autocommit mode; raise StoreUnavailable with a message without secrets.

        ``only`` names one of the hosts, as parameters of libpq.
        """
        connection = (
            self.hosts.dial(lambda host: self._dial(purpose, host)) if only is None else self._dial(purpose, only)
        )
        if isinstance(connection, str):
            # Without a user in the URL, libpq names the user of the process.
            unnamed = "user" not in self._parameters and refusals.NO_ROLE.search(connection)
            hint = ": the URL names no user; write one before the host, as in postgresql://app@localhost/app"
            raise StoreUnavailable(f"cannot connect to {self!r}: {connection}{hint if unnamed else ''}")
        # Others could read and change what is sent there, fenced writes included.
        if not (connecting.is_here(connection.info.hostaddr) or connection.pgconn.ssl_in_use):
            server = f"{connection.info.host}:{connection.info.port}"
            connecting.warn_once(server, "add sslmode=require to the URL, or better verify-full")
        return connection

    @without_locals
    def _dial(self, purpose: str, host: Host) -> psycopg.Connection[Any] | str:
        """Return a connection, or the reason why there is none.

        The reason is returned, not raised: an error raised here would carry the driver's error as its context, and this
        call's variables in its traceback, both with the password.
        """
        driver, parameters = connecting.load(), self._dialled(purpose, host)
        try:
            connection: psycopg.Connection[Any] = connecting.connect_outside_fork(
                lambda: driver.connect(autocommit=True, **parameters), lambda opened: opened
            )
        except (driver.Error, OSError, ValueError) as error:
            # The driver raises ValueError for a host that is not a valid name.
            self.cause = refusals.of_postgres(error)
            return connecting.without_secrets(parameters, str(error).strip())
        return connection

    def _dialled(self, purpose: str, host: Host) -> dict[str, Any]:
        """Return the parameters of a connection to one host, with the password."""
        password = connecting.present_password(self._password)
        parameters: dict[str, Any] = {
            **(ONE_HOST if len(self.hosts) == 1 else ONE_OF_MANY),
            "application_name": f"tenure {purpose} {self._label}"[:63],
            **self._parameters,
            **host,
            **({} if password is None else {"password": password}),
            **self._client_keepalive(),
        }
        # A database in SQL_ASCII would answer with bytes. In a transaction, the application chooses the encoding.
        if purpose != "transaction":
            parameters["client_encoding"] = "UTF8"
        return parameters

    def open(self, purpose: str, statement_timeout_s: float) -> PostgresSession:
        """Open a session for the node, with everything set that it relies on."""
        return self._first_use(self.connect(purpose), lambda connection: self._session(connection, statement_timeout_s))

    def open_plain(self, purpose: str, only: Host | None = None) -> PostgresSession:
        """Open a session with the settings that server, database and role give it, on a standby, too."""
        return self._first_use(self.connect(purpose, only), self._plain_session)

    def _plain_session(self, connection: psycopg.Connection[Any]) -> PostgresSession:
        self._check_kind(connection)
        backend = ServerProcess(*connection.execute(_WHO).fetchone())  # type: ignore[misc]
        # A pooler would keep prepared statements when this session has ended.
        connection.prepare_threshold = None
        session = PostgresSession(connection, self.dialect, backend)
        session.pooled = connection.info.backend_pid != backend.pid
        return session

    def _session(self, connection: psycopg.Connection[Any], statement_timeout_s: float) -> PostgresSession:
        self._check_kind(connection)
        settings = self._settings(statement_timeout_s, connection.info.server_version)
        lasting = self._lasting(settings)
        parameters = {"settings": json.dumps(lasting), "pid": connection.info.backend_pid}
        *found, _, _, tcp_user_timeout = connection.execute(_SET, parameters).fetchone()  # type: ignore[misc]
        backend = ServerProcess(*found)
        self.check_primary(connection, in_recovery=backend.in_recovery)
        if connection.info.backend_pid != backend.pid:
            connection.prepare_threshold = None
            self._check_pool_mode(connection)
            return PooledSession(connection, self.dialect, backend, settings)
        # The same few statements repeat, so each is prepared when it first runs.
        connection.prepare_threshold = 0
        if tcp_user_timeout != lasting["tcp_user_timeout"] and not connection.info.host.startswith("/"):
            log.warning("the server did not accept tcp_user_timeout: a lost network is noticed late")
        return PostgresSession(connection, self.dialect, backend)

    def knocker(self, session: PostgresSession) -> BeginKnock:
        """Return a function that begins to open a new connection to the session's own server.

        It returns another function, which waits for the connection, and returns the server's start time, or None if the
        server does not accept the connection.
        """
        info = session.connection.info
        only = {"host": info.host, "port": info.port, **({"hostaddr": info.hostaddr} if info.hostaddr else {})}

        def dialler() -> Callable[[], Knock | None]:
            # The address is that of a host which has worked, whatever it is now.
            return Knock.dialler(self._dialled("knock", only) | {"target_session_attrs": "any"})

        # A takeover waits for what is done after this.
        prepared = None if callable(self._password) else dialler()

        def begin() -> Callable[[], str | None]:
            fresh = (prepared or dialler())()
            if fresh is None:
                return lambda: None
            self._pending.add(fresh)
            fresh.begin()
            return lambda: finish(fresh)

        def finish(fresh: Knock) -> str | None:
            try:
                return fresh.ask(_START, connecting.CONNECT_TIMEOUT_S)
            finally:
                self._pending.discard(fresh)

        return begin

    def which(self) -> tuple[Any, ...]:
        """Return which database of which server the URL leads to."""
        with self.connect("which") as connection, self.time_limit(connection, connecting.CONNECT_TIMEOUT_S):
            try:
                return connection.execute(_WHICH).fetchone() or ()
            except (connecting.load().Error, OSError) as error:
                raise StoreUnavailable(f"cannot use {self!r}: {error}") from None

    def _check_kind(self, connection: psycopg.Connection[Any]) -> None:
        """Refuse a server on which no leader can be elected, by what it said when the connection was opened."""
        info = connection.info
        release, cockroach = info.parameter_status("server_version"), info.parameter_status("crdb_version")
        unusable = servers.why_unusable(info.server_version, release or "", cockroach)
        if unusable is not None:
            raise ConfigError(f"{self!r} {unusable}")

    def check_primary(self, connection: psycopg.Connection[Any], *, in_recovery: bool) -> None:
        """Refuse a server that takes no writes."""
        if in_recovery:
            found = connection.execute("select pg_catalog.to_regproc('aurora_version') is not null").fetchone()
            raise StoreUnavailable(f"{self!r} {servers.why_no_primary(aurora=found == (True,))}")

    def _check_pool_mode(self, connection: psycopg.Connection[Any]) -> None:
        """Refuse a pooler that may run each statement on another connection: it does not keep transactions together."""
        try:
            with connection.transaction():
                return
        except connecting.load().errors.ProtocolViolation:
            pass
        raise PoolerDetected(
            f"{self!r} is a connection pooler that pools statements, and Tenure needs transactions: use pool_mode = "
            "transaction there, or give a direct_url= that leads to PostgreSQL itself"
        )

    def _settings(self, statement_timeout_s: float, version: int) -> dict[str, str]:
        """Return the settings that every transaction relies on, whatever the server and the role have set.

        Besides, ``synchronous_commit`` is not off, even if an operator turns it off later for the whole server: a token
        must not be issued again after a crash.
        """
        settings = {
            "search_path": "pg_catalog",
            "statement_timeout": f"{round(statement_timeout_s * 1000)}ms",
            "lock_timeout": "100ms",
            # One of the warnings says that a commit is on no replica.
            "client_min_messages": "warning",
            # Not before the owner has stopped trusting itself: the connection's end releases the sentinel.
            "idle_in_transaction_session_timeout": f"{round(timing.server_patience(self._ttl) * 1000)}ms",
            # New tables have no statistics, and nested loops over thousands of roles take quadratic time.
            "enable_nestloop": "off",
            # A plan that was made while the tables were small is kept until the server analyses them again.
            "enable_seqscan": "off",
            "jit": "off",
            # psycopg reads no other form of a time.
            "datestyle": "ISO",
        }
        if version >= 170000:
            # A time limit would end the connection in the middle of a wait.
            settings["transaction_timeout"] = "0"
        return settings

    def _lasting(self, settings: dict[str, str]) -> dict[str, str]:
        """Return what a direct connection sets for as long as it lasts."""
        return {
            **settings,
            "default_transaction_isolation": "read committed",
            "default_transaction_read_only": "off",
            "default_transaction_deferrable": "off",
            "idle_session_timeout": "0",
            # Every statement is planned once, when the node starts, and not again in the middle of a takeover.
            "plan_cache_mode": "force_generic_plan",
            **self._server_keepalive(),
        }

    def keepalive(self, session: PostgresSession) -> list[tuple[str, str, str]]:
        """Return each keepalive setting of the server: its name, what a node sets, and what the server accepted."""
        wanted = self._server_keepalive()
        query = "select name, setting from pg_catalog.pg_settings where name in {listed}"
        taken = dict(session.read(Step(query, {"names": listed(tuple(wanted))}))[0].rows)
        return [(name, value, taken.get(name, "")) for name, value in wanted.items()]

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
