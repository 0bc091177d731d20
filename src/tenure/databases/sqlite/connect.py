"""Opens sessions on a SQLite file, and verifies which file that is."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from pathlib import Path

from tenure.databases.sqlite import filesystem
from tenure.databases.sqlite.sentinel import is_free
from tenure.databases.sqlite.session import SqliteSession, opening, sessions
from tenure.errors import ConfigError, StoreUnavailable

OPEN_ATTEMPTS = 5
OPEN_TIMEOUT_S = 15.0
"""How long a start waits for other writers. SQLite has no queue: one of fifty nodes that start at once waits long."""


class SqliteConnector:
    """Opens connections to one file."""

    def __init__(self, path: str, renew_every: float) -> None:
        """Check the path. The first connection creates the file."""
        if path in ("", ":memory:"):
            msg = "an in-memory SQLite database cannot be shared: give a file, e.g. sqlite:///app.db"
            raise ConfigError(msg)
        self.path = Path(path).absolute()
        shared = filesystem.network_file_system(self.path)
        if shared:
            raise ConfigError(
                f"{str(self.path)!r} is on a network file system ({shared}), where SQLite's locks do not hold: give a "
                "file on a local disk, or use PostgreSQL"
            )
        self._busy_timeout_s = renew_every

    def __repr__(self) -> str:
        return f"SqliteConnector({str(self.path)!r})"

    @property
    def sentinels(self) -> Path:
        """The directory of locks beside the file."""
        return filesystem.sentinels_of(self.path)

    def connect(self, *, as_it_is: bool = False) -> sqlite3.Connection:
        """Open a plain connection in autocommit mode; ``as_it_is`` leaves the file's journal mode alone."""
        return self._connect(as_it_is=as_it_is)[0]

    def _connect(self, *, as_it_is: bool) -> tuple[sqlite3.Connection, filesystem.DatabaseFile]:
        """Open a connection, and verify its file: the path must name the same file before and after."""
        with opening:
            for _ in range(OPEN_ATTEMPTS):
                # A symbolic link may lead elsewhere by now. SQLite's log is in the directory of the file itself.
                real = Path(os.path.realpath(self.path))
                try:
                    self._check_places(real)
                    _check_whole(real)
                    before = filesystem.file_id(real, companions=False) if real.exists() else ""
                    connection = self._connect_to(real, as_it_is=as_it_is)
                    with contextlib.ExitStack() as stack:
                        stack.callback(connection.close)
                        file = filesystem.DatabaseFile(
                            self.path, filesystem.file_id(self.path, companions=not as_it_is), not as_it_is
                        )
                        if before == filesystem.file_id(self.path, companions=False):
                            stack.pop_all()
                            return connection, file
                except (sqlite3.Error, OSError) as error:
                    raise StoreUnavailable(f"cannot open {str(self.path)!r}: {error}") from None
        raise StoreUnavailable(f"cannot open {str(self.path)!r}: it was replaced again and again while it was opened")

    def _check_places(self, real: Path) -> None:
        if not real.parent.is_dir():
            raise StoreUnavailable(
                f"cannot open {str(real)!r}: the directory {str(real.parent)!r} does not exist; create it"
            )
        for path in (real.parent, real, self.sentinels):
            if path.exists() and not filesystem.may_write(path):
                raise StoreUnavailable(
                    f"cannot open {str(real)!r}: this user may not write to {str(path)!r}; give this user the "
                    "permission, or use another file"
                )
        links = filesystem.hard_link_problem(real) if real.exists() else None
        if links:
            raise StoreUnavailable(f"cannot open {str(real)!r}: {links}")

    def _connect_to(self, real: Path, *, as_it_is: bool) -> sqlite3.Connection:
        connection = sqlite3.connect(real, timeout=OPEN_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        with contextlib.ExitStack() as stack:
            stack.callback(connection.close)
            # A token must not be issued again after a crash.
            connection.execute("pragma synchronous = full")
            if not as_it_is:
                _use_wal(connection)
                # A first read opens the log and its index.
                connection.execute("select count(*) from sqlite_master").fetchone()
            stack.pop_all()
        return connection

    def require(self) -> None:
        """Raise StoreUnavailable if the file does not exist."""
        if not self.path.is_file():
            raise StoreUnavailable(
                f"the file {str(self.path)!r} does not exist: no node has run there yet, or the nodes have another URL"
            )

    def open(self, *, as_it_is: bool = False) -> SqliteSession:
        """Open a session. Until :meth:`set_statement_timeout` is called, it waits long for other writers."""
        with opening:
            return SqliteSession(*self._connect(as_it_is=as_it_is))

    def set_statement_timeout(self, session: SqliteSession) -> None:
        """Limit the statements of a session to a renewal interval from now on."""
        session.connection.execute(f"pragma busy_timeout = {round(self._busy_timeout_s * 1000)}").fetchone()


def _check_whole(real: Path) -> None:
    """Raise StoreUnavailable if a node uses some, but not all, of the files that a connection to ``real`` would open.

    SQLite would then use one database with the log of another, and ruin both. If the node is in this process, the same
    index would be open twice in it, and closing one of the two drops the locks of both. Other processes then write
    without a lock, or truncate the index, and the next read of it ends a process with SIGBUS.
    """
    mine = [session for session in list(sessions) if session.is_open and session.file.companions]
    used: list[tuple[str, SqliteSession | Path]] = [
        *((session.file.id, session) for session in mine if os.path.realpath(session.file.path) == str(real)),
        *((lock.name.partition(".")[0], lock) for lock in filesystem.sentinels_of(real).glob("*.use")),
    ]
    there = [f"{filesystem.inode_of(f'{real}{suffix}'):x}" for suffix in ("", *filesystem.COMPANIONS)]
    for file, user in used:
        # The number 0 stands for a log that did not exist. Names of another shape are not those of a node's lock.
        numbers = zip(there, file.split("-")[1:], strict=False)
        same = [number == in_use for number, in_use in numbers if in_use != "0"]
        # The lock is tested last. A file that was in use before and after the path was read was also in use
        # meanwhile. And opening every node's lock for each connection would cost more than all the rest.
        if any(same) and not all(same) and _is_in_use(user):
            what = (
                f"the -wal or the -shm of {str(real)!r} while it was open, and with it the latest writes: stop "
                "every process that uses the file, check the file, and start the processes again"
                if same[0]
                else f"{str(real)!r} while it was open, and left its -wal or -shm: stop every process that uses the "
                "file, delete those two, and start the processes again"
            )
            raise StoreUnavailable(f"the database cannot be used as it is: a program has deleted or replaced {what}")


def _is_in_use(user: SqliteSession | Path) -> bool:
    """Whether a session of this process is open, or a node holds the lock that names its file."""
    return user.is_open if isinstance(user, SqliteSession) else not is_free(user) and user.exists()


def _use_wal(connection: sqlite3.Connection) -> None:
    """Turn on write-ahead logging. It is tried again if it fails: SQLite does not wait here for other processes."""
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
