"""Three real processes, one leader: watch it being killed, frozen, and replaced.

    [TENURE_URL=postgresql://…] python examples/demo.py

Without TENURE_URL everything runs on a SQLite file in a temporary directory: no server, nothing left behind. Exits with
1 if anything that it claims did not happen.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import tenure

TTL_S = 3.0
ROLE = "scheduler"


class Failure(Exception):
    """Something that the demo claims did not happen."""


# What each of the three processes runs


def replica() -> None:
    """Stand for the role, say when leadership comes and goes, and write under the fence when asked."""
    with tenure.Node(ttl=TTL_S) as node:
        election = node.election(ROLE)
        election.on_event(lambda event: say(type(event).__name__, token=event.token))
        say("Ready")
        term = None
        for line in sys.stdin:
            term = election.term or term
            if line.strip() == "read":
                say("Read", is_leader=election.is_leader)
            elif line.strip() == "write" and term is not None:
                try:
                    with term.transaction() as transaction:
                        transaction.execute("select 1")
                    say("Wrote", token=term.token)
                except tenure.Fenced as error:
                    say("Refused", why=str(error))


def say(what: str, **details: object) -> None:
    """Tell the parent, stamped by a clock that all processes of a machine share; whole lines, from any thread."""
    os.write(1, json.dumps({"what": what, "at": clock(), **details}).encode() + b"\n")


def clock() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.time()


# What the demo does to them


class Replica:
    """One of the three."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--replica"],
            env={**os.environ, "TENURE_URL": url, "TENURE_NAME": name, "TENURE_NAMESPACE": "demo"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # or a second line could wait in a buffer that select() does not see
        )

    def ask(self, command: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(command.encode() + b"\n")

    def hear(self, *expected: str, within_s: float = 30) -> dict[str, Any]:
        """Return the next message of one of the kinds expected."""
        deadline = time.monotonic() + within_s
        assert self.process.stdout
        while time.monotonic() < deadline:
            if select.select([self.process.stdout], [], [], 0.1)[0]:
                message = self.message()
                if message["what"] in expected:
                    return message
        raise Failure(f"{self.name} did not say {' or '.join(expected)} within {within_s:g} s")

    def message(self) -> dict[str, Any]:
        """Return what it says next; a process that has ended says nothing any more."""
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise Failure(f"{self.name} ended with status {self.process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def first_elected(replicas: list[Replica], within_s: float = 30) -> tuple[Replica, dict[str, Any]]:
    """Return who is elected first, and the message that says so."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        streams = {replica.process.stdout: replica for replica in replicas}
        for stream in select.select(list(streams), [], [], 0.1)[0]:
            message = streams[stream].message()
            if message["what"] == "Elected":
                return streams[stream], message
    raise Failure(f"nobody was elected within {within_s:g} s")


@contextlib.contextmanager
def cluster(url: str) -> Iterator[list[Replica]]:
    replicas = [Replica(f"replica-{letter}", url) for letter in "abc"]
    try:
        yield list(replicas)
    finally:
        for replica in replicas:
            replica.close()


def step(text: str) -> None:
    print(text, flush=True)


def demo(url: str) -> None:
    with cluster(url) as replicas:
        leader, elected = first_elected(replicas)
        token = elected["token"]
        step(f"Three processes stand for the role {ROLE!r}. {leader.name} leads with token {token}.")
        leader.ask("write")
        leader.hear("Wrote")
        step("  It writes to the database under its term: accepted.")

        time.sleep(1.5)  # let everybody see everybody
        killed_at = clock()
        leader.process.send_signal(signal.SIGKILL)
        replicas.remove(leader)
        old, (leader, elected) = leader, first_elected(replicas)
        old.close()
        step(f"\nkill -9 {old.name}")
        step(f"  {leader.name} leads {(elected['at'] - killed_at) * 1000:.0f} ms later, with token {elected['token']}.")
        expect(elected["token"] > token, "the token did not grow")
        token = elected["token"]

        leader.ask("write")
        leader.hear("Wrote")
        leader.process.send_signal(signal.SIGSTOP)
        replicas.remove(leader)
        frozen, (leader, elected) = leader, first_elected(replicas)
        step(f"\nFreeze {frozen.name} (SIGSTOP) for longer than its lease of {TTL_S:g} s")
        step(f"  {leader.name} leads, with token {elected['token']}.")
        expect(elected["token"] > token, "the token did not grow")

        frozen.process.send_signal(signal.SIGCONT)
        frozen.ask("read")
        believes = frozen.hear("Read")["is_leader"]
        expect(not believes, "the frozen leader still believed that it leads")
        step(f"\nWake {frozen.name}\n  Its first read of is_leader: {believes}.")
        frozen.ask("write")
        refused = frozen.hear("Refused", "Wrote")
        expect(refused["what"] == "Refused", "the database accepted a stale write")
        step(f"  Its write under the old term: refused. {refused['why'].capitalize()}.")
        leader.ask("write")
        leader.hear("Wrote")
        step(f"  {leader.name} writes: accepted.")


def expect(happened: bool, otherwise: str) -> None:
    if not happened:
        raise Failure(otherwise)


def main() -> int:
    if sys.argv[1:] == ["--replica"]:
        replica()
        return 0
    with tempfile.TemporaryDirectory() as directory:
        try:
            url = os.environ.get("TENURE_URL") or f"sqlite:///{directory}/demo.db"
            tenure.Node(url, namespace="demo", name="demo").start().close()  # say at once what is wrong with it
            demo(url)
        except (Failure, tenure.TenureError) as failure:
            print(f"\nThe demo failed: {failure}.", file=sys.stderr)
            return 1
    step("\nOne leader at a time, and no stale write. The README says how to put this into your service.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
