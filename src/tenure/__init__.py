"""Leader election for Python services, on the database they already have.

A node stands for roles; one node at a time leads each of them; when it dies, another leads milliseconds later; and the
database itself refuses a write made under an old term.

    >>> import tenure
    >>> with tenure.Node("sqlite:///app.db") as node:
    ...     with node.lead("scheduler") as term:
    ...         run_scheduler()
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from tenure.version import __version__

if TYPE_CHECKING:
    from tenure import manual
    from tenure.async_election import AsyncElection
    from tenure.async_node import AsyncNode
    from tenure.async_term import AsyncTerm, AsyncTransaction
    from tenure.connections import fence_sql
    from tenure.election import Election
    from tenure.errors import (
        ConfigError,
        Fenced,
        LeadershipLost,
        NodeClosed,
        NotLeader,
        PoolerDetected,
        StoreUnavailable,
        TenureError,
        WaitTimeout,
    )
    from tenure.events import Deposed, Elected, Event, LeaderChanged, Resumed, Suspended
    from tenure.meter import Latency, NodeStats, RoleStats
    from tenure.node import Node
    from tenure.registry import MemberInfo, Registry, RoleInfo
    from tenure.schema import tables_sql
    from tenure.services import ServiceInfo
    from tenure.term import Term, Transaction
    from tenure.values import Candidate, JobRecord, LeaderInfo, TermRecord

_HOMES = {
    "tenure.async_election": ("AsyncElection",),
    "tenure.async_node": ("AsyncNode",),
    "tenure.async_term": ("AsyncTerm", "AsyncTransaction"),
    "tenure.connections": ("fence_sql",),
    "tenure.election": ("Election",),
    "tenure.errors": (
        "ConfigError",
        "Fenced",
        "LeadershipLost",
        "NodeClosed",
        "NotLeader",
        "PoolerDetected",
        "StoreUnavailable",
        "TenureError",
        "WaitTimeout",
    ),
    "tenure.events": ("Deposed", "Elected", "Event", "LeaderChanged", "Resumed", "Suspended"),
    "tenure.meter": ("Latency", "NodeStats", "RoleStats"),
    "tenure.node": ("Node",),
    "tenure.registry": ("MemberInfo", "Registry", "RoleInfo"),
    "tenure.schema": ("tables_sql",),
    "tenure.services": ("ServiceInfo",),
    "tenure.term": ("Term", "Transaction"),
    "tenure.values": ("Candidate", "JobRecord", "LeaderInfo", "TermRecord"),
}
"""Where the public names live. They are loaded when they are first used, so that ``import tenure`` costs next to
nothing in the many processes of an application that never elect anybody."""

__all__ = [
    "AsyncElection",
    "AsyncNode",
    "AsyncTerm",
    "AsyncTransaction",
    "Candidate",
    "ConfigError",
    "Deposed",
    "Elected",
    "Election",
    "Event",
    "Fenced",
    "JobRecord",
    "Latency",
    "LeaderChanged",
    "LeaderInfo",
    "LeadershipLost",
    "MemberInfo",
    "Node",
    "NodeClosed",
    "NodeStats",
    "NotLeader",
    "PoolerDetected",
    "Registry",
    "Resumed",
    "RoleInfo",
    "RoleStats",
    "ServiceInfo",
    "StoreUnavailable",
    "Suspended",
    "TenureError",
    "Term",
    "TermRecord",
    "Transaction",
    "WaitTimeout",
    "__version__",
    "fence_sql",
    "manual",
    "tables_sql",
]


def __getattr__(name: str) -> object:
    """Load a public name from where it lives."""
    if name == "manual":
        return importlib.import_module("tenure.manual")
    for home, names in _HOMES.items():
        if name in names:
            globals()[name] = thing = getattr(importlib.import_module(home), name)
            return thing
    raise AttributeError(f"module 'tenure' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Show the public names, loaded or not."""
    return __all__
