"""The options that commands share: the database, the namespace, and the type of a number of seconds."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from tenure.base.tracebacks import without_locals
from tenure.cli.output import report_errors, say

F = TypeVar("F", bound=Callable[..., Any])

YEAR_S = 365 * 86400.0

schema_option = click.option(
    "--schema", default="tenure", show_default=True, help="The schema of the tables, on PostgreSQL."
)
lock_option = click.option(
    "--lock-id", help="An advisory lock of PostgreSQL that this process must hold to lead, such as 42 or 0x2A."
)


def _refuse_role(ctx: click.Context, _: click.Parameter, value: str | None) -> None:
    """Say how the role is given: other commands have the option."""
    if value is not None:
        raise click.UsageError(f"the role is an argument: `{ctx.command_path} {value}`")


role_is_argument = click.option("--role", "_role", hidden=True, expose_value=False, callback=_refuse_role)
as_json = click.option("--json", "json_", is_flag=True, help="Print JSON.")


def database(command: F) -> F:
    """Add the options for the database, the schema and the namespace; report errors in one line."""
    return place(click.option("--namespace", help="The namespace; else TENURE_NAMESPACE, else `default`.")(command))


def place(command: F) -> F:
    """Add the options for the database and the schema; report errors in one line.

    Without a URL the command says which file it uses: the caller may have meant a database that other machines share.
    """

    @functools.wraps(command)
    def wrapped(*args: Any, url: str | None, **options: Any) -> Any:
        prints_only = options.get("sql", False)
        if url is None and os.environ.get("TENURE_URL") is None and not prints_only:
            _say_local(no_wait=options.get("no_wait", False))
        return command(*args, url=url, **options)

    return location(schema_option(wrapped))  # type: ignore[return-value]


def _say_local(*, no_wait: bool) -> None:
    """Say that only processes of this machine take part in the election; refuse that with --no-wait.

    ``tenure run --no-wait`` is for cron on several machines, and cron does not pass TENURE_URL on.
    """
    from tenure.settings import default_file  # noqa: PLC0415 - slow to import, and not needed if there is a URL

    remedy = "to elect among machines, give --url or --url-file, or set TENURE_URL (in a crontab: on a separate line)"
    if no_wait:
        raise click.UsageError(
            "--no-wait needs a URL: without one each machine elects its own leader, so each runs the command; "
            f"{remedy}; to elect on this machine only, give --url sqlite:///file.db"
        )
    say(f"no URL given: only processes on this machine take part, through the file {default_file()}; {remedy}")


def location(command: F) -> F:
    """Add the options for the database; report errors in one line."""

    @click.option("--url", help="The database: postgresql://…, mysql://… or sqlite:///file.db.")
    @click.option(
        "--url-file",
        type=click.Path(dir_okay=False, path_type=Path),
        help="A file whose first line is the URL: keeps a password out of the process list.",
    )
    @without_locals
    @functools.wraps(command)
    def wrapped(*args: Any, url: str | None, url_file: Path | None, **options: Any) -> Any:
        with report_errors():
            return command(*args, url=_url(url, url_file), **options)

    return wrapped  # type: ignore[return-value]


def _url(url: str | None, url_file: Path | None) -> str | None:
    if url is not None and url_file is not None:
        raise click.UsageError("--url and --url-file exclude each other: give one of them")
    if url_file is None:
        return url
    try:
        return url_file.read_text(encoding="utf-8-sig").split("\n", 1)[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"--url-file cannot be read: {error}") from None


class Seconds(click.FloatRange):
    """A number of seconds, up to a year."""

    name = "seconds"

    def __init__(self, least: float = 0.0) -> None:
        super().__init__(least, YEAR_S)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Refuse NaN, which no range excludes."""
        number = super().convert(value, param, ctx)
        if number != number:  # noqa: PLR0124 - NaN differs from itself
            self.fail(f"{value!r} is not a number of seconds", param, ctx)
        return number
