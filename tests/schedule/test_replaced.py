"""The server, the file or the leader's release is replaced under a schedule.

A due time whose claim is gone from the database counts as not run: no record is left that says otherwise. The record of
the database that remains accounts for every due time all the same.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from pathlib import Path

import pytest

import tenure
from tests.databases.test_sqlite_file import file_of, replace_by_an_empty_one
from tests.support.cluster import Cluster
from tests.support.schedules import HOUR_S, leading, let_pass, outcomes, unaccounted
from tests.support.store_by_hand import connected, execute, until

TTL_S = 3.0
MAX_TTL_S = 4.0
DELIVERIES = pytest.mark.parametrize("delivery", ["at-most-once", "at-least-once"])


def scheduled(function, interval, **options):
    schedule = tenure.Schedule()
    schedule.every(interval, name="report", **options)(function)
    return schedule


def miss_five(url):
    """Let a leader see an hourly job, and five hours pass."""
    with leading(url, scheduled(lambda _: None, "1 h"), ttl=TTL_S), tenure.Registry(url) as registry:
        until(registry.jobs, "the job is known")
    let_pass(url, 5 * HOUR_S, "report")
    with connected(url) as connection:
        connection.execute("create table effects (attempt integer)")
        connection.commit()


class Writer(list):
    """A job that writes down its runs, here and in the database."""

    __name__ = "report"

    def __init__(self, url):
        super().__init__()
        self._insert = f"insert into effects values ({'?' if url.startswith('sqlite') else '%s'})"

    def __call__(self, run):
        with run.transaction() as transaction:
            transaction.execute(self._insert, (run.attempt,))
        self.append((run.due, run.attempt, run.missed))


# --- a promoted replica ---------------------------------------------------------------------------------------


def replicated(replica):
    """A database in which a run is due, on both servers: a URL that leads to the one that takes writes."""
    name = replica.primary.create_database().rpartition("/")[2]
    url = replica.url_of_both(name)
    tenure.Registry(url).create(max_ttl=MAX_TTL_S)
    miss_five(url)
    replica.catch_up()
    return url


def promote(replica):
    replica.primary.stop("immediate")
    replica.promote()


@pytest.mark.long
@DELIVERIES
def test_run_whose_claim_the_promoted_replica_lacks_is_made_again_and_recorded_once(replica, delivery):
    """With at-most-once, too: the new primary cannot know of it. What the first run wrote there is gone, too."""
    url = replicated(replica)
    replica.cut_off()
    job = Writer(url)
    with leading(url, scheduled(job, "1 h", delivery=delivery), ttl=TTL_S):
        until(lambda: outcomes(url, "report") == ["skipped missed 4", "done"], "the run")
        promote(replica)
        until(lambda: len(job) == 2, "the run on the new primary", timeout=60)
        until(lambda: outcomes(url, "report") == ["skipped missed 4", "done"], "its record")
    assert job[0] == job[1] == (job[0][0], 1, 4)
    assert execute(url, "select attempt from effects") == [(1,)]
    assert unaccounted(url) == []


@pytest.mark.long
@DELIVERIES
def test_run_whose_end_the_promoted_replica_lacks_is_lost_and_made_again_at_least_once(replica, delivery):
    url = replicated(replica)
    runs = []

    def report(run):
        if not runs:
            replica.catch_up()  # with the claim
            replica.cut_off()
        runs.append(run.attempt)

    with leading(url, scheduled(report, "1 h", delivery=delivery), ttl=TTL_S):
        until(lambda: outcomes(url, "report") == ["skipped missed 4", "done"], "the run")
        promote(replica)
        repeated = delivery == "at-least-once"
        expected = ["skipped missed 4", "lost", *(["done"] if repeated else [])]
        with tenure.Registry(url) as registry:
            until(lambda: registry.roles()[0].leader is not None and outcomes(url, "report") == expected, timeout=60)
        time.sleep(0.5)
    assert runs == ([1, 2] if repeated else [1])
    assert unaccounted(url) == []


# --- the file of SQLite ---------------------------------------------------------------------------------------


def back_up(path: Path) -> Path:
    backup = path.with_name("backup.db")
    with contextlib.closing(sqlite3.connect(path)) as one, contextlib.closing(sqlite3.connect(backup)) as other:
        one.backup(other)
    return backup


def restore(backup: Path, path: Path) -> None:
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    backup.rename(path)


@DELIVERIES
def test_run_whose_claim_the_restored_file_lacks_is_made_again_and_recorded_once(sqlite_url, delivery):
    miss_five(sqlite_url)
    backup = back_up(file_of(sqlite_url))
    job = Writer(sqlite_url)
    with leading(sqlite_url, scheduled(job, "1 h", delivery=delivery), ttl=TTL_S):
        until(lambda: outcomes(sqlite_url, "report") == ["skipped missed 4", "done"], "the run")
        restore(backup, file_of(sqlite_url))
        until(lambda: len(job) == 2, "the run in the restored file", timeout=30)
        until(lambda: outcomes(sqlite_url, "report") == ["skipped missed 4", "done"], "its record")
    assert job[0] == job[1] == (job[0][0], 1, 4)
    assert execute(sqlite_url, "select attempt from effects") == [(1,)]
    assert unaccounted(sqlite_url) == []


def test_runs_that_the_restored_file_lacks_count_as_missed(sqlite_url):
    """The latest due time is run, as after any pause, and the record says that the others were not."""
    runs = []
    with leading(sqlite_url, scheduled(lambda run: runs.append((run.due, run.missed)), "1 s"), ttl=TTL_S):
        until(lambda: runs, "a run")
        backup = back_up(file_of(sqlite_url))
        before = len(runs)
        until(lambda: len(runs) >= before + 3, "three more runs")
        restore(backup, file_of(sqlite_url))
        until(lambda: any(missed >= 2 for _, missed in runs), "a run in the restored file", timeout=30)
    due, missed = next(run for run in runs if run[1] >= 2)
    with tenure.Registry(sqlite_url) as registry:
        (skipped,) = [run for run in registry.runs("report") if run.outcome == "skipped" and run.covers == missed]
    made = [other for other, _ in runs if skipped.first <= other <= skipped.due]
    assert len(made) >= 2
    assert skipped.due < due
    assert unaccounted(sqlite_url) == []


def test_schedule_in_an_empty_file_counts_from_then_on_and_repeats_nothing(sqlite_url):
    dues = []
    with leading(sqlite_url, scheduled(lambda run: dues.append(run.due), "1 s"), ttl=TTL_S):
        until(lambda: len(dues) >= 2, "two runs")
        replace_by_an_empty_one(file_of(sqlite_url))
        replaced = len(dues)
        until(lambda: len(dues) >= replaced + 3, "runs in the new file", timeout=30)
    assert dues == sorted(set(dues))
    with tenure.Registry(sqlite_url) as registry:
        (job,) = registry.jobs()
    assert job.since > dues[1]
    assert unaccounted(sqlite_url) == []


# --- a leader of an older release -----------------------------------------------------------------------------


@pytest.mark.long
def test_due_times_that_pass_while_an_older_release_leads_are_accounted_for(one_url, tmp_path, earlier_release):
    """Its nodes know no schedules, and the tables of this release."""
    dues = []
    schedule = scheduled(lambda run: dues.append((run.due, run.missed)), "1 s")
    with Cluster(one_url, tmp_path, role="r", ttl=10) as cluster:
        with leading(one_url, schedule) as node:
            until(lambda: len(dues) >= 2, "two runs")
            (old,) = cluster.spawn("old", source=earlier_release)
            until(lambda: len(node.election("r").candidates()) == 2, "both stand")
        cluster.wait_for_leader()
        before = len(dues)
        time.sleep(3)
        assert len(dues) == before
        old.send("leave")
        with leading(one_url, schedule, "b"):
            until(lambda: len(dues) >= before + 2, "runs again")
    due, missed = dues[before]
    assert (due - dues[before - 1][0]).total_seconds() == missed + 1 >= 3
    assert f"skipped missed {missed}" in outcomes(one_url, "report")
    assert len(dues) == len(set(dues))
    assert unaccounted(one_url) == []
