"""The errors that Tenure raises, as a tree.

TenureError
├── ConfigError           an argument, URL or setting that cannot work; also a ValueError
├── StoreUnavailable      the database cannot be reached, or cannot be used (read-only, a standby)
│   └── PoolerDetected    a sentinel was asked for, and a connection pooler is in the way
├── WaitTimeout           the time given to wait ran out; also a TimeoutError
├── NodeClosed            the node is closed, or was never started, or belongs to another process
├── NotCommitted          a block of `term.transaction()` that was not committed as one fenced transaction
└── NotLeader             this node does not hold the role
    ├── LeadershipLost    it held the role, and its term is over
    └── Fenced            the database refused the term inside a transaction

Every message names the value and what to do about it. No message carries a password.
"""

from __future__ import annotations


class TenureError(Exception):
    """The base class of all errors that Tenure raises on purpose."""


class ConfigError(TenureError, ValueError):
    """An argument, URL or setting cannot work; the message names it and the remedy."""


class StoreUnavailable(TenureError):
    """The database cannot be reached, or cannot be written to."""


class PoolerDetected(StoreUnavailable):
    """The URL leads through a connection pooler, where no client can keep a session lock."""


class WaitTimeout(TenureError, TimeoutError):
    """The time given to wait ran out."""


class NodeClosed(TenureError):
    """The node is not running (closed, not started, or inherited by a forked child)."""


class NotCommitted(TenureError):
    """A block of ``term.transaction()`` was not committed as one fenced transaction.

    Either a statement failed, its error was swallowed, and the database rolled the transaction back: then nothing was
    committed. Or a statement ended the transaction inside the block: then what came after it was rolled back.
    """


class NotLeader(TenureError):
    """This node does not hold the role at this moment.

    ``token`` is that of the term that is over; None if the error is not about a term.
    """

    def __init__(self, message: str, *, role: str | None = None, token: int | None = None) -> None:
        """Keep the message, and the term that it is about."""
        super().__init__(message)
        self.role = role
        self.token = token


class LeadershipLost(NotLeader):
    """The term is over; it never comes back. A new election gives a new term with a new token."""


class Fenced(NotLeader):
    """The database refused the term: the transaction cannot commit.

    ``retryable`` is True if the same term may succeed in a new transaction (a serialization failure under
    REPEATABLE READ or SERIALIZABLE); False if the term is no longer the latest.
    """

    def __init__(
        self, message: str, *, role: str | None = None, token: int | None = None, retryable: bool = False
    ) -> None:
        """Keep the message, the term that it is about, and whether a new transaction of that term may succeed."""
        super().__init__(message, role=role, token=token)
        self.retryable = retryable


class Unfenced(NotLeader):
    """A guarded table refused a write, because the transaction is not fenced for the table's role.

    ``term.transaction()`` raises it. Other connections raise their driver's error, which
    :func:`tenure.translate_unfenced` turns into this one.
    """
