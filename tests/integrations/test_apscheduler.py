"""APScheduler on every replica, of which the leader's works: whatever happens, one replica makes each run."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import sys
import time
from datetime import datetime, timedelta

import psycopg
import pytest
from apscheduler.events import EVENT_JOB_ERROR
from apscheduler.executors.pool import ProcessPoolExecutor
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.schedulers.blocking import BlockingScheduler
from apscheduler.triggers.calendarinterval import CalendarIntervalTrigger
from apscheduler.triggers.cron import CronTrigger
from apscheduler.triggers.date import DateTrigger
from apscheduler.triggers.interval import IntervalTrigger

import tenure
from tenure import ConfigError, LeadershipLost
from tenure.integrations import job_name
from tenure.integrations.apscheduler import current_run, due_times, leader_only
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
    work,
)
from tests.integrations.cluster import ROOT, Process
from tests.support.store_by_hand import execute

pytestmark = pytest.mark.usefixtures("_fresh_runs")


# --- when a job is due --------------------------------------------------------------------------------------


async def work_async():
    run = current_run()
    runs.made.append((run.job, run.due, run.term.token))
    while not runs.hold.is_set():  # noqa: ASYNC110 - by another thread
        await asyncio.sleep(0.01)


NOON = datetime(2025, 6, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("trigger", "due"),
    [
        (IntervalTrigger(seconds=7, start_date=NOON), [0, 7, 14]),
        (IntervalTrigger(seconds=7, start_date=NOON, end_date=NOON + 10 * SECOND), [0, 7]),
        (CronTrigger(second="*/5", timezone=UTC), [0, 5, 10, 15]),
        (DateTrigger(NOON + 3 * SECOND), [3]),
        (DateTrigger(NOON - 3 * SECOND), []),
        (CalendarIntervalTrigger(days=1, start_date="2025-05-01", hour=12, second=9, timezone=UTC), [9]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_due_times_follow_from_the_trigger_alone(trigger, due):
    found, more, _ = due_times.between(trigger, NOON - due_times.TICK, NOON + 15 * SECOND, 10)
    assert ([round((moment - NOON).total_seconds(), 3) for moment in found], more) == (due, False)


def test_newest_of_many_due_times_are_found_without_counting_them_all():
    trigger = IntervalTrigger(seconds=1, start_date=NOON)
    began = time.process_time()
    found, more, _ = due_times.between(trigger, NOON, NOON + timedelta(days=3650), 3)
    assert ([NOON + timedelta(days=3650) - due for due in found], more) == ([2 * SECOND, SECOND, 0 * SECOND], True)
    assert time.process_time() - began < 5


# --- what can be led ----------------------------------------------------------------------------------------


def test_jobs_without_an_id_of_their_own_are_refused_where_they_are_added(sqlite_url):
    scheduler, node = BackgroundScheduler(), tenure.Node(sqlite_url)
    complaint = r"job 'work' has no id, .*: give it one, as in add_job\(…, id='work'\)"
    scheduler.add_job(work, "interval", hours=1)
    with pytest.raises(ConfigError, match=complaint):
        leader_only(scheduler, node)
    scheduler, node = BackgroundScheduler(), tenure.Node(sqlite_url)
    leader_only(scheduler, node)
    with pytest.raises(ConfigError, match=complaint):
        scheduler.add_job(work, "interval", hours=1)
    with node:
        until(lambda: scheduler.running, "the scheduler")
        with pytest.raises(ConfigError, match=complaint):
            scheduler.add_job(work, "interval", hours=1)
        assert scheduler.get_jobs() == []


@pytest.mark.parametrize(
    "job_id", ["new\nline", "x" * 300, " ", "Cafe\u0301"], ids=["newline", "long", "blank", "not NFC"]
)
def test_any_id_that_apscheduler_takes_will_do(sqlite_url, job_id):
    """And keeps no other job from running; what was missed is found again under it."""
    name = job_name(job_id)
    with led(sqlite_url, every_second(id=job_id), every_second(id="good"), delivery="at-least-once"):
        until(lambda: {name, "good"} <= {job for job, *_ in runs.made}, "both run")
        first = next(due for job, due, _ in runs.made if job == name)
    time.sleep(1.5)
    with led(sqlite_url, every_second(id=job_id), delivery="at-least-once"):
        until(lambda: any(token == 2 for _, _, token in runs.made), "a second leader")
    dues = sorted({due for job, due, _ in runs.made if job == name})
    assert dues == [first + timedelta(seconds=number) for number in range(len(dues))]


def test_what_cannot_be_led_is_refused_with_a_remedy(sqlite_url):
    def refused(scheduler, complaint, node=None, **options):
        with pytest.raises(ConfigError, match=complaint):
            leader_only(scheduler, node or tenure.Node(sqlite_url), **options)

    refused(BlockingScheduler(), "a BlockingScheduler cannot be used: use a BackgroundScheduler")
    refused(AsyncIOScheduler(), "use an AsyncNode")
    refused(BackgroundScheduler(), "delivery='exactly-once' must be one of 'at-most-once'", delivery="exactly-once")
    refused(BackgroundScheduler(), "catch_up=0 must be", catch_up=0)
    refused(BackgroundScheduler(executors={"many": ProcessPoolExecutor(1)}), "executor 'many' is a process pool")
    started = BackgroundScheduler()
    started.start(paused=True)
    refused(started, r"already running: do not call scheduler\.start\(\)")
    started.shutdown()


def test_there_is_no_run_outside_of_a_job():
    with pytest.raises(ConfigError, match=r"call current_run\(\) in a job of a leader-only scheduler"):
        current_run()


# --- who works ----------------------------------------------------------------------------------------------


def test_standby_runs_nothing_until_it_leads_and_then_goes_on_in_the_same_phase(sqlite_url):
    job = every_second(seconds=0.5)
    with led(sqlite_url, job, name="second") as (node, _):
        first, *_ = runs.wait(2)
        with led(sqlite_url, job, name="first") as (standby, paused):
            until(lambda: len(node.election("scheduler").candidates()) == 2, "both standing")
            assert paused.running
            node.election("scheduler").resign()
            until(lambda: standby.election("scheduler").is_leader, "a new leader")
            number = len(runs.made)
            runs.wait(number + 3)
    found = runs.dues()
    assert len(set(found)) == len(found)
    assert {(due - first) % timedelta(seconds=0.5) for due in found} == {timedelta(0)}
    assert {token for *_, token in runs.made} == {1, 2}


def test_run_under_way_is_waited_for_before_another_node_leads(sqlite_url):
    runs.hold.clear()
    with led(sqlite_url, every_second()) as (node, _), tenure.Node(sqlite_url) as other:
        runs.wait()
        other.election("scheduler")
        node.election("scheduler").resign()
        with pytest.raises(tenure.WaitTimeout):
            other.election("scheduler").wait(1.5)
        runs.hold.set()
        assert other.election("scheduler").wait(20).token == 2
        assert record(sqlite_url).claimed == runs.dues()[-1]


def test_coroutine_is_cancelled_when_the_term_is_lost(postgres_server, postgres_url):
    async def main():
        scheduler, node = AsyncIOScheduler(timezone=UTC), tenure.AsyncNode(postgres_url)
        errors = []
        scheduler.add_listener(lambda event: errors.append(event.exception), EVENT_JOB_ERROR)
        scheduler.add_job(**at(now(), func=work_async))
        leader_only(scheduler, node)
        runs.hold.clear()
        async with node:
            await asyncio.to_thread(runs.wait)
            with psycopg.connect(postgres_url, autocommit=True) as connection:
                connection.execute(
                    "select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database()"
                    " and application_name like 'tenure control%'"
                )
            await asyncio.to_thread(until, lambda: errors, "an end")
        assert [type(error) for error in errors] == [LeadershipLost]

    asyncio.run(main())
    assert len(runs.made) == 1


def test_plain_functions_and_coroutines_run_on_an_event_loop(sqlite_url):
    async def main():
        scheduler, node = AsyncIOScheduler(timezone=UTC), tenure.AsyncNode(sqlite_url)
        leader_only(scheduler, node)
        scheduler.add_job(**at(now(), func=work_async, id="coroutine"))
        scheduler.add_job(**at(now(), id="plain"))
        async with node:
            await asyncio.to_thread(until, lambda: len(runs.made) == 2, "both")

    asyncio.run(main())
    assert {job for job, *_ in runs.made} == {"coroutine", "plain"}


# --- what goes wrong ----------------------------------------------------------------------------------------


def test_job_that_is_added_under_way_gets_its_anchor(sqlite_url):
    anchor = now() - HOUR
    history(sqlite_url, anchor=anchor)
    with led(sqlite_url) as (_, scheduler):
        until(lambda: scheduler.state == 1, "work")
        scheduler.add_job(**every_second(seconds=100))
        until(lambda: scheduler.get_job("job").trigger.start_date == anchor, "the anchor")
        assert (scheduler.get_job("job").next_run_time - anchor) % (100 * SECOND) == timedelta(0)


def test_error_of_a_job_store_does_not_end_the_scheduler(sqlite_url, caplog):
    store = shared(sqlite_url)
    with led(sqlite_url, every_second(), store=store, delivery="at-least-once"):
        runs.wait()
        update, store.update_job = store.update_job, None
        until(lambda: "could not check for due jobs" in caplog.text, "an error")
        store.update_job = update
        number = len(runs.made)
        runs.wait(number + 3)
    found = runs.dues()
    assert found == [found[0] + n * SECOND for n in range(len(found))]


def test_same_leader_goes_on_through_a_restart_of_the_database(make_postgres_server):
    """Scheduler, job store and claims all lose their connections; no due time is left out or runs twice."""
    server = make_postgres_server(fsync=False)
    url = server.create_database()
    with led(url, every_second(), store=shared(url), ttl=30, delivery="at-least-once") as (node, _):
        runs.wait(2)
        server.restart()
        number = len(runs.made)
        runs.wait(number + 3)
        assert node.election("scheduler").term.token == 1
    found = runs.dues()
    assert found == [found[0] + n * SECOND for n in range(len(found))]


# --- the example, and the page ------------------------------------------------------------------------------


def test_example_reports_every_second_whoever_leads(postgres_url, tmp_path):
    with contextlib.ExitStack() as stack:
        processes = []
        for number in range(3):
            told = {"TENURE_URL": postgres_url, "TENURE_NAME": f"replica-{number}"}
            command = [sys.executable, "examples/apscheduler_jobs.py"]
            processes.append(Process(f"replica-{number}", command, told, tmp_path))
            stack.callback(processes[-1].close)
        [leader] = until(lambda: [process for process in processes if "token 1" in process.output()], "a leader")
        leader.process.kill()
        leader.wait()
        others = [process for process in processes if process is not leader]
        until(lambda: any("token 2" in process.output() for process in others), "another to lead")
        for process in others:
            process.process.send_signal(signal.SIGTERM)
        assert [process.wait() for process in others] == [0, 0]
        said = "".join(process.output() for process in processes)
        assert "Traceback" not in said
        phases = re.findall(r"report of \d+:\d+:\d+\.(\d+), under token (\d+)", said)
        assert {token for _, token in phases} == {"1", "2"}
        assert len({phase for phase, _ in phases}) == 1


def test_program_of_the_page_runs(postgres_url, tmp_path):
    page = (ROOT / "docs" / "how-to" / "apscheduler.md").read_text()
    program, report = re.findall(r"^```py\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    program = program.replace("postgresql://localhost/app", postgres_url).replace("minutes=5", "seconds=1")
    imports = "from tenure.integrations.apscheduler import current_run\n"
    execute(postgres_url, "create table reports (due timestamptz)")
    process = Process("page", [sys.executable, "-c", imports + report + program], {}, tmp_path)
    with contextlib.closing(process):
        until(lambda: len(execute(postgres_url, "select * from reports")) >= 2, process.output())
        process.process.send_signal(signal.SIGTERM)
        assert process.wait() == 0, process.output()
    with tenure.Registry(postgres_url) as registry:
        (job,) = registry.jobs("scheduler")
    assert (job.job, job.done) == ("report", job.claimed)
