"""What the benchmark beside peers writes: a table, a picture, and under which circumstances."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import trace
from benchmarks.peers import FLOOR, OURS, TENURE, Entrant, demands, servers
from benchmarks.peers.figures import median, p95, ratio, time_of
from benchmarks.starts import STARTS, floor_of

NOTES = """
*never*: not within the time that was waited for.
*overlap*: how long the old leader went on believing after it woke, while another led (5 s were watched).
A request is a round trip: what a client sends before the server answers.
The ratios are of medians of crash failover.
*start*: on an empty database.
*rounds*: of crash, hand-over and pause.
What waits for seconds until a lease has run out has fewer rounds, and is measured many at a time.
So is every second round of some.
*two commits and a notification* elects no node: it is the floor of a hand-over.
River and Oban are not run: their elections are done by hand as their sources have them, with the same intervals.
""".strip()
STARTS_NOTES = """
From the start of a process to its first True.
The programs are as short as they can be; *empty database* means that Tenure creates its tables.
`tenure run` ends with the first line of its command.
""".strip()
DURABILITY_NOTES = """
*syncs*: how often the server has waited for its disk in this run, by its own count.
""".strip()
TRACE_NOTES = """
The processes record what their threads do, by one clock; the example is the one nearest to the median.
`make bench` prints this, too.
A stage that began before the fault has *before* instead of a time.
Stages that less than half of the rounds have are left out.
""".strip()
WRITTEN = """
Written by `make bench PEERS=1`, from one run; the section on schedulers by `benchmarks/schedulers.py --write`.
Do not edit it by hand.
""".strip()
TRACE_SVG = "trace.svg"
SCHEDULERS = "## Schedulers: lost and doubled due times"
"""The last section of RESULTS.md, which schedulers.py writes."""


def without_schedulers(results: Path) -> str:
    """Return what a file has before the section on schedulers."""
    return results.read_text().partition(SCHEDULERS)[0].rstrip() + "\n\n"


def schedulers_in(results: Path) -> str:
    """Return the section on schedulers that a file has, to be put after something else; nothing if it has none."""
    _, heading, rest = results.read_text().partition(SCHEDULERS) if results.exists() else ("", "", "")
    return heading and f"\n{heading}{rest}"


def package_version(entrant: Entrant) -> str:
    """Return the release of a peer; raise ImportError if it is not there."""
    package = getattr(entrant.home, "PACKAGE", None)
    try:
        return "" if package is None else f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(package) from None


class Durability(NamedTuple):
    """How a server keeps what it has answered."""

    server: str
    settings: str
    filesystem: str
    syncs: int | None
    durable: bool


def durability(sites: servers.Servers) -> list[Durability]:
    """Ask every server that runs."""
    found = []
    for kind, site in sites.items():
        on = servers.filesystem(site.directory)
        durable = site.durable and on not in servers.IN_MEMORY
        if not kind.startswith("pgbouncer"):  # it keeps nothing
            found.append(Durability(kind, site.settings, on, site.syncs(), durable))
    return found


@dataclass
class Report:
    """What was measured, in the words of tables."""

    everybody: list[Entrant]
    samples: Mapping[str, Mapping[str, list[Any]]] = field(default_factory=dict)
    growth: list[dict[str, Any]] = field(default_factory=list)
    traces: list[trace.Trace] = field(default_factory=list)
    starts: Mapping[str, list[float]] = field(default_factory=dict)
    durability: list[Durability] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    options: str = ""
    seconds: float = 0.0

    @property
    def verdicts(self) -> list[tuple[str, bool]]:
        """What is demanded, and whether it was reached."""
        return list(demands.verdicts(self))

    @property
    def kept(self) -> bool:
        """Whether everything that is demanded was reached."""
        return all(reached for _, reached in self.verdicts)

    def raw(self) -> dict[str, Any]:
        return {
            "samples": self.samples,
            "growth": self.growth,
            "traces": [asdict(one) for one in self.traces],
            "starts": self.starts,
            "durability": [one._asdict() for one in self.durability],
            "options": self.options,
        }

    def times(self, entrant: Entrant, what: str) -> list[float | None]:
        return list(self.samples.get(entrant.label, {}).get(what, []))

    def one(self, module: str) -> Entrant | None:
        return next((one for one in self.everybody if one.module == module), None)

    def middle(self, module: str, what: str) -> float | None:
        one = self.one(module)
        times = self.times(one, what) if one else []
        return median(times)

    # --- the table ---

    def markdown(self) -> str:
        parts = [
            "# Benchmarks: Tenure and its alternatives, measured",
            WRITTEN,
            self._surroundings(),
            self._table(),
            NOTES,
            "![crash failover and hand-over](results.svg)",
        ]
        if self.durability:
            parts += ["## How durable the servers are", self._durability(), DURABILITY_NOTES]
        if self.traces:
            parts += ["## Where the time goes", TRACE_NOTES, trace.markdown(self.traces), f"![traces]({TRACE_SVG})"]
        if self.starts:
            parts += ["## Start", self._starts(), STARTS_NOTES]
        if self.growth:
            parts += ["## Growth, Tenure alone (TTL 30 s)", self._growth()]
        if self.verdicts:
            parts += ["## What is demanded"]
            parts += ["\n".join(f"- {'yes' if reached else '**NO**'}: {text}" for text, reached in self.verdicts)]
        if self.left_out:
            parts += ["## Left out", "\n".join(f"- {line}" for line in self.left_out)]
        return "\n\n".join(parts) + "\n"

    def _surroundings(self) -> str:
        releases = sorted({servers.version(entrant.server) for entrant in self.everybody})
        releases += sorted({version for entrant in self.everybody if (version := package_version(entrant))})
        system = f"{platform.system()} {platform.release()} {platform.machine()}"
        ours = f"Python {platform.python_version()}, tenure {importlib.metadata.version('tenure')}"
        lines = [
            f"when: {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC, for {self.seconds / 60:.0f} minutes",
            f"machine: {os.cpu_count()} cores, {system}; load {os.getloadavg()[1]:.1f} in the end",
            f"releases: {', '.join([ours, *releases])}",
            f"options: `{self.options}`",
        ]
        return "\n".join(f"- {line}" for line in lines)

    def _table(self) -> str:
        heads = [
            "program", "start", "crash: median", "p95", "to the floor", "to Tenure", "hand-over: median", "p95",
            "pause: succeeded after", "overlap: median", "longest", "requests/s and node", "CPU ms/s", "connections",
            "check", "rounds",
        ]  # fmt: skip
        floor, ours = self.middle(FLOOR, "crash"), self.middle(OURS, "crash")
        lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
        for entrant in self.everybody:
            crash = median(self.times(entrant, "crash"))
            cells = [
                entrant.label,
                self._cell(entrant, "start", median),
                self._cell(entrant, "crash", median),
                self._cell(entrant, "crash", p95),
                ratio(crash, floor),
                ratio(crash, ours),
                self._cell(entrant, "hand-over", median),
                self._cell(entrant, "hand-over", p95),
                *self._pauses(entrant),
                *self._rest(entrant),
                self._check(entrant),
                ", ".join(str(len(self.times(entrant, what))) for what in ("crash", "hand-over", "pause")),
            ]
            lines.append("| " + " | ".join(cells) + " |")
        return "\n".join(lines)

    def _cell(self, entrant: Entrant, what: str, of: Any) -> str:
        times = self.times(entrant, what)
        return time_of(of(times)) if times else ""

    def _pauses(self, entrant: Entrant) -> list[str]:
        pauses: Any = self.times(entrant, "pause")
        if not pauses:
            return ["", "", ""]
        overlaps = [one["overlap_ms"] for one in pauses if one["overlap_ms"] is not None]
        longest = max(overlaps, default=None)
        return [
            time_of(median([one["succeeded_ms"] for one in pauses])),
            time_of(median(overlaps), "") if overlaps else "-",
            time_of(longest, "-"),
        ]

    def _rest(self, entrant: Entrant) -> list[str]:
        rests: Any = self.times(entrant, "rest")
        cells = []
        for name in ("requests_per_s", "cpu_ms_per_s", "connections"):
            values = [one[name] for one in rests if one[name] is not None]
            cells.append(f"{statistics.median(values):.2f}" if values else "")
        return cells

    def _check(self, entrant: Entrant) -> str:
        checks = [one for one in self.times(entrant, "check") if one is not None]
        if not checks:
            return "-"
        ns = statistics.median(checks)
        return f"{ns:.0f} ns" if ns < 10_000 else f"{ns / 1000:.0f} µs"

    def _growth(self) -> str:
        lines = [
            "| nodes | roles | crash: median | p95 | bare waiters | to the floor | requests/s and node | CPU ms/s |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for row in self.growth:
            crash, floor = median(row["crash_ms"]), median(row["floor_ms"])
            cells = [
                f"{row['nodes']:,}",
                f"{row['roles']:,}",
                time_of(crash),
                time_of(p95(row["crash_ms"])),
                time_of(floor),
                ratio(crash, floor),
                f"{row['rest']['requests_per_s']:.2f}",
                f"{row['rest']['cpu_ms_per_s']:.1f}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
        return "\n".join(lines)

    def _durability(self) -> str:
        lines = ["| server | settings | data on | syncs | durable |", "|---|---|---|---|---|"]
        for one in self.durability:
            syncs = "" if one.syncs is None else f"{one.syncs:,}"
            lines.append(
                f"| {one.server} | {one.settings} | {one.filesystem} | {syncs} | {'yes' if one.durable else 'no'} |"
            )
        return "\n".join(lines)

    def _starts(self) -> str:
        lines = ["| program | median | p95 | to the bare program | rounds |", "|---|---|---|---|---|"]
        for start in STARTS:
            taken = self.starts[start.name]
            floor = median(self.starts[floor_of(start).name]) if start.floor else None
            cells = [start.name, time_of(median(taken)), time_of(p95(taken)), ratio(median(taken), floor)]
            lines.append("| " + " | ".join([*cells, str(len(taken))]) + " |")
        return "\n".join(lines)

    # --- the picture ---

    def picture(self) -> str:
        """Return crash failover and hand-over as bars: medians, and a line to the 95th percentile."""
        left, width, row = 330, 620, 44
        height = 60 + row * len(self.everybody)
        size = f'width="{left + width + 90}" height="{height}"'
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">',
            '<rect width="100%" height="100%" fill="white"/>',
        ]
        for power in range(6):
            x = left + _position(10.0**power, width)
            parts.append(f'<line x1="{x:.0f}" y1="30" x2="{x:.0f}" y2="{height - 20}" stroke="#ddd"/>')
            parts.append(f'<text x="{x:.0f}" y="22" text-anchor="middle" fill="#555">{time_of(10.0**power)}</text>')
        for number, entrant in enumerate(self.everybody):
            y = 40 + row * number
            parts.append(f'<text x="{left - 8}" y="{y + 18}" text-anchor="end">{entrant.label}</text>')
            colours = ("#1f6f54", "#7fc8a9") if entrant.module in TENURE else ("#555", "#bbb")
            for offset, what, colour in ((0, "crash", colours[0]), (15, "hand-over", colours[1])):
                times = self.times(entrant, what)
                if times:
                    parts += _bar(left, y + offset, width, colour, median(times), p95(times))
        parts.append(
            f'<text x="{left}" y="{height - 5}" fill="#555">dark: crash failover; light: clean hand-over; '
            "median, and a line to the 95th percentile; logarithmic</text></svg>"
        )
        return "\n".join(parts) + "\n"


def _position(milliseconds: float, width: int) -> float:
    import math

    return width * max(0.0, min(1.0, math.log10(max(milliseconds, 1.0)) / 5))


def _bar(left: int, y: int, width: int, colour: str, middle: float | None, high: float | None) -> list[str]:
    end = width if middle is None else _position(middle, width)
    parts = [f'<rect x="{left}" y="{y}" width="{max(end, 1):.0f}" height="12" fill="{colour}"/>']
    if high is not None:
        at = left + _position(high, width)
        parts.append(f'<line x1="{left + end:.0f}" y1="{y + 6}" x2="{at:.0f}" y2="{y + 6}" stroke="{colour}"/>')
    parts.append(f'<text x="{left + end + 6:.0f}" y="{y + 10}" fill="#333">{time_of(middle)}</text>')
    return parts
