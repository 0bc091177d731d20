"""When to try again, and when to act on notifications."""

from __future__ import annotations

import random

import pytest

from tenure.core.backoff import HEED_AT_ONCE, HEED_EVERY_S, Backoff, Throttle
from tenure.core.messages import Join, Open, OpenWatch, Renew, Stand
from tests.unit.core.scripted import FAILS, LOST, ScriptedNode, leader


def test_first_attempt_is_made_at_once():
    assert Backoff().at == float("-inf")


def test_each_pause_is_twice_as_long_up_to_the_longest():
    backoff = Backoff(0.5, 30.0)
    assert [backoff.failed(0.0) for _ in range(8)] == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert backoff.at == 30.0


def test_pauses_stay_finite_for_ever():
    backoff = Backoff(0.05, 1e9)
    assert all(backoff.failed(0.0) <= 60.0 for _ in range(5000))


def test_success_begins_with_the_first_pause_again():
    backoff = Backoff()
    backoff.failed(0.0)
    backoff.failed(0.0)
    backoff.worked()
    assert backoff.at == float("-inf")
    assert backoff.failed(7.0) == 7.5


def test_jitter_leaves_at_least_half_of_a_pause():
    backoff = Backoff(1.0, 1.0, random.Random(1))
    pauses = {backoff.failed(0.0) for _ in range(200)}
    assert len(pauses) > 100
    assert 0.5 <= min(pauses) < 0.6
    assert 0.9 < max(pauses) <= 1.0


def test_same_seed_makes_the_same_pauses():
    one, two = (Backoff(1.0, 1.0, random.Random(5)) for _ in range(2))
    assert [one.failed(0.0) for _ in range(9)] == [two.failed(0.0) for _ in range(9)]


@pytest.mark.parametrize(("ran_for", "pause"), [(1.0, 4.0), (30.0, 4.0), (30.1, 0.5)])
def test_what_ran_for_longer_than_the_longest_pause_begins_anew(ran_for, pause):
    backoff = Backoff(0.5, 30.0)
    for _ in range(3):
        backoff.failed(0.0)
    assert backoff.ended(100.0 - ran_for, 100.0) == 100.0 + pause


# In a node ---------------------------------------------------------------------------------------------------------


def test_connection_that_cannot_be_opened_is_tried_later_and_later_up_to_a_twentieth_of_the_ttl():
    node = ScriptedNode()
    now, pauses = 0.0, []
    for _ in range(10):
        assert node.kinds(now, {Open: LOST}) == [Open]
        pauses.append(node.protocol.control(now) - now)
        now += pauses[-1]
    assert 0.025 <= pauses[0] <= 0.05
    assert 0.25 <= pauses[-1] <= 0.5


def test_connection_that_worked_is_opened_again_at_once():
    node = leader("r")
    assert node.kinds(2.5, {Renew: LOST}) == [Renew]
    assert isinstance(node.protocol.control(2.5), Open)


def test_failures_before_a_connection_that_worked_do_not_count():
    node = ScriptedNode()
    for now in (0.0, 0.1, 0.3):
        node.run(now, {Open: LOST})
    node.run(0.8)
    node.protocol.lost_control(0.8)
    assert isinstance(node.protocol.control(0.8), Open)


def test_connection_on_which_nothing_ever_worked_is_opened_after_a_pause():
    node = ScriptedNode()
    assert node.kinds(0.0, {Join: LOST}) == [Open, Join]
    assert node.protocol.control(0.0) > 0.0


def test_membership_with_a_short_ttl_reconnects_more_often():
    node = ScriptedNode()
    node.protocol._connection.reopen.longest_s = 99.0
    node.run(0.0)
    assert node.protocol._connection.reopen.longest_s == 0.5, "a twentieth of the TTL"


def test_request_that_succeeds_ends_the_pauses_of_the_control_lane():
    node = ScriptedNode()
    for now in (0.0, 0.1, 0.3):
        node.run(now, {Join: FAILS})
    node.run(0.8)
    node.protocol.stand("r")
    node.run(0.8, {Stand: FAILS})
    assert node.protocol.control(0.8) <= 0.85


def test_watch_lane_has_its_own_pauses():
    node = leader("r")
    node.protocol.fail_watch(OpenWatch(), 0.0, lost=True)
    assert node.protocol.watch(0.0) > 0.0
    assert node.kinds(2.5) == [Renew]


# Notifications -----------------------------------------------------------------------------------------------------


def test_first_notifications_are_acted_upon_at_once():
    throttle = Throttle()
    assert [throttle.due(0.0) for _ in range(HEED_AT_ONCE)] == [0.0] * HEED_AT_ONCE


def test_one_action_answers_all_notifications_of_a_pause():
    throttle = Throttle()
    for _ in range(HEED_AT_ONCE):
        throttle.due(0.0)
    assert {throttle.due(0.001 * step) for step in range(1, 100)} == {HEED_EVERY_S}
    assert throttle.due(HEED_EVERY_S + 0.01) == 2 * HEED_EVERY_S


def test_quiet_time_allows_for_some_at_once_again():
    throttle = Throttle()
    for _ in range(HEED_AT_ONCE):
        throttle.due(0.0)
    assert [throttle.due(100.0) for _ in range(3)] == [100.0] * 3
