"""What is demanded of Tenure's figures, as ratios to floors and peers of the same run."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from benchmarks.peers import FLOOR, HANDOVER_FLOOR, OURS, TENURE
from benchmarks.peers.figures import median, ratio, time_of
from benchmarks.starts import STARTS, floor_of

if TYPE_CHECKING:
    from benchmarks.peers.report import Report

FLOOR_FACTOR, PEER_FACTOR, HANDOVER_FACTOR = 2.2, 70.0, 2.0
QUICK_HANDOVERS = ("etcdctl", "kazoo_election")
"""Peers with durable commits, than which a hand-over may not be slower."""
MUST_BE_DURABLE = ("postgres", "etcd", "zookeeper")
CPU_MS_PER_S, REQUESTS_PER_S = 2.0, 1.4
ROLE_COST_US, MANY_ROLES_MS = 25.0, 350.0
LONGEST_OVERLAP_MS = 5.0

Verdicts = Iterator[tuple[str, bool]]


def verdicts(report: Report) -> Verdicts:
    """Yield every demand with what was measured, and whether it was reached. What was not measured is left out."""
    yield from _crash(report)
    yield from _handover(report)
    yield from _start(report)
    yield from _rest(report)
    yield from _growth(report)
    yield from _pause(report)
    for one in report.durability:
        if one.server in MUST_BE_DURABLE:
            yield f"{one.server} keeps what it has answered: {one.settings}, on {one.filesystem}", one.durable


def _crash(report: Report) -> Verdicts:
    floor, ours = report.middle(FLOOR, "crash"), report.middle(OURS, "crash")
    if ours is None:
        return
    if floor is not None:
        yield _within("crash failover", FLOOR_FACTOR, "the bare waiter", ours, floor)
    for peer in report.everybody:
        if peer.survives_a_pause and not peer.is_default and peer.module not in TENURE:
            times = report.times(peer, "crash")
            crash = median(times)
            if times:
                said = "never" if crash is None else f"{ratio(crash, ours)} times"
                yield (
                    f"crash failover {PEER_FACTOR:g} times quicker than {peer.label}: {said}",
                    crash is None or crash >= PEER_FACTOR * ours,
                )


def _handover(report: Report) -> Verdicts:
    floor, ours = report.middle(HANDOVER_FLOOR, "hand-over"), report.middle(OURS, "hand-over")
    if ours is None:
        return
    for module in QUICK_HANDOVERS:
        peer, theirs = report.one(module), report.middle(module, "hand-over")
        if peer is not None and theirs is not None:
            yield f"hand-over not slower than {peer.label}: {ratio(ours, theirs)} times as long", ours <= theirs
    if floor is not None:
        yield _within("hand-over", HANDOVER_FACTOR, "two commits and a notification", ours, floor)


def _start(report: Report) -> Verdicts:
    for start in STARTS:
        if start.at_most is None or not report.starts:
            continue
        ours, floor = median(report.starts[start.name]), median(report.starts[floor_of(start).name])
        if ours is not None and floor is not None:
            yield _within(f"start of {start.name}", start.at_most, "the bare program", ours, floor)


def _rest(report: Report) -> Verdicts:
    ours = report.one(OURS)
    if ours is not None:
        rests: Any = report.times(ours, "rest")
        yield from _at_rest(ours.label, rests)
    for row in report.growth:
        yield from _at_rest(f"{row['nodes']:,} nodes, {row['roles']:,} roles", [row["rest"]])


def _at_rest(where: str, rests: list[dict[str, float]]) -> Verdicts:
    if not rests:
        return
    cpu = statistics.median(one["cpu_ms_per_s"] for one in rests)
    rate = statistics.median(one["requests_per_s"] for one in rests)
    yield f"at most {CPU_MS_PER_S:g} ms of CPU per second and node at rest, {where}: {cpu:.2f}", cpu <= CPU_MS_PER_S
    # Rounded, because the measurement may end just before a look or just after it.
    reached = round(rate, 1) <= REQUESTS_PER_S
    yield f"at most {REQUESTS_PER_S:g} requests per second and node at rest, {where}: {rate:.2f}", reached


def _growth(report: Report) -> Verdicts:
    sizes = {(row["nodes"], row["roles"]): median(row["crash_ms"]) for row in report.growth}
    for row in report.growth:
        crash, floor = sizes[row["nodes"], row["roles"]], median(row["floor_ms"])
        if row["roles"] == 1 and crash is not None and floor is not None:
            what = f"crash failover of {row['nodes']} nodes"
            yield _within(what, FLOOR_FACTOR, "as many bare waiters", crash, floor)
    few, many = sizes.get((3, 1)), sizes.get((3, 10_000))
    if few is not None and many is not None:
        cost = (many - few) / 9_999 * 1000
        yield f"at most {ROLE_COST_US:g} µs more of crash failover for each role: {cost:.1f} µs", cost <= ROLE_COST_US
        yield f"10,000 roles led again within {MANY_ROLES_MS:g} ms: {time_of(many)}", many <= MANY_ROLES_MS


def _pause(report: Report) -> Verdicts:
    for entrant in report.everybody:
        pauses: Any = report.times(entrant, "pause")
        if entrant.module == OURS and pauses:
            longest = max(one["overlap_ms"] or 0.0 for one in pauses)
            yield f"no overlap after a pause, {entrant.label}: {time_of(longest)}", longest < LONGEST_OVERLAP_MS


def _within(what: str, factor: float, of: str, ours: float, floor: float) -> tuple[str, bool]:
    return f"{what} within {factor:g} times of {of}: {ratio(ours, floor)} times", ours <= factor * floor
