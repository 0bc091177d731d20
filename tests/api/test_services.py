"""Services: what runs on the leader, what runs everywhere, and what happens when something goes wrong.

Each test runs over both facades and both event loops: a Node starts a loop for its services, an AsyncNode runs them on
the application's loop.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
import types
from pathlib import Path

import anyio
import anyio.from_thread
import pytest

import tenure
from tenure import ConfigError
from tenure.base.clock import now
from tenure.internals import holding_of
from tenure.services.group import Deadline
from tests.support.store_by_hand import connect, connected, execute, until

TTL = 8.0
"""Long enough that no busy machine lets it lapse; nothing here waits for it."""


class Hosted:
    """A node of either facade, started and closed from a test's thread."""

    def __init__(self, node, portal):
        self.node = node
        self._portal = portal

    def __getattr__(self, name):
        return getattr(self.node, name)

    def _call(self, function, *arguments):
        return self._portal.call(function, *arguments) if self._portal else function(*arguments)

    def start(self):
        self._call(self.node.start)
        return self

    def close(self):
        self._call(self.node.close)

    def resign(self, role):
        self._call(self.node.election(role).resign)

    def candidates(self, role):
        return len(self._call(self.node.election(role).candidates))

    def states(self):
        return {info.name: info.state for info in self.node.services()}


@pytest.fixture(params=["threads", "asyncio", pytest.param("trio", marks=pytest.mark.long)])
def host(request, tmp_path):
    """Make nodes on one SQLite file, or another database, to be closed in the end."""
    with contextlib.ExitStack() as stack:
        portal = None
        if request.param != "threads":
            portal = stack.enter_context(anyio.from_thread.start_blocking_portal(request.param))

        def make(name="a", url=f"sqlite:///{tmp_path}/s.db", **settings):
            facade = tenure.AsyncNode if portal else tenure.Node
            hosted = Hosted(facade(url, name=name, **({"ttl": TTL} | settings)), portal)
            stack.callback(hosted.close)
            return hosted

        yield make


class Thing:
    """A service that records its starts and stops."""

    def __init__(self, name, diary):
        self.__name__ = name
        self.diary = diary

    def start(self):
        self.diary.append(f"start {self.__name__}")

    def stop(self):
        self.diary.append(f"stop {self.__name__}")


class AsyncThing(Thing):
    async def start(self, term):
        assert (await term.ensure()) is None
        super().start()

    async def stop(self):
        await anyio.sleep(0.01)
        super().stop()


def coroutine(diary, name="coroutine"):
    async def run(term):
        diary.append(f"start {name}")
        try:
            await term.wait_lost()
            await anyio.sleep_forever()
        finally:
            diary.append(f"stop {name}")

    run.__name__ = name
    return run


def function(diary, name="function"):
    def run(term):
        diary.append(f"start {name}")
        term.wait_lost()
        diary.append(f"stop {name}")

    run.__name__ = name
    return run


def generator(term):
    yield term


def lead(node, role="r"):
    """Wait until the node leads and everything runs."""
    until(lambda: node.election(role).is_leader, "elected")
    until(lambda: {i.state for i in node.services() if i.role == role} == {"running"}, f"running: {node.services()}")


@contextlib.contextmanager
def writer(url):
    """Keep the node from writing to the file: its renewals fail, and its trust runs out."""
    with connected(url, isolation_level=None) as connection:
        connection.execute("begin immediate")
        yield
        connection.rollback()


# --- the life of a service ----------------------------------------------------------------------------------


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


# --- what fails ---------------------------------------------------------------------------------------------


def test_a_service_that_fails_to_start_is_started_again_and_those_after_it_wait(host, caplog):
    node, diary = host(), []

    class Reluctant(Thing):
        def start(self):
            super().start()
            if len(self.diary) < 3:
                raise OSError("not yet")

    node.leader_only("r", Reluctant("first", diary), Thing("second", diary))
    node.start()
    lead(node)
    assert diary == ["start first"] * 3 + ["start second"]
    info = node.services()[0]
    assert (info.failures, info.error) == (2, "start() failed: OSError('not yet')")
    said = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(said) == 2
    assert "service first start() failed: OSError('not yet'); starting it again in" in said[0].message
    assert (said[0].tenure_role, said[0].tenure_service) == ("r", "first")
    assert isinstance(said[0].exc_info[1], OSError)  # with where it was raised


