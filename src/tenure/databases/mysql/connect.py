"""Opens sessions on MariaDB and MySQL, with everything set that a node relies on.

Each connection sets what it needs for itself and trusts nothing that the server may have set: isolation, time-outs, how
strict it is.

A lost network is noticed on the server's side by ``wait_timeout``: a control connection that has said nothing for as
long as its owner trusts itself, and a little longer, is over, and the sentinel with it. On the client's side it is the
system's keepalive. Unix sockets need neither.
"""

from __future__ import annotations

import contextlib
import math
import re
import socket
from typing import Any
from urllib.parse import parse_qsl, unquote

from tenure import mysql, timing
from tenure.dialects import MYSQL
from tenure.dialing import STRAY_AT, Openings, is_here, present_password, tell_once, unforked, without_secrets
from tenure.errors import ConfigError, PoolerDetected, StoreUnavailable, TenureError
from tenure.mysql import MySqlSession, cut, load, said, wire
from tenure.session import Step
from tenure.settings import Password

CONNECT_TIMEOUT_S = 5
PATIENT_S = 30.0
"""How long a statement may take before the session is hurried: the tables are made then."""
OLDEST = {"MariaDB": (10, 6), "MySQL": (8, 0)}
"""The first to skip locked rows and to read JSON as a table."""

_LOT = "substring(uuid(), 20)"
"""The part of its UUIDs that a server draws by lot with every start."""
_START = f"""
(select concat(unix_timestamp() - variable_value, ' ', {_LOT})
 from /*M! information_schema.*//*!80000 performance_schema.*/global_status where variable_name = 'Uptime')
"""
_WHO = (
    "select connection_id(), version(), if(@@lower_case_table_names, lower(database()), database()), " + _START,
    "show global variables where variable_name in ('read_only', 'super_read_only', 'wsrep_on')",
)

