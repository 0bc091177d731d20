"""Services that do not stop, and whole programs that end."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import anyio
import pytest

import tenure
from tenure import ConfigError
from tenure.base.clock import now
from tenure.services.group import Deadline
from tests.api.hosted import TTL, Thing, coroutine, function, lead, writer
from tests.support.store_by_hand import until

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
