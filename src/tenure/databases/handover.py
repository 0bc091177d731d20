"""Turns the options of the application's connections into a URL for the node's own connections.

A node never takes a connection from the application's pool: what the node sets there would be reset, or the pool would
lend the connection out again. The node reads the options that the application passes to its driver, and passes
the same to its own driver. They come from an engine of SQLAlchemy (its URL, its ``connect_args=`` and what listeners of
``do_connect`` change), or from Django's settings (``integrations/django/conf.py``).

An option that says *where* or *as whom* to connect is handed over or refused, never left out. An option that says how
the application works (row factories, time-outs) is left out. The password is never in the URL, and is shown nowhere.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from tenure.base.tracebacks import without_locals
from tenure.databases.connecting import load
from tenure.databases.mysql.connect import PARAMETERS
from tenure.errors import ConfigError
from tenure.settings import Password


@dataclass(frozen=True)
class Source:
    """Where the options come from, and what to do about those that cannot be handed over. For error messages."""

    name: str
    remedy: str
    file_remedy: str

    def refuse(self, options: str) -> ConfigError:
        """Return the error for options that a node's driver does not have."""
        return ConfigError(f"{self.name} has {options}, which only its driver understands: {self.remedy}")


Translate = Callable[[Source, dict[str, Any]], str]


def _guarded(translate: Translate) -> Translate:
    """Raise ConfigError for values of a wrong type. The error has no cause, because a cause might quote a secret."""

    @functools.wraps(translate)
    def guarded(source: Source, options: dict[str, Any]) -> str:
        try:
            return translate(source, {name: value for name, value in options.items() if value is not None})
        except ConfigError:
            raise
        except (AttributeError, TypeError, ValueError):
            pass
        raise ConfigError(f"{source.name} has options of a type that cannot be handed over: {source.remedy}")

    return guarded


# --- PostgreSQL ---------------------------------------------------------------------------------------------

_OF_THE_APPLICATION = {
    *("application_name", "autocommit", "client_encoding", "context", "row_factory", "cursor_factory"),
    *("connection_factory", "prepare_threshold", "async_", "command_timeout", "statement_cache_size"),
    *("max_cached_statement_lifetime", "max_cacheable_statement_size", "connection_class", "record_class", "loop"),
    *("prepared_statement_cache_size", "prepared_statement_name_func", "async_fallback", "async_creator_fn"),
}
"""Options of psycopg, psycopg2 and asyncpg that do not say where to connect."""


@_guarded
def postgres_url(source: Source, options: dict[str, Any]) -> str:
    """Return the options of psycopg or psycopg2 as a URL."""
    known = {option.keyword.decode() for option in load().pq.Conninfo.get_defaults()}
    parameters = {
        name: ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
        for name, value in options.items()
        if name not in _OF_THE_APPLICATION
    }
    for name in parameters.keys() - known:
        raise source.refuse(f"the option {name!r}")
    return "postgresql:///?" + urlencode(parameters, quote_via=quote)


@_guarded
def _asyncpg_url(source: Source, options: dict[str, Any]) -> str:
    """Return the options of asyncpg as a URL, under the names that libpq has for them."""
    for theirs, libpqs in (("database", "dbname"), ("timeout", "connect_timeout")):
        if theirs in options:
            options[libpqs] = options.pop(theirs)
    if "connect_timeout" in options:
        # libpq's shortest time-out is 2 s.
        options["connect_timeout"] = max(2, round(options["connect_timeout"]))
    options.update(_sslmode(options.pop("ssl", None)))
    settings: Mapping[str, Any] = options.pop("server_settings", None) or {}
    if settings:
        options["options"] = " ".join(server_setting(name, value) for name, value in settings.items())
    return postgres_url(source, options)


def _sslmode(ssl: Any) -> dict[str, str]:
    if ssl is None:
        return {}
    if isinstance(ssl, str):
        return {"sslmode": ssl}
    if ssl is False:
        return {"sslmode": "disable"}
    if ssl is True:
        return {"sslmode": "verify-full", "sslrootcert": "system"}
    raise ConfigError(
        "this engine has an SSLContext, which cannot be handed over: give the node a URL with "
        "sslmode=verify-full&sslrootcert=…"
    )


def server_setting(name: str, value: object) -> str:
    """Return a setting of the server as a part of libpq's ``options``."""
    escaped = str(value).replace("\\", "\\\\").replace(" ", "\\ ")
    return f"-c {name}={escaped}"


# --- MariaDB ------------------------------------------------------------------------------------------------

_MYSQL_OF_THE_APPLICATION = {
    *("autocommit", "charset", "client_flag", "collation", "compress", "conv", "cursorclass", "init_command"),
    *("local_infile", "max_allowed_packet", "program_name", "read_timeout", "sql_mode", "use_unicode"),
    "write_timeout",
}
_MYSQL_SSL = {"ca": "ssl_ca", "cert": "ssl_cert", "key": "ssl_key", "check_hostname": "ssl_verify_identity"}
_MYSQL_SSL_MODES = {
    "DISABLED": {"ssl_disabled": True},
    "PREFERRED": {},
    "REQUIRED": {"ssl_verify_cert": False},
    "VERIFY_CA": {"ssl_verify_cert": True, "ssl_verify_identity": False},
    "VERIFY_IDENTITY": {"ssl_verify_cert": True, "ssl_verify_identity": True},
}
"""The modes of mysqlclient, as options of PyMySQL."""


