"""Stories in which one rule of the design is all that stands between a fault and a broken promise.

Gentle random faults miss most of them, so each one is told step by step; what is left to chance (clock rates, delays,
ids) must not matter. ``tests/verification/mutations/test_mutations.py`` takes the rule away and wants the story to end
badly.
"""

from __future__ import annotations

from tenure.core import messages, timing
from tests.verification.simulation.network import TO_CLIENT, TO_SERVER
from tests.verification.simulation.node import SimNode
from tests.verification.simulation.registry import scenario
from tests.verification.simulation.simulation import Simulation

TTL = 10.0
BOTH = (TO_SERVER, TO_CLIENT)


def _pair(sim: Simulation, first: str = "strict", second: str = "strict") -> tuple[SimNode, SimNode]:
    """A leader, and a witness that has seen it for a while."""
    leader = sim.node("leader", "r", ttl=TTL, takeover=first)
    sim.elect("r", leader)
    witness = sim.node("witness", "r", ttl=TTL, takeover=second)
    sim.run(TTL)
    return leader, witness


def _after_renewal(sim: Simulation, node: SimNode) -> None:
    """Run until a renewal of this node has just been answered."""
    before = node.protocol.trusted_until
    sim.run_until(lambda: node.protocol.trusted_until > before, TTL, "a renewal", step=0.0005)


@scenario()
def late_answers(sim: Simulation) -> None:
    """The answer to a renewal is late by a good part of the TTL, and later requests are lost."""
    leader, _ = _pair(sim)
    _after_renewal(sim, leader)
    assert leader.control
    leader.control.down.stalled_until = sim.core.now + 0.8 * TTL
    sim.run(0.82 * TTL)
    leader.link.block(*BOTH)
    sim.run(2 * TTL)
    leader.link.heal()
    sim.calm(2 * TTL)


@scenario()
def delayed_look(sim: Simulation) -> None:
    """A look is on its way for half a TTL; the leader renews just before it arrives, and is then cut off."""
    leader, witness = _pair(sim)
    _after_renewal(sim, leader)
    assert witness.watch
    arrives_s = 2 * 0.25 * TTL / leader.clock.rate + 0.02
    witness.watch.up.stalled_until = sim.core.now + arrives_s
    sim.run(arrives_s + 0.02)
    leader.link.block(*BOTH)
    sim.run(2 * TTL)
    leader.link.heal()
    sim.calm(2 * TTL)


@scenario()
def delayed_end(sim: Simulation) -> None:
    """The leader is cut off for more than a TTL and comes back while the end of its membership waits to be sent."""
    leader, witness = _pair(sim)
    _after_renewal(sim, leader)
    leader.link.block(*BOTH)
    sim.run(0.8 * TTL)
    assert witness.control
    witness.control.up.stalled_until = sim.core.now + 0.8 * TTL
    sim.run(0.45 * TTL)
    leader.link.heal()
    sim.run(TTL)
    sim.calm(2 * TTL)


@scenario()
def ender_dies(sim: Simulation) -> None:
    """The leader falls silent; who ends it dies before it can take the role; the leader comes back."""
    leader, witness = _pair(sim)
    leader.link.block(*BOTH)
    sim.run_until(lambda: bool(sim.oracles.ends), 3 * TTL, "the silent leader is ended", step=0.0002)
    witness.crash(host=True)
    leader.link.heal()
    sim.calm(2 * TTL)
    sim.expect(leader.believes("r"), "the leader of before, joined anew, leads")


@scenario()
def long_outage(sim: Simulation) -> None:
    """No node reaches the database for longer than the TTL."""
    _pair(sim, sim.core.chance.choice(("instant", "strict")), sim.core.chance.choice(("instant", "strict")))
    sim.server.immediate_stop(1.5 * TTL)
    sim.run(1.5 * TTL)
    sim.calm(1.5 * TTL)


