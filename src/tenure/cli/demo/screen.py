"""The demo on a terminal: its lines in colour, and below them a picture of the three processes."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from tenure.base.clock import now
from tenure.cli.demo.replica import ROLE, Replica
from tenure.cli.demo.scenario import PlainOutput, Tone

COLOURS = {"plain": "", "good": "green", "bad": "red"}
DRAW_EVERY_S = 0.1
BAR = 24


class Screen(PlainOutput):
    """The same lines in colour, and below them a picture of the three processes, until the end."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console
        self.live = Live(console=console, get_renderable=self.picture, auto_refresh=False, transient=True)
        """The picture; the caller starts and stops it."""
        self._drawn = 0.0

    def tick(self) -> None:
        """Draw the picture again, if the last one is old enough."""
        if now() > self._drawn + DRAW_EVERY_S:
            self._drawn = now()
            self.live.refresh()

    def scene(self, text: str) -> None:
        """Print what comes next."""
        self.say("")
        self.console.print(Text(text, style="bold"))

    def event(self, at: float, who: str, what: str, tone: Tone = "plain") -> None:
        """Print what happened, when, and to which process."""
        moment = (f"{at - self.began:6.2f} s  ", "dim")
        self.console.print(Text.assemble(moment, (f"{who}  ", "cyan"), (what, COLOURS[tone])))

    def table(self, rows: Sequence[tuple[str, str]]) -> None:
        """Print the claims, and what was measured."""
        table = Table("", "claimed", "measured", box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
        for claim, measured in rows:
            table.add_row("[green]✓[/]", claim, measured)
        self.say("")
        self.console.print(table)

    def say(self, *lines: str) -> None:
        """Print lines."""
        for line in lines:
            self.console.print(Text(line))

    def picture(self) -> RenderableType:
        """Return a picture of the three processes as they are now."""
        table = Table("", "", "token", "lease left", "", "process", box=None, header_style="dim", padding=(0, 2, 0, 0))
        leader = "nobody"
        for replica in self.replicas:
            left = max(0.0, replica.until - now())
            holds = replica.leads and left > 0 and replica.fate != "killed"
            sign, word, style = _state(replica, holds=holds)
            if holds:
                leader = replica.name + (", which is frozen" if replica.fate else "")
            table.add_row(
                Text(replica.name, style="cyan"),
                Text(f"{sign} {word}".ljust(11), style=style),
                Text(str(replica.token) if holds else "", style=style),
                _bar(left / replica.lease) if holds else Text(" " * BAR),
                Text(f"{left:.1f} s" if holds else "     "),
                Text(f"pid {replica.pid}", style="dim"),
            )
        title = f"[bold]role {ROLE}: led by {leader}[/]" if self.replicas else "[dim]starting[/]"
        return Panel(table, title=title, title_align="left", box=box.ROUNDED, border_style="dim", padding=(0, 2))


def _state(replica: Replica, *, holds: bool) -> tuple[str, str, str]:
    """Return a sign, a word and a style."""
    if replica.fate == "killed":
        return "✗", "killed", "red"
    if replica.fate == "frozen":
        return "‖", "frozen", "yellow"
    if holds:
        return "●", "leads", "bold green"
    return "○", "standby" if replica.joined else "joins", "dim"


def _bar(share: float) -> Text:
    full = min(BAR, round(share * BAR))
    return Text.assemble(("━" * full, "green" if share > 0.3 else "yellow"), ("─" * (BAR - full), "dim"))
