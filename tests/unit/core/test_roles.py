"""Standing for roles, winning, resigning, and handing over."""

from __future__ import annotations

import pytest

from tenure.core import roles
from tenure.core.evidence import TURN_S
from tenure.core.messages import Acquire, Acquired, Held, Renew, Stand, Standing, Vacancy, Vacate, Vacated
from tenure.core.roles import Roles
from tenure.events import Deposed, Elected
from tests.unit.core.scripted import CONFIRMED, EVERY, LOST, SERVER, SILENCE, TRUST, TTL, ScriptedNode, leader


def standing(*held: Held, **rest) -> dict:
    return {Renew: Standing(alive=True, held=held, confirmed=CONFIRMED, **rest)}


def candidate(role: str = "r") -> ScriptedNode:
    """A node that stands for a role which another one leads."""
    node = ScriptedNode(role)
    node.run(0.0, {Acquire: Acquired({})})
    assert not node.roles.wanted
    return node


# Standing and winning ----------------------------------------------------------------------------------------------


def test_node_registers_and_then_tries_for_the_role():
    node = ScriptedNode("r")
    assert [kind for kind in node.kinds(0.0) if kind in (Stand, Acquire)] == [Stand, Acquire]
    assert node.news() == [Elected("r", 1)]


def test_vacant_roles_are_acquired_in_one_batch():
    requests = ScriptedNode("s", "r").run(0.0)
    assert [request.roles for request in requests if isinstance(request, Acquire)] == [("r", "s")]


def test_node_that_stands_twice_registers_once():
    node = leader("r")
    node.protocol.stand("r")
    assert Stand not in node.kinds(1.0)


def test_follower_waits_and_asks_for_nothing():
    node = candidate()
    assert node.kinds(EVERY, standing()) == [Renew]
    assert node.news() == []


class NeverVisited(set):
    def __iter__(self):
        raise AssertionError("every role was visited")


def test_leader_of_all_its_roles_need_not_visit_them_to_know_whom_to_watch():
    """With each look a leader of ten thousand roles would spend milliseconds on that."""
    node = leader("r", "s", "t")
    node.roles.standing = NeverVisited(node.roles.standing)
    assert node.roles.held_by_others == ()
    node.protocol.withdraw("s", 0.0)
    assert node.roles.held_by_others == ()
    node.roles.standing = node.roles.standing.union("u")
    assert node.roles.held_by_others == ("u",)


def test_role_that_a_renewal_shows_vacant_is_tried_for():
    node = candidate()
    assert node.kinds(EVERY, standing(vacant=(Vacancy("r", 4),))) == [Renew, Acquire]


def test_vacant_role_that_the_node_does_not_stand_for_is_left_alone():
    node = candidate()
    assert Acquire not in node.kinds(EVERY, standing(vacant=(Vacancy("other", 4),)))


def test_role_said_to_be_vacant_is_tried_for_at_once():
    node = candidate()
    node.protocol.notified("vacant another r", 0.1)
    assert node.kinds(0.1) == [Acquire]


def test_notification_about_other_roles_causes_nothing():
    node = leader("mine")
    for role in ("mine", "a role that this node does not stand for"):
        node.protocol.notified(f"vacant another {role}", 0.1)
    assert node.kinds(0.1) == []


def test_notification_without_a_role_causes_a_renewal():
    node = candidate()
    node.protocol.notified("vacant another", 0.1)
    assert node.kinds(0.1, standing()) == [Renew]


def test_role_whose_row_is_locked_is_tried_for_alone_and_patiently():
    node = ScriptedNode("r", "s")
    requests = node.run(0.0, {Acquire: Acquired({"s": 1}, busy=("r",))})
    assert node.news() == [Elected("s", 1)]
    assert not any(request.patient for request in requests if isinstance(request, Acquire))
    (again,) = node.run(0.05, {Acquire: Acquired({})})
    assert (again.roles, again.patient) == (("r",), True)
    assert not node.roles.busy, "another node has taken it"


def test_term_whose_acquisition_got_no_answer_is_adopted():
    node = candidate()
    node.run(EVERY, standing(Held("r", 7)))
    assert node.news() == [Elected("r", 7)]


def test_role_that_another_node_took_is_lost():
    node = leader("r")
    node.run(EVERY, standing())
    assert Deposed("r", 1, "the role was taken") in node.news()


def test_election_is_settled_when_all_have_been_looked_at_and_vacant_roles_tried_for():
    node = ScriptedNode("r")
    node.step(0.0), node.step(0.0)
    assert not node.protocol.election_decided
    node.look(0.0)
    assert not node.protocol.election_decided, "the role has not been tried for"
    node.run(0.0)
    assert node.protocol.election_decided


# Resigning ---------------------------------------------------------------------------------------------------------


def test_resignation_ends_the_term_at_once_and_then_vacates_the_role():
    node = leader("r")
    node.protocol.resign("r", 1.0)
    assert node.news() == [Deposed("r", 1, "resigned")]
    assert node.roles.unreleased == {"r"}
    (vacate, *_) = node.run(1.0)
    assert vacate == Vacate(node.protocol.member_id, "r", 1)
    assert not node.roles.unreleased


