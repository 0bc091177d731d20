"""Leader election for Python services, on the database they already have.

A node stands for roles, and one node at a time leads each of them. When the leader dies, another node leads
milliseconds later. The database itself refuses a write that is made under an old term.

    >>> import tenure
    >>> with tenure.Node("sqlite:///app.db") as node:
    ...     with node.lead("scheduler") as term:
    ...         run_scheduler()
"""

from __future__ import annotations

# This is a constant, because importing `typing` takes half as long as starting the interpreter.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from tenure import manual
    from tenure.aio.election import AsyncElection
    from tenure.aio.node import AsyncNode
    from tenure.aio.term import AsyncTerm, AsyncTransaction
    from tenure.databases.guards import guard_sql
    from tenure.databases.schema import tables_sql
    from tenure.election import Election
    from tenure.engine.recorder import Latency
    from tenure.errors import (
        ConfigError,
        Fenced,
        LeadershipLost,
        NodeClosed,
        NotCommitted,
        NotLeader,
        PoolerDetected,
        StoreUnavailable,
        TenureError,
        Unfenced,
        WaitTimeout,
    )
    from tenure.events import Deposed, Elected, Event, LeaderChanged, Resumed, Suspended
    from tenure.fence.fence import fence_sql
    from tenure.fence.verdicts import translate_unfenced
    from tenure.node import Node
    from tenure.registry import Registry
    from tenure.schedule.run import Run
    from tenure.schedule.schedule import Schedule
    from tenure.services.service import ServiceInfo
    from tenure.stats import JobStats, NodeStats, RoleStats
    from tenure.store.namespaces import WaitInfo
    from tenure.store.records import (
        Candidate,
        GuardedTable,
        JobRecord,
        LeaderInfo,
        MemberInfo,
        Overview,
        RoleInfo,
        RunRecord,
        TermRecord,
    )
    from tenure.term import Term, Transaction

__version__ = "0.2.0.dev0"

_HOMES = {
    "tenure.aio.election": "AsyncElection",
    "tenure.aio.node": "AsyncNode",
    "tenure.aio.term": "AsyncTerm AsyncTransaction",
    "tenure.election": "Election",
    "tenure.engine.recorder": "Latency",
    "tenure.errors": "ConfigError Fenced LeadershipLost NodeClosed NotCommitted NotLeader PoolerDetected "
    "StoreUnavailable TenureError Unfenced WaitTimeout",
    "tenure.events": "Deposed Elected Event LeaderChanged Resumed Suspended",
    "tenure.fence.fence": "fence_sql",
    "tenure.fence.verdicts": "translate_unfenced",
    "tenure.node": "Node",
    "tenure.registry": "Registry",
    "tenure.schedule.run": "Run",
    "tenure.schedule.schedule": "Schedule",
    "tenure.services.service": "ServiceInfo",
    "tenure.stats": "JobStats NodeStats RoleStats",
    "tenure.store.namespaces": "WaitInfo",
    "tenure.store.records": "Candidate GuardedTable JobRecord LeaderInfo MemberInfo Overview RoleInfo RunRecord "
    "TermRecord",
    "tenure.databases.guards": "guard_sql",
    "tenure.databases.schema": "tables_sql",
    "tenure.term": "Term Transaction",
}
"""The modules of the public names. They are loaded when they are first used, so that ``import tenure`` costs next to
nothing in the many processes of an application that never stand for a role."""

__all__ = ["Election", "Node", "Term", "Transaction", "__version__"]
__all__ += ["AsyncElection", "AsyncNode", "AsyncTerm", "AsyncTransaction"]
__all__ += ["Run", "RunRecord", "Schedule"]
__all__ += ["Candidate", "GuardedTable", "JobRecord", "LeaderInfo", "MemberInfo", "Overview"]
__all__ += ["Registry", "RoleInfo", "TermRecord"]
__all__ += ["WaitInfo"]
__all__ += ["Deposed", "Elected", "Event", "LeaderChanged", "Resumed", "Suspended"]
__all__ += ["JobStats", "Latency", "NodeStats", "RoleStats", "ServiceInfo"]
__all__ += ["ConfigError", "NodeClosed", "PoolerDetected", "StoreUnavailable", "TenureError", "WaitTimeout"]
__all__ += ["Fenced", "LeadershipLost", "NotCommitted", "NotLeader", "Unfenced"]
__all__ += ["fence_sql", "guard_sql", "manual", "tables_sql", "translate_unfenced"]


def __getattr__(name: str) -> object:
    """Load a public name from its module."""
    import importlib  # noqa: PLC0415 - `import tenure` does without it

    if name == "manual":
        return importlib.import_module("tenure.manual")
    for home, names in _HOMES.items():
        if name in names.split():
            globals()[name] = thing = getattr(importlib.import_module(home), name)
            return thing
    raise AttributeError(f"module 'tenure' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names, loaded or not."""
    return __all__
