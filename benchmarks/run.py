"""Measure what the documentation states, each figure against a floor in the same run.

    python benchmarks/run.py [--rounds N] [--traces N] [--json FILE]

Crash failover is the time from ``kill -9`` of the leader to a successor that has read ``is_leader == True``. Its floor
is a bare waiter in ``pg_advisory_lock`` (on MariaDB ``GET_LOCK``) on the same server, killed and timed in between.
The floor of a guard is the same table without one; see ``guards``. The floor of a dead host is a living one; see
``hosts``. At last it prints where the time of a crash failover and of a hand-over goes, and draws it to
build/trace.svg; see ``trace``.
Exits with 1 if a figure misses its bound.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import tenure  # noqa: E402
from benchmarks import guards, hosts, trace  # noqa: E402
from benchmarks.contenders import contenders, failover_ms, first_to_lead, floor_ms  # noqa: E402
from benchmarks.peers.bench import Bench  # noqa: E402
from benchmarks.peers.demands import FLOOR_FACTOR, ROLE_COST_US  # noqa: E402
from benchmarks.peers.servers import Servers  # noqa: E402
from benchmarks.starts import compile_modules  # noqa: E402
from tests.support.arguments import at_least  # noqa: E402
from tests.support.mariadb import MariaDbServer  # noqa: E402
from tests.support.servers import PostgresServer, postgres_installations  # noqa: E402
from tests.support.store_by_hand import execute  # noqa: E402

TRACE = ROOT / "build" / "trace.svg"
WriterFailovers = dict[bool, list[tuple[float, float]]]
"""Milliseconds until a successor led, and until it had written, by whether the table is guarded."""


def writer_failover_ms(url: str, *, guarded: bool) -> tuple[float, float]:
    """Kill a leader that writes all the time; return when its successor led, and when it had written."""
    execute(url, "create table invoices (n int)")
    with tenure.Node(url):  # makes Tenure's tables
        pass
    if guarded:
        with tenure.Registry(url) as registry:
            registry.guard("invoices", "billing")
    with contenders(url, 3, "writer") as cluster:
        cluster[0].wrote()
        killed_at = cluster[0].kill()
        successor = first_to_lead(cluster[1:])
        return (successor.led_at_ns - killed_at) / 1e6, (successor.wrote() - killed_at) / 1e6


def writer_failovers(server: PostgresServer | MariaDbServer, number: int, found: WriterFailovers) -> None:
    """Measure one pair: without and with a guard, in the other order every second time."""
    for guarded in (False, True) if number % 2 == 0 else (True, False):
        found[guarded].append(writer_failover_ms(server.create_database(), guarded=guarded))


def is_leader_ratio() -> tuple[float, float]:
    """Return nanoseconds of one ``is_leader`` and its ratio to a bare read of the clock."""
    with tempfile.TemporaryDirectory() as directory, tenure.Node(f"sqlite:///{directory}/bench.db") as node:
        election = node.election("role")
        election.wait(10)
        names = {"election": election, "clock_gettime": time.clock_gettime, "BOOTTIME": time.CLOCK_BOOTTIME}
        rounds = [
            (
                min(timeit.repeat("election.is_leader", globals=names, number=100_000, repeat=3)),
                min(timeit.repeat("clock_gettime(BOOTTIME)", globals=names, number=100_000, repeat=3)),
            )
            for _ in range(5)
        ]
    ns = min(check for check, _ in rounds) * 1e4
    return ns, statistics.median(check / clock for check, clock in rounds)


def interpreter_s(program: str) -> float:
    """Return how long an interpreter takes for a program."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", program], check=True)
    return time.perf_counter() - began


def run_s() -> float:
    """Return how long ``tenure run`` takes to start its command, on a new SQLite file."""
    with tempfile.TemporaryDirectory() as directory:
        began = time.time()
        url = ["--url", f"sqlite:///{directory}/bench.db"]
        command = [Path(sys.executable).with_name("tenure"), "run", "--role", "role", *url, "--", "date", "+%s.%N"]
        return float(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout) - began


