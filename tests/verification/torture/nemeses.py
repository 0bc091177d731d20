"""What is done to the cluster. Each nemesis has a name, a beginning, an end that heals it, and a bound.

The bound is how long the role may be without a leader if this is all that happens, from the table in
docs/guarantees.md. The nodes write fenced all the time, so a process that is paused may be inside a fenced transaction:
what that one may last is part of the bound.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from tests.support.cluster import NodeFailed
from tests.support.history import now_ns
from tests.verification.torture.arena import Arena, Slot
from tests.verification.torture.checkers import Cut

Aim = Literal["leader", "anyone"]


@dataclass(frozen=True)
class Planned:
    """One nemesis in one step: all of it comes from the seed, except who leads at the time."""

    nemesis: str
    at_s: float
    lasts_s: float
    aim: Aim
    seed: int


@dataclass(frozen=True)
class Bounds:
    """How long the role may be without a leader, from docs/guarantees.md."""

    ttl: float
    takeover: str

    @property
    def renewal(self) -> float:
        return self.ttl / 4

    @property
    def look(self) -> float:
        return 1.0

    @property
    def silence(self) -> float:
        return 1.02 * self.ttl + self.look

    def death(self, slot: Slot) -> float:
        """By proof, at the next look at the latest (the next in the ring may be behind a pooler); else by silence."""
        return self.look if self.takeover == "instant" and not slot.lease_alone else self.silence

    @property
    def pause(self) -> float:
        return self.silence + self.ttl

    def cut(self, slot: Slot) -> float:
        return self.look if self.takeover == "instant" and not slot.lease_alone else 0.0

    def gone(self, outage_s: float) -> float:
        return outage_s + self.renewal + self.ttl

    def promotion(self, outage_s: float) -> float:
        """The nodes meet the new primary, and wait for the largest permitted TTL, which is theirs."""
        return outage_s + self.renewal + self.silence

    @property
    def in_company(self) -> float:
        """After the last of several was healed: the database back, and whoever held the role silent."""
        return self.renewal + self.ttl + self.silence + self.ttl


class Nemesis:
    """One fault, done once. `field` is where it strikes: a step has at most one in each, but for processes."""

    name: ClassVar[str]
    what: ClassVar[str]
    field: ClassVar[str]
    beside: ClassVar[tuple[str, ...]] = ()
    """Where else it strikes."""
    lasts: ClassVar[tuple[float, float]] = (0.2, 0.8)
    """How long, in TTLs: from and to."""
    aims: ClassVar[tuple[Aim, ...]] = ("leader", "leader", "anyone")
    needs: ClassVar[str | None] = None

    @classmethod
    def goes_with(cls, other: type[Nemesis]) -> bool:
        """Whether both may strike in one step."""
        mine, others = ({one.field, *one.beside} for one in (cls, other))
        return (mine & others) <= {"process"}

    def __init__(self, arena: Any, planned: Planned) -> None:
        self.arena, self.planned = arena, planned
        self.chance = random.Random(planned.seed)
        self.bounds = Bounds(arena.ttl, arena.takeover)
        self.target = ""
        self.had_effect = True
        """Whether it did what it is for: another nemesis of the step may have prevented that. Then it is owed still."""
        self.cuts: list[Cut] = []
        """Whose connections it cut at the server's end: the named case of instant mode, for these members only."""

    def has_cut(self, nodes: Iterable[str], since: int) -> None:
        """Write down that the connections of these nodes were cut between `since` (ns) and now.

        Behind a pooler there is no sentinel, so a cut there permits nothing.
        """
        sentinels = {slot.node.name for slot in self.arena.slots if slot.node and not slot.lease_alone}
        self.cuts += [Cut(node, since, now_ns()) for node in nodes if node in sentinels]

    def prepare(self) -> None:
        """Whatever is no part of the fault: have the right node lead, say."""

    def begin(self) -> None:
        raise NotImplementedError

    def end(self) -> None:
        """Heal it."""

    def bound(self) -> float:
        """How long nobody may lead; asked after the end."""
        return 0.0


def have_lead(arena: Arena, slot: Slot, timeout: float = 5.0) -> None:
    """Have the leader hand over to a node, as far as that can be had."""
    leader = arena.leader()
    if leader is None or leader is slot or slot.node is None:
        return
    assert leader.node is not None
    try:
        leader.node.ask(f"resign {slot.node.name}", timeout)
    except NodeFailed:
        return
    deadline = time.monotonic() + timeout
    while arena.leader() is not slot and time.monotonic() < deadline:
        time.sleep(0.02)


# --- processes ----------------------------------------------------------------------------------------------


