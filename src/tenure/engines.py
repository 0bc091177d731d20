"""Where an Engine of SQLAlchemy's leads, for connections of the node's own.

A node never takes a connection from the application's pool: what it holds there would be reset, recycled, or given to
somebody else. It takes what the engine would tell its driver (the URL, ``connect_args=`` and what listeners of
``do_connect`` make of them) and tells its own. What only the engine's driver understands about *where* and *as whom* to
connect is refused rather than left out; what is about how the application works (row factories, time-outs) is left out.

A password may be another one with each connection (tokens of a cloud's): where somebody listens to ``do_connect``, the
listeners are asked anew each time.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlencode

from tenure.dialing import load
from tenure.errors import ConfigError
from tenure.settings import Password


@dataclass
class Told:
    """What an engine tells its driver. The password is by itself, and shown nowhere."""

    arguments: list[Any] = field(repr=False)
    parameters: dict[str, Any] = field(repr=False)
    password: Any = field(repr=False, default=None)


@dataclass(frozen=True)
class Way:
    """The way to a database: a URL without the password, and the password."""

    url: str = field(repr=False)
    password: Password | None = field(repr=False)


def way_of(engine: Any) -> Way:
    """Return where the engine leads; raise ConfigError for what cannot be taken over."""
    engine = _sync_engine(engine)
    name = f"{engine.dialect.name}+{engine.dialect.driver}"
    translate = _WAYS.get(name)
    if translate is None:
        known = ", ".join(sorted(_WAYS))
        raise ConfigError(f"cannot take over an engine of {name}: give the node a URL, or an engine of one of {known}")
    told = _told(engine)
    if inspect.iscoroutinefunction(told.password):
        raise ConfigError("the engine's password is a coroutine function: give the node a URL, and a plain password=")
    url = _url(translate, told)
    if told.password and list(engine.dialect.dispatch.do_connect):
        return Way(url, lambda: _text(_told(engine).password))
    return Way(url, told.password or None)


def _url(translate: Callable[[Told], str], told: Told) -> str:
    try:
        return translate(told)
    except ConfigError:
        raise
    except (AttributeError, TypeError, ValueError):  # no text, or none that can be encoded; it could tell a secret
        pass
    raise ConfigError("connect_args of this engine are of a kind that cannot be handed on: give the node a URL")


def _text(password: Any) -> str:
    return str(password() if callable(password) else password)


def _sync_engine(engine: Any) -> Any:
    engines, asyncio = (sys.modules.get(name) for name in ("sqlalchemy.engine", "sqlalchemy.ext.asyncio"))
    if asyncio and isinstance(engine, asyncio.AsyncEngine):
        return engine.sync_engine
    if engines and isinstance(engine, engines.Engine):
        return engine
    raise ConfigError(f"from_engine() takes an Engine or AsyncEngine of SQLAlchemy, not a {type(engine).__name__}")


def _told(engine: Any) -> Told:
    """Return what the engine would tell its driver now. Nothing of the engine's is changed, and nothing connected."""
    told = _inside(engine)
    if told is None:
        raise ConfigError(
            "this engine connects by a function of yours (creator=, async_creator= or pool=), and a node makes "
            "connections of its own: give it a URL, and password= if that changes"
        )
    listeners = engine.dialect.dispatch.do_connect
    if any(listener(engine.dialect, None, told.arguments, told.parameters) is not None for listener in listeners):
        raise ConfigError(
            "a listener of this engine's do_connect event makes the connections itself, and a node makes its own: "
            "give it a URL, and password= if that changes"
        )
    told.password = told.parameters.pop("password", None)
    return told


def _inside(engine: Any) -> Told | None:
    """Return the arguments that SQLAlchemy's own function connects with: ``connect_args=`` are nowhere else."""
    creator = engine.pool._creator  # noqa: SLF001
    if not inspect.isfunction(creator) or creator.__module__ != "sqlalchemy.engine.create":
        return None
    inside = inspect.getclosurevars(creator).nonlocals
    if "cparams" not in inside:
        return None
    return Told(list(inside.get("cargs_tup", inside.get("cargs", ()))), dict(inside["cparams"]))


# --- PostgreSQL ---------------------------------------------------------------------------------------------