@scenario()
def outage(sim: Simulation) -> None:
    """After an outage of about a TTL every member has a whole TTL to come back: none is ended, and the leader stays.

    The term itself lapses here: trust is over before silence is. So the token is a new one and the leader the same.
    """
    leader, _ = _pair(sim)
    _after_renewal(sim, leader)
    sim.run(0.2 * TTL)
    sim.server.immediate_stop(0.95 * TTL)
    leader.link.typical_s = (0.5, 0.6)
    sim.run(0.95 * TTL)
    sim.calm(TTL)
    sim.expect(leader.believes("r"), "the same node leads after the outage")
    sim.expect(not sim.oracles.ends, "nobody is ended for an outage of the server")


def _leader_whom_a_promotion_lost(sim: Simulation) -> SimNode:
    """Return a leader whose acquisition the promoted replica lacks, after the promotion."""
    sim.node("early", ttl=TTL)
    sim.run(1.0)
    sim.server.promotion(2.0, 0.05, silent=True)
    leader = sim.node("leader", "r", ttl=TTL)
    sim.elect("r", leader, 1.5)
    sim.run(2.2)
    return leader


@scenario(max_ttl=20.0)
def promotion_lacks_acquire(sim: Simulation) -> None:
    """A replica is promoted that lacks the commit by which the present leader acquired the role."""
    leader = _leader_whom_a_promotion_lost(sim)
    sim.expect(leader.believes("r"), "the leader has heard of nothing")
    sim.node("new", "r", ttl=TTL)
    sim.run(TTL)
    sim.calm(40.0)


def _promoted(sim: Simulation) -> None:
    before = sim.server.timeline
    sim.run_until(lambda: sim.server.timeline > before, 10 * TTL, "the promotion")


@scenario(max_ttl=20.0)
def leader_claims(sim: Simulation) -> None:
    """A replica is promoted that shows an earlier leader; the present one, which is strict, leads there at once."""
    earlier = sim.node("earlier", "r", ttl=TTL, takeover="strict")
    sim.elect("r", earlier)
    leader = sim.node("leader", "r", ttl=TTL, takeover="strict")
    sim.run(1.0)
    sim.server.promotion(2.0, 0.3, silent=False)
    earlier.resign("r")
    sim.elect("r", leader, 1.5)
    _promoted(sim)
    claimed = lambda: leader.protocol.roles.holding.get("r", 0) >= 2**40  # noqa: E731
    sim.run_until(claimed, 3.0, "the leader leads on the promoted server")
    sim.run(30.0)
    sim.expect(claimed(), "the leader goes on leading when the others wait no longer")
    sim.calm(TTL)


@scenario(max_ttl=20.0)
def lapsed_leader_meets_a_promoted_server(sim: Simulation) -> None:
    """A leader was frozen, another one followed it, and a replica is promoted that lacks that."""
    leader, successor = _pair(sim)
    leader.pause()
    sim.server.promotion(1.6 * TTL, 0.05, silent=True)
    sim.elect("r", successor, 1.6 * TTL)
    _promoted(sim)
    sim.run(0.06)
    leader.resume()
    sim.run(2 * TTL)
    sim.calm(40.0)


@scenario(max_ttl=20.0)
def leader_in_doubt_meets_a_promoted_server(sim: Simulation) -> None:
    """A leader's connection is cut, another one follows at once, and a replica is promoted that lacks that."""
    leader, successor = _pair(sim, "instant", "instant")
    sim.server.promotion(1.0, 0.05, silent=True)
    leader.link.block(*BOTH)
    assert leader.control
    sim.server.end(leader.control, "cut")
    leader.connection_closed(leader.control)
    sim.elect("r", successor, 0.9)
    _promoted(sim)
    leader.link.heal()
    sim.run(2 * TTL)
    sim.calm(40.0)


def _asks(sim: Simulation, node: SimNode, kind: type, seconds: float) -> None:
    sim.run_until(lambda: isinstance(node._control_ask, kind), seconds, f"{node.name} asks to {kind}", step=0.0001)


