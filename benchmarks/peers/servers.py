"""The servers that the peers need, each in a directory of its own on a disk, and gone with this process.

A `Site` is one of them with places on it: a place is fresh and empty, and no candidate elsewhere sees it. What a server
says about its durability is asked of the server, and how often it has synced is counted by the server.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import shutil
import socket
import sqlite3
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.support.certificates import use_tls
from tests.support.mariadb import MariaDbServer, mariadb_program
from tests.support.poolers import PgBouncer, pgbouncer_program
from tests.support.servers import PostgresServer, free_port, postgres_installations

SETTLE_S = 30.0
CONNECTIONS = 400
"""How many clients each server takes: many clusters run at once."""
ZOOKEEPER = """
tickTime={tick}
dataDir={directory}
clientPortAddress=127.0.0.1
clientPort={port}
admin.enableServer=false
4lw.commands.whitelist=*
maxClientCnxns=0
"""
IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")


class Missing(Exception):
    """A server that is not installed here."""


class Site:
    """A server, and places on it."""

    port: int | None = None
    """Where clients reach it; None if there is no server."""
    durable = True
    settings = ""
    """What it says about how durable its commits are."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def place(self, number: int, port: int | None = None) -> str:
        """Return the address of a fresh place, for clients that connect to another port if one is given."""
        raise NotImplementedError

    def remove(self, number: int) -> None:
        """Remove a place."""

    def syncs(self) -> int | None:
        """Return how often the server has waited for its disk to keep what it wrote; None if it does not say."""
        return None


class Postgres(Site):
    def __init__(self, server: PostgresServer, parameters: str = "") -> None:
        super().__init__(server.data)
        self.server, self.parameters = server, parameters
        self.port = server.port
        names = ("fsync", "synchronous_commit", "wal_sync_method")
        found = {name: server.execute(f"show {name}")[0][0] for name in names}
        self.durable = found["fsync"] == found["synchronous_commit"] == "on"
        self.settings = ", ".join(f"{name}={value}" for name, value in found.items())

    def place(self, number: int, port: int | None = None) -> str:
        url = self.server.create_database(f"bench{number}") + self.parameters
        return url if port is None else url.replace(f":{self.port}/", f":{port}/")

    def remove(self, number: int) -> None:
        self.server.drop_database(f"bench{number}")

    def syncs(self) -> int:
        source = "sum(wal_sync) from pg_stat_wal"
        if self.server.installation.major >= 18:
            source = "sum(fsyncs) from pg_stat_io where object = 'wal'"
        return int(self.server.execute(f"select {source}")[0][0])


class Pooled(Postgres):
    """Behind PgBouncer; the nodes' own connections go through it, or past it."""

    def __init__(self, server: PostgresServer, pooler: PgBouncer, *, direct: bool) -> None:
        super().__init__(server)
        self.pooler, self.direct = pooler, direct
        self.port = server.port if direct else pooler.port

    def place(self, number: int, port: int | None = None) -> str:
        url = self.server.create_database(f"bench{number}")
        pooled = self.pooler.through(url)
        if self.direct:
            return f"{pooled} {url.replace(f':{self.port}/', f':{port or self.port}/')}"
        return pooled.replace(f":{self.port}/", f":{port or self.port}/")


class MariaDb(Site):
    def __init__(self, server: MariaDbServer) -> None:
        super().__init__(Path(str(server.settings["datadir"])))
        self.server, self.port = server, server.port
        self._names: dict[int, str] = {}
        names = ("innodb_flush_log_at_trx_commit", "innodb_flush_method")
        found = {name: str(server.execute(f"select @@{name}")[0][0]) for name in names}
        self.durable = found["innodb_flush_log_at_trx_commit"] == "1" and "sync" not in found["innodb_flush_method"]
        self.settings = ", ".join(f"{name}={value}" for name, value in found.items())

    def place(self, number: int, port: int | None = None) -> str:
        url = self.server.create_database()
        self._names[number] = url.rpartition("/")[2]
        return url.replace(f":{self.port}/", f":{port or self.port}/")

    def remove(self, number: int) -> None:
        self.server.drop_database(self._names.pop(number))

    def syncs(self) -> int:
        return int(self.server.execute("show global status like 'innodb_data_fsyncs'")[0][1])


