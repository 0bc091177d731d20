"""A schedule on real databases: when jobs are due, what is missed, and what a change of the definition does."""

from __future__ import annotations

import logging
import threading
import time

import anyio
import anyio.from_thread
import pytest

import tenure
from tests.schedule.hourly import Diary, hourly, known, nothing, seen
from tests.support.schedules import HOUR_S, leading, let_pass, outcomes, rows, unaccounted
from tests.support.store_by_hand import execute, table, until

# --- due times ----------------------------------------------------------------------------------------------


def test_job_runs_at_its_due_times_and_each_is_recorded(store_url):
    diary, schedule = Diary(), tenure.Schedule(zone="Europe/Paris")
    schedule.every("1 s")(diary)
    with leading(store_url, schedule):
        until(lambda: len(diary) >= 3, "three runs")
    dues = [run.due.timestamp() for run in diary]
    assert dues == list(range(int(dues[0]), int(dues[0]) + len(dues)))
    assert {(run.job, run.attempt, run.missed) for run in diary} == {("report", 1, 0)}
    assert str(diary[0].due.tzinfo) == "Europe/Paris"
    assert set(outcomes(store_url, "report")) <= {"done", "interrupted"}
    assert unaccounted(store_url) == []


def test_coroutine_runs_on_the_event_loop_with_an_async_term(store_url):
    found, schedule = [], tenure.Schedule()

    @schedule.every("1 s")
    async def report(run):
        await run.term.ensure()
        async with run.transaction() as transaction:
            await transaction.execute("select 1")
        found.append(threading.current_thread().name)

    with leading(store_url, schedule):
        until(lambda: len(found) >= 2, "two runs")
    assert not any("tenure-service" in name and "services" not in name for name in found)
    assert "failed" not in outcomes(store_url, "report")


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_schedule_works_on_an_async_node(sqlite_url, backend):
    diary, schedule = Diary(), tenure.Schedule()
    schedule.every("1 s")(diary)
    with anyio.from_thread.start_blocking_portal(backend) as portal:
        node = tenure.AsyncNode(sqlite_url)
        node.leader_only("r", schedule)
        portal.call(node.start)
        try:
            until(lambda: len(diary) >= 2, "two runs")
        finally:
            portal.call(node.close)
    assert unaccounted(sqlite_url) == []


@pytest.mark.twin("postgres")
def test_first_leader_makes_up_for_nothing(store_url):
    """A new job counts from the moment when it was first seen: an hour ago it was not there."""
    diary = Diary()
    with leading(store_url, hourly(diary)):
        until(lambda: known(store_url, "report"), "the job is known")
        time.sleep(0.3)
    assert diary == []


# --- what is missed -----------------------------------------------------------------------------------------


@pytest.mark.twin("postgres")
def test_once_makes_one_run_for_everything_that_was_missed(store_url):
    seen(store_url)
    let_pass(store_url, 5 * HOUR_S, "report")
    diary = Diary()
    with leading(store_url, hourly(diary)):
        until(lambda: outcomes(store_url, "report")[-1:] == ["done"], "the run")
    assert [run.missed for run in diary] == [4]
    assert outcomes(store_url, "report") == ["skipped missed 4", "done"]
    assert unaccounted(store_url) == []


@pytest.mark.twin("postgres")
def test_each_makes_exactly_the_runs_that_are_not_too_late(store_url):
    seen(store_url)
    let_pass(store_url, 5 * HOUR_S, "report")
    diary = Diary()
    with leading(store_url, hourly(diary, missed="each", within="2 h")):
        until(lambda: outcomes(store_url, "report")[-2:] == ["done", "done"], "two runs")
        time.sleep(0.2)
    assert len(diary) == 2
    assert (diary[1].due - diary[0].due).total_seconds() == HOUR_S
    assert outcomes(store_url, "report") == ["skipped late 3", "done", "done"]
    assert unaccounted(store_url) == []


@pytest.mark.twin("postgres")
def test_skip_makes_no_run_and_records_the_stretch_with_the_next_one(store_url):
    seen(store_url)
    # The latest due time is more than half a minute ago, whenever this test runs.
    passed = 3 * HOUR_S if time.time() % HOUR_S > 60 else 3 * HOUR_S + 300
    let_pass(store_url, passed, "report")
    diary = Diary()
    with leading(store_url, hourly(diary, missed="skip")) as node:
        time.sleep(0.5)
        assert diary == []
        assert node.election("r").is_leader


