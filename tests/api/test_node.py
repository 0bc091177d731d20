"""The node: starting, leading in a block or a loop, closing; and what it does where it cannot."""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import threading
import time

import pytest

import tenure
from tenure import ConfigError, Fenced, LeadershipLost, NodeClosed, WaitTimeout
from tenure.internals import engine_of
from tests.support.marks import sync_only
from tests.support.servers import free_port
from tests.support.store_by_hand import QUICK, Desk, Nodes, execute, renewals, until

# --- leading ------------------------------------------------------------------------------------------------


def test_lead_waits_its_turn_and_resigns_on_leaving(store_url):
    with Nodes(store_url, ttl=30) as nodes:
        first, second = nodes("first"), nodes("second")
        led = queue.Queue()

        def follow():
            with second.lead("r") as term:
                led.put(term.token)

        with first.lead("r") as term:
            assert term.token == 1
            thread = threading.Thread(target=follow)
            thread.start()
            until(lambda: len(first.election("r").candidates()) == 2, "the other one standing")
            assert led.empty()
        assert led.get(timeout=20) == 2
        thread.join()
        assert not term.valid


@sync_only
@pytest.mark.twin("postgres")
def test_late_callback_of_a_lead_that_has_ended_leaves_the_next_one_alone(store_url):
    """The application may keep the thread for callbacks busy: then `lead` learns late that its term was lost."""
    blocked, gate = threading.Event(), threading.Event()

    def block(_event):
        blocked.set()
        gate.wait(20)

    with tenure.Node(store_url) as node:
        node.election("other").on_event(block)
        assert blocked.wait(20)
        with node.lead("r", 20):
            pass
        with node.lead("r", 20) as term:
            gate.set()
            assert not term.wait_lost(0.5)
            term.ensure()


@pytest.mark.twin("postgres")
def test_lead_gives_up_after_its_timeout(store_url):
    with Nodes(store_url) as nodes:
        leader, other = nodes("leader"), nodes("other")
        with leader.lead("r"):
            with pytest.raises(WaitTimeout), other.lead("r", timeout=0.1):
                pytest.fail("the role is taken")
            until(lambda: len(leader.election("r").candidates()) == 1, "the candidacy ended with the wait")


def test_lead_reports_a_lost_term_on_leaving(store_url):
    with Nodes(store_url, **QUICK) as nodes, Desk(store_url) as desk:
        node = nodes("a")

        def lead():
            with node.lead("r") as term:
                until(lambda: desk.end(term.member_id), "ended")
                assert term.wait_lost(20)

        with pytest.raises(LeadershipLost, match="the membership was ended"):
            lead()


@sync_only
def test_lost_term_leaves_the_role_to_others_although_its_block_goes_on(sqlite_url):
    with Nodes(sqlite_url, **QUICK) as nodes, Desk(sqlite_url) as desk:
        node = nodes("a")

        def lead():
            with node.lead("r") as term:
                other = nodes("other").election("r")
                until(lambda: desk.end(term.member_id), "ended")
                assert term.wait_lost(20)
                assert other.wait(20).token > term.token
                until(lambda: node.member_id not in (None, term.member_id), "joined anew")
                until(lambda: [candidate.name for candidate in other.candidates()] == ["other"], "withdrawn")

        with pytest.raises(LeadershipLost):
            lead()


@sync_only
@pytest.mark.twin("postgres")
def test_exception_of_the_block_is_the_one_that_is_raised(store_url):
    with Nodes(store_url) as nodes:
        node = nodes("a")
        with pytest.raises(ZeroDivisionError), node.lead("r") as first:
            first.resign() or 1 / 0
        with node.lead("r", timeout=20) as term:
            assert term.token > first.token


def test_terms_yields_each_term_once(store_url):
    with Nodes(store_url, ttl=30) as nodes:
        node = nodes("a")
        tokens = []
        for term in node.terms("r"):
            tokens.append(term.token)
            if len(tokens) == 3:
                break
            with term:
                term.ensure()
        assert tokens == [1, 2, 3]
        assert term.lost_reason == "resigned", "on leaving the loop"


@sync_only
@pytest.mark.twin("postgres")
def test_term_block_swallows_its_own_loss_and_nothing_else(store_url):
    with Nodes(store_url) as nodes:
        terms = nodes("a").terms("r")
        with next(terms) as term:
            term.resign()
            term.ensure()
        with pytest.raises(ZeroDivisionError), next(terms) as term:
            term.token / 0
        terms.close()


@pytest.mark.twin("postgres")
def test_terms_end_with_the_node(store_url):
    with Nodes(store_url) as nodes:
        node = nodes("a")
        tokens = queue.Queue()

        def loop():
            for term in node.terms("r"):
                tokens.put(term.token)
                term.wait_lost()
            tokens.put("over")

        thread = threading.Thread(target=loop)
        thread.start()
        assert tokens.get(timeout=20) == 1
        node.close()
        assert tokens.get(timeout=20) == "over"
        thread.join()


