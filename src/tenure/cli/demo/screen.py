"""What a demo looks like: plain lines, or on a terminal the same lines above a picture of the three processes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Literal

import click

from tenure.cli.replica import ROLE, Replica
from tenure.clock import now

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live
    from rich.text import Text
    from typing_extensions import Self

Tone = Literal["plain", "good", "bad"]
COLOURS = {"plain": "", "good": "green", "bad": "red"}
DRAW_EVERY_S = 0.1
BAR = 24


class Stage:
    """Plain lines, without any escape codes."""

    def __init__(self) -> None:
        """Begin the clock."""
        self.began = now()
        self.trust = 1.0
        """How long a renewal is good for."""
        self.replicas: Sequence[Replica] = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def scene(self, text: str) -> None:
        """Say what comes next."""
        self.say("", text)

    def event(self, at: float, who: str, what: str, tone: Tone = "plain") -> None:  # noqa: ARG002 - for colours
        """Say what happened, when, and to whom."""
        self.say(f"{at - self.began:6.2f} s  {who}  {what}")

    def table(self, rows: Sequence[tuple[str, str]]) -> None:
        """Show the figures."""
        width = max(len(claim) for claim, _ in rows)
        self.say("", *(f"{claim.ljust(width)}  {measured}" for claim, measured in (("CLAIMED", "MEASURED"), *rows)))

    def say(self, *lines: str) -> None:
        """Print lines."""
        for line in lines:
            click.echo(line)
        sys.stdout.flush()

    def tick(self) -> None:
        """Let time show; called many times a second."""


class Screen(Stage):
    """The same lines in colours, and below them, until the end, the three processes as they are now."""

    def __init__(self, console: Console) -> None:
        """Draw on a console."""
        super().__init__()
        self.console = console
        self._live: Live | None = None
        self._drawn = 0.0

    def __enter__(self) -> Self:
        from rich.live import Live  # noqa: PLC0415 - only where somebody looks

        self._live = Live(console=self.console, get_renderable=self.picture, auto_refresh=False, transient=True)
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._live is not None
        self._live.stop()

    def tick(self) -> None:
        """Draw the picture anew, now and then."""
        assert self._live is not None
        if now() > self._drawn + DRAW_EVERY_S:
            self._drawn = now()
            self._live.refresh()

    def scene(self, text: str) -> None:
        """Say what comes next."""
        self._print("", style="")
        self._print(text, style="bold")

    def event(self, at: float, who: str, what: str, tone: Tone = "plain") -> None:
        """Say what happened, when, and to whom."""
        from rich.text import Text  # noqa: PLC0415

        moment = (f"{at - self.began:6.2f} s  ", "dim")
        self.console.print(Text.assemble(moment, (f"{who}  ", "cyan"), (what, COLOURS[tone])))

    def table(self, rows: Sequence[tuple[str, str]]) -> None:
        """Show the figures."""
        from rich import box  # noqa: PLC0415
        from rich.table import Table  # noqa: PLC0415

        table = Table("", "claimed", "measured", box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
        for claim, measured in rows:
            table.add_row("[green]✓[/]", claim, measured)
        self._print("", style="")
        self.console.print(table)

    def say(self, *lines: str) -> None:
        """Print lines."""
        for line in lines:
            self._print(line, style="")

    def _print(self, line: str, style: str) -> None:
        from rich.text import Text  # noqa: PLC0415

        self.console.print(Text(line, style=style))

    def picture(self) -> RenderableType:
        """Return the three processes as they are now."""
        from rich import box  # noqa: PLC0415
        from rich.panel import Panel  # noqa: PLC0415
        from rich.table import Table  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

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
                _bar(left / self.trust) if holds else Text(" " * BAR),
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
    return "○", "stands by" if replica.joined else "joins", "dim"


def _bar(share: float) -> Text:
    from rich.text import Text  # noqa: PLC0415

    full = min(BAR, round(share * BAR))
    return Text.assemble(("━" * full, "green" if share > 0.3 else "yellow"), ("─" * (BAR - full), "dim"))
