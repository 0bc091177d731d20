"""``tenure doctor``: whether nodes can work on a database, and what to do if not."""

from __future__ import annotations

import re
import sys
import textwrap
from typing import TYPE_CHECKING

import click

from tenure.cli import exit_codes
from tenure.cli.options import as_json, database
from tenure.cli.output import console, on_terminal, print_json, printable
from tenure.databases.doctor import Finding
from tenure.reports import findings
from tenure.settings import node_settings

if TYPE_CHECKING:
    from rich.table import Table

SHOWN = {"error": ("FAIL", "red"), "warning": ("warn", "yellow"), "ok": ("ok  ", "green")}
"""Each level, with its word and its colour, in the order in which people see the findings."""
UNIT = re.compile(r"(?<=\d) (?=(?:ms|s|min|h|d)\b)")
"""The space between a number and its unit, at which no line is broken."""
NO_BREAK = "\N{NO-BREAK SPACE}"
CLOSING = 3
"""The lines below the report: an empty one, the one that counts, and the prompt."""


@click.command()
@click.option("--ttl", type=float, help="The TTL of the nodes, in seconds; else TENURE_TTL, else the living members'.")
@click.option("--strict", is_flag=True, help="Exit with 1 if there are warnings.")
@database
@as_json
def doctor(
    ttl: float | None, *, strict: bool, url: str | None, namespace: str | None, schema: str, json_: bool
) -> None:
    """Check whether nodes can work on the database.

    If they cannot, it says what to do. Run it before you deploy, with the URL and the database user of the nodes, and
    when a node does not join. It finds dead hosts, poolers, missing privileges, unsuitable server settings and slow
    answers. It leaves nothing behind in the database.

    What fails comes first, then the warnings. If a report is longer than the terminal, its end repeats what fails. The
    exit code is 0 if no check fails, and 2 if one fails.

    Without --ttl and TENURE_TTL, the TTL is the shortest of the living members, or 10 seconds if there are none.

    \b
    tenure doctor --url postgresql://localhost/app
    tenure doctor --ttl 3 --strict && echo fit
    """
    found = findings(node_settings(url, name="doctor", namespace=namespace, ttl=ttl, schema=schema))
    if json_:
        print_json(found)
    else:
        _print(found)
    levels = {finding.level for finding in found}
    sys.exit(exit_codes.USAGE if "error" in levels else exit_codes.WARNINGS if strict and "warning" in levels else 0)


def _print(found: list[Finding]) -> None:
    """Print a line for each finding; on a terminal, break it between words, and begin the remedy on a new line."""
    found = sorted(found, key=lambda finding: [*SHOWN].index(finding.level))
    if on_terminal():
        _print_table(found)
        return
    width = max(len(finding.check) for finding in found)
    for finding in found:
        word, _ = SHOWN[finding.level]
        remedy = f"; remedy: {finding.remedy}" if finding.remedy else ""
        click.echo(f"{word}  {finding.check:{width}}  {finding.text}{remedy}")


def _print_table(found: list[Finding]) -> None:
    from rich.text import Text  # noqa: PLC0415 - slow to import, and only needed on a terminal

    terminal = console()
    report = _table(found, terminal.width)
    terminal.print(report)
    failed = [finding for finding in found if finding.level == "error"]
    if failed and len(terminal.render_lines(report)) + CLOSING > terminal.height:
        # The failures have left the screen, so they are shown once more.
        terminal.print()
        terminal.print(_table(failed, terminal.width))
    counts = [_count(found, level) for level in SHOWN]
    terminal.print(Text(f"\n{', '.join(counts)}", style=SHOWN[found[0].level][1]))


def _count(found: list[Finding], level: str) -> str:
    """Return how many findings of a level there are, and which checks found something wrong."""
    checks = [finding.check for finding in found if finding.level == level]
    names = ", ".join(dict.fromkeys(checks)) if level != "ok" else ""
    return f"{len(checks)} {SHOWN[level][0].strip()}" + (f" ({names})" if names else "")


def _table(found: list[Finding], width: int) -> Table:
    from rich.table import Table  # noqa: PLC0415 - as above
    from rich.text import Text  # noqa: PLC0415

    room = max(20, width - sum(len(word) + 2 for word in ("FAIL", max((f.check for f in found), key=len))))
    shown = Table.grid(padding=(0, 2, 0, 0))
    shown.add_column(no_wrap=True)
    shown.add_column(no_wrap=True)
    shown.add_column(overflow="fold")
    for finding in found:
        word, colour = SHOWN[finding.level]
        text = Text(_wrapped(finding.text, room))
        if finding.remedy:
            text.append("\n").append(_wrapped(f"remedy: {finding.remedy}", room))
            text.highlight_words(["\nremedy:"], style="bold")
        shown.add_row(Text(word, style=colour), finding.check, text)
    return shown


def _wrapped(text: str, width: int) -> str:
    """Return a text in lines that are broken between words, and never between a number and its unit."""
    lines = textwrap.wrap(UNIT.sub(NO_BREAK, printable(text)), width, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace(NO_BREAK, " ")
