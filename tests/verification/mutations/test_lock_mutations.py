"""Every part of R21 is necessary: take it away, and a program with the lock works beside a node, or no node leads.

The simulator has no programs beside the nodes, so a real PostgreSQL shows it. A mutation replaces text in a copy of
``src/tenure``, as in ``test_mutations.py``. The story must end badly with it, and well with the code as it is.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tenure
from tenure.core import messages
from tests.support.store_by_hand import Desk, connected, execute, until
from tests.verification.mutations.test_mutations import ROOT, Mutation, mutated

LOCK_ID = 42
BESIDE = "works beside the node"
CUT = "select pg_terminate_backend(pid) from pg_stat_activity where application_name like 'tenure control%/leader'"
STOPS_WITHIN_S = 3.0
"""Far more than a node needs to notice that its connection broke, and far less than its lease."""

LOCK_MUTATIONS = [
    Mutation(
        "a role is taken although its lock was refused",
        "held-by-a-program",
        BESIDE,
        (("databases/postgres/role_locks.py", "if role not in self._locks or role in self._locked)", ")"),),
    ),
    Mutation(
        "a strict leader keeps its trust when the connection with its lock breaks",
        "cut-and-not-back",
        BESIDE,
        (("core/protocol.py", "if watched or (membership.row and self.roles.locked):", "if watched:"),),
    ),
    Mutation(
        "a term is resumed without its lock",
        "cut-and-back",
        BESIDE,
        (("databases/postgres/role_locks.py", "mine.role in self._locks and mine.role not in self._locked", "False"),),
    ),
    Mutation(
        "a role whose lock was lost is not vacated",
        "cut-and-back",
        "the role is still held",
        (
            (
                "core/roles.py",
                "self.lose(role, EndReason.LOCK_TAKEN)\n            self._vacating[role] = (token, None, now)\n",
                "self.lose(role, EndReason.LOCK_TAKEN)\n",
            ),
        ),
    ),
    Mutation(
        "a lock is released before the role is vacated",
        "busy-vacate",
        BESIDE,
        (("databases/postgres/role_locks.py", "        if vacated.done:\n", "        if True:\n"),),
    ),
    Mutation(
        "a member that resumes waits for its own earlier connection",
        "own-earlier-connection",
        "the lock was not taken",
        (
            (
                "databases/postgres/role_locks.py",
                "and (m.id = :id or m.ended_at is not null",
                "and (m.ended_at is not null",
            ),
        ),
    ),
    Mutation(
        "an ended member keeps the lock",
        "ended-member",
        "the lock was not taken",
        (("databases/postgres/role_locks.py", "self._free(refused, member_id)", "pass"),),
    ),
    Mutation(
        "a dead leader's role is taken without its lock",
        "dead-leader",
        BESIDE,
        (("core/protocol.py", "confirmation.trusted and not roles.bound", "confirmation.trusted"),),
    ),
]


@contextlib.contextmanager
def leading(url: str) -> Iterator[tenure.Election]:
    """A strict leader: nothing but its lock keeps it from leading on when its connection breaks."""
    with tenure.Node(url, name="leader", ttl=30, takeover="strict") as node:
        election = node.election("r", lock_id=LOCK_ID)
        election.wait(20)
        yield election


@contextlib.contextmanager
def program(url: str) -> Iterator[threading.Event]:
    """A program that waits for the lock; the event is set as soon as it works."""
    works = threading.Event()

    def wait() -> None:
        connection.execute("select pg_advisory_lock(%s)", [LOCK_ID])
        works.set()

    with connected(url, autocommit=True) as connection:
        threading.Thread(target=wait, daemon=True).start()
        waits = f"select 1 from pg_locks where objid = {LOCK_ID} and pid = {connection.info.backend_pid}"
        until(lambda: execute(url, waits), "the program waits")
        yield works


def stops(election: tenure.Election) -> str | None:
    try:
        until(lambda: not election.is_leader, "stopped", STOPS_WITHIN_S)
    except AssertionError:
        return BESIDE
    return None


def held_by_a_program(url: str) -> str | None:
    with program(url) as works, tenure.Node(url, ttl=30) as node:
        assert works.wait(20)
        try:
            node.election("r", lock_id=LOCK_ID).wait(STOPS_WITHIN_S)
        except tenure.WaitTimeout:
            return None
        return BESIDE


def cut_and_back(url: str) -> str | None:
    with leading(url) as election, program(url) as works:
        execute(url, CUT)
        assert works.wait(20)
        if wrong := stops(election):
            return wrong
        try:
            election.wait(STOPS_WITHIN_S)
        except tenure.WaitTimeout:
            return "the role is still held" if election.leader() else None
        return BESIDE


def cut_and_not_back(url: str) -> str | None:
    server, _, database = url.rpartition("/")
    permit = f'alter database "{database}" allow_connections '
    with leading(url) as election, program(url) as works:
        try:
            # Committed before the cut: the node connects again at once.
            execute(f"{server}/postgres", permit + "false")
            execute(f"{server}/postgres", CUT)
            assert works.wait(20)
            return stops(election)
        finally:
            execute(f"{server}/postgres", permit + "true")


@contextlib.contextmanager
def desks(url: str) -> Iterator[Desk]:
    with Desk(url, namespace="default", takeover="strict") as desk:
        desk.backend.assign_lock("r", LOCK_ID)
        yield desk


def busy_vacate(url: str) -> str | None:
    with desks(url) as desk, program_free(url) as is_free, connected(url) as working:
        token = desk.acquire("r")["r"]
        working.execute("select 1 from tenure.roles for share")
        desk.ask(messages.Vacate(desk.id, "r", token))
        return BESIDE if is_free() else None


@contextlib.contextmanager
def program_free(url: str) -> Iterator[Callable[[], bool]]:
    with connected(url, autocommit=True) as connection:
        yield lambda: connection.execute("select pg_try_advisory_lock(%s)", [LOCK_ID]).fetchone()[0]


def own_earlier_connection(url: str) -> str | None:
    with desks(url) as desk:
        desk.lead("r")
        store, session, opened = desk.backend.open_control()
        with contextlib.closing(session):
            member = messages.Member(desk.id, desk.settings.name, desk.settings.ttl, "strict", None)
            resume = messages.Resume(member, opened.server, 1, opened.server.incarnation, ("r",))
            answer: Any = store.perform(resume)
            return "the lock was not taken" if answer.held[0].unlocked else None


def ended_member(url: str) -> str | None:
    with desks(url) as old, desks(url) as new:
        old.lead("r")
        assert new.end(old.id)
        return None if new.acquire("r") else "the lock was not taken"


def dead_leader(url: str) -> str | None:
    """The leader's connection ends, and the program that waits for its lock gets it before the other node."""
    with Desk(url, namespace="default") as leader, tenure.Node(url, ttl=30) as node:
        leader.backend.assign_lock("r", LOCK_ID)
        leader.lead("r")
        election = node.election("r", lock_id=LOCK_ID)
        with program(url) as works:
            until(lambda: len(election.candidates()) == 2, "both stand")
            leader.session.close()
            assert works.wait(20)
            try:
                election.wait(STOPS_WITHIN_S)
            except tenure.WaitTimeout:
                return None
            return BESIDE


