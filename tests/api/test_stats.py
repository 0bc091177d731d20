"""What a node measures about itself: renewals, transitions, and when it last saw a role held."""

from __future__ import annotations

import dataclasses
import os
import re
import threading
from pathlib import Path

import anyio
import pytest

import tenure
from tenure.core import messages
from tenure.core.messages import Held, Joined, Renew, Standing, Vacancy
from tenure.core.roles import Roles
from tenure.core.servers import Server
from tenure.engine.recorder import REASONS, TRANSITIONS, StatsRecorder
from tenure.events import Deposed, Elected, EndReason, LeaderChanged, Resumed, Suspended
from tests.support.store_by_hand import QUICK, Desk, Nodes, connected, execute, fork, until

SOURCE = Path(tenure.__file__).parent / "core"
RENEW = Renew("me")


def role_of(node, role="r"):
    return next(one for one in node.stats().roles if one.role == role)


# --- the recorder by itself ---------------------------------------------------------------------------------


def test_every_reason_that_the_protocol_gives_has_a_word_of_its_own():
    """A reason without one would be counted as `other`, and no dashboard would know it."""
    texts = [(SOURCE / f"{name}.py").read_text() for name in ("protocol", "roles")]
    given = {EndReason[name] for text in texts for name in re.findall(r"EndReason\.([A-Z_]+)", text)}
    assert given == set(REASONS)
    assert len(set(TRANSITIONS)) == 3 + len(given)


def standing(*roles):
    """A node that stands for roles, as the database knows."""
    candidacy = Roles(10.0, [])
    recorder = StatsRecorder()
    for role in roles:
        candidacy.stand(role)
        recorder.stood(role, 0.0)
    candidacy.unregistered.clear()
    return recorder, candidacy


def test_latencies_are_counted_in_buckets_that_include_the_smaller_ones():
    recorder, candidacy = standing()
    for seconds in (0.0005, 0.001, 0.002, 0.3, 99.0):
        recorder.answered(RENEW, Standing(alive=True), candidacy, seconds, 1.0)
    latency = recorder.renewals
    assert latency.count == 5
    assert latency.seconds == pytest.approx(99.3035)
    counts = dict(latency.buckets)
    assert (counts[0.001], counts[0.0025], counts[0.25], counts[0.5], counts[10.0]) == (2, 3, 3, 4, 4)
    assert latency.buckets[-1] == (float("inf"), 5)
    assert [count for _, count in latency.buckets] == sorted(count for _, count in latency.buckets)


def test_only_what_renews_the_lease_counts_as_a_renewal():
    recorder, candidacy = standing()
    recorder.answered(messages.Tidy(), messages.Done(), candidacy, 1.0, 1.0)
    recorder.failed(messages.Tidy())
    recorder.failed(messages.Open())
    assert (recorder.renewals.count, recorder.renewals_failed) == (0, 0)
    recorder.answered(RENEW, Standing(alive=False), candidacy, 1.0, 1.0)
    recorder.failed(RENEW)
    assert (recorder.renewals.count, recorder.renewals_failed) == (0, 2)


def test_joining_counts_as_the_beginning_of_the_lease_only_if_it_worked():
    recorder, candidacy = standing()
    recorder.started(1.0)
    join = messages.Join(messages.Member("me", "a", 10.0, "instant", 1), Server("start", "line"))
    recorder.answered(join, Joined(sentinel=False), candidacy, 0.1, 2.0)
    assert recorder.renewed_at == 1.0
    recorder.answered(join, Joined(sentinel=True), candidacy, 0.1, 3.0)
    assert recorder.renewed_at == 3.0
    assert recorder.renewals.count == 0


def test_a_role_that_is_not_vacant_is_seen_to_be_held():
    recorder, candidacy = standing("held", "vacant", "unregistered", "dropped", "mine")
    candidacy.unregistered.add("unregistered")  # the answer is silent about it
    candidacy.holding["mine"] = 4
    answer = Standing(alive=True, held=(Held("mine", 4), Held("dropped", 3)), vacant=(Vacancy("vacant", 2),))
    recorder.answered(RENEW, answer, candidacy, 0.1, 7.0)
    seen = {role: recorder.seen[role] for role in recorder.transitions}
    assert seen == {"held": 7.0, "mine": 7.0, "vacant": 0.0, "unregistered": 0.0, "dropped": 0.0}


def test_a_leader_that_slept_past_its_deadline_was_last_seen_at_the_deadline():
    recorder, _ = standing("r")
    recorder.happened(Elected("r", 1), 10.0, float("-inf"))
    assert recorder.seen["r"] == 10.0
    recorder.happened(Deposed("r", 1, "lapsed"), 500.0, trusted_before=19.0)
    assert recorder.seen["r"] == 19.0