def test_a_service_that_dies_is_started_again_under_the_same_term(host):
    node, tokens = host(), []

    async def dies(term):
        tokens.append(term.token)
        if len(tokens) == 1:
            raise ValueError("a bug")

    def returns(term):
        if len(tokens) > 2:
            term.wait_lost()

    node.leader_only("r", dies, returns)
    node.start()
    until(lambda: len(tokens) == 3, "started three times")
    assert set(tokens) == {1}
    assert node.services()[0].failures >= 2  # raised once, and returned: that is a death, too
    assert node.services()[0].error in ("failed: ValueError('a bug')", "returned")


def test_a_service_that_has_finished_is_started_again_only_in_the_next_term(host, caplog):
    caplog.set_level(logging.INFO, "tenure.services")
    node, starts = host(), []

    async def import_rates(term):
        starts.append(("import_rates", term.token))

    def clean_up(term):
        starts.append(("clean_up", term.token))

    node.leader_only("r", import_rates, clean_up, on_return="done")
    node.leader_only("r", function([], "last"))
    node.start()
    until(lambda: node.states() == {"import_rates": "done", "clean_up": "done", "last": "running"}, "both are done")
    assert [info.failures for info in node.services()] == [0, 0, 0]
    assert sorted(starts) == [("clean_up", 1), ("import_rates", 1)]
    until(lambda: "import_rates returned" in caplog.text, "the log says so")
    [said] = [record for record in caplog.records if "import_rates returned" in record.message]
    assert said.message.endswith("service import_rates returned; it is done until the next term (on_return='done')")
    assert said.levelno == logging.INFO
    node.resign("r")
    until(lambda: sorted(starts[2:]) == [("clean_up", 2), ("import_rates", 2)], "both run again in the next term")


@pytest.mark.parametrize(
    ("options", "words", "tokens"),
    [
        (
            {},
            r"starting it again in \d.\d s \(on_failure='restart'\); if it has finished, set on_return='done'",
            [1, 1],
        ),
        ({"on_failure": "resign", "on_return": "restart"}, r"starting it again in .* \(on_return='restart'\)", [1, 1]),
        ({"on_return": "resign"}, r"resigning \(on_return='resign'\)", [1, 2]),
        (
            {"on_failure": "resign"},
            r"resigning \(on_failure='resign'\); if it has finished, set on_return='done'",
            [1, 2],
        ),
    ],
)
def test_what_a_return_leads_to_is_what_the_log_says(host, caplog, options, words, tokens):
    node, found = host(), []

    async def returns(term):
        found.append(term.token)
        if len(found) > 1:
            await anyio.sleep_forever()

    node.leader_only("r", returns, **options)
    node.start()
    until(lambda: found == tokens, "started again")  # which comes after the log
    [said] = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert re.search(f"service returns returned; {words}$", said)
    assert node.services()[0].failures == 1


def test_on_return_does_not_change_what_a_failure_leads_to(host):
    node, tokens = host(), []

    async def fails(term):
        tokens.append(term.token)
        if len(tokens) == 1:
            raise OSError("no route")

    node.leader_only("r", fails, on_return="done")
    node.start()
    until(lambda: node.states() == {"fails": "done"}, "started again after its failure")
    assert tokens == [1, 1]
    assert node.services()[0].failures == 1


def test_a_service_that_waits_for_another_one_costs_nothing(host, monkeypatch):
    """Both have failed; the second is due again, and is not to be started before the first."""
    from tenure.services.group import ServiceGroup

    node, rests, rest = host(), [], ServiceGroup._rest

    async def counted(self, *arguments):
        rests.append(arguments)
        await rest(self, *arguments)

    monkeypatch.setattr(ServiceGroup, "_rest", counted)
    starts, third = [], threading.Event()

    def first(term):  # dies three times, so that its pause grows
        starts.append(term)
        if len(starts) == 3:
            third.set()
        elif len(starts) == 4:
            term.wait_lost()

    def second(term):  # dies with the third death of the first
        third.wait()

    node.leader_only("r", first, second)
    node.start()
    until(lambda: len(starts) == 4, "started for the fourth time")
    assert len(rests) < 100


def test_an_object_that_is_no_longer_alive_is_stopped_and_started_again(host):
    node, diary = host(), []

    class Mortal(Thing):
        def alive(self):
            return self.diary.count("start it") > 1

    node.leader_only("r", Mortal("it", diary))
    node.start()
    until(lambda: diary[:3] == ["start it", "stop it", "start it"], "restarted")
    until(lambda: node.states() == {"it": "running"})
    assert node.services()[0].error == "is not alive"


