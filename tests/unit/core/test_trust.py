"""How long a node believes in its terms, and what happens when it no longer may."""

from __future__ import annotations

import pytest

from tenure.core.messages import Acquire, Acquired, Held, Renew, Standing
from tenure.events import Deposed, Elected
from tests.unit.core.scripted import CONFIRMED, EVERY, FAILS, LOST, TRUST, ScriptedNode, leader


def test_trust_is_nine_tenths_of_the_ttl():
    node = leader("r")
    assert node.believes(TRUST - 0.01) == {"r": 1}
    assert node.believes(TRUST) == {}


def test_trust_is_counted_from_before_the_renewal_was_sent():
    node = leader("r")
    request = node.protocol.control(EVERY)
    node.protocol.answer(request, node._answer(request), EVERY + 3.0)
    assert node.protocol.trusted_until == EVERY + TRUST


def test_renewal_that_failed_extends_nothing():
    node = leader("r")
    node.run(EVERY, {Renew: FAILS})
    assert node.protocol.trusted_until == TRUST


def test_renewal_whose_answer_was_lost_extends_nothing():
    node = leader("r", takeover="strict")
    node.run(EVERY, {Renew: LOST})
    assert node.protocol.trusted_until == TRUST


def test_keeper_is_told_the_deadline_and_loses_the_terms_then():
    node = leader("r")
    assert node.protocol.deadline() == TRUST
    assert not node.protocol.expire(TRUST - 0.01)
    assert node.protocol.expire(TRUST)
    assert node.news() == [Deposed("r", 1, "lapsed")]
    assert node.protocol.deadline() == float("inf"), "it lapses once"


def test_every_lapse_begins_a_new_generation_of_trust():
    node = leader("r")
    before = node.protocol.generation
    node.protocol.expire(TRUST)
    node.protocol.expire(TRUST + 1)
    assert node.protocol.generation == before + 1


def test_answer_after_the_deadline_revives_nothing():
    node = leader("r")
    request = node.protocol.control(EVERY)
    node.protocol.answer(request, node._answer(request), TRUST + 0.1)
    assert node.news() == [Deposed("r", 1, "lapsed")]
    assert node.believes(TRUST + 0.1) == {}


def test_term_that_lapsed_is_acquired_anew_under_a_new_token():
    node = leader("r")
    node.protocol.expire(TRUST)
    still_mine = Standing(alive=True, held=(Held("r", 1),), confirmed=CONFIRMED)
    assert Acquire in node.kinds(TRUST + 0.1, {Renew: still_mine})
    assert node.news() == [Deposed("r", 1, "lapsed"), Elected("r", 2)]


def test_role_that_was_acquired_too_late_is_not_led():
    node = ScriptedNode("r")
    node.run(0.0, {Acquire: FAILS})
    request = node.protocol.control(0.1)
    assert isinstance(request, Acquire)
    node.protocol.answer(request, Acquired({"r": 1}), TRUST + 0.1)
    assert node.news() == []
    node.token = 1
    node.run(TRUST + 0.2, {Renew: Standing(alive=True, held=(Held("r", 1),), confirmed=CONFIRMED)})
    assert node.news() == [Elected("r", 2)], "its token is never used"


def test_time_for_stopping_services_is_taken_from_the_end_of_trust():
    node = ScriptedNode()
    node.protocol.stop_within = 1.5
    node.run(0.0)
    assert node.protocol.trusted_until == TRUST - 1.5


def test_trust_that_is_kept_back_leaves_room_for_a_lost_renewal():
    node = ScriptedNode()
    node.protocol.stop_within = 100.0
    node.run(0.0)
    assert node.protocol.most_kept_back == TRUST - 2 * EVERY
    assert node.protocol.trusted_until == 2 * EVERY


@pytest.mark.parametrize("takeover", ["instant", "strict"])
def test_node_without_a_membership_trusts_nothing(takeover):
    node = ScriptedNode("r", takeover=takeover)
    assert node.protocol.trusted_until == node.protocol.deadline() * -1 == float("-inf")
