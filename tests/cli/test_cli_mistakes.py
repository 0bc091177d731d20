"""What operators mistake: a role's name for a namespace, an option for an argument, a leader for a candidate."""

from __future__ import annotations

import time

import pytest

import tenure
from tests.cli.test_cli import Answer, tell
from tests.cli.test_cli_tables import age
from tests.support.store_by_hand import Desk, execute, until


@pytest.fixture
def led(sqlite_url):
    """A database with a role that `c` leads, and for which `b` stands."""
    with Desk(sqlite_url, name="c") as leader, Desk(sqlite_url, name="b") as other:
        leader.lead("scheduler")
        other.stand("scheduler")
        yield sqlite_url, leader, other


def refusal(*command, url, text=None):
    """What a command that must be refused says, before it asks anything."""
    answer = Answer(*command, url=url, text=text)
    assert (answer.code, answer.out) == (2, ""), (answer.code, answer.out, answer.err)
    return answer.err


def test_forget_checks_before_it_asks(led):
    url, _, _ = led
    assert refusal("forget", "nope", url=url) == (
        "tenure: namespace 'nope' does not exist; existing namespaces: 'default'\n"
    )
    assert "give `tenure forget --role scheduler`" in refusal("forget", "scheduler", url=url)
    assert "has living members: stop them first ('c', 'b')" in refusal("forget", "default", url=url)
    assert "'c' leads it and 'b' stands for it" in refusal("forget", "--role", "scheduler", url=url)


def test_forget_without_an_answer_asks_for_yes(led):
    url, _, _ = led
    execute(url, "update tenure_members set ended_at = joined_at", "update tenure_roles set holder = null")
    answer = Answer("forget", "default", url=url, text="")
    assert answer.code == 2
    assert answer.err.endswith("tenure: the question was not answered: give --yes\n")
    assert Answer("forget", "default", url=url, text="y\n").code == 0


def test_resign_to_the_leader_says_that_it_leads(led):
    url, leader, _ = led
    for to in ("c", leader.id):
        assert (
            refusal("resign", "scheduler", "--to", to, url=url) == f"tenure: role 'scheduler': {to!r} leads already\n"
        )
    assert "no other candidate is named 'd'" in refusal("resign", "scheduler", "--to", "d", url=url)


def test_resign_with_no_living_node_does_not_wait(led):
    url, leader, other = led
    for desk in (leader, other):
        age(url, desk, 100)
    began = time.monotonic()
    said = refusal("resign", "scheduler", url=url)
    assert time.monotonic() - began < 10
    assert said.startswith("tenure: nothing was done: no member of 'default' has renewed within its TTL (last: ")
    assert execute(url, "select request_token from tenure_roles") == [(None,)]


@pytest.mark.parametrize("command", ["status", "history", "watch"])
def test_role_that_is_given_as_an_option_is_shown_as_an_argument(led, command):
    said = refusal(command, "--role", "scheduler", url=led[0])
    assert f"{command} scheduler`" in said
    assert "the role is an argument" in said


@pytest.mark.parametrize(
    "command",
    [
        ["status", "nope"],
        ["watch", "nope"],
        ["jobs", "--role", "nope"],
        ["pause", "quick", "--role", "nope"],
        ["resume", "quick", "--role", "nope"],
        ["trigger", "quick", "--role", "nope"],
    ],
)
def test_unknown_role_is_refused_by_every_command_alike(led, command):
    assert refusal(*command, url=led[0]) == (
        "tenure: namespace 'default' has no role 'nope'; known roles: 'scheduler'\n"
    )


def test_watch_of_a_role_shows_that_role_only(led):
    url, leader, _ = led
    leader.acquire("other")
    out = tell("watch", "scheduler", "--count", "1", url=url).out
    assert "scheduler token 1 led by c" in out
    assert "other" not in out


def test_job_of_a_role_that_exists_is_still_named(sqlite_url):
    schedule = tenure.Schedule()
    schedule.every("1 h", name="tick")(lambda _: None)
    node = tenure.Node(sqlite_url, name="worker-1")
    node.leader_only("scheduler", schedule)
    with node, tenure.Registry(sqlite_url) as registry:
        until(registry.jobs, "the job")
        assert "known jobs: 'tick'" in refusal("pause", "quick", "--role", "scheduler", url=sqlite_url)
