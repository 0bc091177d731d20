"""What the tests of APScheduler share: jobs that record their runs, and replicas that lead them."""

from __future__ import annotations

import contextlib
import functools
import threading
from datetime import datetime, timedelta, timezone

from apscheduler.jobstores.sqlalchemy import SQLAlchemyJobStore
from apscheduler.schedulers.background import BackgroundScheduler

import tenure
from tenure.integrations.apscheduler import current_run, leader_only
from tests.integrations.cluster import PATIENCE_S
from tests.support import store_by_hand as desk

until = functools.partial(desk.until, timeout=PATIENCE_S)
UTC = timezone.utc
SECOND = timedelta(seconds=1)
HOUR = timedelta(hours=1)


class Runs:
    """Runs of jobs, as they happened; APScheduler finds a job of a shared store by the name of its function."""

    def __init__(self):
        self.made = []
        self.stores = []
        self.hold = threading.Event()
        self.hold.set()

    def dues(self, job="job"):
        return [due for name, due, _ in self.made if name == job]

    def wait(self, number=1, job="job"):
        until(lambda: len(self.dues(job)) >= number, f"{number} runs")
        return self.dues(job)


runs = Runs()


def work():
    run = current_run()
    runs.made.append((run.job, run.due, run.term.token))
    assert runs.hold.wait(30)


@contextlib.contextmanager
def led(url, *jobs, store=None, name=None, ttl=None, delivery="at-most-once", **options):
    """A replica: a node and its scheduler with these jobs; it ends with the block."""
    scheduler = BackgroundScheduler(timezone=UTC, jobstores={"default": store} if store else {})
    for job in jobs:
        scheduler.add_job(**job)
    node = tenure.Node(url, name=name, ttl=ttl)
    leader_only(scheduler, node, delivery=delivery, **options)
    with node:
        yield node, scheduler


def every_second(**options):
    return {"func": work, "trigger": "interval", "seconds": 1, "id": "job"} | options


def at(moment, **options):
    once = {"func": work, "trigger": "date", "run_date": moment, "id": "job", "misfire_grace_time": 60}
    return once | options


def shared(url):
    runs.stores.append(store := SQLAlchemyJobStore(url.replace("postgresql:", "postgresql+psycopg:")))
    return store


def now():
    return datetime.now(UTC)


def history(url, *, anchor, claimed=None, done=None):
    """What earlier leaders have left in the database."""
    with tenure.Node(url) as node, node.lead("scheduler", timeout=20) as term, term.transaction() as transaction:
        transaction.anchor("job", anchor)
        if claimed:
            transaction.claim("job", claimed)
        if done:
            transaction.finish("job", done)


def record(url):
    with tenure.Registry(url) as registry:
        return next(iter(registry.jobs("scheduler")), None)


def whole_second():
    return now().replace(microsecond=0)
