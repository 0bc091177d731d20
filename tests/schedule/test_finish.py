"""`run.finish(connection)` on connections of the application, by driver and by isolation level.

The mark and the application's writes are committed together, or neither is.
"""

from __future__ import annotations

import contextlib

import asyncpg
import psycopg
import pytest

import tenure
from tests.support.schedules import HOUR_S, leading, let_pass, outcomes, rows, unaccounted
from tests.support.store_by_hand import connected, execute, until

LEVELS = ("read committed", "repeatable read", "serializable")


@pytest.fixture(params=["postgres", "mariadb"])
def due_url(request):
    """A database in which a run of an hourly job is due, and a table for what the job writes."""
    url = request.getfixturevalue(f"{request.param}_url")
    with leading(url, hourly(lambda _: None)), tenure.Registry(url) as registry:
        until(registry.jobs, "the job is known")
    let_pass(url, HOUR_S, "report")
    execute(url, "create table effects (n integer)")
    return url


def hourly(function, **options):
    schedule = tenure.Schedule()
    schedule.every("1 h", name="report", **options)(function)
    return schedule


@contextlib.contextmanager
def at_level(url, level):
    """A connection whose transactions have an isolation level."""
    with connected(url) as connection:
        if url.startswith("mysql"):
            connection.execute(f"set session transaction isolation level {level}")
        else:
            connection.isolation_level = psycopg.IsolationLevel[level.upper().replace(" ", "_")]
        yield connection


def effects(url):
    return execute(url, "select n from effects order by n")


def check_written_once(url):
    """Assert that the second attempt has written, the first has not, and the record says so."""
    assert effects(url) == [(2,)]
    assert outcomes(url, "report") == ["failed", "done"]
    with tenure.Registry(url) as registry:
        (job,) = registry.jobs()
    assert job.done == job.claimed
    assert unaccounted(url) == []


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.twin("repeatable read")
def test_mark_and_writes_are_committed_together_at_every_isolation_level(due_url, level):
    def report(run):
        with at_level(due_url, level) as connection:
            connection.execute("select * from effects")  # takes the snapshot
            run.finish(connection)
            connection.execute("insert into effects values (%s)", (run.attempt,))
            if run.attempt == 1:
                raise ValueError("before the commit")
            connection.commit()

    with leading(due_url, hourly(report, delivery="at-least-once", attempts=2)):
        until(lambda: outcomes(due_url, "report")[-1:] == ["done"], "the second attempt")
    check_written_once(due_url)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.twin("repeatable read")
def test_mark_that_another_transaction_keeps_from_being_written_is_refused_and_made_by_the_next_attempt(due_url, level):
    """The job's row changes after the transaction's snapshot: an operator asks for a run."""
    errors = []

    def report(run):
        if run.requested:
            return
        with at_level(due_url, level) as connection, tenure.Registry(due_url) as registry:
            connection.execute("select * from effects")
            if run.attempt == 1:
                registry.trigger("report")
            try:
                run.finish(connection)
            except tenure.Fenced as error:
                errors.append(error.retryable)
                raise
            connection.execute("insert into effects values (%s)", (run.attempt,))
            connection.commit()

    with leading(due_url, hourly(report, delivery="at-least-once", attempts=2)), tenure.Registry(due_url) as registry:
        until(lambda: len(registry.runs("report")) >= 2 and registry.jobs()[0].requested is None, "both runs")
        until(lambda: {run.outcome for run in registry.runs("report")} <= {"done", "failed"}, "their ends")
    refused = due_url.startswith("postgres") and level != "read committed"
    assert errors == ([True] if refused else [])
    assert effects(due_url) == [(2 if refused else 1,)]
    attempts = [run.outcome for run in rows(due_url, "report") if run.attempt > 0]
    assert attempts == (["failed", "done"] if refused else ["done"])
    assert unaccounted(due_url) == []


@pytest.mark.parametrize("level", [level.replace(" ", "_") for level in LEVELS])
@pytest.mark.parametrize("due_url", ["postgres"], indirect=True)
@pytest.mark.twin("repeatable_read")
def test_mark_and_writes_are_committed_together_on_asyncpg(due_url, level):
    async def report(run):
        connection = await asyncpg.connect(due_url)
        try:
            async with connection.transaction(isolation=level):
                await connection.fetch("select * from effects")
                await run.finish(connection)
                await connection.execute("insert into effects values ($1)", run.attempt)
                if run.attempt == 1:
                    raise ValueError("before the commit")
        finally:
            await connection.close()

    with leading(due_url, hourly(report, delivery="at-least-once", attempts=2)):
        until(lambda: outcomes(due_url, "report")[-1:] == ["done"], "the second attempt")
    check_written_once(due_url)


