"""The program of one process of a cluster: a node, its sampler, and a line of commands. See tests/support/cluster.py.

`python -m tests.support.node_process '{"name": "a", "record": "/…/a.jsonl", …}'`, the database in TENURE_URL. Commands
come in on stdin, a line each; replies and events go out on stdout as JSON lines. Everything that proves something goes
to the record, a line at a time, so that it survives kill -9.

    start [AT]    make the node, at the moment AT (CLOCK_BOOTTIME, ns) if one is given
    status        is_leader, the token of the last term, the member's id
    leader        who leads as the database knows it, who stands, and the terms so far
    ensure        term.ensure() of the last term
    fence         a fenced transaction that does nothing
    write         a fenced write into the ledger
    writes        fenced writes one after the other, until the term is over, for every term from now on
    begin [BOUND] a fenced write that is not committed yet; `unbounded` takes the server's bound off again
    commit        ... and its COMMIT
    resign [TO]   election.resign(to=TO)
    leave         node.close()
    quit          the end of the process, without a word to anybody

An error is a reply, too: {"error": "Fenced", "message": …}. With `"migration": {…}` it is a node of the next release.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import tenure
from tests.support import facades, history

INSERT = {
    "sqlite": "insert into ledger (role, token, node) values (?, ?, ?)",
    "postgresql": "insert into ledger (role, token, node) values (%s, %s, %s)",
    "mysql": "insert into ledger (role, token, node) values (%s, %s, %s)",
}
SETTINGS = ("ttl", "renew_every", "takeover", "mode", "direct_url", "start")
PR_SET_PDEATHSIG = 1


faulthandler.enable()  # SQLite can make a process die of a signal


def die_with_parent() -> None:
    """Have the kernel kill us with the test process: a stopped process would not see its stdin close."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))


