"""R10: a forked child has inherited the sockets of its parent's node, and must neither use nor keep them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
import warnings

import pytest

import tenure
from tenure import asks
from tenure.session import Step
from tests.desk import Desk, Nodes, until


@contextlib.contextmanager
def forked(in_child):
    """Fork; the child runs `in_child`, exits with 0 if that was right, and is gone when the block is left."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of forks beside threads
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = 0 if in_child() else 2
        except BaseException:  # noqa: BLE001 - nothing may get back into pytest
            traceback.print_exc()
        os._exit(status)
    try:
        yield pid
    finally:
        with contextlib.suppress(ChildProcessError, ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def exit_code(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def raises_closed(call):
    try:
        call()
    except tenure.NodeClosed as error:
        return "belongs to the parent process" in str(error)
    return False


def test_child_is_never_leader_and_cannot_use_the_node(store_url):
    with Nodes(store_url, ttl=30) as nodes:
        node = nodes("parent")
        election = node.election("r")
        term = election.wait(20)

        def in_child():
            assert not election.is_leader
            assert not term.valid
            assert election.term is None
            assert raises_closed(lambda: node.election("r"))
            assert raises_closed(lambda: election.wait(1))
            assert raises_closed(election.leader)
            assert raises_closed(election.resign)
            with contextlib.suppress(tenure.TenureError):
                term.ensure()
                return False
            node.close()  # does nothing, and takes no time
            return True

        with forked(in_child) as child:
            assert exit_code(child) == 0
        assert election.is_leader


def test_parent_goes_on_leading_after_the_child_has_gone(store_url):
    """Not by a polite good-bye of the child, nor by the end of its process, does the parent lose anything."""
    with Nodes(store_url, ttl=30) as nodes:
        node = nodes("parent")
        standby = nodes("standby")
        term = node.election("r").wait(20)
        standby.election("r")

        def in_child():
            import gc

            node.close()
            gc.collect()
            return True

        for _ in range(3):
            with forked(in_child) as child:
                assert exit_code(child) == 0
        assert not term.wait_lost(1.5)
        assert node.election("r").leader().token == term.token == 1
        assert not standby.election("r").is_leader


def test_child_can_have_a_node_of_its_own(store_url):
    with Nodes(store_url, ttl=30) as nodes:
        node = nodes("parent")
        node.election("r").wait(20)

        def in_child():
            with tenure.Node(store_url, name="child") as own:
                token = own.election("childs").wait(20).token
                return token == 1 and own.election("r").leader().name == "parent"

        with forked(in_child) as child:
            assert exit_code(child) == 0
        assert node.election("r").is_leader
        until(lambda: node.election("childs").is_leader, "the child's role, after it left")


def test_fork_in_the_middle_of_a_transaction_leaves_the_child_a_usable_file(sqlite_url):
    """SQLite's own locks are inherited as memory: a child of a writer would find the file locked for ever."""
    with Desk(sqlite_url) as parents:
        writing = threading.Event()

        def write():
            with parents.session.transaction() as run:
                run(Step("update {members} set renewals = renewals + 1", {}))
                writing.set()
                time.sleep(0.2)

        def in_child():
            with Desk(sqlite_url, ttl=2) as own:
                return own.acquire("r") == {"r": 1}

        thread = threading.Thread(target=write)
        thread.start()
        assert writing.wait(20)
        with forked(in_child) as child:
            assert exit_code(child) == 0
        thread.join()
        assert parents.ask(asks.Renew(parents.id)).alive


def test_child_and_strangers_go_on_together_after_the_parent_has_closed_its_file(sqlite_url):
    """Whoever closes the file last tidies it up; a child that believed in inherited locks would not count as a user."""
    told, tell = os.pipe()
    over, end = os.pipe()
    node = tenure.Node(sqlite_url, name="parent", ttl=30).start()
    node.election("r").wait(20)

    def in_child():
        os.close(end)
        with tenure.Node(sqlite_url, name="child", ttl=30) as own:
            own.election("childs").wait(20)
            os.write(tell, b".")
            os.read(over, 1)
            return own.election("childs").term.token == 1 and own.election("late").wait(20).token == 1

    with forked(in_child) as child:
        assert os.read(told, 1) == b"."
        node.close()
        with tenure.Node(sqlite_url, name="stranger", ttl=30) as stranger:
            assert stranger.election("childs").leader().name == "child"
            os.close(end)
            assert exit_code(child) == 0
            assert [record.name for record in stranger.election("late").history()][-1] == "child"
    for descriptor in (told, tell, over):
        os.close(descriptor)


PARENT = """
    import os, sys, time, tenure
    node = tenure.Node(sys.argv[1], name="parent", ttl=30).start()
    node.election("r").wait(20)
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    print(child, flush=True)
    time.sleep(60)
"""


def test_dead_parent_is_succeeded_at_once_although_its_child_lives(store_url):
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(PARENT), store_url]
    with Nodes(store_url, ttl=30) as nodes, subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        try:
            election = nodes("successor").election("r")
            until(lambda: len(election.candidates()) == 2, "standing")
            began = time.monotonic()
            parent.kill()
            assert election.wait(20).token == 2
            assert time.monotonic() - began < 5
            os.kill(child, 0)
        finally:
            os.kill(child, signal.SIGKILL)
            parent.kill()


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_multiprocessing_leaves_the_parent_leading(sqlite_url, method):
    import multiprocessing

    with Nodes(sqlite_url, ttl=30) as nodes, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        election = nodes("parent").election("r")
        term = election.wait(20)
        worker = multiprocessing.get_context(method).Process(target=os.getpid)
        worker.start()
        worker.join(30)
        assert worker.exitcode == 0
        assert term.valid