@scenario(max_ttl=TTL)
def late_claim(sim: Simulation) -> None:
    """A leader's claim on a promoted server arrives when another node has waited, and leads there."""
    leader = sim.node("leader", "r", ttl=TTL, takeover="strict", rate=1.0)
    sim.elect("r", leader)
    successor = sim.node("successor", "r", ttl=TTL, takeover="strict", rate=1 + timing.DRIFT)
    sim.run(1.0)
    _after_renewal(sim, leader)
    sim.server.promotion(0.01, 0.05, silent=False)
    _promoted(sim)
    leader.link.block(*BOTH)
    met = sim.core.now
    sim.run(0.4 * TTL)
    leader.link.heal()
    _asks(sim, leader, messages.Acquire, 0.4 * TTL)
    assert leader.control
    leader.control.up.stalled_until = met + 1.12 * TTL
    leader.pause()
    sim.elect("r", successor, met + 1.1 * TTL - sim.core.now)
    sim.run(met + 1.13 * TTL - sim.core.now)
    leader.resume()
    sim.run(2 * TTL)
    sim.calm(40.0)


@scenario(max_ttl=TTL)
def claim_for_another_server(sim: Simulation) -> None:
    """A leader meets a promoted server, and then only the next one: meanwhile another node has led."""
    leader, successor = _pair(sim)
    _after_renewal(sim, leader)
    sim.server.promotion(0.01, 0.05, silent=False)
    _promoted(sim)
    _asks(sim, leader, messages.Join, TTL)
    leader.link.block(*BOTH)
    sim.run(0.5 * TTL)
    sim.server.promotion(1.5 * TTL, 0.05, silent=True)
    sim.elect("r", successor, 1.4 * TTL)
    _promoted(sim)
    leader.link.heal()
    sim.run(2 * TTL)
    sim.calm(40.0)


@scenario(max_ttl=5.0)
def promotion_lacks_raise(sim: Simulation) -> None:
    """The largest TTL is raised, a node leads with the longer one, and a replica is promoted that lacks the raise."""
    sim.node("early", ttl=5.0)
    sim.run(1.0)
    sim.server.promotion(30.0, 0.05, silent=True)
    sim.run(0.1)
    sim.server.database.limit_ttl(30.0)
    sim.run(10.0)
    leader = sim.node("leader", "r", ttl=30.0, takeover="strict")
    sim.elect("r", leader, 2.0)
    sim.run(18.0)
    sim.expect(leader.believes("r"), "the leader has heard of nothing")
    sim.node("new", "r", ttl=5.0, takeover="strict")
    sim.run(30.0)
    sim.calm(20.0)


@scenario(max_ttl=None)
def promotion_lacks_own_raise(sim: Simulation) -> None:
    """A node raises the largest TTL for itself, leads, and a replica is promoted that lacks the raise (R16)."""
    sim.node("early", ttl=5.0)
    sim.run(1.0)
    sim.server.promotion(30.0, 0.05, silent=True)
    sim.run(10.0)
    leader = sim.node("leader", "r", ttl=30.0, takeover="strict")
    sim.elect("r", leader, 2.0)
    sim.run(18.0)
    sim.expect(leader.believes("r"), "the leader has heard of nothing")
    sim.node("new", "r", ttl=5.0, takeover="strict")
    sim.run(30.0)
    sim.calm(20.0)


@scenario(max_ttl=5.0)
def raise_ripens(sim: Simulation) -> None:
    """A raise counts for nodes that join when it has stood for ten minutes. No node joins again because of it."""
    leader = sim.node("leader", "r", ttl=5.0, takeover="strict")
    sim.elect("r", leader)
    sim.server.database.limit_ttl(30.0)
    sim.run(1.0)
    early = sim.node("early", ttl=30.0)
    sim.run(0.95 * timing.RIPENS_AFTER_S)
    sim.expect(early.protocol.ttl == sim.node("second", ttl=30.0).protocol.settings.ttl / 6, "the old limit holds")
    sim.run(0.2 * timing.RIPENS_AFTER_S)
    late = sim.node("late", ttl=30.0)
    sim.run(1.0)
    sim.expect(late.protocol.ttl == 30.0, "the raise is ripe")
    sim.expect(early.protocol.ttl == 5.0, "a membership's TTL never changes")
    sim.expect(len(sim.oracles.history["r"]) == 1, "the leader leads on")


