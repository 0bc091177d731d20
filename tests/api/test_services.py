"""Services: what runs on the leader and what runs everywhere, from its start to its end.

Each test runs over both facades and both event loops: a Node starts a loop for its services, an AsyncNode runs them on
the application's loop.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import subprocess
import sys
import threading
import time
import types

import anyio
import pytest

import tenure
from tenure import ConfigError
from tenure.base.clock import now
from tenure.internals import holding_of
from tests.api.hosted import Thing, coroutine, function, lead, writer
from tests.support.store_by_hand import connect, execute, until

# --- the life of a service ----------------------------------------------------------------------------------


class AsyncThing(Thing):
    async def start(self, term):
        assert (await term.ensure()) is None
        super().start()

    async def stop(self):
        await anyio.sleep(0.01)
        super().stop()


def generator(term):
    yield term


def test_services_start_in_order_on_election_and_stop_in_reverse_order(host):
    node, diary = host(), []
    node.leader_only("r", Thing("one", diary), coroutine(diary, "two"), AsyncThing("three", diary))
    node.leader_only("r")(Thing("four", diary))
    assert node.states() == dict.fromkeys(["one", "two", "three", "four"], "standby")
    node.start()
    lead(node)
    node.close()
    names = ["one", "two", "three", "four"]
    assert diary == [f"start {name}" for name in names] + [f"stop {name}" for name in reversed(names)]


def test_every_kind_of_service_is_given_the_term(host):
    node, terms = host(), []

    async def cancelled(term):
        terms.append(term)
        await anyio.sleep_forever()

    def returning(term):
        terms.append(term)
        term.wait_lost()

    class Sync:
        def start(self, term):
            terms.append(term)

        def stop(self):
            pass

    node.leader_only("r", cancelled, returning, Sync())
    node.start()
    lead(node)
    until(lambda: len(terms) == 3)
    assert {term.token for term in terms} == {node.election("r").term.token}
    assert sorted(type(term).__name__ for term in terms) == ["AsyncTerm", "Term", "Term"]


def test_the_terms_of_all_services_end_together_and_each_reports_it(host):
    node, terms, ended = host(), [], []

    async def on_the_loop(term):
        terms.append(term)
        term.on_lost(lambda lost: ended.append((lost, threading.current_thread().name)))
        await anyio.sleep_forever()

    def in_a_thread(term):
        terms.append(term)
        term.on_lost(lambda lost: ended.append((lost, threading.current_thread().name)))
        term.wait_lost()

    node.leader_only("r", on_the_loop, in_a_thread)
    node.start()
    lead(node)
    until(lambda: len(terms) == 2)
    node.resign("r")
    assert [term.lost_reason for term in terms] == ["resigned", "resigned"]
    until(lambda: len(ended) == 2, "both reported")
    threads = {type(term).__name__: thread for term, thread in ended}
    assert {term for term, _ in ended} == set(terms)
    assert threads["Term"] == "tenure-callbacks-a"
    assert threads["AsyncTerm"] != "tenure-callbacks-a"


def test_services_run_on_the_leader_only_and_everywhere_services_on_every_node(host):
    nodes, diary = [host("a"), host("b")], []

    def serve(stop):
        diary.append("serving")
        stop.wait()
        diary.append("served")

    for node in nodes:
        node.leader_only("r", coroutine(diary))
        node.everywhere(serve)
        node.start()
    until(lambda: diary.count("serving") == 2, "both serve")
    until(lambda: "start coroutine" in diary, "one leads")
    leader, standby = sorted(nodes, key=lambda node: not node.election("r").is_leader)
    until(lambda: leader.states() == {"serve": "running", "coroutine": "running"})
    assert standby.states() == {"serve": "running", "coroutine": "standby"}
    leader.close()
    lead(standby)
    until(lambda: diary.count("start coroutine") == 2)
    standby.close()
    assert diary[-2:] == ["stop coroutine", "served"]  # what runs everywhere stops last


def test_no_other_node_leads_before_the_services_have_stopped(host):
    """On resign, and on close: the work of the old leader has ended before the next one leads."""
    leader, standby, diary = host("a"), host("b"), []

    def slow(term):
        diary.append(f"start {term.token}")
        term.wait_lost()
        time.sleep(0.5)  # the work that is still to be finished
        diary.append(f"stop {term.token}")

    leader.leader_only("r", slow)
    standby.leader_only("r", slow)
    leader.start()
    lead(leader)
    standby.start()
    until(lambda: leader.candidates("r") == 2)
    leader.resign("r")
    lead(standby)
    standby.close()
    lead(leader)
    until(lambda: len(diary) == 5)
    assert diary == ["start 1", "stop 1", "start 2", "stop 2", "start 3"]


def test_services_stop_while_the_lease_is_still_the_nodes(host, tmp_path):
    """The node stops trusting its lease early, by the time that services have to stop."""
    node, seen = host(ttl=3), []

    async def service(term):
        trusted = 0.0
        try:
            while True:
                trusted = max(trusted, holding_of(term).lease.deadline)  # long ago as soon as the term is lost
                await anyio.sleep(0.01)
        finally:
            seen.append((trusted, now()))

    node.leader_only("r", service, stop_within=1)
    node.start()
    lead(node)
    with writer(f"sqlite:///{tmp_path}/s.db"):
        until(lambda: seen, "stopped")
    trusted_until, stopped = seen[0]
    assert trusted_until <= stopped < trusted_until + 1  # and one second later the lease itself would end
    lead(node)


def test_standbys_are_warmed_and_a_failing_warm_up_only_costs_time(host, caplog):
    node, standby, diary = host("a"), host("b"), []

    class Cold(Thing):
        def warm(self):
            self.diary.append(f"warm {self.__name__}")
            if self.__name__ == "second":
                raise OSError("no cache")

    node.leader_only("r", Cold("first", diary))
    node.start()
    lead(node)
    standby.leader_only("r", Cold("second", diary))
    standby.start()
    until(lambda: "warm second" in diary)
    assert "start second" not in diary
    node.close()
    lead(standby)
    assert any("warm() failed: OSError('no cache')" in record.message for record in caplog.records)


# --- several roles, and the server --------------------------------------------------------------------------


def test_two_roles_with_different_leaders_run_their_services_apart(host):
    one, two, diary = host("one"), host("two"), []
    for node in (one, two):
        for role in ("mail", "clean"):
            node.leader_only(role, coroutine(diary, f"{role} on {node.name}"))
    one.start()
    lead(one, "mail")
    lead(one, "clean")
    two.start()
    until(lambda: one.candidates("clean") == 2)
    one.resign("clean")
    lead(two, "clean")
    assert one.election("mail").is_leader
    assert one.states() == {"mail on one": "running", "clean on one": "standby"}
    assert two.states() == {"mail on two": "standby", "clean on two": "running"}
    assert sorted(diary[:2]) == ["start clean on one", "start mail on one"]
    until(lambda: len(diary) == 4)
    assert diary[2:] == ["stop clean on one", "start clean on two"]


@pytest.mark.long
def test_services_go_on_under_the_same_term_while_the_server_restarts_under_load(host, make_postgres_server):
    server = make_postgres_server()
    url = server.create_database()
    execute(url, "create table ticks (token bigint, at timestamptz default clock_timestamp())")
    ended = threading.Event()

    def load():
        while not ended.is_set():
            with contextlib.suppress(Exception), connect(url) as connection:
                connection.execute("select count(*) from ticks, generate_series(1, 20000)")

    def tick(term):
        while not term.wait_lost(0.01):
            with contextlib.suppress(Exception), term.transaction() as transaction:
                transaction.execute("insert into ticks (token) values (%s)", (term.token,))

    nodes = [host(name, url, ttl=30) for name in "abc"]
    threads = [threading.Thread(target=load) for _ in range(4)]
    try:
        for thread in threads:
            thread.start()
        for node in nodes:
            node.leader_only("r", tick)
            node.start()
        until(lambda: execute(url, "select 1 from ticks"), "ticking")
        (leader,) = [node for node in nodes if node.election("r").is_leader]
        for mode in ("fast", "immediate"):
            server.stop(mode)
            server.start()
            before = execute(url, "select count(*) from ticks")
            until(lambda before=before: execute(url, "select count(*) from ticks") > before, "ticking again")
            until(lambda: leader.election("r").is_leader)
            assert leader.services()[0].failures == 0
        assert execute(url, "select distinct token from ticks") == [(1,)]
    finally:
        ended.set()
        for thread in threads:
            thread.join()


# --- what an operator reads ---------------------------------------------------------------------------------


def test_the_log_says_who_starts_what_and_who_does_not_and_why(host, caplog):
    caplog.set_level(logging.INFO, "tenure.services")
    leader, standby = host("a"), host("b")
    for node in (leader, standby):
        node.leader_only("r", Thing("mail", []), Thing("clean", []))
        node.start()
        until(lambda node=node: node.services(), "started")
        if node is leader:
            lead(leader)
    until(lambda: "b: Not leader, mail, clean not started: a leads" in caplog.messages)
    assert "a: Acquired leadership, starting mail, clean" in caplog.messages
    leader.close()
    lead(standby)
    said = {record.message: record for record in caplog.records}
    acquired = said["a: Acquired leadership, starting mail, clean"]
    assert (acquired.tenure_node, acquired.tenure_namespace) == ("a", "default")
    assert (acquired.tenure_role, acquired.tenure_token) == ("r", 1)
    assert said["b: Not leader, mail, clean not started: a leads"].tenure_reason == "a leads"
    assert said["a: Gave up leadership (resigned), stopping mail, clean"].tenure_reason == "resigned"
    assert "a: Stopped mail, clean" in said
    assert said["b: Acquired leadership, starting mail, clean"].tenure_token == 2


def ends(caplog):
    """The ends of terms in the log, as (role, reason)."""
    events = [getattr(record, "tenure_event", None) for record in caplog.records]
    return [(event.role, event.reason) for event in events if isinstance(event, tenure.Deposed)]


def test_the_log_of_a_closed_node_and_the_history_give_the_same_reason(host, caplog, tmp_path):
    caplog.set_level(logging.INFO, "tenure.node")
    node, slow = host("a"), threading.Event()
    node.leader_only("quick", function([]))
    node.leader_only("slow", lambda term: (term.wait_lost(), slow.wait(20)), name="slow", drain_within=20)
    node.start()
    lead(node, "quick")
    lead(node, "slow")
    other = host("b").start()
    waiting = other.election("quick")
    closing = threading.Thread(target=node.close)
    closing.start()
    until(lambda: waiting.is_leader, "the role whose service has stopped is handed over")
    slow.set()
    closing.join()
    with tenure.Registry(f"sqlite:///{tmp_path}/s.db") as registry:
        told = [(role, registry.history(role)[-1].reason) for role in ("quick", "slow")]
    assert told == sorted(ends(caplog)) == [("quick", "resigned"), ("slow", "resigned")]


# --- bad input ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("service", "arguments", "words"),
    [
        (42, {}, "service 42 must be a function, or an object with start() and stop()"),
        (Thing, {}, "is a class: give an instance, Thing()"),
        (generator, {}, "service 'generator' is a generator, and Tenure does not iterate it"),
        (lambda: None, {}, "which only the function itself can end: let it take `term`"),
        (lambda term: term, {"on_failure": "retry"}, "on_failure='retry' must be one of 'restart', 'resign'"),
        (lambda term: term, {"on_return": "stop"}, "on_return='stop' must be one of None, 'restart', 'done', 'resign'"),
        (Thing("mailer", []), {"on_return": "done"}, "which does not return: leave on_return='done' out"),
        (lambda term: term, {"on_stuck": "kill"}, "on_stuck='kill' must be one of 'log', 'exit'"),
        (lambda term: term, {"start_within": 0}, "start_within=0 must be a number of seconds above 0"),
        (lambda term: term, {"drain_within": "x"}, "drain_within='x' must be a number of seconds"),
        (lambda term: term, {"stop_within": 5}, "stop_within=5 must be at most 4 (with ttl=10 and renew_every=2.5)"),
        (lambda term: term, {"name": ""}, "name='' is 0 bytes long"),
    ],
)
def test_what_is_no_service_is_refused_with_a_remedy(tmp_path, service, arguments, words):
    node = tenure.Node(f"sqlite:///{tmp_path}/s.db")
    with pytest.raises(ConfigError) as error:
        node.leader_only("r", service, **arguments)
    assert words in str(error.value)
    assert node.services() == []


def test_everywhere_services_in_threads_must_take_the_event(tmp_path):
    node = tenure.Node(f"sqlite:///{tmp_path}/s.db")
    with pytest.raises(ConfigError, match=r"let it take `stop` and return in time"):
        node.everywhere(lambda: None)


def test_services_are_added_before_the_start_under_names_of_their_own(tmp_path):
    node = tenure.Node(f"sqlite:///{tmp_path}/s.db")
    node.leader_only("r", Thing("one", []))
    with pytest.raises(ConfigError, match="service 'one' already exists"):
        node.leader_only("r", Thing("one", []))
    with pytest.raises(ConfigError, match="name='x' is for a single service, but 2 were given"):
        node.leader_only("r", Thing("a", []), Thing("b", []), name="x")
    with node:
        with pytest.raises(ConfigError, match="was already started"):
            node.leader_only("r", Thing("two", []))
        with pytest.raises(ConfigError, match="already leads or campaigns for it"), node.lead("r"):
            pass


def test_nothing_runs_in_a_forked_child(tmp_path):
    """The services run in the parent, which also stops them."""
    from tests.support.store_by_hand import fork

    node, diary = tenure.Node(f"sqlite:///{tmp_path}/s.db"), []
    node.leader_only("r", coroutine(diary))
    with node:
        until(lambda: node.election("r").is_leader)
        until(lambda: diary)
        child = fork()
        if child == 0:
            node.close()
            os._exit(diary.count("stop coroutine"))
        assert os.waitpid(child, 0)[1] == 0
        assert diary == ["start coroutine"]
        assert sqlite3.connect(tmp_path / "s.db").execute("select count(*) from tenure_terms").fetchone() == (1,)


@pytest.mark.parametrize("facade", ["Node", "AsyncNode"])
def test_run_without_services_is_warned_of(sqlite_url, facade):
    program = f"import anyio, tenure; node = tenure.{facade}({sqlite_url!r}, name='n'); "
    program += "node.run()" if facade == "Node" else "anyio.run(node.run)"
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True) as process:
        try:
            said = process.stderr.readline()
        finally:
            process.kill()
    assert said == "n: run() has no services to run: add them before it, with leader_only() or everywhere()\n"


def test_service_stops_even_if_the_system_cannot_start_one_more_thread(host, monkeypatch):
    """The thread that watches over the end of services is started when a term ends."""
    node = host()
    stopped = threading.Event()

    async def service(term):
        try:
            await anyio.sleep_forever()
        finally:
            stopped.set()

    class Refused(threading.Thread):
        def start(self):
            raise RuntimeError("can't start new thread")

    node.leader_only("r", service)
    node.start()
    until(lambda: node.states() == {"service": "running"}, "the service")
    monkeypatch.setattr(
        "tenure.services.leader.threading", types.SimpleNamespace(Thread=Refused, Event=threading.Event)
    )
    node.resign("r")
    assert stopped.wait(20)


def test_service_stops_although_the_applications_logs_raise(host, caplog):
    """A filter that raised kept the group from stopping its services, and another node led meanwhile."""
    node = host()
    stopped = threading.Event()

    async def service(term):
        try:
            await anyio.sleep_forever()
        finally:
            stopped.set()

    def fails(record):
        raise RuntimeError(f"a filter that fails: {record.msg}")

    node.leader_only("r", service)
    node.start()
    until(lambda: node.states() == {"service": "running"}, "the service")
    logger = logging.getLogger("tenure.services")
    logger.addFilter(fails)
    try:
        with caplog.at_level(logging.INFO, "tenure.services"):
            node.resign("r")
            assert stopped.wait(10)
    finally:
        logger.removeFilter(fails)
