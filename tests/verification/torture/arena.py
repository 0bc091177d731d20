"""Where it happens: a database of one kind as a child of ours, and nodes in fixed places around it.

A *slot* is a place for a node: how it reaches the database. Whoever dies there is replaced by the next one; `n0.3` is
the third process in slot `n0`. On PostgreSQL, as far as this machine can do it, one node sits behind a cable that can
be cut (`far`), one behind PgBouncer (`pooled`), and the others each behind a door of their own
(tests/verification/torture/proxy.py).
"""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tenure.core import timing
from tests.support import network as networks
from tests.support.cluster import Cluster, NodeFailed, NodeProcess
from tests.support.patroni import PatroniCluster, Replication, Route, initialise
from tests.support.poolers import pgbouncer_program
from tests.verification.torture import contender
from tests.verification.torture.proxy import Doors
from tests.verification.torture.victims import STRANGER, USER, TorturedMariaDb, TorturedPooler, TorturedPostgres

if TYPE_CHECKING:
    from typing_extensions import Self

PATIENCE_S = 60.0


@dataclass
class Slot:
    """A place for a node, and who is there now."""

    name: str
    url: str
    netns: str | None = None
    door: str | None = None
    lease_alone: bool = False
    node: NodeProcess | None = None
    generation: int = 0


class Arena:
    """A server, a cluster, and what nemeses may do to either; one subclass for each kind of database."""

    kind = ""
    slots_wanted = 4
    may_lose = False
    """Whether a write that was acknowledged may be gone: where a replica that lacks it may be promoted."""

    def __init__(
        self, directory: Path, *, ttl: float, takeover: str, drift: float = timing.DRIFT, **options: Any
    ) -> None:
        self.directory, self.ttl, self.takeover, self.drift = directory, ttl, takeover, drift
        self.options = options
        self.slots: list[Slot] = []
        self.suffering: set[str] = set()
        """The slots whose processes something is being done to."""
        self.missing: dict[str, str] = {}
        """What this machine lacks, and why: the nemeses that need it are left out."""
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        try:
            url = self.build(self._stack)
            options = {"ttl": self.ttl, "takeover": self.takeover, "start": "wait"}
            options |= {"sample_every_s": 0.002, "heartbeat_s": 0.05}
            self.cluster = Cluster(
                url,
                self.directory,
                strictly=False,
                program="tests.verification.torture.contender",
                **(options | self.options),
            )
            self._stack.callback(self._close_cluster)
            self.cluster.execute(*contender.TABLES[self.database])
            for slot in self.slots:
                self.fill(slot)
            self.settle()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._stack.close()

    def stop_nodes(self) -> None:
        """Kill every process: nothing is written any more."""
        for node in self.cluster.nodes:
            node.close()

    def _close_cluster(self) -> None:
        self.stop_nodes()
        self.cluster.recorder.close()

    def build(self, stack: contextlib.ExitStack) -> str:
        """Start the database, make the slots and return the URL for the harness."""
        raise NotImplementedError

    @property
    def database(self) -> str:
        return self.cluster.url.partition(":")[0]

    # -- nodes --

    def fill(self, slot: Slot) -> None:
        """Put a new process into a slot, without waiting for it."""
        if slot.node is not None:
            slot.node.process.wait(10)
            if not slot.node._reader.is_alive():  # else a forked child still has its pipes
                slot.node.close()
        slot.generation += 1
        name = f"{slot.name}.{slot.generation}"
        slot.node = NodeProcess(self.cluster, name, slot.netns, self.cluster.options | {"url": slot.url})
        slot.node.send("start")
        self.cluster.nodes.append(slot.node)

    def replace_dead(self) -> None:
        """Put somebody into each slot whose process has ended, or whose node did not come up."""
        for slot in self.slots:
            node = slot.node
            start = [line for line in node.said if line.get("reply") == 0] if node is not None else []
            if node is not None and node.running and any("error" in line for line in start):
                node.kill()
            if node is None or not node.running:
                self.fill(slot)

    def leader(self) -> Slot | None:
        """Who leads, by what the nodes have told; None if nobody does or it is not known."""
        best: tuple[int, Slot] | None = None
        with self.cluster.changed:
            for slot in self.slots:
                node = slot.node
                assert node is not None
                state: int | None = None
                for line in node.said:
                    if line.get("event") in ("elected", "resumed"):
                        state = line["token"]
                    elif line.get("event") in ("deposed", "suspended"):
                        state = None
                if state is not None and node.running and (best is None or state > best[0]):
                    best = state, slot
        return best[1] if best else None

    def settle(self, timeout: float = PATIENCE_S) -> str | None:
        """Wait until every slot has a running node, one of them leads, and all stand; else say what is amiss."""
        deadline = time.monotonic() + timeout
        amiss = "nothing was asked"
        while time.monotonic() < deadline:
            self.revive()
            self.replace_dead()
            amiss = self._amiss()
            if not amiss:
                return None
            time.sleep(0.05)
        return amiss

    def _amiss(self) -> str:
        leader = self.leader()
        if leader is None:
            return "nobody leads"
        names = {slot.node.name for slot in self.slots if slot.node is not None}
        try:
            assert leader.node is not None
            told = leader.node.ask("leader", 5)
        except NodeFailed as error:
            return str(error)
        if told.get("name") != leader.node.name:
            return f"{leader.node.name} believes to lead, the database says {told.get('name')}: {told.get('message')}"
        absent = names - set(told["candidates"])
        return f"{', '.join(sorted(absent))} do not stand" if absent else ""

    # -- the server --

    def revive(self) -> None:
        """Start the server if it is down."""

    @property
    def version(self) -> str:
        raise NotImplementedError

    def execute(self, sql: str) -> list[tuple[Any, ...]]:
        """Run a statement as the administrator, in the nodes' database."""
        raise NotImplementedError

    def log_mark(self) -> int:
        return 0

    def log_lines(self, since: int) -> list[str]:  # noqa: ARG002 - a file has no log
        return []

    def final(self, sql: str) -> list[tuple[Any, ...]]:
        return self.cluster.execute(sql)