def start_ratio(start_s: Callable[[], float], repeat: int = 15) -> tuple[float, float]:
    """Return how many milliseconds something takes to start, and how many bare interpreters start in that time."""
    pairs = [(start_s(), interpreter_s("pass")) for _ in range(repeat)]
    return 1000 * statistics.median(one for one, _ in pairs), min(one for one, _ in pairs) / min(
        bare for _, bare in pairs
    )


class Report:
    """The table that is printed, and whether every bound was kept."""

    def __init__(self) -> None:
        self.rows: list[dict[str, object]] = []

    def samples(self, what: str, milliseconds: list[float], bound_ms: float | None, floor_ms: float | None) -> None:
        median = statistics.median(milliseconds)
        self.add(
            what,
            f"{median:.1f} ms",
            f"{sorted(milliseconds)[int(len(milliseconds) * 0.95)]:.1f} ms",
            f"{median / floor_ms:.2f}" if floor_ms else "",
            None if bound_ms is None else (f"{bound_ms:.1f} ms", median <= bound_ms),
        )

    def failovers_of_writers(self, where: str, found: WriterFailovers) -> None:
        for index, until in enumerate(("", " until the successor has written,")):
            plain, guarded = ([pair[index] for pair in found[kind]] for kind in (False, True))
            least = statistics.median(plain)
            self.samples(f"crash failover of a writer,{until} {where}", plain, None, None)
            self.samples("the same, its table guarded", guarded, 1.5 * least, least)

    def costs(self, where: str, costs: dict[str, guards.Cost]) -> None:
        bounds = {
            "PostgreSQL, statement": lambda cost: ("30 µs more", cost.more_us <= 30),
            "PostgreSQL, statement in a pipeline": lambda cost: ("30 µs more", cost.more_us <= 30),
            "PostgreSQL, bulk": lambda cost: ("1.05 times", cost.ratio <= 1.05),
        }
        for what, cost in costs.items():
            name = f"{where}, {what}"
            bound = bounds[name](cost) if name in bounds else None
            times = f"{cost.ratio:.2f}" if what != "bulk" else f"{cost.ratio:.3f}"
            self.add(f"guard, {name}", f"{cost.more_us:.1f} µs more", f"{cost.p95_more_us:.1f} µs more", times, bound)

    def dead_hosts(self, where: str, found: dict[str, hosts.Found]) -> None:
        up = found.pop("all hosts up")
        least, quickest = statistics.median(up.failovers_ms), statistics.median(up.transactions_ms)
        self.samples(f"crash failover, {where}, all hosts up", up.failovers_ms, None, None)
        self.samples(f"fenced transaction, {where}, all hosts up", up.transactions_ms, None, None)
        for what, one in found.items():
            self.samples(f"crash failover, {where}, {what}", one.failovers_ms, 2 * least, least)
            self.samples(f"fenced transaction, {where}, {what}", one.transactions_ms, quickest + 50, quickest)

    def add(self, what: str, median: str, p95: str, ratio: str, bound: tuple[str, bool] | None) -> None:
        kept = "" if bound is None else ("yes" if bound[1] else "NO")
        self.rows.append(
            {"figure": what, "median": median, "p95": p95, "ratio to floor": ratio,
             "bound": bound[0] if bound else "", "kept": kept}
        )  # fmt: skip
        print(" | ".join(str(value) for value in self.rows[-1].values()), flush=True)

    def markdown(self) -> str:
        heads = list(self.rows[0])
        lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
        return "\n".join(lines + ["| " + " | ".join(str(row[head]) for head in heads) + " |" for row in self.rows])

    @property
    def kept(self) -> bool:
        return all(row["kept"] != "NO" for row in self.rows)


