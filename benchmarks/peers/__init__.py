"""Tenure, and what people would use instead: each a small module with one interface, so that all are measured alike.

A module says, at its top,

    SERVER      what it needs: postgres, redis, zookeeper or etcd
    VARIANTS    how it is set, by the name that the tables show: the options given to its Candidate
    SURVIVES    whether it can succeed a leader that is paused, and not dead, at all

and has a class `Candidate(url, name, **options)`, which one process (`program`) makes:

    wait()      block until it leads
    believes()  whether the code that it runs would go on: what the peer tells by itself, without being asked to look
    check()     the am-I-leader question as its documentation has it; that is timed
    resign()    hand over, cleanly

The candidate's process says `ready`, `lead`, `resigning` and `lost`, each with the nanosecond. `etcdctl` is a program
of its own, and its module says how that is started instead.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

MODULES = (
    "bare_lock",
    "tenure_node",
    "polled_lock",
    "lease_row",
    "gemstone",
    "pals_lock",
    "python_redis_lock",
    "kazoo_election",
    "etcdctl",
)
FLOOR = "bare_lock"
OURS = "tenure_node"


@dataclass(frozen=True)
class Entrant:
    """One of them, set in one way."""

    module: str
    variant: str
    options: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def home(self) -> ModuleType:
        return importlib.import_module(f"benchmarks.peers.{self.module}")

    @property
    def label(self) -> str:
        return f"{self.home.NAME}, {self.variant}" if self.variant else str(self.home.NAME)

    @property
    def server(self) -> str:
        return str(self.home.SERVER)

    @property
    def survives_a_pause(self) -> bool:
        return bool(self.home.SURVIVES)

    @property
    def lease_s(self) -> float:
        """How long a silent leader is believed to lead; a pause must be longer."""
        return float(self.options.get("lease_s", 3))


def entrants(*, defaults: bool) -> list[Entrant]:
    """Everybody, each at its quickest; and with ``defaults`` as it comes, too."""
    found = []
    for module in MODULES:
        variants = importlib.import_module(f"benchmarks.peers.{module}").VARIANTS
        found += [
            Entrant(module, variant, options)
            for variant, options in variants.items()
            if defaults or not variant.startswith("default")
        ]
    return found
