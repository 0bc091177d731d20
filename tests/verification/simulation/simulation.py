"""A whole cluster in virtual time, with the verbs in which scenarios are told."""

from __future__ import annotations

from collections.abc import Callable

from tenure.core import timing
from tenure.core.options import ProtocolOptions
from tests.verification.simulation.core import Clock, Core, Violation
from tests.verification.simulation.node import SimNode
from tests.verification.simulation.oracles import Oracles
from tests.verification.simulation.server import SimServer


class Simulation:
    """One seed of one scenario."""

    def __init__(
        self, seed: int, scenario: str, *, sql: bool = False, max_ttl: float | None = 60.0, loses_nothing: bool = False
    ) -> None:
        self.core = Core(f"{scenario}/{seed}")
        self.oracles = Oracles(self.core)
        self.server = SimServer(
            self.core, self.oracles, self._clock(), sql=sql, max_ttl=max_ttl, loses_nothing=loses_nothing
        )
        self.nodes: list[SimNode] = self.oracles.nodes

    def _clock(self, rate: float | None = None) -> Clock:
        """Any rate within the drift; the extremes are likely, because it is there that bounds break."""
        chance = self.core.chance
        extremes = (1 - timing.DRIFT, 1.0, 1 + timing.DRIFT, chance.uniform(1 - timing.DRIFT, 1 + timing.DRIFT))
        return Clock(chance.choice(extremes) if rate is None else rate, chance.uniform(0, 1e5))

    def node(
        self,
        name: str,
        *roles: str,
        ttl: float = 10.0,
        takeover: str = "instant",
        sentinels: bool = True,
        listens: bool = True,
        rate: float | None = None,
    ) -> SimNode:
        """Start a node that stands for some roles."""
        settings = ProtocolOptions(name, ttl, timing.renewal_interval(ttl), takeover, sentinels)
        node = SimNode(self.core, self.server, self.oracles, settings, self._clock(rate), listens=listens)
        self.nodes.append(node)
        if roles:
            node.stand(*roles)
        return node

    # Telling a story -----------------------------------------------------------------------------------------------

    def run(self, seconds: float) -> None:
        self.core.run(self.core.now + seconds)

    def run_until(self, condition: Callable[[], bool], seconds: float, what: str, step: float = 0.001) -> None:
        """Let time pass in small steps until something is so."""
        end = self.core.now + seconds
        while not condition():
            if self.core.now >= end:
                raise Violation(f"{what}: not within {seconds:g} s")
            self.core.run(self.core.now + step)

    def elect(self, role: str, node: SimNode, seconds: float = 30.0) -> int:
        """Let a node become leader; return its token."""
        self.run_until(lambda: node.believes(role), seconds, f"{node.name} leads {role}")
        return node.protocol.roles.holding[role]

    def expect(self, condition: object, what: str) -> None:
        if not condition:
            raise Violation(what)

    # What must hold in the end -------------------------------------------------------------------------------------

    def candidates(self, role: str) -> list[SimNode]:
        return [node for node in self.nodes if node.alive and not node.paused and role in node.roles]

    def everyone_is_led(self) -> bool:
        roles = {role for node in self.nodes for role in node.roles}
        return all(self.oracles.leader(role) for role in roles if self.candidates(role))

    def calm(self, seconds: float, lasting: float = 3.0) -> None:
        """After the last fault: within the bound every role that has candidates is led, and stays led."""
        end, since = self.core.now + seconds, self.core.now
        while self.core.now < since + lasting:
            self.core.run(self.core.now + 0.05)
            if not self.everyone_is_led():
                since = self.core.now
            if since > end:
                raise Violation(f"not every role is led again {seconds:.1f} s after the last fault")
