"""An election: standing, waiting, leading, handing over, and hearing of it. The same on every database."""

from __future__ import annotations

import logging
import queue
import threading
import time

import pytest

import tenure
from tenure import ConfigError, Deposed, Elected, LeaderChanged, NotLeader, WaitTimeout
from tests.support.marks import sync_only
from tests.support.store_by_hand import QUICK, Desk, Nodes, connected, execute, renewals, until


def wait_for_event(events, kind, timeout=20):
    """The next event of a kind. The reader runs on a thread of its own, so that a missing event fails in time."""
    found = queue.Queue()
    threading.Thread(target=lambda: found.put(next(e for e in events if isinstance(e, kind))), daemon=True).start()
    return found.get(timeout=timeout)


@pytest.mark.twin("postgres")
def test_standing_twice_is_standing_once(store_url):
    with Nodes(store_url) as nodes:
        node = nodes("a")
        election = node.election("r")
        assert node.election("r") is election
        assert election.wait(20).token == 1
        assert [candidate.name for candidate in election.candidates()] == ["a"]


def test_exactly_one_of_many_leads(store_url):
    with Nodes(store_url) as nodes:
        elections = [nodes(f"n{number}").election("r") for number in range(6)]
        until(lambda: any(election.is_leader for election in elections), "a leader")
        until(lambda: len(elections[0].candidates()) == 6, "all standing")
        assert sum(election.is_leader for election in elections) == 1
        (leading,) = [election for election in elections if election.is_leader]
        assert {election.leader() for election in elections} != {None}
        assert {election.leader().member_id for election in elections} == {leading.term.member_id}


@pytest.mark.twin("postgres")
def test_wait_returns_the_current_term_at_once(store_url):
    with Nodes(store_url) as nodes:
        election = nodes("a").election("r")
        term = election.wait(20)
        assert election.wait(0) is term
        assert election.term is term


@pytest.mark.twin("postgres")
def test_wait_runs_out_of_time_with_an_error_of_both_kinds(store_url):
    with Nodes(store_url) as nodes:
        _, standby = nodes.pair("r")
        with pytest.raises(WaitTimeout, match=r"role 'r': not elected within 0\.1 s") as error:
            standby.wait(0.1)
        assert isinstance(error.value, TimeoutError)
        assert not standby.is_leader
        assert standby.term is None


def test_leader_knows_and_shows_its_term(store_url):
    with Nodes(store_url, metadata={"zone": "b", "ports": [1, 2]}) as nodes:
        leads, stands = nodes.pair("r")
        term = leads.term
        assert leads.is_leader
        assert not stands.is_leader
        assert term.valid
        assert 0 < term.remaining <= 10
        term.ensure()
        assert "token=1 valid" in repr(term)
        info = stands.leader()
        assert (info.role, info.token, info.member_id, info.name) == ("r", 1, term.member_id, "leader")
        assert 0 <= info.renewed_ago < 30
        assert abs(info.since.timestamp() - time.time()) < 3600
        first, second = stands.candidates()
        assert (first.name, second.name) == ("leader", "standby")
        assert first.metadata == {"zone": "b", "ports": [1, 2]}
        assert (first.takeover, first.ttl, first.member_id) == ("instant", 10.0, term.member_id)


@pytest.mark.twin("postgres")
def test_role_that_nobody_leads_has_no_leader_and_no_history(store_url):
    with Nodes(store_url) as nodes:
        election = nodes("a").election("r")
        election.wait(20)
        election.withdraw()
        until(lambda: election.leader() is None, "vacant")
        assert election.candidates() == []
        (record,) = election.history()
        assert (record.token, record.name, record.reason) == (1, "a", "resigned")
        assert record.began <= record.ended


# --- handing over -------------------------------------------------------------------------------------------


def test_resigning_hands_over_with_a_greater_token(store_url):
    with Nodes(store_url, ttl=30) as nodes:
        leads, stands = nodes.pair("r")
        term = leads.term
        began = time.monotonic()
        leads.resign()
        assert not leads.is_leader
        assert not term.valid
        assert term.lost_reason == "resigned"
        assert stands.wait(20).token == 2
        assert time.monotonic() - began < 5
        assert not leads.is_leader