def test_a_term_that_ends_in_doubt_was_last_seen_when_the_doubt_began():
    recorder, _ = standing("r")
    recorder.happened(Elected("r", 1), 10.0, float("-inf"))
    recorder.happened(Suspended("r", 1), 12.0, trusted_before=19.0)
    recorder.happened(Deposed("r", 1, "lapsed"), 19.0, trusted_before=float("-inf"))
    assert recorder.seen["r"] == 12.0


def test_transitions_are_counted_by_role_and_kind_and_nothing_else_is():
    recorder, _ = standing("r", "other")
    for event in (Elected("r", 1), Suspended("r", 1), Resumed("r", 1), Deposed("r", 1, "the connection was cut")):
        recorder.happened(event, 1.0, 9.0)
    recorder.happened(LeaderChanged("r", 2, "id", "somebody"), 2.0, 9.0)
    recorder.happened(Elected("never stood for", 1), 2.0, 9.0)
    recorder.happened(Deposed("other", 1, "a reason of tomorrow"), 2.0, 9.0)
    counts = {kind: count for kind, count in recorder.transitions["r"].items() if count}
    assert counts == {"elected": 1, "suspended": 1, "resumed": 1, "cut": 1}
    assert recorder.transitions["other"]["other"] == 1
    assert list(recorder.transitions) == ["r", "other"]


def test_who_stands_again_begins_to_count_again_and_keeps_its_numbers():
    recorder, _ = standing("r")
    recorder.happened(Elected("r", 1), 1.0, 9.0)
    recorder.stood("r", 60.0)
    assert recorder.seen["r"] == 60.0
    assert recorder.transitions["r"]["elected"] == 1


# --- in a node ----------------------------------------------------------------------------------------------


def test_leader_and_follower_show_what_they_are(store_url):
    with Nodes(store_url, **QUICK) as nodes:
        leads, stands = nodes.pair("r")
        first, second = nodes._started
        renewed = first.stats().renewals.count
        until(lambda: first.stats().renewals.count > renewed and second.stats().renewals.count, "renewals")
        leader, follower = first.stats(), second.stats()
        assert (leader.node, leader.namespace, leader.ttl) == ("leader", "default", 10.0)
        assert 0 < leader.trust_remaining <= 9
        assert 0 < follower.trust_remaining <= 9  # it has a lease, too
        assert leader.renewals.seconds > 0
        assert (leader.renewals_failed, follower.renewals_failed) == (0, 0)
        mine, theirs = role_of(first), role_of(second)
        assert (mine.standing, mine.is_leader, mine.token) == (True, True, 1)
        assert (theirs.standing, theirs.is_leader, theirs.token) == (True, False, 0)
        assert mine.leader_seen_ago == 0
        assert mine.transitions["elected"] == 1
        assert not any(theirs.transitions.values())
        # It stood longer ago than its last renewal: what it saw since is the leader.
        until(lambda: role_of(second).leader_seen_ago <= second.stats().renewed_ago + 0.01, "the leader seen")

        leads.resign()
        stands.wait(20)
        assert role_of(first).transitions["resigned"] == 1
        assert role_of(second).transitions["elected"] == 1
        assert role_of(second).token == 2


def test_time_since_a_leader_was_seen_grows_while_nobody_leads(store_url):
    """The role is reserved for a member that lives and never takes it."""
    with Nodes(store_url, **QUICK) as nodes, Desk(store_url) as desk:
        node = nodes("follower")
        held = desk.lead("r")
        election = node.election("r")
        until(lambda: node.stats().renewals.count > 1, "renewals")
        until(lambda: role_of(node).leader_seen_ago < 0.3, "the leader seen")
        table = "tenure.roles" if store_url.startswith("postgres") else "tenure_roles"
        execute(store_url, f"update {table} set holder = null, reserved_for = '{desk.id}' where name = '{held.role}'")
        until(lambda: role_of(node).leader_seen_ago > 1.5, "the time grows past several renewals")
        assert node.stats().renewed_ago < 1.5
        assert not election.is_leader


def test_time_since_a_leader_was_seen_grows_while_the_database_is_away(postgres_server, postgres_url):
    """On the leader from its doubt on, on the follower from its last renewal on; both show that they cannot renew."""
    with Nodes(postgres_url, ttl=30, renew_every=0.3) as nodes:
        leads, _ = nodes.pair("r")
        first, second = nodes._started
        term = leads.wait(20)
        until(lambda: role_of(second).leader_seen_ago < 0.3, "the leader seen")
        postgres_server.stop("immediate")
        until(lambda: not role_of(first).is_leader, "the leader in doubt")
        assert first.stats().trust_remaining == 0
        assert role_of(first).token == 0
        for node in (first, second):
            until(lambda node=node: role_of(node).leader_seen_ago > 1, "the time grows")
            assert node.stats().renewed_ago > 1
        postgres_server.start()
        until(lambda: term.valid, "the same term goes on")
        until(lambda: role_of(second).leader_seen_ago < 1, "the leader seen again")
        transitions = role_of(first).transitions
        assert (transitions["suspended"], transitions["resumed"]) == (1, 1)
        assert role_of(first).leader_seen_ago == 0


