"""A job that is due every second, and runs at most once for each."""

import os
import time
from datetime import datetime, timezone

from django.db import connection, transaction

import tenure
from tests.integrations.cluster import INSERT_RUN


def tick(term: tenure.Term) -> None:
    over = False
    while not over:
        due = datetime.now(timezone.utc).replace(microsecond=0)  # the first may have been run by the leader before
        with transaction.atomic():
            if term.claim(connection, "tick", due):
                run = ("tick", due, term.token, os.environ.get("TENURE_NAME"), os.getpid())
                connection.cursor().execute(INSERT_RUN, run)
        over = term.wait_lost(1 - time.time() % 1)
