"""``tenure.testing``: nodes without a database, which are real nodes in everything else."""

from __future__ import annotations

import runpy
import sqlite3
import threading
from datetime import datetime, timedelta, timezone
from pathlib import Path

import anyio
import pytest

import tenure
from tenure.testing import LocalAsyncNode, LocalNode, due_times, run_job
from tests.support.store_by_hand import until

pytest_plugins = ["tenure.testing.plugin"]

EXAMPLES = Path(__file__).parents[2] / "examples"
NOON = datetime(2026, 6, 1, 12, tzinfo=timezone.utc)


def test_it_leads_every_role_at_once(leading_node):
    assert [leading_node.election(role).wait(5).token for role in ("a", "b")] == [1, 1]
    with leading_node.lead("c", timeout=5) as term:
        assert term.valid


def test_it_takes_a_lock_id_that_no_other_program_could_have(leading_node):
    assert leading_node.election("a", lock_id=7).wait(5).valid
    with pytest.raises(tenure.ConfigError, match="lock_id='seven'"):
        leading_node.election("b", lock_id="seven")


def test_a_role_that_is_lost_stays_lost_until_it_is_won(leading_node):
    events = []
    leading_node.on_event(events.append)
    election = leading_node.election("r")
    first = election.wait(5)
    other = leading_node.election("other").wait(5)
    leading_node.lose("r")
    assert (first.valid, first.lost_reason, election.is_leader) == (False, "the role was taken", False)
    with pytest.raises(tenure.LeadershipLost):
        first.ensure()
    assert other.valid
    with pytest.raises(tenure.WaitTimeout):
        election.wait(0.3)
    leading_node.win("r")
    assert election.wait(5).token > first.token
    until(
        lambda: [type(event).__name__ for event in events if event.role == "r"] == ["Elected", "Deposed", "Elected"],
        "heard",
    )


def test_what_is_not_led_cannot_be_lost(leading_node):
    with pytest.raises(tenure.ConfigError, match="role 'r': this node does not lead it"):
        leading_node.lose("r")


def test_a_term_is_suspended_and_resumed(leading_node):
    events = []
    leading_node.on_event(events.append)
    term = leading_node.election("r").wait(5)
    leading_node.suspend()
    assert (term.valid, term.lost_reason) == (False, None)
    ensured = threading.Thread(target=term.ensure)
    ensured.start()
    leading_node.resume()
    ensured.join(5)
    assert not ensured.is_alive()
    assert (term.valid, term.token) == (True, 1)
    until(lambda: [type(event).__name__ for event in events] == ["Elected", "Suspended", "Resumed"], "heard of all")


def test_a_term_that_is_suspended_for_too_long_lapses():
    with LocalNode(ttl=1) as node:
        term = node.election("r").wait(5)
        node.suspend()
        assert term.wait_lost(5)
        assert term.lost_reason == "lapsed"
        node.resume()
        assert node.election("r").wait(5).token > term.token


def test_it_hands_over_and_leads_again_as_a_node_does_that_is_alone(leading_node):
    election = leading_node.election("r")
    assert [election.wait(5).token, election.resign(), election.wait(5).token] == [1, None, 2]


def test_services_run_and_stop():
    node, diary = LocalNode(), []

    @node.leader_only("r")
    def service(term):
        diary.append(term.token)
        term.wait_lost()
        diary.append("stopped")

    with node:
        until(lambda: diary == [1], "started")
        node.lose("r")
        until(lambda: diary == [1, "stopped"], "stopped")
        node.win("r")
        until(lambda: len(diary) == 3, "started again")
    assert diary[-1] == "stopped"


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_the_async_node_is_told_the_same(backend):
    async def lead(node):
        async with node.lead("r") as term:
            await node.suspend()
            assert not term.valid
            await node.resume()
            assert term.valid
            await node.lose("r")
            await anyio.sleep_forever()

    async def main():
        async with LocalAsyncNode() as node:
            with pytest.raises(tenure.LeadershipLost):
                await lead(node)
            election = node.election("r")
            await node.win("r")
            assert (await election.wait(5)).token > 1

    anyio.run(main, backend=backend)