class Sqlite(Site):
    settings = "as Tenure opens it"

    def place(self, number: int, _: int | None = None) -> str:
        return f"sqlite:///{self.directory}/bench{number}.db"


class Program(Site):
    """A server program in a directory of its own."""

    port: int

    def __init__(self) -> None:
        super().__init__(Path(tempfile.mkdtemp(prefix="tenure-bench-")))
        self.port = free_port()
        self.log = (self.directory / "log").open("wb")
        self.process: subprocess.Popen[bytes] | None = None

    def run(self, *command: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            command, cwd=self.directory, stdout=self.log, stderr=self.log, env={"PATH": "/usr/bin:/bin", **environment}
        )
        deadline = time.monotonic() + SETTLE_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise RuntimeError(f"{command[0]} did not start: {(self.directory / 'log').read_text()[-2000:]}")
            time.sleep(0.05)

    def place(self, number: int, port: int | None = None) -> str:
        return f"127.0.0.1:{port or self.port}/bench{number}"

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self.log.close()
        shutil.rmtree(self.directory, ignore_errors=True)


class Redis(Program):
    durable = False
    settings = "no file at all, so nothing outlives the server"

    def place(self, number: int, port: int | None = None) -> str:
        return f"redis://127.0.0.1:{port or self.port}/{number}"


class Etcd(Program):
    settings = "it syncs its log before it answers, and 3.4 has no option to change that"

    def syncs(self) -> int | None:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as answer:
            return _number(r"^etcd_disk_wal_fsync_duration_seconds_count (\S+)", answer.read().decode())


class ZooKeeper(Program):
    settings = "forceSync=yes, its default"

    def syncs(self) -> int | None:
        with socket.create_connection(("127.0.0.1", self.port), 10) as connection:
            connection.sendall(b"mntr")
            return _number(r"^zk_cnt_fsynctime\s+(\S+)", connection.makefile().read())


def _number(pattern: str, text: str) -> int | None:
    found = re.search(pattern, text, re.MULTILINE)
    return int(float(found[1])) if found else None