# --- PostgreSQL and MariaDB ---------------------------------------------------------------------------------


class ServerArena(Arena):
    """On a server that is started and stopped."""

    server: Any
    dbname: str

    def revive(self) -> None:
        if not self.server.running:
            self.server.start()

    def execute(self, sql: str) -> list[tuple[Any, ...]]:
        return self.server.execute(sql, dbname=self.dbname)

    def log_mark(self) -> int:
        return self.server.log_mark()

    def log_lines(self, since: int) -> list[str]:
        return self.server.log_lines(since)


class PostgresArena(ServerArena):
    kind = "postgres"

    def build(self, stack: contextlib.ExitStack) -> str:
        self.network = None
        if why := networks.why_unavailable():
            self.missing["a network of its own"] = why
        else:
            self.network = stack.enter_context(networks.Network())
        place = {"listen": self.network.server_address, "netns": self.network.server} if self.network else {}
        settings = {"max_connections": 100, "min_wal_size": "32MB", "max_wal_size": "48MB"}
        settings["max_prepared_transactions"] = 8
        self.server = TorturedPostgres(fsync=False, settings=settings, **place)
        stack.callback(self.server.close)
        self.server.start()
        if self.server.clock is None:
            self.missing["a clock of its own"] = "install libfaketime"
        if self.server.disk is None:
            self.missing["a disk of its own"] = "mounting one needs root"
        self.dbname = "torture"
        self.server.create_database(self.dbname)
        self.server.execute(f"create role {USER} login; create role {STRANGER} login")
        self.server.execute(f"alter database {self.dbname} owner to {USER}")
        self.server.execute(f"grant all on schema public to {USER}", dbname=self.dbname)
        doors = self.doors = stack.enter_context(Doors(self.network.server if self.network else None))
        direct = self.server.url(self.dbname, user=USER)
        inside = self.network.server if self.network else None
        for number in range(3):
            port = doors.open(f"n{number}", self.server.listen, self.server.port)
            self.slots.append(Slot(f"n{number}", at(direct, port), inside, door=f"n{number}"))
        if self.network:
            self.slots.append(Slot("far", direct, self.network.client))
        self.pooler = None
        if pgbouncer_program() is None:
            self.missing["a pooler"] = "install pgbouncer"
        else:
            self.pooler = stack.enter_context(
                TorturedPooler(self.server, pool_size=10, settings={"server_login_retry": 1})
            )
            self.slots.append(Slot("pooled", self.pooler.through(direct), lease_alone=True))
        return self.server.url(self.dbname, user=USER, host=str(self.server.socket_dir))

    @property
    def version(self) -> str:
        return f"PostgreSQL {self.server.installation.version}"