def measure_postgres(report: Report, rounds: int) -> None:
    floor, three, ten, thousand = [], [], [], []
    writers: WriterFailovers = {False: [], True: []}
    with PostgresServer(postgres_installations()[0]) as server:
        for number in range(rounds):
            url = server.create_database(f"bench{number}")
            floor.append(floor_ms(url))
            three.append(failover_ms(url, 3))
            ten.append(failover_ms(url, 10))
            if number % 3 == 0:
                thousand.append(failover_ms(server.create_database(f"many{number}"), 3, roles=1000))
            writer_failovers(server, number, writers)
            server.drop_database(f"bench{number}")
        costs = guards.on_postgres(server.create_database())
        version = server.installation.version
    least = statistics.median(floor)
    print(f"PostgreSQL {version}, Python {sys.version.split()[0]}, {os.cpu_count()} cores, {rounds} rounds")
    report.samples("floor: bare pg_advisory_lock", floor, None, None)
    report.samples("crash failover, 3 nodes", three, FLOOR_FACTOR * least, least)
    report.samples("crash failover, 10 nodes", ten, FLOOR_FACTOR * least, least)
    report.samples("crash failover, 1,000 roles", thousand, FLOOR_FACTOR * least + 1000 * ROLE_COST_US / 1000, least)
    report.failovers_of_writers("PostgreSQL", writers)
    report.costs("PostgreSQL", costs)


def measure_mariadb(report: Report, rounds: int) -> None:
    floor, three = [], []
    writers: WriterFailovers = {False: [], True: []}
    with MariaDbServer(settings={"innodb_flush_method": "O_DIRECT"}) as server:
        for number in range(rounds):
            url = server.create_database()
            floor.append(floor_ms(url))
            three.append(failover_ms(url, 3))
            writer_failovers(server, number, writers)
        costs = guards.on_mariadb(server.create_database(), server.pid)
        ((version,),) = server.execute("select version()")
    least = statistics.median(floor)
    print(f"MariaDB {version}")
    report.samples("floor: bare GET_LOCK", floor, None, None)
    report.samples("crash failover, MariaDB, 3 nodes", three, FLOOR_FACTOR * least, least)
    report.failovers_of_writers("MariaDB", writers)
    report.costs("MariaDB", costs)


def show_traces(rounds: int) -> None:
    """Print where the time goes, and draw it."""
    with contextlib.ExitStack() as stack:
        traces = trace.measure(Bench(Servers(stack)), rounds)
    TRACE.parent.mkdir(exist_ok=True)
    TRACE.write_text(trace.picture(traces))
    print(f"\n{trace.markdown(traces)}\n\ndrawn to {TRACE.relative_to(ROOT)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="how often each failover is measured")
    parser.add_argument("--traces", type=at_least(0), default=8, help="how many failovers and hand-overs are traced")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    options = parser.parse_args()
    report = Report()
    compile_modules()

    measure_postgres(report, options.rounds)
    measure_mariadb(report, options.rounds)
    some = max(3, options.rounds // 3)  # each round starts a dozen processes
    report.dead_hosts("PostgreSQL", hosts.on_postgres(some))
    report.dead_hosts("MariaDB", hosts.on_mariadb(some))
    sqlite = []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as directory:
            sqlite.append(failover_ms(f"sqlite:///{directory}/bench.db", 3))
    report.samples("crash failover, SQLite, 3 nodes", sqlite, 150, None)
    ns, ratio = is_leader_ratio()
    report.add("is_leader", f"{ns:.0f} ns", "", f"{ratio:.2f}", ("2 clock reads", ratio <= 2))
    ms, ratio = start_ratio(lambda: interpreter_s("import tenure"))
    report.add("import tenure", f"{ms:.0f} ms", "", f"{ratio:.2f}", ("2 interpreter starts", ratio <= 2))
    ms, ratio = start_ratio(run_s)
    report.add("tenure run, SQLite", f"{ms:.0f} ms", "", f"{ratio:.2f}", ("15 interpreter starts", ratio <= 15))
    print("\n" + report.markdown())
    if options.traces:
        show_traces(options.traces)
    if options.json:
        options.json.write_text(json.dumps(report.rows, indent=2) + "\n")
    return 0 if report.kept else 1


if __name__ == "__main__":
    sys.exit(main())
