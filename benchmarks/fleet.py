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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.guards import cpu_s
from tenure.core import messages
from tenure.core.evidence import Evidence
from tenure.databases.postgres import sentinel
from tenure.store.control import KEPT_MEMBERS
from tests.support.servers import PostgresServer, postgres_installations
from tests.support.store_by_hand import Desk, connected

LOOKS = 200
RENEWALS = 100
MANY_ROLES = 100_000
BATCH = 5_000
ROUNDS = 3
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


def tell_when_it_leads(election: Any) -> None:
    election.wait()
    print("lead", time.monotonic(), flush=True)


def stand(nodes: int) -> None:
    """Be a process with some nodes: print "ready", and when one of them leads, "lead" and the time."""
    import tenure

    with contextlib.ExitStack() as stack:
        for number in range(nodes):
            node = stack.enter_context(tenure.Node(os.environ["TENURE_URL"], name=f"{os.getpid()}-{number}"))
            threading.Thread(target=tell_when_it_leads, args=[node.election("r")], daemon=True).start()
        print("ready", time.monotonic(), flush=True)
        sys.stdin.read()


class Host:
    """A process with some nodes."""

    def __init__(self, url: str, nodes: int) -> None:
        command = [sys.executable, __file__, "stand", str(nodes)]
        self.process = subprocess.Popen(
            command, env={**os.environ, "TENURE_URL": url}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.process.stdout
        os.set_blocking(self.process.stdout.fileno(), False)
        self.said = b""

    def hear(self, word: str) -> float | None:
        """Return when the process last said the word, if it has."""
        assert self.process.stdout
        self.said += self.process.stdout.read() or b""
        times = [line.split()[1] for line in self.said.decode().splitlines() if line.startswith(f"{word} ")]
        return float(times[-1]) if times else None

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def wait_for(hosts: list[Host], word: str, after: float, number: int = 1) -> tuple[Host, float]:
    """Wait until some processes have said a word; return the first of them, and when."""
    until = time.monotonic() + LED_WITHIN_S
    while time.monotonic() < until:
        said = [(host, at) for host in hosts if (at := host.hear(word)) is not None and at > after]
        if len(said) >= number:
            return min(said, key=lambda each: each[1])
        time.sleep(0.002)
    raise TimeoutError(f"no {word!r} within {LED_WITHIN_S} s")


def failovers_ms(url: str, processes: int, nodes: int) -> list[float]:
    """Kill the process whose node leads, again and again; return how long it took until another one led."""
    hosts = [Host(url, nodes) for _ in range(processes)]
    try:
        wait_for(hosts, "ready", 0.0, processes)
        leader, _ = wait_for(hosts, "lead", 0.0)
        took = []
        for _ in range(ROUNDS):
            time.sleep(3)
            killed_at = time.monotonic()
            leader.kill()
            hosts.remove(leader)
            hosts.append(Host(url, nodes))
            leader, led_at = wait_for(hosts, "lead", killed_at)
            took.append((led_at - killed_at) * 1000)
            wait_for(hosts, "ready", 0.0, processes)
        return took
    finally:
        for host in hosts:
            host.kill()


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
            for processes, nodes in ((3, 1), (20, 10)):
                took = failovers_ms(server.create_database(), processes, nodes)
                middle = statistics.median(took)
                print(f"{processes * nodes} nodes: failover {middle:.0f} ms (largest {max(took):.0f}) of {ROUNDS}")


if __name__ == "__main__":
    main()
