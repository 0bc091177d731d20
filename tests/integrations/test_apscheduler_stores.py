"""APScheduler: settings that change between releases, odd triggers, and job stores that replicas share."""

from __future__ import annotations

import re
import time
from datetime import timedelta

import pytest
from apscheduler.jobstores.memory import MemoryJobStore
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.base import BaseTrigger

import tenure
from tenure.integrations.apscheduler import leader_only
from tenure.integrations.apscheduler.scheduler import Leading
from tests.integrations.apscheduler_jobs import (
    HOUR,
    SECOND,
    UTC,
    at,
    every_second,
    history,
    led,
    now,
    record,
    runs,
    shared,
    until,
    whole_second,
    work,
)

pytestmark = pytest.mark.usefixtures("_fresh_runs")


# --- settings that change between two releases --------------------------------------------------------------


def test_change_to_at_least_once_repeats_nothing(sqlite_url):
    """A run that was claimed at most once is over, and the next delivery must know that."""
    with led(sqlite_url, every_second()):
        found = runs.wait(3)
    assert record(sqlite_url).done == record(sqlite_url).claimed == found[-1]
    runs.made.clear()
    with led(sqlite_url, every_second(), delivery="at-least-once"):
        later = runs.wait(2)
    assert later == [found[-1] + (n + 1) * SECOND for n in range(len(later))]


@pytest.mark.parametrize("done", [None, 10 * SECOND], ids=["never", "before"])
def test_runs_that_an_older_release_has_not_marked_are_not_repeated_but_for_the_last(sqlite_url, caplog, done):
    """Nobody can tell whether the last one was begun at least once: it is repeated, and the log says so."""
    last = whole_second()
    history(sqlite_url, anchor=last - HOUR, claimed=last, done=done and last - done)
    with led(sqlite_url, every_second(), delivery="at-least-once"):
        found = runs.wait(3)
    assert found == [last + n * SECOND for n in range(len(found))]
    assert f"job 'job': the run due {last} was begun and is not marked as done; it is repeated" in caplog.text


def test_at_most_once_marks_what_an_older_release_has_left(sqlite_url, caplog):
    """Even if the job does not run meanwhile: a job of once a month, say."""
    caplog.set_level("INFO", "tenure.apscheduler")
    last = whole_second() - HOUR
    history(sqlite_url, anchor=last - HOUR, claimed=last)
    with led(sqlite_url, every_second(hours=24)):
        until(lambda: record(sqlite_url).done == last, "the mark")
    assert "it is not repeated: delivery is 'at-most-once'" in caplog.text
    with led(sqlite_url, every_second(hours=24), delivery="at-least-once") as (_, scheduler):
        until(lambda: scheduler.state == 1, "work")
    assert runs.made == []


def test_job_that_is_renamed_under_a_run_that_is_not_done_is_told(sqlite_url, caplog):
    last = whole_second()
    history(sqlite_url, anchor=last - HOUR, claimed=last, done=last - SECOND)
    with led(sqlite_url, every_second(id="new name"), delivery="at-least-once"):
        runs.wait(job="new name")
    assert f"job 'job': the run due {last} was begun and is not marked as done; it is left alone" in caplog.text


def test_runs_that_misfire_grace_time_leaves_out_are_told(sqlite_url, caplog):
    last = whole_second() - 20 * SECOND
    history(sqlite_url, anchor=last - HOUR, claimed=last, done=last)
    with led(sqlite_url, every_second(seconds=3, misfire_grace_time=2)):
        runs.wait()
    assert re.search(r"[567] runs were missed and are left out: misfire_grace_time is 2 s", caplog.text)


def test_two_jobs_of_one_name_are_told(sqlite_url, caplog):
    scheduler = BackgroundScheduler(timezone=UTC, jobstores={"mail": MemoryJobStore()})
    scheduler.add_job(work, "interval", hours=1, id="mail:job")
    scheduler.add_job(work, "interval", hours=1, id="job", jobstore="mail")
    node = tenure.Node(sqlite_url)
    leader_only(scheduler, node)
    with node:
        until(lambda: scheduler.state == 1, "work")
    assert "have the same name in the database, 'mail:job'" in caplog.text


# --- triggers that do not advance ---------------------------------------------------------------------------


class Stuck(BaseTrigger):
    """Due at the same moment for ever."""

    def __init__(self, moment):
        self.moment = moment

    def get_next_fire_time(self, previous_fire_time, now):  # noqa: ARG002
        return self.moment

    def __str__(self):
        return "stuck"


def test_trigger_that_does_not_advance_pauses_its_job_and_no_other(sqlite_url, caplog):
    last = whole_second() - 5 * SECOND
    history(sqlite_url, anchor=last - HOUR, claimed=last, done=last)
    stuck = {"func": work, "trigger": Stuck(last - SECOND), "id": "job", "next_run_time": last}
    with led(sqlite_url, stuck, every_second(id="good"), delivery="at-least-once") as (_, scheduler):
        runs.wait(2, job="good")
        assert scheduler.get_job("job").next_run_time is None
    assert runs.dues() == []
    assert "its trigger <" in caplog.text
    assert "so it is paused; fix the trigger, then call resume_job('job')" in caplog.text
    assert "trigger stuck does not advance" in caplog.text


