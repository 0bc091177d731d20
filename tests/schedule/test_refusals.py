"""What a schedule refuses, and what it says then."""

from __future__ import annotations

from datetime import datetime, timezone

import pytest

import tenure
from tenure import ConfigError
from tests.schedule.hourly import Diary, hourly, known, make_due, nothing, seen
from tests.support.schedules import leading, outcomes
from tests.support.store_by_hand import until


def test_job_in_two_schedules_of_one_role_is_refused(sqlite_url):
    node = tenure.Node(sqlite_url)
    node.leader_only("r", hourly(nothing), name="one")
    with pytest.raises(ConfigError, match="job 'report' is in two schedules of one role"):
        node.leader_only("r", hourly(nothing), name="two")
    node.leader_only("other", hourly(nothing), name="two")


def test_two_jobs_of_one_name_are_refused():
    schedule = tenure.Schedule()
    schedule.every("1 s")(Diary())
    with pytest.raises(ConfigError, match="job 'report' already exists"):
        schedule.cron("0 0 * * *", name="report")(nothing)


def test_mode_lock_is_refused(postgres_url):
    node = tenure.Node(postgres_url, mode="lock")
    with pytest.raises(ConfigError, match="mode='lock' keeps no record of runs"):
        node.leader_only("r", hourly(nothing))


def test_schedule_that_would_run_everywhere_is_refused(sqlite_url):
    with pytest.raises(ConfigError, match="a schedule, which runs on the leader: use leader_only"):
        tenure.Node(sqlite_url).everywhere(hourly(nothing))


def test_job_that_is_added_after_the_start_is_refused(sqlite_url):
    schedule = hourly(nothing)
    with leading(sqlite_url, schedule):
        until(lambda: known(sqlite_url, "report"), "the job is known")
        with pytest.raises(ConfigError, match="has already been started"):
            schedule.every("1 s", name="late")(nothing)


@pytest.mark.parametrize("workers", [0, -1, 5000, "8"])
def test_number_of_workers_that_cannot_work_is_refused(workers):
    with pytest.raises(ConfigError, match="workers="):
        tenure.Schedule(workers=workers)


def test_transaction_of_a_run_is_opened_once(store_url):
    make_due(store_url)
    errors = []

    def twice(run):
        with run.transaction():
            pass
        try:
            with run.transaction():
                pass
        except ConfigError as error:
            errors.append(str(error))

    with leading(store_url, hourly(twice, delivery="at-least-once")):
        until(lambda: outcomes(store_url, "report") == ["done"], "the run")
    assert "was opened already" in errors[0]


def test_job_that_takes_no_run_is_refused():
    with pytest.raises(ConfigError, match="must take one argument, the run"):
        tenure.Schedule().every("1 s", name="x")(lambda: None)


def test_decorator_without_a_call_names_the_function_and_the_remedy():
    for decorator in ("every", "cron"):
        with pytest.raises(ConfigError, match=rf"job 'nothing' has no due times: write @schedule.{decorator}\("):
            getattr(tenure.Schedule(), decorator)(nothing)


def test_schedule_without_jobs_is_warned_of(sqlite_url, caplog):
    with leading(sqlite_url, tenure.Schedule()):
        until(lambda: "the schedule has no jobs" in caplog.text, "the warning")


@pytest.mark.twin("postgres")
def test_second_request_before_the_run_has_begun_is_the_same_request(store_url):
    seen(store_url)
    with tenure.Registry(store_url) as registry:
        assert registry.trigger("report")
        assert not registry.trigger("report")


@pytest.mark.twin("postgres")
def test_job_whose_runs_are_claimed_by_hand_is_shown_and_not_paused(store_url):
    with tenure.Node(store_url) as node, node.lead("r") as term, term.transaction() as transaction:
        transaction.claim("by-hand", datetime(2030, 1, 1, tzinfo=timezone.utc))
    with tenure.Registry(store_url) as registry:
        assert [run.outcome for run in registry.runs("by-hand")] == ["begun"]
        with pytest.raises(ConfigError, match="'by-hand' is in no schedule"):
            registry.pause("by-hand")
        assert registry.reset("by-hand")
