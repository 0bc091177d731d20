"""What the watch lane asks, and how its findings reach the control lane."""

from __future__ import annotations

from tenure.core.evidence import NEIGHBOURS
from tenure.core.messages import (
    Acquire,
    Acquired,
    End,
    Ended,
    Evict,
    Knock,
    Look,
    Looked,
    OpenWatch,
    Renew,
    Succession,
    Unblock,
    Vacancy,
    Watching,
)
from tenure.core.roles import LOOKED_AT
from tests.unit.core.scripted import CONFIRMED, EVERY, SERVER, SILENCE, ScriptedNode, member

DEAD = member(sentinel_stands=False)


def joined(*roles: str, **outcomes) -> ScriptedNode:
    node = ScriptedNode(*roles)
    node.run(0.0, outcomes.get("outcomes"))
    return node


def end_of(node: ScriptedNode, now: float, outcomes: dict | None = None) -> End:
    return next(request for request in node.run(now, outcomes) if isinstance(request, End))


def test_lane_connects_at_once_but_looks_only_as_a_member():
    node = ScriptedNode()
    assert [type(request) for request in node.look(0.0)] == [OpenWatch]
    node.run(0.0)
    assert node.look(0.0) == [Look(node.protocol.member_id, None, 0.0, NEIGHBOURS)], "the first look waits for nothing"


def test_later_looks_wait_for_the_predecessor_for_a_slice():
    node = joined()
    node.look(0.0, member(key=7))
    assert node.look(0.1, member(key=7)) == [Look(node.protocol.member_id, 7, 1.0, NEIGHBOURS)]


def test_server_may_ask_for_shorter_slices():
    node = joined()
    node.look(0.0, member(), slice_s=0.3)
    (look,) = node.look(0.1, member())
    assert look.seconds == 0.3


def test_wait_ends_when_a_member_will_have_been_silent():
    node = joined()
    node.look(0.0, member())
    (look,) = node.look(SILENCE - 0.5, member())
    assert look.seconds == 0.5
    (look,) = node.look(SILENCE - 0.01, member())
    assert look.seconds == 0.2, "it is not shorter than that"


def test_fallen_sentinel_is_followed_by_a_knock_and_the_end_of_the_member():
    node = joined()
    assert [type(request) for request in node.look(0.1, DEAD)] == [OpenWatch, Look, Knock]
    (verdict,) = end_of(node, 0.1).verdicts
    assert (verdict.member_id, verdict.reason) == ("other", "death")


def test_look_that_has_knocked_already_is_followed_by_the_end_of_the_member():
    node = joined()
    node.look(0.0, member())
    assert [type(request) for request in node.look(0.1, DEAD, knocked=True)] == [Look]
    (verdict,) = end_of(node, 0.1).verdicts
    assert (verdict.member_id, verdict.reason) == ("other", "death")


def test_server_that_refuses_the_knock_ends_no_member():
    node = joined()
    node.look(0.1, DEAD, accepts=False)
    assert End not in node.kinds(0.1)


def test_silent_member_is_ended():
    node = joined()
    for now in (0.0, SILENCE):
        node.look(now, member())
    (verdict,) = end_of(node, SILENCE).verdicts
    assert (verdict.member_id, verdict.reason) == ("other", "silence")


def test_outage_of_the_watch_connection_gives_all_members_a_ttl_to_come_back():
    node = joined()
    node.look(0.0, member())
    request = node.protocol.watch(5.0)
    node.protocol.fail_watch(request, 5.0, lost=True)
    node.look(6.0, member())
    node.look(SILENCE + 1.0, member())
    assert End not in node.kinds(SILENCE + 1.0)


def test_watch_connection_that_was_lost_is_opened_again():
    node = joined()
    node.look(0.0, member())
    node.protocol.fail_watch(node.protocol.watch(0.1), 0.1, lost=True)
    assert isinstance(node.look(0.2, member())[0], OpenWatch)


def test_verdicts_end_with_the_membership_that_made_them():
    node = joined()
    node.look(0.1, DEAD)
    node.protocol.lost_control(0.2)
    node.protocol.server_answered(SERVER.start, 0.2)
    assert End not in node.kinds(0.2)


def test_verdict_of_another_line_of_data_is_not_carried_out():
    node = joined()
    node.look(0.1, DEAD, server=SERVER._replace(place="elsewhere"))
    assert end_of(node, 0.1).verdicts == ()
    assert End not in node.kinds(0.2), "and is forgotten"


def test_connections_of_an_ended_member_are_terminated():
    node = joined()
    node.look(0.1, DEAD)
    end_of(node, 0.1, {End: Ended(("other",), (), {})})
    assert Evict(("other",)) in node.look(0.2)
    assert Evict(("other",)) not in node.look(0.3)


def test_eviction_that_fails_is_not_tried_again():
    node = joined()
    node.look(0.1, DEAD)
    end_of(node, 0.1, {End: Ended(("other",), (), {})})
    request = node.protocol.watch(0.2)
    assert isinstance(request, Evict)
    node.protocol.fail_watch(request, 0.2, lost=False)
    assert Evict(("other",)) not in node.look(1.0)


def test_roles_of_the_ended_member_are_taken_at_once():
    node = joined("r", outcomes={Acquire: Acquired({})})
    node.look(0.1, DEAD)
    kinds = node.kinds(0.1, {End: Ended(("other",), (Vacancy("r", 3),), {})})
    assert kinds == [End, Acquire]


