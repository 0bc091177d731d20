"""The servers that the peers need, each in a directory of its own and gone with this process."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.support.servers import PostgresServer, free_port, postgres_installations

SETTLE_S = 30.0
ZOOKEEPER = """
tickTime={tick}
dataDir={directory}
clientPortAddress=127.0.0.1
clientPort={port}
admin.enableServer=false
4lw.commands.whitelist=*
maxClientCnxns=0
"""


class Missing(Exception):
    """A server that is not installed here."""


class Child:
    """A server program in a directory of its own."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="tenure-bench-"))
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

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self.log.close()
        shutil.rmtree(self.directory, ignore_errors=True)


@contextlib.contextmanager
def redis() -> Iterator[Child]:
    """Redis, as it comes, but without files."""
    need("redis-server")
    with contextlib.closing(Child()) as server:
        server.run(
            "redis-server", "--port", str(server.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"
        )
        yield server


@contextlib.contextmanager
def etcd() -> Iterator[Child]:
    """etcd, one member."""
    need("etcd")
    need("etcdctl")
    with contextlib.closing(Child()) as server:
        client, peer = f"http://127.0.0.1:{server.port}", f"http://127.0.0.1:{free_port()}"
        server.run(
            "etcd", "--data-dir", str(server.directory / "data"), "--listen-client-urls", client,
            "--advertise-client-urls", client, "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
            "--initial-cluster", f"default={peer}", "--log-level", "error",
        )  # fmt: skip
        yield server


@contextlib.contextmanager
def zookeeper() -> Iterator[Child]:
    """ZooKeeper, one server; ticks of 500 ms allow sessions of a second, which is the shortest."""
    need("java")
    jars = Path("/usr/share/java")
    if not (jars / "zookeeper.jar").exists():
        raise Missing("zookeeper")
    with contextlib.closing(Child()) as server:
        settings = server.directory / "zoo.cfg"
        settings.write_text(ZOOKEEPER.format(tick=500, directory=server.directory, port=server.port))
        classes = ":".join(map(str, [Path("/etc/zookeeper/conf"), *sorted(jars.glob("*.jar"))]))
        main = "org.apache.zookeeper.server.ZooKeeperServerMain"
        server.run("java", "-cp", classes, "-Xmx256m", main, str(settings))
        yield server


@contextlib.contextmanager
def postgres() -> Iterator[PostgresServer]:
    """PostgreSQL, with fsync as everywhere."""
    if not postgres_installations():
        raise Missing("postgresql")
    with PostgresServer(settings={"max_connections": 400}) as server:
        yield server


STARTERS = {"postgres": postgres, "redis": redis, "zookeeper": zookeeper, "etcd": etcd}


def need(program: str) -> None:
    if shutil.which(program) is None:
        raise Missing(program)


def version(kind: str) -> str:
    """Return which release of a server is measured."""
    if kind == "postgres":
        return f"PostgreSQL {postgres_installations()[0].version}"
    if kind == "zookeeper":
        return " ".join(f"ZooKeeper {jar.stem[10:]}" for jar in Path("/usr/share/java").glob("zookeeper-[0-9]*.jar"))
    program = {"redis": "redis-server", "etcd": "etcd"}[kind]
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    return said.splitlines()[0].partition(" sha=")[0]
