"""Opens sessions on MariaDB and MySQL, with everything set that a node relies on.

Each connection sets what it needs and relies on nothing that the server may have set: isolation, time-outs, how strict
the server is.

The server notices a lost network by ``wait_timeout``: it ends a control connection, and its sentinel with it,
after a silence that is a little longer than its owner trusts itself. The client notices it by the system's keepalive.
Unix sockets need neither.
"""

from __future__ import annotations

import contextlib
import math
import re
import socket
from typing import Any
from urllib.parse import parse_qsl, unquote

from tenure.base.tracebacks import without_locals
from tenure.core import timing
from tenure.databases import connecting, refusals
from tenure.databases.hosts import Host, Hosts, time_limit_s
from tenure.databases.mysql import servers
from tenure.databases.mysql.session import MySqlSession, beside, cut, error_text, is_local_socket, load, wire
from tenure.errors import ConfigError, PoolerDetected, StoreUnavailable
from tenure.settings import Password
from tenure.store.session import Step

PATIENT_S = 30.0
"""How long a statement may take before :meth:`set_statement_timeout` is called, while the tables are created."""
_RANDOM_PART = "substring(uuid(), 20)"
"""The part of a server's UUIDs that it picks at random at each start."""
_START = f"""
(select concat(unix_timestamp() - variable_value, ' ', {_RANDOM_PART})
 from /*M! information_schema.*//*!80000 performance_schema.*/global_status where variable_name = 'Uptime')
"""
_WHO = (
    "select connection_id(), version(), if(@@lower_case_table_names, lower(database()), database()), " + _START,
    f"show global variables where variable_name in {servers.VARIABLES}",
)

PARAMETERS = {
    "unix_socket": str,
    "connect_timeout": float,
    "bind_address": str,
    "ssl_ca": str,
    "ssl_cert": str,
    "ssl_key": str,
    "ssl_key_password": str,
    "ssl_verify_cert": bool,
    "ssl_verify_identity": bool,
    "ssl_disabled": bool,
}
_FILES = ("ssl_ca", "ssl_cert", "ssl_key")
_PLACE = re.compile(r"(?:\[(?P<six>[^\]]*)\]|(?P<host>[^:\[\]]*))(?::(?P<port>[0-9]*))?")


def parse_url(url: str) -> dict[str, Any]:
    """Return the driver's arguments, with the first of several hosts. No message quotes what may be a password."""
    rest = url.partition("://")[2]
    address, _, query = rest.partition("?")
    authority, _, database = address.partition("/")
    login = authority.rpartition("@")[0]
    hosts = parse_hosts(url)
    if not database or "/" in database or connecting.STRAY_AT.match(rest):
        raise _malformed()
    user, _, password = login.partition(":")
    arguments = {
        **hosts[0],
        "database": unquote(database),
        **({"user": unquote(user)} if user else {}),
        **({"password": unquote(password)} if password else {}),
    }
    for name, value in parse_qsl(query, keep_blank_values=True):
        if (name, value) != ("charset", "utf8mb4"):
            arguments[name] = _parameter(name, value)
    if "ssl_ca" in arguments:
        # A URL that names an authority turns the checks on, as ssl={"ca": …} does.
        arguments = {"ssl_verify_cert": True, "ssl_verify_identity": True, **arguments}
    if len(hosts) > 1 and "unix_socket" in arguments:
        raise ConfigError("the MariaDB URL has several hosts and a unix_socket, which is one server: leave one out")
    return arguments


def parse_hosts(url: str) -> list[Host]:
    """Return the hosts of a URL, each as arguments of the driver."""
    authority = url.partition("://")[2].partition("?")[0].partition("/")[0]
    hosts = []
    for place in authority.rpartition("@")[2].split(","):
        found = _PLACE.fullmatch(place)
        if found is None:
            raise _malformed()
        port = found["port"] or "3306"
        if len(port) > 5 or not 1 <= int(port) <= 65535:
            raise ConfigError("the port in the MariaDB URL must be a number from 1 to 65535")
        hosts.append({"host": unquote(found["six"] or found["host"] or "localhost"), "port": int(port)})
    return hosts