@pytest.mark.twin("postgres")
def test_two_weeks_of_five_seconds_are_one_run_and_one_row(store_url):
    """No storm: 241,920 due times passed while everything was down."""
    schedule = tenure.Schedule()
    schedule.every("5 s", name="report")(nothing)
    with leading(store_url, schedule):
        until(lambda: known(store_url, "report"), "the job is known")
    let_pass(store_url, 14 * 24 * HOUR_S, "report")
    diary = Diary()
    schedule = tenure.Schedule()
    schedule.every("5 s", name="report")(diary)
    with leading(store_url, schedule):
        until(lambda: diary, "a run")
        began = threading.active_count()
    assert began < 20
    assert abs(diary[0].missed - 14 * 24 * HOUR_S // 5) <= 2
    skipped = [run for run in rows(store_url, "report") if run.outcome == "skipped"]
    assert [run.covers for run in skipped] == [diary[0].missed]
    assert unaccounted(store_url) == []


@pytest.mark.twin("postgres")
def test_audit_finds_a_due_time_that_was_lost(store_url):
    """The audit of these tests is worth something: it sees a row that is gone, and one that covers too little."""
    seen(store_url)
    let_pass(store_url, 5 * HOUR_S, "report")
    with leading(store_url, hourly(nothing)):
        until(lambda: outcomes(store_url, "report")[-1:] == ["done"], "the run")
    assert unaccounted(store_url) == []
    runs = table(store_url, "runs")
    execute(store_url, f"update {runs} set covers = 3 where outcome = 'skipped'")
    assert len(unaccounted(store_url)) == 2
    execute(store_url, f"delete from {runs} where outcome = 'skipped'")
    assert unaccounted(store_url)


# --- definitions --------------------------------------------------------------------------------------------


@pytest.mark.twin("postgres")
def test_changed_definition_counts_from_now_and_the_old_one_is_accounted_for(store_url):
    seen(store_url)
    let_pass(store_url, 5 * HOUR_S, "report")
    diary, schedule = Diary(), tenure.Schedule()
    schedule.cron("0 * * * *", name="report")(diary)
    with leading(store_url, schedule):
        until(lambda: known(store_url, "report")[0].spec.startswith("cron"), "the new definition")
        time.sleep(0.3)
    assert diary == []
    assert outcomes(store_url, "report") == ["skipped missed 5"]


@pytest.mark.twin("postgres")
def test_job_that_the_leader_does_not_know_is_kept(store_url):
    seen(store_url)
    other = tenure.Schedule()
    other.every("1 h", name="other")(nothing)
    with leading(store_url, other):
        until(lambda: known(store_url, "other"), "the other job")
    (record,), (another,) = known(store_url, "report"), known(store_url, "other")
    assert record.listed < another.listed


@pytest.mark.twin("postgres")
def test_other_time_zone_data_is_warned_of(store_url, caplog):
    schedule = tenure.Schedule(zone="Europe/Paris")
    schedule.cron("0 0 1 1 *", name="report")(nothing)
    with leading(store_url, schedule):
        until(lambda: known(store_url, "report") and known(store_url, "report")[0].zone_data, "the zone")
    execute(store_url, f"update {table(store_url, 'jobs')} set zone_data = 'another'")
    with leading(store_url, schedule):
        until(lambda: "other time zone data" in caplog.text, "a warning")
    assert known(store_url, "report")[0].zone_data != "another"


# --- rest ---------------------------------------------------------------------------------------------------


def test_a_thousand_jobs_at_rest_cost_no_statement(postgres_url, caplog):
    schedule = tenure.Schedule()
    for number in range(1000):
        schedule.cron("0 0 1 1 *", name=f"job-{number}")(nothing)
    caplog.set_level(logging.INFO)
    with leading(postgres_url, schedule, ttl=40.0) as node:
        jobs = "select count(*) from tenure.jobs where spec is not null"
        until(lambda: execute(postgres_url, jobs) == [(1000,)], "all jobs are known")
        opened, statements = [], []
        engine = node._engine
        original = engine.backend.transaction
        engine.backend.transaction = lambda: opened.append(1) or original()
        query = engine.query
        engine.query = lambda question: statements.append(1) or query(question)
        time.sleep(3)
        assert (opened, statements) == ([], [])
