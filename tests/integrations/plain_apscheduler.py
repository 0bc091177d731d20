"""What people have before they have an election: a scheduler in every replica. The control of the harness."""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import datetime, timezone

import psycopg
from apscheduler.schedulers.background import BackgroundScheduler

from tests.integrations.cluster import INSERT_RUN


def tick() -> None:
    due = datetime.now(timezone.utc).replace(microsecond=0)
    with psycopg.connect(os.environ["TENURE_URL"], autocommit=True) as connection:
        connection.execute(INSERT_RUN, ("tick", due, None, os.environ["TENURE_NAME"], os.getpid()))


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    scheduler = BackgroundScheduler(timezone="UTC")
    scheduler.add_job(tick, "cron", second="*")
    scheduler.start()
    while True:
        time.sleep(1)


if __name__ == "__main__":
    main()