def test_role_that_is_not_held_cannot_be_resigned():
    node = candidate()
    node.protocol.resign("r", 1.0)
    assert (node.news(), node.kinds(1.0)) == ([], [])


def test_resignation_and_withdrawal_after_the_deadline_come_too_late():
    for give_up in ("resign", "withdraw"):
        node = leader("r")
        getattr(node.protocol, give_up)("r", TTL)
        assert node.news() == [Deposed("r", 1, "lapsed")]


def test_role_that_is_being_vacated_is_not_tried_for():
    node = leader("r")
    node.protocol.resign("r", 1.0)
    node.roles.consider((Vacancy("r", 9),), ("r",), "me", 1.0)
    assert not node.roles.wanted


def test_role_is_vacated_when_its_work_has_ended():
    node = leader("r")
    node.roles.held_for_work.add("r")
    node.protocol.resign("r", 1.0)
    assert Vacate not in node.kinds(1.0)
    node.roles.held_for_work.clear()
    assert Vacate in node.kinds(1.1)


def test_role_with_an_open_fenced_transaction_is_vacated_later():
    node = leader("r")
    node.protocol.resign("r", 1.0)
    assert node.kinds(1.0, {Vacate: Vacated(done=False)}) == [Vacate]
    assert not node.roles.unreleased, "the term is marked, so the others know"
    assert Vacate in node.kinds(1.05)


def test_node_that_resigned_stands_back_for_a_ttl():
    node = leader("r")
    node.protocol.resign("r", 1.0)
    vacant = standing(vacant=(Vacancy("r", 1),))
    assert Acquire not in node.kinds(1.0, vacant)
    assert Acquire not in node.kinds(1.0 + TTL - 0.1, vacant)
    assert Acquire in node.kinds(1.0 + TTL + EVERY, vacant)


def test_standing_back_is_counted_from_the_end_of_the_work():
    node = leader("r")
    node.roles.held_for_work.add("r")
    node.protocol.resign("r", 1.0)
    node.roles.held_for_work.clear()
    node.run(5.0, standing())
    assert node.roles.standing_back(1.0 + TTL) == ("r",)
    assert node.roles.standing_back(5.0 + TTL) == ()


def test_node_that_stands_alone_leads_again_after_a_moment():
    node = leader("r")
    node.protocol.resign("r", 1.0)
    assert Renew not in node.kinds(1.0), "a successor would have to wait for it"
    requests = node.run(1.0 + TURN_S, standing(vacant=(Vacancy("r", 1),), alone_in=("r",)))
    assert next(request for request in requests if isinstance(request, Renew)).alone_in == ("r",)
    assert node.news()[-1] == Elected("r", 2)


def test_standing_back_ends_when_another_node_has_led():
    node = leader("r")
    node.protocol.resign("r", 1.0)
    node.run(1.0)
    assert Acquire in node.kinds(1.0 + TURN_S, standing(vacant=(Vacancy("r", 2),)))


def test_notification_for_another_member_is_left_to_that_one():
    node = candidate()
    node.protocol.notified("vacant sender>another r", 0.1)
    assert node.kinds(0.1) == []
    node.protocol.notified(f"vacant sender>{node.protocol.member_id} r", 0.1)
    assert node.kinds(0.1) == [Acquire]


def test_role_resigned_here_needs_a_look_before_a_notification_counts():
    node = leader("r")
    node.protocol.resign("r", 1.0)
    node.run(1.0, standing())
    node.protocol.notified("vacant another r", 1.1)
    assert node.kinds(1.1, standing()) == [Renew]


def test_leader_that_is_asked_to_resign_does():
    node = leader("r")
    node.step(EVERY, Standing(alive=True, held=(Held("r", 1, requested=True, requested_for="heir"),)))
    assert node.news() == [Deposed("r", 1, "resigned")]
    assert node.step(EVERY).reserved_for == "heir"


def test_withdrawal_resigns_and_removes_the_candidacy():
    node = leader("r")
    node.protocol.withdraw("r", 1.0)
    requests = node.run(1.0)
    assert [request.withdrawn for request in requests if isinstance(request, Stand)] == [("r",)]
    assert any(isinstance(request, Vacate) for request in requests)
    assert Acquire not in node.kinds(EVERY + 1.0, standing(vacant=(Vacancy("r", 1),)))


def test_role_that_is_withdrawn_from_is_not_tried_for_any_more():
    node = candidate()
    node.protocol.notified("vacant another r", 1.0)
    node.protocol.withdraw("r", 1.0)
    assert node.kinds(1.0) == [Stand]


def test_role_acquired_after_the_withdrawal_is_given_up():
    node = ScriptedNode("r")
    requests = node.run(0.0, {Acquire: "fails"})
    assert isinstance(requests[-1], Acquire)
    acquire = node.protocol.control(0.05)
    node.protocol.withdraw("r", 0.06)
    node.protocol.answer(acquire, Acquired({"r": 1}), 0.07)
    assert node.news() == []
    assert Vacate in node.kinds(0.07)