@scenario(max_ttl=5.0)
def limit_set_twice(sim: Simulation) -> None:
    """The limit is raised, taken back and raised again between two looks: the second raise is the younger."""
    witness = sim.node("witness", ttl=5.0)
    sim.run(1.0)
    sim.server.database.limit_ttl(30.0)
    sim.run(1.05 * timing.RIPENS_AFTER_S / witness.clock.rate - 30.0)
    sim.server.database.limit_ttl(5.0)
    sim.server.promotion(60.0, 0.05, silent=True)
    sim.server.database.limit_ttl(30.0)
    sim.run(35.0)
    leader = sim.node("leader", "r", ttl=30.0, takeover="strict")
    sim.elect("r", leader, 2.0)
    sim.run(25.0)
    sim.node("new", "r", ttl=5.0, takeover="strict")
    sim.run(30.0)
    sim.calm(20.0)


@scenario(max_ttl=20.0, loses_nothing=True)
def cancelled_wait(sim: Simulation) -> None:
    """A node acquires the role, its wait for the replica is cancelled, and the replica is promoted (R17)."""
    sim.node("early", ttl=TTL)
    sim.run(1.0)
    sim.server.promotion(2.0, 0.05, silent=True)
    leader = sim.node("leader", "r", ttl=TTL, takeover="strict")
    sim.run(2.2)
    sim.node("new", "r", ttl=TTL, takeover="strict")
    leader.link.block(*BOTH)
    sim.run(TTL)
    leader.link.heal()
    sim.calm(20.0)


@scenario(max_ttl=20.0, loses_nothing=True)
def switchover(sim: Simulation) -> None:
    """A replica that lacks nothing is promoted: the leader resumes its term there under the same token (R18)."""
    kind = sim.core.chance.choice(("instant", "strict"))
    leader, _ = _pair(sim, kind, kind)
    _after_renewal(sim, leader)
    token = leader.protocol.roles.holding["r"]
    sim.server.promotion(0.0, 0.2 * TTL, silent=False)
    sim.run(0.1)
    sim.run_until(lambda: sim.server.timeline > 1 and sim.server.up, TTL, "the promotion")
    sim.run(2.0)  # in strict mode the leader trusts its lease meanwhile
    sim.expect(leader.believes("r"), "the same node leads after the switchover")
    sim.expect(leader.protocol.roles.holding.get("r") == token, "under the same token")
    sim.expect(sim.server.database.fenced("r", token, leader.protocol.member_id), "and may write")
    sim.calm(20.0)
    sim.expect(not sim.oracles.ends, "nobody is ended")


@scenario(max_ttl=20.0)
def word_after_promotion(sim: Simulation) -> None:
    """A promotion loses an acquisition, and then an operator says that promotions lose nothing (R17)."""
    leader = _leader_whom_a_promotion_lost(sim)
    sim.server.database.set_promotion(loses_nothing=True)
    sim.expect(leader.believes("r"), "the leader has heard of nothing")
    sim.node("new", "r", ttl=TTL)
    sim.run(TTL)
    sim.calm(40.0)


@scenario(max_ttl=20.0)
def promotion_lacks_namespace(sim: Simulation) -> None:
    """The namespace is made, a node leads in it, and a replica is promoted that lacks it."""
    sim.server.promotion(2.0, 0.05, silent=True)
    leader = sim.node("leader", "r", ttl=20.0, takeover="strict")
    sim.elect("r", leader, 1.5)
    sim.run_until(lambda: sim.server.timeline > 1 and sim.server.up, 3.0, "the promotion")
    sim.expect(leader.believes("r"), "the leader has heard of nothing")
    sim.server.max_ttl = 5.0
    sim.node("new", "r", ttl=5.0, takeover="strict")
    sim.run(60.0)
    sim.calm(20.0)


