"""What a fleet costs: one look among many members, one renewal with many roles, and a failover among many nodes.

    python benchmarks/fleet.py looks | roles | nodes

The time is the processor's, spent in the server process behind the node's connection. The other members are rows, with
sentinels that one connection holds. Looks are a second apart by the clock that the node reads, not by the wall's.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tenure
from benchmarks.guards import cpu_s
from tenure.core import messages
from tenure.core.evidence import Evidence
from tenure.databases.postgres import sentinel
from tenure.store.tidying import KEPT_MEMBERS
from tests.support.servers import PostgresServer, postgres_installations
from tests.support.store_by_hand import Desk, connected

LOOKS = 200
RENEWALS = 100
MANY_ROLES = 100_000
BATCH = 5_000
ROUNDS = 5
SETTLED_S = 3.0
REST_S = 10.0
LED_WITHIN_S = 300
SETTINGS = {"max_connections": 600, "shared_buffers": "256MB"}
_MEMBERS = """
insert into tenure.members (namespace, id, name, host, pid, version, metadata, takeover, ttl_ms, renewals, sentinel_key,
                            sentinel_epoch, server_start, incarnation, control_pid, joined_at, renewed_at)
select 'default', gen_random_uuid(), 'member-' || number, 'host', number, '0', '{}', 'instant', 10000, 0, number, 0,
       %(start)s, %(incarnation)s, pg_backend_pid(), now(), now()
from generate_series(1, %(number)s) number
"""
_ENDED = "update tenure.members set ended_at = now(), end_reason = 'left' where control_pid = pg_backend_pid()"
_CANDIDATES = """
insert into tenure.candidates
select 'default', 'r', id from tenure.members where ended_at is null on conflict do nothing
"""


def add_members(connection: Any, number: int, server: messages.Server) -> None:
    """Add rows of members, which have their sentinels on this connection, and of as many ended ones as are kept."""
    described = {"start": server.start, "incarnation": server.incarnation}
    connection.execute(_MEMBERS, {**described, "number": KEPT_MEMBERS})
    connection.execute(_ENDED)
    connection.execute(_MEMBERS, {**described, "number": number})
    connection.execute(f"select pg_advisory_lock({sentinel.CLASS_ID}, number) from generate_series(1, {number}) number")
    connection.execute(_CANDIDATES)
    connection.execute("vacuum analyze")


class Cost(NamedTuple):
    """What one request costs, on average."""

    ms: float
    """The server's processor time."""
    bytes: float
    """What the server sends."""


