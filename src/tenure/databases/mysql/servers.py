"""Which servers speak MySQL's protocol and cannot be used, by what they say of themselves; and which take writes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

OLDEST = {"MariaDB": (10, 6), "MySQL": (8, 0)}
"""The first releases that skip locked rows and read JSON as a table."""
VARIABLES = ("read_only", "super_read_only", "innodb_read_only", "wsrep_on", "group_replication_single_primary_mode")
"""The global variables that the functions here need. Not every server has all of them."""
ACCESS_DENIED = 1227

_OFF = (None, "OFF", "0")


def kind_of(version: str) -> str:
    """Return ``MariaDB`` or ``MySQL``."""
    return "MariaDB" if "mariadb" in version.lower() else "MySQL"


def why_unusable(version: str, variables: Mapping[str, str]) -> str | None:
    """Return why no leader can be elected on a server, and what to do; None if there is no reason."""
    if "tidb" in version.lower():
        return (
            f"is TiDB ({version}), where LOCK IN SHARE MODE locks nothing, so no stale write would be refused: use "
            "MariaDB, or PostgreSQL"
        )
    kind = kind_of(version)
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST[kind]:
        wanted = ".".join(map(str, OLDEST[kind]))
        return f"runs {kind} {version}: upgrade it to {kind} {wanted} or newer"
    if variables.get("wsrep_on") == "ON":
        return (
            "is a Galera cluster, where a lock on one server does not stop writes on another: use a single server, or "
            "PostgreSQL"
        )
    if variables.get("group_replication_single_primary_mode") == "OFF":
        return (
            "is in a group with several primaries (Group Replication), where a lock on one server does not stop writes "
            "on another: switch the group to single-primary mode"
        )
    return None


def why_no_primary(variables: Mapping[str, str]) -> str | None:
    """Return why a server takes no writes, and what to do; None if it takes writes, as far as variables show."""
    if variables.get("innodb_read_only") not in _OFF:
        return (
            "is read-only (innodb_read_only), as readers of Aurora are; leaders are elected on the writer: give the "
            "end point of the cluster, which leads to the writer"
        )
    # A release may have more values than ON and OFF.
    if any(variables.get(name) not in _OFF for name in ("read_only", "super_read_only")):
        return "is read-only, as replicas are; leaders are elected on the primary: give the primary's URL"
    return None


def replication_query(version: str) -> str:
    """Return the statement that lists from which servers a server replicates."""
    return "show all slaves status" if kind_of(version) == "MariaDB" else "show replica status"


def needed_grant(version: str) -> str:
    """Return the privilege that :func:`replication_query` needs."""
    return "SLAVE MONITOR" if kind_of(version) == "MariaDB" else "REPLICATION CLIENT"


def sources(cursor: Any) -> list[str]:
    """Return from which servers a server replicates, after :func:`replication_query` was run."""
    names = [column[0] for column in cursor.description or ()]
    place = next((number for number, name in enumerate(names) if name in ("Master_Host", "Source_Host")), None)
    return [str(row[place]) if place is not None else "another server" for row in cursor.fetchall()]
