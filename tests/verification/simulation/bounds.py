"""Leaderless time: the bound of promise 5 for each fault and mode, on a healthy network otherwise.

All bounds are in true time, so a share of the TTL is divided by the slowest permitted rate; a look comes at most a
slice after the silence is complete, and some round trips follow.
"""

from __future__ import annotations

from tenure.core import timing
from tests.verification.simulation.network import TO_CLIENT, TO_SERVER
from tests.verification.simulation.node import SimNode
from tests.verification.simulation.registry import scenario
from tests.verification.simulation.simulation import Simulation

TTL = 10.0
MILLISECONDS = 0.1
"""Some ten round trips of four milliseconds at most."""
SILENCE = timing.silence(TTL) / (1 - timing.DRIFT) + 2 * timing.SLICE_S
RECONNECT = 1.5
"""The longest pause between two attempts, and the attempt."""
PATIENCE = timing.server_patience(TTL) / (1 - timing.DRIFT) + MILLISECONDS


def _cluster(sim: Simulation, takeover: str, *, sentinels: bool = True) -> SimNode:
    """Three nodes that know each other; return the leader."""
    for name in ("n0", "n1", "n2"):
        sim.node(name, "r", ttl=TTL, takeover=takeover, sentinels=sentinels, listens=sentinels)
    sim.run(15.0)
    leader = sim.oracles.leader("r")
    assert leader
    return leader


def _led_again_within(sim: Simulation, bound: float, since: float) -> None:
    sim.run(bound - (sim.core.now - since))
    gap = sim.oracles.next_term_after("r", since)
    sim.expect(gap is not None and gap <= bound, f"nobody led for {gap} s, which is more than {bound:.2f} s")


@scenario()
def crash_instant(sim: Simulation) -> None:
    leader, since = _cluster(sim, "instant"), sim.core.now
    leader.crash()
    _led_again_within(sim, MILLISECONDS, since)


@scenario()
def two_crash_together(sim: Simulation) -> None:
    """Neighbours in the ring die at the same moment: each look sees all members."""
    leader, since = _cluster(sim, "instant"), sim.core.now
    leader.crash()
    next(node for node in sim.nodes if node.alive).crash()
    _led_again_within(sim, 2 * MILLISECONDS, since)


@scenario()
def no_herd(sim: Simulation) -> None:
    """One of many acts on a death; of the others only those whose own slice ends in that very moment."""
    for number in range(8):
        sim.node(f"n{number}", "r", ttl=TTL)
        sim.run(sim.core.between(0.5, 1.5))  # else all slices end at the same time
    leader, before = sim.oracles.leader("r"), sim.oracles.asked.copy()
    assert leader
    leader.crash()
    sim.run(0.5)
    acts = sim.oracles.asked - before
    sim.expect(1 <= acts["End"] <= 3, f"one ends it, not everybody: {acts}")
    sim.expect(acts["Acquire"] <= 3, f"one takes its role, not everybody: {acts}")
    sim.expect(sim.oracles.leader("r") is not None, "one has taken its role")


@scenario()
def crash_strict(sim: Simulation) -> None:
    leader, since = _cluster(sim, "strict"), sim.core.now
    leader.crash()
    _led_again_within(sim, SILENCE, since)


@scenario()
def crash_lease(sim: Simulation) -> None:
    """Behind a pooler: no sentinel, and no notification."""
    leader, since = _cluster(sim, "instant", sentinels=False), sim.core.now
    leader.crash()
    _led_again_within(sim, SILENCE, since)


@scenario()
def clean_leave(sim: Simulation) -> None:
    leader, since = _cluster(sim, sim.core.chance.choice(("instant", "strict"))), sim.core.now
    leader.leave()
    _led_again_within(sim, MILLISECONDS, since)


@scenario()
def clean_leave_lease(sim: Simulation) -> None:
    """There is no notification, so the next look finds it."""
    leader, since = _cluster(sim, "instant", sentinels=False), sim.core.now
    leader.leave()
    _led_again_within(sim, timing.SLICE_S / (1 - timing.DRIFT) + MILLISECONDS, since)


