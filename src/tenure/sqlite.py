"""SQLite by the standard library: the embedded default, for processes on one machine.

One writer at a time holds the whole file, in short ``BEGIN IMMEDIATE`` transactions (a deferred one that turns into a
writer fails at once, whatever the time-out). The sentinel is an ``flock`` on a file of its own beside the database: the
kernel frees it when the process dies, and opening and closing the database elsewhere in the process cannot touch it.
Nobody can be told anything here, so the watcher looks at the sentinel and at the file's change counter many times a
second.

SQLite keeps its locks in the process's memory as well as in the kernel, and only the memory is inherited by a forked
child: after a fork in the middle of a transaction the child would find the file locked for ever, and with a connection
inherited it would later believe in locks that it does not hold. So a fork waits until the node's calls are through, and
the child closes the inherited connections before anything else runs there.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sqlite3
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tenure.asks import Server
from tenure.dialects import SQLITE
from tenure.errors import ConfigError, StoreUnavailable
from tenure.mounts import network_file_system
from tenure.session import Failed, Result, Run, Step, wait_readable

if os.name == "posix":
    import fcntl

SERVER = Server(start="sqlite", incarnation="sqlite")
OPEN_TIMEOUT_S = 15.0
"""How long a start waits for other writers. SQLite has no queue: of fifty that start at once, somebody waits long."""
POLL_S = 0.05
"""How often the watcher looks: half of this is the usual delay before a crash is noticed."""


@dataclass(frozen=True)
class FetchedResult:
    """A result that is there already."""

    rows: Sequence[tuple[Any, ...]]
    count: int


class SqliteSession:
    """One connection of the node's own."""

    dialect = SQLITE
    pid = 0
    started = ""
    encoding = "utf-8"

    def __init__(self, connection: sqlite3.Connection) -> None:
        """Take over a connection in autocommit mode."""
        self.connection = connection
        self.calling = threading.RLock()
        """Held during every call, and by a fork."""
        _sessions.add(self)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Run]:
        """Run steps in one transaction that holds the write lock from its beginning."""
        with self.calling:
            try:
                self.connection.execute("begin immediate")
                try:
                    yield self._run
                except BaseException:
                    self.connection.rollback()
                    raise
                self.connection.commit()
            except sqlite3.Error as error:
                if self.connection.in_transaction:
                    self.connection.rollback()
                raise Failed(str(error)) from error

    def run(self, *steps: Step) -> Sequence[Result]:
        """Run some steps as one transaction."""
        with self.transaction() as run:
            return run(*steps)

    def read(self, *steps: Step) -> Sequence[Result]:
        """Run some queries without keeping anybody from writing."""
        try:
            with self.calling:
                return self._run(*steps)
        except sqlite3.Error as error:
            raise Failed(str(error)) from error

    def _run(self, *steps: Step) -> Sequence[Result]:
        results = []
        for step in steps:
            cursor = self.connection.execute(self.dialect.text(step.text), step.parameters)
            results.append(FetchedResult(cursor.fetchall(), cursor.rowcount))
        return results

    def notify(self, namespace: str, payload: str) -> Step | None:
        """Return None: nobody can be told, they have to look."""
        return None

    def listen(self, namespace: str, kind: str) -> None:
        """Do nothing: there is nothing to hear."""

    def idle(self, waker: socket.socket, seconds: float | None) -> list[str]:
        """Wait for the waker; there are no notifications."""
        wait_readable([waker], seconds)
        return []

    def changes(self) -> int:
        """Return a number that differs after any other connection has written to the file."""
        try:
            with self.calling:
                return int(self.connection.execute("pragma data_version").fetchone()[0])
        except sqlite3.Error as error:
            raise Failed(str(error)) from error

    def server(self) -> Server:
        """Return the one server there is: the file."""
        return SERVER

    def abort(self) -> None:
        """Do nothing: no call here outlasts its time-out."""

    def close(self) -> None:
        """Close the connection."""
        with self.calling:
            self.connection.close()


_sessions: weakref.WeakSet[SqliteSession] = weakref.WeakSet()
_sentinels: weakref.WeakSet[FileSentinel] = weakref.WeakSet()
_opening = threading.RLock()
_held_back: list[SqliteSession] = []


def _before_fork() -> None:
    _opening.acquire()
    _held_back[:] = _sessions
    for session in _held_back:
        session.calling.acquire()


def _after_fork() -> None:
    for session in _held_back:
        session.calling.release()
    _held_back.clear()
    _opening.release()


def _after_fork_in_child() -> None:
    for session in _held_back:
        session.connection.close()
    for sentinel in list(_sentinels):
        sentinel.abandon()
    with contextlib.suppress(RuntimeError):  # a server that forks by itself may tell the child only
        _after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)


