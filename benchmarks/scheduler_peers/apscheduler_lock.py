"""What people write by hand: APScheduler with its own job store, on the process that holds an advisory lock."""

from __future__ import annotations

import time
from datetime import datetime

import psycopg

from benchmarks.scheduler_peers import write

NAME = "APScheduler, its job store, an advisory lock by hand"
PACKAGES = ("apscheduler",)
VARIANTS = {"": {}}

POLL_S = 1.0
LOCK = 15


def tick() -> None:
    """Do nothing: the listener writes, because only it is told the due time."""


def run(url: str) -> None:
    from apscheduler.events import EVENT_JOB_EXECUTED
    from apscheduler.jobstores.sqlalchemy import SQLAlchemyJobStore
    from apscheduler.schedulers.background import BackgroundScheduler

    with psycopg.connect(url, autocommit=True) as lock, psycopg.connect(url, autocommit=True) as work:
        while not lock.execute("select pg_try_advisory_lock(%s)", [LOCK]).fetchall()[0][0]:
            time.sleep(POLL_S)
        scheduler = BackgroundScheduler(
            jobstores={"default": SQLAlchemyJobStore(url.replace("postgresql:", "postgresql+psycopg:"))},
            job_defaults={"misfire_grace_time": 60},
        )

        def executed(event: object) -> None:
            due: datetime = event.scheduled_run_time  # type: ignore[attr-defined]
            write(work, round(due.timestamp()))
            print("elected", flush=True)

        scheduler.add_listener(executed, EVENT_JOB_EXECUTED)
        scheduler.add_job(tick, "cron", second="*", id="tick", replace_existing=True)
        scheduler.start()
        while True:
            time.sleep(60)
