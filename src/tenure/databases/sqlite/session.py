"""A session on a SQLite file, and what becomes of it in a forked child.

Transactions begin with ``BEGIN IMMEDIATE``: a deferred transaction that becomes a writer fails at once if another one
writes, whatever the time-out.

SQLite keeps its locks in the memory of the process as well as in the kernel, and a forked child inherits only the
memory. After a fork in the middle of a transaction, the child would find the file locked for ever. With an inherited
connection it would later believe in locks that it does not hold. So a fork waits for the calls that are under way, and
the child closes the inherited connections before any other code runs there.
"""

from __future__ import annotations

import contextlib
import socket
import sqlite3
import threading
import time
import weakref
from collections.abc import Iterator, Sequence

from tenure.base import fork
from tenure.core.servers import Server
from tenure.databases.sqlite.filesystem import DatabaseFile
from tenure.databases.sqlite.schema import SqliteSchema
from tenure.store.dialects import SQLITE
from tenure.store.session import Failed, FetchedResult, LaneSession, Result, Run, Step, wait_readable

FILE_POLL_S = 0.2
"""How often an idle node checks that its path still names its file."""


class SqliteSession(LaneSession):
    """One of the node's connections."""

    dialect = SQLITE
    schema = SqliteSchema(SQLITE)

    def __init__(self, connection: sqlite3.Connection, file: DatabaseFile) -> None:
        """Take over a connection to a file, in autocommit mode."""
        self.connection = connection
        self.file = file
        self.is_open = True
        self.calling = threading.RLock()
        """Held during every call, and by a fork."""
        sessions.add(self)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Run]:
        """Run steps in one transaction that holds the write lock from its beginning.

        A commit counts only if it went to the file that other processes find at the path.
        """
        with self.calling, self._file_checked():
            try:
                self.connection.execute("begin immediate")
                try:
                    yield self._run
                except BaseException:
                    self.connection.rollback()
                    raise
                self.connection.commit()
            except sqlite3.Error:
                if self.connection.in_transaction:
                    self.connection.rollback()
                raise

    @contextlib.contextmanager
    def _file_checked(self) -> Iterator[None]:
        """Raise Gone if the path names another file by now, whether SQLite has noticed that or not."""
        try:
            yield
        except sqlite3.Error as error:
            self.file.check()
            raise Failed(str(error)) from error
        self.file.check()

    def read(self, *steps: Step) -> Sequence[Result]:
        """Run some queries without blocking writers."""
        with self.calling, self._file_checked():
            return self._run(*steps)

    def _run(self, *steps: Step) -> Sequence[Result]:
        results = []
        for step in steps:
            cursor = self.connection.execute(self.dialect.text(step.text), step.parameters)
            results.append(FetchedResult(cursor.fetchall(), cursor.rowcount))
        return results

    def idle(self, waker: socket.socket, seconds: float | None) -> list[str]:
        """Wait for the waker, or until the path names another file. There are no notifications."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while True:
            left = FILE_POLL_S if deadline is None else min(FILE_POLL_S, deadline - time.monotonic())
            is_woken = wait_readable([waker], max(0.0, left))
            # Also when woken: a thread that is woken all the time would otherwise never check.
            self.file.check()
            if is_woken or left < FILE_POLL_S:
                return []

    def changes(self) -> int:
        """Return a number that changes when another connection has written to the file."""
        with self.calling, self._file_checked():
            return int(self.connection.execute("pragma data_version").fetchone()[0])

    def server(self) -> Server:
        """Return the file as the server."""
        return Server(start="sqlite", incarnation="sqlite", file=self.file.id)

    def abort(self) -> None:
        """Do nothing: every call ends within its time-out."""

    def close(self) -> None:
        """Close the connection."""
        with self.calling:
            # This comes first. Closing the last connection deletes the log, and a thread that opens a connection
            # meanwhile would miss it.
            self.is_open = False
            self.connection.close()


sessions: weakref.WeakSet[SqliteSession] = weakref.WeakSet()
opening = threading.RLock()
"""Held while connections and lock files are opened, and by a fork."""
_held_back: list[SqliteSession] = []
"""The sessions that the current fork has stopped."""


def _before_fork() -> None:
    opening.acquire()
    _held_back[:] = sessions
    for session in _held_back:
        session.calling.acquire()


def _after_fork() -> None:
    for session in _held_back:
        session.calling.release()
    _held_back.clear()
    opening.release()


def _after_fork_in_child() -> None:
    for session in _held_back:
        session.connection.close()
        session.is_open = False
    # A server that forks without Python may call the hooks of the child only. Then this thread holds none
    # of the locks.
    with contextlib.suppress(RuntimeError):
        _after_fork()


fork.register(fork.Place.SQLITE, before=_before_fork, in_parent=_after_fork, in_child=_after_fork_in_child)