class PatroniArena(Arena):
    """Three servers under Patroni. The nodes are in the network around them, and reach the primary by one route."""

    kind = "patroni"
    slots_wanted = 3
    dbname = "torture"

    def __init__(self, directory: Path, *, replication: Replication, route: Route, init: str, **told: Any) -> None:
        super().__init__(directory, **told)
        self.replication, self.route, self.init = replication, route, init
        self.may_lose = replication == "asynchronous"

    def build(self, stack: contextlib.ExitStack) -> str:
        self.patroni = stack.enter_context(PatroniCluster(self.replication))
        self.patroni.create_database(self.dbname, owner=USER)
        outside = self.patroni.outside_url(self.dbname, user=USER)
        initialise(outside, ["--max-ttl", f"{self.ttl:g}", *shlex.split(self.init)])  # which is the wait of a promotion
        url = self.patroni.url(self.dbname, self.route, user=USER)
        self.slots += [Slot(f"n{number}", url, self.patroni.network.hub) for number in range(self.slots_wanted)]
        return outside

    @property
    def version(self) -> str:
        return f"{self.patroni.version}, by {self.route}"

    def execute(self, sql: str) -> list[tuple[Any, ...]]:
        return self.cluster.execute(sql)


# --- MariaDB and SQLite -------------------------------------------------------------------------------------


class MariaDbArena(ServerArena):
    kind = "mariadb"

    def build(self, stack: contextlib.ExitStack) -> str:
        self.server = TorturedMariaDb(settings={"max_connections": 100})
        stack.callback(self.server.close)
        self.server.start()
        if self.server.clock is None:
            self.missing["a clock of its own"] = "install libfaketime"
        url = self.server.create_database()
        self.dbname = url.rpartition("/")[2]
        self.doors = stack.enter_context(Doors())
        for number in range(self.slots_wanted):
            port = self.doors.open(f"n{number}", "127.0.0.1", self.server.port)
            self.slots.append(Slot(f"n{number}", at(url, port), door=f"n{number}"))
        return url

    @property
    def version(self) -> str:
        return f"MariaDB {self.execute('select version()')[0][0]}"


class SqliteArena(Arena):
    kind = "sqlite"

    def build(self, stack: contextlib.ExitStack) -> str:  # noqa: ARG002 - a file is no server
        url = f"sqlite:///{self.directory / 'torture.db'}"
        self.slots += [Slot(f"n{number}", url) for number in range(self.slots_wanted)]
        return url

    @property
    def version(self) -> str:
        import sqlite3

        return f"SQLite {sqlite3.sqlite_version}"

    def execute(self, sql: str) -> list[tuple[Any, ...]]:
        return self.cluster.execute(sql)


ARENAS: dict[str, Callable[..., Arena]] = {
    "postgres": PostgresArena,
    "mariadb": MariaDbArena,
    "sqlite": SqliteArena,
    "patroni": PatroniArena,
}


def at(url: str, port: int) -> str:
    """The same URL through a door on this machine."""
    parts = urlsplit(url)
    return parts._replace(netloc=f"{parts.username}@127.0.0.1:{port}").geturl()
