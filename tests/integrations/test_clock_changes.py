"""A real scheduler while the clocks of its zone change: summer time ends, or begins, a few seconds after its start."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import sys
import time
from datetime import datetime, timedelta, timezone

import pytest

from tests.integrations.cluster import PATIENCE_S, Process
from tests.support import store_by_hand as desk
from tests.support.zones import BEGINS, ENDS, write_zone

until = functools.partial(desk.until, timeout=PATIENCE_S)
SECOND = timedelta(seconds=1)


class Replica:
    """A scheduler of tests/integrations/zoned_app.py, in a zone whose clocks change at the moment `change`."""

    def __init__(self, url, directory, delivery, offsets):
        # At an odd second. The clocks of real zones change at whole minutes, where a cron trigger goes on. Between two
        # seconds of a minute it would take the time of the change for the same time of the clock an hour later.
        soon = (datetime.now(timezone.utc) + 7 * SECOND).replace(microsecond=0)
        self.change = soon + (1 - soon.second % 2) * SECOND
        write_zone(directory / "zones" / "Test" / "Change", self.change, *offsets)
        command = [sys.executable, "-m", "tests.integrations.zoned_app", delivery]
        environment = {"TENURE_URL": url, "TENURE_TTL": "2", "PYTHONTZPATH": str(directory / "zones")}
        self.process = Process("replica", command, environment, directory)

    def dues(self, job):
        """When the runs of a job were due, in seconds since 1970, in the order in which they were made."""
        return [float(due) for due in re.findall(rf"^{job} (\S+)$", self.process.log.read_text(), re.MULTILINE)]

    def wait_for(self, moment):
        """Wait until both jobs have run for a due time after a moment."""

        def have_run():
            return all(self.dues(job)[-1:] > [moment.timestamp()] for job in ("interval", "cron"))

        until(have_run, f"runs that are due after {moment}: {self.process.output()}")

    def kill_between_runs(self):
        """Kill the process while neither job runs: the jobs are due every two seconds, at different times."""
        until(
            lambda: all(0.3 < time.time() - self.dues(job)[-1] < 1.7 for job in ("interval", "cron")),
            "a moment between two runs",
        )
        self.kill()

    def kill(self):
        self.process.process.kill()
        self.process.wait()


@pytest.fixture(params=[ENDS, BEGINS], ids=["summer time ends", "summer time begins"])
def offsets(request):
    return request.param


@pytest.fixture(params=["at-most-once", "at-least-once"])
def replica(request, sqlite_url, tmp_path, offsets):
    replica = Replica(sqlite_url, tmp_path, request.param, offsets)
    with contextlib.closing(replica.process):
        yield replica


def check(replica):
    """No due time was left out, and none ran twice."""
    for job in ("interval", "cron"):
        found = replica.dues(job)
        steps = {round(later - earlier, 3) for earlier, later in itertools.pairwise(found)}
        assert steps == {2.0}, (job, found)


def test_scheduler_goes_on_through_the_change(replica):
    replica.wait_for(replica.change - 4 * SECOND)
    replica.wait_for(replica.change + 6 * SECOND)
    check(replica)


def test_new_leader_goes_on_after_a_change_that_it_did_not_see(replica):
    """The process is killed between two runs before the change, and started again after it."""
    replica.wait_for(replica.change - 4 * SECOND)
    replica.kill_between_runs()
    until(lambda: datetime.now(timezone.utc) > replica.change, "the change")
    replica.process.start()
    replica.wait_for(replica.change + 6 * SECOND)
    check(replica)


def test_leader_that_is_elected_after_the_change_goes_on(replica):
    """In the repeated hour, where the clock shows again what it showed an hour ago."""
    replica.wait_for(replica.change)
    replica.kill()
    replica.process.start()
    replica.wait_for(replica.change + 6 * SECOND)
    assert "Traceback" not in replica.process.output()