def test_on_failure_resign_hands_over_to_a_node_that_can(host, caplog):
    broken, healthy = host("broken"), host("healthy")

    async def fails():
        raise OSError("no such device")

    broken.leader_only("r", fails, on_failure="resign")
    broken.start()
    until(lambda: broken.services()[0].failures, "it has tried")
    healthy.leader_only("r", coroutine([]))
    healthy.start()
    lead(healthy)
    assert any("failed: OSError('no such device'); resigning" in record.message for record in caplog.records)


class Resigns(Thing):
    def start(self, term):
        super().start()
        term.resign()


class ResignsAsync(Thing):
    async def start(self, term):
        super().start()
        await term.resign()


def resigns(diary):
    async def run(term):
        diary.append("start function")
        await term.resign()

    return run


@pytest.mark.parametrize(
    "service",
    [lambda diary: Resigns("thing", diary), lambda diary: ResignsAsync("async thing", diary), resigns],
    ids=["start()", "async start()", "function"],
)
@pytest.mark.long
def test_a_service_that_resigns_at_once_is_not_started_all_the_time(host, caplog, service):
    node, diary = host("hasty"), []
    node.leader_only("r", service(diary))
    began = now()
    node.start()
    until(lambda: len([entry for entry in diary if "start" in entry]) >= 3, "it is tried again")
    assert now() - began > 1.4  # 0.5 s, then 1 s
    said = [record.message for record in caplog.records if record.name == "tenure.services"]
    assert "hasty: role 'r' was given up within a second of being acquired; standing again in 0.5 s" in said
    assert "hasty: role 'r' was given up within a second of being acquired; standing again in 1.0 s" in said


@pytest.mark.long
def test_a_service_that_resigns_at_once_does_not_hold_up_another_node(host):
    hasty, healthy, diary = host("hasty"), host("healthy"), []
    hasty.leader_only("r", Resigns("thing", diary))
    hasty.start()
    until(lambda: len(diary) >= 3, "it has tried twice")
    healthy.leader_only("r", coroutine([]))
    healthy.start()
    lead(healthy)
    until(lambda: healthy.candidates("r") == 2, "the hasty node stands again")
    assert healthy.election("r").is_leader


def test_a_start_that_hangs_is_a_failure_and_hands_over(host):
    node, other, gate = host("a"), host("b"), threading.Event()

    class Hangs(Thing):
        def start(self):
            gate.wait()

    node.leader_only("r", Hangs("hanging", []), start_within=0.2, drain_within=0.2)
    node.start()
    until(lambda: node.services()[0].error == "did not start within 0.2 s", "given up")
    other.leader_only("r", coroutine([]))
    other.start()
    lead(other)
    assert node.states() == {"hanging": "stuck"}
    gate.set()
    until(lambda: node.states() == {"hanging": "standby"}, "it stands again")


def test_a_start_that_is_interrupted_is_followed_by_stop(host):
    node, diary = host(), []

    class Slow(Thing):
        async def start(self):
            self.diary.append("half started")
            await anyio.sleep_forever()

    node.leader_only("r", Slow("it", diary))
    node.start()
    until(lambda: diary, "starting")
    node.close()
    assert diary == ["half started", "stop it"]


def test_an_alive_that_does_not_answer_is_a_death(host, monkeypatch):
    node, diary, gate = host(), [], threading.Event()
    monkeypatch.setattr("tenure.services.runner.ALIVE_WITHIN_S", 0.2)

    class Mute(Thing):
        def alive(self):
            gate.wait()

    node.leader_only("r", Mute("it", diary))
    node.start()
    until(lambda: diary[:3] == ["start it", "stop it", "start it"], "restarted")
    assert node.services()[0].error == "alive() did not answer within 0.2 s"
    node.close()
    gate.set()


def test_a_service_that_returns_work_for_others_to_do_has_failed(host):
    node = host()

    class Deceptive:
        def start(self):
            return anyio.sleep(1)

        def stop(self):
            pass

    node.leader_only("r", Deceptive())
    node.start()
    until(lambda: node.services()[0].failures, "failed")
    assert "the function returned a coroutine, which Tenure does not run" in node.services()[0].error


