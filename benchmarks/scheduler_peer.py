"""What people write by hand: APScheduler with its own job store, on the process that holds an advisory lock.

`python benchmarks/scheduler_peer.py URL`. It prints `elected` when it has the lock. The job is due every second, and
writes the time at which it was due.
"""

from __future__ import annotations

import sys
import time
from datetime import datetime

import psycopg
from apscheduler.events import EVENT_JOB_EXECUTED
from apscheduler.jobstores.sqlalchemy import SQLAlchemyJobStore
from apscheduler.schedulers.background import BackgroundScheduler

POLL_S = 1.0
LOCK = 15
INSERT = "insert into effects (job, due_us, at_us, token, attempt) values ('tick', %s, %s, 0, 1)"


def tick() -> None:
    """Do nothing: the listener writes, because only it is told the due time."""


def main(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as lock, psycopg.connect(url, autocommit=True) as work:
        while not lock.execute("select pg_try_advisory_lock(%s)", [LOCK]).fetchall()[0][0]:
            time.sleep(POLL_S)
        print("elected 1", flush=True)
        scheduler = BackgroundScheduler(
            jobstores={"default": SQLAlchemyJobStore(url.replace("postgresql:", "postgresql+psycopg:"))},
            job_defaults={"misfire_grace_time": 60},
        )

        def executed(event: object) -> None:
            due: datetime = event.scheduled_run_time  # type: ignore[attr-defined]
            work.execute(INSERT, [round(due.timestamp()) * 1_000_000, time.time_ns() // 1000])

        scheduler.add_listener(executed, EVENT_JOB_EXECUTED)
        scheduler.add_job(tick, "cron", second="*", id="tick", replace_existing=True)
        scheduler.start()
        while True:
            time.sleep(60)


if __name__ == "__main__":
    main(sys.argv[1])
