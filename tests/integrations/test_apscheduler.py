"""APScheduler on every replica, of which the leader's works: whatever happens, one replica makes each run."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
import signal
import sqlite3
import sys
import threading
import time
from datetime import datetime, timedelta, timezone

import psycopg
import pytest
from apscheduler.events import EVENT_JOB_ERROR
from apscheduler.executors.pool import ProcessPoolExecutor
from apscheduler.jobstores.memory import MemoryJobStore
from apscheduler.jobstores.sqlalchemy import SQLAlchemyJobStore
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.schedulers.blocking import BlockingScheduler
from apscheduler.triggers.base import BaseTrigger
from apscheduler.triggers.calendarinterval import CalendarIntervalTrigger
from apscheduler.triggers.cron import CronTrigger
from apscheduler.triggers.date import DateTrigger
from apscheduler.triggers.interval import IntervalTrigger

import tenure
from tenure import ConfigError, LeadershipLost, NotCommitted
from tenure.integrations import job_name
from tenure.integrations.apscheduler import AlreadyRan, NotDone, current_run, due_times, leader_only
from tenure.integrations.apscheduler.scheduler import Leading
from tests.integrations.cluster import PATIENCE_S, ROOT, Process, Replicas
from tests.support import store_by_hand as desk
from tests.support.store_by_hand import execute

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


@pytest.fixture(autouse=True)
def _fresh():
    runs.__init__()
    yield
    runs.hold.set()
    for store in runs.stores:  # a job that ended after its scheduler may have opened a connection anew
        store.engine.dispose()


def work():
    run = current_run()
    runs.made.append((run.job, run.due, run.term.token))
    assert runs.hold.wait(30)


async def work_async():
    run = current_run()
    runs.made.append((run.job, run.due, run.term.token))
    while not runs.hold.is_set():  # noqa: ASYNC110 - by another thread
        await asyncio.sleep(0.01)


def fail():
    work()
    raise ZeroDivisionError


def write_once():
    """Fails on the way the first time."""
    run = current_run()
    with run.transaction() as transaction:
        transaction.execute("insert into effects values (1)")
        if not runs.made:
            runs.made.append((run.job, run.due, run.term.token))
            raise ZeroDivisionError
    runs.made.append((run.job, run.due, run.term.token))


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


# --- when a job is due --------------------------------------------------------------------------------------

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


# --- at most once -------------------------------------------------------------------------------------------


def test_due_time_comes_from_what_was_claimed_and_not_from_memory(sqlite_url):
    """Whatever the replica believes, the grid is that of the database, and what was claimed is over."""
    anchor = now() - HOUR + timedelta(seconds=0.123456)
    history(sqlite_url, anchor=anchor, claimed=now())
    with led(sqlite_url, every_second(start_date=now() - 10 * SECOND)):
        first, second = runs.wait(2)[:2]
    assert (first - anchor) % SECOND == timedelta(0)
    assert second - first == SECOND


def test_missed_runs_are_apschedulers_business(sqlite_url):
    """Its misfire_grace_time and coalesce hold for the time without a leader, too."""
    last = whole_second() - 20 * SECOND
    history(sqlite_url, anchor=last - HOUR, claimed=last)
    job = every_second(seconds=3, misfire_grace_time=None, coalesce=False)
    with led(sqlite_url, job, catch_up=3):
        found = runs.wait(4)
    assert found[:4] == [found[0] + n * 3 * SECOND for n in range(4)], "the newest, in order, and on"
    assert found[0] > last + 3 * SECOND


def test_missed_runs_are_coalesced_into_the_last(sqlite_url):
    last = whole_second() - 20 * SECOND
    history(sqlite_url, anchor=last - HOUR, claimed=last)
    with led(sqlite_url, every_second(seconds=3, misfire_grace_time=None, coalesce=True)):
        first, second = runs.wait(2)[:2]
    assert now() - first < 10 * SECOND
    assert second - first == 3 * SECOND


def test_run_that_another_node_has_claimed_meanwhile_is_not_made(sqlite_url):
    errors = []
    with led(sqlite_url, every_second()) as (node, scheduler):
        scheduler.add_listener(lambda event: errors.append(event.exception), EVENT_JOB_ERROR)
        runs.wait()
        with node.election("scheduler").term.transaction() as transaction:
            assert transaction.claim("job", now() + HOUR)
        until(lambda: len(errors) == 2, "refusals")
        number = len(runs.made)
        until(lambda: len(errors) == 3, "refusals")
    assert {type(error) for error in errors} == {AlreadyRan}
    assert len(runs.made) == number


def test_run_that_was_claimed_does_not_run_again(sqlite_url):
    moment = now() + timedelta(seconds=0.5)
    history(sqlite_url, anchor=moment, claimed=moment)
    with led(sqlite_url, at(moment)) as (_, scheduler):
        until(lambda: scheduler.state == 1, "work")
        until(lambda: scheduler.get_jobs() == [], "an end")
        time.sleep(1)
    assert runs.made == []


# --- at least once ------------------------------------------------------------------------------------------


def test_run_that_was_begun_and_not_done_runs_again(sqlite_url):
    begun = whole_second()
    history(sqlite_url, anchor=begun - HOUR, claimed=begun, done=begun - SECOND)
    with led(sqlite_url, every_second(), delivery="at-least-once"):
        found = runs.wait(3)
    assert found == [begun + n * SECOND for n in range(len(found))]
    assert record(sqlite_url).done == found[-1]


def test_no_due_time_is_left_out_after_a_time_without_a_leader(sqlite_url):
    """Neither by misfire_grace_time, nor by coalesce, nor because the runs take longer than the interval."""
    last = whole_second() - 5 * SECOND
    history(sqlite_url, anchor=last - HOUR, claimed=last, done=last)
    with led(sqlite_url, every_second(misfire_grace_time=1, coalesce=True), delivery="at-least-once"):
        runs.hold.clear()
        until(lambda: now() > last + 8 * SECOND, "three seconds")
        runs.hold.set()
        found = runs.wait(10)
    assert found == [last + (n + 1) * SECOND for n in range(len(found))]


def test_no_more_than_the_newest_missed_runs_are_made_up_for(sqlite_url, caplog):
    last = whole_second() - HOUR
    history(sqlite_url, anchor=last, claimed=last, done=last)
    with led(sqlite_url, every_second(), delivery="at-least-once", catch_up=5):
        found = runs.wait(6)
    assert found == [found[0] + n * SECOND for n in range(len(found))]
    assert now() - found[0] < 60 * SECOND
    assert "more than 5 runs were missed; the newest of them run now" in caplog.text


def test_run_that_raises_has_run(sqlite_url):
    with led(sqlite_url, every_second(func=fail), delivery="at-least-once") as (_, scheduler):
        found = runs.wait(2)
        job = scheduler.get_job("job")
        assert (job.coalesce, job.misfire_grace_time) == (False, None), "so that none is left out later"
    assert len(set(found)) == len(found)
    assert record(sqlite_url).done == found[-1]


def test_what_is_written_in_the_runs_own_transaction_is_written_once(sqlite_url):
    execute(sqlite_url, "create table effects (one integer)")
    with led(sqlite_url, at(now(), func=write_once), delivery="at-least-once"):
        first, again = runs.wait(2)
        assert first == again
        until(lambda: record(sqlite_url).done == again, "the mark")
    assert execute(sqlite_url, "select * from effects") == [(1,)]


def test_run_whose_job_swallows_the_error_of_its_transaction_is_not_done(sqlite_url, caplog):
    """What it wrote was rolled back, so the run is tried again."""
    execute(sqlite_url, "create table effects (one integer)")

    def swallow():
        run = current_run()
        with contextlib.suppress(ZeroDivisionError), run.transaction() as transaction:
            transaction.execute("insert into effects values (1)")
            runs.made.append((run.job, run.due, run.term.token))
            if len(runs.made) == 1:
                raise ZeroDivisionError

    with led(sqlite_url, at(now(), func=swallow), delivery="at-least-once"):
        first, again = runs.wait(2)
        until(lambda: record(sqlite_url).done == again, "the mark")
    assert first == again
    assert execute(sqlite_url, "select * from effects") == [(1,)]
    assert "was not committed, and is tried again" in caplog.text


def test_run_that_never_commits_is_an_error_and_not_done(sqlite_url):
    errors = []

    def forget():
        run = current_run()
        runs.made.append((run.job, run.due, run.term.token))
        with contextlib.closing(sqlite3.connect(sqlite_url.partition(":///")[2])) as connection:
            run.finish(connection)
            connection.rollback()

    with led(sqlite_url, at(now(), func=forget), delivery="at-least-once") as (_, scheduler):
        scheduler.add_listener(lambda event: errors.append(event.exception), EVENT_JOB_ERROR)
        until(lambda: errors, "an error")
        assert record(sqlite_url).done is None
    assert [type(error) for error in errors] == [NotDone]
    assert len(runs.made) == 3


def test_run_that_the_server_rolled_back_is_tried_again(postgres_url, caplog):
    """The job swallows the error of a statement, and the server rolls the transaction back at its end."""
    execute(postgres_url, "create table effects (one integer)")

    def swallow():
        run = current_run()
        with run.transaction() as transaction:
            transaction.execute("insert into effects values (1)")
            runs.made.append((run.job, run.due, run.term.token))
            if len(runs.made) == 1:
                with contextlib.suppress(psycopg.Error):
                    transaction.execute("select 1 / 0")

    with led(postgres_url, at(now(), func=swallow), delivery="at-least-once"):
        first, again = runs.wait(2)
        until(lambda: record(postgres_url).done == again, "the mark")
    assert first == again
    assert execute(postgres_url, "select * from effects") == [(1,)]
    assert "tried again: NotCommitted(" in caplog.text


def test_statement_that_commits_does_not_mark_the_run_without_what_follows(one_url):
    """The job swallows NotCommitted, too; what followed the statement was rolled back, so the run is tried again."""
    execute(one_url, "create table effects (one integer)")
    commits = "create table another (one integer)" if one_url.startswith("mysql") else "commit"

    def swallow():
        run = current_run()
        runs.made.append((run.job, run.due, run.term.token))
        with contextlib.suppress(NotCommitted), run.transaction() as transaction:
            if len(runs.made) == 1:
                transaction.execute(commits)
            transaction.execute("insert into effects values (1)")

    with led(one_url, at(now(), func=swallow), delivery="at-least-once"):
        first, again = runs.wait(2)
        until(lambda: record(one_url).done == again, "the mark")
    assert first == again
    assert execute(one_url, "select * from effects") == [(1,)]


def run_on_an_event_loop(url, job):
    """Have a leader run a coroutine function at least once, until its run is done."""

    async def main():
        scheduler, node = AsyncIOScheduler(timezone=UTC), tenure.AsyncNode(url)
        scheduler.add_job(**at(now(), func=job))
        leader_only(scheduler, node, delivery="at-least-once")
        async with node:
            await asyncio.to_thread(runs.wait)
            await asyncio.to_thread(until, lambda: record(url).done, "the mark")

    asyncio.run(main())


def test_task_that_is_cancelled_leaves_no_transaction_of_its_run_open(sqlite_url):
    """By asyncio's own cancel(), which no shield stops, while a thread opens the transaction."""
    execute(sqlite_url, "create table effects (one integer)")
    kept = []

    async def write(run):
        kept.append(run.transaction())  # or the garbage collector would close what was left open
        async with kept[-1] as transaction:
            await transaction.execute("insert into effects values (1)")

    async def hurry():
        run = current_run()
        runs.made.append((run.job, run.due, run.term.token))
        if len(runs.made) > 1:
            await write(run)
            return
        with contextlib.closing(sqlite3.connect(sqlite_url.partition(":///")[2])) as stranger:
            stranger.execute("begin immediate")  # so it takes long to open
            task = asyncio.create_task(write(run))
            await asyncio.sleep(0.2)
            task.cancel()
            await asyncio.sleep(0.2)
        with contextlib.suppress(asyncio.CancelledError):
            await task

    run_on_an_event_loop(sqlite_url, hurry)
    first, again = runs.dues()
    assert first == again
    assert execute(sqlite_url, "select * from effects") == [(1,)]


