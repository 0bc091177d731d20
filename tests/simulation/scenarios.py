"""Whole stories: what is set up, what goes wrong, what must hold in the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tenure import timing
from tests.simulation.faults import NODE_FAULTS, SERVER_FAULTS, Faults, Writers
from tests.simulation.simulation import Simulation


@dataclass(frozen=True)
class Scenario:
    """A story; ``tell`` raises Violation where it does not end well."""

    name: str
    tell: Callable[[Simulation], None]
    max_ttl: float = 60.0


SCENARIOS: dict[str, Scenario] = {}


def scenario(max_ttl: float = 60.0) -> Callable[[Callable[[Simulation], None]], Callable[[Simulation], None]]:
    def register(tell: Callable[[Simulation], None]) -> Callable[[Simulation], None]:
        name = tell.__name__.replace("_", "-")
        SCENARIOS[name] = Scenario(name, tell, max_ttl)
        return tell

    return register


def _anybody(sim: Simulation, ttls: tuple[float, ...] = (2.0, 5.0, 10.0)) -> None:
    """Two to six nodes of all kinds, standing for some of three roles."""
    chance = sim.core.chance
    kinds = chance.choice((("instant",), ("strict",), ("instant", "strict")))
    for number in range(chance.randint(2, 6)):
        roles = chance.sample(["alpha", "beta", "gamma"], chance.randint(1, 3))
        sim.node(
            f"n{number}",
            *roles,
            ttl=chance.choice(ttls),
            takeover=chance.choice(kinds),
            sentinels=not sim.core.chosen(0.2),
            listens=not sim.core.chosen(0.2),
        )


def _bound(sim: Simulation, max_ttl: float) -> float:
    """From the last fault: confirmation of a new server, silence, a reservation waited out, and some round trips."""
    longest = max(node.settings.ttl for node in sim.nodes)
    slow = 1 / (1 - timing.DRIFT)
    return slow * (timing.silence(max_ttl) * (sim.server.timeline > 1) + 3 * timing.silence(longest)) + 8.0


def _chaos(sim: Simulation, kinds: tuple[str, ...], seconds: float, every_s: float, max_ttl: float) -> None:
    _anybody(sim)
    until = sim.core.now + seconds
    faults = Faults(sim, kinds, until, every_s)
    Writers(sim, every_s=1.0, longest_s=3.0, until=until)
    sim.run(seconds)
    while sim.core.now < faults.over_at:
        sim.run(faults.over_at - sim.core.now)
    sim.calm(_bound(sim, max_ttl))


@scenario(max_ttl=12.0)
def everything(sim: Simulation) -> None:
    """Everything at once."""
    _chaos(sim, SERVER_FAULTS + NODE_FAULTS, 50.0, 2.5, 12.0)
