"""A database of Django's settings, from the URL that Tenure gets."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote, urlsplit

ENGINES = {"postgresql": "postgresql", "mysql": "mysql", "sqlite": "sqlite3"}


def database(url: str) -> dict[str, Any]:
    """One value of DATABASES. Django's driver for MariaDB is another one than Tenure's, so PyMySQL stands in for it."""
    parts = urlsplit(url)
    if parts.scheme == "mysql":
        import pymysql

        pymysql.install_as_MySQLdb()
    return {
        "ENGINE": f"django.db.backends.{ENGINES[parts.scheme]}",
        "NAME": parts.path[1:],
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": parts.hostname or "",
        "PORT": parts.port or "",
    }
