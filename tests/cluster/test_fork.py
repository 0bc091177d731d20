"""R10: a forked child has inherited the sockets of its parent's node, and must neither use nor keep them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import traceback
import warnings
import weakref
from urllib.parse import urlsplit

import pytest

import tenure
from tenure.base import clock
from tenure.base import fork as hooks
from tenure.core import messages
from tenure.engine import engine
from tenure.store.session import Step
from tests.support.store_by_hand import QUICK, Desk, Nodes, execute, fork, renewals, until


@contextlib.contextmanager
def forked(in_child):
    """Fork; the child runs `in_child`, exits with 0 if that was right, and is gone when the block is left."""
    pid = fork()
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


def test_child_is_never_leader_and_cannot_use_the_node(one_url):
    """Whatever it calls, also on what it got before the fork: an error that says why, and no wait for ever."""
    with Nodes(one_url, ttl=30) as nodes:
        node = nodes("parent")
        election = node.election("r")
        term = election.wait(20)
        events, terms = election.events(), node.terms("r")
        next(terms)

        def in_child():
            assert not election.is_leader
            assert not term.valid
            assert election.term is None
            assert term.remaining == 0
            calls = (
                *(node.start, lambda: node.election("r"), lambda: node.lead("s").__enter__()),
                *(lambda: next(node.terms("s")), lambda: next(terms), lambda: next(events)),
                *(election.wait, election.leader, election.candidates, election.history, election.events),
                *(
                    election.resign,
                    election.withdraw,
                    lambda: election.resign(to="x"),
                    lambda: election.on_event(print),
                ),
                *(term.ensure, term.wait_lost, term.resign, lambda: term.on_lost(print)),
            )
            assert [number for number, call in enumerate(calls) if not raises_closed(call)] == []
            with term:
                pass
            node.close()  # does nothing, and takes no time
            return True

        with forked(in_child) as child:
            assert exit_code(child) == 0
        assert election.is_leader
        terms.close()


def test_callbacks_of_the_parent_are_not_called_in_the_child(sqlite_url):
    """The parent's trust has run out by the child's clock as well; what follows is the parent's business."""
    with Nodes(sqlite_url, ttl=30) as nodes:
        term = nodes("parent").election("r").wait(20)
        called = []
        term.on_lost(called.append)

        def in_child():
            later = clock.now() + 60
            clock.now = lambda: later
            assert raises_closed(term.ensure)
            return not called and term.lost_reason is None

        with forked(in_child) as child:
            assert exit_code(child) == 0


def test_child_may_write_under_the_term_of_its_parent(one_url):
    """The token travels with whoever writes, on a connection of its own, and the database judges."""
    with Nodes(one_url, ttl=30) as nodes:
        term = nodes("parent").election("r").wait(20)
        execute(one_url, "create table ledger (token bigint)")

        def write():
            with term.transaction() as transaction:
                transaction.execute(f"insert into ledger values ({term.token})")
            return True

        with forked(write) as child:
            assert exit_code(child) == 0
        assert execute(one_url, "select token from ledger") == [(1,)]
        term.resign()
        with forked(write) as child:
            assert exit_code(child) == 1, "Fenced"


@pytest.mark.twin("sqlite")
def test_parent_goes_on_leading_after_the_child_has_gone(one_url):
    """Not by a polite good-bye of the child, nor by the end of its process, does the parent lose anything."""
    with Nodes(one_url, **QUICK) as nodes:
        node = nodes("parent")
        standby = nodes("standby")
        term = node.election("r").wait(20)
        standby.election("r")

        def in_child():
            node.close()
            gc.collect()
            return True

        for _ in range(3):
            with forked(in_child) as child:
                assert exit_code(child) == 0
        seen = renewals(one_url)[-1]
        until(lambda: renewals(one_url)[0] > seen + 1, "renewals of both")
        assert term.valid
        assert node.election("r").leader().token == term.token == 1
        assert not standby.election("r").is_leader


