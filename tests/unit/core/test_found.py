"""Faults that the simulator and the torture have found in the core, each as the shortest story that shows it.

The ledgers are ``tests/verification/simulation/FOUND.md`` and ``tests/verification/torture/LEDGER.md``.
"""

from __future__ import annotations

from tenure.core.backoff import HEED_AT_ONCE, HEED_EVERY_S
from tenure.core.messages import Acquire, Acquired, End, Held, Join, Leave, Open, Opened, Renew, Resume, Stand, Standing
from tenure.core.roles import Roles
from tenure.core.servers import Confirmed, Server
from tenure.events import Deposed, Elected, Resumed, Suspended
from tests.unit.core.scripted import CONFIRMED, EVERY, LOST, RESTARTED, SERVER, ScriptedNode, leader, member


def adopts(role: str, token: int = 1) -> Standing:
    return Standing(alive=True, held=(Held(role, token),), confirmed=CONFIRMED)


def test_term_that_was_adopted_is_not_acquired_again():
    node = ScriptedNode("r", takeover="strict")
    node.run(0.0, {Acquire: LOST})
    node.protocol.notified("vacant another r", 0.1)
    assert Acquire not in node.kinds(0.2, {Renew: adopts("r")})
    assert node.news() == [Elected("r", 1)]


def test_adopted_role_that_was_busy_is_not_acquired_again():
    roles = Roles(10.0, [])
    roles.stand("r")
    roles.stood(roles.stand_request("me"), 0.0)
    roles.acquired(roles.acquire_request("me", "name", 0), Acquired({}, busy=("r",)), 0.0, trusted=True)
    roles.reconcile((Held("r", 1),), 1.0, trusted=True)
    assert not roles.busy


def test_standing_again_does_not_acquire_what_was_adopted_meanwhile():
    news = []
    roles = Roles(10.0, news)
    roles.stand("r")
    request = roles.stand_request("me")
    roles.reconcile((Held("r", 1),), now=1.0, trusted=True)
    roles.stood(request, now=2.0)
    assert not roles.wanted
    assert news == [Elected("r", 1)]


def test_term_that_was_adopted_while_resuming_was_never_suspended():
    node = leader("r")
    node.protocol.stand("s")
    node.run(0.1, {Acquire: LOST})
    held = (Held("r", 1), Held("s", 2))
    node.run(0.2, {Open: Opened(RESTARTED, CONFIRMED), Resume: Standing(alive=True, held=held, confirmed=CONFIRMED)})
    assert node.news() == [Suspended("r", 1), Elected("s", 2), Resumed("r", 1)]


def test_proof_of_a_second_death_is_kept_while_the_first_member_is_ended():
    node = ScriptedNode()
    node.run(0.0)
    near = member("b", sentinel_stands=False)
    node.look(0.1, member("a"), near)
    first = node.protocol.control(0.2)
    node.look(0.3, member("a", sentinel_stands=False), near)
    node.protocol.answer(first, node._answer(first), 0.4)
    second = next(request for request in node.run(0.4) if isinstance(request, End))
    assert [verdict.member_id for verdict in (*first.verdicts, *second.verdicts)] == ["b", "a"]


def test_role_whose_row_was_deleted_is_registered_again():
    node = leader("r")
    requests = node.run(EVERY, {Renew: Standing(alive=True, confirmed=CONFIRMED)})
    assert node.news()[0] == Deposed("r", 1, "the role was taken")
    assert [request.roles for request in requests if isinstance(request, Stand)] == [("r",)]


def test_flood_of_notifications_causes_few_requests():
    node = ScriptedNode("r")
    node.run(0.0)
    node.look(0.0, member())
    renewals = 0
    for step in range(200):
        node.protocol.notified("vacant another", 0.01 * step)
        renewals += node.kinds(0.01 * step).count(Renew)
    assert HEED_AT_ONCE < renewals <= HEED_AT_ONCE + 2 / HEED_EVERY_S + 1


def test_resume_takes_a_key_that_no_client_could_know_and_a_higher_epoch():
    node = ScriptedNode()
    (_, join, *_) = node.run(0.0)
    node.protocol.lost_control(1.0)
    outcomes = {Open: Opened(RESTARTED, CONFIRMED), Resume: LOST}
    resumes = [request for now in (1.0, 1.2) for request in node.run(now, outcomes) if type(request) is Resume]
    assert [resume.epoch for resume in resumes] == [1, 2]
    assert len({join.member.key, *(resume.member.key for resume in resumes)}) == 3


def test_node_that_is_closed_without_a_connection_opens_one_to_tell_the_others():
    node = leader("r")
    node.protocol.lost_control(1.0)
    node.protocol.leave(1.0)
    assert node.kinds(1.0) == [Open, Leave]
    assert node.phase == "GONE"


def test_node_that_is_closed_without_a_connection_gives_up_after_a_while():
    node = leader("r")
    node.protocol.lost_control(1.0)
    node.protocol.leave(1.0)
    node.run(1.0, {Open: LOST})
    assert node.kinds(3.0) == []
    assert node.phase == "GONE"


def test_leaving_says_which_terms_were_resigned_and_not_vacated():
    node = leader("r")
    node.roles.held_for_work.add("r")
    node.protocol.resign("r", 1.0)
    node.protocol.leave(1.0)
    (request,) = node.run(1.0)
    assert request.given_up == (("r", 1),)


def test_file_that_was_replaced_under_the_node_ends_its_terms():
    node = leader("r", takeover="strict")
    node.protocol.lost_control(1.0)
    other_file = SERVER._replace(file="another inode")
    assert Join in node.kinds(1.0, {Open: Opened(other_file, CONFIRMED)})
    assert node.news()[0] == Deposed("r", 1, "the file was replaced")


def test_restored_copy_on_the_same_server_is_another_server():
    node = leader("r", takeover="strict")
    node.protocol.lost_control(1.0)
    node.run(1.0, {Open: Opened(SERVER._replace(place="elsewhere"), CONFIRMED)})
    assert node.news() == [Deposed("r", 1, "the server was replaced")]


def test_namespace_that_a_promoted_replica_lacked_waits_for_any_lease():
    made_here = Confirmed("system:0", 0, max_ttl=2.0, ripe_ttl=2.0)
    assert made_here.made_on_a_promoted_server
    assert made_here.longest_lease == 60.0
    assert Confirmed("system:1", 0, max_ttl=2.0, ripe_ttl=2.0).longest_lease == 2.0
    assert Server("start", "system:2", 2).unconfirmed == made_here.incarnation
