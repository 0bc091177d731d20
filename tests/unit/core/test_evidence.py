"""When another member may be ended: it is silent for too long, or it is dead."""

from __future__ import annotations

from tenure.core.evidence import NEIGHBOURS, Evidence
from tenure.core.messages import Looked, Verdict
from tests.unit.core.scripted import RESTARTED, SERVER, SILENCE, member


def look(evidence: Evidence, now: float, *members, server=SERVER) -> tuple[Verdict, ...]:
    return evidence.look(Looked(server, members), "me", now)


def test_member_whose_count_stands_still_for_its_ttl_is_silent():
    evidence = Evidence()
    assert look(evidence, 0.0, member(renewals=5)) == ()
    assert look(evidence, SILENCE - 0.1, member(renewals=5)) == ()
    assert look(evidence, SILENCE, member(renewals=5)) == (Verdict("other", "silence", SERVER.line, renewals=5),)


def test_renewal_begins_the_wait_anew():
    evidence = Evidence()
    look(evidence, 0.0, member(renewals=5))
    look(evidence, 9.0, member(renewals=6))
    assert look(evidence, SILENCE, member(renewals=6)) == ()
    assert evidence.silence_due == 9.0 + SILENCE


def test_each_member_is_judged_by_its_own_ttl():
    evidence = Evidence()
    members = (member("quick", ttl=1.0), member("slow", ttl=60.0))
    look(evidence, 0.0, *members)
    assert evidence.silence_due == 1.02
    assert [verdict.member_id for verdict in look(evidence, 2.0, *members)] == ["quick"]


def test_node_does_not_judge_itself():
    evidence = Evidence()
    look(evidence, 0.0, member("me"))
    assert look(evidence, 99.0, member("me", sentinel_stands=False)) == ()
    assert not evidence.suspects
    assert evidence.silence_due == float("inf")


def test_silence_on_another_line_of_data_counts_anew():
    evidence = Evidence()
    promoted = SERVER._replace(incarnation="system:2")
    look(evidence, 0.0, member())
    assert look(evidence, SILENCE, member(), server=promoted) == ()


def test_member_that_went_and_came_back_counts_anew():
    evidence = Evidence()
    look(evidence, 0.0, member())
    look(evidence, 5.0)
    assert look(evidence, SILENCE, member()) == ()


def test_fallen_sentinel_is_only_a_suspicion():
    evidence = Evidence()
    assert look(evidence, 0.0, member(sentinel_stands=False)) == ()
    assert evidence.suspects
    assert evidence.server_start == SERVER.start


def test_suspect_is_dead_if_the_server_accepts_a_fresh_connection():
    evidence = Evidence()
    look(evidence, 0.0, member(sentinel_stands=False, epoch=3))
    dead = Verdict("other", "death", SERVER.line, epoch=3, server_start=SERVER.start)
    assert evidence.knocked(accepted=True) == (dead,)
    assert evidence.knocked(accepted=True) == (), "told once"


def test_knock_before_the_look_proves_only_the_death_of_the_member_that_had_fallen_before_it():
    evidence = Evidence()
    look(evidence, 0.0, member("a", key=1, sentinel_stands=False), member("b", key=2, sentinel_stands=False))
    assert [verdict.member_id for verdict in evidence.knocked(accepted=True, key=1)] == ["a"]
    assert [member.id for member in evidence.due] == ["b"], "needs a knock of its own"
    assert [verdict.member_id for verdict in evidence.knocked(accepted=True)] == ["b"]


def test_server_that_shuts_down_proves_nothing():
    evidence = Evidence()
    look(evidence, 0.0, member(sentinel_stands=False))
    assert evidence.knocked(accepted=False) == ()
    assert not evidence.suspects


def test_sentinel_that_stood_on_another_server_proves_nothing():
    evidence = Evidence()
    look(evidence, 0.0, member(sentinel_stands=False), server=RESTARTED)
    assert not evidence.suspects