# --- shared job stores --------------------------------------------------------------------------------------


def test_standby_that_starts_changes_nothing_in_a_shared_store(sqlite_url):
    """Replicas add the same jobs when they start; what the leader works on stays as it is."""
    job = every_second(hours=1, replace_existing=True)
    with led(sqlite_url, job, store=shared(sqlite_url)) as (_, scheduler):
        until(lambda: scheduler.state == 1 and scheduler.get_jobs(), "the job")
        (before,) = scheduler.get_jobs()
        with led(sqlite_url, job, store=shared(sqlite_url)) as (_, standby):
            until(lambda: standby.running, "the standby")
            standby.add_job(**job)
            (after,) = scheduler.get_jobs()
            assert (after.next_run_time, after.trigger.start_date) == (before.next_run_time, before.trigger.start_date)


def test_new_leader_brings_its_jobs_and_keeps_the_phase(sqlite_url):
    job = every_second(seconds=30, replace_existing=True)
    with led(sqlite_url, job, store=shared(sqlite_url)) as (_, scheduler):
        until(lambda: scheduler.state == 1, "work")
        (before,) = scheduler.get_jobs()
    with led(sqlite_url, job | {"seconds": 10}, store=shared(sqlite_url)) as (_, scheduler):
        until(lambda: scheduler.state == 1, "work")
        (after,) = scheduler.get_jobs()
    assert after.trigger.interval == 10 * SECOND
    assert after.trigger.start_date == before.trigger.start_date
    assert (after.next_run_time - before.trigger.start_date) % (10 * SECOND) == timedelta(0)


def test_job_that_any_replica_adds_to_a_shared_store_is_found_by_the_leader(sqlite_url):
    with led(sqlite_url, store=shared(sqlite_url)) as (_, scheduler):
        until(lambda: scheduler.state == 1, "work")
        with led(sqlite_url, store=shared(sqlite_url)) as (_, standby):
            until(lambda: standby.running, "the standby")
            standby.add_job(work, "date", misfire_grace_time=60)
            until(lambda: runs.made, "a run")
        until(lambda: scheduler.get_jobs() == [] and record(sqlite_url) is None, "nothing left of it")


@pytest.mark.parametrize("delivery", ["at-most-once", "at-least-once"])
def test_job_of_a_shared_store_stays_until_its_last_run_is_done(sqlite_url, delivery):
    """Otherwise a node that dies in the middle of it would leave no run to be repeated."""
    runs.hold.clear()
    job = at(now() + SECOND, replace_existing=True)
    with led(sqlite_url, job, store=shared(sqlite_url), delivery=delivery) as (_, scheduler):
        runs.wait()
        if delivery == "at-least-once":
            until(lambda: [job.next_run_time for job in scheduler.get_jobs()] == [None], "no next run")
        runs.hold.set()
        until(lambda: scheduler.get_jobs() == [] and record(sqlite_url) is None, "nothing left of it")
    assert len(runs.made) == 1


def test_last_run_that_was_not_done_is_repeated_from_a_shared_store(sqlite_url):
    """Its leader has died, and left a job without a next run."""
    moment = now() - HOUR
    history(sqlite_url, anchor=moment - HOUR, claimed=moment)
    store = shared(sqlite_url)
    with led(sqlite_url, at(moment, next_run_time=None), store=store, delivery="at-least-once") as (_, scheduler):
        assert runs.wait() == [moment]
        until(lambda: scheduler.get_jobs() == [], "an end")


def test_leader_whose_term_is_over_does_not_touch_a_shared_store(sqlite_url):
    """It was paused, say, and has not heard of it yet; what is due there is its successor's."""
    with tenure.Node(sqlite_url) as node:
        with node.lead("scheduler", timeout=20) as term:
            pass
        scheduler = BackgroundScheduler(timezone=UTC, jobstores={"default": shared(sqlite_url)})
        leading = Leading(scheduler, "scheduler", 100, repeats=True)
        leading.take_over()
        scheduler.start(paused=True)
        due = now() - SECOND
        scheduler.add_job(**every_second(next_run_time=due))
        leading._executor.open(term, {})
        scheduler.resume()
        time.sleep(1)
        assert [job.next_run_time for job in scheduler.get_jobs()] == [due]
        scheduler.shutdown()
    assert runs.made == []


def test_paused_job_stays_paused(sqlite_url):
    history(sqlite_url, anchor=now() - HOUR, claimed=now() - HOUR, done=now() - HOUR)
    with led(sqlite_url, every_second(next_run_time=None), delivery="at-least-once") as (_, scheduler):
        until(lambda: scheduler.state == 1, "work")
        time.sleep(1.5)
        assert [job.next_run_time for job in scheduler.get_jobs()] == [None]
    assert runs.made == []
