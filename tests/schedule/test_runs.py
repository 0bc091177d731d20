"""Runs of a schedule that fail, hang or last, and runs that a hand-over interrupts."""

from __future__ import annotations

import itertools
import threading
import time

import anyio
import pytest

import tenure
from tenure.schedule import scheduler
from tests.schedule.hourly import Diary, hourly, make_due, slow_job
from tests.support.schedules import leading, outcomes, rows, unaccounted
from tests.support.store_by_hand import until

# --- runs that do not go well -------------------------------------------------------------------------------


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


class Unprintable(Exception):
    """An error whose text cannot be made."""

    def __str__(self):
        raise ValueError("no text")


class Numbered(Exception):
    """An error whose text is no text."""

    def __str__(self):
        return 404  # noqa: PLE0307 - that is the point


class UnprintableRefusal(tenure.TenureError):
    """The same, of a class that the record shows without its name."""

    __str__ = Unprintable.__str__


@pytest.mark.parametrize("error", [Unprintable, Numbered, UnprintableRefusal])
@pytest.mark.parametrize("delivery", ["at-most-once", "at-least-once"])
@pytest.mark.twin("postgres")
def test_error_whose_text_cannot_be_made_is_recorded_by_its_type(store_url, delivery, error):
    make_due(store_url)
    attempts = []

    def odd(run):
        attempts.append(run.attempt)
        raise error

    with leading(store_url, hourly(odd, delivery=delivery, attempts=2)):
        until(lambda: outcomes(store_url, "report") == ["failed", "failed"], "both attempts")
    assert attempts == [1, 2]
    assert {run.detail for run in rows(store_url, "report")} == {error.__name__}
    assert unaccounted(store_url) == []


def test_run_that_cannot_be_recorded_is_made_again_after_longer_and_longer_pauses(sqlite_url, monkeypatch):
    make_due(sqlite_url)
    begun = []

    def refuse(*_, **__):
        begun.append(time.monotonic())
        if len(begun) < 4:
            raise ValueError("a bug")

    monkeypatch.setattr(scheduler, "record_end", refuse)
    with leading(sqlite_url, hourly(lambda _: None, delivery="at-least-once")):
        until(lambda: len(begun) == 4, "the last record")
    first, second, third = (later - earlier for earlier, later in itertools.pairwise(begun))
    assert first > 0.4
    assert second > 0.9
    assert third > 1.8


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


# --- hand-over ----------------------------------------------------------------------------------------------


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
