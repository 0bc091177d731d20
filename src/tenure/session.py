"""A connection of the node's own, and how a transaction runs on it. One implementation per database driver."""

from __future__ import annotations

import selectors
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from tenure.asks import Server
from tenure.dialects import Dialect


class Gone(Exception):
    """The connection is gone, and with it the knowledge of what became of the last statement."""


class Failed(Exception):
    """A statement failed and was rolled back; the connection is as good as before."""


class Step(NamedTuple):
    """One statement (in the common text) with its parameters."""

    text: str
    parameters: dict[str, Any]


class Result(Protocol):
    """What a statement gave. Looking at it may wait for the server, so steps that nobody looks at travel together."""

    @property
    def rows(self) -> Sequence[tuple[Any, ...]]:
        """Its rows; none for a statement that returns nothing."""
        ...

    @property
    def count(self) -> int:
        """How many rows it changed or returned."""
        ...


class Run(Protocol):
    """Runs some steps of the open transaction."""

    def __call__(self, *steps: Step) -> Sequence[Result]:
        """Run them in order."""
        ...


class Session(Protocol):
    """What the store needs of a connection."""

    dialect: Dialect
    pid: int
    """The server's process behind this connection, 0 where there is none."""
    started: str
    """When that process was started: a pid alone may be reused."""
    encoding: str
    """What the database can hold, as a Python codec."""

    def transaction(self) -> AbstractContextManager[Run]:
        """Open a transaction that commits on leaving the block, or rolls back on an exception."""
        ...

    def run(self, *steps: Step) -> Sequence[Result]:
        """Run some steps as one transaction."""
        ...

    def read(self, *steps: Step) -> Sequence[Result]:
        """Run some queries in order, each with a view of its own, without keeping anybody from writing."""
        ...

    def notify(self, namespace: str, payload: str) -> Step | None:
        """Return the step that tells the other nodes, delivered on commit; None where they have to look."""
        ...

    def listen(self, namespace: str, kind: str) -> None:
        """Hear notifications of this kind from now on."""
        ...

    def server(self) -> Server:
        """Return which server this connection leads to."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


def wait_readable(files: Sequence[Any], seconds: float | None) -> None:
    """Wait until one of the files has something to read, for so long at most.

    Not by select(), which fails as soon as the application has a thousand files open, and not by epoll, whose own
    descriptor a forked child would share.
    """
    with getattr(selectors, "PollSelector", selectors.SelectSelector)() as selector:
        for file in files:
            selector.register(file, selectors.EVENT_READ)
        selector.select(seconds)


class Sentinel(Protocol):
    """A lock that lives and dies with the process (or connection) that holds it."""

    def hold(self, key: int) -> bool:
        """Take the lock exclusively; False if somebody else has it."""
        ...

    def retake(self, key: int) -> bool:
        """Take the lock again on a new connection, from an older connection of ours if that still has it."""
        ...

    def release(self, key: int) -> None:
        """Let go of the lock."""
        ...

    def wait(self, key: int, seconds: float) -> None:
        """Wait until nobody holds the lock, for so long at most. An alarm, not a proof: look afterwards."""
        ...

    def sweep(self, keys: set[int]) -> None:
        """Remove what dead members left behind; ``keys`` are those of the living."""
        ...

    def abandon(self) -> None:
        """Let go of what a forked child inherited, without freeing the parent's lock."""
        ...

    def duplicates(self) -> list[int]:
        """Return duplicates of the descriptors on which the lock stands: it stands as long as one of them is open."""
        ...

    def standing(self, keys: Sequence[int]) -> set[int]:
        """Return which of the locks are held at this moment."""
        ...
