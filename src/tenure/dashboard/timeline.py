"""The picture of a role's terms: which node led when, and how long none did. A template draws its numbers as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from tenure.base.durations import duration
from tenure.events import EndReason
from tenure.reports import HistoryRow

SPANS = {"hour": timedelta(hours=1), "day": timedelta(days=1), "week": timedelta(weeks=1)}
WIDTH = 100.0
"""Places are percentages of the width, so that the picture fits every screen."""
LANE, TOP = 26.0, 8.0
LANES = 10
"""How many leaders have a lane of their own; the others share the last one."""
NARROWEST = 0.4
TICKS = 5
NAME, NAME_END = 20, 11
"""How many characters of a name fit beside its lane, and how many of them are the last: names of pods differ there."""


@dataclass(frozen=True)
class Bar:
    """A rectangle, and what it says."""

    x: float
    width: float
    text: str
    now: bool = False


@dataclass(frozen=True)
class Lane:
    """The terms of one leader."""

    name: str
    y: float
    bars: list[Bar]


@dataclass(frozen=True)
class Timeline:
    """A picture of terms."""

    height: float
    lanes: list[Lane]
    gaps: list[Bar]
    ticks: list[tuple[float, str]]

    @property
    def names_width(self) -> int:
        """How wide the column of names is: on a phone, short ones leave more room for the terms."""
        return min(170, 16 + 9 * max(len(lane.name) for lane in self.lanes))


def since_of(rows: Sequence[HistoryRow], span: str, as_of: datetime) -> datetime:
    """Return where the picture begins: at the first term, or a span before now."""
    first = min(row.began for row in rows)
    return max(first, as_of - SPANS[span]) if span in SPANS else first


def draw(rows: Sequence[HistoryRow], as_of: datetime, span: str) -> Timeline | None:
    """Return the picture of terms, newest first; None if there are none."""
    if not rows:
        return None
    since = since_of(rows, span, as_of)
    length = max((as_of - since).total_seconds(), 0.001)

    def at(moment: datetime) -> float:
        inside = min(max((moment - since).total_seconds() / length, 0.0), 1.0)
        return inside * WIDTH

    def bar(begin: datetime, end: datetime, text: str, *, now: bool = False) -> Bar:
        x = min(at(begin), WIDTH - NARROWEST)
        return Bar(round(x, 2), round(max(at(end) - x, NARROWEST), 2), text, now)

    shown = [row for row in rows if (row.ended or as_of) >= since]
    names = list(dict.fromkeys(row.name for row in shown))
    alone = names if len(names) <= LANES else names[: LANES - 1]
    bars: dict[str, list[Bar]] = {}
    for row in shown:
        lane = row.name if row.name in alone else f"{len(names) - len(alone)} others"
        alive_until = row.last_seen or row.ended or as_of
        goes_on = row.ended is None and row.last_seen is None
        bars.setdefault(lane, []).append(bar(row.began, alive_until, describe(row, as_of), now=goes_on))
    lanes = [Lane(_fitting(name), TOP + LANE * number, bars[name]) for number, name in enumerate(bars)]
    gaps = [bar(*gap) for gap in _gaps(rows, as_of) if gap[1] >= since]
    ticks = [
        (at(since + timedelta(seconds=length * n / TICKS)), since + timedelta(seconds=length * n / TICKS))
        for n in range(TICKS)
    ]
    form = "%H:%M:%S" if length < 86400 else "%m-%d %H:%M"
    return Timeline(
        TOP + LANE * len(lanes) + 30, lanes, gaps, [(round(x, 1), f"{moment:{form}}") for x, moment in ticks]
    )


def describe(row: HistoryRow, as_of: datetime) -> str:
    """Return a sentence about a term."""
    lasted = duration(row.lasted(as_of))
    if row.ended is not None:
        end = f"ended after {lasted}: {row.reason}"
    else:
        end = f"leads for {lasted}" if row.last_seen is None else f"led for {lasted}, {row.end(as_of)}"
    return f"{row.name}, token {row.token}, since {row.began:%Y-%m-%d %H:%M:%S} UTC, {end}"


def _gaps(rows: Sequence[HistoryRow], as_of: datetime) -> list[tuple[datetime, datetime, str]]:
    """Return the times without a leader, counted from the last sign of life of the leader before."""
    found = []
    for later, row in zip((None, *rows), rows, strict=False):
        begin, end = row.last_seen or row.ended, as_of if later is None else later.began
        if begin is not None and row.reason != EndReason.LAPSED and end > begin:
            silent = f"since the last sign of life of {row.name}" if row.last_seen else f"since {row.name} gave up"
            found.append((begin, end, f"no leader for up to {duration((end - begin).total_seconds())}, {silent}"))
    return found


def _fitting(name: str) -> str:
    return name if len(name) <= NAME else f"{name[: NAME - NAME_END - 1]}…{name[-NAME_END:]}"
