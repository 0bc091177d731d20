"""The control connection is lost. The node finds out what that means (R2b)."""

from __future__ import annotations

import pytest

from tenure.core.messages import Held, Join, Open, Opened, Renew, Resume, Stand, Standing
from tenure.core.servers import Server
from tenure.events import Deposed, Elected, Resumed, Suspended
from tests.unit.core.scripted import CONFIRMED, EVERY, FAILS, LOST, RESTARTED, SERVER, TRUST, ScriptedNode, leader

AFTER_A_RESTART = {Open: Opened(RESTARTED, CONFIRMED)}


def in_doubt(**options) -> ScriptedNode:
    node = leader("r", **options)
    node.protocol.lost_control(1.0)
    return node


def test_instant_leader_suspends_at_once_and_loses_nothing_yet():
    node = in_doubt()
    assert (node.phase, node.believes(1.0)) == ("DOUBT", {})
    assert node.news() == [Suspended("r", 1)]


def test_strict_leader_goes_on_until_its_trust_ends():
    node = in_doubt(takeover="strict")
    assert (node.phase, node.believes(1.0)) == ("LIVE", {"r": 1})
    assert node.news() == []


def test_node_without_a_sentinel_has_nothing_to_doubt():
    assert in_doubt(sentinels=False).phase == "LIVE"


def test_renewal_that_loses_the_connection_is_a_doubt():
    node = leader("r")
    node.run(EVERY, {Renew: LOST})
    assert node.phase == "DOUBT"


def test_renewal_that_only_fails_is_not():
    node = leader("r")
    node.run(EVERY, {Renew: FAILS})
    assert (node.phase, node.news()) == ("LIVE", [])


def test_restart_of_the_server_lets_the_term_go_on():
    node = in_doubt()
    assert node.kinds(1.0, AFTER_A_RESTART) == [Open, Resume]
    assert node.news() == [Suspended("r", 1), Resumed("r", 1)]
    assert node.believes(1.0) == {"r": 1}
    assert node.protocol.trusted_until == 1.0 + TRUST


def test_cut_connection_ends_the_term_because_the_others_have_proof():
    node = in_doubt()
    assert Join in node.kinds(1.0)
    assert node.news() == [Suspended("r", 1), Deposed("r", 1, "the connection was cut"), Elected("r", 2)]


def test_term_is_lost_as_soon_as_the_same_server_accepts_a_connection():
    node = in_doubt()
    node.protocol.server_answered(SERVER.start, 1.1)
    assert node.news()[-1] == Deposed("r", 1, "the connection was cut")


def test_restarted_server_that_accepts_a_connection_ends_nothing():
    node = in_doubt()
    node.protocol.server_answered(RESTARTED.start, 1.1)
    assert node.news() == [Suspended("r", 1)]


def test_server_that_answers_ends_nothing_where_there_is_no_doubt():
    node = leader("r", takeover="strict")
    node.protocol.server_answered(SERVER.start, 1.1)
    assert node.news() == []


def test_promoted_server_ends_the_term_in_either_mode():
    for takeover in ("instant", "strict"):
        node = in_doubt(takeover=takeover)
        node.run(1.0, {Open: Opened(SERVER._replace(incarnation="system:2"), CONFIRMED)})
        assert node.news()[-1] == Deposed("r", 1, "the server was replaced")


PROMOTED = Server("start 9", "system:2", 2, promoted=True)
LOSES_NOTHING = CONFIRMED._replace(loses_nothing=True)


@pytest.mark.parametrize("takeover", ["instant", "strict"])
def test_term_goes_on_across_a_promotion_that_lost_nothing(takeover):
    node = in_doubt(takeover=takeover)
    held = Standing(alive=True, held=(Held("r", 1),), confirmed=LOSES_NOTHING)
    requests = node.run(1.0, {Open: Opened(PROMOTED, LOSES_NOTHING), Resume: held})
    (resume,) = [request for request in requests if isinstance(request, Resume)]
    assert (resume.was, resume.server, resume.member.key is None) == ("system:1", PROMOTED, takeover == "strict")
    assert node.news() == [Suspended("r", 1), Resumed("r", 1)]
    assert node.believes(1.0) == {"r": 1}
    assert Stand in map(type, requests), "the candidacy may be missing there"