def test_child_can_have_a_node_of_its_own(one_url):
    with Nodes(one_url, ttl=30) as nodes:
        node = nodes("parent")
        node.election("r").wait(20)

        def in_child():
            with tenure.Node(one_url, name="child") as own:
                token = own.election("childs").wait(20).token
                return token == 1 and own.election("r").leader().name == "parent"

        with forked(in_child) as child:
            assert exit_code(child) == 0
        assert node.election("r").is_leader
        until(lambda: node.election("childs").is_leader, "the child's role, after it left")


@pytest.mark.twin("postgres")
def test_a_node_that_the_parent_only_made_is_another_one_in_every_child(one_url):
    """With a name, an id and a sentinel of its own: what was drawn before the fork would be the same in all of them."""
    node = tenure.Node(one_url, ttl=30)
    reader, writer = os.pipe()

    def in_child():
        node.start()
        node.election("r")
        until(lambda: node.member_id, "joined")
        os.write(writer, json.dumps([node.name, node.member_id, os.getpid()]).encode() + b"\n")
        signal.pause()

    with contextlib.ExitStack() as stack, os.fdopen(reader) as told:
        children = [stack.enter_context(forked(in_child)) for _ in range(3)]
        os.close(writer)
        names, ids, pids = zip(*(json.loads(told.readline()) for _ in children), strict=True)
        assert sorted(pids) == sorted(children)
        assert [int(name.rpartition("-")[2]) for name in names] == list(pids)
        assert len(set(ids)) == 3
        with Nodes(one_url) as nodes:
            election = nodes("observer").election("r")
            until(lambda: len(election.candidates()) == 4, "all stand")
            until(election.leader, "one of them leads")


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
        assert parents.ask(messages.Renew(parents.id)).alive


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


def test_dead_parent_is_succeeded_at_once_although_its_child_lives(one_url):
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(PARENT), one_url]
    with Nodes(one_url, ttl=30) as nodes, subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
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


CONNECTS = """
    import os, sys, threading, time, tenure
    node = tenure.Node(sys.argv[1], name="parent", ttl=60)
    threading.Thread(target=node.start).start()
    sys.stdin.readline()
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    print(child, flush=True)
    print(node.election("r").wait(20).token, flush=True)
    time.sleep(60)
"""


class Gate:
    """Leads to a PostgreSQL server, when it is open."""

    def __init__(self, url):
        self._server = urlsplit(url)
        self._listener = socket.create_server(("127.0.0.1", 0))
        own = f"{self._server.username}@127.0.0.1:{self._listener.getsockname()[1]}"
        self.url = self._server._replace(netloc=own).geturl()
        self.waiting = threading.Semaphore(0)
        self.open = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        self.open.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._lead, args=(client,), daemon=True).start()

    def _lead(self, client):
        self.waiting.release()
        self.open.wait()
        with client, socket.create_connection((self._server.hostname, self._server.port)) as server:
            back = threading.Thread(target=self._pump, args=(server, client))
            back.start()
            self._pump(client, server)
            back.join()

    @staticmethod
    def _pump(source, target):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def test_child_does_not_keep_a_connection_that_was_on_its_way_when_it_was_forked(postgres_url):
    """No object of the parent's knows of the socket yet, so nobody in the child could let go of it."""
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(CONNECTS)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (
        contextlib.closing(Gate(postgres_url)) as gate,
        Nodes(postgres_url, ttl=60) as nodes,
        subprocess.Popen([*command, gate.url], **pipes) as parent,
    ):
        for _ in ("control", "watch"):
            assert gate.waiting.acquire(timeout=20)
        parent.stdin.write("fork\n")
        parent.stdin.flush()
        child = int(parent.stdout.readline())
        try:
            gate.open.set()
            assert parent.stdout.readline() == "1\n"
            election = nodes("successor").election("r")
            until(lambda: len(election.candidates()) == 2, "standing")
            parent.kill()
            assert election.wait(20).token == 2
            os.kill(child, 0)
        finally:
            os.kill(child, signal.SIGKILL)
            parent.kill()


