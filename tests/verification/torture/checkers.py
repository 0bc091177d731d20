"""What a run must show: pure functions over the recorded history, the tables at the end, and what was done when.

Each returns the broken promises as sentences; an empty list is a pass. The checks of a history by itself are in
tests/support/history.py; here is what needs to know about faults, about the tables, or about the server.
"""

from __future__ import annotations

import os
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tenure.core import timing
from tests.support.history import Belief, History, Line, Overlap, overlap_spans

NOISE_S = 1.0
"""What a busy machine may add to any bound, beside the time in which it measurably stood still."""

Rows = Iterable[tuple[str, str]]


@dataclass(frozen=True)
class Cut:
    """The server's end of a living member's connection was cut, at some moment between `since` and `until` (ns)."""

    node: str
    since: int
    until: int


@dataclass
class Fired:
    """A nemesis that struck."""

    nemesis: str
    target: str
    since: int
    until: int
    bound_s: float
    cuts: tuple[Cut, ...] = ()


@dataclass
class Struck:
    """A step as it happened: from the first beginning to the last end (`healed`), and until all was well again."""

    number: int
    since: int
    fired: list[Fired] = field(default_factory=list)
    healed: int = 0
    settled: int = 0
    stalled_s: float = 0.0
    amiss: str | None = None

    @property
    def names(self) -> str:
        return " + ".join(one.nemesis for one in self.fired)


# --- one leader ---------------------------------------------------------------------------------------------


def judged_overlaps(
    history: History, steps: Sequence[Struck], *, takeover: str, ttl: float
) -> tuple[list[str], list[tuple[float, str]]]:
    """Promise 1: the overlaps that break it; and of those that instant mode names and permits, the width (ms) and step.

    An overlap is permitted only to the member whose connection was cut: the older of the two holders is that member,
    the overlap begins after the cut, and it is over when the trust of that moment is, by the slowest permitted clock.
    """
    broken, permitted = [], []
    cuts = [cut for step in steps for one in step.fired for cut in one.cuts] if takeover == "instant" else []
    trust_ns = timing.trust(ttl) / (1 - timing.DRIFT) * 1e9
    for found in overlap_spans(history):
        width_ms = (found.until - found.since) / 1e6
        step = _step_at(steps, found.since)
        during = f"during step {step.number} ({step.names})" if step else "outside of all steps"
        older = min(found.one, found.other, key=lambda belief: belief.token or 0)
        if any(
            cut.node == older.node and cut.since <= found.since and found.until <= cut.until + trust_ns for cut in cuts
        ):
            permitted.append((width_ms, f"{older.node}, {during}"))
        else:
            broken.append(f"{_said(history, found)}, {during}")
    return broken, sorted(permitted)


def _step_at(steps: Sequence[Struck], at: int) -> Struck | None:
    return next((step for step in steps if step.since <= at <= max(step.settled, step.healed)), None)


def _said(history: History, found: Overlap) -> str:
    return (
        f"{found.one.node} (token {found.one.token}) and {found.other.node} (token {found.other.token}) both led for"
        f" {(found.until - found.since) / 1e6:.3f} ms from {history.seconds(found.since)}"
    )


# --- nothing that was acknowledged is lost ------------------------------------------------------------------


def lost_writes(history: History, present: Iterable[str]) -> list[str]:
    """Fenced writes that were acknowledged and are not in the ledger."""
    there = set(present)
    return [
        f"{line.node}'s write {line.details['element']} with token {line.token} was acknowledged at"
        f" {history.seconds(line.at)} and is not in the ledger"
        for line in history.of_kind("write")
        if line.ok and line.details["element"] not in there
    ]


@dataclass(frozen=True)
class SetResult:
    """One form of the set workload: how many additions were acknowledged, and which of them are gone."""

    workload: str
    acknowledged: int
    lost: tuple[str, ...]


