"""The picture of a failover, drawn from a run of `tenure demo`: who led when, and what happened to the leader.

It is shown by an `img`, so it has its style in it, and no script. The whole picture comes first, so that a still view
has it, too; then it plays once, in five seconds, and stays. On paper, and for people who prefer less motion, it does
not play. The text is large because phones show it at half its size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from tenure.base.durations import duration

WIDTH, HEIGHT = 640, 294
LEFT, RIGHT = 108, 628
FIRST_LANE, LANE, BAR = 92, 54, 34
AXIS = FIRST_LANE + 3 * LANE
SHOWS_S, PLAYS_S = 1.5, 5
"""How long the whole picture is shown first, and how long it then takes to be drawn."""
BEFORE_S, AFTER_S = 0.6, 0.4
FAULTS = {"is killed": "kill -9", "is frozen": "freeze", "is asked to hand over to": "hand-over"}

STYLE = f"""
svg {{ --paper: #fff; --ink: #1f2328; --pale: #57606a; --line: #d0d7de; --term: #1a7f37; --on: #fff; --ice: #b6d7f5;
  --on-ice: #0a3069; --bad: #cf222e; }}
@media (prefers-color-scheme: dark) {{ svg {{ --paper: #14181d; --ink: #e6edf3; --pale: #9aa5b1; --line: #3d444d;
  --term: #3fb950; --on: #04260f; --ice: #1f4a72; --on-ice: #cfe6ff; --bad: #ff7b72; }} }}
text {{ font: 19px system-ui, sans-serif; fill: var(--ink); }}
.paper {{ fill: var(--paper); }}
.lane, .grid {{ stroke: var(--line); }}
.axis {{ fill: var(--pale); font-size: 16px; }}
.term {{ fill: var(--term); }}
.token {{ fill: var(--on); font-size: 16px; text-anchor: middle; }}
.frozen {{ fill: var(--ice); }}
.ice {{ fill: var(--on-ice); font-size: 16px; text-anchor: middle; }}
.fault {{ stroke: var(--bad); stroke-width: 2; stroke-dasharray: 5 4; }}
.name {{ fill: var(--bad); font-weight: 600; text-anchor: middle; }}
.after {{ text-anchor: middle; }}
.bad {{ fill: var(--bad); font-size: 16px; text-anchor: end; }}
.cross {{ stroke: var(--bad); stroke-width: 3; }}
.curtain {{ fill: var(--paper); display: none; transform: translateX({RIGHT - LEFT + 12}px); }}
@media screen and (prefers-reduced-motion: no-preference) {{
  .curtain {{ display: inline; animation: play {PLAYS_S}s linear {SHOWS_S}s; }}
  @keyframes play {{ from {{ transform: none; }} }}
}}
"""


@dataclass(frozen=True)
class Happening:
    """What the demo said: when, of which process, and what."""

    at: float
    who: str
    what: str


def draw(names: Sequence[str], terms: Mapping[int, tuple[str, float, float]], happened: Sequence[Happening]) -> str:
    """Return the picture. ``terms`` has, by token, the leader and when it first and last read that it leads."""
    begin = min(first for _, first, _ in terms.values()) - BEFORE_S
    end = max(last for _, _, last in terms.values()) + AFTER_S
    plot = Plot(names, begin, (RIGHT - LEFT) / (end - begin))
    faults = [(one, word) for one in happened for begins, word in FAULTS.items() if one.what.startswith(begins)]
    gaps = [
        (word, one.at, min(first for _, first, _ in terms.values() if first > one.at) - one.at) for one, word in faults
    ]
    told = "; ".join(f"{word}: the next one leads {duration(gap)} later" for word, _, gap in gaps)
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="what">',
        f'<title id="what">Who led when, in a run of tenure demo. {escape(told)}</title>',
        f"<style>{STYLE}</style>",
        f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}" rx="8"/>',
        *plot.frame(end, happened),
        *plot.frozen(happened),
        *plot.terms(terms),
        *plot.refused(happened),
        *plot.faults(gaps),
        f'<rect class="curtain" x="{LEFT - 6}" y="6" width="{RIGHT - LEFT + 12}" height="{AXIS - 6}"/>',
        *plot.names(),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


@dataclass(frozen=True)
class Plot:
    """Where things are in the picture."""

    lanes: Sequence[str]
    begin: float
    scale: float
    """Pixels for a second."""

    def x(self, at: float) -> float:
        return round(LEFT + (at - self.begin) * self.scale, 1)

    def y(self, name: str) -> int:
        return FIRST_LANE + LANE * self.lanes.index(name) + (LANE - BAR) // 2

    def frame(self, end: float, happened: Sequence[Happening]) -> Iterator[str]:
        killed = {one.who: self.x(one.at) for one in happened if one.what == "is killed"}
        for name in self.lanes:
            middle = self.y(name) + BAR / 2
            yield f'<line class="lane" x1="{LEFT}" x2="{killed.get(name, RIGHT)}" y1="{middle}" y2="{middle}"/>'
        for seconds in range(0, int(end - self.begin), 5):
            x = self.x(self.begin + seconds)
            yield f'<line class="grid" x1="{x}" x2="{x}" y1="{AXIS}" y2="{AXIS + 6}"/>'
            yield f'<text class="axis" x="{x}" y="{AXIS + 26}" text-anchor="middle">{seconds} s</text>'

    def names(self) -> Iterator[str]:
        for name in self.lanes:
            yield f'<text x="12" y="{self.y(name) + 24}">{escape(name)}</text>'
        yield '<text x="12" y="34">event</text>'
        yield '<text x="12" y="62">next after</text>'

    def terms(self, terms: Mapping[int, tuple[str, float, float]]) -> Iterator[str]:
        for token, (name, first, last) in sorted(terms.items()):
            x, width = self.x(first), max(3.0, round((last - first) * self.scale, 1))
            yield f'<rect class="term" x="{x}" y="{self.y(name)}" width="{width}" height="{BAR}" rx="3"/>'
            label = f"token {token}" if width > 70 else str(token)
            yield f'<text class="token" x="{round(x + width / 2, 1)}" y="{self.y(name) + 23}">{label}</text>'

    def frozen(self, happened: Sequence[Happening]) -> Iterator[str]:
        woken = {one.who: one.at for one in happened if one.what == "is woken"}
        for one in happened:
            if one.what == "is frozen":
                x, width = self.x(one.at), round((woken[one.who] - one.at) * self.scale, 1)
                yield f'<rect class="frozen" x="{x}" y="{self.y(one.who)}" width="{width}" height="{BAR}" rx="3"/>'
                yield f'<text class="ice" x="{round(x + width / 2, 1)}" y="{self.y(one.who) + 23}">frozen</text>'

    def refused(self, happened: Sequence[Happening]) -> Iterator[str]:
        for one in happened:
            if one.what.endswith("refused by the database"):
                x, middle = self.x(one.at), self.y(one.who) + BAR // 2
                yield f'<path class="cross" d="M{x + 2} {middle - 6}l12 12m0 -12l-12 12"/>'
                yield f'<text class="bad" x="{x + 16}" y="{self.y(one.who) - 6}">its write is refused</text>'

    def faults(self, gaps: Sequence[tuple[str, float, float]]) -> Iterator[str]:
        for word, at, gap in gaps:
            x = self.x(at)
            middle = min(x, RIGHT - 48)
            yield f'<line class="fault" x1="{x}" x2="{x}" y1="72" y2="{AXIS}"/>'
            yield f'<text class="name" x="{middle}" y="34">{word}</text>'
            yield f'<text class="after" x="{middle}" y="62">{duration(gap)}</text>'