EXITS = """
    import contextlib, os, sys, tenure
    with tenure.Node(sys.argv[1], name="parent", ttl=30) as node, node.lead("r", timeout=20) as term:
        postgres = sys.argv[1].startswith("postgres")  # SQLite's transactions must not be carried across a fork
        with term.transaction() if postgres else contextlib.nullcontext() as transaction:
            child = os.fork()
            if child == 0:
                sys.exit(7)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
            if postgres:
                transaction.execute("create table ledger (token bigint)")
        assert node.election("r").leader().token == 1
        term.ensure()
    print("the end")
"""


@pytest.mark.twin("postgres")
def test_child_may_end_as_any_process_does(one_url):
    """It leaves every block that the parent is in, runs exit handlers and finalisers; nothing of that is heard."""
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(EXITS), one_url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "the end\n"), done.stderr
    assert "Traceback" not in done.stderr
    if one_url.startswith("postgres"):
        assert execute(one_url, "select * from ledger") == [], "the parent's transaction went through"


@pytest.mark.twin("postgres")
def test_thread_may_fork(one_url):
    with Nodes(one_url, ttl=30) as nodes:
        election = nodes("parent").election("r")
        election.wait(20)
        codes = []

        def fork():
            with forked(lambda: not election.is_leader and raises_closed(election.leader)) as child:
                codes.append(exit_code(child))

        thread = threading.Thread(target=fork)
        thread.start()
        thread.join(30)
        assert codes == [0]
        assert election.leader().token == election.term.token == 1


def test_child_of_an_event_loop_is_never_leader(sqlite_url):
    async def main():
        async with tenure.AsyncNode(sqlite_url, ttl=30) as node:
            election = node.election("r")
            await election.wait(20)
            with forked(lambda: not election.is_leader and raises_closed(lambda: node.election("s"))) as child:
                assert exit_code(child) == 0
            assert election.is_leader

    asyncio.run(main())


def test_nodes_that_come_and_go_leave_nothing_behind(sqlite_url, monkeypatch):
    """What is registered for forks stays for the life of the process: it must not be something of each node's."""
    hooks = []
    monkeypatch.setattr(os, "register_at_fork", lambda **functions: hooks.append(functions))
    with tenure.Node(sqlite_url) as node:
        assert node._engine in engine._running
    assert node._engine not in engine._running
    gone = weakref.ref(node._engine)
    del node
    gc.collect()
    assert hooks == []
    assert gone() is None


def test_hooks_run_in_their_order_whatever_was_imported_first(monkeypatch):
    """And one that fails keeps no other from running."""
    monkeypatch.setattr(hooks, "_hooks", {"before": {}, "in_parent": {}, "in_child": {}})
    ran = []
    for place in (hooks.Place.DJANGO, hooks.Place.ENGINE, hooks.Place.SQLITE, hooks.Place.CONNECTIONS):
        for moment in ("before", "in_parent", "in_child"):
            hooks.register(place, **{moment: lambda ran_at=(moment, place.name): ran.append(ran_at)})
    hooks.register(hooks.Place.SQLITE_LOCKS, in_child=lambda: 1 / 0)
    after = ["ENGINE", "CONNECTIONS", "SQLITE", "DJANGO"]
    before = [("before", name) for name in reversed(after)]
    with forked(lambda: ran == before + [("in_child", name) for name in after]) as child:
        assert exit_code(child) == 0
    assert ran == before + [("in_parent", name) for name in after]