_PARAMETERS = {
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
    """Return what the driver is told. No message quotes the URL, nor what may be a piece of a password."""
    rest = url.partition("://")[2]
    address, _, query = rest.partition("?")
    authority, _, database = address.partition("/")
    login, _, place = authority.rpartition("@")
    found = _PLACE.fullmatch(place)
    if found is None or not database or "/" in database or STRAY_AT.match(rest):
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
    if "ssl_ca" in told:  # whoever names an authority wants it asked, as with ssl={"ca": …}
        told = {"ssl_verify_cert": True, "ssl_verify_identity": True, **told}
    return told


def _parameter(name: str, value: str) -> Any:
    kind = _PARAMETERS.get(name)
    with contextlib.suppress(ValueError):
        if kind is bool and value.lower() in ("true", "1", "false", "0"):
            return value.lower() in ("true", "1")
        if kind is float and 0 < float(value) < math.inf:
            return float(value)
        if kind is str and value:
            return value
    raise ConfigError(
        "the MariaDB URL has a parameter after the ? that Tenure does not know, or a wrong value: there are charset "
        f"(utf8mb4), {', '.join(_PARAMETERS)}"
    )


class MySqlConnector:
    """Opens connections to one URL."""

    dialect = MYSQL

    def __init__(self, url: str, ttl: float, label: str, password: Password | None = None) -> None:
        """Check the URL without connecting. The password stays inside and is shown nowhere."""
        load()
        self._ttl = ttl
        self._label = label
        self._parameters = parse_url(url)
        self._password = password
        self._openings = Openings(cut)
        self._context: Any = None
        if password is not None and "password" in self._parameters:
            raise ConfigError("the URL has a password, and password= gives another: leave one of them out")

    def __repr__(self) -> str:
        """Show where it leads, without the password."""
        told = self._parameters
        at = told["unix_socket"] if "unix_socket" in told else f"{told['host']} port {told['port']}"
        return f"MariaDB at {at} database {told['database']}" + (f" as {told['user']}" if "user" in told else "")

    def connect(self, purpose: str, **arguments: Any) -> Any:
        """Open a plain connection in autocommit mode; raise StoreUnavailable with a message without secrets."""
        connection = self._dial(purpose, arguments)
        if isinstance(connection, str):
            raise StoreUnavailable(f"cannot connect to {self!r}: {connection}")
        self._keep_alive(connection)
        mysql.beside[connection] = lambda: self.connect("interrupt", connect_timeout=1)
        return connection

    def _dial(self, purpose: str, arguments: dict[str, Any]) -> Any | str:
        """Return a connection, or why there is none: the driver's error would go along with the password inside."""
        pymysql = load()
        told = {"connect_timeout": CONNECT_TIMEOUT_S, **self._parameters}
        password = present_password(self._password) or told.pop("password", "")
        told |= {"charset": "utf8mb4", "autocommit": True, "program_name": f"tenure {purpose} {self._label}"[:255]}
        told |= arguments
        preferred = self._encryption(told)

        def connect() -> Any:
            connection = pymysql.connect(**told, password=password.encode(), defer_connect=True)
            if preferred is not None:
                connection.ssl, connection.ctx = True, preferred
            with self.limited(connection, told["connect_timeout"]):
                connection.connect()
            return connection

        try:
            return unforked(connect, wire)
        except (pymysql.err.Error, OSError, ValueError, StoreUnavailable) as error:
            return without_secrets({**told, "password": password}, said(error))

    def _encryption(self, told: dict[str, Any]) -> Any:
        """Put what the driver is told about TLS into one context, made once: it takes longer than to connect.

        Return the context that it would use by itself, where it prefers TLS without being told; else None.
        """
        mine = {name: told.pop(name) for name in list(told) if name.startswith("ssl_")}
        disabled = mine.get("ssl_disabled") or "unix_socket" in told
        if not disabled and self._context is None:
            try:
                self._context = getattr(load().connect(**mine, defer_connect=True), "ctx", None)
            except (OSError, ValueError) as error:  # ssl.SSLError is one
                files = ", ".join(f"{name}={value}" for name, value in mine.items() if name in _FILES)
                raise ConfigError(f"TLS cannot be used as the MariaDB URL says ({files}): {error}") from None
        told["ssl" if mine and not disabled else "ssl_disabled"] = self._context if mine and not disabled else True
        return None if mine or disabled else self._context

    def _keep_alive(self, connection: Any) -> None:
        """Have the system find out that the network is lost; and say so once if others can read what is sent."""
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
        if not is_encrypted(connection) and not is_here(line.getpeername()[0]):
            server = f"{self._parameters['host']}:{self._parameters['port']}"
            tell_once(server, "give the server a certificate, and the URL ssl_ca=… and ssl_verify_identity=true")

    def open(self, purpose: str) -> MySqlSession:
        """Open a session of the node's own. Until it is hurried, it has time: the tables may have to be made."""
        flags = load().constants.CLIENT
        connection = self.connect(purpose, client_flag=flags.FOUND_ROWS | flags.MULTI_STATEMENTS)
        try:
            with self.limited(connection, CONNECT_TIMEOUT_S):
                return self._session(connection)
        except TenureError:
            connection.close()
            raise
        except Exception as error:  # noqa: BLE001 - raised below, without the driver's error and what hangs on it
            complaint = said(error)
        with contextlib.suppress(Exception):
            connection.close()
        raise StoreUnavailable(f"cannot use {self!r}: {complaint}")

    def _session(self, connection: Any) -> MySqlSession:
        session = MySqlSession(connection, 0, "", "")
        who, variables = session.read(*(Step(text, {}) for text in _WHO))
        session.pid, version, session.database, session.server_start = who.rows[0]
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
        """Refuse what is too old, what spreads writes over several servers, and what takes none."""
        kind = "MariaDB" if "mariadb" in version.lower() else "MySQL"
        numbers = tuple(map(int, re.findall(r"\d+", version)[:2]))
        if numbers < OLDEST[kind]:
            wanted = ".".join(map(str, OLDEST[kind]))
            raise ConfigError(f"{self!r} is {kind} {version}; Tenure needs {kind} {wanted} or newer")
        if variables.get("wsrep_on") == "ON":
            raise ConfigError(
                f"{self!r} is a Galera cluster, where a lock on one server keeps nobody from writing on another: use a "
                "server of its own, or PostgreSQL"
            )
        if "ON" in (variables.get("read_only"), variables.get("super_read_only")):
            raise StoreUnavailable(
                f"{self!r} is read-only, as replicas are; leaders are elected on the primary: give Tenure its URL"
            )
        if connection.thread_id() != pid % 2**32:
            raise PoolerDetected(
                f"{self!r} leads through a proxy, where a session's lock belongs to nobody: give Tenure the URL of the "
                "server itself"
            )

    def hurry(self, session: MySqlSession, statement_timeout_s: float) -> None:
        """Let no statement of a lane outlast its time from now on."""
        milliseconds = max(1, round(statement_timeout_s * 1000))
        session.read(
            Step(
                "set session innodb_lock_wait_timeout = 1, lock_wait_timeout = 1 "
                f"/*M! , max_statement_time = {milliseconds / 1000} */ "
                f"/*!80000 , max_execution_time = {milliseconds} */",
                {},
            )
        )

    def guard(self, session: MySqlSession, spare_s: int = 0) -> None:
        """Have the server end a session that says nothing for longer than its owner trusts itself."""
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
        """How long the server keeps a control connection that says nothing."""
        return math.ceil(timing.server_patience(self._ttl))

    def limited(self, connection: Any, seconds: float) -> contextlib.AbstractContextManager[None]:
        """Cut the connection if the block takes longer, or on :meth:`abort`."""
        return self._openings.limited(connection, seconds)

    def abort(self) -> None:
        """Make whatever is being opened fail at once, from any thread."""
        self._openings.abort()

    def knock(self, session: MySqlSession) -> str | None:
        """Open a fresh connection; return the start time of the session's server if it leads there, else None.

        Numbers of connections grow as long as a server runs, and its lot is quicker read than the time of its start.
        """
        try:
            with (
                contextlib.closing(self.connect("knock")) as connection,
                self.limited(connection, CONNECT_TIMEOUT_S),
                connection.cursor() as cursor,
            ):
                cursor.execute(f"select connection_id(), {_LOT}")
                ((pid, lot),) = cursor.fetchall()
        except (load().err.Error, OSError, StoreUnavailable):
            return None
        return session.server_start if pid > session.pid and session.server_start.endswith(f" {lot}") else None


def is_encrypted(connection: Any) -> bool:
    """Whether what is sent on a connection can be read by its ends only."""
    return hasattr(wire(connection), "cipher")