def test_many_nodes_live_in_one_process(store_url):
    with Nodes(store_url, ttl=30) as nodes:
        roles = [f"r{number}" for number in range(8)]
        running = {role: nodes(f"node-of-{role}") for role in roles}
        assert [running[role].election(role).wait(20).token for role in roles] == [1] * 8
        assert len({node.member_id for node in running.values()}) == 8


# --- starting and closing -----------------------------------------------------------------------------------


@pytest.mark.twin("postgres")
def test_node_that_does_not_run_says_so(store_url):
    node = tenure.Node(store_url, name="a")
    with pytest.raises(NodeClosed, match=r"not running: use it inside `with` or `async with`, or call start\(\)"):
        node.election("r")
    assert node.member_id is None
    with node:
        election = node.election("r")
        election.wait(20)
        with pytest.raises(NodeClosed, match="was already started once"):
            node.start()
        assert election.is_leader, "the second start hurt nobody"
    node.close()
    for call in (election.wait, election.leader, election.candidates, election.history, election.withdraw):
        with pytest.raises(NodeClosed, match="make a new one"):
            call()
    with pytest.raises(NodeClosed):
        election.events()
    with pytest.raises(NodeClosed):
        node.start()
    assert not election.is_leader


@pytest.mark.twin("postgres")
def test_waiting_ends_when_the_node_is_closed(store_url):
    with Nodes(store_url) as nodes:
        _, stands = nodes.pair("r")
        raised = queue.Queue()

        def wait():
            try:
                stands.wait()
            except NodeClosed as error:
                raised.put(error)

        thread = threading.Thread(target=wait)
        thread.start()
        nodes._started[1].close()
        assert isinstance(raised.get(timeout=20), NodeClosed)
        thread.join()


@sync_only
def test_node_may_be_closed_from_its_own_callback(sqlite_url):
    node = tenure.Node(sqlite_url, name="closing").start()
    closed = threading.Event()

    def close(_):
        node.close()
        closed.set()

    node.election("r").on_event(close)
    assert closed.wait(20)
    until(lambda: not [thread for thread in threading.enumerate() if "-closing" in thread.name], "threads")


def test_node_waits_for_its_database_where_it_is_told_to(make_postgres_server):
    server = make_postgres_server(fsync=False)
    url = server.create_database()
    server.stop()
    node = tenure.Node(url, start="wait")
    starting = threading.Thread(target=node.start)
    starting.start()
    with contextlib.closing(node):
        assert starting.is_alive()
        server.start()
        starting.join(20)
        assert node.election("r").wait(20).token == 1


def test_node_that_waits_for_its_database_can_be_closed():
    node = tenure.Node(f"postgresql://127.0.0.1:{free_port()}/app", start="wait")
    outcome = queue.Queue()

    def start():
        try:
            node.start()
        except NodeClosed as error:
            outcome.put(error)

    thread = threading.Thread(target=start)
    thread.start()
    until(lambda: node._engine.running, "started")
    node.close()
    assert isinstance(outcome.get(timeout=20), NodeClosed)
    thread.join()


def test_ttl_above_the_namespaces_largest_is_refused(store_url):
    with Nodes(store_url) as nodes:
        nodes("a", ttl=60)
        with pytest.raises(ConfigError, match="ttl=61 is above the largest permitted in namespace 'default', 60"):
            tenure.Node(store_url, ttl=61).start()
        nodes("b", ttl=120, namespace="slow")
        nodes("c", ttl=119, namespace="slow")


def test_namespaces_do_not_see_each_other(store_url):
    with Nodes(store_url) as nodes:
        one, other = (nodes("same name", namespace=namespace).election("r") for namespace in ("one", "other"))
        assert one.wait(20).token == other.wait(20).token == 1
        assert len(one.candidates()) == len(other.candidates()) == 1
        assert one.leader().member_id != other.leader().member_id
        one.resign()
        assert one.wait(20).token == 2
        assert [record.token for record in other.history()] == [1]


def test_strict_and_lease_nodes_lead_too(store_url):
    with Nodes(store_url, ttl=30) as nodes:
        strict, lease = nodes("strict", takeover="strict"), nodes("lease", mode="lease")
        assert strict.election("r").wait(20)
        lease.election("r")
        until(lambda: len(strict.election("r").candidates()) == 2, "both standing")
        began = time.monotonic()
        strict.close()
        assert lease.election("r").wait(20).token == 2
        assert time.monotonic() - began < 5, "a clean leave needs no sentinel"


