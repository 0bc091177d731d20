"""What commands print: tables, JSON, and errors in one line."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from tenure.cli import exit_codes
from tenure.errors import TenureError

if TYPE_CHECKING:
    from rich.table import Table

TABLE_ROWS = 500

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
        raise  # click handles it
    except (TenureError, OSError) as error:
        say(without_password(one_line(error)))  # the caller may have given a URL as a role or a name
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


def on_terminal() -> bool:
    """Whether stdout is a terminal."""
    return sys.stdout is not None and sys.stdout.isatty()


def print_json(value: object) -> None:
    """Print values as JSON."""
    from tenure.reports import to_json  # noqa: PLC0415 - slow to import, and `tenure run` does not need it

    click.echo(to_json(value))


def show(rows: Sequence[Any], columns: Columns) -> None:
    """Print rows as a table on a terminal; elsewhere, and if there are very many, as plain columns."""
    if on_terminal() and len(rows) <= TABLE_ROWS:
        from rich.console import Console  # noqa: PLC0415 - slow to import, and only needed on a terminal

        Console().print(table(rows, columns))
        return
    cells = _cells(rows, columns)
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    for line in ([*columns], *cells):
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def table(rows: Sequence[Any], columns: Columns) -> Table:
    """Return rows as a table for a terminal."""
    from rich.table import Table  # noqa: PLC0415 - as above
    from rich.text import Text  # noqa: PLC0415

    shown = Table(box=None, header_style="bold", pad_edge=False)
    for heading in columns:
        shown.add_column(heading, overflow="fold")
    for line in _cells(rows, columns):
        shown.add_row(*(Text(cell) for cell in line))
    return shown


def _cells(rows: Sequence[Any], columns: Columns) -> list[list[str]]:
    return [[printable(cell(row)) for cell in columns.values()] for row in rows]


def printable(value: object) -> str:
    """Return a text with its control characters escaped: those in a row of the database could disturb the terminal."""
    return "".join(char if char.isprintable() else f"\\u{ord(char):04x}" for char in str(value))
