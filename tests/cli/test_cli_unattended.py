"""What the commands and the dashboard say when every node is dead, or a leader is late."""

from __future__ import annotations

import json

import pytest

import tenure
from tenure.dashboard import dashboard
from tests.cli.test_cli import TENURE, tell
from tests.cli.test_cli_tables import age
from tests.dashboard.client import ask
from tests.support.store_by_hand import Desk, execute, until
from tests.support.terminal import Terminal


@pytest.fixture
def deserted(sqlite_url):
    """A database whose two members have died: one led a role, and no node has ended either."""
    with Desk(sqlite_url, name="a", ttl=5) as first, Desk(sqlite_url, name="b", ttl=5) as last:
        first.stand("scheduler")
        last.lead("scheduler")
        age(sqlite_url, first, 200)
        age(sqlite_url, last, 147)
        yield sqlite_url


SAID = "no member of 'default' has renewed within its TTL (last: b, 2 min 2"
REMEDY = "no replica is running; start one"


@pytest.mark.parametrize("command", [["status"], ["status", "scheduler"], ["watch", "--count", "2"]])
def test_dead_namespace_is_called_dead_first_and_once(deserted, command):
    said = tell(*command, url=deserted).out
    assert SAID in said.splitlines()[0]
    assert REMEDY in said.splitlines()[0]
    assert said.count(REMEDY) == 1
    assert "the others wait" not in said


def test_dead_namespace_is_called_dead_on_the_screen_and_in_json(deserted):
    with Terminal(TENURE, "watch", width=150, TENURE_URL=deserted) as terminal:
        lines = terminal.wait_for("no member of 'default'")
    assert REMEDY in lines[1]
    for command in (["status"], ["status", "scheduler"], ["watch", "--count", "1"]):
        found = json.loads(tell(*command, "--json", url=deserted).out)
        assert found["unattended"].startswith(SAID)
        assert not found.get("waits")


def test_dead_namespace_is_called_dead_on_the_pages(deserted):
    app = dashboard(deserted, access=lambda _: ("view", "vera"))
    for path in ("/", "/role", "/waits"):
        page = ask(app, path, query={"name": "scheduler"}).text
        assert REMEDY in page, path
        assert "the others wait" not in page
    assert json.loads(ask(app, "/api/waits").text)[0]["what"] == "namespace"


def test_overdue_leader_of_a_namespace_that_lives_is_waited_for(deserted):
    with Desk(deserted, name="c", ttl=60):
        said = tell("status", url=deserted).out
        assert "no replica is running" not in said
        assert "waiting: role scheduler: leader 'b' has not renewed within its TTL: the others wait" in said
        assert json.loads(tell("status", "--json", url=deserted).out)["unattended"] is None


@pytest.fixture
def orphaned(sqlite_url):
    """A database with a job whose leader is overdue. Its last run has not ended."""
    schedule = tenure.Schedule()
    schedule.every("1 h", name="tick")(lambda _: None)
    node = tenure.Node(sqlite_url, name="worker-1")
    node.leader_only("scheduler", schedule)
    with node, tenure.Registry(sqlite_url) as registry:
        until(registry.jobs, "the job")
        registry.trigger("tick")
        until(lambda: [run.outcome for run in registry.runs()] == ["done"], "the run")
    with Desk(sqlite_url, name="b", ttl=5) as desk:
        desk.lead("scheduler")
        execute(sqlite_url, "update tenure_jobs set listed_token = 2", "update tenure_runs set outcome = 'begun'")
        yield sqlite_url, desk


def test_job_whose_leader_is_overdue_is_not_said_to_run_and_has_no_next_time(orphaned):
    url, desk = orphaned
    assert [tell("jobs", url=url).lines[1][index] for index in (1, 5)] == ["tick", "running"]
    age(url, desk, 147)
    row = tell("jobs", url=url).lines[1]
    assert (row[1], row[3], row[5]) == ("tick", "when led", "no leader")
    page = ask(dashboard(url, access=lambda _: ("view", "vera")), "/jobs").text
    assert "when led" in page
    assert "no leader" in page
    assert "running" not in page
    execute(url, "update tenure_roles set holder = null")
    assert tell("jobs", url=url).lines[1][5] == "no leader"
    execute(url, "update tenure_jobs set spec = null")
    assert tell("jobs", url=url).lines[1][5] == "running", "a run that is claimed by hand needs no schedule's leader"


def test_trigger_says_who_can_run_the_job(orphaned):
    url, desk = orphaned
    assert tell("trigger", "tick", url=url).out.startswith("tick: the leader runs it within seconds")
    age(url, desk, 147)
    said = tell("trigger", "tick", url=url).out
    assert said.startswith(
        "tick: a run was asked for before and has not begun yet; no node leads role 'scheduler' now;"
    )
    execute(url, "insert into tenure_jobs select * from tenure_jobs where false")
    columns = [name for _, name, *_ in execute(url, "pragma table_info(tenure_jobs)")]
    new = {"job": "'other'", "listed_token": "3"}
    values = ", ".join(new.get(name, name) for name in columns)
    execute(url, f"insert into tenure_jobs select {values} from tenure_jobs")
    said = tell("trigger", "tick", url=url).out
    assert "the program of the last leader does not have this job, and no node leads role 'scheduler' now" in said
    age(url, desk, 0)
    assert "does not have this job; a leader whose program has it runs it" in tell("trigger", "tick", url=url).out


@pytest.mark.parametrize(("seconds", "word"), [(1, None), (40, "late"), (70, "overdue")])
def test_role_in_detail_has_the_marks_of_the_table(sqlite_url, seconds, word):
    with Desk(sqlite_url, name="b", ttl=60) as desk, Desk(sqlite_url, name="c", ttl=60) as other:
        desk.lead("r")
        other.stand("r")
        age(sqlite_url, desk, seconds)
        lines = tell("status", "r", url=sqlite_url).out.splitlines()
        facts = {line.split()[0]: line for line in lines if line}
        if word is None:
            assert "late" not in "".join(lines)
            assert "overdue" not in "".join(lines)
        else:
            assert f"   {word}: the leader" in facts["state"]
            assert facts["renewed"].endswith(f" ago, {word}")
            assert facts["b"].endswith(f" ago, {word}")
        assert facts["c"].endswith(" ago")


def test_leader_that_is_the_last_process_has_no_standby(sqlite_url):
    with Desk(sqlite_url, name="b", ttl=60) as desk, Desk(sqlite_url, name="c", ttl=60) as other:
        desk.lead("r")
        app = dashboard(sqlite_url, access=lambda _: ("view", "vera"))
        assert [line[5] for line in tell("status", url=sqlite_url).lines[:2]] == ["STANDBY", "0"]
        assert '<td class="least number">0</td>' in ask(app).text
        other.stand("r")
        assert tell("status", url=sqlite_url).lines[1][5] == "1"
        assert json.loads(tell("status", "--json", url=sqlite_url).out)["roles"][0]["candidates"] == 2
