"""Tenure, and what people would use instead: each a small module with one interface, so that all are measured alike.

A module says, at its top,

    SERVER      what it needs: a name of `servers.STARTERS`
    VARIANTS    how it is set, by the name that the tables show: the options of its Candidate, or a `Variant`
    SURVIVES    whether it can succeed a leader that is paused, and not dead, at all

and has a class `Candidate(address, name, **options)`, which one process (`program`) makes:

    wait()      block until it leads
    believes()  whether the code that it runs would go on: what the peer tells by itself, without being asked to look
    check()     the am-I-leader question as its documentation has it; that is timed
    resign()    hand over, cleanly

The candidate's process says `ready`, `lead`, `resigning` and `lost`, each with the nanosecond. `etcdctl` and
`tenure_run` are programs of their own, and their modules say how these are started instead.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

MODULES = (
    "bare_lock",
    "commits",
    "tenure_node",
    "tenure_run",
    "polled_lock",
    "lease_row",
    "river",
    "oban",
    "gemstone",
    "pals_lock",
    "python_redis_lock",
    "kazoo_election",
    "etcdctl",
)
FLOOR = "bare_lock"
HANDOVER_FLOOR = "commits"
OURS = "tenure_node"
TENURE = (OURS, "tenure_run")
FIGURES = ("start", "crash", "hand-over", "pause", "rest", "check")
WAITS = ("crash", "hand-over")
"""What waits, of those that poll: see Variant.waits."""


@dataclass(frozen=True)
class Variant:
    """One way to set a peer, and what is measured of it."""

    options: dict[str, Any] = field(default_factory=dict)
    server: str = ""
    """If it needs another server than its module says."""
    figures: tuple[str, ...] = FIGURES
    waits: tuple[str, ...] = ()
    """Figures that take many seconds, mostly of waiting: they are measured many at once, and in fewer rounds."""
    every: int = 1
    """It is measured in each so-manieth round."""
    nodes: int = 3
    names_successor: bool = False
    """Whether the leader says who is to succeed it."""


@dataclass(frozen=True)
class Entrant:
    """One of them, set in one way."""

    module: str
    name: str
    variant: Variant = field(default_factory=Variant, hash=False)

    @property
    def home(self) -> ModuleType:
        return importlib.import_module(f"benchmarks.peers.{self.module}")

    @property
    def label(self) -> str:
        return f"{self.home.NAME}, {self.name}" if self.name else str(self.home.NAME)

    @property
    def options(self) -> dict[str, Any]:
        return self.variant.options

    @property
    def server(self) -> str:
        return self.variant.server or str(self.home.SERVER)

    @property
    def survives_a_pause(self) -> bool:
        return bool(self.home.SURVIVES)

    @property
    def is_default(self) -> bool:
        """Whether it is set as it comes, rather than to be quick."""
        return self.name.startswith("default")

    @property
    def lease_s(self) -> float:
        """How long a silent leader is believed to lead; a pause must be longer."""
        return float(self.options.get("lease_s", 3))


def entrants(*, defaults: bool) -> list[Entrant]:
    """Everybody, each at its quickest; and with ``defaults`` as it comes, too."""
    found = []
    for module in MODULES:
        variants = importlib.import_module(f"benchmarks.peers.{module}").VARIANTS
        for name, how in variants.items():
            variant = how if isinstance(how, Variant) else Variant(how)
            if name.startswith("default"):
                variant = Variant(variant.options, figures=("crash", "hand-over", "pause", "rest"), waits=WAITS)
            found.append(Entrant(module, name, variant))
    return [one for one in found if defaults or not one.is_default]