class OnProcess(Nemesis):
    field = "process"
    slot: Slot

    def choose(self, slot: Slot | None = None) -> Slot:
        """Who suffers: this one, or the leader, or anyone that nothing has happened to yet."""
        well = [slot for slot in self.arena.slots if slot.name not in self.arena.suffering]
        if slot is None and self.planned.aim == "leader":
            slot = self.arena.leader()
        self.slot = slot if slot in well else self.chance.choice(well)
        self.arena.suffering.add(self.slot.name)
        assert self.slot.node is not None
        self.node, self.target = self.slot.node, self.slot.node.name
        return self.slot

    def end(self) -> None:
        self.arena.suffering.discard(self.slot.name)


def lease(arena: Arena) -> tuple[Any, ...] | None:
    """Who has the hand-written lease, until when; None if it cannot be asked."""
    try:
        return arena.execute("select holder, until from leases where name like 'naive-%' order by name desc limit 1")[0]
    except Exception:  # noqa: BLE001 - the database may be what is broken
        return None


class Kill(OnProcess):
    name, what = "kill", "kill -9 of a node's process"
    lasts = (0.0, 0.7)

    def begin(self) -> None:
        self.choose()
        self.node.kill()

    def end(self) -> None:
        self.arena.fill(self.slot)
        super().end()

    def bound(self) -> float:
        return self.bounds.death(self.slot)


class ForkAndKill(Kill):
    name, what = "fork-kill", "the process forks, and is killed while its child lives on"

    def begin(self) -> None:
        self.choose()
        self.node.ask("fork 3", 10)
        self.node.kill()


class Leave(OnProcess):
    name, what = "leave", "a clean leave (node.close()), then the end of the process"
    lasts = (0.3, 0.7)

    def begin(self) -> None:
        self.choose()
        self.left = self.node.send("leave")

    def end(self) -> None:
        self.node.reply(self.left)
        self.node.kill()
        self.arena.fill(self.slot)
        super().end()

    def bound(self) -> float:
        return self.bounds.look


class PauseShort(OnProcess):
    name, what = "pause-short", "SIGSTOP, and SIGCONT before the lease is in danger"
    lasts = (0.05, 0.35)

    def begin(self) -> None:
        self.choose()
        self.node.stop()

    def end(self) -> None:
        self.node.cont()
        super().end()


class PauseLong(PauseShort):
    name, what = "pause-long", "SIGSTOP for longer than the lease, then SIGCONT"
    lasts = (1.3, 1.9)

    def bound(self) -> float:
        return self.bounds.pause


class PauseHolder(PauseLong):
    name, what = "pause-holder", "the same for the holder of the hand-written lease, while it thinks"

    def begin(self) -> None:
        before, deadline = lease(self.arena), time.monotonic() + 3
        while (now := lease(self.arena)) == before and time.monotonic() < deadline:
            time.sleep(0.02)
        names = {slot.node.name: slot for slot in self.arena.slots if slot.node is not None}
        self.choose(names.get(now[0]) if now else None)
        time.sleep(0.2)  # renewed just now: it reads, then it thinks
        self.node.stop()


class Starve(OnProcess):
    lasts = (0.4, 0.6)
    kind: ClassVar[str]

    def begin(self) -> None:
        self.choose()
        share = self.chance.choice([0.25, 2.4])  # half as long at the least
        self.told = self.node.send(f"starve {self.kind} {share * self.arena.ttl:.2f}")

    def end(self) -> None:
        reply = self.node.reply(self.told, 90)
        self.starved_s = reply.get("starved_s", 0.0)
        self.target += f" for {self.starved_s:.1f} s"
        super().end()

    def bound(self) -> float:
        harmless_s = 0.9 * self.arena.ttl - self.bounds.renewal
        return 0.0 if self.starved_s < 0.8 * harmless_s else self.bounds.pause


class StarveByRegex(Starve):
    name, what, kind = "starve-regex", "a regular expression holds the GIL", "regex"


class StarveByIntegers(Starve):
    name, what, kind = "starve-integers", "a multiplication of big integers holds the GIL", "integers"


class ClockOfNode(OnProcess):
    """Only Tenure's clock in that process: the history is stamped by the true one."""

    lasts = (0.7, 1.5)
    direction: ClassVar[int]

    def begin(self) -> None:
        self.choose()
        self.node.ask(f"clock {1 + self.direction * self.arena.drift}", 10)

    def end(self) -> None:
        self.node.ask("clock 1", 10)
        super().end()


class ClockOfNodeFast(ClockOfNode):
    name, what, direction = "node-clock-fast", "a node's clock runs fast by 5 %", +1


class ClockOfNodeSlow(ClockOfNode):
    name, what, direction = "node-clock-slow", "a node's clock runs slow by 5 %", -1


class ClockOfNodeStepped(OnProcess):
    name, what = "node-clock-stepped", "the wall clock of a node's process is stepped by an hour, and back"
    lasts = (0.7, 1.5)

    def begin(self) -> None:
        self.choose()
        self.node.ask(f"wall {self.chance.choice([-3600, 3600])}", 10)

    def end(self) -> None:
        self.node.ask("wall 0", 10)
        super().end()


