"""The command ``tenure``. Each command is imported when it is called, so that ``tenure run`` starts quickly."""

from __future__ import annotations

import contextlib
import difflib
import importlib
from collections.abc import Iterator
from typing import Any

import click

from tenure import __version__
from tenure.base.tracebacks import without_locals
from tenure.cli.output import without_password

COMMANDS = {
    "cron": "tenure.cli.cron.command",
    "doctor": "tenure.cli.doctor",
    "demo": "tenure.cli.demo.command",
    "forget": "tenure.cli.admin",
    "guard": "tenure.cli.guards",
    "guards": "tenure.cli.guards",
    "history": "tenure.cli.inspect",
    "init": "tenure.cli.admin",
    "jobs": "tenure.cli.jobs",
    "members": "tenure.cli.inspect",
    "pause": "tenure.cli.jobs",
    "resign": "tenure.cli.admin",
    "resume": "tenure.cli.jobs",
    "run": "tenure.cli.run.command",
    "runs": "tenure.cli.jobs",
    "sql": "tenure.cli.admin",
    "status": "tenure.cli.inspect",
    "trigger": "tenure.cli.jobs",
    "ui": "tenure.cli.ui",
    "watch": "tenure.cli.watch",
}


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Return the names, without an import."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - as above
        """Import a command."""
        home = COMMANDS.get(cmd_name)
        command: click.Command | None = getattr(importlib.import_module(home), cmd_name) if home else None
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command by its name. If there is none, suggest the nearest names."""
        if args[0] not in COMMANDS and not args[0].startswith("-") and not ctx.resilient_parsing:
            near = " or ".join(f"`tenure {name}`" for name in difflib.get_close_matches(args[0], COMMANDS))
            ctx.fail(f"there is no command {args[0]!r}" + (f": did you mean {near}?" if near else ""))
        return super().resolve_command(ctx, args)

    @without_locals
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the options of the group."""
        with _no_secrets():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Parse the options of the command, and run it."""
        with _no_secrets():
            return super().invoke(ctx)


@contextlib.contextmanager
def _no_secrets() -> Iterator[None]:
    """Remove passwords from usage errors: the caller may have put a URL in the wrong place."""
    try:
        yield
    except click.UsageError as error:
        error.message = without_password(error.message)  # type: ignore[misc]
        raise


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="tenure %(version)s")
def main() -> None:
    """Leader election for Python services, on the database they already have.

    New here? `tenure demo` shows what Tenure does, `tenure doctor` checks your database, `tenure run` needs no code.

    \b
    The database is --url, else --url-file, else TENURE_URL, else a SQLite file in
    your state directory; TENURE_REQUIRE_URL=1 makes that last case an error:
        tenure status --url postgresql://localhost/app
        TENURE_URL=sqlite:///app.db tenure history scheduler
    """
