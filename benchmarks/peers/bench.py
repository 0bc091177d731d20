"""Clusters of candidates, and what is measured of them."""

from __future__ import annotations

import contextlib
import random
import signal
import threading
import time
from collections.abc import Iterator

from benchmarks.peers import Entrant
from benchmarks.peers.contender import Contender, Late, first_to_lead
from benchmarks.peers.counting import CountingLine
from benchmarks.peers.servers import Servers, Site

SETTLE_S = 1.2
"""A look of Tenure takes a second at most: then every member has seen the others."""
WATCHED_AFTER_WAKING_S = 5.0
CHECKS = {"tenure_node": 200_000, "gemstone": 300, "python_redis_lock": 1000}
Found = dict[str, float | None]


class Cluster:
    """Candidates in one place; the first of `running` leads."""

    def __init__(self, entrant: Entrant, address: str, number: int) -> None:
        self.entrant, self._address, self._number = entrant, address, number
        self.running: list[Contender] = []
        self._started = 0

    def add(self, count: int = 1) -> None:
        """Start some, and return when they stand."""
        new = []
        for _ in range(count):
            self._started += 1
            new.append(Contender(self.entrant, self._address, f"node{self._started}-{self._number}"))
            self.running.append(new[-1])
        for one in new:
            one.when("ready")

    def settle(self) -> None:
        # The moment of the fault is by chance: a poll may be due at once, or not for long.
        time.sleep(SETTLE_S + getattr(self.entrant.home, "SETTLE_S", 0.0) + self.entrant.options.get("roles", 0) / 2000)
        time.sleep(random.uniform(0, self.entrant.options.get("poll_s", 0.5)))

    @property
    def leader(self) -> Contender:
        return self.running[0]

    def start_ms(self) -> float:
        return (self.leader.when("lead") - self.leader.started_ns) / 1e6

    def crash_ms(self) -> float | None:
        """Kill the leader; return how long nobody led. Its successor is the first of the cluster then."""
        dead = self.running.pop(0)
        took = self._succeeded(dead.signal(signal.SIGKILL))
        dead.close()
        return took

    def handover_ms(self) -> float | None:
        """Have the leader resign; return how long nobody led."""
        old = self.running.pop(0)
        try:
            return self._succeeded(old.resign(self.running[-1].name if self.entrant.variant.names_successor else ""))
        finally:
            self.running.append(old)

    def _succeeded(self, since_ns: int) -> float | None:
        led = first_to_lead(self.running, 3 * self.entrant.lease_s + 20)
        if led is None:
            return None
        if led[1] < since_ns:
            raise Late("another led already: the leader had lost its lease by itself")
        self.running.remove(led[0])
        self.running.insert(0, led[0])
        return (led[1] - since_ns) / 1e6

    def close(self) -> None:
        for one in self.running:
            one.close()


class Bench:
    """Runs scenarios against servers that are started once, each in a place of its own. Threads may share it."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._count = 0
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def place(self, site: Site, port: int | None = None) -> Iterator[tuple[str, int]]:
        """Make a fresh place; yield its address and its number."""
        with self._lock:
            self._count += 1
            number = self._count
            address = site.place(number, port)
        try:
            yield address, number
        finally:
            with self._lock:
                site.remove(number)

    @contextlib.contextmanager
    def cluster(self, entrant: Entrant, nodes: int | None = None, port: int | None = None) -> Iterator[Cluster]:
        """Start some; the first of them leads."""
        with (
            self.place(self._servers[entrant.server], port) as (address, number),
            contextlib.closing(Cluster(entrant, address, number)) as cluster,
        ):
            cluster.add()
            cluster.leader.when("lead")
            others = (nodes or entrant.variant.nodes) - 1
            if others:
                cluster.add(others)
                cluster.settle()
            yield cluster

    # --- what is measured ---

    def visit(self, entrant: Entrant, figures: tuple[str, ...]) -> Found:
        """Measure start, crash and hand-over, as many of them as are asked for, in one cluster."""
        nodes = 1 if figures == ("start",) else None
        with self.cluster(entrant, nodes) as cluster:
            found: Found = {"start": cluster.start_ms()} if "start" in figures else {}
            if "crash" in figures:
                found["crash"] = cluster.crash_ms()
            if "hand-over" in figures and found.get("crash", 0.0) is not None:
                if "crash" in figures:
                    cluster.add()
                    cluster.settle()
                found["hand-over"] = cluster.handover_ms()
            return found

    def crashes_ms(self, entrant: Entrant, nodes: int, rounds: int) -> list[float | None]:
        """Kill one leader after the other in one cluster; another joins for each."""
        found = []
        with self.cluster(entrant, nodes) as cluster:
            for number in range(rounds):
                if number:
                    cluster.add()
                    cluster.settle()
                found.append(cluster.crash_ms())
        return found

    def pause(self, entrant: Entrant) -> Found:
        """Stop the leader for longer than its lease, wake it, and see who believes what."""
        with self.cluster(entrant) as cluster:
            old, *others = cluster.running
            stopped = old.signal(signal.SIGSTOP)
            led = first_to_lead(others, 2.5 * entrant.lease_s + 3)  # some wait for two leases
            time.sleep(0.5)
            woken = old.signal(signal.SIGCONT)
            lost: int | None = None
            with contextlib.suppress(Late):
                lost = old.when("lost", WATCHED_AFTER_WAKING_S)
            if led is None:
                return {"succeeded_ms": None, "overlap_ms": None}
            until = woken + int(WATCHED_AFTER_WAKING_S * 1e9) if lost is None else lost
            return {"succeeded_ms": (led[1] - stopped) / 1e6, "overlap_ms": max(0.0, (until - woken) / 1e6)}

    def rest(self, entrant: Entrant, seconds: float, nodes: int | None = None) -> Found:
        """Measure what a node costs while nothing happens; without a server there are no requests to count."""
        port = self._servers[entrant.server].port
        with (
            contextlib.nullcontext() if port is None else contextlib.closing(CountingLine(port)) as line,
            self.cluster(entrant, nodes, line and line.port) as cluster,
        ):
            for one in cluster.running:
                one.calm()
            time.sleep(SETTLE_S)
            count = len(cluster.running)
            requests, cpu, began = line and line.requests, sum(one.cpu_s() for one in cluster.running), time.monotonic()
            time.sleep(seconds)
            passed = time.monotonic() - began
            return {
                "requests_per_s": None if line is None else (line.requests - requests) / passed / count,
                "cpu_ms_per_s": 1000 * (sum(one.cpu_s() for one in cluster.running) - cpu) / passed / count,
                "connections": None if line is None else line.connections / count,
            }

    def check_ns(self, entrant: Entrant) -> float | None:
        if hasattr(entrant.home, "command"):
            return None
        with self.cluster(entrant, 1) as cluster:
            return cluster.leader.check_ns(CHECKS.get(entrant.module, 200_000))