_OF_THE_APPLICATION = {
    *("application_name", "autocommit", "context", "row_factory", "cursor_factory", "connection_factory"),
    *("prepare_threshold", "async_", "command_timeout", "statement_cache_size", "max_cached_statement_lifetime"),
    *("max_cacheable_statement_size", "connection_class", "record_class", "loop"),
    *("prepared_statement_cache_size", "prepared_statement_name_func", "async_fallback", "async_creator_fn"),
}
"""What psycopg, psycopg2 and asyncpg are told that says nothing about where to connect."""


def _libpq(told: Told) -> str:
    """Return libpq's parameters as a URL."""
    known = {option.keyword.decode() for option in load().pq.Conninfo.get_defaults()}
    parameters = {
        name: ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
        for name, value in told.parameters.items()
        if name not in _OF_THE_APPLICATION and value is not None
    }
    for name in parameters.keys() - known:
        raise ConfigError(
            f"connect_args of this engine have {name!r}, which only its driver understands: give the node a URL"
        )
    return "postgresql:///?" + urlencode(parameters, quote_via=quote)


def _asyncpg(told: Told) -> str:
    """Return asyncpg's parameters as libpq names them."""
    parameters = dict(told.parameters)
    for theirs, libpqs in (("database", "dbname"), ("timeout", "connect_timeout")):
        if theirs in parameters:
            parameters[libpqs] = parameters.pop(theirs)
    if "connect_timeout" in parameters:
        parameters["connect_timeout"] = max(2, round(parameters["connect_timeout"]))  # libpq knows no shorter one
    parameters.update(_sslmode(parameters.pop("ssl", None)))
    settings: Mapping[str, Any] = parameters.pop("server_settings", None) or {}
    if settings:
        parameters["options"] = " ".join(f"-c {name}={_escaped(str(value))}" for name, value in settings.items())
    return _libpq(Told([], parameters))


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
        "connect_args of this engine have an SSLContext, which cannot be handed on: give the node a URL with "
        "sslmode=verify-full&sslrootcert=…"
    )


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace(" ", "\\ ")


# --- SQLite -------------------------------------------------------------------------------------------------


def _file(told: Told) -> str:
    path = str(told.arguments[0]) if told.arguments else ":memory:"
    if path.startswith("file:") or told.parameters.get("uri"):
        raise ConfigError(
            "this engine opens SQLite by a file: URI, whose parameters (mode=ro, nolock, …) a node cannot live with: "
            "use sqlite:///path"
        )
    return f"sqlite:///{path}"


# --- MariaDB ------------------------------------------------------------------------------------------------

_MYSQL_OF_THE_APPLICATION = {
    *("client_flag", "charset", "use_unicode", "autocommit", "cursorclass", "conv", "sql_mode"),
    *(
        "read_timeout",
        "write_timeout",
        "init_command",
        "collation",
        "program_name",
        "local_infile",
        "max_allowed_packet",
    ),
}
_MYSQL_SSL = {"ca": "ssl_ca", "cert": "ssl_cert", "key": "ssl_key", "check_hostname": "ssl_verify_identity"}


def _mysql(told: Told) -> str:
    """Return PyMySQL's parameters as a URL; what is no part of it after the ?, where it is checked."""
    parameters = {
        name: value
        for name, value in told.parameters.items()
        if name not in _MYSQL_OF_THE_APPLICATION and value is not None
    }
    place = {name: parameters.pop(name, None) for name in ("host", "port", "user", "database", "db")}
    ssl = parameters.pop("ssl", None)
    if isinstance(ssl, Mapping) and not set(ssl) - set(_MYSQL_SSL):
        parameters.update({_MYSQL_SSL[name]: value for name, value in ssl.items()})
    elif ssl is not None:
        raise ConfigError("connect_args of this engine have an ssl= that cannot be handed on: give the node a URL")
    login = f"{quote(place['user'], safe='')}@" if place["user"] else ""
    host = quote(place["host"] or "localhost", safe=":")
    port = f":{place['port']}" if place["port"] else ""
    database = quote(place["database"] or place["db"] or "", safe="")
    query = urlencode({name: str(value).lower() if value is True else value for name, value in parameters.items()})
    return f"mysql://{login}{f'[{host}]' if ':' in host else host}{port}/{database}{'?' if query else ''}{query}"


_WAYS: dict[str, Callable[[Told], str]] = {
    "postgresql+psycopg": _libpq,
    "postgresql+psycopg_async": _libpq,
    "postgresql+psycopg2": _libpq,
    "postgresql+asyncpg": _asyncpg,
    "sqlite+pysqlite": _file,
    "sqlite+aiosqlite": _file,
    "mysql+pymysql": _mysql,
    "mariadb+pymysql": _mysql,
}
