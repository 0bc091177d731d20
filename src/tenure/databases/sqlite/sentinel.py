"""The sentinel on SQLite: a file for each member, with an ``flock`` on it.

The kernel frees the lock when the process dies. The file is beside the database, so a process that opens and closes the
database does not touch the lock.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

from tenure.base import fork
from tenure.databases.sqlite.session import SqliteSession, opening

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]

UNSUPPORTED = "SQLite needs locks on files that end with their process (flock), which this system lacks"
"""Windows has `msvcrt.locking`, but no open file can be removed there, and the sentinel does that."""
REMEDY = "use PostgreSQL or MariaDB, by TENURE_URL or as an argument"

POLL_S = 0.05
"""How often the watcher polls. A crash is noticed after half of this on average."""


def is_supported() -> bool:
    """Whether this system has the locks that the sentinels need."""
    return fcntl is not None


class LockedFiles:
    """Files that this process has created and locked. The kernel frees the locks when the process dies."""

    def __init__(self) -> None:
        self._held: dict[Path, int] = {}
        _locked.add(self)

    def lock(self, path: Path) -> bool:
        """Create a file and lock it; False if another process has locked it, or is just testing the lock."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # No fork may happen before the descriptor is recorded: a child would keep it open, and the lock with it.
        with opening:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(descriptor)
                return False
            self._held[path] = descriptor
            return True

    def unlock(self, path: Path) -> None:
        """Remove a file and free its lock, if this object holds it."""
        descriptor = self._held.get(path)
        if descriptor is not None:
            path.unlink(missing_ok=True)
            with opening:
                os.close(descriptor)
                del self._held[path]

    def visible(self, path: Path) -> bool:
        """Whether this object holds a file's lock, and other processes still find the file at its path."""
        try:
            return path in self._held and os.path.samestat(os.fstat(self._held[path]), path.stat())
        except OSError:
            return False

    def __contains__(self, path: Path) -> bool:
        """Whether this object holds a file's lock."""
        return path in self._held

    def abandon(self) -> None:
        """Close the descriptors in a forked child. The parent keeps the locks, which end when the parent dies."""
        with opening:
            for descriptor in self._held.values():
                os.close(descriptor)
            self._held.clear()

    def duplicates(self) -> list[int]:
        """Return duplicates of the descriptors. A lock by flock() is held as long as one of them is open."""
        with opening:
            return [os.dup(descriptor) for descriptor in self._held.values()]


def is_free(path: Path) -> bool:
    """Whether a file exists and is not locked. A file that cannot be opened counts as locked."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


class FileSentinel:
    """A file for each member. The lock on it ends with the process that took it.

    A missing file proves nothing, because a program may have deleted it. Such a member is ended only for its silence.
    """

    def __init__(self, directory: Path, session: SqliteSession, stop: threading.Event) -> None:
        """Keep the files in ``directory``; ``stop`` ends a wait."""
        self._directory = directory
        self._session = session
        self._stop = stop
        self._files = LockedFiles()
        self._changes = 0
        """The change counter before the last check, so that the next one sees what was written during that check."""

    def hold(self, key: int) -> bool:
        """Create the file, and lock it."""
        return self._files.lock(self._path(key))

    def release(self, key: int) -> None:
        """Remove the file, and free its lock."""
        self._files.unlock(self._path(key))

    def abandon(self) -> None:
        """Close the descriptors, and leave the files."""
        self._files.abandon()

    def duplicates(self) -> list[int]:
        """Return duplicates of the locked descriptors."""
        return self._files.duplicates()

    def wait(self, key: int, seconds: float) -> None:
        """Wait up to ``seconds`` until the lock is free or another connection has written to the database."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            before, self._changes = self._changes, self._session.changes()
            if self._changes != before or not self.standing([key]) or self._stop.wait(POLL_S):
                return

    def standing(self, keys: Sequence[int]) -> set[int]:
        """Return which of the locks are held. A lock that cannot be tested counts as held."""
        return {key for key in keys if self._path(key) in self._files or not is_free(self._path(key))}

    def sweep(self, keys: set[int]) -> None:
        """Remove the files of former members."""
        for path in self._directory.glob("*.lock"):
            if path.stem.isdigit() and int(path.stem) not in keys and is_free(path):
                path.unlink(missing_ok=True)

    def _path(self, key: int) -> Path:
        return self._directory / f"{key}.lock"


_locked: weakref.WeakSet[LockedFiles] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for locked in list(_locked):
        locked.abandon()


fork.register(fork.Place.SQLITE_LOCKS, in_child=_after_fork_in_child)
