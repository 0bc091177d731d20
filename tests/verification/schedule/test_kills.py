"""The leader of a schedule dies or freezes around due times: none is lost, and none is made twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import tenure
from tests.support.schedules import unaccounted
from tests.support.store_by_hand import execute, until
from tests.verification.schedule.kills import ROOT, TABLE, kill_around_due_times, leader, replicas


@pytest.mark.long
def test_no_due_time_is_lost_or_made_twice_when_leaders_are_killed(store_url):
    report = kill_around_due_times(store_url, 5)
    assert report.passed, report


@pytest.mark.long
def test_no_effect_of_a_frozen_leader_comes_after_its_successors(store_url):
    """The leader is frozen past its lease, in the middle of a run, and wakes up later."""
    report = kill_around_due_times(store_url, 2, freeze_s=4.0, ttl=2.0, pause_s=0.3)
    assert report.passed, report
    order = [token for (token,) in execute(store_url, "select token from effects order by due_us, attempt")]
    assert order == sorted(order)


@pytest.mark.long
def test_clocks_of_nodes_do_not_matter(postgres_url):
    """Two replicas whose wall clocks are a minute apart from the server's, one ahead and one behind."""
    with replicas(postgres_url, interval=1, delivery="at-least-once", wall_s=60.0) as running:
        first = leader(running)
        until(lambda: execute(postgres_url, "select count(*) from effects")[0][0] >= 2, "two runs", 30)
        first.kill()
        leader(running)
        number = execute(postgres_url, "select count(*) from effects")[0][0]
        until(lambda: execute(postgres_url, "select count(*) from effects")[0][0] > number + 1, "more runs", 30)
    dues = [due for (due,) in execute(postgres_url, "select due_us from effects order by due_us")]
    assert dues == list(range(dues[0], dues[-1] + 1, 1_000_000))
    assert execute(postgres_url, "select count(*) from effects where at_us < due_us") == [(0,)]
    assert unaccounted(postgres_url) == []


def test_replica_says_what_it_did(sqlite_url):
    """The program of this verification works by itself, with one replica."""
    execute(sqlite_url, TABLE)
    options = json.dumps({"name": "a", "interval": 1, "delivery": "at-most-once"})
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.verification.schedule.replica", options],
        env=os.environ | {"TENURE_URL": sqlite_url},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        until(lambda: execute(sqlite_url, "select count(*) from effects")[0][0] >= 1, "a run", 30)
        process.terminate()
        assert process.communicate(timeout=30)[0].split()[:2] == ["elected", "1"]
    finally:
        process.kill()
        process.wait(10)
    with tenure.Registry(sqlite_url) as registry:
        assert registry.runs("tick")
