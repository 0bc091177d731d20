"""Clusters of real processes: nodes that can be killed, stopped and cut off, and a record of what each believed.

    with Cluster(url, tmp_path, ttl=30) as cluster:
        cluster.start(3)
        leader = cluster.wait_for_leader()
        leader.kill()
        successor = cluster.wait_for_leader(since=leader)

A test waits on what the processes say (events, replies), not on time. On leaving the block every process is killed,
and the record of all of them is checked for broken promises; `cluster.history` is the record up to now. Where
something is broken, the report and the processes' logs are printed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import PIPE
from typing import TYPE_CHECKING, Any

from tests.support import history, starter
from tests.support.history import History, Recorder
from tests.support.store_by_hand import connected

if TYPE_CHECKING:
    from typing_extensions import Self

ROOT = Path(__file__).resolve().parents[2]
NODE_PROGRAM = "tests.support.node_process"
PATIENCE_S = 30.0
"""How long a test waits for what should come: so long that a slow machine is no failure, and a hang is one."""

LEDGER = {
    "sqlite": "create table ledger (n integer primary key autoincrement, role text, token integer, node text)",
    "postgresql": "create table ledger (n bigserial primary key, role text, token bigint, node text)",
    "mysql": "create table ledger (n bigint auto_increment primary key, role text, token bigint, node text)",
}


LOOPS = ("asyncio", "trio")
"""Where the nodes' event loops come from, in turn, if the tests run over the async facade."""


class NodeFailed(AssertionError):
    """A process ended, or did not answer, where it should have."""