def set_results(history: History, sets: Rows) -> dict[str, SetResult]:
    """The set workload, by its forms. `sets` are (name, elements with blanks between)."""
    there = {name: set(value.split()) for name, value in sets}
    acknowledged: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for line in history.of_kind("add"):
        acknowledged[line.details["workload"]].append((line.details["set"], line.details["element"]))
    return {
        workload: SetResult(
            workload, len(added), tuple(element for name, element in added if element not in there.get(name, set()))
        )
        for workload, added in acknowledged.items()
    }


def lost_updates(results: Mapping[str, SetResult], *, must_lose: bool = True, may_lose: bool = False) -> list[str]:
    """The fence loses nothing; and the naive lease, whose holder was paused, loses something, or nothing is proven.

    `may_lose`: what the fence let pass may be gone, because the database itself may lose it.
    """
    found = []
    fenced, naive = results.get("fenced"), results.get("naive")
    if fenced is None or not fenced.acknowledged:
        found.append("no addition to the fenced set was acknowledged, so nothing is proven")
    elif fenced.lost and not may_lose:
        found.append(f"{len(fenced.lost)} acknowledged additions to the fenced set are lost: {fenced.lost[:5]}")
    if must_lose and (naive is None or not naive.lost):
        found.append("the naive lease lost no update, so this run proves nothing about the fence")
    return found


# --- someone leads again ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recovery:
    """How long nobody led because of a step, and how long that might have been."""

    step: Struck
    took_s: float
    bound_s: float
    alone: bool

    @property
    def kept(self) -> bool:
        return self.took_s <= self.bound_s + NOISE_S + self.step.stalled_s


def recoveries(history: History, steps: Sequence[Struck], in_company_s: float) -> list[Recovery]:
    """For a nemesis alone: the longest stretch without a leader. For several: the same, after the last was healed."""
    beliefs = history.beliefs()
    found = []
    for step in steps:
        if not step.fired:
            continue
        alone = len(step.fired) == 1
        since = step.since if alone else step.healed
        took_s = max((length for length in _without_leader(beliefs, since, step.settled)), default=0) / 1e9
        found.append(Recovery(step, took_s, step.fired[0].bound_s if alone else in_company_s, alone))
    return found


def _without_leader(beliefs: Sequence[Belief], since: int, until: int) -> list[int]:
    found, covered = [], since
    for belief in beliefs:  # in the order of their beginnings
        if covered < min(belief.since, until):
            found.append(min(belief.since, until) - covered)
        covered = max(covered, belief.until)
    return [*found, until - covered] if covered < until else found


def late_recoveries(found: Iterable[Recovery]) -> list[str]:
    """Promise 5: someone leads again within the bound."""
    late = [
        f"step {one.step.number} ({one.step.names}): nobody led for {one.took_s:.2f} s, and the bound is"
        f" {one.bound_s:.2f} s (with {NOISE_S:g} s for noise and {one.step.stalled_s:.2f} s of the machine's stalls)"
        for one in found
        if not one.kept
    ]
    return late + [f"step {one.step.number} ({one.step.names}): {one.step.amiss}" for one in found if one.step.amiss]


# --- enough was done ----------------------------------------------------------------------------------------


def left_out(missing: dict[str, str]) -> list[str]:
    """Nemeses for which the machine lacks something may be left out, but not in CI."""
    lacking = missing.items() if os.environ.get("CI") else ()
    return [f"no nemesis that needs {what}: {why} (and CI is set)" for what, why in lacking]


def seldom_fired(steps: Iterable[Struck], names: Iterable[str], least: int) -> list[str]:
    """A run in which a nemesis fired less often than stated proves less than it says."""
    counts = Counter(one.nemesis for step in steps for one in step.fired)
    return [f"{name} fired {counts[name]} times, and {least} is stated" for name in names if counts[name] < least]


def never_alone(steps: Iterable[Struck], names: Iterable[str]) -> list[str]:
    """The nemeses whose own bound was not measured, because each of them struck in company only."""
    alone = {step.fired[0].nemesis for step in steps if len(step.fired) == 1}
    return [name for name in names if name not in alone]