@scenario(max_ttl=12.0)
def restored_dump(sim: Simulation) -> None:
    """The tables are made anew from a dump, twice: terms that were superseded since look like the latest there."""
    leader, _ = _pair(sim, "instant", "instant")
    token, member = leader.protocol.roles.holding["r"], leader.protocol.member_id
    for _ in range(2):
        dump = sim.server.database.snapshot()
        for _ in range(3):
            (sim.oracles.leader("r") or leader).resign("r")
            sim.run(1.0)
        sim.server.restore(dump)
        sim.run(0.01)
        for _ in range(5):
            sim.server.begin("r", token, member or "", TTL, 0.1)
            sim.run(0.5)
        sim.calm(40.0)


@scenario(max_ttl=20.0)
def promotion_lacks_takeover(sim: Simulation) -> None:
    """The leader's connection is cut, another takes over, and a replica that lacks the takeover is promoted."""
    leader, witness = _pair(sim, "instant", "instant")
    _after_renewal(sim, leader)
    _after_renewal(sim, leader)
    sim.server.promotion(1.5, 0.05, silent=True)
    sim.run(0.1)
    assert leader.control
    sim.server.terminate(leader.control)
    leader.link.block(*BOTH)
    sim.elect("r", witness, 0.5)
    sim.run(1.5)
    leader.link.heal()
    sim.run(TTL)
    sim.calm(40.0)


@scenario()
def stale_proof(sim: Simulation) -> None:
    """A proof of death waits to be sent while the server restarts and the leader resumes its term there."""
    leader, witness = _pair(sim, "instant", "strict")
    _after_renewal(sim, leader)
    assert witness.control
    assert leader.control
    witness.control.down.stalled_until = sim.core.now + TTL
    sim.run_until(lambda: witness._control_ask is not None, TTL, "the witness asks something")
    _after_renewal(sim, leader)
    token = leader.protocol.roles.holding["r"]
    sim.server.terminate(leader.control)
    leader.link.block(*BOTH)
    sim.run(0.2)
    witness.link.typical_s = (0.2, 0.3)
    witness.control.down.unstall()
    sim.server.immediate_stop(0.3)
    sim.run(0.3)
    leader.link.heal()
    sim.run(4.0)
    sim.expect(leader.protocol.roles.holding.get("r") == token, "the term goes on after the restart")


@scenario()
def delayed_resume(sim: Simulation) -> None:
    """After a restart the leader's resume is delayed, a middlebox resets its connection, and a second resume works."""
    leader, _ = _pair(sim, "instant", "instant")
    _after_renewal(sim, leader)
    token = leader.protocol.roles.holding["r"]
    sim.server.immediate_stop(0.3)
    sim.run_until(lambda: isinstance(leader._control_ask, messages.Resume), TTL, "a resume", step=0.0001)
    delayed = leader.control
    assert delayed
    # What is on its way arrives late; the leader hears of the end at once.
    sent, leader.link.cut[TO_SERVER] = delayed.up, True
    sim.run(0.01)
    leader.link.cut[TO_SERVER] = False
    held, leader.link._held[TO_SERVER] = leader.link._held[TO_SERVER], []
    sent.stalled_until = sim.core.now + 2.0
    for stream, action in held:
        stream.send(action)
    leader.connection_closed(delayed)
    sim.run(1.0)
    sim.expect(leader.protocol.roles.holding.get("r") == token, "the term goes on after the second resume")
    sim.run(3.0)
    sim.expect(leader.believes("r"), "the same node leads")
    sim.expect(leader.protocol.roles.holding["r"] == token, "under the same token")