def test_task_that_is_cancelled_waits_for_the_commit_of_its_run(postgres_url, caplog):
    execute(
        postgres_url,
        "create table effects (one integer)",
        "create function wait() returns trigger language plpgsql as 'begin perform pg_sleep(1); return null; end'",
        "create constraint trigger wait after insert on effects deferrable initially deferred"
        " for each row execute function wait()",
    )

    async def write(run, written):
        async with run.transaction() as transaction:
            await transaction.execute("insert into effects values (1)")
            written.set()

    async def hurry():
        run, written = current_run(), asyncio.Event()
        runs.made.append((run.job, run.due, run.term.token))
        task = asyncio.create_task(write(run, written))
        await written.wait()
        await asyncio.sleep(0.2)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    run_on_an_event_loop(postgres_url, hurry)
    assert len(runs.made) == 1
    assert "tried again" not in caplog.text
    assert execute(postgres_url, "select * from effects") == [(1,)]


def test_run_that_raises_after_its_commit_is_done(sqlite_url):
    def fail_late():
        with current_run().transaction():
            work()
        raise ZeroDivisionError

    with led(sqlite_url, at(now(), func=fail_late), delivery="at-least-once"):
        runs.wait()
        until(lambda: record(sqlite_url).done, "the mark")
        time.sleep(1)
    assert len(runs.made) == 1


