"""``manage.py tenure_status``: shows who leads, on Django's database."""

from __future__ import annotations

import contextlib
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from tenure import Registry, TenureError
from tenure.base.tracebacks import without_locals
from tenure.cli.inspect import print_status
from tenure.integrations.django.conf import node_arguments


class Command(BaseCommand):  # type: ignore[misc]
    """``tenure status``, on Django's database."""

    help = "Shows every role and its leader, and every living member: `tenure status`, on Django's database."
    requires_system_checks = ()

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the options."""
        parser.add_argument("--json", action="store_true", help="Print JSON.")

    @without_locals
    def handle(self, **options: Any) -> None:
        """Print the tables."""
        # The lines have their line breaks already.
        self.stdout.ending = ""
        try:
            arguments = node_arguments()
            about = {name: arguments[name] for name in ("url", "password", "namespace", "schema") if name in arguments}
            with Registry(**about) as registry, contextlib.redirect_stdout(self.stdout):
                print_status(registry, json_=options["json"])
        except TenureError as error:
            raise CommandError(str(error), returncode=2) from error