@scenario()
def fast_stop(sim: Simulation) -> None:
    """A fast stop frees the leader's sentinel while the witness's connections still work."""
    leader, witness = _pair(sim, "instant", "instant")
    for number in range(3):
        sim.node(f"other{number}", ttl=TTL)
    _after_renewal(sim, leader)
    token = leader.protocol.roles.holding["r"]
    sim.server.fast_stop(0.5, 0.5, last=(witness,))
    sim.run(4.0)
    sim.expect(leader.believes("r"), "the same node leads after a short restart")
    sim.expect(leader.protocol.roles.holding["r"] == token, "under the same token")


@scenario()
def stop_during_a_look(sim: Simulation) -> None:
    """A leader dies. The server accepts the connection that shows it, and begins to stop before the look has ended."""
    nodes = [sim.node(f"n{number}", ttl=TTL) for number in range(3)]
    sim.run(1.0)
    leader, dies, witness = sorted(nodes, key=lambda node: node.protocol.member_id or "")
    for role, node in (("r", leader), ("other", dies)):
        node.stand(role)
        sim.elect(role, node)
        witness.stand(role)
    sim.run(TTL)
    _after_renewal(sim, leader)
    token = leader.protocol.roles.holding["r"]
    # By then the server has freed the sentinels of all but the witness, which can still write.
    sim.server.looks_last_s, sim.server.knocks_early = (0.4, 0.4), 1.0
    dies.crash()
    (key,) = (key for key, connection in sim.server.locks.items() if connection.node is dies)
    sim.run_until(lambda: key not in sim.server.locks, 1.0, "the sentinel falls", step=0.0001)
    sim.run(0.001)
    sim.server.fast_stop(0.5, 0.5, last=(witness,))
    sim.run(4.0)
    sim.expect(leader.believes("r"), "the same node leads after a short restart")
    sim.expect(leader.protocol.roles.holding["r"] == token, "under the same token")


@scenario()
def short_restart(sim: Simulation) -> None:
    """A short restart, after which the leader is the last to come back."""
    kind = sim.core.chance.choice(("instant", "strict"))
    leader, _ = _pair(sim, kind, "instant")
    _after_renewal(sim, leader)
    token = leader.protocol.roles.holding["r"]
    leader.link.typical_s = (0.3, 0.4)
    sim.server.immediate_stop(1.0)
    sim.run(5.0)
    sim.expect(leader.believes("r"), "the same node leads after a short restart")
    sim.expect(leader.protocol.roles.holding["r"] == token, "under the same token")


@scenario()
def strict_leader_cut(sim: Simulation) -> None:
    """A strict leader's connection is cut among instant nodes: none of them may act on that."""
    leader, _ = _pair(sim, "strict", "instant")
    _after_renewal(sim, leader)
    assert leader.control
    sim.server.terminate(leader.control)
    leader.link.block(*BOTH)
    sim.run(0.5 * TTL)
    sim.expect(leader.believes("r"), "a strict leader trusts its lease")
    sim.run(TTL)
    leader.link.heal()
    sim.calm(2 * TTL)


@scenario()
def instant_leader_cut(sim: Simulation) -> None:
    """A living instant leader's connection is cut; it hears at once, and cannot reconnect for a while."""
    leader, witness = _pair(sim, "instant", "instant")
    assert leader.control
    sim.server.terminate(leader.control)
    leader.link.block(*BOTH)
    sim.elect("r", witness, 0.5)
    sim.run(1.0)
    leader.link.heal()
    sim.run(TTL)
    sim.expect(witness.believes("r"), "the successor leads on")


@scenario()
def partition(sim: Simulation) -> None:
    """The leader is cut off, both ways or one way, and the server lets go of it in its own time."""
    leader, witness = _pair(sim, "instant", "instant")
    _after_renewal(sim, leader)
    leader.link.block(*sim.core.chance.choice((BOTH, BOTH, (TO_SERVER,), (TO_CLIENT,))))
    sim.elect("r", witness, 1.3 * TTL)
    leader.link.heal()
    sim.run(TTL)
    sim.calm(TTL)


