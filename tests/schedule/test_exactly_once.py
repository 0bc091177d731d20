"""Each due time of a schedule has its effect once, whatever fails on the way."""

from __future__ import annotations

import time
from datetime import datetime, timedelta, timezone

import pytest

import tenure
from tenure.schedule.run import claim
from tests.schedule.hourly import Diary, commit_unanswered, hourly, known, leave_begun, make_due, nothing, slow_job
from tests.support.schedules import leading, outcomes, rows, unaccounted
from tests.support.store_by_hand import connected, execute, table, until


def test_writes_of_a_run_are_committed_together_with_the_mark(store_url):
    make_due(store_url)
    execute(store_url, "create table effects (n integer)")
    attempts = []

    def write(run):
        attempts.append(run.attempt)
        with run.transaction() as transaction:
            transaction.execute("insert into effects values (1)")
            if run.attempt == 1:
                raise ValueError("after the write")

    with leading(store_url, hourly(write, delivery="at-least-once", attempts=2)):
        until(lambda: outcomes(store_url, "report")[-1:] == ["done"], "the second attempt")
    assert attempts == [1, 2]
    assert execute(store_url, "select count(*) from effects") == [(1,)]


def test_run_is_finished_on_a_connection_of_the_application(store_url):
    make_due(store_url)

    def write(run):
        with connected(store_url) as connection:
            run.finish(connection)
            connection.commit()

    with leading(store_url, hourly(write, delivery="at-least-once")):
        until(lambda: outcomes(store_url, "report") == ["done"], "the run")
    assert known(store_url, "report")[0].done is not None


@pytest.mark.parametrize("delivery", ["at-most-once", "at-least-once"])
@pytest.mark.twin("postgres-at-most-once")
def test_error_inside_the_transaction_of_a_run_is_recorded_and_tried_again(store_url, delivery):
    make_due(store_url)

    def broken(run):
        with run.transaction():
            raise ValueError("inside")

    with leading(store_url, hourly(broken, delivery=delivery, attempts=2)):
        until(lambda: outcomes(store_url, "report") == ["failed", "failed"], "both attempts")
    assert {run.detail for run in rows(store_url, "report")} == {"ValueError: inside"}


@pytest.mark.twin("postgres")
def test_error_after_the_transaction_of_a_run_is_logged_and_the_run_is_done(store_url, caplog):
    make_due(store_url)

    def late(run):
        with run.transaction():
            pass
        raise ValueError("after")

    with leading(store_url, hourly(late)):
        until(lambda: "raised after its transaction was committed" in caplog.text, "a line in the log")
    assert outcomes(store_url, "report") == ["done"]


@pytest.mark.twin("postgres")
def test_attempt_is_recorded_under_the_token_of_its_own_term(store_url):
    make_due(store_url)
    slow, begun = slow_job()
    with leading(store_url, hourly(slow, delivery="at-least-once")):
        assert begun.wait(20)
    with leading(store_url, hourly(nothing, delivery="at-least-once")) as node:
        until(lambda: outcomes(store_url, "report") == ["interrupted", "done"], "the second attempt")
        assert rows(store_url, "report")[1].token == node.election("r").leader().token


@pytest.mark.twin("postgres")
def test_error_that_the_job_ignores_does_not_mark_the_run_as_done(store_url):
    make_due(store_url)

    def careless(run):
        try:
            with run.transaction() as transaction:
                transaction.execute("insert into no_such_table values (1)")
        except Exception:  # noqa: BLE001 - that is the point
            pass

    with leading(store_url, hourly(careless, delivery="at-least-once")):
        until(lambda: outcomes(store_url, "report") == ["failed"], "the failure")
    assert "not committed" in rows(store_url, "report")[0].detail


@pytest.mark.twin("postgres")
def test_run_that_did_not_end_is_lost_and_made_again_at_least_once(store_url):
    make_due(store_url)
    with leading(store_url, hourly(nothing, delivery="at-least-once")):
        until(lambda: outcomes(store_url, "report") == ["done"], "the run")
    leave_begun(store_url)
    execute(store_url, f"update {table(store_url, 'jobs')} set done_us = null")
    diary = Diary()
    with leading(store_url, hourly(diary, delivery="at-least-once")):
        until(lambda: outcomes(store_url, "report")[-1:] == ["done"], "the second attempt")
    assert [run.attempt for run in diary] == [2]
    assert outcomes(store_url, "report") == ["lost", "done"]
    assert unaccounted(store_url) == []


@pytest.mark.twin("postgres")
def test_run_that_did_not_end_is_lost_and_not_made_again_at_most_once(store_url):
    make_due(store_url)
    with leading(store_url, hourly(nothing)):
        until(lambda: outcomes(store_url, "report") == ["done"], "the run")
    leave_begun(store_url)
    diary = Diary()
    with leading(store_url, hourly(diary)):
        until(lambda: outcomes(store_url, "report") == ["lost"], "the record")
        time.sleep(0.3)
    assert diary == []