def test_role_held_in_the_database_and_not_stood_for_is_given_up():
    node = ScriptedNode()
    node.run(0.0)
    assert Vacate in node.kinds(EVERY, standing(Held("r", 3)))


# Successors --------------------------------------------------------------------------------------------------------


def test_resignation_in_favour_of_a_member_reserves_the_role():
    node = leader("r")
    node.protocol.resign("r", 1.0, to="heir")
    (vacate, *_) = node.run(1.0)
    assert vacate.reserved_for == "heir"


def test_heir_takes_the_role_although_it_stood_back():
    node = leader("r")
    node.protocol.resign("r", 1.0)
    mine = Vacancy("r", 1, reserved_for=node.protocol.member_id)
    node.run(1.0)
    assert Acquire in node.kinds(1.0 + TURN_S, standing(vacant=(mine,)))


def test_others_leave_a_reserved_role_to_the_heir_for_a_ttl():
    roles = Roles(TTL, [])
    roles.stand("r")
    reserved = (Vacancy("r", 1, reserved_for="heir"),)
    roles.consider(reserved, (), "me", 0.0)
    roles.consider(reserved, (), "me", SILENCE - 0.1)
    assert not roles.wanted
    roles.consider(reserved, (), "me", SILENCE)
    assert roles.acquire_request("me", "name", 0).unreserved == ("r",)


def test_new_reservation_is_waited_for_anew():
    roles = Roles(TTL, [])
    roles.stand("r")
    roles.consider((Vacancy("r", 1, reserved_for="heir"),), (), "me", 0.0)
    roles.consider((Vacancy("r", 2, reserved_for="heir"),), (), "me", SILENCE)
    assert not roles.wanted


# A new membership --------------------------------------------------------------------------------------------------


def test_new_membership_registers_every_role_again():
    node = leader("r", "s")
    requests = node.run(EVERY, {Renew: Standing(alive=False)})
    assert [request.roles for request in requests if isinstance(request, Stand)] == [("r", "s")]


def test_new_membership_forgets_what_the_old_one_had_to_vacate():
    node = leader("r")
    node.protocol.resign("r", EVERY)
    assert node.roles.vacate_at == EVERY
    node.step(EVERY, Standing(alive=False))
    assert node.roles.vacate_at == float("inf")
    assert not node.roles.unreleased


# Many roles ----------------------------------------------------------------------------------------------------


@pytest.fixture
def many(monkeypatch):
    """A node that leads `r` and counts as having many roles: it reads all of them once in a hundred seconds."""
    monkeypatch.setattr(roles, "FEW_ROLES", 0)
    monkeypatch.setattr(roles, "READ_ROLE_S", 100.0)
    monkeypatch.setattr(roles, "server_patience", lambda _ttl: 0.0)
    node = leader("r")
    (first,) = [request for request in node.run(EVERY) if isinstance(request, Renew)]
    assert first.thorough
    return node


def test_node_with_many_roles_rarely_reads_all_of_them(many):
    assert many.run(2 * EVERY, standing()) == [Renew(many.protocol.member_id, thorough=False)]
    assert many.believes(2 * EVERY) == {"r": 1}, "a role that the answer does not name is not lost"
    times = range(3, 42)
    made = [request for number in times for request in many.run(number * EVERY, standing())]
    assert Renew(many.protocol.member_id, thorough=True) in made


def test_node_with_many_roles_hears_requests(many):
    many.run(2 * EVERY, standing(Held("r", 1, requested=True)))
    assert "r" not in many.roles.holding


def test_node_with_many_roles_reads_all_after_a_failure(many):
    many.run(2 * EVERY, {Renew: LOST})
    many.run(2 * EVERY)
    made = many.run(3 * EVERY)
    assert all(request.thorough for request in made if isinstance(request, Renew))


def test_node_with_many_roles_reads_all_after_its_terms_have_lapsed(many):
    """The database still names it as the holder, so no other node takes the roles."""
    many.run(2 * EVERY, standing())
    woken = 2 * EVERY + TRUST + 0.1
    many.run(woken, standing(Held("r", 1)))
    assert many.believes(woken) == {"r": 2}, "it has taken its own role again"


def test_node_with_many_roles_reads_all_while_an_old_connection_may_have_a_request(many, monkeypatch):
    monkeypatch.setattr(roles, "server_patience", lambda _ttl: 3 * EVERY)
    many.roles.connected(SERVER, 2 * EVERY)
    made = [request for number in (2, 3, 4) for request in many.run(number * EVERY, standing(Held("r", 1)))]
    assert [request.thorough for request in made] == [True] * 3
    (after,) = many.run(5 * EVERY, standing(Held("r", 1)))
    assert after.thorough, "the last one came before the end of that time"
    assert many.run(6 * EVERY, standing()) == [Renew(many.protocol.member_id, thorough=False)]
