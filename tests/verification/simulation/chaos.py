"""Scenarios in which everything happens at once: any nodes, any faults, writers throughout, then calm."""

from __future__ import annotations

from tenure.core import timing
from tests.verification.simulation.faults import NODE_FAULTS, SERVER_FAULTS, Faults, Writers
from tests.verification.simulation.registry import scenario
from tests.verification.simulation.simulation import Simulation


def _anybody(sim: Simulation, ttls: tuple[float, ...] = (2.0, 5.0, 10.0)) -> None:
    """Two to six nodes of all kinds, standing for some of three roles, near the server or far from it."""
    chance = sim.core.chance
    delays = ((0.0002, 0.002), (0.0002, 0.002), (0.005, 0.05), (0.05, 0.3))
    kinds = chance.choice((("instant",), ("strict",), ("instant", "strict")))
    for number in range(chance.randint(2, 6)):
        roles = chance.sample(["alpha", "beta", "gamma"], chance.randint(1, 3))
        node = sim.node(
            f"n{number}",
            *roles,
            ttl=chance.choice(ttls),
            takeover=chance.choice(kinds),
            sentinels=not sim.core.chosen(0.2),
            listens=not sim.core.chosen(0.2),
        )
        node.link.typical_s = chance.choice(delays)
        for role in roles:
            node.command(lambda protocol, _, role=role: protocol.observe(role))


def _bound(sim: Simulation, max_ttl: float) -> float:
    """From the last fault: confirmation of a new server, silence, a reservation waited out, and some round trips."""
    longest = max(node.settings.ttl for node in sim.nodes)
    # A promotion in the first moments may lose the namespace itself, with what an operator had set (R15).
    known = [vars(node.protocol._confirmation).get("confirmed") for node in sim.nodes]
    lost = any(confirmed is not None and confirmed.made_on_a_promoted_server for confirmed in known)
    max_ttl = max(max_ttl, timing.DEFAULT_MAX_TTL_S) if lost else max_ttl
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


@scenario(max_ttl=12.0)
def promotions(sim: Simulation) -> None:
    """Lagging replicas again and again, and little else."""
    kinds = ("promotion", "promotion", "promotion", "cut", "pause", "resign", "partition")
    _chaos(sim, kinds, 60.0, 8.0, 12.0)


@scenario(max_ttl=12.0, loses_nothing=True)
def lossless(sim: Simulation) -> None:
    """Promotions again and again that lose nothing which was acknowledged; everything else at times."""
    kinds = (
        "promotion",
        "promotion",
        "promotion",
        "cut",
        "pause",
        "resign",
        "partition",
        "fast stop",
        "crash",
        "stall",
    )
    _chaos(sim, kinds, 60.0, 6.0, 0.0)


@scenario()
def restarts(sim: Simulation) -> None:
    """Servers that stop and start, with connections cut in between."""
    _chaos(sim, ("fast stop", "fast stop", "immediate stop", "cut", "full", "spikes"), 50.0, 4.0, 60.0)


@scenario(max_ttl=12.0)
def hosted(sim: Simulation) -> None:
    """A server that hides its identity: each restart is a new server, and has to be confirmed."""
    sim.server.hides_identity = True
    sim.server.timeline = 2  # so that the bound counts the confirmation
    _chaos(sim, ("fast stop", "immediate stop", "cut", "full", "pause", "partition", "crash"), 60.0, 5.0, 12.0)


@scenario()
def bad_network(sim: Simulation) -> None:
    """Delays, stalls and cuts of all kinds."""
    _chaos(sim, ("partition", "one way", "spikes", "stall", "stall", "late cut", "cut", "failing"), 50.0, 2.0, 60.0)


@scenario()
def bad_hosts(sim: Simulation) -> None:
    """Processes that die, stop and come back."""
    _chaos(sim, ("pause", "pause", "crash", "host", "leave", "resign", "resign to", "withdraw"), 50.0, 2.0, 60.0)
