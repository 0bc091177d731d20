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

from tenure.core import timing
from tenure.databases import connecting
from tenure.databases.mysql.session import MySqlSession, beside, cut, load, said, wire
from tenure.errors import ConfigError, PoolerDetected, StoreUnavailable
from tenure.settings import Password
from tenure.store.session import Step
from tenure.tracebacks import without_locals

PATIENT_S = 30.0
"""How long a statement may take before :meth:`set_statement_timeout` is called, while the tables are created."""
OLDEST = {"MariaDB": (10, 6), "MySQL": (8, 0)}
"""The first releases that skip locked rows and read JSON as a table."""

_RANDOM_PART = "substring(uuid(), 20)"
"""The part of a server's UUIDs that it picks at random at each start."""
_START = f"""
(select concat(unix_timestamp() - variable_value, ' ', {_RANDOM_PART})
 from /*M! information_schema.*//*!80000 performance_schema.*/global_status where variable_name = 'Uptime')
"""
_WHO = (
    "select connection_id(), version(), if(@@lower_case_table_names, lower(database()), database()), " + _START,
    "show global variables where variable_name in ('read_only', 'super_read_only', 'wsrep_on')",
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
    """Return the driver's arguments. No message quotes the URL, or what may be a part of a password."""
    rest = url.partition("://")[2]
    address, _, query = rest.partition("?")
    authority, _, database = address.partition("/")
    login, _, place = authority.rpartition("@")
    found = _PLACE.fullmatch(place)
    if found is None or not database or "/" in database or connecting.STRAY_AT.match(rest):
        raise ConfigError(
            "the MariaDB URL is malformed, or names no database: expected mysql://user:password@host:port/database, "
            "special characters in user and password percent-encoded"
        )
    port = found["port"] or "3306"
    if len(port) > 5 or not 1 <= int(port) <= 65535:
        raise ConfigError("the port in the MariaDB URL must be a number from 1 to 65535")
    user, _, password = login.partition(":")
    told = {
        "host": unquote(found["six"] or found["host"] or "localhost"),
        "port": int(port),
        "database": unquote(database),
        **({"user": unquote(user)} if user else {}),
        **({"password": unquote(password)} if password else {}),
    }
    for name, value in parse_qsl(query, keep_blank_values=True):
        if (name, value) != ("charset", "utf8mb4"):
            told[name] = _parameter(name, value)
    if "ssl_ca" in told:  # naming an authority turns the checks on, as ssl={"ca": …} does
        told = {"ssl_verify_cert": True, "ssl_verify_identity": True, **told}
    return told


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

    def __init__(self, url: str, ttl: float, label: str, password: Password | None = None) -> None:
        load()
        super().__init__(parse_url(url), ttl, label, password, cut)
        self._context: Any = None

    def __repr__(self) -> str:
        told = self._parameters
        at = told["unix_socket"] if "unix_socket" in told else f"{told['host']} port {told['port']}"
        return f"MariaDB at {at} database {told['database']}" + (f" as {told['user']}" if "user" in told else "")

    def connect(self, purpose: str, **arguments: Any) -> Any:
        """Open a plain connection in autocommit mode; raise StoreUnavailable with a message without secrets."""
        connection = self._dial(purpose, arguments)
        if isinstance(connection, str):
            raise StoreUnavailable(f"cannot connect to {self!r}: {connection}")
        self._keep_alive(connection)
        beside[connection] = lambda: self.connect("interrupt", connect_timeout=1)
        return connection

    @without_locals
    def _dial(self, purpose: str, arguments: dict[str, Any]) -> Any | str:
        """Return a connection, or the reason why there is none.

        An error raised here would carry the password in its context.
        """
        pymysql = load()
        told = {"connect_timeout": connecting.CONNECT_TIMEOUT_S, **self._parameters}
        password = connecting.present_password(self._password) or told.pop("password", "")
        told |= {"charset": "utf8mb4", "autocommit": True, "program_name": f"tenure {purpose} {self._label}"[:255]}
        told |= arguments
        preferred = self._encryption(told)

        def connect() -> Any:
            connection = pymysql.connect(**told, password=password.encode(), defer_connect=True)
            if preferred is not None:
                connection.ssl, connection.ctx = True, preferred
            with self.time_limit(connection, told["connect_timeout"], complaint=""):
                connection.connect()
            return connection

        try:
            return connecting.connect_outside_fork(connect, wire)
        except (pymysql.err.Error, OSError, ValueError, StoreUnavailable) as error:
            return connecting.without_secrets({**told, "password": password}, said(error))

    def _encryption(self, told: dict[str, Any]) -> Any:
        """Replace the TLS arguments by one context, which is created once: creating it takes longer than connecting.

        Return the context that the driver would use by itself if it prefers TLS and the URL says nothing; else None.
        """
        mine = {name: told.pop(name) for name in list(told) if name.startswith("ssl_")}
        disabled = mine.get("ssl_disabled") or "unix_socket" in told
        if not disabled and self._context is None:
            try:
                self._context = getattr(load().connect(**mine, defer_connect=True), "ctx", None)
            except (OSError, ValueError) as error:  # ssl.SSLError is one
                files = ", ".join(f"{name}={value}" for name, value in mine.items() if name in _FILES)
                given = files or f"without {', '.join(_FILES)}"
                raise ConfigError(f"TLS cannot be used as the MariaDB URL says ({given}): {error}") from None
        told["ssl" if mine and not disabled else "ssl_disabled"] = self._context if mine and not disabled else True
        return None if mine or disabled else self._context

    def _keep_alive(self, connection: Any) -> None:
        """Let the system notice a lost network; warn once if the connection is not encrypted."""
        line = wire(connection)
        if line.family == socket.AF_UNIX:
            return
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
        return self._first_use(connection, self._session, said)

    def _session(self, connection: Any) -> MySqlSession:
        session = MySqlSession(connection)
        who, variables = session.read(*(Step(text, {}) for text in _WHO))
        session.pid, version, session.database, session.server_start = who.rows[0]
        session.started = session.server_start  # which makes the number unique: a server never gives one twice
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
        """Refuse a server that is too old or read-only, a cluster that takes writes on several servers, and a proxy."""
        kind = "MariaDB" if "mariadb" in version.lower() else "MySQL"
        numbers = tuple(map(int, re.findall(r"\d+", version)[:2]))
        if numbers < OLDEST[kind]:
            wanted = ".".join(map(str, OLDEST[kind]))
            server = repr(self).replace("MariaDB", "the server", 1)
            raise ConfigError(f"{server} runs {kind} {version}: upgrade it to {kind} {wanted} or newer")
        if variables.get("wsrep_on") == "ON":
            raise ConfigError(
                f"{self!r} is a Galera cluster, where a lock on one server does not stop writes on another: use a "
                "single server, or PostgreSQL"
            )
        if "ON" in (variables.get("read_only"), variables.get("super_read_only")):
            raise StoreUnavailable(
                f"{self!r} is read-only, as replicas are; leaders are elected on the primary: give the primary's URL"
            )
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
                contextlib.closing(self.connect("knock")) as connection,
                self.time_limit(connection, connecting.CONNECT_TIMEOUT_S),
                connection.cursor() as cursor,
            ):
                cursor.execute(f"select connection_id(), {_RANDOM_PART}")
                ((pid, random_part),) = cursor.fetchall()
        except (load().err.Error, OSError, StoreUnavailable):
            return None
        return session.server_start if pid > session.pid and session.server_start.endswith(f" {random_part}") else None


def is_encrypted(connection: Any) -> bool:
    """Whether the connection is encrypted."""
    return hasattr(wire(connection), "cipher")