class NodeProcess:
    """One process with one node (tests/support/node_process.py)."""

    def __init__(self, cluster: Cluster, name: str, netns: str | None, options: dict[str, Any]) -> None:
        self.cluster, self.name, self.options = cluster, name, options
        self.record = cluster.directory / f"{name}.jsonl"
        self.log = cluster.directory / f"{name}.log"
        self.said: list[dict[str, Any]] = []
        self._commands = 0
        self._changed = cluster.changed
        source = options.pop("source", None)
        """Where another release's ``tenure`` is."""
        python = options.pop("python", None)
        """The interpreter of another release's environment."""
        told = {"name": name, "record": str(self.record), "role": cluster.role, **options}
        env = os.environ | {
            "TENURE_URL": options.pop("url", cluster.url),
            "LOOP": LOOPS[len(cluster.nodes) % len(LOOPS)],
            **({"PYTHONPATH": source} if source else {}),
        }
        self.process: starter.Started | subprocess.Popen[bytes]
        with self.log.open("ab") as log:
            if cluster.program == NODE_PROGRAM and netns is None and source is None and python is None:
                self.process = starter.start(
                    cluster.program, json.dumps(told), env=env, cwd=ROOT, stdin=PIPE, stdout=PIPE, stderr=log
                )
            else:
                command = ["ip", "netns", "exec", netns] if netns is not None else []
                command += [python or sys.executable, "-m", cluster.program, json.dumps(told)]
                self.process = subprocess.Popen(command, env=env, cwd=ROOT, stdin=PIPE, stdout=PIPE, stderr=log)
        self._reader = threading.Thread(target=self._read, name=f"reads {name}", daemon=True)
        self._reader.start()

    def __repr__(self) -> str:
        return f"<NodeProcess {self.name}>"

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    # -- talking to it --

    def send(self, command: str) -> int:
        """Send a command and return its number; reply() waits for the answer."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(command.encode() + b"\n")
            self.process.stdin.flush()
        except OSError as error:
            raise NodeFailed(f"{self.name} cannot be told {command!r}: {error}, {self.process.poll()=}") from None
        self._commands += 1
        return self._commands - 1

    def reply(self, number: int, timeout: float = PATIENCE_S) -> dict[str, Any]:
        """The answer to a command, without its number."""
        line = self.wait_for(lambda line: line.get("reply") == number, f"reply {number}", timeout)
        return {key: value for key, value in line.items() if key != "reply"}

    def ask(self, command: str, timeout: float = PATIENCE_S) -> dict[str, Any]:
        """Send a command and return its reply, an error or not."""
        return self.reply(self.send(command), timeout)

    def tell(self, command: str, timeout: float = PATIENCE_S) -> dict[str, Any]:
        """Send a command that must work."""
        reply = self.ask(command, timeout)
        assert "error" not in reply, f"{self.name}: {command}: {reply}"
        return reply

    def assert_fenced(self) -> None:
        """Assert that the database refuses a write under its last term.

        SQLite may be busy before it can refuse anything: then the write is tried again.
        """
        deadline = time.monotonic() + PATIENCE_S
        while (reply := self.ask("write")).get("error") != "Fenced" or reply.get("retryable"):
            busy = "locked" in reply.get("message", "") and time.monotonic() < deadline
            assert busy, f"{self.name}: a write was not fenced: {reply}"

    def wait_for(
        self, condition: Callable[[dict[str, Any]], bool], what: str, timeout: float = PATIENCE_S
    ) -> dict[str, Any]:
        """Wait for a line on its stdout, said already or still to come."""
        deadline = time.monotonic() + timeout
        with self._changed:
            seen = 0
            while True:
                for line in self.said[seen:]:
                    if condition(line):
                        return line
                seen = len(self.said)
                if not self._reader.is_alive():
                    raise NodeFailed(f"{self.name} ended without {what}; its log:\n{self.log.read_text()}")
                if not self._changed.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                    raise NodeFailed(f"no {what} from {self.name} within {timeout:g} s")

    def wait_event(
        self, event: str, *, since: int = 0, token: int | None = None, timeout: float = PATIENCE_S
    ) -> dict[str, Any]:
        """Wait for an event, heard after `since` (ns)."""
        return self.wait_for(
            lambda line: (
                line.get("event") == event
                and line.get("at", since) >= since
                and (token is None or line["token"] == token)
            ),
            f"event {event}",
            timeout,
        )

    def events(self, *kinds: str, since: int = 0) -> list[dict[str, Any]]:
        """The events that it has told so far."""
        with self._changed:
            return [line for line in self.said if line.get("event") in kinds and line.get("at", since) >= since]

    def _read(self) -> None:
        assert self.process.stdout is not None
        for text in self.process.stdout:
            with self._changed:
                self.said.append(json.loads(text))
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    # -- what can happen to it --

    def kill(self, number: int = signal.SIGKILL) -> int:
        """End it by a signal; return the moment (ns) just before."""
        at = self.signal(number)
        self.process.wait(PATIENCE_S)
        return at

    def stop(self) -> int:
        """SIGSTOP; return when all of its threads stand still, with the moment before."""
        at = self.signal(signal.SIGSTOP)
        if isinstance(self.process, starter.Started):
            self.process.wait_until_stopped()
        else:
            os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)
        return at

    def cont(self) -> int:
        return self.signal(signal.SIGCONT)

    def signal(self, number: int) -> int:
        at = history.now_ns()
        self.process.send_signal(number)
        self.cluster.recorder.fault(signal.Signals(number).name, self.name, at_before=at)
        return at

    def close(self) -> None:
        """Kill it if it still runs (stopped or not), and leave nothing open."""
        if self.running:
            self.process.kill()
        self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        assert self.process.stdout is not None
        assert self.process.stdin is not None
        self.process.stdout.close()
        with contextlib.suppress(OSError):
            self.process.stdin.close()


class Cluster:
    """Some processes on one database. `options` are the nodes' settings; start() and spawn() may change them.

    `strictly=False` leaves overlaps out of the checks at the end: for the one fault in which instant mode permits one.
    """

    def __init__(
        self,
        url: str,
        directory: Path,
        *,
        role: str = "scheduler",
        sample_every_s: float = 0.001,
        strictly: bool = True,
        program: str = NODE_PROGRAM,
        **options: Any,
    ) -> None:
        self.url, self.directory, self.role, self.program = url, directory, role, program
        self.options = {"sample_every_s": sample_every_s, **options}
        self.changed = threading.Condition()
        self.nodes: list[NodeProcess] = []
        self.recorder = Recorder(directory / "faults.jsonl", "the test")
        self._strictly = strictly

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        for node in self.nodes:
            node.close()
        self.recorder.close()
        try:
            if kind is None:
                self.check()
        except AssertionError:
            self.explain()
            raise
        if kind is not None:
            self.explain()

    # -- processes --

    def load(self, *names: str, netns: str | None = None, **options: Any) -> list[NodeProcess]:
        """Start processes that have imported everything and wait for the command `start`."""
        loaded = [NodeProcess(self, name, netns, self.options | options) for name in names]
        self.nodes += loaded
        for node in loaded:
            node.wait_event("loaded")
        return loaded

    def spawn(self, *names: str, netns: str | None = None, **options: Any) -> list[NodeProcess]:
        """Start processes, and their nodes; return when all are candidates or on the way there."""
        nodes = self.load(*names, netns=netns, **options)
        for node, number in [(node, node.send("start")) for node in nodes]:
            reply = node.reply(number)
            assert "error" not in reply, f"{node.name}: {reply}"
        return nodes

    def start(self, count: int, **options: Any) -> list[NodeProcess]:
        """Start `count` more nodes, and wait until each of them is known to the others as a candidate."""
        first = len(self.nodes)
        nodes = self.spawn(*(f"node-{first + n}" for n in range(count)), **options)
        self.wait_for_candidates(*nodes)
        return nodes

    def start_at_once(self, count: int) -> list[NodeProcess]:
        """Have `count` loaded processes start at the same instant; all of them come up."""
        nodes = self.load(*(f"node-{n}" for n in range(count)))
        at = history.now_ns() + 100_000_000  # everybody has the command by then, and waits for the moment
        replies = [node.reply(number) for node, number in [(node, node.send(f"start {at}")) for node in nodes]]
        assert [reply for reply in replies if "error" in reply] == []
        return nodes

    def wait_for_candidates(self, *nodes: NodeProcess, timeout: float = PATIENCE_S) -> None:
        """Wait until the database lists all of these processes as candidates."""
        deadline = time.monotonic() + timeout
        names = {node.name for node in nodes}
        while not names <= set((listed := nodes[0].tell("leader"))["candidates"]):
            assert time.monotonic() < deadline, f"{names} are not all among the candidates: {listed}"
            time.sleep(0.02)

    # -- who leads --

    def wait_for_leader(
        self, above: int = 0, *, among: list[NodeProcess] | None = None, timeout: float = PATIENCE_S
    ) -> tuple[NodeProcess, int]:
        """Wait until somebody was elected with a token above `above`; return who, of the highest one, and the token."""
        found: list[tuple[int, NodeProcess]] = []

        def elected() -> bool:
            found[:] = [
                (line["token"], node)
                for node in (self.nodes if among is None else among)
                for line in node.said
                if line.get("event") == "elected" and line["token"] > above
            ]
            return bool(found)

        with self.changed:
            if not self.changed.wait_for(elected, timeout):
                raise NodeFailed(f"nobody was elected with a token above {above} within {timeout:g} s")
        token, node = max(found, key=lambda pair: pair[0])
        return node, token

    def elected_at(self, token: int) -> int:
        """When (ns) the node that has this token heard of its election."""
        return next(int(line["at"]) for node in self.nodes for line in node.events("elected") if line["token"] == token)

    def in_ring(self) -> list[NodeProcess]:
        """The running nodes in the order of the ring: each one watches the one before it."""
        members = {node: node.tell("status")["member"] for node in self.nodes if node.running}
        return sorted(members, key=lambda node: members[node])

    # -- the record --

    def fault(self, fault: str, target: str | None = None) -> int:
        """Write down what is done next, to whom; return the moment (ns)."""
        at = history.now_ns()
        self.recorder.fault(fault, target, at=at)
        return at

    @property
    def history(self) -> History:
        """What has been recorded so far."""
        records = [node.record for node in self.nodes if node.record.exists()]
        return History.load(dict.fromkeys([*records, self.directory / "faults.jsonl"]))

    def check(self) -> None:
        """Assert every promise that a history can break."""
        recorded = self.history
        found = history.token_regressions(recorded) + history.stale_writes(recorded)
        found += history.ledger_regressions(self.ledger()) if self._has_ledger else []
        found += history.overlaps(recorded) if self._strictly else []
        assert not found, "\n".join(found)

    def explain(self) -> None:
        """Print what happened: pytest shows it beside the failure."""
        print(history.report(self.history))
        for node in self.nodes:
            print(f"--- {node.name}, pid {node.pid}\n{node.log.read_text()}", end="")

    # -- the ledger --

    _has_ledger = False

    def make_ledger(self) -> None:
        """Create the table that the nodes' fenced writes go to."""
        self.execute(LEDGER[self._database])
        self._has_ledger = True

    def ledger(self) -> list[tuple[int, int]]:
        """The rows of the ledger: order and token."""
        return self.execute("select n, token from ledger order by n")

    @property
    def _database(self) -> str:
        return self.url.partition(":")[0]

    def execute(self, *texts: str, timeout: float = PATIENCE_S) -> list[Any]:
        """Run statements on a connection of their own and return the rows of the last."""
        with self._connection(timeout) as connection:
            for text in texts[:-1]:
                connection.execute(text)
            cursor = connection.execute(texts[-1])
            return list(cursor.fetchall()) if cursor.description else []

    @contextlib.contextmanager
    def _connection(self, timeout: float) -> Iterator[Any]:
        if self._database == "sqlite":
            path = self.url.partition(":///")[2]
            with contextlib.closing(sqlite3.connect(path, timeout=timeout, isolation_level=None)) as connection:
                yield connection
        elif self._database == "mysql":
            with connected(self.url, autocommit=True) as connection:
                yield connection
        else:
            import psycopg

            with psycopg.connect(self.url, autocommit=True, application_name="tests") as connection:
                yield connection