@pytest.mark.parametrize("own", [True, False], ids=["run.transaction()", "run.finish()"])
def test_run_may_mark_itself_at_most_once_too(sqlite_url, own):
    """Its claim has marked it already."""

    def mark():
        run = current_run()
        if own:
            with run.transaction():
                work()
            return
        with contextlib.closing(sqlite3.connect(sqlite_url.partition(":///")[2])) as connection:
            run.finish(connection)
            connection.commit()
            work()

    with led(sqlite_url, at(now(), func=mark)):
        runs.wait()


def test_run_is_marked_as_done_once_and_by_one(sqlite_url):
    caught = []

    def twice():
        run = current_run()
        with run.transaction():
            pass
        try:
            with run.transaction():
                pass
        except ConfigError as error:
            caught.append(str(error))

    def late():
        run = current_run()
        with run.term.transaction() as transaction:
            transaction.finish(run.job, run.due + HOUR)
        with contextlib.closing(sqlite3.connect(sqlite_url.partition(":///")[2])) as connection:
            try:
                run.finish(connection)
            except AlreadyRan as error:
                caught.append(str(error))
                connection.rollback()

    with led(sqlite_url, at(now(), func=twice, id="twice"), at(now(), func=late, id="late"), delivery="at-least-once"):
        until(lambda: len(caught) == 2, "two complaints")
    one, other = sorted(caught, key=lambda text: "open it once" in text)
    assert "this run, or a later one, was marked as done before" in one
    assert "was opened already: open it once per run" in other


