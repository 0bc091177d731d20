"""The database's clock decides when a run is due: it is stepped by an hour, both ways, under a running schedule."""

from __future__ import annotations

import time

import pytest

import tenure
from tests.conftest import missing
from tests.support.schedules import leading, unaccounted
from tests.support.store_by_hand import until
from tests.verification.torture.victims import LIBRARIES, TorturedPostgres

HOUR_US = 3600 * 1_000_000


@pytest.fixture
def stepped(make_postgres_server):
    """A server whose clock can be stepped, and the URL of an empty database on it."""
    if not LIBRARIES:
        missing("no libfaketime found: install faketime")
    from tests.conftest import INSTALLATIONS

    with TorturedPostgres(INSTALLATIONS[0], fsync=False) as server:
        yield server, server.create_database()


def ticking(runs):
    """A schedule whose job notes the due time and the database's time, every second."""
    schedule = tenure.Schedule()

    @schedule.every("1 s")
    def tick(run):
        with run.transaction() as transaction:
            cursor = transaction.execute("select (extract(epoch from clock_timestamp()) * 1000000)::bigint")
            ((now,),) = cursor.fetchall()
        runs.append((round(run.due.timestamp() * 1_000_000), now))

    return schedule


@pytest.mark.long
def test_clock_that_is_set_back_makes_the_schedule_wait_and_repeat_nothing(stepped):
    server, url = stepped
    runs = []
    with leading(url, ticking(runs), ttl=4.0):
        until(lambda: len(runs) >= 2, "two runs")
        server.clock.set("-3600")
        time.sleep(3.0)  # one renewal and more
        number = len(runs)
        time.sleep(2.0)
        assert len(runs) - number <= 1, "nothing is due for an hour"
        server.clock.set("+0")
        until(lambda: len(runs) > number + 1, "runs again, when the clock is right")
    assert all(now >= due for due, now in runs), "nothing runs early"
    dues = [due for due, _ in runs]
    assert len(dues) == len(set(dues))
    assert unaccounted(url) == []


@pytest.mark.long
def test_clock_that_is_set_forward_and_right_again_leaves_a_mark_that_is_shown_and_reset(stepped):
    server, url = stepped
    runs = []
    with leading(url, ticking(runs), ttl=4.0), tenure.Registry(url) as registry:
        until(lambda: len(runs) >= 2, "two runs")
        server.clock.set("+3600")
        until(lambda: runs[-1][0] - runs[0][0] > HOUR_US // 2, "a run an hour later")
        skipped = [run for run in registry.runs("tick") if run.outcome == "skipped"]
        assert sum(run.covers for run in skipped) > 3000, "one row covers the hour"
        server.clock.set("+0")
        until(lambda: registry.jobs()[0].ahead, "a mark in the future")
        number = len(runs)
        assert registry.reset("tick")
        until(lambda: len(runs) > number, "a run, after the reset")
    assert all(now >= due for due, now in runs[:number]), "nothing runs early"
