"""The settings in ``TENURE``, and the URL of the database that they name.

The node opens its own connections to Django's database, with the parameters that Django would give its driver
(``get_connection_params()``, so third-party backends and their tokens work, too). ``databases/handover.py`` lists the
parameters that are handed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import DEFAULT_DB_ALIAS, connections
from django.utils.connection import ConnectionDoesNotExist

from tenure.base.tracebacks import without_locals
from tenure.databases import handover
from tenure.errors import ConfigError

KEYS = (
    *("DATABASE", "URL", "PASSWORD", "DIRECT_URL", "NAME", "NAMESPACE", "TTL", "RENEW_EVERY", "TAKEOVER", "MODE"),
    *("SCHEMA", "METADATA", "START"),
)


@without_locals
def node_arguments() -> dict[str, Any]:
    """Return the arguments for a ``tenure.Node``, by the settings; raise ConfigError for settings that cannot work."""
    given = getattr(settings, "TENURE", {})
    if not isinstance(given, Mapping):
        raise ConfigError(f"TENURE must be a dict, not a {type(given).__name__}")
    for key in given:
        if key not in KEYS:
            raise ConfigError(f"TENURE has the unknown key {key!r}: use only {', '.join(KEYS)}")
    arguments = {key.lower(): value for key, value in given.items() if key != "DATABASE"}
    if "URL" in given:
        if "DATABASE" in given:
            raise ConfigError("TENURE has both DATABASE and URL: leave one of them out")
        return arguments
    if "PASSWORD" in given:
        raise ConfigError("TENURE has PASSWORD without URL: leave it out, since DATABASES has the password")
    return arguments | _target_of(given.get("DATABASE", DEFAULT_DB_ALIAS))


_VENDORS = {"postgresql": handover.postgres_url, "mysql": handover.mysql_url, "sqlite": handover.sqlite_url}


def _target_of(alias: str) -> dict[str, Any]:
    """Return the URL of one of Django's databases, without the password, and a function that returns the password."""
    try:
        vendor = connections[alias].vendor
        translate = _VENDORS.get(vendor)
        if translate is None:
            raise ConfigError(
                f"DATABASES[{alias!r}] is on {vendor}, but Tenure needs PostgreSQL, MariaDB or SQLite: set "
                "TENURE['DATABASE'] or TENURE['URL'] to another database"
            )
        options = _driver_options(alias)
    except ConnectionDoesNotExist:
        raise ConfigError(f"TENURE['DATABASE'] is {alias!r}, which is not in DATABASES: use one of its keys") from None
    except ImproperlyConfigured as error:
        raise ConfigError(f"DATABASES[{alias!r}] cannot be used: {error}") from None
    # Keep the password in no variable: tools that report errors show local variables.
    has_password = bool(options.pop("password", None))
    source = handover.Source(
        f"DATABASES[{alias!r}]",
        remedy="set TENURE['URL'] to the database for the node's own connections",
        file_remedy="give it a file (for tests: its TEST['NAME'])",
    )
    url = translate(source, options)
    return {"url": url, "password": lambda: _driver_options(alias)["password"]} if has_password else {"url": url}


def _driver_options(alias: str) -> dict[str, Any]:
    """Return the parameters that Django would give its driver now. No connection is opened."""
    connection = connections[alias]
    options: dict[str, Any] = connection.get_connection_params()
    # Django sets the role after it has connected.
    role = connection.settings_dict["OPTIONS"].get("assume_role") if connection.vendor == "postgresql" else None
    if role:
        options["options"] = f"{options.get('options') or ''} {handover.server_setting('role', role)}".strip()
    return options
