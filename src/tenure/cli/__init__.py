"""The command line. Each command is loaded when it is called, so that ``tenure run`` starts quickly."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import click

from tenure.cli.common import without_password
from tenure.version import __version__

COMMANDS = {
    "doctor": "tenure.cli.doctor",
    "demo": "tenure.cli.demo",
    "forget": "tenure.cli.house",
    "history": "tenure.cli.look",
    "init": "tenure.cli.house",
    "members": "tenure.cli.look",
    "resign": "tenure.cli.house",
    "run": "tenure.cli.run",
    "sql": "tenure.cli.house",
    "status": "tenure.cli.look",
    "watch": "tenure.cli.look",
}


class LazyGroup(click.Group):
    """A group whose commands live in modules that are loaded by need."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's
        """Return the names, without loading anything."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's
        """Load a command."""
        home = COMMANDS.get(cmd_name)
        if home is None:
            return None
        command: click.Command = getattr(importlib.import_module(home), cmd_name)
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the options of the group."""
        with _no_secrets():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Parse the rest, and run the command."""
        with _no_secrets():
            return super().invoke(ctx)


@contextlib.contextmanager
def _no_secrets() -> Iterator[None]:
    """Complain about a URL in the wrong place without the password in it."""
    try:
        yield
    except click.UsageError as error:
        error.message = without_password(error.message)  # type: ignore[misc]
        raise


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="tenure %(version)s")
def main() -> None:
    """Leader election for Python services, on the database they already have.

    \b
    The database is --url, else --url-file, else TENURE_URL, else a SQLite file of
    yours on this machine:
        tenure status --url postgresql://localhost/app
        TENURE_URL=sqlite:///app.db tenure history scheduler
    """