def test_renewals_that_get_no_answer_are_counted_as_failed(sqlite_url):
    with Nodes(sqlite_url, ttl=3, renew_every=0.3) as nodes:
        node = nodes("a")
        election = node.election("r")
        election.wait(20)
        with connected(sqlite_url) as connection:
            connection.execute("begin exclusive")
            until(lambda: node.stats().renewals_failed > 1, "failed renewals")
            until(lambda: role_of(node).transitions["lapsed"] == 1, "the term lapsed")
            assert role_of(node).leader_seen_ago < 20
            connection.rollback()
        before = node.stats().renewals.count
        until(lambda: node.stats().renewals.count > before, "renewals again")


def test_who_withdrew_shows_no_time_since_a_leader_was_seen(sqlite_url):
    with Nodes(sqlite_url, **QUICK) as nodes:
        node = nodes("a")
        election = node.election("r")
        election.wait(20)
        election.withdraw()
        gone = role_of(node)
        assert (gone.standing, gone.is_leader, gone.leader_seen_ago) == (False, False, None)
        assert gone.transitions["resigned"] == 1
        node.election("r").wait(20)
        assert role_of(node).transitions["elected"] == 2


def test_numbers_outlive_the_node_and_the_rest_is_empty_before_and_after_it(sqlite_url):
    node = tenure.Node(sqlite_url, **QUICK)
    empty = node.stats()
    assert (empty.renewals.count, empty.roles, empty.trust_remaining, empty.renewed_ago) == (0, (), 0, None)
    with node:
        assert node.stats().renewed_ago >= 0
        node.election("r").wait(20)
    closed = node.stats()
    assert (closed.trust_remaining, closed.renewed_ago) == (0, None)
    role = role_of(node)
    assert (role.standing, role.is_leader, role.leader_seen_ago) == (False, False, None)
    assert (role.transitions["elected"], role.transitions["left"]) == (1, 1)


def test_asking_waits_for_no_lock_and_what_it_gives_cannot_be_changed(sqlite_url):
    with Nodes(sqlite_url, **QUICK) as nodes:
        node = nodes("a")
        node.election("r").wait(20)
        answers = []
        with node._engine.lock:
            thread = threading.Thread(target=lambda: answers.append(node.stats()))
            thread.start()
            thread.join(10)
            assert answers
        with pytest.raises(dataclasses.FrozenInstanceError):
            answers[0].ttl = 1
        answers[0].roles[0].transitions["elected"] = 99
        assert role_of(node).transitions["elected"] == 1


def test_a_forked_child_has_nothing_to_show(sqlite_url):
    with Nodes(sqlite_url, **QUICK) as nodes:
        node = nodes("a")
        pid = fork()
        if pid == 0:
            try:
                node.stats()
            except tenure.NodeClosed:
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_lock_has_no_token_and_is_measured_all_the_same(postgres_url):
    with Nodes(postgres_url, mode="lock", **QUICK) as nodes:
        first, second = nodes("first"), nodes("second")
        first.election("r").wait(20)
        second.election("r")
        until(lambda: second.stats().renewals.count > 1 and role_of(second).leader_seen_ago < 0.3, "a holder seen")
        assert (role_of(first).is_leader, role_of(first).token) == (True, 0)
        assert not role_of(second).is_leader


# --- the events of a node -----------------------------------------------------------------------------------


def test_a_node_tells_of_its_terms_in_every_role_and_of_nobody_elses(sqlite_url):
    told = []
    with Nodes(sqlite_url, **QUICK) as nodes:
        node, other = nodes("a"), nodes("b")
        node.on_event(lambda _: 1 / 0)  # harms nobody
        node.on_event(told.append)
        node.election("one").wait(20)
        other.election("two").wait(20)
        seen = []
        node.election("two").on_event(seen.append)
        until(lambda: seen, "the other leader seen")
        node.election("three").wait(20)
    assert told == [Elected("one", 1), Elected("three", 1), Deposed("one", 1, "left"), Deposed("three", 1, "left")]


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_an_async_node_measures_and_tells_the_same_on_its_loop(sqlite_url, loop):
    told = []

    async def main():
        node = tenure.AsyncNode(sqlite_url, **QUICK)
        node.on_event(lambda event: told.append((event, threading.get_ident())))
        async with node:
            await node.election("r").wait(20)
            assert role_of(node).is_leader
        assert role_of(node).transitions["left"] == 1

    anyio.run(main, backend=loop)
    here = threading.get_ident()
    assert told == [(Elected("r", 1), here), (Deposed("r", 1, "left"), here)]


def test_only_what_can_be_called_is_taken_as_a_callback(sqlite_url):
    with pytest.raises(tenure.ConfigError, match="callback"):
        tenure.Node(sqlite_url).on_event("loud")
