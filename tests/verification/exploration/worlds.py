"""Small worlds: who is there, which faults may happen, and how many of them in one history."""

from __future__ import annotations

from dataclasses import dataclass

from tenure.core import timing
from tests.verification.simulation.model import ModelStore, Tables

SLOW_AND_FAST = (1 - timing.DRIFT, 1 + timing.DRIFT, 1.0)
"""Clocks as far apart as permitted: trust ends and silence is complete in the same tick. Nothing is tighter."""

SLOW = ("slow control up", "slow control down", "slow watch up", "slow watch down")
NETWORK = ("cut", "cut watch", *SLOW, "isolate")
PROCESS = ("pause", "die", "host")
SERVER = ("stop", "fast stop")
WISHES = ("leave", "resign")
ALL = (*NETWORK, *PROCESS, *SERVER, *WISHES, "fail", "promotion", "write")
"""All but ``cut late``, the named exception of instant mode. With a name behind it a fault is for that node only."""


@dataclass(frozen=True)
class World:
    """What may happen."""

    name: str
    takeovers: tuple[str, ...]
    faults: tuple[str, ...]
    budget: int
    """How many faults in one history."""
    ttl: float = 3.0
    """In seconds, and a second is a tick."""
    rates: tuple[float, ...] = SLOW_AND_FAST
    settled: bool = True
    """Whether the first node leads already and the others follow, or all are about to connect."""
    eager: bool = True
    """Whether an answer that no fault holds up is heard before anything else happens; else in any order."""
    deepest: int | None = None
    """How many steps from the beginning; None is to the end."""
    store: type[ModelStore] = ModelStore
    tables: type[Tables] = Tables
    ttls: tuple[float, ...] = ()
    """The nodes' TTLs, where they differ: then ``ttl`` was the largest until now, and a replica lacks the raise."""

    def __str__(self) -> str:
        clocks = " and ".join(f"{rate:g}" for rate in self.rates[: len(self.takeovers)])
        begin = "from a settled state" if self.settled else "from the first connection on"
        begin += "" if self.eager else ", answers in any order"
        return (
            f"{self.name}: {', '.join(self.takeovers)}; TTL {self.ttl:g} ticks, clock rates {clocks}; {begin}; "
            f"{self.budget} of: {', '.join(self.faults) or 'nothing'}"
        )


STRICT = ("strict", "strict")
INSTANT = ("instant", "instant")
MIXED = ("strict", "instant")

WORLDS = [
    World("strict", STRICT, ALL, 1),
    World("instant", INSTANT, (*ALL, "cut late"), 1),
    World("mixed", MIXED, (*ALL, "cut late"), 1),
    World("start", INSTANT, ("cut", "die"), 1, settled=False),
    World("orders", STRICT, ("cut", "die", "stop"), 1, eager=False),
    World("two-cuts", INSTANT, ("cut",), 2),
    World("two-cuts-strict", STRICT, ("cut", "cut watch"), 2),
    World("cut-and-stop", INSTANT, ("cut a", "stop"), 2),
    World("late-answer", STRICT, ("slow control down a", "isolate a"), 2),
    World("late-look", STRICT, ("slow watch up b", "isolate a"), 2),
    World("late-end", STRICT, ("slow control up b", "isolate a"), 2),
    World("lost-namespace", STRICT, ("promotion",), 1, settled=False, deepest=36),
    World("lost-raise", STRICT, (), 0, ttl=2.0, ttls=(4.0, 2.0), settled=False, deepest=50),
    World("three", (*INSTANT, "instant"), ("cut a", "die a"), 1, deepest=24),
]
