"""What commands print: tables, JSON, and errors in one line."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from tenure.cli import exit_codes
from tenure.errors import TenureError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

TABLE_ROWS = 500
GAP = 2
"""The spaces between two columns."""

# Errors ------------------------------------------------------------------------------------------------------------


class Ended(click.ClickException):
    """Ends the command with an exit code, and prints the message on stderr unless it is empty."""

    def __init__(self, code: int, message: str = "") -> None:
        super().__init__(message)
        self.exit_code = code  # type: ignore[misc]

    def show(self, file: Any = None) -> None:  # noqa: ARG002 - click's signature
        """Print the line."""
        if self.message:
            say(self.message)


def say(message: str) -> None:
    """Print a line on stderr."""
    click.echo("tenure: " + message, err=True)


@contextlib.contextmanager
def report_errors() -> Iterator[None]:
    """Report an error in one line and exit with 2; exit with 130 on Ctrl-C."""
    for name in ("tenure", "psycopg"):
        logging.getLogger(name).addHandler(logging.NullHandler())
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()
    except (KeyboardInterrupt, click.Abort):
        sys.exit(exit_codes.INTERRUPTED)
    except BrokenPipeError:
        # click handles this error.
        raise
    except (TenureError, OSError) as error:
        # The message may contain a URL, which the user gave as a role or a name by mistake.
        say(without_password(one_line(error)))
        _discard_output()
        sys.exit(exit_codes.USAGE)


def _discard_output() -> None:
    """Send stdout to /dev/null, so that Python's flush at exit does not fail once more."""
    with contextlib.suppress(OSError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def one_line(message: object) -> str:
    """Return a message without line breaks."""
    return " ".join(str(message).split())


def without_password(text: str) -> str:
    """Return a text in which URLs have neither user nor password."""
    return re.sub(r":/+[^\s/]*@", "://…@", text)


# Data --------------------------------------------------------------------------------------------------------------

Columns = dict[str, Callable[[Any], object]]
"""The columns of a table: each heading, and the function that returns the cell of a row."""

Marks = Callable[[Any], tuple[str, str, str]]
"""Returns, for a row, the sign before it, the style of the sign, and the style of the row."""

NAMES = ("ROLE", "LEADER", "MEMBER", "CANDIDATE", "HOST", "LEADS", "ID", "JOB", "TABLE", "NAMESPACE", "NODE", "DUE",
         "LAST", "OUTCOME", "STATE", "LEAKS")  # fmt: skip
"""The columns that are made narrower if a table is too wide for the terminal."""

SENTENCES = {"OUTCOME": 36, "STATE": 24, "DUE": 30}
"""The columns that may hold a sentence, with the width that each keeps while other columns are left out. On a narrow
terminal these columns wrap between words, and the others do not."""
SHORTEST_LINE = 16
"""The least width of a wrapped sentence. Where even that does not fit, names wrap, too."""


def no_mark(_: Any) -> tuple[str, str, str]:
    """Mark no row."""
    return "", "", ""


def on_terminal() -> bool:
    """Whether stdout is a terminal."""
    return sys.stdout is not None and sys.stdout.isatty()


def print_json(value: object) -> None:
    """Print values as JSON."""
    from tenure.reports import to_json  # noqa: PLC0415 - slow to import, and `tenure run` does not need it

    click.echo(to_json(value))


def console() -> Console:
    """Return the terminal. It has no colours if NO_COLOR is set."""
    from rich.console import Console  # noqa: PLC0415 - slow to import, and only needed on a terminal

    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that is not in UTF-8 lacks some signs.
        sys.stdout.reconfigure(errors="replace")
    return Console(highlight=False)


def echo(text: str, style: str = "") -> None:
    """Print a text; on a terminal, break its lines between words."""
    if on_terminal():
        from rich.text import Text  # noqa: PLC0415 - as above

        console().print(Text(text, style=style))
    else:
        click.echo(text)


def notes(*lines: str) -> None:
    """Print notes below a table, one to a line."""
    if lines:
        click.echo()
    for line in lines:
        echo(line, "dim")


def when(moment: datetime) -> str:
    """Return a moment for people, in their time zone, which :func:`zone_note` names."""
    return f"{moment.astimezone():%Y-%m-%d %H:%M:%S}"


def brief(moment: datetime) -> str:
    """Return a moment for a table: on a terminal without the year, if it is this year."""
    return when(moment).removeprefix(f"{datetime.now().astimezone():%Y-}" if on_terminal() else "")


def zone_note(moments: Iterable[datetime | None]) -> list[str]:
    """Return the note that names the time zone of moments; it names two if the clocks were changed between them."""
    zones = dict.fromkeys(_zone(moment) for moment in moments if moment is not None)
    return [f"times are local, {' and '.join(zones)}"] if zones else []


def _zone(moment: datetime) -> str:
    """Return the local time zone at a moment, such as ``CET (UTC+1)``."""
    local = moment.astimezone()
    offset_s = local.utcoffset().total_seconds()  # type: ignore[union-attr]
    hours, minutes = divmod(abs(round(offset_s / 60)), 60)
    offset = "UTC"
    if offset_s:
        offset += f"{'+' if offset_s > 0 else '-'}{hours}" + (f":{minutes:02}" if minutes else "")
    name = local.tzname() or ""
    return f"{name} ({offset})" if name.isalpha() and name != offset else offset


def show(rows: Sequence[Any], columns: Columns, mark: Marks = no_mark) -> None:
    """Print rows as a table on a terminal; elsewhere, and if there are very many, as plain columns."""
    if on_terminal() and len(rows) <= TABLE_ROWS:
        console().print(table(rows, columns, mark, whole=_is_whole(rows, columns)))
        return
    cells = _cells(rows, columns)
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    for line in ([*columns], *cells):
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def show_newest(
    rows: Sequence[Any],
    columns: Columns,
    spare: Sequence[str],
    about: Callable[[Columns], list[str]],
    mark: Marks = no_mark,
) -> None:
    """Print rows, newest first, and the notes about the columns that are shown.

    On a terminal these are as many rows as fit on the screen, unless --limit is given: the newest ones must not scroll
    away.
    """
    shown = fitting(rows, columns, spare)
    lines, fit = [*left_out(columns, shown), *about(shown)], len(rows)
    given = click.get_current_context().get_parameter_source("limit")
    if on_terminal() and given is ParameterSource.DEFAULT:
        more = "{} older ones do not fit: give --limit, or add `| less`"
        terminal = console()

        def height(*parts: Any) -> int:
            return sum(len(terminal.render_lines(part)) for part in parts)

        # An empty line and the prompt need two more lines.
        below = height(*lines) + 2
        while (
            fit > 1 and height(table(rows[:fit], shown, mark, whole=_is_whole(rows, shown))) + below > terminal.height
        ):
            below += 0 if fit < len(rows) else height(more)
            fit -= 1
        if fit < len(rows):
            lines.insert(0, more.format(len(rows) - fit))
    show(rows[:fit], shown, mark)
    notes(*lines)


def fitting(rows: Sequence[Any], columns: Columns, spare: Sequence[str]) -> Columns:
    """Return the columns that fit on the terminal; all of them if the output is not a terminal."""
    return narrowed(rows, columns, spare, console().width) if on_terminal() else columns


def left_out(columns: Columns, shown: Columns) -> list[str]:
    """Return the note that says which columns are not shown, and how to see them."""
    missing = ", ".join(name for name in columns if name not in shown)
    return [f"too narrow for {missing}: widen the terminal, or add `| less -S`"] if missing else []


def narrowed(rows: Sequence[Any], columns: Columns, spare: Sequence[str], width: int) -> Columns:
    """Return the columns that fit into the width: columns are dropped in the order of ``spare`` until the rest fits."""
    widths = _widths(rows, columns)
    for heading in spare:
        # The sign before the first column is as wide as the gap that the last column does not have.
        if sum(widths.values()) <= width:
            break
        widths.pop(heading, None)
    return {heading: columns[heading] for heading in widths}


def _is_whole(rows: Sequence[Any], columns: Columns) -> bool:
    """Whether the terminal has room for all columns if only sentences are broken."""
    return sum(_widths(rows, columns, SHORTEST_LINE).values()) <= console().width


def _widths(rows: Sequence[Any], columns: Columns, most: int | None = None) -> dict[str, int]:
    """Return how many characters each column needs, with the gap after it; ``most`` limits sentences."""
    from rich.cells import cell_len  # noqa: PLC0415 - as above

    cells = zip(columns, zip(columns, *_cells(rows, columns), strict=True), strict=True)
    widths = {heading: max(map(cell_len, column)) for heading, column in cells}
    for heading in SENTENCES.keys() & widths.keys():
        widths[heading] = min(widths[heading], most or SENTENCES[heading])
    return {heading: width + GAP for heading, width in widths.items()}


def table(
    rows: Sequence[Any], columns: Columns, mark: Marks = no_mark, *, one_line: bool = False, whole: bool = False
) -> Table:
    """Return rows as a table for a terminal.

    On a narrow terminal only names wrap. With ``one_line`` they are cut off instead, and with ``whole`` only sentences
    wrap.
    """
    from rich.table import Table  # noqa: PLC0415 - as above
    from rich.text import Text  # noqa: PLC0415

    shown = Table(box=None, header_style="bold", pad_edge=False)
    for heading in columns:
        shown.add_column(heading, overflow="fold", no_wrap=heading not in (SENTENCES if whole else NAMES))
    how: Any = {"no_wrap": True, "overflow": "ellipsis"} if one_line else {}
    for row, (first, *others) in zip(rows, _cells(rows, columns), strict=True):
        sign, colour, style = mark(row)
        begin = Text.assemble((f"{sign} " if sign else "", colour), first, **how)
        shown.add_row(begin, *(Text(cell, **how) for cell in others), style=style)
    return shown


def _cells(rows: Sequence[Any], columns: Columns) -> list[list[str]]:
    return [[printable(cell(row)) for cell in columns.values()] for row in rows]


def printable(value: object) -> str:
    """Return a text with its control characters escaped: those in a row of the database could disturb the terminal."""
    return "".join(char if char.isprintable() else f"\\u{ord(char):04x}" for char in str(value))