@scenario(max_ttl=12.0)
def lagging_promotion(sim: Simulation) -> None:
    """A promoted replica lacks some terms, and the memberships under which they were held."""
    nodes = [sim.node(f"n{number}", "r", ttl=2.0) for number in range(3)]
    sim.run(3.0)
    sim.server.promotion(8.0, 0.1, silent=False)
    for _ in range(3):
        leader = sim.oracles.leader("r")
        if leader:
            leader.crash()
            sim.run(1.0)
            leader.restart()
        sim.run(1.0)
    sim.run(4.0)
    sim.expect(all(node.alive for node in nodes), "everybody is back")
    sim.calm(20.0)


@scenario()
def fenced_stream(sim: Simulation) -> None:
    """A dead leader's application goes on writing, in transactions that overlap."""
    leader, _ = _pair(sim, "instant", "instant")
    token, member = leader.protocol.roles.holding["r"], leader.protocol.member_id
    end = sim.core.now + 40.0

    def write() -> None:
        if sim.core.now < end:
            sim.server.begin("r", token, member or "", TTL, 1.0)
            sim.core.after(0.4, write)

    write()
    sim.run(3.0)
    died_at = sim.core.now
    leader.crash()
    sim.run(5.0)
    gap = sim.oracles.next_term_after("r", died_at)
    sim.expect(gap is not None and gap < 2.0, f"somebody leads 2 s after a death, in spite of open transactions: {gap}")
    sim.expect(sim.oracles.commits > 3, "fenced transactions commit")


@scenario(max_ttl=20.0)
def stale_fence_after_promotion(sim: Simulation) -> None:
    """A term that ended on the lost host looks alive on the promoted replica: its writes must not pass."""
    leader, witness = _pair(sim, "instant", "instant")
    token, member = leader.protocol.roles.holding["r"], leader.protocol.member_id
    sim.server.promotion(2.0, 0.05, silent=True)
    leader.crash(host=True)
    assert leader.control
    sim.server.terminate(leader.control)
    sim.elect("r", witness, 1.0)
    sim.run(2.1)
    for _ in range(10):
        sim.server.begin("r", token, member or "", TTL, 0.1)
        sim.run(0.5)
    sim.calm(60.0)


@scenario()
def long_pause(sim: Simulation) -> None:
    """A leader without rivals sleeps past its trust: the term has lapsed, and it needs a new one."""
    leader = sim.node("leader", "r", ttl=TTL, takeover=sim.core.chance.choice(("instant", "strict")))
    token = sim.elect("r", leader)
    _after_renewal(sim, leader)
    leader.pause()
    sim.run(1.4 * TTL)
    sim.expect(not leader.believes("r"), "who wakes after its trust reads False at once")
    leader.resume()
    sim.calm(TTL)
    sim.expect(leader.protocol.roles.holding["r"] > token, "a term that lapsed is acquired anew")


@scenario()
def pause_across_an_answer(sim: Simulation) -> None:
    """A leader sleeps past its deadline, and finds the answer to a renewal waiting when it wakes."""
    leader = sim.node("leader", "r", ttl=TTL, takeover="strict")
    sim.elect("r", leader)
    _after_renewal(sim, leader)
    asked = lambda: isinstance(leader._control_ask, messages.Renew)  # noqa: E731
    sim.run_until(asked, TTL, "the next renewal", step=0.0001)
    trusted_s = leader.clock.true(leader.protocol.trusted_until) - sim.core.now
    leader.pause()
    sim.run(trusted_s + 0.05 * TTL)
    leader.resume()
    sim.calm(TTL)


