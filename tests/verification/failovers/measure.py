"""One run: the same fault again and again on one Patroni cluster, and a row of figures for each."""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.support import history
from tests.support.cluster import ROOT, Cluster, NodeFailed
from tests.support.history import History, now_ns
from tests.support.patroni import FAULTS, Fault, PatroniCluster, Replication, Route, initialise
from tests.verification.failovers.contender import TABLES, impatient

DATABASE, USER = "app", "app"
NODES = 3
CALM_S = 3.0
CALM_NS = round(CALM_S * 1e9)
PATIENCE_S = 180.0
MEND_AFTER_S = 60.0


@dataclass(frozen=True)
class Plan:
    """What is measured, and how often."""

    fault: str
    count: int
    replication: Replication
    route: Route
    ttl: float
    init: tuple[str, ...]
    """What `tenure init` is told."""

    def __str__(self) -> str:
        return (
            f"{self.fault} x {self.count}, {self.replication}, by {self.route}, ttl={self.ttl:g},"
            f" tenure init {' '.join(self.init)}"
        )


@dataclass
class Row:
    """One fault, in seconds and in numbers of writes."""

    since: int
    until: int = 0
    load: float = 0.0
    gap_s: float = 0.0
    nobody_s: float = 0.0
    token_before: int = 0
    token_after: int = 0
    overlaps: int = 0
    acknowledged: int = 0
    lost: int = 0
    plain: int = 0
    plain_lost: int = 0

    @property
    def beyond_s(self) -> float:
        """How much longer nobody led than the database was gone; below 0 where the leader trusted on meanwhile."""
        return self.nobody_s - self.gap_s


@dataclass
class Measured:
    """A run."""

    plan: Plan
    version: str
    rows: list[Row] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    def table(self) -> str:
        heads = ("fault", "db gap", "without a leader", "beyond", "overlaps", "tokens", "fenced acknowledged", "lost")
        heads += ("by a lease acknowledged", "lost", "load")
        lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
        for number, row in enumerate(self.rows, 1):
            grown = "grew" if row.token_after > row.token_before else "kept"  # token_regressions() finds one that fell
            cells: list[object] = [number, f"{row.gap_s:.2f}", f"{row.nobody_s:.2f}", f"{row.beyond_s:+.2f}"]
            cells += [row.overlaps, f"{row.token_before:#x} → {row.token_after:#x} {grown}"]
            cells += [row.acknowledged, row.lost, row.plain, row.plain_lost, f"{row.load:.1f}"]
            lines.append(f"| {' | '.join(map(str, cells))} |")
        if self.rows:
            lines.append(f"| {' | '.join(self.summary())} |")
        return "\n".join(lines)

    def summary(self) -> list[str]:
        """The last row: median (largest) of the times, the sums of the rest."""

        def times(name: str) -> str:
            values = [getattr(row, name) for row in self.rows]
            return f"{statistics.median(values):.2f} ({max(values):.2f})"

        def total(name: str) -> str:
            return str(sum(getattr(row, name) for row in self.rows))

        names = ("acknowledged", "lost", "plain", "plain_lost")
        load = f"{statistics.median(row.load for row in self.rows):.1f}"
        cells = [f"**{len(self.rows)}: median (largest)**", times("gap_s"), times("nobody_s"), times("beyond_s")]
        return [*cells, total("overlaps"), "", *map(total, names), load]


def measure(plan: Plan, directory: Path) -> Measured:
    """Do it, and judge it."""
    with PatroniCluster(plan.replication) as patroni, contextlib.ExitStack() as stack:
        measured = Measured(plan, patroni.version)
        url = _prepare(patroni, plan)
        cluster = Cluster(
            patroni.outside_url(DATABASE, user=USER),
            directory,
            strictly=False,
            program="tests.verification.failovers.contender",
            sample_every_s=0.002,
            heartbeat_s=0.05,
            ttl=plan.ttl,
        )
        stack.callback(_close, cluster)
        stack.enter_context(_prober(patroni, plan.route, directory / "probes.jsonl"))
        cluster.spawn(*(f"n{number}" for number in range(NODES)), netns=patroni.network.hub, url=url)
        wait_until_led(cluster)
        for number in range(1, plan.count + 1):
            row = _once(patroni, cluster, FAULTS[plan.fault])
            measured.rows.append(row)
            print(
                f"{plan.fault} {number} of {plan.count}: mended after {(row.until - row.since) / 1e9:.1f} s", flush=True
            )
        for node in cluster.nodes:
            node.close()  # what is acknowledged from now on would be missing in the tables
        ledger = cluster.execute("select n, token, element from ledger order by n")
        plain = cluster.execute("select element from plain")
        lines = [*cluster.history.lines, *History.load([directory / "probes.jsonl"]).lines]
    judge(measured, History(lines), ledger, {element for (element,) in plain})
    return measured


