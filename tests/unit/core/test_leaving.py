"""A node that is closed ends its terms first, and then its membership."""

from __future__ import annotations

from tenure.core.messages import Join, Leave, Open
from tenure.events import Deposed
from tests.unit.core.scripted import FAILS, TRUST, ScriptedNode, leader


def test_terms_end_at_once_and_the_row_with_the_next_request():
    node = leader("r", "s")
    node.protocol.leave(1.0)
    assert node.news() == [Deposed("r", 1, "left"), Deposed("s", 2, "left")]
    assert node.kinds(1.0) == [Leave]
    assert node.phase == "GONE"


def test_node_that_has_left_asks_nothing_more():
    node = leader("r")
    node.protocol.leave(1.0)
    node.run(1.0)
    assert node.protocol.control(99.0) == node.protocol.watch(99.0) == float("inf")


def test_node_that_never_joined_is_gone_at_once():
    node = ScriptedNode("r")
    node.protocol.leave(0.0)
    assert (node.phase, node.kinds(0.0)) == ("GONE", [])


def test_node_that_leaves_while_it_joins_ends_the_row_that_it_gets():
    node = ScriptedNode()
    node.step(0.0)
    join = node.protocol.control(0.0)
    node.protocol.leave(0.1)
    node.protocol.answer(join, node._answer(join), 0.2)
    (leave,) = node.run(0.2)
    assert leave.member_id == join.member.id


def test_node_that_leaves_while_its_join_fails_is_gone():
    node = ScriptedNode()
    node.step(0.0)
    join = node.protocol.control(0.0)
    assert isinstance(join, Join)
    node.protocol.leave(0.1)
    node.protocol.fail(join, 0.2, lost=False)
    assert (node.kinds(0.2), node.phase) == ([], "GONE")


def test_leave_that_fails_is_not_tried_again():
    node = leader("r")
    node.protocol.leave(1.0)
    node.run(1.0, {Leave: FAILS})
    assert node.phase == "GONE"


def test_trust_that_ended_before_is_told_as_that():
    node = leader("r")
    node.protocol.leave(TRUST + 1)
    assert node.news() == [Deposed("r", 1, "lapsed")]


def test_node_in_doubt_leaves_on_a_new_connection():
    node = leader("r")
    node.protocol.lost_control(1.0)
    node.protocol.leave(1.0)
    assert node.kinds(1.0) == [Open, Leave]
