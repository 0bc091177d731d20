"""Real MariaDB servers, started by the tests and gone with them, as PostgreSQL's are (tests/support/servers.py).

The system tables are made by the server itself from the scripts that come with it: `mariadb-install-db` would need more
than the server's own package. The tests' databases belong to a user that has no privilege beyond them.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Literal
from urllib.parse import quote

from tests.support.servers import Child, PidFileScratch, ServerFailed, _as, free_port, server_account

ADDRESS = "127.0.0.1"
USER = "tenure"
SCRIPTS = Path("/usr/share/mysql")
REPLICATED: dict[str, object] = {"server_id": 1, "log_bin": "binlog", "binlog_format": "row", "sync_binlog": 0}
"""What a server needs that has a replica."""
NO_MARIADB = "no MariaDB found: install mariadb-server-core"


@functools.cache
def mariadb_program() -> str | None:
    """Where the server is, with the scripts that make its system tables; None if it is not here."""
    there = (SCRIPTS / "mysql_system_tables.sql").exists()
    return shutil.which("mariadbd", path=os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin") if there else None


class MariaDbServer(Child):
    """One MariaDB. `with MariaDbServer() as server:` starts it and leaves nothing behind.

    More `settings`: as the server's options are named, in the file that it reads at its start.
    """

    failure = ServerFailed

    def __init__(self, *, settings: Mapping[str, object] | None = None) -> None:
        program = mariadb_program()
        if program is None:
            raise ServerFailed(NO_MARIADB)
        self._program = program
        self.port = free_port(ADDRESS)
        self._account = server_account()
        self._scratch = PidFileScratch("tenure-my-", self._account)
        self.socket = self._scratch.path / "socket"
        self.log = self._scratch.path / "log"
        self._log_file: IO[bytes] = self.log.open("ab", buffering=0)
        self._databases = 0
        self.settings: dict[str, object] = {
            "datadir": self._scratch.path / "data",
            "tmpdir": self._scratch.path,  # or servers that start at once remove each other's temporary tables
            "socket": self.socket,
            "pid_file": self._scratch.path / "pid",
            "bind_address": ADDRESS,
            "port": self.port,
            "max_connections": 200,
            "innodb_buffer_pool_size": "16M",
            "innodb_log_file_size": "4M",
            "innodb_flush_method": "nosync",  # only a power failure would show, and no test has one
            "skip_name_resolve": 1,
            **(settings or {}),
        }
        atexit.register(self.close)
        self._make()

    # -- life and death --

    def start(self, timeout: float = 60) -> None:
        """Start the server and return when it takes connections, on the same port as before."""
        if self.running:
            raise ServerFailed(f"the server is already running, pid {self.pid}")
        self.socket.unlink(missing_ok=True)
        self._process = self._spawn(stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + timeout
        while True:
            with contextlib.suppress(OSError):
                if self.socket.exists():
                    self.execute("select 1")
                    return
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise ServerFailed("the server did not start:\n" + self._tail())
            time.sleep(0.01)

    def stop(self, mode: Literal["fast", "immediate"] = "fast", timeout: float = 60) -> None:
        """`fast` ends every session in good order, `immediate` is a crash."""
        process = self._process
        if process is None:
            raise ServerFailed("the server is not running")
        process.send_signal({"fast": signal.SIGTERM, "immediate": signal.SIGKILL}[mode])
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise ServerFailed(f"no stop of pid {process.pid} within {timeout} s:\n{self._tail()}") from None
        self._process = None

    def restart(self) -> None:
        self.stop()
        self.start()

    def close(self) -> None:
        """End the server and remove its files. May be called twice."""
        if self._scratch.is_inherited:
            return
        atexit.unregister(self.close)
        if self.running:
            self.stop("immediate")
        self._log_file.close()
        self._scratch.close()

    # -- talking to it --

    def url(self, dbname: str, *, user: str = USER) -> str:
        return f"mysql://{quote(user, safe='')}@{ADDRESS}:{self.port}/{quote(dbname, safe='')}"

    def connect(self, dbname: str | None = None, **arguments: Any) -> Any:
        """A new autocommit connection of the superuser's through the Unix socket."""
        import pymysql

        return pymysql.connect(
            unix_socket=str(self.socket), user="root", database=dbname, autocommit=True, connect_timeout=10, **arguments
        )

    def execute(self, sql: str, *parameters: Any, dbname: str | None = None) -> list[tuple[Any, ...]]:
        """Run one statement as superuser on a connection of its own, and return the rows."""
        import pymysql

        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(str(self.socket))  # PyMySQL leaves its own socket open where nobody listens
        try:
            with contextlib.closing(self.connect(dbname)) as connection, connection.cursor() as cursor:
                cursor.execute(sql, parameters or None)
                return list(cursor.fetchall())
        except pymysql.err.OperationalError as error:
            raise OSError(*error.args) from None

    def create_database(self) -> str:
        """Create an empty database and return its URL."""
        self._databases += 1
        name = f"test_{self._databases}"
        self.execute(f"create database {name}")
        return self.url(name)

    def drop_database(self, name: str) -> None:
        """Drop a database; whoever is still connected to it is cut off."""
        for (pid,) in self.execute("select id from information_schema.processlist where db = %s", name):
            with contextlib.suppress(OSError):
                self.execute(f"kill {pid}")
        self.execute(f"drop database if exists {name}")

    def connections(self, dbname: str) -> list[int]:
        """The numbers of the connections to a database."""
        rows = self.execute("select id from information_schema.processlist where db = %s order by id", dbname)
        return [pid for (pid,) in rows]

    @contextlib.contextmanager
    def configured(self, **settings: object) -> Iterator[None]:
        """Change global variables for the length of a block: what a test wants on a server that it shares."""
        before = {name: self.execute(f"select @@global.{name}")[0][0] for name in settings}
        try:
            for name, value in settings.items():
                self.execute(f"set global {name} = %s", value)
            yield
        finally:
            for name, value in before.items():
                self.execute(f"set global {name} = %s", value)

    def replicate_from(self, primary: MariaDbServer) -> None:
        """Follow a primary that has `log_bin`; both have a `server_id`, and no writes before this."""
        primary.execute("create or replace user replication@'%'")
        primary.execute("grant replication slave on *.* to replication@'%'")
        self.execute(
            f"change master to master_host = '{ADDRESS}', master_port = {primary.port}, master_user = 'replication', "
            "master_use_gtid = slave_pos"
        )
        self.execute("start slave")

    def catch_up(self, primary: MariaDbServer, timeout: float = 30) -> None:
        """Return when everything that the primary has committed so far is here."""
        ((position,),) = primary.execute("select @@gtid_binlog_pos")
        if self.execute("select master_gtid_wait(%s, %s)", position, timeout) != [(0,)]:
            raise ServerFailed(f"not replicated within {timeout:g} s: {self.execute('show slave status')}")

    def promote(self) -> None:
        """Make a replica a server of its own."""
        self.execute("stop slave")
        self.execute("reset slave all")

    def log_mark(self) -> int:
        """The end of the log as of now, for log_lines()."""
        return self.log.stat().st_size

    def log_lines(self, since: int = 0) -> list[str]:
        """The lines that the server wrote to its log since a mark."""
        return self.log.read_bytes()[since:].decode(errors="replace").splitlines()

    # -- inside --

    def _make(self) -> None:
        data = self._scratch.path / "data"
        data.mkdir()
        if self._account is not None:
            os.chown(data, self._account.uid, self._account.gid)
        script = "create database mysql;\nuse mysql;\nset @auth_root_socket = null;\n"
        script += "".join((SCRIPTS / f"mysql_system_tables{part}.sql").read_text() for part in ("", "_data"))
        users = (f"create user {USER}@'%';", rf"grant all on `test\_%`.* to {USER}@'%';")
        script += "\nflush privileges;\n" + "\n".join(users) + "\n"
        made = self._spawn("--bootstrap", "--skip-networking", stdin=subprocess.PIPE)
        made.communicate(script.encode(), timeout=120)
        if made.returncode != 0:
            raise ServerFailed("the system tables could not be made:\n" + self._tail())

    def _spawn(self, *more: str, stdin: int) -> subprocess.Popen[bytes]:
        options = [f"--{name.replace('_', '-')}={value}" for name, value in self.settings.items()]
        return subprocess.Popen(
            [self._program, "--no-defaults", *options, *more],
            stdin=stdin,
            stdout=subprocess.DEVNULL,
            stderr=self._log_file,
            cwd=self._scratch.path,
            env={"PATH": os.defpath + ":/usr/sbin:/sbin", "LC_ALL": "C", "HOME": str(self._scratch.path)},
            start_new_session=True,
            **_as(self._account),
        )

    def _tail(self) -> str:
        return "\n".join(self.log_lines()[-20:])


