"""Tenure beside what people would use instead: same machine, same run, in turn.

    make bench PEERS=1 [ARGS="--rounds 20 --pauses 5 --rest 30 --defaults"]

For each entrant (benchmarks/peers has them), with three processes that stand for one role:

    start        from the start of a process to its leadership, nobody else there, and an empty database
    crash        from kill -9 of the leader to another's leadership
    hand-over    from the leader's resigning to another's leadership
    pause        SIGSTOP for longer than the lease: who leads meanwhile, and how long the old leader goes on believing
                 after it wakes, while another leads
    at rest      requests per second and node, CPU, connections
    check        what it costs to ask whether one leads

And for Tenure alone: where the time of a crash failover and of a hand-over goes, how long the start takes, and how
crash failover and the cost at rest grow with nodes and roles. Every round visits everybody, in a random order, so that
a machine that is busy now and then is so for all. What waits for many seconds (a lease that must run out, a pause, the
cost at rest) is measured many at a time, after the rounds; the table says in how many rounds. To try something:

    make bench PEERS=1 ARGS="--rounds 2 --pauses 0 --rests 0 --only 'bare|tenure, TTL'"

The results go to build/ then.

The table, the pictures and everything about the machine go to benchmarks/RESULTS.md; that file is written by this
program and by nobody else, except its last section, which is of schedulers.py and stays.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import trace  # noqa: E402
from benchmarks.peers import FLOOR, OURS, Entrant, Variant, entrants, report, servers  # noqa: E402
from benchmarks.peers.bench import Bench  # noqa: E402
from benchmarks.peers.contender import Late  # noqa: E402
from benchmarks.peers.figures import median, time_of  # noqa: E402
from benchmarks.starts import STARTS, compile_modules  # noqa: E402
from tests.support.arguments import at_least, run  # noqa: E402

GROWTH = ((3, 1), (10, 1), (50, 1), (3, 100), (3, 10_000))
ROUNDS = 20
USUAL = {"waits": 5, "pauses": 5, "rests": 2, "growth_rounds": 8, "traces": 12, "starts": 20}
"""How often the others are measured, unless it is said; never more often than there are rounds."""
OF_TENURE_ALONE = ("growth", "traces", "starts")
AT_ONCE = {"crash": 16, "hand-over": 16, "pause": 8, "rest": 6}
"""How many clusters wait at a time. Those at rest are few, because their processor time is measured."""

Samples = dict[str, dict[str, list[Any]]]
Turn = tuple[Entrant, str, Callable[[], Any]]


class Measurement:
    """The samples, by entrant and figure."""

    def __init__(self, bench: Bench, everybody: list[Entrant], options: argparse.Namespace) -> None:
        self.bench, self.everybody, self.options = bench, everybody, options
        self.samples: Samples = defaultdict(lambda: defaultdict(list))

    def rounds(self) -> None:
        """Visit everybody in every round, in a random order."""
        for number in range(self.options.rounds):
            for entrant in random.sample(self.everybody, len(self.everybody)):
                quick = tuple(one for one in ("start", "crash", "hand-over") if self._is_quick(entrant, one))
                if quick and number % entrant.variant.every == 0:
                    found = self._take((entrant, "round", lambda one=entrant, what=quick: self.bench.visit(one, what)))
                    for what, sample in (found or {}).items():
                        self.samples[entrant.label][what].append(sample)

    def waits(self) -> None:
        """Measure what waits, many at a time."""
        for what in ("crash", "hand-over"):
            self._at_once(what, (
                (one, what, lambda one=one, what=what: self.bench.visit(one, (what,)).get(what))
                for one in self.everybody
                if what in one.variant.figures and what in one.variant.waits
                for _ in range(self.options.rounds if one.is_default else self.options.waits)
            ))  # fmt: skip
        self._at_once("pause", self._turns("pause", self.options.pauses, self.bench.pause))
        self._at_once(
            "rest", self._turns("rest", self.options.rests, lambda one: self.bench.rest(one, self.options.rest))
        )
        if self.options.rests:
            for entrant, _, take in self._turns("check", 1, self.bench.check_ns):
                self._keep((entrant, "check", take))

    def _is_quick(self, entrant: Entrant, what: str) -> bool:
        return what in entrant.variant.figures and what not in entrant.variant.waits

    def _turns(self, what: str, rounds: int, take: Callable[[Entrant], Any]) -> Iterable[Turn]:
        return [
            (one, what, lambda one=one: take(one))
            for _ in range(rounds)
            for one in self.everybody
            if what in one.variant.figures
        ]

    def _at_once(self, what: str, turns: Iterable[Turn]) -> None:
        shuffled = list(turns)
        random.shuffle(shuffled)
        with ThreadPoolExecutor(AT_ONCE[what]) as pool:
            list(pool.map(self._keep, shuffled))

    def _keep(self, turn: Turn) -> None:
        entrant, what, _ = turn
        failed = object()
        sample = self._take(turn, failed)
        if sample is not failed:
            self.samples[entrant.label][what].append(sample)

    def _take(self, turn: Turn, otherwise: Any = None) -> Any:
        entrant, what, take = turn
        try:
            sample = take()
        except (Late, OSError, RuntimeError) as error:
            print(f"{entrant.label}: {what}: {error}", file=sys.stderr)
            return otherwise
        print(f"{what:10} {entrant.label:45} {sample}", flush=True)
        return sample


def grow(bench: Bench, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure Tenure alone, with more nodes and more roles; and as many bare waiters beside it."""
    rows = []
    floor = Entrant(FLOOR, "")
    for nodes, roles in GROWTH[: options.growth]:
        entrant = Entrant(OURS, "TTL 30 s", Variant({"lease_s": 30.0, "roles": roles}))
        rows.append(
            {
                "nodes": nodes,
                "roles": roles,
                "floor_ms": bench.crashes_ms(floor, nodes, options.growth_rounds),
                "crash_ms": bench.crashes_ms(entrant, nodes, options.growth_rounds),
                "rest": bench.rest(entrant, options.rest, nodes),
            }
        )
        print(rows[-1], flush=True)
    return rows