class SteppedClock:
    """A clock on which every look comes a second after the one before."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds


def received(connection: Any) -> int:
    """Return how many bytes have come in on a connection."""
    with socket.socket(fileno=os.dup(connection.fileno())) as duplicate:
        information = duplicate.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 200)
    return int(struct.unpack_from("=Q", information, 128)[0])


@contextlib.contextmanager
def fleet(url: str, number: int) -> Iterator[Desk]:
    """Yield a member among many, which all stand for the role `r`; one of the others holds it."""
    with Desk(url) as leader, Desk(url) as desk, connected(url, autocommit=True) as others:
        leader.lead("r")
        desk.stand("r")
        add_members(others, number - 2, desk.opened.server)
        yield desk


def look_cost(url: str, number: int) -> Cost:
    """Return what a look costs among so many members."""
    steps = SteppedClock()
    real, sentinel.clock = sentinel.clock, steps  # type: ignore[assignment]
    try:
        with fleet(url, number) as desk:
            watch, session = desk.backend.open_watch()
            with contextlib.closing(session):
                evidence = Evidence()

                def look() -> None:
                    steps.seconds += 1
                    looked = watch.look(messages.Look(desk.id, None, 0.0, evidence.reach, ("r",)))
                    evidence.look(looked, desk.id, 0.0)
                    assert evidence.predecessor_key is not None
                    assert not evidence.suspects

                for _ in range(20):
                    look()
                before, began = received(session), cpu_s(session.pid)
                for _ in range(LOOKS):
                    look()
                return Cost((cpu_s(session.pid) - began) * 1000 / LOOKS, (received(session) - before) / LOOKS)
    finally:
        sentinel.clock = real


def renewal_costs(url: str, roles: int) -> dict[str, Cost]:
    """Return what a renewal costs the leader of so many roles, and another candidate."""
    names = tuple(f"role-{number}" for number in range(roles))
    with Desk(url) as leader, Desk(url) as standby:
        for first in range(0, roles, BATCH):
            batch = names[first : first + BATCH]
            assert len(leader.acquire(*batch)) == len(batch)
            standby.stand(*batch)
        with connected(url, autocommit=True) as connection:
            add_members(connection, 0, leader.opened.server)
            return {
                f"{who}, {'all roles' if thorough else 'what changed'}": renewal_cost(desk, thorough=thorough)
                for who, desk in (("leader", leader), ("standby", standby))
                for thorough in (False, True)
            }


def renewal_cost(desk: Desk, *, thorough: bool) -> Cost:
    number = 10 if thorough else RENEWALS
    for _ in range(6):
        desk.ask(messages.Renew(desk.id, thorough=thorough))
    before, began = received(desk.session), cpu_s(desk.session.pid)
    for _ in range(number):
        desk.ask(messages.Renew(desk.id, thorough=thorough))
    return Cost((cpu_s(desk.session.pid) - began) * 1000 / number, (received(desk.session) - before) / number)


# Real nodes ----------------------------------------------------------------------------------------------------------


def tell_when_it_leads(node: Any) -> None:
    for term in node.terms("r"):
        print("lead", time.monotonic(), flush=True)
        term.wait_lost()


def stand(nodes: int) -> None:
    """Be a process with some nodes: print "ready", and whenever one of them leads, "lead" and the time."""
    with contextlib.ExitStack() as stack:
        for number in range(nodes):
            node = stack.enter_context(tenure.Node(os.environ["TENURE_URL"], name=f"{os.getpid()}-{number}"))
            threading.Thread(target=tell_when_it_leads, args=[node], daemon=True).start()
        print("ready", time.monotonic(), flush=True)
        sys.stdin.read()


class Host:
    """A process with some nodes."""

    def __init__(self, url: str, nodes: int) -> None:
        self.nodes = nodes
        command = [sys.executable, __file__, "stand", str(nodes)]
        self.process = subprocess.Popen(
            command, env={**os.environ, "TENURE_URL": url}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.process.stdout
        os.set_blocking(self.process.stdout.fileno(), False)
        self.said = b""

    def hear(self, word: str, after: float) -> float | None:
        """Return when the process first said the word after that time, if it has."""
        assert self.process.stdout
        self.said += self.process.stdout.read() or b""
        lines = self.said.decode().split("\n")[:-1]  # the last one may be incomplete
        times = [float(line.split()[1]) for line in lines if line.startswith(f"{word} ")]
        return min((at for at in times if at > after), default=None)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def wait_for(hosts: list[Host], word: str, after: float, number: int = 1) -> tuple[Host, float]:
    """Wait until some processes have said a word; return the first of them, and when."""
    until = time.monotonic() + LED_WITHIN_S
    while time.monotonic() < until:
        said = [(host, at) for host in hosts if (at := host.hear(word, after)) is not None]
        if len(said) >= number:
            return min(said, key=lambda each: each[1])
        time.sleep(0.01)
    raise TimeoutError(f"no {word!r} within {LED_WITHIN_S} s")


class Fleet(NamedTuple):
    """How many nodes each process has, and how many the processes have that are killed."""

    hosts: tuple[int, ...]
    victims: tuple[int, ...]


FLEETS = (Fleet((1, 1, 1), (1,)), Fleet((10, 10, 10), (10,)), Fleet((*[1] * 10, *[10] * 19), (1, 10)))
"""A process that is killed takes all of its nodes along. So a small and a large fleet are compared by the number of
nodes that die, too."""


class Rest(NamedTuple):
    """What one node costs while nothing happens, each second."""

    node_ms: float
    """The processor time of its own threads."""
    server_ms: float
    """The processor time of the server."""
    requests: float
    """The transactions on the server."""


def rest(server: PostgresServer, url: str, hosts: list[Host]) -> Rest:
    """Measure the fleet for a while in which nothing happens."""

    def measured() -> tuple[float, float, float]:
        with connected(url, autocommit=True) as connection:
            row = connection.execute("select xact_commit + xact_rollback from pg_stat_database where datname = "
                                     "current_database()").fetchone()  # fmt: skip
        assert row
        backends = sum(cpu_s(child.pid) for child in psutil.Process(server.pid).children())
        return sum(cpu_s(host.process.pid) for host in hosts), backends, float(row[0])

    before = measured()
    time.sleep(REST_S)
    nodes = sum(host.nodes for host in hosts)
    own, servers, requests = (now - then for now, then in zip(measured(), before, strict=True))
    return Rest(own * 1000 / REST_S / nodes, servers * 1000 / REST_S / nodes, requests / REST_S / nodes)


def hand_over(url: str, hosts: list[Host], nodes: int) -> Host:
    """Let a node of a process with so many nodes lead; return the process."""
    with tenure.Registry(url) as registry:
        leader = registry.roles()[0].leader
        assert leader
        by_pid = {str(host.process.pid): host for host in hosts}
        leads = by_pid[leader.name.partition("-")[0]]
        if leads.nodes == nodes:
            return leads
        heir = next(host for host in hosts if host.nodes == nodes)
        after = registry.resign("r", to=f"{heir.process.pid}-0", timeout=60)
        assert after
        assert after.name == f"{heir.process.pid}-0"
        return heir


def measure(server: PostgresServer, fleet: Fleet) -> None:
    """Print what a fleet costs at rest, and how long its failovers take."""
    url = server.create_database()
    hosts: list[Host] = []
    try:
        for nodes in fleet.hosts:
            hosts.append(Host(url, nodes))
            # One after the other: processes that start at once slow each other down, and their nodes lapse.
            wait_for(hosts, "ready", 0.0, len(hosts))
        wait_for(hosts, "lead", 0.0)
        time.sleep(SETTLED_S)
        cost = rest(server, url, hosts)
        print(
            f"{sum(fleet.hosts)} nodes at rest, per node and second: {cost.node_ms:.1f} ms in its process, "
            f"{cost.server_ms:.1f} ms on the server, {cost.requests:.2f} transactions",
            flush=True,
        )
        for victim in fleet.victims:
            took = failovers_ms(url, hosts, victim)
            middle = f"{statistics.median(took):.0f} ms (largest {max(took):.0f})"
            print(f"{sum(fleet.hosts)} nodes, {victim} died: failover {middle} of {ROUNDS}", flush=True)
    finally:
        for host in hosts:
            host.kill()


def failovers_ms(url: str, hosts: list[Host], victim: int) -> list[float]:
    """Kill the process whose node leads, again and again; return how long it took until another one led."""
    took = []
    for _ in range(ROUNDS):
        leader = hand_over(url, hosts, victim)
        time.sleep(SETTLED_S)
        killed_at = time.monotonic()
        leader.kill()
        hosts.remove(leader)
        took.append((wait_for(hosts, "lead", killed_at)[1] - killed_at) * 1000)
        hosts.append(Host(url, victim))
        wait_for(hosts, "ready", 0.0, len(hosts))
    return took


def main() -> None:
    if sys.argv[1] == "stand":
        stand(int(sys.argv[2]))
        return
    load = os.getloadavg()[0]
    with PostgresServer(postgres_installations()[0], settings=SETTINGS) as server:
        print(f"PostgreSQL {server.installation.version}, {os.cpu_count()} cores, load {load:.1f}")
        if sys.argv[1] == "looks":
            for number in (10, 100, 1000, 3000):
                cost = look_cost(server.create_database(), number)
                print(f"look among {number} members: {cost.ms:.3f} ms, {cost.bytes:.0f} bytes")
        elif sys.argv[1] == "roles":
            for who, cost in renewal_costs(server.create_database(), MANY_ROLES).items():
                print(f"renewal with {MANY_ROLES} roles, {who}: {cost.ms:.3f} ms, {cost.bytes:.0f} bytes")
        else:
            for each in FLEETS:
                measure(server, each)


if __name__ == "__main__":
    main()