class MariaDbReplica(MariaDbServer):
    """A replica of `primary` by GTID, read only, until it is promoted. The primary needs the settings REPLICATED.

    It has all that the primary's binary log has, from its first entry. It is asynchronous outside of a block of
    semi_synchronous().
    """

    def __init__(self, primary: MariaDbServer) -> None:
        self.primary = primary
        super().__init__(settings=REPLICATED | {"server_id": 2, "read_only": 1})

    def start(self, timeout: float = 60) -> None:
        super().start(timeout)
        self.replicate_from(self.primary)
        self.catch_up(self.primary)

    def cut_off(self) -> None:
        """End the streaming: nothing that the primary commits from now on comes here."""
        self.execute("stop slave")

    @contextlib.contextmanager
    def semi_synchronous(self) -> Iterator[None]:
        """For the length of a block the primary acknowledges no commit that this server has not received."""
        self.execute("set global rpl_semi_sync_slave_enabled = 1")
        self.execute("stop slave io_thread")
        self.execute("start slave io_thread")
        # After the time-out the primary would go on alone.
        for setting in ("timeout = 3600000", "wait_point = AFTER_SYNC", "enabled = 1"):
            self.primary.execute(f"set global rpl_semi_sync_master_{setting}")
        deadline = time.monotonic() + 60
        while self.primary.execute("show status like 'Rpl_semi_sync_master_clients'") != [
            ("Rpl_semi_sync_master_clients", "1")
        ]:
            if time.monotonic() > deadline:
                raise ServerFailed("the primary has no semi-synchronous replica:\n" + self._tail())
            time.sleep(0.01)
        yield
        if self.primary.running:
            self.primary.execute("set global rpl_semi_sync_master_enabled = 0")

    def promote(self) -> None:
        """Make it a primary; return when it takes writes. Stop the old one before."""
        super().promote()
        self.execute("set global read_only = 0")
