"""The settings: ``TENURE``, and where the database that it names leads.

The node opens connections of its own, by its own driver, to where Django's lead: it takes what Django would tell its
driver (``get_connection_params()``, so backends of others and their tokens count, too). What says *where* and *as whom*
to connect is taken over or refused, never left out; what says how the application works is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import DEFAULT_DB_ALIAS, connections
from django.utils.connection import ConnectionDoesNotExist

from tenure.errors import ConfigError
from tenure.integrations import extra

KEYS = (
    *("DATABASE", "URL", "PASSWORD", "DIRECT_URL", "NAME", "NAMESPACE", "TTL", "RENEW_EVERY", "TAKEOVER", "MODE"),
    *("SCHEMA", "METADATA", "START"),
)


def node_arguments() -> dict[str, Any]:
    """Return what a ``tenure.Node`` is made with, by the settings; raise ConfigError for what cannot work."""
    told = getattr(settings, "TENURE", {})
    if not isinstance(told, Mapping):
        raise ConfigError(f"TENURE must be a dict, not a {type(told).__name__}")
    for key in told:
        if key not in KEYS:
            raise ConfigError(f"TENURE has {key!r}, and there are only {', '.join(KEYS)}")
    arguments = {key.lower(): value for key, value in told.items() if key != "DATABASE"}
    if "URL" in told:
        if "DATABASE" in told:
            raise ConfigError("TENURE has both DATABASE and URL: leave one of them out")
        return arguments
    if "PASSWORD" in told:
        raise ConfigError("TENURE has PASSWORD without URL: the password is that of DATABASES")
    return arguments | _way_to(told.get("DATABASE", DEFAULT_DB_ALIAS))


def _way_to(alias: str) -> dict[str, Any]:
    """Return the URL of a database of Django's, without its password; and a function that returns the present one."""
    try:
        vendor = connections[alias].vendor
        translate = _WAYS.get(vendor)
        if translate is None:
            raise ConfigError(
                f"DATABASES[{alias!r}] is on {vendor}, and Tenure needs PostgreSQL, MariaDB or SQLite: set "
                "TENURE['DATABASE'] or TENURE['URL'] to another"
            )
        parameters = _parameters(alias)
    except ConnectionDoesNotExist:
        raise ConfigError(f"TENURE['DATABASE'] is {alias!r}, and DATABASES has no such database") from None
    except ImproperlyConfigured as error:
        raise ConfigError(f"DATABASES[{alias!r}] cannot be used: {error}") from None
    has_password = bool(parameters.pop("password", None))  # no variable keeps it, for reporters of errors to find
    url = translate(alias, parameters)
    return {"url": url, "password": lambda: _parameters(alias)["password"]} if has_password else {"url": url}


def _parameters(alias: str) -> dict[str, Any]:
    """Return what Django would tell its driver now. Nothing is connected."""
    return {name: value for name, value in connections[alias].get_connection_params().items() if value is not None}


def _not_taken_over(alias: str, option: str) -> ConfigError:
    return ConfigError(
        f"DATABASES[{alias!r}] has {option}, which only its driver understands: set TENURE['URL'] to where the node's "
        "own connections are to lead"
    )


# --- PostgreSQL ---------------------------------------------------------------------------------------------

_OF_THE_APPLICATION = {
    *("application_name", "autocommit", "client_encoding", "context", "row_factory"),
    *("cursor_factory", "connection_factory", "prepare_threshold"),
}


def _postgresql(alias: str, parameters: dict[str, Any]) -> str:
    with extra("postgres"):
        import psycopg  # noqa: PLC0415
    known = {option.keyword.decode() for option in psycopg.pq.Conninfo.get_defaults()}
    told = {name: str(value) for name, value in parameters.items() if name not in _OF_THE_APPLICATION}
    for name in told.keys() - known:
        raise _not_taken_over(alias, f"the option {name!r}")
    role = connections[alias].settings_dict["OPTIONS"].get("assume_role")
    if role:
        escaped = role.replace("\\", "\\\\").replace(" ", "\\ ")
        told["options"] = f"{told.get('options', '')} -c role={escaped}".strip()
    return "postgresql:///?" + urlencode(told, quote_via=quote)


# --- MariaDB ------------------------------------------------------------------------------------------------

_MYSQL_OF_THE_APPLICATION = {
    *("autocommit", "charset", "client_flag", "collation", "compress", "conv", "cursorclass", "init_command"),
    *("local_infile", "read_timeout", "sql_mode", "use_unicode", "write_timeout"),
}
_MYSQL_SSL = {"ca": "ssl_ca", "cert": "ssl_cert", "key": "ssl_key"}
_MYSQL_SSL_MODES = {
    "DISABLED": {"ssl_disabled": "true"},
    "PREFERRED": {},
    "REQUIRED": {"ssl_verify_cert": "false"},
    "VERIFY_CA": {"ssl_verify_cert": "true", "ssl_verify_identity": "false"},
    "VERIFY_IDENTITY": {"ssl_verify_cert": "true", "ssl_verify_identity": "true"},
}


def _mysql(alias: str, parameters: dict[str, Any]) -> str:
    told = {name: value for name, value in parameters.items() if name not in _MYSQL_OF_THE_APPLICATION}
    user, host, port, database = (told.pop(name, "") for name in ("user", "host", "port", "database"))
    query: dict[str, Any] = {name: told.pop(name) for name in ("unix_socket", "connect_timeout") if name in told}
    ssl, mode = told.pop("ssl", {}), told.pop("ssl_mode", "PREFERRED")
    if not isinstance(ssl, Mapping) or ssl.keys() - _MYSQL_SSL or mode not in _MYSQL_SSL_MODES:
        raise _not_taken_over(alias, "options about TLS")
    for name in told:
        raise _not_taken_over(alias, f"the option {name!r}")
    query |= {_MYSQL_SSL[name]: value for name, value in ssl.items()} | _MYSQL_SSL_MODES[mode]
    place = f"[{host}]" if ":" in host else host or "localhost"
    login = f"{quote(user, safe='')}@" if user else ""
    return f"mysql://{login}{place}{f':{port}' if port else ''}/{quote(database, safe='')}?{urlencode(query)}"


# --- SQLite -------------------------------------------------------------------------------------------------


def _sqlite(alias: str, parameters: dict[str, Any]) -> str:
    name = str(parameters["database"])
    if connections[alias].is_in_memory_db() or name.startswith("file:"):
        raise ConfigError(
            f"DATABASES[{alias!r}] is in memory or a file: URI, which no other process and no node can share: give it "
            "a file (for tests: its TEST['NAME'])"
        )
    return f"sqlite:///{Path(name).absolute()}"


_WAYS: dict[str, Callable[[str, dict[str, Any]], str]] = {"postgresql": _postgresql, "mysql": _mysql, "sqlite": _sqlite}
