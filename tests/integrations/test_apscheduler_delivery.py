"""APScheduler: what at-most-once and at-least-once promise of each run."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from datetime import timedelta

import psycopg
import pytest
from apscheduler.events import EVENT_JOB_ERROR
from apscheduler.schedulers.asyncio import AsyncIOScheduler

import tenure
from tenure import ConfigError, NotCommitted
from tenure.integrations.apscheduler import AlreadyRan, NotDone, current_run, leader_only
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
    until,
    whole_second,
    work,
)
from tests.support.store_by_hand import execute

pytestmark = pytest.mark.usefixtures("_fresh_runs")


# --- at most once -------------------------------------------------------------------------------------------


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