def test_resigning_to_a_named_candidate_passes_others_by(store_url):
    with Nodes(store_url) as nodes:
        leads, _ = nodes.pair("r")
        others = [nodes(f"n{number}").election("r") for number in range(3)]
        until(lambda: len(leads.candidates()) == 5, "all standing")
        leads.resign(to="n2")
        assert others[2].wait(20).token == 2
        others[2].resign(to=next(c.member_id for c in leads.candidates() if c.name == "n0"))
        assert others[0].wait(20).token == 3


@pytest.mark.parametrize("to", ["nobody", "leader"])
@pytest.mark.twin("postgres")
def test_resigning_to_somebody_who_does_not_stand_changes_nothing(store_url, to):
    with Nodes(store_url) as nodes:
        leads, _ = nodes.pair("r")
        with pytest.raises(
            ConfigError, match=f"no other candidate is named '{to}'; the other candidates are 'standby'"
        ):
            leads.resign(to=to)
        assert leads.is_leader
        assert leads.term.token == 1


@pytest.mark.parametrize("to", ["nobody", "standby"])
@pytest.mark.twin("postgres")
def test_a_term_that_is_over_can_be_handed_to_nobody(store_url, to):
    with Nodes(store_url) as nodes:
        leads, stands = nodes.pair("r")
        term = leads.term
        term.resign()
        stands.wait(20)
        term.resign()  # again: it is given up already, which is what was asked for
        with pytest.raises(tenure.LeadershipLost, match=r"token 1 is over \(resigned\)"):
            term.resign(to=to)
        assert stands.is_leader


@pytest.mark.twin("postgres")
def test_resigning_to_an_ambiguous_name_asks_for_the_id(store_url):
    with Nodes(store_url) as nodes:
        leads, _ = nodes.pair("r")
        nodes("standby").election("r")
        until(lambda: len(leads.candidates()) == 3, "all standing")
        with pytest.raises(ConfigError, match="2 candidates are named 'standby'; give an id") as error:
            leads.resign(to="standby")
        assert leads.is_leader
        for candidate in leads.candidates():
            assert (candidate.member_id in str(error.value)) == (candidate.name == "standby")


@pytest.mark.twin("postgres")
def test_only_a_leader_can_resign(store_url):
    with Nodes(store_url) as nodes:
        leads, stands = nodes.pair("r")
        with pytest.raises(NotLeader, match="does not lead"):
            stands.resign()
        assert leads.is_leader


def test_resigned_leader_leads_again_where_nobody_else_stands(store_url):
    with Nodes(store_url, ttl=30) as nodes:
        election = nodes("a").election("r")
        election.wait(20)
        began = time.monotonic()
        election.resign()
        assert election.wait(20).token == 2
        assert time.monotonic() - began < 5, "it need not stand back"


def test_withdrawing_hands_over_and_ends_the_candidacy(store_url):
    with Nodes(store_url) as nodes:
        leads, stands = nodes.pair("r")
        leads.withdraw()
        assert not leads.is_leader
        assert stands.wait(20).token == 2
        until(lambda: len(stands.candidates()) == 1, "one candidate")
        stands.resign()
        assert stands.wait(20).token == 3


def test_withdrawn_candidate_can_stand_again(store_url):
    with Nodes(store_url, ttl=30) as nodes:
        node = nodes("a")
        node.election("r").wait(20)
        node.election("r").withdraw()
        until(lambda: node.election("other").leader(), "withdrawn for long enough")
        assert node.election("r").wait(20).token == 2


def test_history_is_newest_first_and_says_why_terms_ended(store_url):
    with Nodes(store_url) as nodes:
        election = nodes("a").election("r")
        for token in range(1, 5):
            assert election.wait(20).token == token
            if token < 4:
                election.resign()
        records = election.history(limit=3)
        assert [record.token for record in records] == [4, 3, 2]
        assert [record.reason for record in records] == [None, "resigned", "resigned"]
        assert records[0].ended is None
        assert len(election.history()) == 4