@pytest.mark.twin("postgres")
def test_run_that_did_not_end_is_made_again_after_a_change_of_its_definition(store_url):
    make_due(store_url)
    slow, begun = slow_job()
    with leading(store_url, hourly(slow, delivery="at-least-once")):
        assert begun.wait(20)
    due = rows(store_url, "report")[0].due
    diary, schedule = Diary(), tenure.Schedule()
    schedule.cron("0 0 1 1 *", name="report", delivery="at-least-once")(diary)
    with leading(store_url, schedule):
        until(lambda: diary, "the second attempt")
    assert [(run.due, run.attempt) for run in diary] == [(due, 2)]
    assert outcomes(store_url, "report") == ["interrupted", "done"]


@pytest.mark.twin("postgres")
def test_error_about_the_term_of_another_role_is_a_failure_like_any_other(store_url):
    make_due(store_url)

    def wrong(run):
        raise tenure.LeadershipLost("another role", role="other", token=7)

    with leading(store_url, hourly(wrong, delivery="at-least-once")):
        until(lambda: outcomes(store_url, "report") == ["failed"], "the failure")


@pytest.mark.twin("postgres")
def test_paused_job_does_not_make_a_run_again_before_it_is_resumed(store_url):
    make_due(store_url)
    slow, begun = slow_job()
    with leading(store_url, hourly(slow, delivery="at-least-once")), tenure.Registry(store_url) as registry:
        assert begun.wait(20)
        registry.pause("report")
    diary = Diary()
    with leading(store_url, hourly(diary, delivery="at-least-once")), tenure.Registry(store_url) as registry:
        time.sleep(1.0)
        assert diary == []
        registry.resume("report")
        until(lambda: diary, "the second attempt")
    assert diary[0].attempt == 2


def test_claim_whose_commit_was_not_answered_is_made_once(store_url):
    """Both the claim and what it skips are recorded by the first try; the second one finds that."""
    schedule, diary = tenure.Schedule(), Diary()
    schedule.every("1 s")(diary)
    with leading(store_url, schedule) as node:
        until(lambda: diary, "a run")
        with commit_unanswered(node, 3) as left:
            until(lambda: not left[0], "three lost answers")
            number = len(diary)
            until(lambda: len(diary) >= number + 2, "more runs")
    dues = [run.due for run in diary]
    assert len(dues) == len(set(dues))
    assert unaccounted(store_url) == []


def test_pause_whose_commit_was_not_answered_stays_a_pause(store_url):
    schedule, diary = tenure.Schedule(), Diary()
    schedule.every("1 s")(diary)
    with leading(store_url, schedule) as node, tenure.Registry(store_url) as registry:
        until(lambda: diary, "a run")
        registry.pause("report")
        until(lambda: any(run.detail == "paused" for run in registry.runs("report")), "a pause")
        number = len(diary)
        with commit_unanswered(node, 2) as left:
            until(lambda: not left[0], "two lost answers")
            time.sleep(1.0)
        assert len(diary) == number
    assert unaccounted(store_url) == []


def test_request_whose_commit_was_not_answered_is_answered_once(store_url):
    diary = Diary()
    with leading(store_url, hourly(diary)) as node, tenure.Registry(store_url) as registry:
        until(lambda: known(store_url, "report"), "the job is known")
        with commit_unanswered(node):
            registry.trigger("report")
            until(lambda: diary, "the run")
        until(lambda: outcomes(store_url, "report") == ["done"], "the record")
    assert len(diary) == 1


@pytest.mark.twin("postgres")
def test_request_that_is_read_late_repeats_nothing(store_url):
    """The answer about requests comes after a run has been claimed and made: its marks are old by then."""
    schedule, diary = tenure.Schedule(), Diary()
    schedule.every("1 s")(diary)
    schedule.every("1 h", name="other")(nothing)
    with leading(store_url, schedule) as node, tenure.Registry(store_url) as registry:
        until(lambda: diary, "a run")
        engine = node._engine
        original = engine.query

        def late(question):
            answer = original(question)
            time.sleep(0.4)
            return answer

        engine.query = late
        for _ in range(4):
            registry.trigger("other")
            time.sleep(0.6)
    dues = [run.due for run in diary]
    assert len(dues) == len(set(dues))


def test_claimed_run_whose_machine_died_is_lost_with_the_next_claim(store_url):
    """As under `tenure run --claim`: no schedule is there that would notice it."""
    due = datetime(2026, 1, 31, 2, 30, tzinfo=timezone.utc)
    for number in range(2):
        with tenure.Node(store_url) as node, node.lead("r") as term:
            claim(tenure.Run("backup", due + timedelta(days=number), term), repeats=False)
    assert outcomes(store_url, "backup") == ["lost", "begun"]
