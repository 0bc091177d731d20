"""The harness finds what it is there to find: in tables with planted faults, and in replicas that elect no leader."""

from __future__ import annotations

import sys
from datetime import datetime, timedelta, timezone

import pytest

from tests.integrations.cluster import Replicas
from tests.integrations.runs import Fault, Run, Runs

NOON = datetime(2025, 6, 1, 12, tzinfo=timezone.utc)


def at(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)


def run(due: float, token: int | None = 1, job: str = "tick") -> Run:
    return Run(job, at(due), token, "replica-0", 4711, at(due + 0.01))


def table(*dues: float) -> list[Run]:
    return [run(due) for due in dues]


def test_a_table_without_fault_is_without_fault():
    runs = Runs([*table(0, 1, 2), run(3, token=2), run(0, token=2, job="other")])
    assert runs.duplicates == runs.missing == runs.out_of_phase == runs.stale == runs.gaps == []
    assert runs.largest_gap == 0
    assert runs.statement == "5 runs of 5 due times, 0 more than once, 0 missed; tokens 1 to 2"


def test_a_due_time_that_ran_twice_is_found():
    [found] = Runs([*table(0, 1, 2), run(1, token=2)]).duplicates
    assert "job 'tick', due 12:00:01.000, ran 2 times" in found
    assert "token 1" in found
    assert "token 2" in found


def test_two_jobs_may_be_due_at_the_same_time():
    assert Runs([*table(0, 1), run(1, job="other")]).duplicates == []


def test_due_times_that_did_not_run_are_found_and_the_gap_is_stated_with_its_cause():
    faults = [Fault("SIGKILL", at(0.5)), Fault("SIGSTOP", at(1.5)), Fault("SIGKILL", at(3)), Fault("SIGKILL", at(9))]
    runs = Runs(table(0, 1, 4, 5), faults=faults)
    assert [words.split()[3] for words in runs.missing] == ["12:00:02.000,", "12:00:03.000,"]
    assert runs.largest_gap == 3
    assert runs.statement == (
        "4 runs of 6 due times, 0 more than once, 2 missed in 1 gaps (3 s after SIGSTOP); tokens 1 to 1"
    )


def test_a_run_under_an_old_token_is_found():
    [found] = Runs([run(0, token=1), run(1, token=2), run(2, token=1), run(3, token=2)]).stale
    assert "due 12:00:02.000, ran late" in found


def test_a_token_of_another_job_says_nothing():
    assert Runs([run(0, token=2), run(0, token=1, job="other"), run(1, token=None)]).stale == []


def test_a_run_out_of_phase_is_found_and_is_no_missing_one():
    runs = Runs([*table(0, 5, 10.25, 15), *(run(due, job="other") for due in range(3))], every={"tick": 5, "other": 1})
    [found] = runs.out_of_phase
    assert "+0.250 s off" in found
    assert runs.missing == []


def test_replicas_that_elect_no_leader_are_found_out(postgres_url, tmp_path, record_property):
    """The control: plain APScheduler in four processes, with the same faults as the others."""
    command = [sys.executable, "-m", "tests.integrations.plain_apscheduler"]
    with Replicas(postgres_url, tmp_path, command) as replicas:
        replicas.who = replicas.who_ran
        runs = replicas.torment(record_property, kills=2, pauses=1)
        assert len(runs.duplicates) > len(runs.rows) / 8, runs.statement


def test_a_replica_that_ends_by_itself_is_a_failure_that_shows_what_it_said(postgres_url, tmp_path, capsys):
    command = [sys.executable, "-c", "raise SystemExit('no such table')"]
    with pytest.raises(AssertionError, match="replica-0 ended by itself with 1"):  # noqa: SIM117 - what the block does
        with Replicas(postgres_url, tmp_path, command, size=1) as replicas:
            replicas.start()
    assert "no such table" in capsys.readouterr().out


def test_a_replica_that_does_not_end_on_sigterm_is_a_failure(postgres_url, tmp_path):
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf'); time.sleep(1000)"
    with Replicas(postgres_url, tmp_path, [sys.executable, "-c", deaf], size=1) as replicas:
        process = replicas.beside("deaf", [sys.executable, "-c", deaf])
        replicas.wait_until(lambda: "deaf" in process.output().splitlines(), "its word", 30)
        with pytest.raises(AssertionError, match=r"\(None\): \{'deaf': None\}"):
            replicas.terminate(process, within=1)