@pytest.mark.twin("postgres")
def test_node_works_in_a_process_with_a_thousand_open_files(store_url):
    """Descriptors above 1023 are more than select() can wait for."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 1300:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 1300), hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        with Nodes(store_url, **QUICK) as nodes:
            leads, stands = nodes.pair("r")
            until(lambda: renewals(store_url)[0] >= 2, "renewals")
            leads.resign()
            assert stands.wait(20).token == 2
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_connection_that_an_administrator_ends_costs_the_term_at_once_and_comes_back(every_postgres_url):
    url = every_postgres_url
    with Nodes(url, ttl=30) as nodes:
        election = nodes("a").election("r")
        term = election.wait(20)
        execute(
            url, "select pg_terminate_backend(pid) from pg_stat_activity where application_name ~ '^tenure control'"
        )
        assert term.wait_lost(20)
        assert term.lost_reason == "the connection was cut"
        assert election.wait(20).token == 2


@pytest.mark.parametrize("lane", ["tenure.store.control.ControlStore", "tenure.store.watch.WatchStore"])
@pytest.mark.twin("postgres")
def test_fault_of_our_own_is_told_and_survived(store_url, monkeypatch, caplog, lane):
    """A thread that died in silence would be a node that neither leads nor says why."""
    name, _, kind = lane.rpartition(".")
    work = getattr(__import__(name, fromlist=[kind]), kind)
    perform, faults = work.perform, []

    def fail_once(self, ask):
        if not faults and type(ask).__name__ in ("Acquire", "Look"):
            faults.append(ask)
            raise KeyError("a fault")
        return perform(self, ask)

    monkeypatch.setattr(work, "perform", fail_once)
    with Nodes(store_url) as nodes:
        leads, stands = nodes.pair("r")
        leads.resign()
        assert stands.wait(20)
    assert faults
    assert "because of a bug in Tenure" in caplog.text
    assert "KeyError: 'a fault'" in caplog.text


@sync_only
def test_refused_write_ends_the_term_and_the_loop_campaigns_again(store_url):
    with Nodes(store_url) as nodes:
        node = nodes("a")
        tokens = []
        for term in node.terms("r"):
            tokens.append(term.token)
            if len(tokens) == 2:
                break
            with term:
                node.election("r").resign()
                with term.transaction():
                    pytest.fail("the term is over")
        assert tokens == [1, 2]


@sync_only
def test_refusal_of_another_term_is_not_taken_for_the_end_of_this_one(store_url):
    with Nodes(store_url) as nodes:
        node = nodes("a")
        other = node.election("other").wait(20)
        node.election("other").resign()
        with pytest.raises(Fenced), next(node.terms("r")), other.transaction():
            pytest.fail("the other term is over")


@pytest.mark.twin("postgres")
def test_loop_that_goes_on_while_its_term_stands_is_told_so(store_url):
    with Nodes(store_url) as nodes:
        terms = nodes("a").terms("r")
        next(terms)
        with pytest.raises(ConfigError, match=r"the loop over terms\(\) went on before the term with token 1 was over"):
            next(terms)


@pytest.mark.twin("postgres")
def test_threads_of_a_node_import_nothing(store_url):
    """A child that is forked in the middle of an import waits for ever when it imports the same module."""
    program = """
import sys, time, tenure
node = tenure.Node(sys.argv[1], ttl=2)
before = set(sys.modules)
with node:
    election = node.election("role")
    election.wait(30)
    time.sleep(1.5)  # renewals, looks, the rehearsal of a takeover
    election.resign()
print(*set(sys.modules) - before)
"""
    found = subprocess.run([sys.executable, "-c", program, store_url], check=True, capture_output=True, text=True)
    assert found.stdout.split() == []


@sync_only
@pytest.mark.parametrize("refused", ["control", "watch", "keeper", "services"])
def test_start_that_cannot_start_a_thread_leaves_nothing_behind(sqlite_url, monkeypatch, refused):
    node = tenure.Node(sqlite_url, name="half")
    node.leader_only("r", lambda term: term.wait_lost())
    start = threading.Thread.start

    def limited(thread):
        if thread.name == f"tenure-{refused}-half":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", limited)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            node.start()
    assert [thread.name for thread in threading.enumerate() if thread.name.endswith("-half")] == []
    node.close()


@sync_only
def test_question_that_nobody_waits_for_any_more_is_not_asked(sqlite_url, monkeypatch):
    """After an outage, thousands of them kept the next question waiting for longer than its limit."""
    monkeypatch.setattr("tenure.engine.engine.QUERY_TIMEOUT_S", 0.1)
    asked = []
    with Nodes(sqlite_url) as nodes:
        node = nodes("a")
        node.election("r").wait(20)
        hangs = threading.Event()
        engine = engine_of(node.election("r"))

        def hang():
            with contextlib.suppress(tenure.StoreUnavailable):
                engine.query(lambda _: hangs.wait(20))

        first = threading.Thread(target=hang)
        first.start()
        until(lambda: not engine.control.queries, "the question that hangs")
        for number in range(3):
            with pytest.raises(tenure.StoreUnavailable):
                engine.query(lambda _, number=number: asked.append(number))
        hangs.set()
        first.join()
        monkeypatch.setattr("tenure.engine.engine.QUERY_TIMEOUT_S", 20.0)
        engine.query(lambda _: asked.append("last"))
    assert asked == ["last"]
