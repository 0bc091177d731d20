"""A leader-only command that writes under the fence, and says what it was told."""

import time

from django.core.management.base import BaseCommand
from django.db import connection, transaction

from tenure.integrations.django import leader_command
from tests.integrations.django_project.ledger.models import Entry


@leader_command("books", wait=False)
class Command(BaseCommand):
    def add_arguments(self, parser):
        parser.add_argument("--for", type=float, default=0.0, dest="seconds")

    def handle(self, **options):
        with transaction.atomic():
            self.term.fence(connection)
            Entry.objects.create(text=f"token {self.term.token}")
        self.stdout.write("closed")
        self.stdout.flush()
        time.sleep(options["seconds"])
