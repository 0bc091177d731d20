"""Reporting who leads the roles that the application observes."""

from __future__ import annotations

from tenure.core.messages import Leader, Leaders, LeadersAre
from tenure.events import LeaderChanged
from tests.unit.core.scripted import EVERY, ScriptedNode


def observer(*leaders: Leader) -> ScriptedNode:
    node = ScriptedNode()
    node.protocol.observe("r")
    node.run(0.0, {Leaders: LeadersAre(leaders)})
    return node


def test_leader_is_reported_once():
    node = observer(Leader("r", 3, "id", "name"))
    assert node.news() == [LeaderChanged("r", 3, "id", "name")]
    node.run(EVERY, {Leaders: LeadersAre((Leader("r", 3, "id", "name"),))})
    assert node.news() == []


def test_vacant_role_is_reported_when_it_had_a_leader():
    assert observer(Leader("r", 0, None, None)).news() == []
    node = observer(Leader("r", 3, "id", "name"))
    node.news()
    node.run(EVERY, {Leaders: LeadersAre((Leader("r", 3, None, None),))})
    assert node.news() == [LeaderChanged("r", 3, None, None)]


def test_leaders_are_asked_for_with_each_renewal_and_each_notification():
    node = observer()
    assert Leaders not in node.kinds(1.0)
    node.protocol.notified("changed another r", 1.0)
    assert node.run(1.0) == [Leaders(("r",))]
    assert Leaders in node.kinds(EVERY)


def test_role_is_asked_for_as_soon_as_it_is_observed():
    node = observer()
    node.protocol.observe("s")
    assert node.run(1.0) == [Leaders(("r", "s"))]


def test_node_that_observes_nothing_asks_for_no_leader():
    node = ScriptedNode("r")
    node.protocol.notified("changed another r", 0.0)
    assert Leaders not in node.kinds(0.0)


def test_flood_of_notifications_causes_few_questions():
    node = observer()
    asked = 0
    for step in range(200):
        node.protocol.notified("changed another r", 1.0 + 0.005 * step)
        asked += node.kinds(1.0 + 0.005 * step).count(Leaders)
    assert 10 <= asked <= 15
