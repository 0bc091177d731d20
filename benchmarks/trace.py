"""Where the time of a crash failover and of a hand-over goes: what the node that leads next does, and when.

The processes record what their threads do (`peers/traced_node.py`), by one clock. A trace begins with `kill -9`, or
with the call of `resign()`, and ends when the application of the successor reads True. The stages are the requests of
the protocol (`core/messages.py` has a table of them), the round trips and new connections in them, and the
notifications that arrive.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

from benchmarks.peers import Entrant, Variant
from benchmarks.peers.bench import Bench, Cluster

CRASH, HANDOVER = "crash failover", "hand-over"
BEGINS = {CRASH: "kill -9 of the leader", HANDOVER: "call of resign()"}
OLD, NEW = "old leader", "successor"
DETAILS = ("round-trip", "connect")
"""What happens within a request."""
RecordedSpan = tuple[int, int, str, str]


@dataclass(frozen=True)
class Stage:
    """Something that a lane of a node did, in milliseconds after the beginning of the trace."""

    who: str
    lane: str
    what: str
    began_ms: float
    ended_ms: float

    @property
    def name(self) -> tuple[str, str, str]:
        return (self.who, self.lane, self.what)

    @property
    def is_detail(self) -> bool:
        return ", " in self.what


@dataclass(frozen=True)
class Trace:
    """One failover, or one hand-over."""

    kind: str
    stages: tuple[Stage, ...]
    total_ms: float


def stages_of(who: str, spans: Iterable[RecordedSpan], began_ns: int, ended_ns: int) -> list[Stage]:
    """Return what of a record is between two moments, with the round trips named after their requests.

    What happens a second time gets a number. What goes on from before the one to after the other had no part in it.
    """
    within = sorted(
        span
        for span in spans
        if span[1] > began_ns and span[0] < ended_ns and not (span[0] <= began_ns and span[1] >= ended_ns)
    )
    counted: Counter[tuple[str, str]] = Counter()
    requests: list[tuple[int, int, str, str]] = []
    details: list[RecordedSpan] = []
    for span in within:
        began, ended, lane, what = span
        if what in DETAILS:
            details.append(span)
            continue
        counted[lane, what] += 1
        number = counted[lane, what]
        requests.append((began, ended, lane, what.replace(":", " ") + (f" {number}" if number > 1 else "")))
    for began, ended, lane, what in details:
        around = (one for one in requests if one[2] == lane and one[0] <= began and ended <= one[1])
        request = next((name for *_, name in around), "no request")
        counted[lane, f"{request}, {what}"] += 1
        number = counted[lane, f"{request}, {what}"]
        requests.append((began, ended, lane, f"{request}, {what.replace('-', ' ')} {number}"))
    return [
        Stage(who, lane, what, (began - began_ns) / 1e6, (min(ended, ended_ns) - began_ns) / 1e6)
        for began, ended, lane, what in requests
    ]


def measure(bench: Bench, rounds: int) -> list[Trace]:
    """Trace some failovers and hand-overs, each in a cluster of its own."""
    entrant = Entrant("traced_node", "", Variant({"lease_s": 10.0}))
    found = []
    for _ in range(rounds):
        for kind in (CRASH, HANDOVER):
            with bench.cluster(entrant) as cluster:
                found.append(traced(kind, cluster))
            print(f"trace      {kind:45} {found[-1].total_ms}", flush=True)
    return found


def traced(kind: str, cluster: Cluster) -> Trace:
    old = cluster.leader
    took_ms = cluster.crash_ms() if kind == CRASH else cluster.handover_ms()
    if took_ms is None:
        raise RuntimeError(f"nobody led after a {kind}")
    ended_ns = cluster.leader.when("lead")
    began_ns = ended_ns - round(took_ms * 1e6)
    stages = stages_of(NEW, cluster.leader.spans(), began_ns, ended_ns)
    if kind == HANDOVER:
        stages += stages_of(OLD, old.spans(), began_ns, ended_ns)
    return Trace(kind, tuple(sorted(stages, key=lambda stage: (stage.ended_ms, stage.began_ms))), took_ms)


# --- what is shown ---


def example(traces: Sequence[Trace]) -> Trace:
    """Return the trace that took about as long as most."""
    middle = statistics.median(one.total_ms for one in traces)
    return min(traces, key=lambda one: abs(one.total_ms - middle))


def table(traces: Sequence[Trace]) -> str:
    """Return the stages of one kind, of one example and in the median; without those that few rounds have."""
    shown = example(traces)
    kind = shown.kind
    total = statistics.median(one.total_ms for one in traces)
    lines = [
        "| who | lane | stage | example: from | to | median: from | to | length | rounds |",
        "|---|---|---|---|---|---|---|---|---|",
        f"| {OLD} | | {BEGINS[kind]} | 0.0 ms | 0.0 ms | 0.0 ms | 0.0 ms | | {len(traces)} |",
    ]
    by_name: dict[tuple[str, str, str], list[Stage]] = {}
    for one in traces:
        for stage in one.stages:
            by_name.setdefault(stage.name, []).append(stage)
    usual = {name: stages for name, stages in by_name.items() if 2 * len(stages) >= len(traces)}
    in_example = {stage.name: stage for stage in shown.stages}
    for name in sorted(usual, key=lambda name: _middle(usual[name], lambda stage: stage.ended_ms)):
        stages = usual[name]
        seen = in_example.get(name)
        began = _middle(stages, lambda stage: stage.began_ms)
        length = _middle(stages, lambda stage: stage.ended_ms - max(0.0, stage.began_ms))
        cells = [
            *name,
            *((_ms(seen.began_ms), _ms(seen.ended_ms)) if seen else ("", "")),
            _ms(began),
            _ms(_middle(stages, lambda stage: stage.ended_ms)),
            f"{length:.1f} ms",
            str(len(stages)),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines.append(
        f"| {NEW} | | the application reads True | | {_ms(shown.total_ms)} | | {_ms(total)} | | {len(traces)} |"
    )
    return "\n".join(lines)


def _middle(stages: Sequence[Stage], of: Callable[[Stage], float]) -> float:
    return statistics.median(of(stage) for stage in stages)


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.1f} ms" if milliseconds >= 0 else "before"


def kinds(traces: Sequence[Trace]) -> list[list[Trace]]:
    """Return the traces of each kind."""
    return [[one for one in traces if one.kind == kind] for kind in (CRASH, HANDOVER)]


def markdown(traces: Sequence[Trace]) -> str:
    """Return a table for each kind, with a heading that says how long it takes."""
    parts = []
    for of_kind in kinds(traces):
        total = statistics.median(one.total_ms for one in of_kind)
        parts += [f"### A {of_kind[0].kind}: {total:.1f} ms in the median", table(of_kind)]
    return "\n\n".join(parts)


COLOURS = {"watch": "#4a6fa5", "control": "#1f6f54"}
LEFT, WIDTH, ROW = 190, 760, 26


def picture(traces: Sequence[Trace]) -> str:
    """Return the examples as bars over time: a row for each lane of each node, details as a thin row below it."""
    shown = [example(of_kind) for of_kind in kinds(traces)]
    parts: list[str] = []
    y = 10.0
    for one in shown:
        lanes = sorted({(stage.who, stage.lane) for stage in one.stages}, key=lambda lane: (lane[0] != OLD, lane))
        scale = WIDTH / one.total_ms
        parts.append(f'<text x="10" y="{y + 14:.0f}" font-weight="bold">{one.kind}: {one.total_ms:.1f} ms</text>')
        y += 44
        height = (2 * ROW + 6) * len(lanes)
        parts += _grid(one.total_ms, scale, y, height)
        for who, lane in lanes:
            parts.append(f'<text x="{LEFT - 8}" y="{y + 17:.0f}" text-anchor="end">{escape(f"{who}, {lane}")}</text>')
            for stage in one.stages:
                if (stage.who, stage.lane) == (who, lane):
                    parts += _bar(stage, scale, y)
            y += 2 * ROW + 6
        y += 26
    size = f'width="{LEFT + WIDTH + 60}" height="{y:.0f}"'
    caption = (
        "one example of each; above: requests and notifications; below: their round trips (grey) and new connections"
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">',
            '<rect width="100%" height="100%" fill="white"/>',
            *parts,
            f'<text x="{LEFT}" y="{y - 8:.0f}" fill="#555">{caption}</text></svg>\n',
        ]
    )


def _grid(total_ms: float, scale: float, y: float, height: float) -> list[str]:
    step = next(step for step in (0.5, 1, 2, 5, 10, 20, 50, 100, 1e9) if total_ms / step <= 12)
    parts = []
    for number in range(int(total_ms / step) + 1):
        x = LEFT + number * step * scale
        parts.append(f'<line x1="{x:.1f}" y1="{y - 8:.0f}" x2="{x:.1f}" y2="{y + height:.0f}" stroke="#ddd"/>')
        label = f"{number * step:g} ms"
        parts.append(f'<text x="{x:.1f}" y="{y - 12:.0f}" text-anchor="middle" fill="#555">{label}</text>')
    end = LEFT + total_ms * scale
    parts.append(f'<line x1="{end:.1f}" y1="{y - 8:.0f}" x2="{end:.1f}" y2="{y + height:.0f}" stroke="#c0392b"/>')
    parts.append(f'<text x="{end + 4:.1f}" y="{y + height:.0f}" fill="#c0392b">True</text>')
    return parts


def _bar(stage: Stage, scale: float, y: float) -> list[str]:
    began = max(0.0, stage.began_ms)
    x, width = LEFT + began * scale, max(1.5, (stage.ended_ms - began) * scale)
    title = f"<title>{escape(stage.what)}: {_ms(stage.began_ms)} to {_ms(stage.ended_ms)}</title>"
    if stage.is_detail:
        colour = "#c98b2b" if "connect" in stage.what else "#999"
        return [f'<rect x="{x:.1f}" y="{y + ROW:.0f}" width="{width:.1f}" height="7" fill="{colour}">{title}</rect>']
    colour = COLOURS.get(stage.lane, "#777")
    # A short bar has its name above the row, where there is room beside it.
    inside = width > 7 * len(stage.what)
    label = (
        f'<text x="{x + 3:.1f}" y="{y + 16:.0f}" fill="white">{escape(stage.what)}</text>'
        if inside
        else f'<text x="{x:.1f}" y="{y + ROW + 20:.0f}" fill="#333" font-size="10">{escape(stage.what)}</text>'
    )
    return [f'<rect x="{x:.1f}" y="{y + 2:.0f}" width="{width:.1f}" height="20" fill="{colour}">{title}</rect>', label]