# --- the wire -----------------------------------------------------------------------------------------------


class OnWire(Nemesis):
    field = "wire"
    needs = "a proxy"
    fault: ClassVar[dict[str, Any]] = {}

    def prepare(self) -> None:
        doors = [slot for slot in self.arena.slots if slot.door is not None]
        self.slot = self.chance.choice(doors)
        if self.planned.aim == "leader":
            leader = self.arena.leader()
            if leader in doors:
                self.slot = leader
            else:
                have_lead(self.arena, self.slot)

    def begin(self) -> None:
        assert self.slot.node is not None
        self.target = self.slot.node.name
        self.strike()

    def strike(self) -> None:
        self.arena.doors.fault(self.slot.door, **self.fault)

    def end(self) -> None:
        self.arena.doors.heal(self.slot.door)

    def bound(self) -> float:
        return self.bounds.pause


class WireSlow(OnWire):
    name, what = "wire-slow", "every packet is late by 20 to 120 ms"
    fault: ClassVar[dict[str, Any]] = {"delay_s": 0.02, "jitter_s": 0.1}
    lasts = (0.7, 1.5)

    def bound(self) -> float:
        return 0.0


class WireLate(OnWire):
    name, what = "wire-late", "every packet is late by more than the lease"
    lasts = (1.2, 1.6)

    def strike(self) -> None:
        self.arena.doors.fault(self.slot.door, delay_s=1.1 * self.arena.ttl)


class WireHeld(OnWire):
    name, what = "wire-lost", "nothing passes either way, and what was sent arrives afterwards"
    fault: ClassVar[dict[str, Any]] = {"hold": ["up", "down"]}
    lasts = (1.2, 1.6)


class ClocksApart(WireHeld):
    """The worst that the permitted drift can do: the leader trusts for longest, and the others wait for shortest."""

    name, what = ("node-clocks-apart", "the leader's clock runs slow, all others fast, and its network is lost")
    aims: ClassVar[tuple[Aim, ...]] = ("leader",)

    def strike(self) -> None:
        self.turn(-self.arena.drift, self.arena.drift)
        super().strike()

    def end(self) -> None:
        super().end()
        self.turn(0.0, 0.0)

    def turn(self, mine: float, others: float) -> None:
        """Tell everybody, and wait for nobody: some may be stopped, and turn their clocks when they go on."""
        for slot in self.arena.slots:
            with contextlib.suppress(NodeFailed):  # it was killed
                slot.node.send(f"clock {1 + (mine if slot is self.slot else others)}")


class WireHeldUp(OnWire):
    name, what = "wire-lost-up", "nothing of the node's passes; the server's still arrives"
    fault: ClassVar[dict[str, Any]] = {"hold": ["up"]}
    lasts = (0.5, 1.6)


class WireHeldDown(OnWire):
    name, what = "wire-lost-down", "nothing of the server's passes; the node's still arrives"
    fault: ClassVar[dict[str, Any]] = {"hold": ["down"]}
    lasts = (0.5, 1.6)


class WireSwallow(OnWire):
    name, what = "wire-no-replies", "the server's replies are swallowed, and the connections reset in the end"
    fault: ClassVar[dict[str, Any]] = {"swallow": ["down"]}
    lasts = (0.2, 1.5)

    def end(self) -> None:
        since = now_ns()
        super().end()
        self.has_cut([self.slot.node.name], since)


class WireCut(OnWire):
    name, what = "wire-cut", "the connections of a node are closed at both ends"
    how: ClassVar[str] = "close"

    def strike(self) -> None:
        since = now_ns()
        self.arena.doors.cut(self.slot.door, self.how)
        self.has_cut([self.slot.node.name], since)

    def bound(self) -> float:
        return self.bounds.cut(self.slot)


class WireReset(WireCut):
    name, what, how = "wire-reset", "the connections of a node are reset (RST) at both ends", "reset"


class WireHalfOpen(WireCut):
    name, what, how = "wire-half-open", "the server's ends are closed, and the node hears nothing of it", "server"
    lasts = (0.5, 1.5)

    def bound(self) -> float:
        return self.bounds.pause


PROCESSES: tuple[type[Nemesis], ...] = (
    Kill, ForkAndKill, Leave, PauseShort, PauseLong, PauseHolder, StarveByRegex, StarveByIntegers, ClockOfNodeFast,
    ClockOfNodeSlow, ClockOfNodeStepped,
)  # fmt: skip
WIRES: tuple[type[Nemesis], ...] = (
    WireSlow, WireLate, WireHeld, WireHeldUp, WireHeldDown, WireSwallow, WireCut, WireReset, WireHalfOpen, ClocksApart
)  # fmt: skip
