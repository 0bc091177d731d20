"""A schedule on real databases: what runs, what is recorded, and what happens when the leader changes."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from datetime import datetime, timedelta, timezone

import anyio
import anyio.from_thread
import pytest

import tenure
from tenure import ConfigError
from tenure.core import messages
from tenure.schedule.run import claim
from tenure.store import tidying
from tests.support.schedules import HOUR_S, leading, let_pass, outcomes, rows, unaccounted
from tests.support.store_by_hand import Desk, connected, execute, table, until


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


# --- due times ------------------------------------------------------------------------------------------------


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


# --- what is missed -------------------------------------------------------------------------------------------


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


# --- definitions ----------------------------------------------------------------------------------------------


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


# --- runs that do not go well ---------------------------------------------------------------------------------


def make_due(url):
    """Let one due time of the hourly job have passed."""
    seen(url)
    let_pass(url, HOUR_S, "report")


@pytest.mark.twin("postgres")
def test_job_that_raises_is_attempted_again(store_url):
    make_due(store_url)
    attempts = []

    def flaky(run):
        attempts.append(run.attempt)
        if run.attempt < 3:
            raise ValueError("not yet")

    with leading(store_url, hourly(flaky, attempts=3)):
        until(lambda: outcomes(store_url, "report")[-1:] == ["done"], "the third attempt")
    assert attempts == [1, 2, 3]
    assert [(run.attempt, run.outcome, run.detail, run.covers) for run in rows(store_url, "report")] == [
        (1, "failed", "ValueError: not yet", 1),
        (2, "failed", "ValueError: not yet", 0),
        (3, "done", None, 0),
    ]
    assert unaccounted(store_url) == []


@pytest.mark.twin("postgres")
def test_job_that_fails_in_every_attempt_is_not_repeated_by_the_next_leader(store_url):
    make_due(store_url)

    def bad(run):
        raise ValueError("never")

    with leading(store_url, hourly(bad, delivery="at-least-once")):
        until(lambda: outcomes(store_url, "report") == ["failed"], "the failure")
    diary = Diary()
    with leading(store_url, hourly(diary, delivery="at-least-once")):
        time.sleep(0.5)
    assert diary == []


def test_error_whose_text_no_database_can_store_is_recorded_all_the_same(store_url):
    make_due(store_url)

    def odd(run):
        raise ValueError("NUL \0, long " + "é" * 1000)

    with leading(store_url, hourly(odd)):
        until(lambda: outcomes(store_url, "report") == ["failed"], "the failure")
    assert rows(store_url, "report")[0].detail.startswith("ValueError: NUL \\x00, long \\xe9")


@pytest.mark.twin("postgres")
def test_plain_function_that_returns_a_coroutine_has_failed(store_url):
    make_due(store_url)

    async def work():
        pass

    with leading(store_url, hourly(lambda _: work())):
        until(lambda: outcomes(store_url, "report") == ["failed"], "the failure")
    assert "make the job a coroutine function" in rows(store_url, "report")[0].detail


@pytest.mark.parametrize("kind", ["thread", "coroutine"])
@pytest.mark.twin("postgres")
def test_run_that_takes_too_long_is_stopped_and_recorded(store_url, kind):
    make_due(store_url)

    def slow(run):
        assert run.wait(20)
        assert run.stopping

    async def slow_coroutine(run):
        await anyio.sleep(20)

    with leading(store_url, hourly(slow if kind == "thread" else slow_coroutine, timeout="0.2 s")):
        until(lambda: outcomes(store_url, "report") == ["failed"], "the end of the run")
    assert rows(store_url, "report")[0].detail == "TimeoutError: it took longer than 0.2 s"


@pytest.mark.twin("postgres")
def test_overlap_skips_due_times_that_pass_during_a_run(store_url):
    runs, release, schedule = [], threading.Event(), tenure.Schedule()

    @schedule.every("1 s")
    def report(run):
        runs.append(run.due)
        if len(runs) == 1:
            release.wait(20)

    with leading(store_url, schedule):
        until(lambda: runs, "the first run")
        time.sleep(2.3)
        release.set()
        until(lambda: len(runs) >= 2, "the next run")
    assert (runs[1] - runs[0]).total_seconds() >= 3
    assert "skipped overlap 2" in outcomes(store_url, "report")
    assert unaccounted(store_url) == []


@pytest.mark.twin("postgres")
def test_workers_limit_how_many_functions_run_at_once(store_url):
    at_work, most, schedule = set(), [], tenure.Schedule(workers=2)

    def busy(run):
        at_work.add(run.job)
        most.append(len(at_work))
        time.sleep(0.1)
        at_work.discard(run.job)

    for number in range(6):
        schedule.every("1 s", name=f"job-{number}", missed="skip")(busy)
    with leading(store_url, schedule):
        until(lambda: len(most) >= 8, "some runs")
    assert max(most) == 2


# --- exactly once ---------------------------------------------------------------------------------------------


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


def leave_begun(url):
    """Let the runs that were made be what a leader leaves behind that was killed in the middle of them."""
    execute(url, f"update {table(url, 'runs')} set outcome = 'begun', ended_at = null where outcome = 'done'")


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


# --- hand-over ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["thread", "coroutine"])
@pytest.mark.twin("postgres-coroutine")
def test_hand_over_interrupts_a_run(store_url, kind):
    make_due(store_url)
    slow, begun = slow_job()

    async def slow_coroutine(run):
        begun.set()
        await anyio.sleep(20)

    with leading(store_url, hourly(slow if kind == "thread" else slow_coroutine)):
        assert begun.wait(20)
        closed = time.monotonic()
    assert time.monotonic() - closed < 10
    assert outcomes(store_url, "report") == ["interrupted"]


@pytest.mark.twin("postgres")
def test_hand_over_lets_a_run_finish_that_may(store_url):
    make_due(store_url)
    begun, ended = threading.Event(), []

    def careful(run):
        begun.set()
        time.sleep(1.0)
        ended.append(run.stopping)

    with leading(store_url, hourly(careful, on_handover="finish"), drain_within=0.1):
        assert begun.wait(20)
    assert len(ended) == 1
    assert outcomes(store_url, "report") == ["done"]


def test_interrupted_run_is_made_again_by_the_next_leader_at_least_once(store_url):
    make_due(store_url)
    slow, begun = slow_job()
    with leading(store_url, hourly(slow, delivery="at-least-once")):
        assert begun.wait(20)
    diary = Diary()
    with leading(store_url, hourly(diary, delivery="at-least-once")):
        until(lambda: diary, "the second attempt")
    assert diary[0].attempt == 2


# --- operators ------------------------------------------------------------------------------------------------


def test_run_that_is_asked_for_is_made_beside_the_due_times(store_url):
    diary = Diary()
    with leading(store_url, hourly(diary)), tenure.Registry(store_url) as registry:
        until(lambda: known(store_url, "report"), "the job is known")
        registry.trigger("report")
        until(lambda: outcomes(store_url, "report") == ["done"], "the run")
        (record,) = registry.jobs("r")
    assert [run.requested for run in diary] == [True]
    assert record.claimed is None
    assert record.requested is None
    assert rows(store_url, "report")[0].attempt == 0
    assert unaccounted(store_url) == []


@pytest.mark.twin("postgres")
def test_request_that_no_leader_has_seen_waits_for_the_next_one(store_url):
    seen(store_url)
    with tenure.Registry(store_url) as registry:
        registry.trigger("report")
        assert registry.jobs()[0].requested is not None
    diary = Diary()
    with leading(store_url, hourly(diary)):
        until(lambda: diary, "the run")


@pytest.mark.twin("postgres")
def test_paused_job_does_not_run_and_its_due_times_are_one_row(store_url):
    diary, schedule = Diary(), tenure.Schedule()
    schedule.every("1 s")(diary)
    with leading(store_url, schedule), tenure.Registry(store_url) as registry:
        until(lambda: diary, "a run")
        registry.pause("report", "the bank is down")
        until(lambda: any(run.detail == "paused" and run.covers >= 2 for run in registry.runs("report")), "a pause")
        (record,) = registry.jobs()
        assert record.paused_reason == "the bank is down"
        number = len(diary)
        registry.resume("report")
        until(lambda: len(diary) > number, "a run again")
    assert len([run for run in rows(store_url, "report") if run.detail == "paused"]) == 1
    assert unaccounted(store_url) == []


@pytest.mark.twin("postgres")
def test_mark_in_the_future_is_shown_and_can_be_reset(store_url, caplog):
    seen(store_url)
    let_pass(store_url, HOUR_S, "report")
    with leading(store_url, hourly(nothing)):
        until(lambda: outcomes(store_url, "report") == ["done"], "a run")
    let_pass(store_url, -5 * HOUR_S, "report")
    with leading(store_url, hourly(nothing)), tenure.Registry(store_url) as registry:
        until(lambda: "is in the future" in caplog.text, "a warning")
        assert registry.jobs()[0].ahead
        assert registry.reset("report")
        assert not registry.jobs()[0].ahead
        assert not registry.reset("report")


@pytest.mark.twin("postgres")
def test_unknown_job_is_refused_with_the_names_of_the_others(store_url):
    seen(store_url)
    with tenure.Registry(store_url) as registry:
        for act in (registry.trigger, registry.pause, registry.resume, registry.reset):
            with pytest.raises(ConfigError, match="no schedule has a job 'raport'; known jobs: 'report'"):
                act("raport")


def test_overdue_job_is_seen_from_outside(store_url):
    seen(store_url)
    let_pass(store_url, 2 * HOUR_S, "report")
    with tenure.Registry(store_url) as registry:
        (record,) = registry.jobs()
    assert record.overdue
    assert record.next_due.tzinfo is timezone.utc


def test_two_schedules_of_one_role_are_both_measured(sqlite_url):
    one, two = tenure.Schedule(), tenure.Schedule()
    one.every("1 s", name="one")(nothing)
    two.every("1 s", name="two")(nothing)
    node = tenure.Node(sqlite_url)
    node.leader_only("r", one, name="first")
    node.leader_only("r", two, name="second")
    with node:
        until(lambda: sum(job.runs["done"] > 0 for job in node.stats().jobs) == 2, "a run of each")
        recorder = node._engine.recorder
        assert sorted(recorder.overdue) == [("r", "one"), ("r", "two")]
        assert all(0 <= job.overdue < 60 for job in node.stats().jobs)


@pytest.mark.twin("postgres")
def test_old_rows_are_folded_into_one_that_counts_them(store_url):
    schedule = tenure.Schedule()
    schedule.every("1 s", name="report")(nothing)
    with leading(store_url, schedule):
        until(lambda: known(store_url, "report"), "the job is known")
        until(lambda: len(rows(store_url, "report")) >= 6, "six runs")
    before = sum(run.covers for run in rows(store_url, "report"))
    for _ in range(2):
        fold_runs(store_url, kept=3)
    found = rows(store_url, "report")
    assert found[0].outcome == "folded"
    assert len(found) == 4
    assert sum(run.covers for run in found) == before
    assert unaccounted(store_url) == []


def fold_runs(url, kept):
    """Do what every node does when it starts and once an hour, as if it kept so few rows."""
    with pytest.MonkeyPatch.context() as patch, Desk(url) as desk:
        patch.setattr(tidying, "KEPT_RUNS", kept)
        desk.ask(messages.Tidy())


@pytest.mark.twin("postgres")
def test_folded_row_says_how_its_runs_ended_however_often_rows_are_folded(store_url):
    """A lost run must not vanish in a count: a job that is due every second has a hundred newer rows soon."""
    seen(store_url)
    let_pass(store_url, 8 * HOUR_S, "report")
    every = {"missed": "each", "within": "4 h"}
    with leading(store_url, hourly(nothing, **every)):
        until(lambda: outcomes(store_url, "report") == ["skipped late 4"] + ["done"] * 4, "four runs")
    leave_begun(store_url)
    with leading(store_url, hourly(nothing, **every)):
        until(lambda: outcomes(store_url, "report").count("lost") == 4, "the lost runs")
    fold_runs(store_url, kept=2)
    folded, *kept = rows(store_url, "report")
    assert (folded.outcome, folded.detail, folded.covers) == ("folded", "lost 2, skipped 4", 6)
    assert [run.outcome for run in kept] == ["lost", "lost"]

    let_pass(store_url, 3 * HOUR_S, "report")
    with leading(store_url, hourly(nothing, **every)):
        until(lambda: outcomes(store_url, "report").count("done") == 3, "three more runs")
    for _ in range(2):
        fold_runs(store_url, kept=2)
    folded, *kept = rows(store_url, "report")
    assert (folded.detail, folded.covers) == ("done 1, lost 4, skipped 4", 9)
    assert [run.outcome for run in kept] == ["done", "done"]
    assert unaccounted(store_url) == []


def test_rows_that_another_node_folds_are_left_to_it(postgres_url):
    """Both would read the same rows, and write a row each that counts them."""
    seen(postgres_url)
    let_pass(postgres_url, 8 * HOUR_S, "report")
    with leading(postgres_url, hourly(nothing, missed="each", within="9 h")):
        until(lambda: outcomes(postgres_url, "report") == ["done"] * 8, "eight runs")
    with connected(postgres_url) as other:
        other.execute("select * from tenure.jobs for update")
        fold_runs(postgres_url, kept=2)
        assert outcomes(postgres_url, "report") == ["done"] * 8
    fold_runs(postgres_url, kept=2)
    assert outcomes(postgres_url, "report") == ["folded", "done", "done"]


def test_lost_run_is_counted_although_the_answer_to_its_record_was_lost(store_url):
    make_due(store_url)
    node = tenure.Node(store_url, name="b", ttl=10.0)
    node.leader_only("r", hourly(nothing), name="schedule")
    with contextlib.ExitStack() as stack:
        with leading(store_url, hourly(nothing)) as first:
            until(lambda: outcomes(store_url, "report") == ["done"], "the run")
            stack.enter_context(node)
            until(lambda: len(first.election("r").candidates()) == 2, "both stand")
            leave_begun(store_url)
            left = stack.enter_context(commit_unanswered(node))
        until(lambda: node.stats().jobs, "the next schedule has begun")
        assert left == [0]
        until(lambda: node.stats().jobs[0].runs["lost"] == 1, "the count")
    assert outcomes(store_url, "report") == ["lost"]


# --- what is refused ------------------------------------------------------------------------------------------


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


# --- rest -----------------------------------------------------------------------------------------------------


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