@pytest.mark.parametrize(
    "needs",
    [
        lambda term, _: term.transaction().__enter__(),
        lambda term, _: term.fence(sqlite3.connect(":memory:")),
        lambda term, _: term.claim(sqlite3.connect(":memory:"), "job", NOON),
        lambda term, _: term.finish(sqlite3.connect(":memory:"), "job", NOON),
        lambda _, election: election.leader(),
        lambda _, election: election.candidates(),
        lambda _, election: election.history(),
        lambda _, election: election.jobs(),
    ],
)
@pytest.mark.filterwarnings("ignore:unclosed database")
def test_what_needs_a_database_is_refused_with_the_remedy(leading_node, needs):
    election = leading_node.election("r")
    with pytest.raises(tenure.ConfigError, match=r"has no database.*tenure\.Node\(\"sqlite:///…\"\)"):
        needs(election.wait(5), election)


def test_a_schedule_cannot_run_on_it():
    with pytest.raises(tenure.ConfigError, match="has no database"):
        LocalNode().leader_only("r", tenure.Schedule())


# --- schedules --------------------------------------------------------------------------------------------------


@pytest.fixture
def example(monkeypatch):
    """The schedule of the example, which is loaded without being run."""
    monkeypatch.setattr(tenure.Node, "run", lambda _: None)
    monkeypatch.setenv("TENURE_URL", "sqlite:///unused.db")
    return runpy.run_path(str(EXAMPLES / "schedule.py"))["schedule"]


def test_the_jobs_of_the_example_are_due_and_run(example, leading_node, tmp_path, capsys):
    assert due_times(example, "tick", NOON, 2) == [NOON + timedelta(seconds=1), NOON + timedelta(seconds=2)]
    [due] = due_times(example, "invoices", NOON)
    assert due.isoformat() == "2026-06-02T02:30:00+02:00"
    run_job(example, "tick", due, leading_node.election("scheduler").wait(5), missed=3)
    assert capsys.readouterr().out == f"{due.astimezone():%H:%M:%S} under token 1, 3 missed\n"
    with tenure.Node(f"sqlite:///{tmp_path}/t.db") as node, node.lead("scheduler") as term:
        run_job(example, "invoices", due, term)
        [record] = node.election("scheduler").jobs()
        assert (record.job, record.done) == ("invoices", due)


def test_a_job_that_writes_needs_a_database(example, leading_node):
    with pytest.raises(tenure.ConfigError, match="has no database"):
        run_job(example, "invoices", NOON, leading_node.election("scheduler").wait(5))


def test_a_job_that_is_a_coroutine_function_needs_an_async_term(leading_node):
    schedule = tenure.Schedule()

    @schedule.every("1 s")
    async def news(run):
        await run.term.ensure()
        return run.due, run.attempt

    async def main():
        async with LocalAsyncNode() as node, node.lead("r") as term:
            return await run_job(schedule, "news", NOON, term, attempt=2)

    assert anyio.run(main) == (NOON, 2)
    with pytest.raises(tenure.ConfigError, match="job 'news' is a coroutine function, so it needs a term of an AsyncN"):
        run_job(schedule, "news", NOON, leading_node.election("r").wait(5))
    with pytest.raises(tenure.ConfigError, match="job 'olds' is not in this schedule: it has news"):
        due_times(schedule, "olds", NOON)


def test_times_without_a_zone_are_refused(leading_node):
    schedule = tenure.Schedule()
    schedule.every("1 s", name="tick")(lambda _: None)
    naive = NOON.replace(tzinfo=None)
    with pytest.raises(tenure.ConfigError, match=r"after=.* has no time zone"):
        due_times(schedule, "tick", after=naive)
    with pytest.raises(tenure.ConfigError, match=r"due=.* has no time zone"):
        run_job(schedule, "tick", naive, leading_node.election("r").wait(5))
