"""The picture of a run (SVG): who led when, faults as bands, refused writes as marks."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from tests.support.history import Belief, History, Line
from tests.verification.torture.checkers import Struck

STRIP_S = 120
WIDTH, LEFT, LANE, BANDS = 1200, 70, 16, 36
COLOURS = ("#1b6ca8", "#c0562f", "#3c8d53", "#7d4f9e", "#a8851b", "#4a4f57")
STYLE = (
    "text{font:10px sans-serif;fill:#333} .band{fill:#d33;fill-opacity:.10} .name{font-size:8px;fill:#922}"
    " .grid{stroke:#ddd} .refused{stroke:#d00;stroke-width:1.2}"
)


def timeline(history: History, steps: Sequence[Struck], lanes: Sequence[str], title: str) -> str:
    """Strips of two minutes, one below the other, with a lane for each slot of the cluster."""
    height = BANDS + LANE * len(lanes) + 22
    strips = max(1, -(-(history.end - history.start) // (STRIP_S * 10**9)))
    total = 24 + strips * height
    width = WIDTH + LEFT + 10
    size = f'viewBox="0 0 {width} {total}" width="{width}" height="{total}"'
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', f"<style>{STYLE}</style>"]
    out += ['<rect width="100%" height="100%" fill="#fff"/>', f'<text x="4" y="14">{escape(title)}</text>']
    beliefs = history.beliefs()
    refusals = [one for one in history.of_kind("write") if not one.ok and one.details.get("error") == "Fenced"]
    for number in range(strips):
        out += _Strip(history, lanes, number, 24 + number * height).draw(steps, beliefs, refusals)
    return "\n".join([*out, "</svg>\n"])


class _Strip:
    def __init__(self, history: History, lanes: Sequence[str], number: int, top: int) -> None:
        self.history, self.lanes, self.top = history, lanes, top
        self.since = history.start + number * STRIP_S * 10**9
        self.until = self.since + STRIP_S * 10**9

    def x(self, at: int) -> float:
        inside = min(max(at, self.since), self.until)
        return LEFT + (inside - self.since) / (self.until - self.since) * WIDTH

    def y(self, node: str) -> int:
        slot = node.partition(".")[0]
        return self.top + BANDS + LANE * self.lanes.index(slot)

    def within(self, since: int, until: int) -> bool:
        return since < self.until and until > self.since

    def draw(self, steps: Sequence[Struck], beliefs: Sequence[Belief], refusals: Sequence[Line]) -> list[str]:
        bottom = self.top + BANDS + LANE * len(self.lanes)
        out = []
        for second in range(0, STRIP_S + 1, 10):
            x = self.x(self.since + second * 10**9)
            at = (self.since - self.history.start) // 10**9 + second
            out.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{self.top + BANDS}" y2="{bottom}"/>')
            out.append(f'<text x="{x - 8:.1f}" y="{bottom + 11}">{at} s</text>')
        out += [f'<text x="4" y="{self.y(lane) + 12}">{escape(lane)}</text>' for lane in self.lanes]
        row = 0
        for step in steps:
            for fired in step.fired:
                if self.within(fired.since, fired.until):
                    row = (row + 1) % 4
                    out.append(self._band(fired.nemesis, fired.target, fired.since, fired.until, row, bottom))
        for belief in beliefs:
            if self.within(belief.since, belief.until):
                colour = COLOURS[self.lanes.index(belief.node.partition(".")[0]) % len(COLOURS)]
                since, until = self.x(belief.since), self.x(belief.until)
                said = escape(f"{belief.node}, token {belief.token}")
                out.append(
                    f'<rect x="{since:.1f}" y="{self.y(belief.node) + 3}" width="{max(0.6, until - since):.1f}"'
                    f' height="{LANE - 6}" fill="{colour}"><title>{said}</title></rect>'
                )
        for write in refusals:
            if self.within(write.at, write.at + 1):
                x, y = self.x(write.at), self.y(write.node)
                out.append(f'<line class="refused" x1="{x:.1f}" x2="{x:.1f}" y1="{y}" y2="{y + LANE}"/>')
        return out

    def _band(self, name: str, target: str, since: int, until: int, row: int, bottom: int) -> str:
        x, end = self.x(since), self.x(until)
        y = self.top + 8 + 8 * row
        return (
            f'<rect class="band" x="{x:.1f}" y="{y - 7}" width="{max(1.0, end - x):.1f}" height="{bottom - y + 7}">'
            f"<title>{escape(name)} {escape(target)}</title></rect>"
            f'<text class="name" x="{x:.1f}" y="{y}">{escape(name)}</text>'
        )
