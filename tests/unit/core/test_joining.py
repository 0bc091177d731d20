"""A node connects, joins, and renews its membership."""

from __future__ import annotations

import pytest

from tenure.core.messages import Join, Joined, Open, Opened, Renew, Standing, Tidy
from tests.unit.core.scripted import CONFIRMED, EVERY, FAILS, LOST, SERVER, TTL, ScriptedNode, leader


def join_of(node: ScriptedNode, now: float, outcomes: dict | None = None) -> Join:
    return next(request for request in node.run(now, outcomes) if isinstance(request, Join))


def test_node_joins_as_soon_as_it_is_connected():
    node = ScriptedNode()
    assert node.kinds(0.0)[:2] == [Open, Join]
    assert node.phase == "LIVE"


def test_row_holds_what_the_node_was_told():
    node = ScriptedNode(metadata='{"zone": 1}')
    member = join_of(node, 0.0).member
    assert (member.name, member.ttl, member.takeover, member.metadata) == ("node", TTL, "instant", '{"zone": 1}')
    assert node.protocol.member_id == member.id


def test_ttl_is_not_longer_than_the_ripe_limit():
    node = ScriptedNode()
    node.run(0.0, {Open: Opened(SERVER, CONFIRMED._replace(ripe_ttl=4.0))})
    assert node.protocol.ttl == 4.0
    assert node.protocol.trusted_until == pytest.approx(3.6)
    assert node.protocol.most_kept_back == pytest.approx(3.6 - 2 * 1.0), "a renewal may be lost"


@pytest.mark.parametrize(
    ("options", "has_key"), [({}, True), ({"takeover": "strict"}, False), ({"sentinels": False}, False)]
)
def test_only_an_instant_node_takes_a_sentinel(options, has_key):
    assert (join_of(ScriptedNode(**options), 0.0).member.key is not None) == has_key


def test_key_that_another_client_holds_is_drawn_again():
    node = ScriptedNode()
    node.step(0.0)
    first, second = node.step(0.0, Joined(sentinel=False)), node.step(0.0)
    assert first.member.key != second.member.key
    assert node.phase == "LIVE"


def test_join_whose_answer_was_lost_is_ended_by_the_next_under_another_id():
    node = ScriptedNode()
    first = join_of(node, 0.0, {Join: LOST})
    second = join_of(node, 0.1)
    assert first.member.id != second.member.id
    assert second.replaces == (first.member.id,)
    third = join_of(node, 3.0, {Renew: Standing(alive=False)})
    assert third.replaces == (second.member.id,), "the first was ended by the second"


def test_join_that_failed_is_tried_again_after_a_pause():
    node = ScriptedNode()
    node.run(0.0, {Join: FAILS})
    assert node.kinds(0.0) == []
    assert Join in node.kinds(0.05)


def test_membership_is_renewed_four_times_a_ttl():
    node = ScriptedNode()
    node.run(0.0)
    assert Renew not in node.kinds(EVERY / 2 - 0.01)
    assert Renew in node.kinds(EVERY), "the first renewal comes early, so that nodes that start together do not stay so"
    assert Renew not in node.kinds(2 * EVERY - 0.01)
    assert Renew in node.kinds(2 * EVERY)


def test_renewal_comes_before_everything_else():
    node = ScriptedNode()
    node.run(0.0)
    node.protocol.stand("r")
    node.protocol.observe("s")
    assert node.kinds(EVERY)[0] is Renew


def test_renewal_that_failed_is_tried_again_soon():
    node = leader("r")
    node.run(EVERY, {Renew: FAILS})
    assert node.kinds(EVERY) == []
    assert Renew in node.kinds(EVERY + 0.05)


def test_membership_that_was_ended_loses_every_term_and_joins_anew():
    node = leader("r", "s")
    assert Join in node.kinds(EVERY, {Renew: Standing(alive=False)})
    assert [event.reason for event in node.news()[:2]] == ["the membership was ended"] * 2


def test_node_does_not_join_anew_while_work_of_its_last_membership_goes_on():
    node = leader("r")
    node.roles.held_for_work.add("r")
    assert Join not in node.kinds(EVERY, {Renew: Standing(alive=False)})
    node.roles.held_for_work.clear()
    assert Join in node.kinds(EVERY)


def test_node_tidies_once_an_hour():
    node = ScriptedNode()
    assert Tidy in node.kinds(0.0)
    assert Tidy not in node.kinds(3599.0)
    assert Tidy in node.kinds(3600.0, {Tidy: FAILS})
    assert Tidy not in node.kinds(3601.0), "whether it works or not"


def test_nodes_with_different_seeds_draw_different_ids_and_keys():
    one, two = ScriptedNode(), ScriptedNode()
    two.protocol.reseed(2)
    first, second = join_of(one, 0.0).member, join_of(two, 0.0).member
    assert first.id != second.id
    assert first.key != second.key