@_guarded
def mysql_url(source: Source, options: dict[str, Any]) -> str:
    """Return the options of PyMySQL or mysqlclient as a URL."""
    parameters = {name: value for name, value in options.items() if name not in _MYSQL_OF_THE_APPLICATION}
    user, host, port, database, db = (parameters.pop(name, "") for name in ("user", "host", "port", "database", "db"))
    ssl, mode = parameters.pop("ssl", {}), parameters.pop("ssl_mode", "PREFERRED")
    if not isinstance(ssl, Mapping) or ssl.keys() - _MYSQL_SSL or mode not in _MYSQL_SSL_MODES:
        raise source.refuse("options about TLS")
    for name in parameters.keys() - PARAMETERS:
        raise source.refuse(f"the option {name!r}")
    # The mode comes last, so that no other option weakens it.
    parameters |= {_MYSQL_SSL[name]: value for name, value in ssl.items()} | _MYSQL_SSL_MODES[mode]
    words = {name: str(value).lower() if isinstance(value, bool) else value for name, value in parameters.items()}
    login = f"{quote(user, safe='')}@" if user else ""
    place = quote(host or "localhost", safe=":")
    place = f"[{place}]" if ":" in place else place
    path = quote(database or db, safe="")
    return f"mysql://{login}{place}{f':{port}' if port else ''}/{path}{'?' if words else ''}{urlencode(words)}"


# --- SQLite -------------------------------------------------------------------------------------------------


@_guarded
def sqlite_url(source: Source, options: dict[str, Any]) -> str:
    """Return the options of sqlite3 as a URL."""
    path = str(options.get("database", ""))
    if path in ("", ":memory:") or path.startswith("file:"):
        raise ConfigError(
            f"{source.name} uses a database in memory or a file: URI, which a node cannot share: {source.file_remedy}"
        )
    return f"sqlite:///{Path(path).absolute()}"


# --- SQLAlchemy ---------------------------------------------------------------------------------------------

_ENGINE = Source("this engine", remedy="give the node a URL", file_remedy="use sqlite:///path")
_ENGINES = {
    "postgresql+psycopg": postgres_url,
    "postgresql+psycopg_async": postgres_url,
    "postgresql+psycopg2": postgres_url,
    "postgresql+asyncpg": _asyncpg_url,
    "sqlite+pysqlite": sqlite_url,
    "sqlite+aiosqlite": sqlite_url,
    "mysql+pymysql": mysql_url,
    "mariadb+pymysql": mysql_url,
}


@dataclass(frozen=True)
class ConnectionTarget:
    """Where a node connects: a URL without the password, and the password."""

    url: str = field(repr=False)
    password: Password | None = field(repr=False)


@without_locals
def target_of(engine: Any) -> ConnectionTarget:
    """Return where an engine connects to; raise ConfigError for options that cannot be handed over.

    A listener of ``do_connect`` may give another password for each connection, as clouds with tokens need it. If there
    are listeners, the node calls them again for each of its connections.
    """
    engine = _sync_engine(engine)
    name = f"{engine.dialect.name}+{engine.dialect.driver}"
    translate = _ENGINES.get(name)
    if translate is None:
        known = ", ".join(sorted(_ENGINES))
        raise ConfigError(f"cannot use an engine of {name}: give the node a URL, or an engine of one of {known}")
    options = _driver_options(engine)
    password = options.pop("password", None)
    if inspect.iscoroutinefunction(password):
        raise ConfigError("the engine's password is a coroutine function: give the node a URL, and a plain password=")
    url = translate(_ENGINE, options)
    if password and list(engine.dialect.dispatch.do_connect):
        return ConnectionTarget(url, lambda: _text(_driver_options(engine).get("password")))
    return ConnectionTarget(url, password or None)


def _text(password: Any) -> str:
    return str(password() if callable(password) else password)


def _sync_engine(engine: Any) -> Any:
    engines, asyncio = (sys.modules.get(name) for name in ("sqlalchemy.engine", "sqlalchemy.ext.asyncio"))
    if asyncio and isinstance(engine, asyncio.AsyncEngine):
        return engine.sync_engine
    if engines and isinstance(engine, engines.Engine):
        return engine
    raise ConfigError(f"from_engine() takes an Engine or AsyncEngine of SQLAlchemy, not {type(engine).__name__}")


def _driver_options(engine: Any) -> dict[str, Any]:
    """Return the options that the engine would now pass to its driver, without changing it or connecting."""
    creator = engine.pool._creator  # noqa: SLF001
    inside: Mapping[str, Any] = {}
    # Only the function by which SQLAlchemy itself connects holds the `connect_args=`.
    if inspect.isfunction(creator) and creator.__module__ == "sqlalchemy.engine.create":
        inside = inspect.getclosurevars(creator).nonlocals
    if "cparams" not in inside:
        raise ConfigError(
            "this engine connects by your own function (creator=, async_creator= or pool=), and a node opens its own "
            "connections: give the node a URL, and a function as password= if the password changes"
        )
    arguments, options = list(inside.get("cargs_tup", inside.get("cargs", ()))), dict(inside["cparams"])
    listeners = engine.dialect.dispatch.do_connect
    if any(listener(engine.dialect, None, arguments, options) is not None for listener in listeners):
        raise ConfigError(
            "a listener of this engine's do_connect event opens the connections itself, and a node opens its own: "
            "give the node a URL, and a function as password= if the password changes"
        )
    # SQLite's file is the one positional argument. psycopg2 gets an empty one if there are no options.
    if engine.dialect.name == "sqlite":
        options["database"] = arguments.pop(0) if arguments else ""
    if any(arguments):
        raise _ENGINE.refuse("a positional argument")
    return options
