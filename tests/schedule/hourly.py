"""What the tests of schedules share: jobs and schedules with them."""

from __future__ import annotations

import contextlib
import threading

import tenure
from tests.support.schedules import HOUR_S, leading, let_pass
from tests.support.store_by_hand import execute, table, until


def hourly(function, **options):
    """A schedule with one job, due every hour."""
    schedule = tenure.Schedule()
    schedule.every("1 h", name="report", **options)(function)
    return schedule


def nothing(run):
    pass


def seen(url):
    """Let a leader see the job for the first time."""
    with leading(url, hourly(nothing)):
        until(lambda: known(url, "report"), "the job is known")


def known(url, job):
    with tenure.Registry(url) as registry:
        return [record for record in registry.jobs() if record.job == job and record.spec]


def slow_job():
    """A job that runs until it is asked to return, and the event that says that it has begun."""
    begun = threading.Event()

    def slow(run):
        begun.set()
        run.wait(20)

    return slow, begun


class Diary(list):
    """A job that writes down its runs."""

    __name__ = "report"

    def __call__(self, run):
        self.append(run)


def make_due(url):
    """Let one due time of the hourly job have passed."""
    seen(url)
    let_pass(url, HOUR_S, "report")


def leave_begun(url):
    """Let the runs that were made be what a leader leaves behind that was killed in the middle of them."""
    execute(url, f"update {table(url, 'runs')} set outcome = 'begun', ended_at = null where outcome = 'done'")


@contextlib.contextmanager
def commit_unanswered(node, times=1):
    """Let the next transactions of a node commit, and the answer be lost."""
    backend, left = node._engine.backend, [times]
    original = backend.transaction

    @contextlib.contextmanager
    def transaction():
        with original() as connection:
            yield connection
        if left[0]:
            left[0] -= 1
            raise tenure.StoreUnavailable("the connection was lost during the commit")

    backend.transaction = transaction
    try:
        yield left
    finally:
        backend.transaction = original
