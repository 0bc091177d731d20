"""Opens PostgreSQL sessions, with everything set that a node relies on.

Each connection sets what it needs for itself and trusts nothing that the server or the role may have set: time-outs,
search_path, isolation.

Both ends watch the network. On the server's side the keepalive settings make it give up a connection whose client is
unreachable, not before the owner has stopped trusting itself and not much later; libpq's own settings do the same for
the client. Unix sockets need neither.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tenure import timing
from tenure.dialects import postgresql
from tenure.dialing import (
    Openings,
    dial,
    load,
    parse_url,
    present_password,
    shut_down,
    warn_of_eavesdroppers,
    without_secrets,
)
from tenure.errors import ConfigError, PoolerDetected, StoreUnavailable, TenureError
from tenure.postgres import Backend, PooledSession, PostgresSession
from tenure.session import Step
from tenure.settings import Password

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
_WHICH = """
select oid, datname, pg_catalog.pg_postmaster_start_time() from pg_catalog.pg_database
where datname = pg_catalog.current_database()
"""
_START = "select cast(extract(epoch from pg_catalog.pg_postmaster_start_time()) as text)"


class PostgresConnector:
    """Opens connections to one URL."""

    def __init__(self, url: str, schema: str, ttl: float, label: str, password: Password | None = None) -> None:
        """Check the URL without connecting. The password stays inside and is shown nowhere."""
        self.dialect = postgresql(schema)
        self._ttl = ttl
        self._label = label
        self._parameters = parse_url(url)
        self._password = password
        self._openings = Openings(shut_down)
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
        warn_of_eavesdroppers(connection)
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
            return dial(parameters)
        except (psycopg.Error, OSError) as error:
            return without_secrets(parameters, str(error).strip())

    def _present_password(self) -> dict[str, str]:
        """Return the password beside the URL as a parameter, if one was given."""
        password = present_password(self._password)
        return {} if password is None else {"password": password}

    def open(self, purpose: str, statement_timeout_s: float) -> PostgresSession:
        """Open a session of the node's own, with everything set that it relies on."""
        return self._opened(purpose, lambda connection: self._session(connection, statement_timeout_s))

    def open_plain(self, purpose: str) -> PostgresSession:
        """Open a session with the settings that server, database and role give it, on whatever server answers."""
        return self._opened(purpose, self._plain_session)

    def _opened(self, purpose: str, prepare: Callable[[psycopg.Connection[Any]], PostgresSession]) -> PostgresSession:
        connection = self.connect(purpose)
        try:
            with self.limited(connection, CONNECT_TIMEOUT_S):
                return prepare(connection)
        except TenureError:
            connection.close()
            raise
        except Exception as error:  # noqa: BLE001 - raised below, without the driver's error and what hangs on it
            complaint = str(error)
        connection.close()
        raise StoreUnavailable(f"cannot use {self!r}: {complaint}")

    def _plain_session(self, connection: psycopg.Connection[Any]) -> PostgresSession:
        backend = Backend(*connection.execute(_WHO).fetchone())  # type: ignore[misc]
        connection.prepare_threshold = None  # a pooler would keep what is prepared
        session = PostgresSession(connection, self.dialect, backend)
        session.pooled = connection.info.backend_pid != backend.pid
        return session

    def _session(self, connection: psycopg.Connection[Any], statement_timeout_s: float) -> PostgresSession:
        backend = Backend(*connection.execute(_WHO).fetchone())  # type: ignore[misc]
        self._check(connection, backend)
        settings = self._settings(backend, statement_timeout_s, connection.info.server_version)
        if connection.info.backend_pid != backend.pid:
            connection.prepare_threshold = None
            self._check_pool_mode(connection)
            return PooledSession(connection, self.dialect, backend, settings)
        connection.prepare_threshold = 0  # the same few statements again and again
        self._set(connection, settings)
        return PostgresSession(connection, self.dialect, backend)

    def limited(self, connection: psycopg.Connection[Any], seconds: float) -> contextlib.AbstractContextManager[None]:
        """Cut the connection if the block takes longer, or on :meth:`abort`."""
        return self._openings.limited(connection, seconds, f"cannot use {self!r}: ")

    def abort(self) -> None:
        """Make whatever is being opened fail at once, from any thread."""
        self._openings.abort()

    def knock(self) -> str | None:
        """Open a fresh connection and return the server's start time; None if the server will not have it."""
        try:
            return str(self._ask("knock", _START)[0])
        except StoreUnavailable:
            return None

    def which(self) -> tuple[Any, ...]:
        """Return which database of which server this leads to."""
        return self._ask("which", _WHICH)

    def _ask(self, purpose: str, question: str) -> tuple[Any, ...]:
        """Ask on a fresh connection."""
        with self.connect(purpose) as connection, self.limited(connection, CONNECT_TIMEOUT_S):
            try:
                return connection.execute(question).fetchone() or ()
            except (load().Error, OSError) as error:
                raise StoreUnavailable(f"cannot use {self!r}: {error}") from None

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

    def _check_pool_mode(self, connection: psycopg.Connection[Any]) -> None:
        """Refuse a pooler that gives every statement another connection: it has no transactions."""
        try:
            with connection.transaction():
                return
        except load().errors.ProtocolViolation:
            pass
        raise PoolerDetected(
            f"{self!r} is a connection pooler that pools statements, and Tenure needs transactions: use pool_mode = "
            "transaction there, or give a direct_url= that leads to PostgreSQL itself"
        )

    def _settings(self, backend: Backend, statement_timeout_s: float, version: int) -> dict[str, str]:
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
        if version >= 170000:
            settings["transaction_timeout"] = "0"  # it would end the connection, in the midst of a wait
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

    def keepalive(self, session: PostgresSession) -> list[tuple[str, str, str]]:
        """Return each keepalive setting of the server's side: its name, what a node sets, and what the server took."""
        told = self._server_keepalive()
        query = "select name, setting from pg_catalog.pg_settings where name = any(:names)"
        taken = dict(session.read(Step(query, {"names": list(told)}))[0].rows)
        return [(name, value, taken.get(name, "")) for name, value in told.items()]

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