# --- settings that change between two releases ----------------------------------------------------------------


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


# --- triggers that do not advance -----------------------------------------------------------------------------


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


# --- a cluster under torment --------------------------------------------------------------------------------


def command(variant):
    return [sys.executable, "-m", "tests.integrations.apscheduler_app", variant]


def test_every_due_second_runs_at_most_once(postgres_url, tmp_path, record_property):
    """In threads, with the jobs in the memory of each replica. Every replica has the same phase."""
    with Replicas(postgres_url, tmp_path, command("threads")) as replicas:
        runs = replicas.torment(record_property)
        assert runs.jobs == ["bare", "tick"]
        assert runs.duplicates == []
        assert runs.out_of_phase == []
        assert [words for words in runs.stale if "'tick'" in words] == []


def test_every_due_second_runs_at_least_once_and_in_the_runs_own_transaction_exactly_once(
    postgres_url, tmp_path, record_property
):
    """On event loops, with a job store in the database that all replicas share."""
    with Replicas(postgres_url, tmp_path, command("asyncio")) as replicas:
        runs = replicas.torment(record_property)
        assert runs.jobs == ["bare", "tick"]
        assert runs.missing == []
        assert runs.out_of_phase == []
        assert [words for words in (*runs.duplicates, *runs.stale) if "'tick'" in words] == []