@scenario()
def late_acquire(sim: Simulation) -> None:
    """The answer to an acquire comes after trust has lapsed: nothing is announced that is not believed."""
    leader = sim.node("leader", "r", ttl=TTL, takeover="strict")
    sim.elect("r", leader)
    _after_renewal(sim, leader)
    sim.run(0.12 * TTL)
    leader.stand("s")
    asked = lambda: isinstance(leader._control_ask, messages.Acquire)  # noqa: E731
    sim.run_until(asked, 1.0, "the acquire", step=0.0001)
    assert leader.control
    trusted_s = leader.clock.true(leader.protocol.trusted_until) - sim.core.now
    leader.control.down.stalled_until = sim.core.now + trusted_s + 0.04 * TTL
    sim.run(TTL)
    sim.calm(TTL)


@scenario()
def clock_drift(sim: Simulation) -> None:
    """The leader's clock is as slow as permitted, the witness's as fast, and the leader is cut off."""
    leader = sim.node("leader", "r", ttl=60.0, takeover="strict", rate=1 - timing.DRIFT)
    sim.elect("r", leader)
    witness = sim.node("witness", "r", ttl=60.0, takeover="strict", rate=1 + timing.DRIFT)
    sim.run(20.0)
    before = leader.protocol.trusted_until
    sim.run_until(lambda: leader.protocol.trusted_until > before, 20.0, "a renewal", step=0.001)
    leader.link.block(*BOTH)
    sim.elect("r", witness, 64.0)


@scenario()
def lost_acquire(sim: Simulation) -> None:
    """The reply to an acquire is lost with its connection: the term is adopted once, and not acquired twice."""
    leader = sim.node("leader", "r", ttl=TTL, takeover="strict")
    sim.elect("r", leader)
    leader.stand("s")
    asked = lambda: isinstance(leader._control_ask, messages.Acquire)  # noqa: E731
    sim.run_until(asked, 1.0, "the acquire", step=0.0001)
    assert leader.control
    leader.control.down.stalled_until = sim.core.now + TTL
    sim.run(0.01)
    leader.control.down.unstall()
    sim.server.end(leader.control, "cut")
    leader.connection_closed(leader.control)
    sim.run(TTL)
    sim.calm(TTL)


@scenario()
def acquire_lost_in_a_restart(sim: Simulation) -> None:
    """The server restarts before the reply to an acquire is out: one term is resumed, the other one begins."""
    leader = sim.node("leader", "r", ttl=TTL)
    sim.elect("r", leader)
    leader.stand("s")
    asked = lambda: isinstance(leader._control_ask, messages.Acquire)  # noqa: E731
    sim.run_until(asked, 1.0, "the acquire", step=0.0001)
    assert leader.control
    leader.control.down.stalled_until = sim.core.now + TTL
    sim.run(0.01)
    leader.control.down.unstall()
    sim.server.immediate_stop(0.3)
    sim.run(2.0)
    sim.calm(1.0)


@scenario()
def two_die_one_after_the_other(sim: Simulation) -> None:
    """The proof of a second death comes while the end of the first is under way: it must not be forgotten."""
    leader = sim.node("leader", "r", ttl=TTL)
    sim.elect("r", leader)
    others = [sim.node(name, "r", ttl=TTL) for name in ("one", "two")]
    sim.run(3.0)
    ring = sorted(sim.nodes, key=lambda node: node.protocol.member_id or "")
    witness = next(node for node in others if ring[ring.index(node) - 1] is not leader)
    next(node for node in others if node is not witness).crash()
    asked = lambda node: isinstance(node._control_ask, messages.End)  # noqa: E731
    sim.run_until(lambda: asked(witness) or asked(leader), 1.0, "a node ends the first", step=0.0001)
    if asked(leader):  # its turn came earlier, by the chance that spreads the nodes, and it ends with the story
        return
    assert witness.control
    witness.control.down.stalled_until = sim.core.now + 0.1
    died_at = sim.core.now
    leader.crash()
    sim.run(0.3)
    gap = sim.oracles.next_term_after("r", died_at)
    sim.expect(gap is not None, "the second death is acted upon as soon as the first")
