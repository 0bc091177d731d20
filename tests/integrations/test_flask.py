"""Flask under gunicorn with four workers: the application of the how-to, as its users start it."""

from __future__ import annotations

import os
import re
import signal

from tenure import Registry
from tests.integrations.cluster import PATIENCE_S, ROOT
from tests.integrations.web import Server, free_port, gunicorn
from tests.support.store_by_hand import until

PROGRAM = (ROOT / "examples" / "flask_app.py").read_text()


def served(url, directory, *options):
    port = free_port()
    command = gunicorn("flask_app:create_app()", port, "--chdir", "examples", "--workers", "4", *options)
    return Server("flask", port, command, {"TENURE_URL": url}, directory)


def leader_of(url, *, other_than=None):
    """The leader and how many stand for the role, as the database knows it."""
    with Registry(url) as registry:
        members = registry.members()
        holder = [role.leader for role in registry.roles() if role.role == "scheduler" and role.leader]
    if len(members) == 4 and holder and holder[0].name != other_than:
        [member] = [one for one in members if one.member_id == holder[0].member_id]
        return holder[0].name, member.pid
    return None


def test_the_how_to_shows_the_example():
    page = (ROOT / "docs" / "how-to" / "flask.md").read_text()
    shown, *_ = re.findall(r"^```py\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    assert PROGRAM.endswith(f'"""\n\n{shown}')


def test_one_of_four_workers_runs_the_schedule_through_a_kill_and_hands_over_at_the_end(postgres_url, tmp_path):
    with served(postgres_url, tmp_path) as server:
        server.wait_for("/")
        name, pid = until(lambda: leader_of(postgres_url), "four members and a leader", PATIENCE_S)
        answers = [server.ask("/leader") for _ in range(40)]
        assert {answer.json()["leader"] for answer in answers} == {name}
        assert {answer.json()["node"] for answer in answers if answer.status_code == 200} <= {name}
        assert {answer.json()["node"] for answer in answers if answer.status_code == 503}
        until(lambda: "under token 1" in server.running.output(), "a report", PATIENCE_S)

        os.kill(pid, signal.SIGKILL)
        until(lambda: leader_of(postgres_url, other_than=name), "another leader, and a new worker", PATIENCE_S)
        until(lambda: "under token 2" in server.running.output(), "a report of the next term", PATIENCE_S)
        assert server.end() == 0
        due = re.findall(r"report of (\S+),", server.running.output())
        assert len(due) == len(set(due)), "each due time once"
        assert "Traceback" not in server.running.output()
    with Registry(postgres_url) as registry:
        *later, first = [term.reason for term in registry.history("scheduler")]
    assert first == "death"
    assert set(later) <= {"left", "resigned"}, "no worker was ended without a hand-over"


def test_a_node_that_the_master_starts_leads_in_no_worker(postgres_url, tmp_path):
    with served(postgres_url, tmp_path, "--preload") as server:
        server.wait_for("/")
        until(lambda: "under token 1" in server.running.output(), "the master to lead", PATIENCE_S)
        assert 200 not in {server.ask("/leader").status_code for _ in range(20)}