def _prepare(patroni: PatroniCluster, plan: Plan) -> str:
    """Make the database, its tables and Tenure's; return the URL by the route."""
    import psycopg

    patroni.create_database(DATABASE, owner=USER)
    outside = patroni.outside_url(DATABASE, user=USER)
    with psycopg.connect(outside, autocommit=True) as connection:
        for sql in TABLES:
            connection.execute(sql.encode())
    initialise(outside, plan.init)
    return patroni.url(DATABASE, plan.route, user=USER)


@contextlib.contextmanager
def _prober(patroni: PatroniCluster, route: Route, record: Path) -> Iterator[None]:
    """By the same route; where that is a list of hosts, on each of them, or the prober would wait for the dead one."""
    urls = [patroni.url(DATABASE, route, user=USER)]
    if route == "hosts":
        urls = [machine.url(DATABASE, user=USER) for machine in patroni.machines]
    command = ["ip", "netns", "exec", patroni.network.hub, sys.executable, "-m", "tests.verification.failovers.prober"]
    process = subprocess.Popen([*command, str(record), *map(impatient, urls)], cwd=ROOT)
    try:
        yield
    finally:
        process.kill()
        process.wait(10)


def _close(cluster: Cluster) -> None:
    for node in cluster.nodes:
        node.close()
    cluster.recorder.close()


def _once(patroni: PatroniCluster, cluster: Cluster, fault: Fault) -> Row:
    time.sleep(CALM_S)
    primary = patroni.primary()
    row = Row(cluster.fault(fault.what, primary.name), load=os.getloadavg()[0])
    fault.strike(primary)
    patroni.wait_for_writes(*([primary] if fault.moves else []))
    with contextlib.suppress(NodeFailed):  # with two primaries it may be that nobody can, until this is mended
        wait_until_led(cluster, MEND_AFTER_S)
    cluster.fault("mend", primary.name)
    fault.mend(primary)
    patroni.wait_until_whole()
    wait_until_led(cluster)
    row.until = now_ns()
    return row


def wait_until_led(cluster: Cluster, timeout: float = PATIENCE_S) -> None:
    """Wait until a node leads and its fenced writes pass."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        for node in cluster.nodes:
            with contextlib.suppress(NodeFailed):
                if node.ask("status")["leader"] and "error" not in node.ask("fence"):
                    return
        time.sleep(0.05)
    raise NodeFailed(f"nobody leads within {timeout:g} s")


def judge(measured: Measured, recorded: History, ledger: list[tuple], plain: set[str]) -> None:
    """Fill in the rows, and say what is broken."""
    elements = {element for _, _, element in ledger}
    overlaps = history.overlap_spans(recorded)
    beliefs = recorded.beliefs()
    commits = [line.at for line in recorded.of_kind("probe")]
    for row, following in itertools.zip_longest(measured.rows, measured.rows[1:]):
        until = following.since if following else recorded.end
        # Who wrote in the calm before is judged with the fault: it is what may be lost.
        during = range(row.since - CALM_NS, until - CALM_NS if following else until)
        around = [at for at in commits if row.since - 10**9 <= at <= row.until]
        row.gap_s = max((b - a for a, b in itertools.pairwise(around)), default=until - row.since) / 1e9
        row.nobody_s = max((one.length for one in history.leaderless(recorded, row.since, row.until)), default=0) / 1e9
        row.token_before = max((one.token or 0 for one in beliefs if one.since < row.since), default=0)
        row.token_after = max((one.token or 0 for one in beliefs if one.since < until), default=0)
        row.overlaps = sum(one.since in during for one in overlaps)
        fenced = [line.details["element"] for line in recorded.of_kind("write") if line.ok and line.at in during]
        by_lease = [line.details["element"] for line in recorded.of_kind("plain") if line.at in during]
        row.acknowledged, row.lost = len(fenced), sum(element not in elements for element in fenced)
        row.plain, row.plain_lost = len(by_lease), sum(element not in plain for element in by_lease)
    measured.broken += history.overlaps(recorded) + history.token_regressions(recorded) + history.stale_writes(recorded)
    measured.broken += history.ledger_regressions((n, token) for n, token, _ in ledger)
    if measured.plan.replication == "synchronous" and (lost := sum(row.lost for row in measured.rows)):
        measured.broken.append(f"{lost} acknowledged fenced writes are lost, though replication is synchronous")
