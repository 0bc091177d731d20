"""What a database must be able to do on a connection: run transactions, and hold a lock that ends with the process."""

from __future__ import annotations

import abc
import re
import selectors
import socket
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from tenure.core.servers import Server
from tenure.store import statements
from tenure.store.dialects import Dialect, listed

if TYPE_CHECKING:
    from tenure.store.migrations import Schema

NAMED_ROLES = 8
"""How many roles a node that leaves names in notifications. If it held more, all other nodes check."""


class Gone(Exception):
    """The connection is gone. Whether the last statement took effect is unknown."""


class Failed(Exception):
    """A statement failed and was rolled back. The connection can still be used."""


class Step(NamedTuple):
    """One statement, before the dialect's words are filled in, and its parameters."""

    text: str
    parameters: dict[str, Any]


class Result(Protocol):
    """The result of a statement. Reading it may wait for the server; until one is read, steps are sent together."""

    @property
    def rows(self) -> Sequence[tuple[Any, ...]]:
        """Its rows; none for a statement that returns nothing."""

    @property
    def count(self) -> int:
        """How many rows it changed or returned."""


@dataclass(eq=False, repr=False)
class FetchedResult:
    """A result that was fetched already."""

    rows: Sequence[tuple[Any, ...]]
    count: int


_START_TIME = re.compile(r"[0-9]+\.[0-9]+:1")
"""The incarnation of a PostgreSQL server that hides its identity. It also hides whether it was a replica."""


def identity(start: str, row: tuple[Any, ...]) -> Server:
    """Return which server answered ``statements.WHERE`` with this row."""
    incarnation, place, was_replica = row
    timeline = int(incarnation.rsplit(":", 1)[1]) if ":" in incarnation else 1
    promoted = bool(was_replica) or timeline > 1 or _START_TIME.fullmatch(incarnation) is not None
    return Server(start, incarnation, timeline, place or "", promoted)


class Run(Protocol):
    """Runs some steps of the open transaction."""

    def __call__(self, *steps: Step) -> Sequence[Result]:
        """Run them in order."""


class Session(abc.ABC):
    """What the store needs from a connection. Most databases have no notifications, so nodes poll instead."""

    dialect: Dialect
    schema: Schema
    """How the database handles the tables."""
    pid = 0
    """The server's process behind this connection, 0 if there is none."""
    started = ""
    """When that process was started: a pid alone may be reused."""
    server_start = ""
    """When the server was started, as far as that matters."""
    encoding = "utf-8"
    """The encoding in which the database stores text, as a Python codec."""
    unreplicated = False
    """Whether the last transaction was committed without the replica that its commit should have waited for."""
    _server: Server | None = None

    @abc.abstractmethod
    def transaction(self) -> AbstractContextManager[Run]:
        """Open a transaction that commits on leaving the block, or rolls back on an exception."""

    def run(self, *steps: Step) -> Sequence[Result]:
        """Run some steps as one transaction."""
        with self.transaction() as run:
            return run(*steps)

    @abc.abstractmethod
    def read(self, *steps: Step) -> Sequence[Result]:
        """Run some queries in order, each with its own view of the data, without blocking writers."""

    def notify(self, namespace: str, payload: str, where: Step | None = None) -> None:
        """Notify the other nodes right after the next transaction, if it commits and ``where`` then finds a row.

        Best effort: a notification that fails does not affect the transaction, and the other nodes check once a second.
        """

    def notify_successors(self, namespace: str, me: str, roles: Step) -> None:
        """Notify, in the same way, one candidate for each vacant role, or all other nodes if there is none (R24).

        The step ``roles`` finds the roles, and for each the member that should take it. It runs after the commit.
        """

    def names(self, locked: Result) -> tuple[str, ...]:
        """Return which names a step with ``{keep}`` has locked."""
        return tuple(name for (name,) in locked.rows)

    def locked(self, locked: Result) -> str:
        """Return these names as the parameter ``locked`` of later steps of the transaction."""
        return listed(self.names(locked))

    def listen(self, namespace: str, kind: str) -> None:
        """Receive notifications of this kind from now on."""

    def server(self) -> Server:
        """Return which server this connection leads to. It cannot change under a connection."""
        if self._server is None:
            (row,) = self.read(Step(statements.WHERE, {}))[0].rows
            self._server = identity(self.server_start, row)
        return self._server

    @abc.abstractmethod
    def close(self) -> None:
        """Close the connection, and so release the locks that it holds."""


class LaneSession(Session):
    """A session that a lane can wait on and that another thread can cut."""

    @abc.abstractmethod
    def idle(self, waker: socket.socket, seconds: float | None) -> list[str]:
        """Wait for the waker, notifications, or the end of the connection."""

    def limit_notifications(self) -> None:
        """Stop listening for a while if there were too many notifications. The server may take long to answer."""

    @abc.abstractmethod
    def abort(self) -> None:
        """Make a call that hangs on this connection fail at once, from any thread."""


def wait_readable(files: Sequence[Any], seconds: float | None, event: int = selectors.EVENT_READ) -> bool:
    """Wait up to ``seconds`` until one of the files has something to read, or another event; return whether one has.

    It uses neither select(), which fails as soon as the application has a thousand files open, nor epoll, whose own
    descriptor a forked child would share.
    """
    with getattr(selectors, "PollSelector", selectors.SelectSelector)() as selector:
        for file in files:
            selector.register(file, event)
        return bool(selector.select(seconds))


class Sentinel(Protocol):
    """A lock that ends with the process (or connection) that holds it."""

    def hold(self, key: int) -> bool:
        """Take the lock exclusively; return False if another process has it."""

    def release(self, key: int) -> None:
        """Release the lock, so that another process can take it."""

    def wait(self, key: int, seconds: float) -> None:
        """Wait up to ``seconds`` until the lock is free. Returning proves nothing: check the lock afterwards."""

    def sweep(self, keys: set[int]) -> None:
        """Remove what dead members left behind; ``keys`` are those of living members. A server does that by itself."""

    def abandon(self) -> None:
        """Drop what a forked child inherited, without freeing the parent's lock. Only locks on files need this."""

    def duplicates(self) -> list[int]:
        """Return duplicates of the descriptors that carry the lock: it is held as long as one of them is open."""

    def standing(self, keys: Sequence[int]) -> set[int]:
        """Return which of the locks are held at this moment."""