def test_fork_waits_for_a_thread_that_wants_to_log():
    """The lock of `logging` must not be taken before our hooks have waited for the threads."""
    program = """
        from tenure.base import fork
        import logging, os, threading

        def wait():
            thread = threading.Thread(target=logging.getLogger, args=("new",), daemon=True)
            thread.start()
            thread.join(10)
            assert not thread.is_alive()
            os.write(1, b"waited")

        fork.register(fork.Place.SQLITE, before=wait)
        os.fork() or os._exit(0)
        os.wait()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, check=True, timeout=60)
    assert done.stdout == b"waited", done.stderr


def test_child_is_refused_although_the_parent_was_importing_what_answers(tmp_path):
    """The child would wait for a thread that it does not have. A server that forks workers is forked at any moment."""
    program = """
        import faulthandler, importlib.abc, importlib.machinery, os, sys, threading
        import tenure

        class Endless(importlib.abc.MetaPathFinder, importlib.abc.Loader):
            def find_spec(self, name, path, target=None):
                return importlib.machinery.ModuleSpec(name, self) if name == "tenure.store.records" else None

            def exec_module(self, module):
                importing.set()
                threading.Event().wait()

        importing = threading.Event()
        with tenure.Node(sys.argv[1]) as node:
            election = node.election("r")
            election.wait(20)
            assert "tenure.store.records" not in sys.modules
            sys.meta_path.insert(0, Endless())
            threading.Thread(target=__import__, args=("tenure.store.records",), daemon=True).start()
            assert importing.wait(10)
            child = os.fork()
            if not child:
                faulthandler.dump_traceback_later(10, exit=True)
                refused = 0
                for ask in (election.leader, election.candidates, election.history, election.jobs):
                    try:
                        ask()
                    except tenure.NodeClosed:
                        refused += 1
                os._exit(refused)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(code, flush=True)
        os._exit(0)
    """
    command = [sys.executable, "-c", textwrap.dedent(program), f"sqlite:///{tmp_path}/tenure.db"]
    done = subprocess.run(command, capture_output=True, check=True, text=True, timeout=60)
    assert done.stdout == "4\n", done.stderr


inherited = []
"""What a pool's workers find when they are forked."""


def believes(_):
    (election,) = inherited
    return os.getpid(), election.is_leader, raises_closed(election.leader)


def test_workers_of_a_pool_never_lead(postgres_url):
    with Nodes(postgres_url, **QUICK) as nodes, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        election = nodes("parent").election("r")
        term = election.wait(20)
        inherited[:] = [election]
        try:
            with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
                answers = pool.map(believes, range(6), chunksize=1)
        finally:
            inherited.clear()
        assert {answer[1:] for answer in answers} == {(False, True)}
        assert len({pid for pid, *_ in answers}) == 6
        assert term.valid
        assert election.leader().token == 1


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_multiprocessing_leaves_the_parent_leading(sqlite_url, method):
    with Nodes(sqlite_url, ttl=30) as nodes, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        election = nodes("parent").election("r")
        term = election.wait(20)
        worker = multiprocessing.get_context(method).Process(target=os.getpid)
        worker.start()
        worker.join(30)
        assert worker.exitcode == 0
        assert term.valid


# --- gunicorn -----------------------------------------------------------------------------------------------

CONFIG = """
import app
preload_app = True
accesslog = None
control_socket_disable = True
"""
APP = """
import json, os, tenure

def start(**settings):
    global node, election
    node = tenure.Node(ttl=10, renew_every=0.3, **settings).start()
    election = node.election("r")

def application(environ, start_response):
    start_response("200 OK", [("Content-Type", "text/plain")])
    yield f"{os.getpid()}\\n".encode()
    environ["wsgi.input"].read(1)  # until every worker has a request
    answer = {"is_leader": election.is_leader}
    try:
        leader = election.leader()
        answer["token"] = leader.token if leader else 0
    except tenure.NodeClosed as error:
        answer["error"] = str(error)
    yield json.dumps(answer).encode()
"""


