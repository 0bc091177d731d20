"""What can go wrong, as a tree.

TenureError
├── ConfigError           an argument, URL or setting that cannot work; also a ValueError
├── StoreUnavailable      the database cannot be reached, or is not fit (read-only, a standby)
├── PoolerDetected        a sentinel was asked for, and a connection pooler is in the way
├── WaitTimeout           nobody was elected in time; also a TimeoutError
├── NodeClosed            the node is closed, or was never started, or belongs to another process
└── NotLeader             this node does not hold the role
    ├── LeadershipLost    it did hold it, and the term is over
    └── Fenced            the database refused the term inside a transaction

Every message names the value and what to do about it. No message carries a password.
"""

from __future__ import annotations


class TenureError(Exception):
    """Base of everything that Tenure raises on purpose."""


class ConfigError(TenureError, ValueError):
    """An argument, URL or setting cannot work; the message says which and what would."""


class StoreUnavailable(TenureError):
    """The database cannot be reached, or cannot be written to."""


class PoolerDetected(StoreUnavailable):
    """The URL leads through a connection pooler, where a session lock belongs to nobody."""


class WaitTimeout(TenureError, TimeoutError):
    """The time given to wait ran out."""


class NodeClosed(TenureError):
    """The node is not running (closed, not started, or inherited by a forked child)."""


class NotLeader(TenureError):
    """This node does not hold the role at this moment.

    ``token`` is that of the term that is over; None where it is not about one.
    """

    def __init__(self, message: str, *, role: str | None = None, token: int | None = None) -> None:
        """Keep the message, and which term it is about."""
        super().__init__(message)
        self.role = role
        self.token = token


class LeadershipLost(NotLeader):
    """The term is over; it never comes back. A new election gives a new term with a new token."""


class Fenced(NotLeader):
    """The database refused the term: the transaction cannot commit.

    ``retryable`` is True where the same term may succeed in a new transaction (a serialization failure under
    REPEATABLE READ or SERIALIZABLE); False where the term is no longer the latest.
    """

    def __init__(
        self, message: str, *, role: str | None = None, token: int | None = None, retryable: bool = False
    ) -> None:
        """Keep the message, which term it is about, and whether a new transaction of the same term may succeed."""
        super().__init__(message, role=role, token=token)
        self.retryable = retryable
