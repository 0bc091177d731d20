"""A scheduler in the time zone Test/Change (tests/support/zones.py), with jobs that are due every two seconds.

`python -m tests.integrations.zoned_app at-least-once` prints `JOB DUE` for each run, DUE in seconds since 1970.
"""

from __future__ import annotations

import logging
import sys

from apscheduler.schedulers.background import BackgroundScheduler

import tenure
from tenure.integrations.apscheduler import current_run, leader_only


def tick() -> None:
    run = current_run()
    print(run.job, run.due.timestamp(), flush=True)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    node = tenure.Node()
    late = {"misfire_grace_time": None, "coalesce": False}
    scheduler = BackgroundScheduler(timezone="Test/Change", job_defaults=late)
    scheduler.add_job(tick, "interval", seconds=2, id="interval")
    scheduler.add_job(tick, "cron", second="*/2", id="cron")
    leader_only(scheduler, node, delivery=sys.argv[1])
    node.run()
