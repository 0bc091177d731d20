"""What operators do with jobs of a schedule: trigger, pause, resume, look."""

from __future__ import annotations

import contextlib
import time
from datetime import timezone

import pytest

import tenure
from tenure import ConfigError
from tenure.core import messages
from tenure.store import tidying
from tests.schedule.hourly import (
    Diary,
    commit_unanswered,
    hourly,
    known,
    leave_begun,
    make_due,
    nothing,
    seen,
    slow_job,
)
from tests.support.schedules import HOUR_S, leading, let_pass, outcomes, rows, unaccounted
from tests.support.store_by_hand import Desk, connected, execute, table, until


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
def test_a_row_from_the_time_when_the_clock_was_ahead_stops_no_job(store_url):
    """The marks were reset, and the clock has reached the rows: due times that are skipped may end at one of them."""
    seen(store_url)
    let_pass(store_url, 4 * HOUR_S, "report")
    last_hour_us = round((time.time() // HOUR_S - 1) * HOUR_S * 1e6)
    names = "namespace, role, job, due_us, attempt, first_us, covers, outcome, token, began_at"
    row = f"'default', 'r', 'report', {last_hour_us}, 1, {last_hour_us}, 1, 'done', 1, '2026-01-01 00:00:00'"
    execute(store_url, f"insert into {table(store_url, 'runs')} ({names}) values ({row})")
    diary = Diary()
    with leading(store_url, hourly(diary)):
        until(lambda: diary, "the run of this hour")


@pytest.mark.twin("postgres")
def test_unknown_job_is_refused_with_the_names_of_the_others(store_url):
    seen(store_url)
    with tenure.Registry(store_url) as registry:
        for act in (registry.trigger, registry.pause, registry.resume, registry.reset):
            with pytest.raises(ConfigError, match="no schedule has a job 'raport'; known jobs: 'report'"):
                act("raport")


def test_job_is_found_however_its_name_is_composed(sqlite_url):
    """A terminal, or a file name on macOS, may give the letter and its accent apart; names are kept in NFC."""
    schedule = tenure.Schedule()
    schedule.every("1 h", name="caf\u00e9")(nothing)
    apart = "cafe\u0301"
    with leading(sqlite_url, schedule), tenure.Registry(sqlite_url) as registry:
        until(lambda: known(sqlite_url, "caf\u00e9"), "the job is known")
        registry.pause(apart, "closed")
        assert registry.jobs()[0].paused_reason == "closed"
        registry.resume(apart)
        assert registry.trigger(apart)
        until(lambda: [run.outcome for run in registry.runs(apart)] == ["done"], "the run")
        assert not registry.reset(apart)


@pytest.mark.twin("postgres")
def test_paused_job_is_run_when_asked_for_although_it_has_a_run_to_repeat(store_url):
    make_due(store_url)
    slow, begun = slow_job()
    with leading(store_url, hourly(slow, delivery="at-least-once")):
        assert begun.wait(20)
    diary = Diary()
    with tenure.Registry(store_url) as registry:
        registry.pause("report")
        registry.trigger("report")
        with leading(store_url, hourly(diary, delivery="at-least-once")):
            until(lambda: [run.requested for run in diary] == [True], "the run that was asked for")
            registry.resume("report")
            until(lambda: [run.requested for run in diary] == [True, False], "the run again")
    assert unaccounted(store_url) == []


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