def _malformed() -> ConfigError:
    return ConfigError(
        "the MariaDB URL is malformed, or names no database: expected mysql://user:password@host:port/database, "
        "special characters in user and password percent-encoded"
    )


def _parameter(name: str, value: str) -> Any:
    kind = PARAMETERS.get(name)
    with contextlib.suppress(ValueError):
        if kind is bool and value.lower() in ("true", "1", "false", "0"):
            return value.lower() in ("true", "1")
        if kind is float and 0 < float(value) < math.inf:
            return float(value)
        if kind is str and value:
            return value
    raise ConfigError(
        "the MariaDB URL has an unknown parameter after the ?, or a parameter with a wrong value: use only charset "
        f"(utf8mb4), {', '.join(PARAMETERS)}"
    )


class MySqlConnector(connecting.Connector):
    """Opens connections to one URL."""

    kind = "mysql"

    def __init__(self, url: str, ttl: float, label: str, password: Password | None = None) -> None:
        load()
        parameters, each = parse_url(url), parse_hosts(url)
        names = [f"{host['host']}:{host['port']}" for host in each]
        limit_s = parameters.get("connect_timeout", time_limit_s(ttl))
        super().__init__(parameters, Hosts(each, names, limit_s), ttl, label, password, cut)
        if len(each) > 1:
            self._parameters = {"connect_timeout": limit_s, **parameters}
        self._context: Any = None

    def __repr__(self) -> str:
        arguments = self._parameters
        at = f"{arguments['host']} port {arguments['port']}"
        if len(self.hosts) > 1:
            at = ", ".join(name for name, _ in self.hosts.named())
        if "unix_socket" in arguments:
            at = arguments["unix_socket"]
        user = f" as {arguments['user']}" if "user" in arguments else ""
        return f"MariaDB at {at} database {arguments['database']}{user}"

    def connect(self, purpose: str, only: Host | None = None, **arguments: Any) -> Any:
        """Open a plain connection in autocommit mode; raise StoreUnavailable with a message without secrets.

        ``only`` names one of the hosts. Without it, and with several hosts, the connection leads to one that takes
        writes.
        """
        self._prepare_encryption()
        if only is None:
            connection = self.hosts.dial(lambda host: self._dial_primary(purpose, arguments | host))
        else:
            connection = self._dial(purpose, arguments | only)
        if isinstance(connection, str):
            raise StoreUnavailable(f"cannot connect to {self!r}: {connection}")
        self._keep_alive(connection)
        beside[connection] = lambda: self.connect("interrupt", _host_of(connection), connect_timeout=1)
        return connection

    def _dial_primary(self, purpose: str, arguments: dict[str, Any]) -> Any | str:
        """Return a connection, or the reason why there is none. Where there are several hosts, refuse replicas.

        A replica of MariaDB takes writes unless it is set to read_only. A node that cannot reach the primary would
        lead there.
        """
        connection = self._dial(purpose, arguments)
        if len(self.hosts) == 1 or isinstance(connection, str):
            return connection
        reason = self._first_use(connection, self._why_no_primary, error_text)
        if reason is not None:
            connection.close()
        return reason or connection

    def look(self, host: Host) -> tuple[str | None, str]:
        """Return why one of several hosts is no primary, or None if it takes writes; and which server it is."""

        def look(connection: Any) -> tuple[str | None, str]:
            why = self._why_no_primary(connection)
            with connection.cursor() as cursor:
                cursor.execute(f"select {_RANDOM_PART}")
                return why and why.partition(";")[0], str(cursor.fetchone()[0])

        connection = self.connect("look", host)
        found = self._first_use(connection, look, error_text)
        connection.close()
        return found

    def _why_no_primary(self, connection: Any) -> str | None:
        """Return why a server takes no writes, or must not be given any; None if it is a primary."""
        with connection.cursor() as cursor:
            cursor.execute("select version(), @@global.read_only, @@global.innodb_read_only")
            ((version, read_only, innodb_read_only),) = cursor.fetchall()
        variables = {"read_only": str(read_only), "innodb_read_only": str(innodb_read_only)}
        reason = servers.why_unusable(version, {}) or servers.why_no_primary(variables)
        if reason is not None:
            return reason
        sources = replicates_from(connection)
        if sources is None:
            raise ConfigError(
                f"{self!r}: with several hosts a node must see which of them are replicas, because these take writes, "
                f"too, and this user may not see it: grant {servers.needed_grant(version)} on *.* to it on each "
                "server, or give a URL with one host"
            )
        return f"is a replica of {', '.join(sources)}" if sources else None

    @without_locals
    def _dial(self, purpose: str, arguments: dict[str, Any]) -> Any | str:
        """Return a connection, or the reason why there is none.

        An error raised here would carry the password in its context.
        """
        pymysql = load()
        parameters = {"connect_timeout": connecting.CONNECT_TIMEOUT_S, **self._parameters}
        password = connecting.present_password(self._password) or parameters.pop("password", "")
        parameters |= {
            "charset": "utf8mb4",
            "autocommit": True,
            "program_name": f"tenure {purpose} {self._label}"[:255],
        }
        parameters |= arguments
        preferred = self._encryption(parameters)

        def connect() -> Any:
            connection = pymysql.connect(**parameters, password=password.encode(), defer_connect=True)
            if preferred is not None:
                connection.ssl, connection.ctx = True, preferred
            with self.time_limit(connection, parameters["connect_timeout"], complaint=""):
                connection.connect()
            return connection

        try:
            return connecting.connect_outside_fork(connect, wire)
        except (pymysql.err.Error, OSError, ValueError, StoreUnavailable) as error:
            self.cause = refusals.of_mysql(error)
            return connecting.without_secrets({**parameters, "password": password}, error_text(error))

    def _encryption(self, parameters: dict[str, Any]) -> Any:
        """Replace the TLS arguments by one context.

        Return the context that the driver would use by itself if it prefers TLS and the URL says nothing; else None.
        """
        mine = {name: parameters.pop(name) for name in list(parameters) if name.startswith("ssl_")}
        disabled = mine.get("ssl_disabled") or "unix_socket" in parameters
        encrypted = mine and not disabled
        parameters["ssl" if encrypted else "ssl_disabled"] = self._context if encrypted else True
        return None if mine or disabled else self._context

    @without_locals
    def _prepare_encryption(self) -> None:
        """Create the context once, before any host is dialled: that takes longer than connecting."""
        mine = {name: value for name, value in self._parameters.items() if name.startswith("ssl_")}
        if self._context is not None or mine.get("ssl_disabled") or "unix_socket" in self._parameters:
            return
        try:
            self._context = getattr(load().connect(**mine, defer_connect=True), "ctx", None)
        except (OSError, ValueError) as error:
            # The error for a wrong certificate, ssl.SSLError, is an OSError.
            files = ", ".join(f"{name}={value}" for name, value in mine.items() if name in _FILES)
            given = files or f"without {', '.join(_FILES)}"
            raise ConfigError(f"TLS cannot be used as the MariaDB URL says ({given}): {error}") from None

    def _keep_alive(self, connection: Any) -> None:
        """Let the system notice a lost network; warn once if the connection is not encrypted."""
        if is_local_socket(connection):
            return
        line = wire(connection)
        idle_s = max(1, int(timing.trust(self._ttl) / 2))
        options = {
            "TCP_KEEPIDLE": idle_s,
            "TCP_KEEPINTVL": max(1, idle_s // 4),
            "TCP_KEEPCNT": 4,
            "TCP_USER_TIMEOUT": round(timing.server_patience(self._ttl) * 1000),
        }
        for name, value in options.items():
            if hasattr(socket, name):
                line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        if not is_encrypted(connection) and not connecting.is_here(line.getpeername()[0]):
            server = f"{self._parameters['host']}:{self._parameters['port']}"
            remedy = "give the server a certificate, and add ssl_ca=… and ssl_verify_identity=true to the URL"
            connecting.warn_once(server, remedy)

    def open(self, purpose: str) -> MySqlSession:
        """Open a session for the node. Its statements may take long at first: the tables may have to be created."""
        flags = load().constants.CLIENT
        connection = self.connect(purpose, client_flag=flags.FOUND_ROWS | flags.MULTI_STATEMENTS)
        return self._first_use(connection, self._session, error_text)

    def _session(self, connection: Any) -> MySqlSession:
        session = MySqlSession(connection)
        who, variables = session.read(*(Step(text, {}) for text in _WHO))
        session.pid, version, session.database, session.server_start = who.rows[0]
        # The server's start makes a connection's number unique, because a server never gives a number twice.
        session.started = session.server_start
        self._check(connection, session.pid, version, dict(variables.rows))
        session.read(
            Step("set session transaction isolation level read committed, read write", {}),
            Step(
                "set session autocommit = 1, completion_type = 0, sql_safe_updates = 0, "
                "sql_mode = 'STRICT_ALL_TABLES', "
                f"long_query_time = 3600, innodb_lock_wait_timeout = {PATIENT_S:.0f} "
                f"/*M! , max_statement_time = {PATIENT_S:.0f}, idle_transaction_timeout = {self.patience_s} */",
                {},
            ),
        )
        return session

    def _check(self, connection: Any, pid: int, version: str, variables: dict[str, str]) -> None:
        """Refuse a server that cannot be used or takes no writes, and a proxy."""
        unusable = servers.why_unusable(version, variables)
        if unusable is not None:
            server = repr(self).replace("MariaDB", "the server", 1)
            raise ConfigError(f"{server} {unusable}")
        no_primary = servers.why_no_primary(variables)
        if no_primary is not None:
            raise StoreUnavailable(f"{self!r} {no_primary}")
        if connection.thread_id() != pid % 2**32:
            raise PoolerDetected(
                f"{self!r} leads through a proxy, where a session's lock protects nothing: give Tenure the URL of the "
                "server itself"
            )

    def set_statement_timeout(self, session: MySqlSession, statement_timeout_s: float) -> None:
        """Bound every statement of a lane from now on."""
        milliseconds = max(1, round(statement_timeout_s * 1000))
        session.read(
            Step(
                "set session innodb_lock_wait_timeout = 1, lock_wait_timeout = 1 "
                f"/*M! , max_statement_time = {milliseconds / 1000} */ "
                f"/*!80000 , max_execution_time = {milliseconds} */",
                {},
            )
        )

    def set_idle_timeout(self, session: MySqlSession, spare_s: int = 0) -> None:
        """Let the server end a session that is silent for longer than its owner trusts itself."""
        patience_s = self.patience_s + spare_s
        session.read(
            Step(
                f"set session wait_timeout = {patience_s}, net_read_timeout = {patience_s}, "
                f"net_write_timeout = {patience_s}",
                {},
            )
        )

    @property
    def patience_s(self) -> int:
        """How long the server keeps a silent control connection."""
        return math.ceil(timing.server_patience(self._ttl))

    def knock(self, session: MySqlSession) -> str | None:
        """Open a new connection; return the start time of the session's server if it leads there, else None.

        It leads to the same server if its number is higher, because a server numbers its connections upwards, and if
        the random part is the same. The random part is read faster than the time at which the server was started.
        """
        try:
            with (
                contextlib.closing(self.connect("knock", _host_of(session.connection))) as connection,
                self.time_limit(connection, connecting.CONNECT_TIMEOUT_S),
                connection.cursor() as cursor,
            ):
                cursor.execute(f"select connection_id(), {_RANDOM_PART}")
                ((pid, random_part),) = cursor.fetchall()
        except (load().err.Error, OSError, StoreUnavailable):
            return None
        return session.server_start if pid > session.pid and session.server_start.endswith(f" {random_part}") else None


def is_encrypted(connection: Any) -> bool:
    """Whether the connection uses TLS: only such a socket has a cipher."""
    return hasattr(wire(connection), "cipher")


def replicates_from(connection: Any) -> list[str] | None:
    """Return from which servers a connection's server replicates; None if the user may not see it."""
    with connection.cursor() as cursor:
        try:
            cursor.execute(servers.replication_query(connection.get_server_info()))
        except load().err.Error as error:
            if error.args[:1] == (servers.ACCESS_DENIED,):
                return None
            raise
        return servers.sources(cursor)


def _host_of(connection: Any) -> Host:
    """Return the host to which a connection leads."""
    return {"host": connection.host, "port": connection.port}
