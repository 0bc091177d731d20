"""What the commands share: where the database is, how errors are told, how data is printed."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tenure.errors import TenureError

if TYPE_CHECKING:
    from rich.table import Table

F = TypeVar("F", bound=Callable[..., Any])

YEAR_S = 365 * 86400.0
TABLE_ROWS = 500
INTERRUPTED = 130
USAGE = 2
"""The exit code of every error that the caller can mend: a wrong argument or URL, a database that is not there."""


schema_option = click.option(
    "--schema", default="tenure", show_default=True, help="Where the tables are, on PostgreSQL."
)


def database(command: F) -> F:
    """Add the options that say where the tables are, and tell errors in one line."""
    return place(click.option("--namespace", help="The namespace; else TENURE_NAMESPACE, else `default`.")(command))


def place(command: F) -> F:
    """Add the options that say where the tables of every namespace are, and tell errors in one line."""
    return location(schema_option(command))


def location(command: F) -> F:
    """Add the options that say which database, and tell errors in one line."""

    @click.option("--url", help="The database: postgresql://…, mysql://… or sqlite:///file.db.")
    @click.option(
        "--url-file",
        type=click.Path(dir_okay=False, path_type=Path),
        help="A file whose first line is the URL: keeps a password out of the process list.",
    )
    @functools.wraps(command)
    def wrapped(*args: Any, url: str | None, url_file: Path | None, **options: Any) -> Any:
        with told_errors():
            return command(*args, url=_url(url, url_file), **options)

    return wrapped  # type: ignore[return-value]


as_json = click.option("--json", "json_", is_flag=True, help="Print JSON.")


class Seconds(click.FloatRange):
    """A number of seconds, up to a year."""

    name = "seconds"

    def __init__(self, least: float = 0.0) -> None:
        """Take the least that makes sense."""
        super().__init__(least, YEAR_S)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Refuse what is no number, too."""
        number = super().convert(value, param, ctx)
        if number != number:  # noqa: PLR0124 - so says IEEE 754
            self.fail(f"{value!r} is no number of seconds", param, ctx)
        return number


@contextlib.contextmanager
def told_errors() -> Iterator[None]:
    """Say what went wrong in one line, and leave with 2; with 130 on Ctrl-C."""
    for name in ("tenure", "psycopg"):
        logging.getLogger(name).addHandler(logging.NullHandler())
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()
    except (KeyboardInterrupt, click.Abort):
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        raise  # click knows what to do
    except (TenureError, OSError) as error:
        click.echo("tenure: " + without_password(one_line(error)), err=True)  # a role or a name may be a URL by mistake
        _forget_output()
        sys.exit(USAGE)


def _forget_output() -> None:
    """Let nobody fail again at what could not be written."""
    with contextlib.suppress(OSError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def one_line(told: object) -> str:
    """Return what was said, without line breaks."""
    return " ".join(str(told).split())


def without_password(text: str) -> str:
    """Return a text without what stands before the host in a URL."""
    return re.sub(r":/+[^\s/]*@", "://…@", text)


def on_terminal() -> bool:
    """Whether somebody looks."""
    return sys.stdout is not None and sys.stdout.isatty()


def _url(url: str | None, url_file: Path | None) -> str | None:
    if url is not None and url_file is not None:
        raise click.UsageError("--url and --url-file: give one of them")
    if url_file is None:
        return url
    try:
        return url_file.read_text(encoding="utf-8-sig").split("\n", 1)[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"--url-file: {error}") from None


Columns = dict[str, Callable[[Any], object]]
"""What a table shows of each value: a heading, and the cell below it."""


def print_json(value: object) -> None:
    """Print values as JSON."""
    click.echo(json.dumps(value, default=_jsonable, indent=2))


def show(rows: Sequence[Any], columns: Columns) -> None:
    """Print values as a table on a terminal, else (and where there are very many) as plain columns."""
    if on_terminal() and len(rows) <= TABLE_ROWS:
        from rich.console import Console  # noqa: PLC0415 - only where somebody looks

        Console().print(table(rows, columns))
        return
    cells = _cells(rows, columns)
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    for line in ([*columns], *cells):
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def table(rows: Sequence[Any], columns: Columns) -> Table:
    """Return values as a table for a terminal."""
    from rich.table import Table  # noqa: PLC0415 - only where somebody looks
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
    """Return text that can do nothing to a terminal, whatever was written into a row."""
    return "".join(char if char.isprintable() else f"\\u{ord(char):04x}" for char in str(value))


def _jsonable(value: object) -> object:
    if isinstance(value, datetime):
        return value.isoformat()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    raise TypeError(type(value).__name__)


def ago(seconds: float) -> str:
    """Return a duration for people."""
    if seconds < 60:
        return f"{max(0.0, seconds):.1f} s"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    raise AssertionError


def when(moment: datetime) -> str:
    """Return a moment for people, in their own zone."""
    return f"{moment.astimezone():%Y-%m-%d %H:%M:%S}"
