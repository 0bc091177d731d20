"""The scenes of the demo: an election, a crash, a freeze and a hand-over. Each checks what it claims."""

from __future__ import annotations

import itertools
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

import click

from tenure.base.clock import now
from tenure.base.durations import duration
from tenure.cli.demo.replica import Failure, Replica, listen
from tenure.errors import StoreUnavailable

Tone = Literal["plain", "good", "bad"]
TICK_S = 0.05
PATIENCE_S = 30.0
"""How long the demo waits for anything before it says that it did not happen."""


class PlainOutput:
    """Plain lines, without escape codes."""

    def __init__(self) -> None:
        self.began = now()
        self.replicas: Sequence[Replica] = ()

    def scene(self, text: str) -> None:
        """Print what comes next."""
        self.say("", text)

    def event(self, at: float, who: str, what: str, tone: Tone = "plain") -> None:  # noqa: ARG002 - for colours
        """Print what happened, when, and to which process."""
        self.say(f"{at - self.began:6.2f} s  {who}  {what}")

    def table(self, rows: Sequence[tuple[str, str]]) -> None:
        """Print the claims, and what was measured."""
        width = max(len(claim) for claim, _ in rows)
        self.say("", *(f"{claim.ljust(width)}  {measured}" for claim, measured in (("CLAIMED", "MEASURED"), *rows)))

    def say(self, *lines: str) -> None:
        """Print lines."""
        for line in lines:
            click.echo(line)
        sys.stdout.flush()

    def tick(self) -> None:
        """Draw; called many times a second."""


