"""Tenure beside what people would use instead: same machine, same run, in turn.

    make bench PEERS=1 [ARGS="--rounds 20 --pauses 5 --rest 30 --defaults"]

For each entrant (benchmarks/peers has them), with three processes that stand for one role:

    start        from the start of a process to its leadership, nobody else there
    crash        from kill -9 of the leader to another's leadership
    hand-over    from the leader's resigning to another's leadership
    pause        SIGSTOP for longer than the lease: who leads meanwhile, and how long the old leader goes on believing
                 after it wakes, while another leads
    at rest      requests per second and node, CPU, connections
    check        what it costs to ask whether one leads

And for Tenure alone how crash failover and the cost at rest grow with nodes and roles. Every round visits everybody, in
a random order, so that a machine that is busy now and then is so for all. The table, a picture and everything about the
machine go to benchmarks/RESULTS.md; that file is written by this program and by nobody else, except its last section,
which is of schedulers.py and stays.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.peers import Entrant, entrants, report, servers  # noqa: E402
from benchmarks.peers.contender import Contender, Late, first_to_lead  # noqa: E402
from benchmarks.peers.counting import CountingLine  # noqa: E402
from tests.support.arguments import at_least, run  # noqa: E402

NODES = 3
SETTLE_S = 1.5
WATCHED_AFTER_WAKING_S = 5.0
CHECKS = {"tenure_node": 200_000, "gemstone": 300, "python_redis_lock": 1000}
GROWTH = ((3, 1), (10, 1), (50, 1), (3, 100), (3, 10_000))


class Bench:
    """Runs scenarios against servers that are started once, each in a place of its own on them."""

    def __init__(self, started: dict[str, Any]) -> None:
        self._servers = started
        self._count = 0

    def place(self, entrant: Entrant, port: int | None = None) -> str:
        """Return the address of a fresh place: a new database, or an emptied server."""
        server = self._servers[entrant.server]
        self._count += 1
        if entrant.server == "postgres":
            url = server.create_database(f"bench{self._count}")
            return url if port is None else url.replace(f":{server.port}/", f":{port}/")
        port = port or server.port
        if entrant.server == "redis":
            import redis

            redis.Redis(port=server.port).flushall()
            return f"redis://127.0.0.1:{port}/0"
        if entrant.server == "zookeeper":
            return f"127.0.0.1:{port}/bench{self._count}"
        return f"127.0.0.1:{port}"

    def port(self, entrant: Entrant) -> int:
        return int(self._servers[entrant.server].port)

    @contextlib.contextmanager
    def cluster(self, entrant: Entrant, nodes: int = NODES, url: str | None = None) -> Iterator[list[Contender]]:
        """Start some; the first of them leads."""
        address = url or self.place(entrant)
        running = [Contender(entrant, address, f"one-{self._count}")]
        try:
            running[0].when("lead")
            running += [Contender(entrant, address, f"other{number}-{self._count}") for number in range(nodes - 1)]
            for one in running[1:]:
                one.when("ready")
            # The moment of the fault is by chance: a poll may be due at once, or not for long.
            time.sleep(SETTLE_S + entrant.options.get("roles", 0) / 2000)
            time.sleep(random.uniform(0, entrant.options.get("poll_s", 0.5)))
            yield running
        finally:
            for one in running:
                one.close()

    # --- what is measured ---

    def start_ms(self, entrant: Entrant) -> float:
        one = Contender(entrant, self.place(entrant), f"alone-{self._count}")
        try:
            return (one.when("lead") - one.started_ns) / 1e6
        finally:
            one.close()

    def crash_ms(self, entrant: Entrant, nodes: int = NODES) -> float | None:
        with self.cluster(entrant, nodes) as running:
            killed = running[0].signal(signal.SIGKILL)
            return self._succeeded(running[1:], killed, entrant)

    def handover_ms(self, entrant: Entrant) -> float | None:
        with self.cluster(entrant) as running:
            return self._succeeded(running[1:], running[0].resign(), entrant)

    def _succeeded(self, waiting: list[Contender], since_ns: int, entrant: Entrant) -> float | None:
        led = first_to_lead(waiting, 3 * entrant.lease_s + 20)
        if led is not None and led[1] < since_ns:
            raise Late("another led already: the leader had lost its lease by itself")
        return None if led is None else (led[1] - since_ns) / 1e6

    def pause(self, entrant: Entrant) -> dict[str, float | None]:
        """Stop the leader for longer than its lease, wake it, and see who believes what."""
        with self.cluster(entrant) as running:
            stopped = running[0].signal(signal.SIGSTOP)
            led = first_to_lead(running[1:], 1.5 * entrant.lease_s + 3)
            time.sleep(0.5)
            woken = running[0].signal(signal.SIGCONT)
            lost: int | None = None
            with contextlib.suppress(Late):
                lost = running[0].when("lost", WATCHED_AFTER_WAKING_S)
            if led is None:
                return {"succeeded_ms": None, "overlap_ms": None}
            until = woken + int(WATCHED_AFTER_WAKING_S * 1e9) if lost is None else lost
            return {"succeeded_ms": (led[1] - stopped) / 1e6, "overlap_ms": max(0.0, (until - woken) / 1e6)}

    def rest(self, entrant: Entrant, seconds: float, nodes: int = NODES) -> dict[str, float]:
        with (
            contextlib.closing(CountingLine(self.port(entrant))) as line,
            self.cluster(entrant, nodes, self.place(entrant, line.port)) as running,
        ):
            for one in running:
                one.calm()
            time.sleep(SETTLE_S)
            requests, cpu, began = line.requests, sum(one.cpu_s() for one in running), time.monotonic()
            time.sleep(seconds)
            passed = time.monotonic() - began
            return {
                "requests_per_s": (line.requests - requests) / passed / nodes,
                "cpu_ms_per_s": 1000 * (sum(one.cpu_s() for one in running) - cpu) / passed / nodes,
                "connections": line.connections / nodes,
            }

    def check_ns(self, entrant: Entrant) -> float | None:
        if hasattr(entrant.home, "command"):
            return None
        with self.cluster(entrant, 1) as running:
            return running[0].check_ns(CHECKS.get(entrant.module, 200_000))


def measure(bench: Bench, everybody: list[Entrant], options: argparse.Namespace) -> dict[str, Any]:
    """Visit everybody in every round, in a random order; return the samples by entrant and figure."""
    samples: dict[str, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))

    def visit(what: str, turn: Callable[[Entrant], Any]) -> None:
        for entrant in random.sample(everybody, len(everybody)):
            try:
                sample = turn(entrant)
            except (Late, OSError, RuntimeError) as error:
                print(f"{entrant.label}: {what}: {error}", file=sys.stderr)
                continue
            samples[entrant.label][what].append(sample)
            print(f"{what:10} {entrant.label:45} {sample}", flush=True)

    for number in range(options.rounds):
        visit("start", bench.start_ms)
        visit("crash", bench.crash_ms)
        visit("hand-over", bench.handover_ms)
        if number < options.pauses:
            visit("pause", bench.pause)
        if number < options.rests:
            visit("rest", lambda entrant: bench.rest(entrant, options.rest))
            visit("check", bench.check_ns)
    return samples


def grow(bench: Bench, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure Tenure alone, with more nodes and more roles."""
    rows = []
    for nodes, roles in GROWTH[: options.growth]:
        entrant = Entrant("tenure_node", "TTL 30 s", {"lease_s": 30.0, "roles": roles})
        rows.append(
            {
                "nodes": nodes,
                "roles": roles,
                "crash_ms": [bench.crash_ms(entrant, nodes) for _ in range(options.growth_rounds)],
                "rest": bench.rest(entrant, options.rest, nodes),
            }
        )
        print(rows[-1], flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=at_least(1), default=20, help="how often start, crash, hand-over are measured")
    parser.add_argument("--pauses", type=at_least(0), default=5, help="in how many of those rounds the pause, too")
    parser.add_argument("--rests", type=at_least(0), default=3, help="and the cost at rest")
    parser.add_argument("--rest", type=at_least(1, float), default=30.0, help="for so many seconds")
    parser.add_argument("--growth", type=at_least(0), default=len(GROWTH), help="how many of the sizes of Tenure alone")
    parser.add_argument("--growth-rounds", type=at_least(1), default=5)
    parser.add_argument("--defaults", action="store_true", help="peers as they come, too: minutes for each round")
    parser.add_argument("--only", help="those whose name has this in it")
    parser.add_argument("--into", type=Path, help="where RESULTS.md and the rest go: here, and to build/ with --only")
    options = parser.parse_args()
    found = [one for one in entrants(defaults=options.defaults) if (options.only or "") in one.label]
    if not found:
        parser.error(f"--only: nobody has {options.only!r} in its name")
    if options.only:
        options.into = options.into or ROOT / "build"  # RESULTS.md is of everybody
        options.into.mkdir(exist_ok=True)
    options.into = options.into or Path(__file__).parent
    began = time.time()
    with contextlib.ExitStack() as stack:
        everybody, started, left_out = [], {}, []
        for entrant in found:
            try:
                if entrant.server not in started:
                    started[entrant.server] = stack.enter_context(servers.STARTERS[entrant.server]())
                report.package_version(entrant)
            except (servers.Missing, ImportError) as error:
                left_out.append(f"{entrant.label}: {error} is not installed")
                print(f"left out: {left_out[-1]}", file=sys.stderr)
                continue
            everybody.append(entrant)
        bench = Bench(started)
        samples = measure(bench, everybody, options)
        growth = grow(bench, options) if "postgres" in started else []
    told = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in vars(options).items() if name != "into")
    made = report.Report(everybody, samples, growth, left_out, told, time.time() - began)
    (options.into / "results.json").write_text(json.dumps(made.raw(), indent=1) + "\n")
    (options.into / "results.svg").write_text(made.picture())
    results = options.into / "RESULTS.md"
    results.write_text(made.markdown() + report.schedulers_in(results))
    print(made.markdown())
    return 0 if made.kept else 1


if __name__ == "__main__":
    run(main, "bench")
