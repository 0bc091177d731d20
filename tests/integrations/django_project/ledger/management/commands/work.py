"""A command that knows nothing of Tenure: says in what surroundings it runs, and goes on for ever."""

import json
import os
import time

from django.core.management.base import BaseCommand
from django.db import connection


class Command(BaseCommand):
    def add_arguments(self, parser):
        parser.add_argument("--say", default="")
        parser.add_argument("--once", action="store_true")

    def handle(self, **options):
        connection.ensure_connection()
        surroundings = {name: value for name, value in os.environ.items() if name.startswith("TENURE_")}
        self.stdout.write(json.dumps({"say": options["say"], "pid": os.getpid(), **surroundings}))
        self.stdout.flush()
        while not options["once"]:
            time.sleep(0.1)