class Program:
    commands: tuple[str, ...] = (
        "start", "status", "leader", "ensure", "fence", "write", "writes", "begin", "commit", "resign", "leave"
    )  # fmt: skip

    def __init__(self, options: dict[str, Any]) -> None:
        self.name, self.role = options["name"], options["role"]
        self.settings = {name: options[name] for name in SETTINGS if name in options}
        self.sample_every_s = options["sample_every_s"]
        self.recorder = history.Recorder(options["record"], self.name, heartbeat_s=options.get("heartbeat_s", 0.01))
        if "migration" in options:
            from tenure.store import tables  # not above: this program also runs on earlier releases, which have none

            tables.MIGRATIONS += (tables.Migration(**options["migration"]),)
        database = os.environ["TENURE_URL"].partition(":")[0]
        self.insert = INSERT[database]
        if database == "postgresql":
            import psycopg  # noqa: F401 - so that `loaded` is the truth
        if database == "mysql":
            import pymysql  # noqa: F401
        self.node: tenure.Node | None = None
        self.election: tenure.Election | None = None
        self.term: tenure.Term | None = None
        self.open: Any = None
        self.writing = threading.Event()
        self._stdout = threading.Lock()

    def say(self, **line: Any) -> None:
        with self._stdout:
            print(json.dumps(line), flush=True)

    # -- commands --

    def run(self) -> None:
        self.say(event="loaded", pid=os.getpid())
        commands: dict[str, Callable[..., dict[str, Any] | None]] = {
            name: getattr(self, name) for name in self.commands
        }
        for number, line in enumerate(sys.stdin):
            name, *arguments = line.split()
            if name == "quit":
                return
            try:
                reply = commands[name](*arguments) or {}
            except Exception as error:  # noqa: BLE001 - the test decides what is one too many
                reply = {"error": type(error).__name__, "message": str(error)}
            self.say(reply=number, **reply)

    def start(self, at_ns: str | None = None) -> dict[str, Any]:
        if at_ns is not None:
            time.sleep(max(0, int(at_ns) - history.now_ns()) / 1e9)
        self.node = tenure.Node(name=self.name, **self.settings).start()
        # Under the lock no event comes in between: a node on SQLite may be elected within a few milliseconds.
        with self.node._engine.lock:
            self.election = self.node.election(self.role)
            self.election.on_event(self.heard)
        threading.Thread(target=self.sample, args=(self.election,), daemon=True).start()
        threading.Thread(target=self.keep_writing, args=(self.election,), daemon=True).start()
        return {"pid": os.getpid()}

    def status(self) -> dict[str, Any]:
        assert self.node is not None
        assert self.election is not None
        return {
            "leader": self.election.is_leader,
            "token": self.term.token if self.term else None,
            "member": self.node.member_id,
        }

    def leader(self) -> dict[str, Any]:
        assert self.election is not None
        info = self.election.leader()
        return {
            "name": info.name if info else None,
            "token": info.token if info else None,
            "candidates": [candidate.name for candidate in self.election.candidates()],
            "history": [[record.token, record.name] for record in self.election.history()],
        }

    def ensure(self) -> None:
        self.last_term().ensure()

    def fence(self) -> None:
        with self.last_term().transaction():
            pass

    def write(self) -> dict[str, Any]:
        return self.write_under(self.last_term())

    def writes(self) -> None:
        self.writing.set()

    def begin(self, bound: str | None = None) -> None:
        term = self.last_term()
        self.open = term.transaction() if bound in (None, "unbounded") else term.transaction(bound=float(bound))
        transaction = self.open.__enter__()
        transaction.execute(self.insert, (self.role, term.token, self.name))
        if bound == "unbounded":
            transaction.execute("set local idle_in_transaction_session_timeout = 0")
            if transaction.execute("show server_version_num").fetchone()[0] >= "170000":
                transaction.execute("set local transaction_timeout = 0")

    def commit(self) -> None:
        self.open.__exit__(None, None, None)

    def resign(self, to: str | None = None) -> None:
        assert self.election is not None
        self.election.resign(to)

    def leave(self) -> None:
        assert self.node is not None
        self.node.close()

    # -- what goes on beside them --

    def last_term(self) -> tenure.Term:
        assert self.term is not None, "never elected"
        return self.term

    def heard(self, event: tenure.Event) -> None:
        """Take in an event, on the node's thread for callbacks."""
        kind = type(event).__name__.lower()
        at = history.now_ns()
        if isinstance(event, tenure.Elected) and self.election is not None:
            self.term = self.election.term or self.term
        details: dict[str, str | None] = {"reason": event.reason} if isinstance(event, tenure.Deposed) else {}
        if isinstance(event, tenure.LeaderChanged):
            details = {"name": event.name}
        else:
            self.recorder.term(self.role, kind, event.token, at=at, **details)  # type: ignore[arg-type]
        self.say(event=kind, token=event.token, at=at, **details)

    def sample(self, election: tenure.Election) -> None:
        """Ask is_leader all the time; and keep each term, to be used when it is over, too."""

        def token() -> int | None:
            term = election.term
            if term is None:
                return None
            self.term = term
            return term.token

        while True:
            self.recorder.sample(self.role, lambda: election.is_leader, token)
            time.sleep(self.sample_every_s)

    def keep_writing(self, election: tenure.Election) -> None:
        """Write under each term until the database refuses: nothing here asks whether the term is valid."""
        self.writing.wait()
        while True:
            try:
                term = election.wait()
            except tenure.TenureError:
                return  # left
            failures = 0
            while failures < 20:
                reply = self.write_under(term)
                if reply.get("error") == "Fenced" and not reply["retryable"]:
                    break
                failures = failures + 1 if "error" in reply else 0
                time.sleep(0.002)

    def write_under(self, term: tenure.Term) -> dict[str, Any]:
        at_before = history.now_ns()
        try:
            with term.transaction() as transaction:
                transaction.execute(self.insert, (self.role, term.token, self.name))
                at_before = history.now_ns()  # just before the COMMIT
        except Exception as error:  # noqa: BLE001 - the server may go at any point
            self.recorder.write(self.role, term.token, ok=False, at_before=at_before, error=type(error).__name__)
            retryable = getattr(error, "retryable", False)
            return {"error": type(error).__name__, "message": str(error), "retryable": retryable}
        self.recorder.write(self.role, term.token, ok=True, at_before=at_before)
        return {}


def main(program: type[Program] = Program) -> None:
    die_with_parent()
    facades.install()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s.%(msecs)03d %(name)s: %(message)s", datefmt="%H:%M:%S")
    program(json.loads(sys.argv[1])).run()
    os._exit(0)  # no last word: leaving is a command of its own


if __name__ == "__main__":
    main()
