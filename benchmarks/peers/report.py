"""What the benchmark beside peers writes: a table, a picture, and under which circumstances."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.peers import FLOOR, OURS, Entrant, servers

ROLE_COST_US = 50.0
PEER_FACTOR, FLOOR_FACTOR, HANDOVER_FACTOR, REQUESTS_PER_S = 50.0, 4.0, 5.0, 2.0
"""What is demanded: so many times quicker than peers that survive a pause, so many times the floor at most, …"""
NOTES = """
*never*: not within the time that was waited for. *overlap*: how long the old leader went on believing after it woke,
while another led (5 s were watched). A request is a round trip: what a client sends before the server answers. The
ratios are of medians of crash failover.
""".strip()
WRITTEN = """
Written by `make bench PEERS=1`, from one run; the section on schedulers by `benchmarks/schedulers.py --write`.
Nobody edits it.
""".strip()
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


def median(values: Sequence[float | None]) -> float | None:
    """Return the median, with what never happened as longer than anything."""
    return _ranked(values, 0.5)


def p95(values: Sequence[float | None]) -> float | None:
    return _ranked(values, 0.95)


def _ranked(values: Sequence[float | None], share: float) -> float | None:
    ranked = sorted(values, key=lambda value: float("inf") if value is None else value)
    if share == 0.5 and len(ranked) > 1 and None not in ranked:
        return statistics.median(value for value in ranked if value is not None)
    return ranked[min(len(ranked) - 1, int(len(ranked) * share))] if ranked else None


def time_of(milliseconds: float | None, never: str = "never") -> str:
    if milliseconds is None:
        return never
    if milliseconds >= 1000:
        return f"{milliseconds / 1000:.1f} s"
    return f"{milliseconds:.1f} ms"


class Report:
    """Samples by entrant and figure, in the words of a table."""

    def __init__(
        self,
        everybody: list[Entrant],
        samples: Mapping[str, Mapping[str, list[Any]]],
        growth: list[dict[str, Any]],
        left_out: list[str],
        options: str,
        seconds: float,
    ) -> None:
        self.everybody, self.samples, self.growth, self.left_out = everybody, samples, growth, left_out
        self.options, self.seconds = options, seconds
        self.verdicts = list(self._verdicts())

    @property
    def kept(self) -> bool:
        """Whether everything that is demanded was reached."""
        return all(reached for _, reached in self.verdicts)

    def raw(self) -> dict[str, Any]:
        return {"samples": self.samples, "growth": self.growth, "options": self.options}

    def _times(self, entrant: Entrant, what: str) -> list[float | None]:
        return list(self.samples[entrant.label][what])

    def _one(self, module: str) -> Entrant | None:
        return next((one for one in self.everybody if one.module == module), None)

    def _middle(self, module: str, what: str) -> float | None:
        one = self._one(module)
        return median(self._times(one, what)) if one else None

    # --- the table ---

    def markdown(self) -> str:
        parts = [
            "# Tenure beside what people would use instead",
            WRITTEN,
            self._surroundings(),
            self._table(),
            NOTES,
            "![crash failover and hand-over](results.svg)",
        ]
        if self.growth:
            parts += ["## Growth, Tenure alone (TTL 30 s)", self._growth()]
        if self.verdicts:
            parts += ["## What is demanded"]
            parts += ["\n".join(f"- {'yes' if reached else '**NO**'}: {text}" for text, reached in self.verdicts)]
        if self.left_out:
            parts += ["## Left out", "\n".join(f"- {line}" for line in self.left_out)]
        return "\n\n".join(parts) + "\n"

    def _surroundings(self) -> str:
        kinds = sorted({entrant.server for entrant in self.everybody})
        releases = [servers.version(kind) for kind in kinds] + sorted(
            {version for entrant in self.everybody if (version := package_version(entrant))}
        )
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
            "check",
        ]  # fmt: skip
        floor, ours = self._middle(FLOOR, "crash"), self._middle(OURS, "crash")
        lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
        for entrant in self.everybody:
            crash = median(self._times(entrant, "crash"))
            cells = [
                entrant.label,
                self._cell(entrant, "start", median),
                self._cell(entrant, "crash", median),
                self._cell(entrant, "crash", p95),
                _ratio(crash, floor),
                _ratio(crash, ours),
                self._cell(entrant, "hand-over", median),
                self._cell(entrant, "hand-over", p95),
                *self._pauses(entrant),
                *self._rest(entrant),
                self._check(entrant),
            ]
            lines.append("| " + " | ".join(cells) + " |")
        return "\n".join(lines)

    def _cell(self, entrant: Entrant, what: str, of: Any) -> str:
        times = self._times(entrant, what)
        return time_of(of(times)) if times else ""

    def _pauses(self, entrant: Entrant) -> list[str]:
        pauses = self.samples[entrant.label]["pause"]
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
        rests = self.samples[entrant.label]["rest"]
        names = ("requests_per_s", "cpu_ms_per_s", "connections")
        return [f"{statistics.median(one[name] for one in rests):.2f}" if rests else "" for name in names]

    def _check(self, entrant: Entrant) -> str:
        checks = [one for one in self.samples[entrant.label]["check"] if one is not None]
        if not checks:
            return "-"
        ns = statistics.median(checks)
        return f"{ns:.0f} ns" if ns < 10_000 else f"{ns / 1000:.0f} µs"

    def _growth(self) -> str:
        lines = [
            "| nodes | roles | crash: median | p95 | requests/s and node | CPU ms/s |",
            "|---|---|---|---|---|---|",
        ]
        for row in self.growth:
            cells = [
                f"{row['nodes']:,}",
                f"{row['roles']:,}",
                time_of(median(row["crash_ms"])),
                time_of(p95(row["crash_ms"])),
                f"{row['rest']['requests_per_s']:.2f}",
                f"{row['rest']['cpu_ms_per_s']:.1f}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
        return "\n".join(lines)

    # --- what is demanded ---

    def _verdicts(self) -> Any:
        floor, ours = self._middle(FLOOR, "crash"), self._middle(OURS, "crash")
        if floor is None or ours is None:
            return
        yield (
            f"crash failover within {FLOOR_FACTOR:g} times of the bare waiter: {_ratio(ours, floor)} times",
            ours <= FLOOR_FACTOR * floor,
        )
        peers = [one for one in self.everybody if one.survives_a_pause and one.module != OURS]
        for peer in peers:
            crash = median(self._times(peer, "crash"))
            yield (
                f"crash failover {PEER_FACTOR:g} times quicker than {peer.label}: {_ratio(crash, ours)} times",
                crash is None or crash >= PEER_FACTOR * ours,
            )
        floor, ours = self._middle(FLOOR, "hand-over"), self._middle(OURS, "hand-over")
        if floor is not None and ours is not None:
            yield (
                f"hand-over within {HANDOVER_FACTOR:g} times of the bare waiter: {_ratio(ours, floor)} times",
                ours <= HANDOVER_FACTOR * floor,
            )
        yield from self._verdicts_at_rest()

    def _verdicts_at_rest(self) -> Any:
        mine = [one for one in self.everybody if one.module == OURS]
        for entrant in mine:
            overlaps = [one["overlap_ms"] or 0.0 for one in self.samples[entrant.label]["pause"]]
            if overlaps:
                yield f"no overlap after a pause ({entrant.label}): {time_of(max(overlaps))}", max(overlaps) < 5.0
            rests = [one["requests_per_s"] for one in self.samples[entrant.label]["rest"]]
            if rests:
                rate = statistics.median(rests)
                yield (
                    f"below {REQUESTS_PER_S:g} requests per second and node at rest ({entrant.label}): {rate:.2f}",
                    rate < REQUESTS_PER_S,
                )
        sizes = {(row["nodes"], row["roles"]): median(row["crash_ms"]) for row in self.growth}
        few, many = sizes.get((3, 1)), sizes.get((3, 10_000))
        if few is not None and many is not None:
            cost = (many - few) / 9_999 * 1000
            yield (
                f"at most {ROLE_COST_US:g} µs more of crash failover for each role: {cost:.1f} µs",
                cost <= ROLE_COST_US,
            )

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
            colours = ("#1f6f54", "#7fc8a9") if entrant.module == OURS else ("#555", "#bbb")
            for offset, what, colour in ((0, "crash", colours[0]), (15, "hand-over", colours[1])):
                times = self._times(entrant, what)
                if times:
                    parts += _bar(left, y + offset, width, colour, median(times), p95(times))
        parts.append(
            f'<text x="{left}" y="{height - 5}" fill="#555">dark: crash failover; light: clean hand-over; '
            "median, and a line to the 95th percentile; logarithmic</text></svg>"
        )
        return "\n".join(parts) + "\n"


def _ratio(value: float | None, to: float | None) -> str:
    return "" if value is None or not to else f"{value / to:.2f}"


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