class FileSentinel:
    """A file per member; the lock on it stands as long as the process that took it.

    A file that is missing proves nothing (somebody may have cleaned up): then only silence ends the member.
    """

    def __init__(self, directory: Path, session: SqliteSession, stop: threading.Event) -> None:
        """Keep the files in ``directory``; ``stop`` cuts a wait short."""
        self._directory = directory
        self._session = session
        self._stop = stop
        self._held: dict[int, int] = {}
        self._changes = 0
        """The file's change counter before the last look: what is written during a look is seen by the next."""
        _sentinels.add(self)

    def hold(self, key: int) -> bool:
        """Create the file and lock it."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _opening:  # a child that inherited a descriptor which is not written down would keep the lock
            descriptor = os.open(self._path(key), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(descriptor)
                return False
            self._held[key] = descriptor
            return True

    def retake(self, key: int) -> bool:
        """Take the lock again, if it was ever let go."""
        return key in self._held or self.hold(key)

    def release(self, key: int) -> None:
        """Remove the file and let go."""
        descriptor = self._held.get(key)
        if descriptor is not None:
            self._path(key).unlink(missing_ok=True)
            with _opening:
                os.close(descriptor)
                del self._held[key]

    def abandon(self) -> None:
        """Close the inherited descriptors: the lock stays with the parent's, and falls when the parent dies."""
        with _opening:
            for descriptor in self._held.values():
                os.close(descriptor)
            self._held.clear()

    def duplicates(self) -> list[int]:
        """Return duplicates of the locked descriptors: a lock of flock() is that of the open file."""
        with _opening:
            return [os.dup(descriptor) for descriptor in self._held.values()]

    def wait(self, key: int, seconds: float) -> None:
        """Wait until the lock falls or somebody has written to the database, for so long at most."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            before, self._changes = self._changes, self._session.changes()
            if self._changes != before or not self.standing([key]) or self._stop.wait(POLL_S):
                return

    def standing(self, keys: Sequence[int]) -> set[int]:
        """Return which of the locks are held; what cannot be seen is taken to stand."""
        return {key for key in keys if key in self._held or not self._is_free(key)}

    def sweep(self, keys: set[int]) -> None:
        """Remove the files of members that are no more."""
        for path in self._directory.glob("*.lock"):
            if path.stem.isdigit() and int(path.stem) not in keys and self._is_free(int(path.stem)):
                path.unlink(missing_ok=True)

    def _is_free(self, key: int) -> bool:
        try:
            descriptor = os.open(self._path(key), os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return True

    def _path(self, key: int) -> Path:
        return self._directory / f"{key}.lock"


class SqliteConnector:
    """Opens connections to one file."""

    dialect = SQLITE

    def __init__(self, path: str, renew_every: float) -> None:
        """Name the file; it is created on the first connection."""
        if path in ("", ":memory:"):
            msg = "an in-memory SQLite database cannot be shared: give a file, e.g. sqlite:///app.db"
            raise ConfigError(msg)
        self.path = Path(path).absolute()
        shared = network_file_system(self.path)
        if shared:
            raise ConfigError(
                f"{str(self.path)!r} is on a network file system ({shared}), where SQLite's locks do not hold: give a "
                "file on a local disk, or use PostgreSQL"
            )
        self.sentinels = self.path.with_name(self.path.name + ".sentinels")
        self._busy_timeout_s = renew_every

    def __repr__(self) -> str:
        """Show the file."""
        return f"SqliteConnector({str(self.path)!r})"

    def connect(self, *, as_it_is: bool = False) -> sqlite3.Connection:
        """Open a plain connection in autocommit mode; ``as_it_is`` leaves the file's journal mode alone."""
        with _opening, contextlib.ExitStack() as stack:
            try:
                if not self.path.parent.is_dir():
                    raise StoreUnavailable(f"cannot open {str(self.path)!r}: there is no such directory; create it")
                for path in (self.path.parent, self.path, self.sentinels):
                    if path.exists() and not may_write(path):
                        raise StoreUnavailable(
                            f"cannot open {str(self.path)!r}: this user may not write to {str(path)!r}; give it the "
                            "permission, or another file"
                        )
                connection = sqlite3.connect(
                    self.path, timeout=OPEN_TIMEOUT_S, isolation_level=None, check_same_thread=False
                )
                stack.callback(connection.close)
                if not as_it_is:
                    _use_wal(connection)
                connection.execute("pragma synchronous = full")  # a token must not come back after a crash
            except (sqlite3.Error, OSError) as error:
                msg = f"cannot open {str(self.path)!r}: {error}"
                raise StoreUnavailable(msg) from None
            stack.pop_all()
        return connection

    def require(self) -> None:
        """Raise if the file is not there, instead of creating it."""
        if not self.path.is_file():
            raise StoreUnavailable(
                f"there is no file {str(self.path)!r}: no node has run there yet, or nodes were given another URL"
            )

    def open(self, *, as_it_is: bool = False) -> SqliteSession:
        """Open a session of the node's own. Until it is hurried, it waits for other writers as for a slow server."""
        with _opening:
            return SqliteSession(self.connect(as_it_is=as_it_is))

    def hurry(self, session: SqliteSession) -> None:
        """Let no statement of a session outlast a renewal interval from now on."""
        session.connection.execute(f"pragma busy_timeout = {round(self._busy_timeout_s * 1000)}").fetchone()


def may_write(path: Path) -> bool:
    """Whether this user may read and write a file, or list and change a directory."""
    return os.access(path, os.R_OK | os.W_OK, effective_ids=os.access in os.supports_effective_ids)


def _use_wal(connection: sqlite3.Connection) -> None:
    """Turn write-ahead logging on. Where several do that to a new file, it fails at once, whatever the time-out."""
    deadline = time.monotonic() + OPEN_TIMEOUT_S
    while True:
        try:
            connection.execute("pragma journal_mode = wal").fetchone()
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() >= deadline:
                raise
            time.sleep(0.01)
        else:
            return
