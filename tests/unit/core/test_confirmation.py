"""What a node may do on a promoted server (R4b), and when a raise of the largest TTL is ripe (R14)."""

from __future__ import annotations

import pytest

from tenure.core import timing
from tenure.core.confirmation import Confirmation
from tenure.core.messages import Acquire, Confirm, Join, Open, Opened, Renew, Ripen, Standing
from tenure.core.servers import Server
from tests.unit.core.scripted import CONFIRMED, EVERY, SERVER, SILENCE, TTL, ScriptedNode

PROMOTED = Server("start 9", "system:2", 2, promoted=True)
HERE = CONFIRMED._replace(incarnation="system:2")
RIPE_AFTER = timing.RIPENS_AFTER_S * (1 + timing.DRIFT)
RAISED = CONFIRMED._replace(max_ttl=60.0)


def on_a_promoted_server(now: float, node: ScriptedNode) -> list[type]:
    outcomes = {Open: Opened(PROMOTED, CONFIRMED), Renew: Standing(alive=True, confirmed=CONFIRMED)}
    return node.kinds(now, outcomes | {Confirm: "fails"})


def test_node_joins_a_promoted_server_and_acquires_nothing():
    node = ScriptedNode("r")
    kinds = on_a_promoted_server(0.0, node)
    assert Join in kinds
    assert Acquire not in kinds


def test_promoted_server_is_confirmed_when_every_lease_given_elsewhere_is_over():
    node = ScriptedNode("r")
    on_a_promoted_server(0.0, node)
    assert Confirm not in on_a_promoted_server(SILENCE - 0.1, node)
    assert Confirm in on_a_promoted_server(SILENCE, node)


def test_node_acquires_as_soon_as_the_server_is_confirmed():
    node = ScriptedNode("r")
    for now in (0.0, SILENCE - 0.1):
        on_a_promoted_server(now, node)
    assert isinstance(node.step(SILENCE), Confirm)
    assert node.kinds(SILENCE, {Renew: Standing(alive=True, confirmed=HERE)}) == [Renew, Acquire]


def test_another_node_that_confirmed_the_server_ends_the_wait():
    node = ScriptedNode("r")
    on_a_promoted_server(0.0, node)
    assert Acquire in node.kinds(EVERY, {Renew: Standing(alive=True, confirmed=HERE)})


def test_tokens_of_a_promoted_server_begin_above_all_that_were_issued():
    node = ScriptedNode("r")
    requests = node.run(0.0, {Open: Opened(PROMOTED, HERE._replace(base=5))})
    (acquire,) = [request for request in requests if isinstance(request, Acquire)]
    assert acquire.floor == 2**40 + 5


def test_server_that_lacks_nothing_is_confirmed_at_once():
    confirmation = Confirmation()
    confirmation.see(PROMOTED, CONFIRMED._replace(loses_nothing=True), 5.0)
    assert confirmation.confirm_at == 5.0


@pytest.mark.parametrize("row", [{"incarnation": "other:1"}, {"incarnation": "system:0"}, {"place": "dump"}])
def test_dump_and_missing_namespace_are_waited_for_whatever_promotions_lose(row):
    confirmation = Confirmation()
    confirmation.see(PROMOTED, CONFIRMED._replace(loses_nothing=True, **row), 5.0)
    assert confirmation.confirm_at >= 5.0 + SILENCE


def test_wait_goes_on_across_reconnects():
    confirmation = Confirmation()
    confirmation.see(PROMOTED, CONFIRMED, 0.0)
    confirmation.see(PROMOTED, CONFIRMED, 5.0)
    assert confirmation.confirm_at == SILENCE


def test_wait_on_one_promoted_replica_does_not_count_on_another_of_the_same_timeline():
    """Both follow one primary and are promoted one after the other: only their starts tell them apart."""
    confirmation = Confirmation()
    confirmation.see(PROMOTED, CONFIRMED, 0.0)
    confirmation.see(PROMOTED._replace(start="another"), CONFIRMED, 5.0)
    assert confirmation.confirm_at == 5.0 + SILENCE


def test_confirmed_server_has_nothing_to_wait_for():
    confirmation = Confirmation()
    confirmation.see(SERVER, CONFIRMED, 0.0)
    assert confirmation.trusted
    assert confirmation.confirm_at == confirmation.ripe_at == float("inf")


def test_raise_is_ripe_when_it_has_stood_for_ten_minutes_by_the_slowest_clock():
    node = ScriptedNode()
    raised = {Open: Opened(SERVER, RAISED), Renew: Standing(alive=True, confirmed=RAISED)}
    assert Ripen not in node.kinds(0.0, raised)
    assert Ripen not in node.kinds(RIPE_AFTER - 1, raised)
    requests = node.run(RIPE_AFTER, raised)
    assert next(request for request in requests if isinstance(request, Ripen)).seen == RAISED


def test_raise_that_could_not_be_made_ripe_is_waited_for_anew():
    node = ScriptedNode()
    raised = {Open: Opened(SERVER, RAISED), Renew: Standing(alive=True, confirmed=RAISED)}
    for now in (0.0, RIPE_AFTER):
        node.run(now, raised)
    assert Ripen not in node.kinds(RIPE_AFTER + TTL, raised)


def test_limit_that_was_changed_and_changed_back_ripens_anew():
    confirmation = Confirmation()
    confirmation.see(SERVER, RAISED._replace(limits=1), 0.0)
    confirmation.see(SERVER, RAISED._replace(limits=3), 9.0)
    assert confirmation.ripe_at == 9.0 + RIPE_AFTER


def test_raise_on_another_line_of_data_ripens_anew():
    confirmation = Confirmation()
    confirmation.see(SERVER, RAISED, 0.0)
    elsewhere = SERVER._replace(place="restored")
    confirmation.see(elsewhere, RAISED._replace(place="restored"), 9.0)
    assert confirmation.ripe_at == 9.0 + RIPE_AFTER


def test_replica_that_comes_or_goes_does_not_delay_a_raise():
    confirmation = Confirmation()
    confirmation.see(SERVER, RAISED._replace(replicated=False), 0.0)
    confirmation.see(SERVER, RAISED._replace(replicated=True), 9.0)
    assert confirmation.ripe_at == RIPE_AFTER


def test_raise_does_not_ripen_on_a_server_that_is_not_confirmed():
    confirmation = Confirmation()
    confirmation.see(PROMOTED, RAISED, 0.0)
    assert confirmation.ripe_at == float("inf")