def starts(bench: Bench, sites: servers.Servers, rounds: int) -> dict[str, list[float]]:
    """Start every program in every round, in a random order; return milliseconds by the name of the program."""
    found: dict[str, list[float]] = defaultdict(list)
    with contextlib.ExitStack() as stack:
        used = {kind: stack.enter_context(bench.place(sites[kind]))[0] for kind in ("postgres", "sqlite")}
        for start in STARTS:
            if start.server and not start.fresh:
                start.ms(used[start.server])  # it makes the tables
        for _ in range(rounds):
            for start in random.sample(STARTS, len(STARTS)):
                with contextlib.ExitStack() as fresh:
                    url = used.get(start.server, "")
                    if start.fresh:
                        url, _ = fresh.enter_context(bench.place(sites[start.server]))
                    found[start.name].append(start.ms(url))
    for name, taken in found.items():
        print(f"start      {name:45} {time_of(median(taken))}", flush=True)
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rounds", type=at_least(1), default=ROUNDS, help="how often start, crash, hand-over are measured"
    )
    parser.add_argument("--waits", type=at_least(0), help="how often those that wait for many seconds")
    parser.add_argument("--pauses", type=at_least(0), help="how often the pause")
    parser.add_argument("--rests", type=at_least(0), help="how often the cost at rest")
    parser.add_argument("--rest", type=at_least(1, float), default=30.0, help="for so many seconds")
    parser.add_argument("--growth", type=at_least(0), help="how many of the sizes of Tenure alone")
    parser.add_argument("--growth-rounds", type=at_least(1))
    parser.add_argument("--traces", type=at_least(0), help="how many failovers and hand-overs are traced")
    parser.add_argument("--starts", type=at_least(0), help="how often each short program is started")
    parser.add_argument("--defaults", action="store_true", help="peers as they come, too, in as many rounds")
    parser.add_argument(
        "--only", help="those whose name has this in it, or that: 'River|Oban'; without what is of Tenure alone"
    )
    parser.add_argument(
        "--into", type=Path, help="where the results go: here, and to build/ if they are of some, or of fewer rounds"
    )
    options = parser.parse_args()
    fill_in(options)
    if not chosen(options):
        parser.error(f"--only: nobody has {options.only!r} in its name")
    return options


def fill_in(options: argparse.Namespace) -> None:
    """Give what was left open: fewer rounds mean fewer of everything, and some of all nothing of Tenure alone."""
    for name, usual in {**USUAL, "growth": len(GROWTH)}.items():
        if getattr(options, name) is None:
            skipped = options.only and name in OF_TENURE_ALONE
            setattr(options, name, 0 if skipped else usual if name == "growth" else min(usual, options.rounds))
    # RESULTS.md is of everybody, in all rounds.
    is_partial = options.only or options.rounds < ROUNDS
    options.into = options.into or (ROOT / "build" if is_partial else Path(__file__).parent)


def chosen(options: argparse.Namespace) -> list[Entrant]:
    names = (options.only or "").split("|")
    return [one for one in entrants(defaults=options.defaults) if any(name in one.label for name in names)]


def measure(options: argparse.Namespace) -> report.Report:
    made = report.Report([])
    with contextlib.ExitStack() as stack:
        sites = servers.Servers(stack)
        for entrant in chosen(options):
            try:
                sites[entrant.server]
                report.package_version(entrant)
            except (servers.Missing, ImportError) as error:
                made.left_out.append(f"{entrant.label}: {error} is not installed")
                print(f"left out: {made.left_out[-1]}", file=sys.stderr)
                continue
            made.everybody.append(entrant)
        bench = Bench(sites)
        if options.traces:
            made.traces = trace.measure(bench, options.traces)
        if options.starts:
            made.starts = starts(bench, sites, options.starts)
        measurement = Measurement(bench, made.everybody, options)
        made.samples = measurement.samples
        measurement.rounds()
        measurement.waits()
        made.growth = grow(bench, options)
        made.durability = report.durability(sites)
    return made


def main() -> int:
    options = arguments()
    compile_modules()
    began = time.time()
    made = measure(options)
    made.seconds = time.time() - began
    told = {name: value for name, value in vars(options).items() if name != "into"}
    made.options = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in told.items())
    options.into.mkdir(exist_ok=True)
    (options.into / "results.json").write_text(json.dumps(made.raw(), indent=1) + "\n")
    (options.into / "results.svg").write_text(made.picture())
    if made.traces:
        (options.into / report.TRACE_SVG).write_text(trace.picture(made.traces))
    results = options.into / "RESULTS.md"
    results.write_text(made.markdown() + report.schedulers_in(results))
    print(made.markdown())
    return 0 if made.kept else 1


if __name__ == "__main__":
    run(main, "bench")
