"""``manage.py tenure_status``: who leads, on Django's database."""

from __future__ import annotations

import contextlib
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from tenure.cli.look import print_status
from tenure.errors import TenureError
from tenure.integrations.django.conf import node_arguments
from tenure.registry import Registry


class Command(BaseCommand):  # type: ignore[misc]
    """As ``tenure status``."""

    help = "Shows every role and who leads it, and every living member; as `tenure status`, on Django's database."
    requires_system_checks = ()

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the options."""
        parser.add_argument("--json", action="store_true", help="Print JSON.")

    def handle(self, **options: Any) -> None:
        """Look, and print."""
        self.stdout.ending = ""  # the lines are whole
        try:
            arguments = node_arguments()
            about = {name: arguments[name] for name in ("url", "password", "namespace", "schema") if name in arguments}
            with Registry(**about) as registry, contextlib.redirect_stdout(self.stdout):
                print_status(registry, json_=options["json"])
        except TenureError as error:
            raise CommandError(str(error), returncode=2) from error
