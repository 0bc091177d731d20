"""``manage.py tenure_run``: another management command, only while this process leads."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import click
from django.core.management import get_commands
from django.core.management.base import BaseCommand, CommandError, CommandParser

from tenure.cli.common import Seconds, told_errors
from tenure.cli.run import Mission, Runner
from tenure.integrations.django.conf import node_arguments


class Command(BaseCommand):  # type: ignore[misc]
    """As ``tenure run``, of a management command, on Django's database."""

    help = (
        "Runs another management command only while this process leads a role; as `tenure run`, on Django's database. "
        "It is ended, with everything that it started, before anybody else may lead. Exit codes: that of the command; "
        "75 somebody else leads (--no-wait); 76 leadership lost; 124 --wait-timeout; 2 the database cannot be used."
    )
    requires_system_checks = ()

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the options, which stand before the command: what follows it is its own."""
        parser.add_argument("--role", help="The role to lead; else the command's name.")
        parser.add_argument("--restart", action="store_true", help="Lead again and run it again, whenever it ended.")
        parser.add_argument("--no-wait", action="store_true", help="Exit with 75 at once if somebody else leads.")
        parser.add_argument("--wait-timeout", type=_seconds, help="Exit with 124 if not elected after so many seconds.")
        parser.add_argument("--hold", type=_seconds, default=0.0, help="Lead for so many seconds at least: for cron.")
        parser.add_argument(
            "--grace", type=_seconds, default=10.0, help="Seconds between SIGTERM and SIGKILL; else 10."
        )
        parser.add_argument("command", help="The management command.")
        parser.add_argument("arguments", nargs=argparse.REMAINDER, help="Its arguments.")

    def handle(self, **options: Any) -> None:
        """Stand for the role, and run the command under each term."""
        if options["command"] not in get_commands():
            raise CommandError(f"there is no management command {options['command']!r}: see `manage.py help`")
        if options["restart"] and (options["no_wait"] or options["hold"]):
            raise CommandError("--restart goes on for ever, and --no-wait and --hold are for a single run")
        path = [f"--pythonpath={options['pythonpath']}"] if options.get("pythonpath") else []
        mission = Mission(
            role=options["role"] or options["command"],
            command=(*_this_program(), options["command"], *path, *options["arguments"]),
            restart=options["restart"],
            no_wait=options["no_wait"],
            wait_timeout=options["wait_timeout"],
            hold=options["hold"],
            grace=options["grace"],
            verbose=options["verbosity"] > 1,
        )
        try:
            with told_errors():
                sys.exit(Runner(mission, node_arguments()).run())
        except click.ClickException as error:
            error.show()
            sys.exit(error.exit_code)


def _seconds(text: str) -> float:
    try:
        return float(Seconds().convert(text, None, None))
    except click.UsageError as error:
        raise argparse.ArgumentTypeError(error.message) from None


def _this_program() -> tuple[str, ...]:
    """Return how Python was told to run this program: manage.py, or a module by -m."""
    spec = sys.modules["__main__"].__spec__
    if spec is None:
        return sys.executable, sys.argv[0]
    return sys.executable, "-m", spec.name.removesuffix(".__main__")