@scenario()
def resignation(sim: Simulation) -> None:
    leader, since = _cluster(sim, sim.core.chance.choice(("instant", "strict"))), sim.core.now
    heir = next(node for node in sim.nodes if node is not leader)
    named = sim.core.chosen(0.5)
    leader.resign("r", heir.protocol.member_id if named else None)
    _led_again_within(sim, 2 * MILLISECONDS, since)
    sim.expect(not leader.believes("r"), "who resigned stands back")
    sim.expect(not named or heir.believes("r"), "the named one leads")


@scenario()
def heir_dies(sim: Simulation) -> None:
    """A reservation ends with the member that it was made for."""
    leader, since = _cluster(sim, "instant"), sim.core.now
    heir = next(node for node in sim.nodes if node is not leader)
    leader.resign("r", heir.protocol.member_id)
    heir.crash()
    _led_again_within(sim, timing.SLICE_S + 3 * MILLISECONDS, since)


@scenario()
def pause_leader(sim: Simulation) -> None:
    """Instant or not: a stopped process holds its sentinel, so only silence ends it."""
    leader, since = _cluster(sim, sim.core.chance.choice(("instant", "strict"))), sim.core.now
    leader.pause()
    _led_again_within(sim, SILENCE, since)
    leader.resume()
    sim.calm(TTL)


@scenario()
def partition_leader(sim: Simulation) -> None:
    mode = sim.core.chance.choice(("instant", "strict"))
    leader, since = _cluster(sim, mode), sim.core.now
    leader.link.block(TO_SERVER, TO_CLIENT)
    _led_again_within(sim, max(SILENCE, PATIENCE), since)
    leader.link.heal()
    sim.calm(TTL)


@scenario(max_ttl=20.0)
def promotion(sim: Simulation) -> None:
    _cluster(sim, sim.core.chance.choice(("instant", "strict")))
    since = sim.core.now
    sim.server.promotion(0.0, 0.5, silent=False)
    _led_again_within(sim, 0.5 + RECONNECT + timing.silence(20.0) / (1 - timing.DRIFT) + RECONNECT, since)


@scenario()
def stepped_clock(sim: Simulation) -> None:
    """The server's clock jumps by an hour, either way: nothing happens."""
    leader = _cluster(sim, sim.core.chance.choice(("instant", "strict")))
    token = leader.protocol.roles.holding["r"]
    for step in (3600.0, -7200.0):
        sim.server.clock_step += step
        sim.run(TTL)
    sim.expect(leader.protocol.roles.holding.get("r") == token, "a stepped clock changes nothing")
    sim.expect(not sim.oracles.ends, "nobody is ended")


@scenario()
def restart_in_time(sim: Simulation) -> None:
    """A restart that trust outlasts: the same leader goes on under the same token, and no other node ever leads.

    The budget is the documented one: 0.75 TTL less a renewal interval and the stop itself. That leaves room for drift
    and for the longest pause between two attempts to reconnect.
    """
    ttl = sim.core.chance.choice((5.0, 10.0, 30.0))
    leader = sim.node("leader", "r", ttl=ttl, takeover=sim.core.chance.choice(("instant", "strict")))
    token = sim.elect("r", leader)
    for number in range(3):
        sim.node(f"n{number}", "r", ttl=ttl, takeover=sim.core.chance.choice(("instant", "strict")))
    sim.run(ttl * sim.core.between(1.0, 2.0))
    stop_s = sim.core.between(0.01, 0.3)
    down_s = sim.core.between(0.02, 0.75 * ttl - timing.renewal_interval(ttl) - stop_s - MILLISECONDS)
    if sim.core.chosen(0.5):
        sim.server.fast_stop(stop_s, down_s)
    else:
        sim.server.immediate_stop(down_s)
    sim.run(2 * ttl)
    sim.expect(leader.believes("r"), "the same node leads after a short restart")
    sim.expect(leader.protocol.roles.holding["r"] == token, "under the same token")
    sim.expect({belief.node for belief in sim.oracles.history["r"]} == {leader}, "nobody else ever led")