def test_clean_leave_is_taken_over_at_once(store_url):
    with Nodes(store_url, ttl=30) as nodes:
        _, stands = nodes.pair("r")
        began = time.monotonic()
        nodes._started[0].close()
        assert stands.wait(20).token == 2
        assert time.monotonic() - began < 5
        assert stands.history()[1].reason == "left"


# --- hearing of it ------------------------------------------------------------------------------------------


def test_events_tell_of_election_and_loss(store_url):
    with Nodes(store_url) as nodes:
        first = nodes("first")
        first.election("r").wait(20)  # so that the reader is there before the other node is elected
        election = nodes("a").election("r")
        events = election.events()
        first.close()
        assert wait_for_event(events, Elected) == Elected("r", 2)
        election.resign()
        assert wait_for_event(events, Deposed) == Deposed("r", 2, "resigned")
        assert wait_for_event(events, Elected) == Elected("r", 3)


def test_standby_hears_who_leads_now(store_url):
    with Nodes(store_url) as nodes:
        leads, stands = nodes.pair("r")
        events = stands.events()
        first = wait_for_event(events, LeaderChanged)
        assert (first.token, first.name) == (1, "leader")
        third = nodes("third").election("r")
        until(lambda: len(leads.candidates()) == 3, "all standing")
        leads.resign(to="third")
        member_id = third.wait(20).member_id
        until(lambda: wait_for_event(events, LeaderChanged) == LeaderChanged("r", 2, member_id, "third"))


@pytest.mark.twin("postgres")
def test_events_end_with_the_node(store_url):
    with Nodes(store_url) as nodes:
        node = nodes("a")
        election = node.election("r")
        election.wait(20)
        events = election.events()
        node.close()
        assert Deposed("r", 1, "left") in list(events)
        assert list(events) == []


def test_slow_reader_loses_the_oldest_events_and_blocks_nobody(sqlite_url, monkeypatch):
    monkeypatch.setattr("tenure.election.EVENTS_KEPT", 3)
    monkeypatch.setattr("tenure.aio.election.EVENTS_KEPT", 3)
    with Nodes(sqlite_url) as nodes:
        node = nodes("a")
        election = node.election("r")
        events = election.events()
        for token in range(1, 6):
            assert election.wait(20).token == token
            election.resign()
        node.close()
        kept = list(events)
        assert 1 <= len(kept) <= 3
        assert kept[0] != Elected("r", 1)


@sync_only
@pytest.mark.twin("postgres")
def test_callback_that_raises_or_blocks_hurts_nobody(store_url, caplog):
    release = threading.Event()
    heard = queue.Queue()

    def fail(event):
        raise RuntimeError(f"callback of {event.role}")

    with Nodes(store_url, **QUICK) as nodes:
        election = nodes("a").election("r")
        election.on_event(fail)
        election.on_event(lambda _: release.wait(30))
        election.on_event(heard.put)
        term = election.wait(20)
        until(lambda: renewals(store_url)[0] >= 4, "renewals that go on")
        assert term.valid
        assert heard.empty()
        release.set()
        assert heard.get(timeout=20).role == "r"
    assert "a callback failed" in caplog.text


def test_lost_term_is_reported_to_whoever_asked(store_url):
    with Nodes(store_url) as nodes:
        election = nodes("a").election("r")
        term = election.wait(20)
        told = queue.Queue()
        term.on_lost(told.put)
        waiting = threading.Thread(target=lambda: told.put(term.wait_lost(30)))
        waiting.start()
        election.resign()
        assert {told.get(timeout=20), told.get(timeout=20)} == {term, True}
        waiting.join()
        term.on_lost(told.put)
        assert told.get(timeout=20) is term, "too late to wait, so at once"
        assert term.wait_lost(0)
        with pytest.raises(tenure.LeadershipLost, match=r"token 1 is over \(resigned\)"):
            term.ensure()
        assert term.remaining == 0
    term.on_lost(told.put)
    assert told.get(timeout=20) is term, "and still after the node was closed"
    until(lambda: not [thread for thread in threading.enumerate() if "tenure-callbacks-a" in thread.name])