def test_a_service_that_calls_exit_dies_alone(host):
    node, starts = host(), []

    async def leaves():
        starts.append(1)
        if len(starts) == 1:
            sys.exit(3)
        await anyio.sleep_forever()

    node.leader_only("r", leaves)
    node.start()
    until(lambda: len(starts) == 2, "started again")
    assert node.services()[0].error == "failed: SystemExit(3)"


# --- what will not stop -------------------------------------------------------------------------------------


class Stuck:
    """Services that do not stop before the gate opens."""

    def __init__(self):
        self.gate = threading.Event()
        self.started = 0

    async def swallows_its_cancellation(self):
        self.started += 1
        while not self.gate.is_set():
            with contextlib.suppress(BaseException):
                await anyio.sleep(0.05)
            time.sleep(0.01)  # noqa: ASYNC251 - on trio nothing blocks a cancelled task any more

    def ignores_the_end(self, _term):
        self.started += 1
        self.gate.wait()

    def hangs_in_stop(self):
        outer = self

        class Hangs:
            def start(self):
                outer.started += 1

            def stop(self):
                outer.gate.wait()

        return Hangs()


@pytest.mark.parametrize("kind", ["cancel is swallowed", "thread goes on", "stop hangs"])
def test_a_service_that_will_not_stop_is_said_and_left_behind(host, caplog, kind):
    node, other, stuck = host("a"), host("b"), Stuck()
    service = {
        "cancel is swallowed": stuck.swallows_its_cancellation,
        "thread goes on": stuck.ignores_the_end,
        "stop hangs": stuck.hangs_in_stop(),
    }[kind]
    diary = []
    node.leader_only("r", Thing("first", diary), drain_within=1)
    node.leader_only("r", service, name="stuck", drain_within=1)
    node.start()
    lead(node)
    other.leader_only("r", coroutine([]))
    other.start()
    until(lambda: node.candidates("r") == 2)
    node.resign("r")
    lead(other)
    assert node.states() == {"first": "standby", "stuck": "stuck"}
    assert "stop first" in diary  # those before it are stopped all the same
    assert any("service stuck did not stop in time" in record.message for record in caplog.records)
    other.close()
    assert not node.election("r").is_leader  # it does not stand again, since it could not start what still runs
    assert stuck.started == 1
    stuck.gate.set()
    until(lambda: stuck.started > 1, "it stands again, and starts it again")


def test_a_blocked_event_loop_keeps_no_role_for_longer_than_the_services_may_drain(host):
    node, other, gate, blocked = host("a"), tenure.Node, threading.Event(), threading.Event()

    async def blocks():
        blocked.set()
        gate.wait()  # on the loop itself

    node.leader_only("r", function([]), drain_within=0.5)
    node.leader_only("another", blocks, drain_within=0.5)
    node.start()
    assert blocked.wait(20)
    until(lambda: node.election("r").is_leader)
    with other(f"sqlite:///{node.node._settings.sqlite_path}", name="b", ttl=TTL) as standby:
        election = standby.election("r")
        until(lambda: len(election.candidates()) == 2)
        node.node._engine.candidacy("r").resign()
        election.wait(20)
        gate.set()


def test_services_that_were_told_too_late_get_no_more_than_a_moment():
    long_ago = now() - 100
    assert Deadline(None, long_ago, stop_within=2, drain_within=10).left() <= 0.2
    assert 1 < Deadline(None, now(), stop_within=2, drain_within=10).left() <= 2
    assert 9 < Deadline(None, None, stop_within=2, drain_within=10).left() <= 10


def test_a_service_cannot_close_its_own_node(host):
    node, errors = host(), []

    def closes(term):
        try:
            node.close()
        except ConfigError as error:
            errors.append(str(error))
        term.wait_lost()

    node.leader_only("r", closes)
    node.start()
    until(lambda: errors)
    assert "would wait for itself" in errors[0]


def test_a_node_that_is_closed_at_once_starts_nothing_and_complains_of_nothing(host, caplog):
    diary = []
    for number in range(5):
        node = host(f"n{number}")
        node.leader_only("r", coroutine(diary))
        node.everywhere(Thing("everywhere", diary))
        node.start()
        node.close()
        seen = len(diary)
        assert diary.count("start coroutine") == diary.count("stop coroutine")
        assert diary.count("start everywhere") == diary.count("stop everywhere")
        assert len(diary) == seen
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