class Gunicorn:
    """A gunicorn master and its workers, with APP preloaded."""

    def __init__(self, url, directory, workers, config="", app=""):
        (directory / "app.py").write_text(APP + textwrap.dedent(app))
        (directory / "gunicorn.conf.py").write_text(CONFIG + textwrap.dedent(config))
        self.workers = workers
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._log = directory / "gunicorn.log"
        command = [sys.executable, "-W", "ignore", "-m", "gunicorn", "app:application", f"--workers={workers}"]
        descriptor = self._listener.fileno()
        with self._log.open("wb") as log:
            self.master = subprocess.Popen(
                [*command, f"--bind=fd://{descriptor}"],
                cwd=directory,
                env=os.environ | {"TENURE_URL": url},
                pass_fds=[descriptor],
                stderr=log,
            )

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if self.master.poll() is None:
            self.master.terminate()
        self.master.wait(30)
        self._listener.close()
        if kind is not None:
            print(self._log.read_text())
        else:
            assert "Traceback" not in self._log.read_text()

    def ask(self):
        """What each of the workers has to say, by its pid: a worker that has one request cannot take another."""
        with contextlib.ExitStack() as stack:
            answers = {}
            requests = []
            for _ in range(self.workers):
                connection = stack.enter_context(socket.create_connection(self._listener.getsockname(), timeout=30))
                connection.sendall(b"POST / HTTP/1.0\r\nContent-Length: 1\r\n\r\n")
                requests.append((connection, stack.enter_context(connection.makefile("rb"))))
            pids = []
            for _, reply in requests:
                while reply.readline().strip():
                    pass
                pids.append(int(reply.readline()))
            for pid, (connection, reply) in zip(pids, requests, strict=True):
                connection.sendall(b".")
                answers[pid] = json.loads(reply.read())
            assert len(answers) == self.workers
            return answers


@pytest.mark.twin("sqlite")
def test_gunicorn_master_that_made_a_node_leads_and_its_workers_never_do(one_url, tmp_path):
    """The mistake that people make: a node started by the import of a preloaded application."""
    app = "start(name='master'); election.wait(20)"
    with Nodes(one_url, **QUICK) as nodes, Gunicorn(one_url, tmp_path, 2, app=app) as gunicorn:

        def workers_are_no_leaders(*, without):
            answers = gunicorn.ask()
            if not without.isdisjoint(answers):
                return None  # still on its way out
            for answer in answers.values():
                assert not answer["is_leader"]
                assert "node 'master' belongs to the parent process: create a new node" in answer["error"]
            return set(answers)

        first = workers_are_no_leaders(without=set())
        standby = nodes("standby").election("r")
        until(lambda: len(standby.candidates()) == 2, "standing")
        os.kill(min(first), signal.SIGKILL)
        second = until(lambda: workers_are_no_leaders(without={min(first)}), "a worker in its place")
        gunicorn.master.send_signal(signal.SIGHUP)
        until(lambda: workers_are_no_leaders(without=first | second), "workers reloaded")
        seen = renewals(one_url)[-1]
        until(lambda: renewals(one_url)[0] > seen + 1, "renewals of both")
        leader = standby.leader()
        assert (leader.name, leader.token) == ("master", 1)
        gunicorn.master.terminate()
        assert gunicorn.master.wait(30) == 0
        assert standby.wait(20).token == 2


@pytest.mark.twin("sqlite")
def test_gunicorn_workers_with_a_node_each_elect_one_of_them(one_url, tmp_path):
    """The right way: each makes its own, after the fork."""
    config = """
        def post_worker_init(worker):
            app.start()
    """
    with Gunicorn(one_url, tmp_path, 3, config=config) as gunicorn:

        def leader(above):
            answers = gunicorn.ask()
            leaders = [(pid, answer["token"]) for pid, answer in answers.items() if answer["is_leader"]]
            assert len(leaders) <= 1
            return leaders[0] if leaders and leaders[0][1] > above else None

        pid, token = until(lambda: leader(above=0), "a leader")
        os.kill(pid, signal.SIGKILL)
        successor, later = until(lambda: leader(above=token), "a successor")
        assert successor != pid
        assert later == token + 1