@pytest.mark.parametrize(
    "there",
    [
        Opened(PROMOTED, CONFIRMED),
        Opened(PROMOTED._replace(place="restored"), LOSES_NOTHING),
        Opened(PROMOTED._replace(incarnation="another:2"), LOSES_NOTHING),
        Opened(Server("start 9", "system:1", place="restored"), LOSES_NOTHING),
    ],
    ids=["may lose", "a dump", "another system", "the same timeline"],
)
def test_term_is_over_on_a_server_that_may_lack_commits(there):
    node = in_doubt()
    requests = node.run(1.0, {Open: there})
    assert Resume not in map(type, requests)
    assert node.news()[1] == Deposed("r", 1, "the server was replaced")


def test_resume_whose_answer_was_lost_on_a_promoted_server_is_tried_again_in_strict_mode():
    node = in_doubt(takeover="strict")
    there = {Open: Opened(PROMOTED, LOSES_NOTHING)}
    node.run(1.0, there | {Resume: LOST})
    assert [request.epoch for request in node.run(1.1, there) if isinstance(request, Resume)] == [2]
    assert node.news() == [Suspended("r", 1), Resumed("r", 1)], "announced once"


def test_term_whose_trust_ended_before_the_promotion_was_found_is_not_resumed():
    node = in_doubt()
    node.run(TRUST, {Open: Opened(PROMOTED, LOSES_NOTHING), Resume: Standing(alive=True, held=(Held("r", 1),))})
    assert Resumed("r", 1) not in node.news()


def test_doubt_that_lasts_ends_the_term_at_the_deadline():
    node = in_doubt()
    node.run(1.0, {Open: LOST})
    assert node.protocol.deadline() == TRUST
    node.protocol.expire(TRUST)
    assert node.news()[-1] == Deposed("r", 1, "lapsed")


def test_connection_that_breaks_while_resuming_is_a_doubt_again():
    node = in_doubt()
    node.run(1.0, AFTER_A_RESTART | {Resume: LOST})
    assert node.phase == "DOUBT"
    node.run(1.1, AFTER_A_RESTART)
    assert node.news() == [Suspended("r", 1), Resumed("r", 1)], "announced once"


def test_next_doubt_is_decided_by_the_server_on_which_the_node_resumed():
    node = in_doubt()
    node.run(1.0, AFTER_A_RESTART)
    node.protocol.lost_control(2.0)
    node.run(2.0, AFTER_A_RESTART)
    assert Deposed("r", 1, "the connection was cut") in node.news()


def test_connection_that_is_lost_after_the_deadline_suspends_nothing():
    node = leader("r")
    node.protocol.lost_control(TRUST)
    assert node.news() == [Deposed("r", 1, "lapsed")]


def test_resume_that_fails_is_tried_again_after_a_pause():
    node = in_doubt()
    node.run(1.0, AFTER_A_RESTART | {Resume: FAILS})
    assert (node.phase, node.kinds(1.0)) == ("RESUMING", [])
    assert node.kinds(1.05) == [Resume]


def test_member_that_was_ended_meanwhile_does_not_resume():
    node = in_doubt()
    node.run(1.0, AFTER_A_RESTART | {Resume: Standing(alive=False)})
    assert Deposed("r", 1, "the membership was ended") in node.news()


def test_strict_node_renews_as_soon_as_it_is_connected_again():
    node = in_doubt(takeover="strict")
    assert node.kinds(1.0)[:2] == [Open, Renew]


def test_connection_through_a_pooler_takes_no_sentinel():
    node = ScriptedNode()
    requests = node.run(0.0, {Open: Opened(SERVER, CONFIRMED, sentinels=False)})
    assert requests[1].member.key is None
