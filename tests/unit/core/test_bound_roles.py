"""Roles that need a lock of the control connection, besides the lease (R21)."""

from __future__ import annotations

import pytest

from tenure.core.messages import Acquire, Acquired, Held, Open, Opened, Renew, Resume, Standing, Vacate
from tenure.events import Deposed, Resumed, Suspended
from tests.unit.core.scripted import CONFIRMED, EVERY, LOST, RESTARTED, ScriptedNode, leader


def bound_leader(*others: str, takeover: str = "strict") -> ScriptedNode:
    node = leader("r", *others, takeover=takeover)
    node.roles.bound.add("r")
    return node


def unlocked(token: int = 1) -> Standing:
    return Standing(alive=True, held=(Held("r", token, unlocked=True),), confirmed=CONFIRMED)


def test_strict_leader_stops_trusting_a_term_as_soon_as_the_connection_with_its_lock_breaks():
    node = bound_leader()
    node.run(EVERY, {Renew: LOST})
    assert node.believes(EVERY) == {}
    assert node.news() == [Suspended("r", 1)]


def test_strict_leader_without_a_lock_keeps_its_trust():
    node = leader("r", takeover="strict")
    node.run(EVERY, {Renew: LOST})
    assert node.believes(EVERY) == {"r": 1}
    assert node.news() == []


@pytest.mark.parametrize("answers", [{}, {Open: Opened(RESTARTED, CONFIRMED)}], ids=["cut", "restarted"])
def test_strict_leader_resumes_with_the_lock(answers):
    node = bound_leader("other")
    node.run(EVERY, {Renew: LOST})
    node.protocol.server_answered("start 1", EVERY)
    made = node.run(EVERY + 1, answers)
    [resume] = [request for request in made if isinstance(request, Resume)]
    assert (resume.locks, resume.member.key, resume.epoch) == (("r",), None, 1)
    assert node.believes(EVERY + 1) == {"r": 1, "other": 2}
    assert [event for event in node.news() if isinstance(event, Resumed)] == [Resumed("r", 1), Resumed("other", 2)]


def test_instant_leader_that_was_cut_loses_the_term_as_without_a_lock():
    node = bound_leader(takeover="instant")
    node.run(EVERY, {Renew: LOST})
    node.run(EVERY + 1)
    assert Deposed("r", 1, "the connection was cut") in node.news()


@pytest.mark.parametrize("takeover", ["instant", "strict"])
def test_term_whose_lock_was_taken_is_lost_and_its_role_vacated(takeover):
    node = bound_leader("other", takeover=takeover)
    node.run(EVERY, {Renew: LOST})
    held = (Held("r", 1, unlocked=True), Held("other", 2))
    resumed = Standing(alive=True, held=held, confirmed=CONFIRMED)
    made = node.kinds(EVERY + 1, {Open: Opened(RESTARTED, CONFIRMED), Resume: resumed})
    # The renewal shows that the role is vacant: the lock may be free by then.
    assert [kind for kind in made if kind in (Resume, Vacate, Renew)] == [Resume, Vacate, Renew]
    assert Deposed("r", 1, "the lock was taken") in node.news()
    assert node.believes(EVERY + 1) == {"other": 2}


def test_role_whose_lock_was_taken_is_vacated_after_its_work_has_ended():
    node = bound_leader()
    node.roles.held_for_work.add("r")
    node.run(EVERY, {Renew: LOST})
    assert Vacate not in node.kinds(EVERY + 1, {Resume: unlocked()})
    node.roles.held_for_work.discard("r")
    assert Vacate in node.kinds(EVERY + 1)


def test_lock_is_needed_until_the_work_under_a_term_that_was_given_up_has_ended():
    """Otherwise a program could begin while this node still stops: so the node suspends, and takes the lock again."""
    node = bound_leader()
    node.roles.held_for_work.add("r")
    node.protocol.resign("r", 1.0)
    node.run(EVERY, {Renew: LOST})
    assert node.phase == "DOUBT"
    [resume] = [request for request in node.run(EVERY + 1) if isinstance(request, Resume)]
    assert resume.locks == ("r",)


def test_term_whose_acquisition_was_not_answered_is_not_taken_up_without_its_lock():
    node = ScriptedNode("r", takeover="strict")
    node.roles.bound.add("r")
    node.run(0.0, {Acquire: Acquired({})})
    assert isinstance(node.step(EVERY, unlocked()), Renew)
    assert node.step(EVERY) == Vacate(node.protocol.member_id or "", "r", 1)
    assert node.news() == []