class Servers:
    """Every site that is asked for, started when it is."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._sites: dict[str, Site] = {}

    def __getitem__(self, kind: str) -> Site:
        """Return a site; raise Missing if its server is not installed."""
        if kind not in self._sites:
            self._sites[kind] = self._stack.enter_context(STARTERS[kind](self))
        return self._sites[kind]

    def items(self) -> list[tuple[str, Site]]:
        return list(self._sites.items())

    def postgres(self) -> PostgresServer:
        site = self["postgres"]
        assert isinstance(site, Postgres)
        return site.server


@contextlib.contextmanager
def redis(_: Servers) -> Iterator[Redis]:
    """Redis, as it comes, but without files."""
    need("redis-server")
    with contextlib.closing(Redis()) as server:
        server.run(
            "redis-server", "--port", str(server.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no",
            "--databases", "100000",
        )  # fmt: skip
        yield server


@contextlib.contextmanager
def etcd(_: Servers) -> Iterator[Etcd]:
    """etcd, one member."""
    need("etcd")
    need("etcdctl")
    with contextlib.closing(Etcd()) as server:
        client, peer = f"http://127.0.0.1:{server.port}", f"http://127.0.0.1:{free_port()}"
        server.run(
            "etcd", "--data-dir", str(server.directory / "data"), "--listen-client-urls", client,
            "--advertise-client-urls", client, "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
            "--initial-cluster", f"default={peer}", "--log-level", "error",
        )  # fmt: skip
        yield server


@contextlib.contextmanager
def zookeeper(_: Servers) -> Iterator[ZooKeeper]:
    """ZooKeeper, one server; ticks of 500 ms allow sessions of a second, which is the shortest."""
    need("java")
    jars = Path("/usr/share/java")
    if not (jars / "zookeeper.jar").exists():
        raise Missing("zookeeper")
    with contextlib.closing(ZooKeeper()) as server:
        settings = server.directory / "zoo.cfg"
        settings.write_text(ZOOKEEPER.format(tick=500, directory=server.directory, port=server.port))
        classes = ":".join(map(str, [Path("/etc/zookeeper/conf"), *sorted(jars.glob("*.jar"))]))
        main = "org.apache.zookeeper.server.ZooKeeperServerMain"
        server.run("java", "-cp", classes, "-Xmx256m", main, str(settings))
        yield server


@contextlib.contextmanager
def postgres(_: Servers) -> Iterator[Postgres]:
    """PostgreSQL, with fsync as everywhere."""
    if not postgres_installations():
        raise Missing("postgresql")
    with PostgresServer(settings={"max_connections": CONNECTIONS}) as server:
        yield Postgres(server)


@contextlib.contextmanager
def postgres_tls(_: Servers) -> Iterator[Postgres]:
    """PostgreSQL that speaks TLS and asks for a password by SCRAM."""
    if not postgres_installations():
        raise Missing("postgresql")
    need("openssl")
    with contextlib.closing(PostgresServer(password=secrets.token_hex(8))) as server:
        use_tls(server)
        server.start()
        yield Postgres(server, "?sslmode=require")


@contextlib.contextmanager
def pooled(servers: Servers, *, direct: bool) -> Iterator[Pooled]:
    """PgBouncer in transaction mode before the PostgreSQL that everybody has, with as many connections as it comes."""
    if pgbouncer_program() is None:
        raise Missing("pgbouncer")
    server = servers.postgres()
    with PgBouncer(server, pool_size=20, settings={"max_client_conn": CONNECTIONS}) as pooler:
        yield Pooled(server, pooler, direct=direct)


@contextlib.contextmanager
def mariadb(_: Servers) -> Iterator[MariaDb]:
    """MariaDB, which syncs."""
    if mariadb_program() is None:
        raise Missing("mariadb")
    settings = {"innodb_flush_method": "O_DIRECT", "max_connections": CONNECTIONS}
    with MariaDbServer(settings=settings) as server:
        yield MariaDb(server)


@contextlib.contextmanager
def sqlite(_: Servers) -> Iterator[Sqlite]:
    """A directory for files."""
    with tempfile.TemporaryDirectory(prefix="tenure-bench-") as directory:
        yield Sqlite(Path(directory))


STARTERS: dict[str, Callable[[Servers], contextlib.AbstractContextManager[Site]]] = {
    "postgres": postgres,
    "postgres-tls": postgres_tls,
    "pgbouncer": lambda servers: pooled(servers, direct=False),
    "pgbouncer-direct": lambda servers: pooled(servers, direct=True),
    "mariadb": mariadb,
    "sqlite": sqlite,
    "redis": redis,
    "zookeeper": zookeeper,
    "etcd": etcd,
}


def need(program: str) -> None:
    if shutil.which(program) is None:
        raise Missing(program)


def version(kind: str) -> str:
    """Return which release of a server is measured."""
    if kind.startswith("postgres"):
        return f"PostgreSQL {postgres_installations()[0].version}"
    if kind == "zookeeper":
        return " ".join(f"ZooKeeper {jar.stem[10:]}" for jar in Path("/usr/share/java").glob("zookeeper-[0-9]*.jar"))
    if kind == "sqlite":
        return f"SQLite {sqlite3.sqlite_version}"
    programs = {"redis": "redis-server", "etcd": "etcd", "mariadb": mariadb_program()}
    program = programs.get(kind) or pgbouncer_program() or ""
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    return said.splitlines()[0].partition(" sha=")[0].partition(" for ")[0].removeprefix(f"{program}  Ver ")


def filesystem(path: Path, mounts: str | None = None) -> str:
    """Return the type of the file system that a path is on, by the system's list of mounts."""
    lines = (Path("/proc/self/mounts").read_text() if mounts is None else mounts).splitlines()
    kinds = {Path(words[1]): words[2] for words in map(str.split, lines)}  # of two at one place the later counts
    return next((kinds[place] for place in (path, *path.parents) if place in kinds), "unknown")
