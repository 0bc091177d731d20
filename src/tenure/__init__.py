"""Leader election for Python services, on the database they already have.

A node stands for roles; one node at a time leads each of them; when it dies, another leads milliseconds later; and the
database itself refuses a write made under an old term.

    >>> import tenure
    >>> with tenure.Node("sqlite:///app.db") as node:
    ...     with node.lead("scheduler") as term:
    ...         run_scheduler()
"""

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
from tenure.node import Node
from tenure.term import Term, Transaction
from tenure.values import Candidate, LeaderInfo, TermRecord
from tenure.version import __version__

__all__ = [
    "Candidate",
    "ConfigError",
    "Deposed",
    "Elected",
    "Election",
    "Event",
    "Fenced",
    "LeaderChanged",
    "LeaderInfo",
    "LeadershipLost",
    "Node",
    "NodeClosed",
    "NotLeader",
    "PoolerDetected",
    "Resumed",
    "StoreUnavailable",
    "Suspended",
    "TenureError",
    "Term",
    "TermRecord",
    "Transaction",
    "WaitTimeout",
    "__version__",
]