def unfenced_stale(rows: Iterable[tuple[int, int]]) -> int:
    """How many ticks, (order, token), came after one of a later term: what the fence is for."""
    highest, stale = 0, 0
    for _, token in sorted(rows):
        stale += token < highest
        highest = max(highest, token)
    return stale


def median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0


# --- no harm ------------------------------------------------------------------------------------------------


@dataclass
class Harm:
    """What the nodes cost the server and the machine over the whole run; None where a database has no such thing."""

    longest_xmin_s: float | None = None
    longest_xmin_by: str = ""
    xmin_bound_s: float = 2.5
    quiet_s: float = 0.0
    quiet_lines: list[str] = field(default_factory=list)
    """Of the nodes' connections, in the server's log, while nothing was done at the end."""
    connections_at_end: dict[str, int] = field(default_factory=dict)
    """By node, the dead ones included."""
    living: list[str] = field(default_factory=list)
    descriptors: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Of each process that lived for long: at its first rest, and at its last."""
    asks_per_s: dict[str, tuple[float, str]] = field(default_factory=dict)
    """By node: in its busiest stretch, and when that was."""
    said: Counter[str] = field(default_factory=Counter)
    """What the server's log says of the nodes' connections over the whole run, by severity and message."""


DESCRIPTORS_MORE = 8
ASKS_PER_S = 50.0
"""Of one node. At rest it asks twice a second; a role that is kept busy is tried 20 times a second."""
ASKS_OVER_S = 2.0


def busiest(history: History, steps: Sequence[Struck]) -> dict[str, tuple[float, str]]:
    """How often each node asked the database, a second, in its busiest stretch of ASKS_OVER_S; and when that was."""
    found: dict[str, tuple[float, str]] = {}
    stretches: dict[tuple[str, int | None], deque[Line]] = defaultdict(deque)
    for line in history.of_kind("asks"):
        stretch = stretches[line.process]
        stretch.append(line)
        while len(stretch) > 1 and line.at - stretch[1].at >= ASKS_OVER_S * 1e9:
            stretch.popleft()
        if (took_s := (line.at - stretch[0].at) / 1e9) >= ASKS_OVER_S:
            asked = line.details["count"] - stretch[0].details["count"]
            step = _step_at(steps, line.at)
            during = f"step {step.number} ({step.names})" if step else f"no step, until {history.seconds(line.at)}"
            found[line.node] = max(found.get(line.node, (0.0, "")), (asked / took_s, during))
    return found


def harm_done(harm: Harm) -> list[str]:
    """Promise 6: no vacuum horizon held, nothing in the log at rest, few requests and connections, none left open."""
    found = []
    if harm.longest_xmin_s is not None and harm.longest_xmin_s > harm.xmin_bound_s:
        found.append(
            f"a node held the vacuum horizon for {harm.longest_xmin_s:.2f} s, more than {harm.xmin_bound_s:g} s:"
            f" {harm.longest_xmin_by}"
        )
    if harm.quiet_lines:
        found.append(
            f"{len(harm.quiet_lines)} lines in the server's log in {harm.quiet_s:.0f} s at rest: {harm.quiet_lines[:3]}"
        )
    for node, (per_s, during) in harm.asks_per_s.items():
        if per_s > ASKS_PER_S:
            found.append(
                f"{node} asked {per_s:.0f} times a second for {ASKS_OVER_S:g} s, more than {ASKS_PER_S:g}, in {during}"
            )
    for node, number in harm.connections_at_end.items():
        allowed = 2 if node in harm.living else 0
        if number > allowed:
            found.append(f"{node} has {number} connections at the end, and may have {allowed}")
    for node, (first, last) in harm.descriptors.items():
        if last > first + DESCRIPTORS_MORE:
            found.append(f"{node} has {last} descriptors open at the end, after {first} at the beginning")
    return found
