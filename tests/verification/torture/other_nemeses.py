"""What is done to MariaDB, and to a file of SQLite's; what differs from PostgreSQL."""

from __future__ import annotations

import contextlib
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.history import now_ns
from tests.support.store_by_hand import connect
from tests.verification.torture.server_nemeses import (
    ConnectionLimit,
    MigrationLock,
    OnServer,
    Privileges,
    RestartImmediate,
    Terminate,
)

# --- MariaDB ------------------------------------------------------------------------------------------------


class MariaDbTerminate(Terminate):
    name, what = "terminate", "KILL of any node's connections, twice"

    def strike(self) -> None:
        self.heal()

    def heal(self) -> None:
        numbers = self.arena.server.connections(self.arena.dbname)
        if numbers:
            since, number = now_ns(), self.chance.choice(numbers)
            controlled = f"select name from tenure_members where control_pid = {number} and ended_at is null"
            with contextlib.suppress(OSError):
                names = [name for (name,) in self.arena.execute(controlled)]
                self.arena.server.execute(f"kill {number}")
                self.has_cut(names, since)


class MariaDbConnectionLimit(ConnectionLimit):
    def connect(self) -> Any:
        return connect(self.arena.server.url(self.arena.dbname), connect_timeout=3)


class WaitTimeout(OnServer):
    name, what = "wait-timeout", "wait_timeout = 1 s for the whole server"
    lasts = (0.5, 1.2)

    def strike(self) -> None:
        self.arena.server.execute("set global wait_timeout = 1")

    def heal(self) -> None:
        self.arena.server.execute("set global wait_timeout = 28800")

    def bound(self) -> float:
        return 0.0


class MariaDbMigrationLock(MigrationLock):
    def strike(self) -> None:
        self.connection = self.arena.server.connect(self.arena.dbname)
        tables = self.chance.choice([["tenure_roles"], ["tenure_members"], ["tenure_roles", "tenure_members"]])
        self.target = ", ".join(tables)
        with self.connection.cursor() as cursor:
            cursor.execute("lock tables " + ", ".join(f"{table} write" for table in tables))

    def heal(self) -> None:
        self.connection.close()


class MariaDbPrivileges(Privileges):
    def strike(self) -> None:
        self.arena.execute(r"revoke all on `test\_%`.* from tenure@'%'")

    def heal(self) -> None:
        self.arena.execute(r"grant all on `test\_%`.* to tenure@'%'")


class MariaDbKill(RestartImmediate):
    name, what = "kill-mariadb", "kill -9 of the server, and a start"


# --- SQLite -------------------------------------------------------------------------------------------------

WRITER = """
import sqlite3, sys, time
connection = sqlite3.connect(sys.argv[1], timeout=2, isolation_level=None)
try:
    connection.execute("begin immediate")
    connection.execute("insert into ticks (token, node) values (null, 'writer')")
except sqlite3.OperationalError:
    pass  # locked already: a node is stopped inside a write transaction, by another nemesis of the step
print("inside", flush=True)
time.sleep(3600)
"""


class WriterStopped(OnServer):
    name, what = "writer-stopped", "another process is stopped inside a write transaction, and goes on"
    lasts = (0.2, 1.4)

    def strike(self) -> None:
        path = self.arena.cluster.url.partition(":///")[2]
        self.writer = subprocess.Popen([sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE)
        assert self.writer.stdout is not None
        self.writer.stdout.readline()
        self.writer.send_signal(signal.SIGSTOP)

    def heal(self) -> None:
        self.writer.kill()
        self.writer.communicate()


class WriterKilled(WriterStopped):
    name, what = "writer-killed", "another process is killed inside a write transaction"
    lasts = (0.05, 0.3)


class FileLocked(OnServer):
    name, what = "migration-lock", "somebody's migration holds the whole database locked"
    lasts = (0.3, 1.4)

    def strike(self) -> None:
        path = self.arena.cluster.url.partition(":///")[2]
        self.connection = sqlite3.connect(path, timeout=2, isolation_level=None)
        # A node that another nemesis of the step has stopped inside a write transaction has the file locked already.
        with contextlib.suppress(sqlite3.OperationalError):
            self.connection.execute("begin exclusive")

    def heal(self) -> None:
        self.connection.close()


class FileReplaced(OnServer):
    name, what = "file-replaced", "the file is replaced by a copy of itself"
    lasts = (0.05, 0.2)

    def strike(self) -> None:
        """Copy and replace while nobody can write, so that no token and no write is lost by the copy itself."""
        path = Path(self.arena.cluster.url.partition(":///")[2])
        copy = path.with_name("copy.db")
        with contextlib.closing(sqlite3.connect(path, timeout=2, isolation_level=None)) as one:
            try:
                one.execute("begin immediate")
            except sqlite3.OperationalError:
                return  # a node is stopped inside a write transaction, by another nemesis of the step
            with (
                contextlib.closing(sqlite3.connect(path)) as reader,
                contextlib.closing(sqlite3.connect(copy)) as other,
            ):
                reader.backup(other)
            for suffix in ("-wal", "-shm"):
                path.with_name(path.name + suffix).unlink(missing_ok=True)
            copy.rename(path)
            one.rollback()

    def bound(self) -> float:
        """A process that another nemesis has stopped keeps those on the new file waiting until its trust has ended."""
        return self.bounds.gone(self.arena.ttl)