@pytest.mark.parametrize("due_url", ["postgres"], indirect=True)
def test_asyncpg_without_a_transaction_is_refused_and_the_run_is_not_done(due_url):
    async def report(run):
        connection = await asyncpg.connect(due_url)
        try:
            await run.finish(connection)
        finally:
            await connection.close()

    with leading(due_url, hourly(report, delivery="at-least-once")):
        until(lambda: outcomes(due_url, "report") == ["failed"], "the failure")
    assert "transaction" in rows(due_url, "report")[0].detail


# --- runs whose commit no mark shows: the function says how they ended ----------------------------------------


def check_done_once(url, report, caplog, **options):
    """Assert that a due run and a requested one are done with their first attempts."""
    with leading(url, hourly(report, **options)), tenure.Registry(url) as registry:
        until(lambda: outcomes(url, "report") == ["done"], "the due run")
        # This run begins when the due one has been recorded, after all of its attempts.
        registry.trigger("report")
        until(lambda: outcomes(url, "report") not in (["done"], ["done", "begun"]), "the requested run")
    assert [(run.attempt, run.outcome, run.detail) for run in rows(url, "report")] == [
        (1, "done", None),
        (0, "done", None),
    ]
    assert effects(url) == [(0,), (1,)]
    assert "failed" not in caplog.text
    assert unaccounted(url) == []


@pytest.mark.parametrize(("delivery", "attempts"), [("at-most-once", 1), ("at-most-once", 3), ("at-least-once", 1)])
@pytest.mark.parametrize("due_url", ["postgres", "mariadb", "sqlite"], indirect=True)
def test_run_that_commits_on_its_own_connection_is_done_once(due_url, delivery, attempts, caplog):
    def report(run):
        with connected(due_url) as connection:
            run.finish(connection)
            connection.execute(f"insert into effects values ({int(not run.requested)})")
            connection.commit()

    check_done_once(due_url, report, caplog, delivery=delivery, attempts=attempts)


@pytest.mark.parametrize("delivery", ["at-most-once", "at-least-once"])
@pytest.mark.parametrize("due_url", ["postgres"], indirect=True)
def test_coroutine_that_commits_on_its_own_connection_is_done_once(due_url, delivery, caplog):
    async def report(run):
        connection = await asyncpg.connect(due_url)
        try:
            async with connection.transaction():
                await run.finish(connection)
                await connection.execute("insert into effects values ($1)", int(not run.requested))
        finally:
            await connection.close()

    check_done_once(due_url, report, caplog, delivery=delivery, attempts=3)


@pytest.mark.parametrize("due_url", ["postgres", "mariadb", "sqlite"], indirect=True)
def test_run_that_raises_before_its_own_commit_is_attempted_again_at_most_once(due_url, caplog):
    def report(run):
        with connected(due_url) as connection:
            run.finish(connection)
            connection.execute(f"insert into effects values ({run.attempt})")
            if run.attempt == 1:
                raise ValueError("before the commit")
            connection.commit()

    with leading(due_url, hourly(report, attempts=3)):
        until(lambda: outcomes(due_url, "report")[-1:] == ["done"], "the second attempt")
    check_written_once(due_url)
    assert caplog.text.count("failed\n") == 1


@pytest.mark.parametrize("due_url", ["postgres"], indirect=True)
def test_requested_run_that_raises_before_its_own_commit_has_failed(due_url):
    def report(run):
        with connected(due_url) as connection:
            run.finish(connection)
            if run.requested:
                raise ValueError("before the commit")
            connection.commit()

    with leading(due_url, hourly(report)), tenure.Registry(due_url) as registry:
        until(lambda: outcomes(due_url, "report") == ["done"], "the due run")
        registry.trigger("report")
        until(lambda: outcomes(due_url, "report") == ["done", "failed"], "the requested run")
    assert rows(due_url, "report")[1].detail == "ValueError: before the commit"
