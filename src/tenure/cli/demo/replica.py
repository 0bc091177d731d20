"""One of the three processes of the demo: the program that it runs, and the object by which the demo controls it.

The demo runs ``python -m tenure.cli.demo.replica '{"name": "replica-a", …}'``, with the URL in TENURE_URL. The
process reads commands from stdin, one per line, and writes JSON lines to stdout. All times are readings of
``tenure.base.clock``, which the processes of a machine share.

    read            report is_leader
    write           write a row under the last term, in a fenced transaction
    candidates      report the candidates for the role
    hand-over NAME  resign in favour of NAME

At the end of its input the process leaves the namespace and exits.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from tenure import Election, Fenced, Node, TenureError, Term
from tenure.base.clock import now
from tenure.cli.run.processes import PR_SET_PDEATHSIG, prctl

ROLE = "scheduler"
READ_EVERY_S = 0.002
SAY_EVERY_S = 0.05
LEAVE_S = 5.0


class Failure(Exception):
    """Something that the demo claims did not happen."""


# The program --------------------------------------------------------------------------------------------------


class Program:
    """Stands for the role, reads ``is_leader`` all the time and reports it, and obeys commands."""

    def __init__(self, node: Node, election: Election, ledger: str) -> None:
        self._node = node
        self._election = election
        mark = "?" if node.database == "sqlite" else "%s"
        self._insert = f"insert into {ledger} (token, name) values ({mark}, {mark})"
        self._term: Term | None = None
        threading.Thread(target=self._keep_reading, daemon=True).start()

    def obey(self) -> None:
        """Obey the commands on stdin, until stdin ends."""
        commands: dict[str, Callable[..., dict[str, Any]]] = {
            "read": lambda: {"leads": self._election.is_leader},
            "write": self._write,
            "candidates": lambda: {"names": [candidate.name for candidate in self._election.candidates()]},
            "hand-over": self._hand_over,
        }
        for line in sys.stdin:
            name, *arguments = line.split()
            try:
                say(name, **commands[name](*arguments))
            except TenureError as error:
                say(name, failed=str(error))

    def _write(self) -> dict[str, Any]:
        assert self._term is not None
        try:
            with self._term.transaction() as transaction:
                transaction.execute(self._insert, (self._term.token, self._node.name))
        except Fenced as error:
            return {"token": self._term.token, "refused": str(error)}
        return {"token": self._term.token}

    def _hand_over(self, name: str) -> dict[str, Any]:
        self._election.resign(to=name)
        return {}

    def _keep_reading(self) -> None:
        """Read ``is_leader`` as a service would, and report the first and the last True of each term."""
        reads, first, last = 0, 0.0, 0.0
        said: tuple[bool, float] = (False, 0.0)
        said_at = 0.0
        while True:
            before = now()
            leads = self._election.is_leader
            after = now()
            reads += 1
            term = self._election.term
            if term is not None and (self._term is None or term.token != self._term.token):
                self._term, first = term, after
            if leads:
                last = before
            until = after + self._term.remaining if self._term is not None else 0.0
            if leads != said[0] or until > said[1] + 0.01 or after > said_at + SAY_EVERY_S:
                said, said_at = (leads, until), after
                token = self._term.token if self._term is not None else None
                joined = self._node.member_id is not None
                say("state", leads=leads, token=token, until=until, first=first, last=last, reads=reads, joined=joined)
            time.sleep(READ_EVERY_S)


def say(what: str, **details: object) -> None:
    """Send a message to the demo, from any thread."""
    try:
        os.write(1, json.dumps({"what": what, "at": now(), **details}).encode() + b"\n")
    except BrokenPipeError:
        # The demo has ended.
        os._exit(1)


def main() -> None:
    """Run as a replica."""
    # A frozen replica does not see the end of its input. So the kernel kills it when the demo ends.
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    logging.getLogger("tenure").addHandler(logging.NullHandler())
    options = json.loads(sys.argv[1])
    ledger = options.pop("ledger")
    try:
        with Node(**options) as node:
            say("started", mode=node.mode)
            Program(node, node.election(ROLE), ledger).obey()
    except TenureError as error:
        say("ended", why=str(error))


# What controls it ---------------------------------------------------------------------------------------------


class Replica:
    """A process of the demo, and the state that it reported last."""

    def __init__(self, url: str, **options: Any) -> None:
        """Start the process; the options are those of a node, and ``ledger``, the table to write to."""
        self.name: str = options["name"]
        self.fate = ""
        """What the demo did to it: ``killed``, ``frozen``, or nothing."""
        self.mode: str | None = None
        self.leads = self.joined = False
        self.until = 0.0
        """When its lease is over, unless it is renewed."""
        self.lease = 0.1
        """The most that it ever had left of its lease, in seconds."""
        self.reads = 0
        self.terms: dict[int, tuple[float, float]] = {}
        """The first and the last moment at which it read True, by token."""
        self.answers: list[dict[str, Any]] = []
        self._rest = b""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TENURE_")}
        self.process = subprocess.Popen(  # noqa: S603 - this program
            [sys.executable, "-m", "tenure.cli.demo.replica", json.dumps(options)],
            env={**environment, "TENURE_URL": url},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            # Ctrl-C in the terminal must not reach the replica.
            start_new_session=True,
        )
        self.pid = self.process.pid

    @property
    def token(self) -> int | None:
        """The token of its last term."""
        return max(self.terms, default=None)

    def ask(self, command: str) -> None:
        """Send a command."""
        assert self.process.stdin
        try:
            self.process.stdin.write(command.encode() + b"\n")
        except BrokenPipeError:
            # The replica has ended. This raises an error that says why.
            self.read()

    def signal(self, number: signal.Signals) -> float:
        """Send a signal; return the moment just before."""
        at = now()
        # The demo has not reaped the process, so the id is still its own.
        os.kill(self.pid, number)
        return at

    def read(self) -> None:
        """Read what it has reported; its end is a failure, unless the demo killed it."""
        assert self.process.stdout
        data = os.read(self.process.stdout.fileno(), 65536)
        if not data and self.fate != "killed":
            code = self.process.wait()
            how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            raise Failure(f"{self.name} {how}, but not by the demo")
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._take(json.loads(line))

    def _take(self, message: dict[str, Any]) -> None:
        if message["what"] == "state":
            self.leads, self.until, self.reads = message["leads"], message["until"], message["reads"]
            self.joined = message["joined"]
            self.lease = max(self.lease, self.until - message["at"])
            if message["token"] is not None:
                self.terms[message["token"]] = (message["first"], message["last"])
        elif message["what"] == "started":
            self.mode = message["mode"]
        elif message["what"] == "ended":
            raise Failure(f"{self.name} could not go on: {message['why']}")
        elif "failed" in message:
            raise Failure(f"{self.name} could not {message['what']}: {message['failed']}")
        else:
            self.answers.append(message)

    def close(self) -> None:
        """Close its input, so that it leaves."""
        assert self.process.stdin
        self.process.stdin.close()
        self.process.stdin = None
        if self.fate == "frozen":
            self.signal(signal.SIGCONT)

    def wait(self) -> None:
        """Wait for its end; kill it if that takes too long."""
        try:
            self.process.communicate(timeout=LEAVE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()


def listen(replicas: Sequence[Replica], seconds: float) -> None:
    """Read what replicas report; wait up to ``seconds`` for a report."""
    outputs = {
        replica.process.stdout: replica for replica in replicas if replica.process.stdout and replica.fate != "killed"
    }
    for output in select.select(list(outputs), [], [], seconds)[0]:
        outputs[output].read()


if __name__ == "__main__":
    main()