class Scenario:
    """What the demo does, scene by scene. ``rows`` returns what the leaders have written."""

    def __init__(
        self, output: PlainOutput, replicas: Sequence[Replica], rows: Callable[[], list[tuple[int, str]]], *, fast: bool
    ) -> None:
        self._output = output
        self._replicas = replicas
        self._rows = rows
        self._fast = fast
        self._tokens: list[int] = []
        self._written: list[tuple[int, str]] = []
        self._claims: list[tuple[str, str]] = []

    def play(self) -> None:
        """Play all scenes; raise Failure if anything is not as claimed."""
        leader = self.elect()
        leader = self.kill(leader)
        leader, woken = self.freeze(leader)
        self.hand_over(leader, woken)
        self.close()

    def elect(self) -> Replica:
        """Let one of the three be elected."""
        self._output.scene("Three processes start. One is elected.")
        for replica in self._replicas:
            self._output.event(now(), replica.name, f"starts, pid {replica.pid}")
        leader, _ = self.elected(f"no process was elected within {PATIENCE_S:g} s")
        self.write(leader)
        self.until(lambda: all(replica.joined for replica in self._replicas), "not all of the three have joined")
        if modes := [replica.mode for replica in self._replicas if replica.mode != "hybrid"]:
            raise StoreUnavailable(
                f"the demo needs a direct connection, but with this URL a node runs in mode {modes[0]!r}: is it the "
                "URL of a connection pooler?"
            )
        self.pause(3)
        return leader

    def kill(self, leader: Replica) -> Replica:
        """Kill the leader. The next one leads before the dead leader's lease is over."""
        self._output.scene("kill -9: the leader dies without a word.")
        at, successor, since = self.strike(leader, "killed", signal.SIGKILL)
        left = leader.until - since
        if left <= 0:
            raise Failure(f"{successor.name} led {duration(since - at)} after the kill, when the lease was over anyway")
        measured = f"{duration(since - at)} after kill -9, with {left:.1f} s of the lease left"
        self.claim("a takeover does not wait for the lease", measured)
        self.write(successor)
        self.pause(3)
        return successor

    def freeze(self, leader: Replica) -> tuple[Replica, Replica]:
        """Freeze the leader until another process leads, and wake it."""
        self._output.scene("SIGSTOP: the leader is frozen for longer than its lease. It does not know.")
        at, successor, since = self.strike(leader, "frozen", signal.SIGSTOP)
        if since < leader.until:
            raise Failure(f"{successor.name} led before the lease of {leader.name} was over")
        self.claim("a frozen leader is replaced after its lease", f"{duration(since - at)} after SIGSTOP")
        self.write(successor)
        self.pause(2)
        # The request waits in the pipe. The process answers it first when it wakes.
        leader.ask("read")
        leader.fate = ""
        at = leader.signal(signal.SIGCONT)
        read = self.answer(leader)
        self._output.event(at, leader.name, "is woken")
        if read["leads"]:
            raise Failure(f"{leader.name} was frozen past its lease, and still read is_leader as True when it woke")
        self._output.event(read["at"], leader.name, f"reads is_leader: {read['leads']}", "good")
        self.claim("it knows that as soon as it wakes", f"its first read of is_leader was {read['leads']}")
        self.write(leader, stale=True)
        self.pause(3)
        return successor, leader

    def hand_over(self, leader: Replica, other: Replica) -> None:
        """Have the leader hand over to the process that was frozen and has joined again."""
        self._output.scene("A clean hand-over, as in a deployment.")
        self.until(lambda: other.name in self.asked(leader, "candidates")["names"], f"{other.name} did not join again")
        self.renewed(leader)
        at, until = now(), leader.until
        leader.ask(f"hand-over {other.name}")
        self._output.event(at, leader.name, f"is asked to hand over to {other.name}")
        successor, since = self.elected("no process took over from the leader that handed over", after=at)
        self.answer(leader)
        if successor is not other:
            raise Failure(f"{leader.name} handed over to {other.name}, but {successor.name} was elected")
        if since >= until:
            raise Failure(f"{other.name} led {duration(since - at)} after the request, when the lease was over anyway")
        self.claim("a hand-over does not wait for the lease", f"{duration(since - at)} after the request")
        self.write(successor)
        self.pause(2)

    def close(self) -> None:
        """Check the claims about the whole demo, and show the table."""
        rows = self._rows()
        if rows != self._written:
            raise Failure(f"the table holds {rows}, but the database accepted {self._written}")
        self.claim("a stale write cannot commit", f"{len(rows)} rows in the table, all from valid leaders")
        self.claim("tokens only grow", ", ".join(map(str, self._tokens)))
        reads = sum(replica.reads for replica in self._replicas)
        self._check_one_leader()
        self.claim("one leader at a time", f"{reads} reads of is_leader, never two True at once")
        self._output.table(self._claims)
        self._output.say("", f"All of it happened just now, in {now() - self._output.began:.1f} s.")

    def _check_one_leader(self) -> None:
        spans = sorted((*span, replica.name) for replica in self._replicas for span in replica.terms.values())
        for (_, last, name), (first, _, other) in itertools.pairwise(spans):
            if first < last:
                raise Failure(
                    f"{name} and {other} read is_leader as True at the same time, for {duration(last - first)}"
                )

    # Steps of the scenes -----------------------------------------------------------------------------------------

    def until(self, condition: Callable[[], bool], otherwise: str) -> None:
        """Read the replicas and draw until the condition holds; raise Failure(otherwise) if that takes too long."""
        deadline = now() + PATIENCE_S
        while not condition():
            if now() > deadline:
                raise Failure(otherwise)
            listen(self._replicas, TICK_S)
            self._output.tick()

    def pause(self, seconds: float) -> None:
        """Give the reader time to read, and check that leadership has not moved."""
        end = now() + (0 if self._fast else seconds)
        self.until(lambda: now() >= end, "")
        self.unmoved()

    def unmoved(self) -> None:
        """Check that leadership has moved only when the demo moved it."""
        tokens = sorted(token for replica in self._replicas for token in replica.terms)
        if tokens != self._tokens:
            raise Failure(
                f"leadership moved by itself, to tokens {tokens}: the machine was too busy to renew in time, or "
                "another process interfered"
            )

    def strike(self, leader: Replica, fate: str, number: signal.Signals) -> tuple[float, Replica, float]:
        """Kill or freeze the leader; return when that was, the next leader, and when its term began.

        It happens between two renewals: in the middle of one, a frozen leader would hold SQLite's lock.
        """
        self.renewed(leader)
        leader.fate = fate
        at = leader.signal(number)
        self._output.event(at, leader.name, f"is {fate}", "bad")
        return at, *self.elected(f"no process took over from the leader that was {fate}", after=at)

    def elected(self, otherwise: str, after: float | None = None) -> tuple[Replica, float]:
        """Wait for a new term; return its leader, and when it began."""
        known = set(self._tokens)
        self.until(lambda: any(set(replica.terms) - known for replica in self._replicas), otherwise)
        for replica in self._replicas:
            for token in set(replica.terms) - known:
                if token <= max(known, default=0):
                    raise Failure(f"the token did not grow: {token} after {max(known)}")
                self._tokens.append(token)
                since = replica.terms[token][0]
                took = "" if after is None else f", {duration(since - after)} later"
                self._output.event(since, replica.name, f"leads, with token {token}{took}", "good")
                self.unmoved()
                return replica, since
        raise AssertionError

    def renewed(self, leader: Replica) -> None:
        """Wait until the leader has just renewed its lease."""
        before = leader.until
        self.until(lambda: leader.until > before + 0.01, f"{leader.name} did not renew its lease")
        self.unmoved()

    def write(self, replica: Replica, *, stale: bool = False) -> None:
        """Have a replica write under its term. The database must accept that, or refuse it if the term is stale."""
        answer = self.asked(replica, "write")
        token, refused = answer["token"], answer.get("refused")
        what = f"writes under token {token}: {'refused by the database' if refused else 'committed'}"
        self._output.event(answer["at"], replica.name, what, "good")
        if stale and not refused:
            raise Failure(f"the database accepted the stale write of {replica.name}, under token {token}")
        if refused and not stale:
            raise Failure(f"the database refused the write of the leader {replica.name}: {refused}")
        if not refused:
            self._written.append((token, replica.name))

    def asked(self, replica: Replica, command: str) -> dict[str, Any]:
        """Return the answer to a command."""
        replica.ask(command)
        return self.answer(replica)

    def answer(self, replica: Replica) -> dict[str, Any]:
        """Return the next answer."""
        self.until(lambda: bool(replica.answers), f"{replica.name} did not answer")
        return replica.answers.pop(0)

    def claim(self, claim: str, measured: str) -> None:
        """Note a claim that has come true."""
        self._claims.append((claim, measured))
