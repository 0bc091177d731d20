"""A real connection pooler between the tests and their server, started by the tests and gone with them.

A pooler gives many clients few server connections, each to whoever has the next transaction (or session, or statement).
What a client leaves on such a connection, a lock, a setting, a prepared statement, the next one finds there.

As with the servers of tests/support/servers.py: a directory, a port, a child process whose pid we know, an account that
is not root, and a guard that cleans up if the test process is killed.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from typing import IO, TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from tests.support.servers import SUPERUSER, Child, PidFileScratch, PostgresServer, _as, free_port, server_account

if TYPE_CHECKING:
    from pathlib import Path


PoolMode = Literal["session", "transaction", "statement"]

ADDRESS = "127.0.0.1"


@functools.cache
def pgbouncer_program() -> str | None:
    """Where PgBouncer is; None if it is not here."""
    return shutil.which("pgbouncer", path=os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin")


class PoolerFailed(RuntimeError):
    """The pooler could not be started; the message ends with its log."""


class PgBouncer(Child):
    """One PgBouncer before one server. `with PgBouncer(server) as pooler:` starts it and leaves nothing behind.

    Every database of the server is reached through it by the server's own superuser, without a password, over at
    most `pool_size` server connections each. More `settings`: as PgBouncer's manual names them.
    """

    failure = PoolerFailed

    def __init__(
        self,
        server: PostgresServer,
        *,
        pool_mode: PoolMode = "transaction",
        pool_size: int = 3,
        settings: Mapping[str, str | int] | None = None,
    ) -> None:
        program = pgbouncer_program()
        if program is None:
            raise PoolerFailed("no PgBouncer found: install pgbouncer")
        self.server = server
        self.port = free_port(ADDRESS)
        self._port_is_fixed = False
        self._program = program
        self._account = server_account()
        self._scratch = PidFileScratch("tenure-pool-", self._account)
        self.log: Path = self._scratch.path / "log"
        self._log_file: IO[bytes] = self.log.open("ab", buffering=0)
        self._settings: dict[str, str | int] = {
            "pool_mode": pool_mode,
            "default_pool_size": pool_size,
            "max_client_conn": 200,
            **(settings or {}),
        }
        atexit.register(self.close)

    # -- life and death --

    def start(self, timeout: float = 30) -> None:
        """Start it and return when it takes connections, on the same port as before."""
        if self.running:
            raise PoolerFailed(f"the pooler is already running, pid {self.pid}")
        deadline = time.monotonic() + timeout
        while True:
            mark = self.log.stat().st_size
            self._write_config()
            self._process = subprocess.Popen(
                [self._program, "config.ini"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._log_file,
                cwd=self._scratch.path,
                env={"PATH": os.defpath, "LC_ALL": "C"},
                start_new_session=True,
                **_as(self._account),
            )
            if self._wait_until_ready(mark, deadline):
                self._port_is_fixed = True  # clients know it from now on
                return
            complaint = self._said(mark)
            # Somebody took the port after our look: another will do, as long as nobody knows this one.
            if "in use" not in complaint or self._port_is_fixed:
                raise PoolerFailed(f"PgBouncer did not start:\n{complaint}")
            self.port = free_port(ADDRESS)

    def kill(self) -> None:
        """End it without a word to anybody, clients or server."""
        os.kill(self.pid, signal.SIGKILL)
        assert self._process is not None
        self._process.wait(10)
        self._process = None
        (self._scratch.path / "pid").unlink(missing_ok=True)

    def restart(self) -> None:
        """End it and start it again: every client and every server connection is cut."""
        self.kill()
        self.start()

    def close(self) -> None:
        """End it and remove its files. May be called twice."""
        if self._scratch.is_inherited:
            return
        atexit.unregister(self.close)
        if self.running:
            self.kill()
        self._log_file.close()
        self._scratch.close()

    # -- talking to it --

    def through(self, url: str) -> str:
        """The URL of the same database, through the pooler."""
        parts = urlsplit(url)
        return parts._replace(netloc=f"{parts.username}@{ADDRESS}:{self.port}").geturl()

    def admin(self, command: str) -> list[dict[str, Any]]:
        """Run a command of its console (`show servers`, `pause`, …) and return the rows if there are any."""
        import psycopg
        from psycopg.rows import dict_row

        url = f"postgresql://{SUPERUSER}@{ADDRESS}:{self.port}/pgbouncer"
        with psycopg.connect(url, autocommit=True, connect_timeout=10, row_factory=dict_row) as connection:
            cursor = connection.execute(command.encode())
            return cursor.fetchall() if cursor.description else []

    def switch(self, server: PostgresServer) -> None:
        """Lead to another server from now on; clients stay connected and notice nothing."""
        self.server = server
        self._write_config()
        self.admin("reload")

    # -- inside --

    def _write_config(self) -> None:
        settings = {
            "listen_addr": ADDRESS,
            "listen_port": self.port,
            "unix_socket_dir": "",
            "auth_type": "trust",
            "auth_file": "users",
            "admin_users": SUPERUSER,
            "pidfile": "pid",
            **self._settings,
        }
        lines = [f"{name} = {value}\n" for name, value in settings.items()]
        target = f"* = host={self.server.listen} port={self.server.port}\n"
        self._write("users", f'"{SUPERUSER}" ""\n')
        self._write("config.ini", "".join(["[databases]\n", target, "[pgbouncer]\n", *lines]))

    def _write(self, name: str, text: str) -> None:
        path = self._scratch.path / name
        path.write_text(text)
        path.chmod(0o644)  # whatever our umask: the account must read it

    def _wait_until_ready(self, mark: int, deadline: float) -> bool:
        """True when it takes connections; False when its process has ended."""
        while self.running:
            if "process up" in self._said(mark):
                return True
            if time.monotonic() > deadline:
                raise PoolerFailed(f"PgBouncer is not ready in time:\n{self._said(mark)}")
            time.sleep(0.01)
        return False

    def _said(self, mark: int) -> str:
        return self.log.read_bytes()[mark:].decode(errors="replace")