@pytest.mark.twin("postgres")
def test_term_that_was_not_lost_says_so(store_url):
    with Nodes(store_url) as nodes:
        assert not nodes("a").election("r").wait(20).wait_lost(0.05)


def test_member_that_was_ended_elsewhere_loses_its_term_and_comes_back_as_another(store_url):
    with Nodes(store_url, **QUICK) as nodes, Desk(store_url) as desk:
        node = nodes("a")
        term = node.election("r").wait(20)
        until(lambda: desk.end(term.member_id), "ended")  # its count may move on between the look and the end
        assert term.wait_lost(20)
        assert term.lost_reason == "the membership was ended"
        again = node.election("r").wait(20)
        assert again.token == 2
        assert again.member_id != term.member_id
        assert node.member_id == again.member_id


def test_roles_of_one_node_are_independent(store_url):
    with Nodes(store_url) as nodes:
        node = nodes("a")
        one, other = node.election("one").wait(20), node.election("other").wait(20)
        node.election("one").resign()
        assert not one.valid
        assert other.valid
        assert node.election("other").term is other


def test_nodes_that_take_short_turns_do_not_all_stand_back(store_url):
    """Each resigns after its turn and stands back for a TTL, but not from a role that somebody else has had since."""
    with Nodes(store_url, ttl=30) as nodes:
        elections = [nodes(name).election("r") for name in ("a", "b")]
        for token in range(1, 6):
            leads = until(lambda: next((one for one in elections if one.is_leader), None), f"token {token}", 15)
            assert leads.term.token == token
            leads.resign()


def test_wait_lost_compares_with_the_clock_as_every_read_does(sqlite_url):
    """A process that was paused may come back to its wait before any of the node's threads has run."""
    with Nodes(sqlite_url, ttl=1) as nodes:
        node = nodes("a")
        term = node.election("r").wait(20)
        protocol = node._engine.protocol
        expire = protocol.expire
        protocol.expire = lambda now: not threading.current_thread().name.startswith("tenure-") and expire(now)
        with connected(sqlite_url, isolation_level=None) as connection:
            connection.execute("begin immediate")  # no renewal comes through
            until(lambda: not term.valid, "trust has run out, and nobody has said so")
            assert term.lost_reason is None
            assert term.wait_lost(0.01)
            connection.rollback()


def test_filter_of_the_applications_logs_that_raises_keeps_no_event_from_the_application(sqlite_url, caplog):
    """Both terms end in one step. Nothing may be lost of the second, and the threads of the node go on."""

    def fails(record):
        raise RuntimeError(f"a filter that fails: {record.msg}")

    lost = []
    with Nodes(sqlite_url) as nodes, caplog.at_level(logging.INFO, "tenure.node"):
        node = nodes("a")
        terms = [node.election(role).wait(20) for role in ("r", "s")]
        for term in terms:
            term.on_lost(lambda term: lost.append((term.role, term.lost_reason)))
        logger = logging.getLogger("tenure.node")
        logger.addFilter(fails)
        try:
            node.close()
        finally:
            logger.removeFilter(fails)
        until(lambda: sorted(lost) == [("r", "left"), ("s", "left")], "both ends")
        assert [term.lost_reason for term in terms] == ["left", "left"]
        assert nodes("b").election("r").wait(20).token == 2


def test_node_leads_again_although_the_applications_logs_raise(postgres_url, caplog):
    """The error of a filter ended the thread that would have connected again."""

    def fails(record):
        raise RuntimeError(f"a filter that fails: {record.msg}")

    with Nodes(postgres_url) as nodes, caplog.at_level(logging.INFO, "tenure.engine"):
        election = nodes("a").election("r")
        election.wait(20)
        logger = logging.getLogger("tenure.engine")
        logger.addFilter(fails)
        try:
            execute(
                postgres_url,
                "select pg_terminate_backend(pid) from pg_stat_activity where application_name like 'tenure control%'",
            )
            until(lambda: not election.is_leader, "the loss")
            assert election.wait(20).token == 2
        finally:
            logger.removeFilter(fails)