PROGRAM = """
    import sys, threading, time, anyio, tenure

    async def coroutine():
        print("running", flush=True)
        while True:
            try:
                await anyio.sleep(0.1)
            except BaseException:
                pass

    async def blocked():
        print("running", flush=True)
        threading.Event().wait()

    def thread(term):
        print("running", flush=True)
        threading.Event().wait()

    kind, facade, url = sys.argv[1:]
    node = getattr(tenure, facade)(url, ttl=2)
    node.leader_only("r", {"coroutine": coroutine, "blocked": blocked, "thread": thread}[kind], on_stuck="exit")
    node.run() if facade == "Node" else anyio.run(node.run)
"""


@pytest.mark.parametrize("facade", ["Node", "AsyncNode"])
@pytest.mark.parametrize("kind", ["coroutine", "blocked", "thread"])
def test_on_stuck_exit_ends_the_process_before_another_node_may_lead(tmp_path, facade, kind):
    """Even where the event loop itself is blocked."""
    url = f"sqlite:///{tmp_path}/s.db"
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), kind, facade, url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "running\n"
            with writer(url):
                _, said = process.communicate(timeout=30)
        finally:
            process.kill()
        assert process.returncode == 70, said
        assert f"service {kind} did not stop in time: ending this process (on_stuck='exit')" in said


# --- whole programs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("facade", ["Node", "AsyncNode"])
@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT"])
def test_run_ends_with_a_signal_and_hands_over(tmp_path, facade, number):
    import signal

    program = """
        import sys, anyio, tenure
        node = getattr(tenure, sys.argv[1])(sys.argv[2])
        @node.leader_only("r")
        def work(term):
            print("running", flush=True)
            term.wait_lost()
            print("stopped", term.lost_reason, flush=True)
        node.run() if sys.argv[1] == "Node" else anyio.run(node.run)
        print("closed")
    """
    url = f"sqlite:///{tmp_path}/s.db"
    command = [sys.executable, "-c", textwrap.dedent(program), facade, url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "running\n"
            process.send_signal(getattr(signal, number))
            said, errors = process.communicate(timeout=30)
        finally:
            process.kill()
    assert (process.returncode, said, errors) == (0, "stopped resigned\nclosed\n", "")


@pytest.mark.parametrize("facade", ["Node", "AsyncNode"])
def test_run_ends_with_a_signal_while_it_waits_for_the_database(facade):
    program = """
        import logging, sys, anyio, tenure
        logging.basicConfig(stream=sys.stdout)
        node = getattr(tenure, sys.argv[1])("postgresql://nobody@127.0.0.1:1/nowhere", start="wait")
        node.leader_only("r", lambda term: term.wait_lost(), name="s")
        node.run() if sys.argv[1] == "Node" else anyio.run(node.run)
    """
    command = [sys.executable, "-c", textwrap.dedent(program), facade]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert "trying again until it is back" in process.stdout.readline() + process.stdout.readline()
            process.terminate()
            _, errors = process.communicate(timeout=30)
        finally:
            process.kill()
    assert (process.returncode, errors) == (0, "")


def test_signal_that_interrupts_no_wait_ends_run_while_it_waits_for_the_database():
    """It arrives in another thread, as all do on Windows, or in the moment before the main thread's wait begins."""
    program = """
        import signal, threading, time, tenure

        def interrupt():
            while not any("tenure-keeper" in thread.name for thread in threading.enumerate()):
                time.sleep(0.1)
            time.sleep(1)  # until the main thread waits
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

        threading.Thread(target=interrupt).start()
        node = tenure.Node("postgresql://nobody@127.0.0.1:1/nowhere", start="wait")
        node.leader_only("r", lambda term: term.wait_lost(), name="s")
        node.run()
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 0, done.stderr


def test_the_program_of_the_how_to_runs_until_it_is_told_to_end(tmp_path):
    page = (Path(__file__).parents[2] / "docs/how-to/services.md").read_text()
    program = page.partition("```py\n")[2].partition("```")[0]
    url = f"sqlite:///{tmp_path}/s.db"
    assert program.count("postgresql://localhost/app") == 1
    program = program.replace("postgresql://localhost/app", url)
    told = """import os
send_what_is_due = lambda term: os.write(1, b"due\\n")
answer_queries = lambda: os.write(1, b"asked\\n")
"""
    with subprocess.Popen([sys.executable, "-c", told + program], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert {process.stdout.readline(), process.stdout.readline()} == {"due\n", "asked\n"}
            process.terminate()
            assert process.wait(30) == 0
        finally:
            process.kill()


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
