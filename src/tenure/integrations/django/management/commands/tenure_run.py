"""``manage.py tenure_run``: runs another management command, only while this process leads."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import click
from django.core.management import get_commands
from django.core.management.base import BaseCommand, CommandError, CommandParser

from tenure.cli.options import Seconds
from tenure.cli.output import report_errors
from tenure.cli.posix import require_posix
from tenure.integrations.django.conf import node_arguments

PASSED_ON = ("restart", "no_wait", "wait_timeout", "hold", "grace", "group_only")
"""The options that are those of `tenure run`."""


class Command(BaseCommand):  # type: ignore[misc]
    """``tenure run`` for a management command, on Django's database."""

    help = (
        "Runs another management command only while this process leads a role: `tenure run`, on Django's database. "
        "For a command that must run once among several machines: start `manage.py tenure_run COMMAND` on each. "
        "The command and every process that it started are ended before another node can lead. Exit codes: that of the "
        "command; 75 another node leads (--no-wait); 76 leadership lost; 124 --wait-timeout; 2 the database cannot be "
        "used."
    )
    requires_system_checks = ()

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the options. They come before the command: everything after the command is its arguments."""
        add = parser.add_argument
        add("--role", help="The role to lead; by default the command's name.")
        add("--lock-id", help="An advisory lock of PostgreSQL that this process must hold to lead, such as 42 or 0x2A.")
        add("--restart", action="store_true", help="Never exit: lead and run COMMAND again.")
        add("--no-wait", action="store_true", help="Exit with 75 at once if another node leads.")
        add("--wait-timeout", type=_seconds, help="Exit with 124 if not elected within this many seconds.")
        add("--hold", type=_seconds, default=0.0, help="Keep the role for at least this many seconds: for cron.")
        add("--grace", type=_seconds, default=10.0, help="Seconds between SIGTERM and SIGKILL; 10 by default.")
        add(
            "--group-only", action="store_true", help="End only the command's process group: for systems without /proc."
        )
        add("command", help="The management command.")
        add("arguments", nargs=argparse.REMAINDER, help="Its arguments.")

    def handle(self, **options: Any) -> None:
        """Wait to be elected, and run the command under each term."""
        if options["command"] not in get_commands():
            raise CommandError(f"there is no management command {options['command']!r}: see `manage.py help`")
        if options["restart"] and (options["no_wait"] or options["hold"]):
            raise CommandError(
                "--restart never exits, and --no-wait and --hold are for a single run: leave one of them out"
            )
        try:
            require_posix("manage.py tenure_run", "use leader_only() of tenure.integrations.django")
        except click.ClickException as error:
            raise CommandError(error.message, returncode=error.exit_code) from None
        from tenure.cli.run.runner import Runner, RunOptions  # noqa: PLC0415 - names signals that Windows lacks

        path = [f"--pythonpath={options['pythonpath']}"] if options.get("pythonpath") else []
        run_options = RunOptions(
            role=options["role"] or options["command"],
            command=(*_this_program(), options["command"], *path, *options["arguments"]),
            verbose=options["verbosity"] > 1,
            lock_id=options["lock_id"],
            **{name: options[name] for name in PASSED_ON},
        )
        try:
            with report_errors():
                sys.exit(Runner(run_options, node_arguments()).run())
        except click.ClickException as error:
            error.show()
            sys.exit(error.exit_code)


def _seconds(text: str) -> float:
    try:
        return float(Seconds().convert(text, None, None))
    except click.UsageError as error:
        raise argparse.ArgumentTypeError(error.message) from None


def _this_program() -> tuple[str, ...]:
    """Return the command line of this program up to its arguments: manage.py, or a module by -m."""
    spec = sys.modules["__main__"].__spec__
    if spec is None:
        return sys.executable, sys.argv[0]
    return sys.executable, "-m", spec.name.removesuffix(".__main__")
