"""APScheduler in every replica, at work in one. Start it several times, and end one with Ctrl-C, or with kill -9.

TENURE_URL=postgresql://localhost/app python examples/apscheduler_jobs.py    # pip install 'tenure[apscheduler]' first
"""

import logging

from apscheduler.schedulers.background import BackgroundScheduler

import tenure
from tenure.integrations.apscheduler import current_run, leader_only

logging.basicConfig(level=logging.WARNING)
node = tenure.Node()  # the database of TENURE_URL
scheduler = BackgroundScheduler(timezone="UTC")


@scheduler.scheduled_job("interval", seconds=1, id="report")
def report() -> None:
    run = current_run()
    with run.transaction() as transaction:  # marks the run as done: what is written here is written exactly once
        transaction.execute("select 1")
    print(f"{node.name}: report of {run.due:%H:%M:%S.%f}, under token {run.term.token}", flush=True)


leader_only(scheduler, node, delivery="at-least-once")
node.run()  # starts the scheduler, paused; until SIGINT or SIGTERM