STORIES: dict[str, Callable[[str], str | None]] = {
    "held-by-a-program": held_by_a_program,
    "cut-and-back": cut_and_back,
    "cut-and-not-back": cut_and_not_back,
    "busy-vacate": busy_vacate,
    "own-earlier-connection": own_earlier_connection,
    "ended-member": ended_member,
    "dead-leader": dead_leader,
}

PROGRAM = """
import sys, tenure
from tests.verification.mutations.test_lock_mutations import STORIES
assert tenure.__path__[0] == sys.argv[1], tenure.__path__
print(STORIES[sys.argv[2]](sys.argv[3]))
"""


@pytest.mark.long
@pytest.mark.parametrize("mutation", LOCK_MUTATIONS, ids=lambda mutation: mutation.rule.replace(" ", "-"))
def test_without_this_rule_a_promise_breaks(mutation: Mutation, tmp_path: Path, postgres_url: str) -> None:
    copy = mutated(mutation, tmp_path)
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(copy), mutation.scenario, postgres_url],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    assert mutation.breaks in result.stdout, f"nobody noticed:\n{result.stdout}"


@pytest.mark.long
@pytest.mark.parametrize("story", STORIES)
def test_with_the_rules_as_they_are_the_story_ends_well(story: str, postgres_url: str) -> None:
    assert STORIES[story](postgres_url) is None