def test_member_without_a_sentinel_is_never_suspected():
    evidence = Evidence()
    look(evidence, 0.0, member(key=None, sentinel_stands=False))
    assert not evidence.suspects


def test_node_waits_for_the_nearest_lower_member_and_the_lowest_for_the_highest():
    evidence = Evidence()
    members = [member(id, key=key) for id, key in (("a", 1), ("c", 3), ("x", 9))]  # noqa: A001
    look(evidence, 0.0, *members)
    assert evidence.predecessor_key == 3
    evidence.look(Looked(SERVER, tuple(members)), "a", 0.0)
    assert evidence.predecessor_key == 9


def test_node_does_not_wait_for_a_sentinel_that_has_fallen():
    evidence = Evidence()
    look(evidence, 0.0, member("a", key=1), member("b", key=2, sentinel_stands=False))
    assert evidence.predecessor_key == 1
    look(evidence, 0.0)
    assert evidence.predecessor_key is None


# How far back a node looks -----------------------------------------------------------------------------------------


def ring(number: int, **seen):
    """So many members before `me`, nearest first."""
    return [member(f"a{99 - place}", key=place, **seen) for place in range(number)]


def test_node_looks_at_its_neighbours_while_one_of_them_is_well():
    evidence = Evidence()
    fallen = ring(NEIGHBOURS, sentinel_stands=False)
    look(evidence, 0.0, *fallen[:-1], *ring(NEIGHBOURS)[-1:])
    assert evidence.reach == NEIGHBOURS
    assert not evidence.reach_grew


def test_node_whose_neighbours_have_all_fallen_looks_twice_as_far():
    evidence = Evidence()
    look(evidence, 0.0, *ring(NEIGHBOURS, sentinel_stands=False))
    assert evidence.reach_grew
    assert evidence.reach == 2 * NEIGHBOURS
    look(evidence, 0.0, *ring(2 * NEIGHBOURS, sentinel_stands=False))
    assert evidence.reach == 4 * NEIGHBOURS


def test_node_whose_neighbours_are_quiet_looks_twice_as_far():
    evidence = Evidence()
    look(evidence, 0.0, *ring(NEIGHBOURS))
    look(evidence, SILENCE / 2 - 0.1, *ring(NEIGHBOURS))
    assert not evidence.reach_grew
    look(evidence, SILENCE / 2, *ring(NEIGHBOURS))
    assert evidence.reach_grew


def test_node_that_has_seen_every_member_looks_no_farther():
    evidence = Evidence()
    look(evidence, 0.0, *ring(NEIGHBOURS - 1, sentinel_stands=False))
    assert evidence.reach == NEIGHBOURS
    assert not evidence.reach_grew


def test_holder_far_away_says_nothing_about_the_neighbours():
    evidence = Evidence()
    look(evidence, 0.0, *ring(NEIGHBOURS, sentinel_stands=False), member("a00"))
    assert evidence.reach_grew


def test_node_looks_at_its_neighbours_again_when_one_of_them_has_renewed():
    evidence = Evidence()
    look(evidence, 0.0, *ring(NEIGHBOURS, sentinel_stands=False))
    look(evidence, 0.1, *ring(2 * NEIGHBOURS))
    assert evidence.reach == 2 * NEIGHBOURS, "a member that was seen only now may be silent"
    look(evidence, 0.2, *ring(2 * NEIGHBOURS, renewals=1))
    assert evidence.reach == NEIGHBOURS


def test_neighbours_that_look_at_nobody_do_not_hide_those_behind_them():
    """Candidates of tenure.manual renew, and end nobody."""
    evidence = Evidence()
    look(evidence, 0.0, *ring(NEIGHBOURS, looks=False))
    assert evidence.reach == 2 * NEIGHBOURS
    look(evidence, 0.1, *ring(2 * NEIGHBOURS, looks=False, renewals=1))
    assert evidence.reach == 4 * NEIGHBOURS, "a renewal of theirs does not make the reach short again"
