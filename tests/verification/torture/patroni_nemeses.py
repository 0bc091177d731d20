"""What is done to the primary of a Patroni cluster, and by Patroni to the nodes."""

from __future__ import annotations

import time
from typing import ClassVar

from tests.support.history import now_ns
from tests.support.patroni import FAULTS
from tests.verification.torture.nemeses import Nemesis
from tests.verification.torture.server_nemeses import OnServer

DIAL_S = 2.0
"""What a node waits for a host that is silent."""


class OnPatroni(OnServer):
    """One of the faults of tests/support/patroni.py. It is mended when another node leads on the new primary."""

    lasts = (0.0, 0.3)
    fault: ClassVar[str]
    silent: ClassVar[bool] = False
    """Whether the old primary's machine does not answer meanwhile."""

    def prepare(self) -> None:
        self.machine = self.arena.patroni.primary()

    def strike(self) -> None:
        self.target = self.machine.name
        FAULTS[self.fault].strike(self.machine)

    def heal(self) -> None:
        fault = FAULTS[self.fault]
        self.arena.patroni.wait_for_writes(*([self.machine] if fault.moves else []))
        self.back, since = time.monotonic(), now_ns()
        deadline = self.back + self.bounds.promotion(DIAL_S)
        while fault.moves and not self.led(since) and time.monotonic() < deadline:
            time.sleep(0.05)
        fault.mend(self.machine)
        self.arena.patroni.wait_until_whole()

    def led(self, since: int) -> bool:
        return any(slot.node is not None and slot.node.events("elected", since=since) for slot in self.arena.slots)

    def gone_s(self) -> float:
        return self.back - self.began

    def bound(self) -> float:
        if not FAULTS[self.fault].moves:
            return super().bound()
        return self.bounds.promotion(self.gone_s()) + (DIAL_S if self.silent else 0.0)


class Switchover(OnPatroni):
    name, fault = "patroni-switchover", "switchover"
    what = FAULTS[fault].what


class ServerKilled(OnPatroni):
    name, fault = "patroni-server", "server"
    what = FAULTS[fault].what


class BothKilled(OnPatroni):
    name, fault = "patroni-kill", "kill"
    what = FAULTS[fault].what


class MachineLost(OnPatroni):
    name, fault, silent = "patroni-machine", "machine", True
    what = FAULTS[fault].what


class MachineLostBehind(OnPatroni):
    name, fault, silent = "patroni-lag", "lag", True
    what = FAULTS[fault].what


class MachineFrozen(OnPatroni):
    name, fault, silent = "patroni-freeze", "freeze", True
    what = FAULTS[fault].what


class MachineCut(OnPatroni):
    name, fault, silent = "patroni-cut", "cut", True
    what = FAULTS[fault].what


PATRONI: tuple[type[Nemesis], ...] = (
    Switchover, ServerKilled, BothKilled, MachineLost, MachineLostBehind, MachineFrozen, MachineCut
)  # fmt: skip