def test_roles_of_a_dead_member_are_taken_with_its_end():
    node = joined("r", outcomes={Acquire: Acquired({})})
    node.look(0.1, DEAD._replace(holds=True))
    end, *later = node.run(0.1, {End: Ended(("other",), (), tokens={"r": 7})})
    assert end.succession == Succession(node.protocol.settings.name, CONFIRMED.base)
    assert node.roles.holding == {"r": 7}
    assert Acquire not in map(type, later)


def test_silent_member_is_ended_by_itself():
    node = joined("r")
    node.look(0.0, member(holds=True))
    node.look(SILENCE + 0.1, member(holds=True))
    assert end_of(node, SILENCE + 0.1).succession is None


def test_roles_with_a_lock_are_not_taken_with_the_end_of_their_holder():
    node = joined("r")
    node.roles.bound.add("r")
    node.look(0.1, DEAD._replace(holds=True))
    assert end_of(node, 0.1).succession is None


def test_transactions_that_keep_a_role_locked_are_ended_now_and_then():
    node = joined("r", outcomes={Acquire: Acquired({}, busy=("r",))})
    assert Unblock(("r",), 10.0) in node.look(0.1)
    assert Unblock(("r",), 10.0) not in node.look(0.2)
    assert Unblock(("r",), 10.0) in node.look(0.4)


def test_vacancy_that_a_look_shows_causes_a_renewal_but_not_all_the_time():
    node = joined("r", outcomes={Acquire: Acquired({})})
    node.look(0.1, vacancy=True)
    assert Renew in node.kinds(0.1)
    node.look(0.2, vacancy=True)
    assert Renew not in node.kinds(0.2)
    node.look(0.4, vacancy=True)
    assert Renew in node.kinds(0.4)


def test_watch_connection_that_cannot_be_opened_is_tried_again_later():
    node = ScriptedNode()
    request = node.protocol.watch(0.0)
    assert isinstance(request, OpenWatch)
    node.protocol.fail_watch(request, 0.0, lost=True)
    assert 0.0 < node.protocol.watch(0.0) <= 0.05
    assert isinstance(node.look(0.05)[0], OpenWatch)


def test_watch_connection_on_which_nothing_works_is_opened_less_and_less():
    node, now, opened = joined(), 0.0, 0
    while now < 60.0:
        request = node.protocol.watch(now)
        if isinstance(request, float):
            now = max(request, now + 0.001)
        elif isinstance(request, OpenWatch):
            node.protocol.answer_watch(request, Watching(), now)
            opened += 1
        else:
            node.protocol.fail_watch(request, now, lost=True)
    assert opened <= 150, "at most two a second, and some more at first"


def test_answer_to_a_look_is_ignored_after_the_end_of_the_membership():
    node = joined()
    node.look(0.0)
    request = node.protocol.watch(0.1)
    node.protocol.lost_control(0.2)
    node.protocol.server_answered(SERVER.start, 0.3)
    node.protocol.answer_watch(request, Looked(SERVER, (DEAD,)), 0.4)
    assert node.protocol.watch(0.5) == float("inf")


def test_new_membership_looks_at_once():
    node = joined()
    node.look(0.0, member())
    node.run(EVERY, {Renew: node._answer(Renew(""))._replace(alive=False)})
    assert node.look(EVERY, member()) == [Look(node.protocol.member_id, None, 0.0, NEIGHBOURS)]


def test_new_connection_looks_at_once():
    node = joined()
    node.look(0.0, member())
    node.protocol.answer_watch(OpenWatch(), Watching(), 0.1)
    (look,) = node.look(0.1, member())
    assert look.seconds == 0.0


def test_node_looks_at_the_holders_of_the_roles_that_it_does_not_hold():
    node = joined("r")
    node.protocol.stand("s")
    (look,) = [request for request in node.look(0.0) if isinstance(request, Look)]
    assert look.roles == ("s",)


def test_node_with_many_roles_looks_at_the_holders_of_some():
    node = joined()
    for number in range(2 * LOOKED_AT):
        node.protocol.stand(f"r{number}")
    (look,) = [request for request in node.look(0.0) if isinstance(request, Look)]
    assert len(look.roles) == LOOKED_AT


def test_node_looks_on_at_once_if_all_its_neighbours_have_fallen():
    node = joined()
    node.look(0.0, *(member(f"a{number}", sentinel_stands=False) for number in range(NEIGHBOURS)))
    assert node.look(0.0) == [], "the control lane acts first"
    assert not node.protocol.election_decided
    node.run(0.0)
    (look,) = node.look(0.0)[:1]
    assert look == Look(node.protocol.member_id, None, 0.0, 2 * NEIGHBOURS)


def test_standing_again_for_a_role_does_not_make_the_node_look_at_once():
    """A web application may call node.election() in every request."""
    node = joined("r")
    node.look(0.0, member(key=7))
    node.protocol.stand("r")
    (look,) = node.look(0.1, member(key=7))
    assert look.wait_for == 7


def test_look_that_was_under_way_does_not_settle_what_a_new_role_asks():
    node = joined("r")
    node.look(0.0, member(key=7))
    under_way = node.protocol.watch(0.1)
    node.protocol.stand("x")
    node.protocol.answer_watch(under_way, Looked(SERVER, (member(key=7),)), 0.5)
    assert node.protocol.watch(0.5) == Look(node.protocol.member_id, None, 0.0, NEIGHBOURS, ("x",))
