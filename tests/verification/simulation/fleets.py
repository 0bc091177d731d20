"""Many nodes, and many roles: what a node no longer reads, and what must go on as if it did (R19, R20)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from tenure.core import messages, timing
from tenure.core.protocol import NodeProtocol
from tenure.store.session import NAMED_ROLES
from tests.verification.simulation.node import SimNode
from tests.verification.simulation.registry import scenario
from tests.verification.simulation.simulation import Simulation

TTL = 10.0
SILENCE = timing.silence(TTL) / (1 - timing.DRIFT) + 2 * timing.SLICE_S
FLEET = 200
MOST = 8
"""How many of them may act on the same death: its neighbours, and those whose renewal falls into that moment."""
RUN = 60
"""How many neighbours fail together."""


def _ring(sim: Simulation) -> list[SimNode]:
    """The nodes that live, in the order of the ring."""
    return sorted((node for node in sim.nodes if node.alive), key=lambda node: node.protocol.member_id or "")


def _from_the_leader(sim: Simulation, number: int, role: str = "r") -> list[SimNode]:
    """The leader, and the nodes that come after it on the ring: those that look at it and at each other."""
    leader, ring = sim.oracles.leader(role), _ring(sim)
    assert leader
    place = ring.index(leader)
    return (ring[place:] + ring[:place])[:number]


def _led_within(sim: Simulation, bound: float, since: float, what: str) -> None:
    sim.run(bound)
    gap = sim.oracles.next_term_after("r", since)
    sim.expect(gap is not None and gap <= bound, f"{what}: nobody led for {gap} s, which is more than {bound:.1f} s")


@contextlib.contextmanager
def _counted(kind: type, name: str) -> Iterator[list[object]]:
    """Collect the requests of one kind that nodes make."""
    made: list[object] = []
    original = getattr(NodeProtocol, name)

    def counting(self: NodeProtocol, now: float) -> object:
        request = original(self, now)
        if isinstance(request, kind):
            made.append(request)
        return request

    with mock.patch.object(NodeProtocol, name, counting):
        yield made


CONNECTED_S = 2 * TTL
"""After this time on a new connection, renewals no longer read all roles each time."""


@contextlib.contextmanager
def _rarely_reading_all_roles() -> Iterator[None]:
    """As with a hundred thousand roles: a renewal that reads all of them comes once in a long time."""
    with mock.patch.multiple("tenure.core.roles", FEW_ROLES=0, READ_ROLE_S=1000.0):
        yield


# Many nodes ----------------------------------------------------------------------------------------------------------


@scenario()
def fleet(sim: Simulation) -> None:
    """Neighbours die together, the server restarts, neighbours freeze together, and all start anew."""
    for number in range(FLEET):
        sim.node(f"n{number}", "r", ttl=TTL, listens=number % 2 == 0)
    sim.run(5.0)
    victims, since = _from_the_leader(sim, RUN), sim.core.now
    for node in victims:
        node.crash()
    _led_within(sim, 1.5, since, f"{RUN} neighbours died")
    sim.run(2.0)
    living = {node.protocol.member_id for node in sim.nodes if node.alive}
    sim.expect({id_ for id_ in sim.server.database.tables.members if sim.server.database.tables.lives(id_)} == living,
               "every dead member was ended within some seconds")  # fmt: skip
    for node in victims:
        node.restart()
    sim.run(3.0)
    leader = sim.oracles.leader("r")
    sim.server.immediate_stop(0.3)
    sim.run(5.0)
    sim.expect(sim.oracles.leader("r") is leader, "the same node leads after a restart of the server")
    frozen, since = _from_the_leader(sim, RUN), sim.core.now
    for node in frozen:
        node.pause()
    _led_within(sim, SILENCE, since, f"{RUN} neighbours froze")
    for node in frozen:
        node.resume()
    sim.calm(2 * TTL)
    for node in list(sim.nodes):
        node.crash()
        node.restart()
    sim.calm(1.5)


@scenario()
def deaths_in_a_fleet(sim: Simulation) -> None:
    """The leader of 200 nodes dies, alone and then with nine others: one node knocks, and takes the role.

    On the slow network, many nodes look while it does, and see that the leader is dead or that the role is vacant.
    """
    for number in range(FLEET):
        sim.node(f"n{number}", "r", ttl=TTL, listens=number % 2 == 0).link.typical_s = (0.01, 0.02)
    sim.run(5.0)
    for dead in (1, 10):
        leader, since = _from_the_leader(sim, 1)[0], sim.core.now
        others = [node for node in sim.nodes if node.alive and node is not leader]
        victims = (leader, *sim.core.chance.sample(others, dead - 1))
        ids = {node.protocol.member_id for node in victims}
        what = f"{dead} of {FLEET} nodes died"
        with _counted(messages.Acquire, "control") as attempts:
            with _counted(messages.Knock, "watch") as knocks:
                for node in victims:
                    node.crash()
                led = lambda: sim.oracles.next_term_after("r", since) is not None  # noqa: B023, E731
                sim.run_until(led, 0.5, f"{what}: nobody led")
            sim.run(0.1)
        sim.expect(len(knocks) <= MOST, f"{what}: {len(knocks)} knocks instead of at most {MOST}")
        sim.expect(len(attempts) <= MOST, f"{what}: {len(attempts)} attempts instead of at most {MOST}")
        sim.run(2.0)
        sim.expect(ids <= {id_ for _, id_, _ in sim.oracles.ends}, "every dead member was ended within some seconds")


@scenario()
def resignation_in_a_fleet(sim: Simulation) -> None:
    """A leader of many roles leaves: all nodes are told and renew at once, but not together from then on."""
    number, interval, slices = 50, timing.renewal_interval(TTL), 10
    roles = ("r", *(f"s{each}" for each in range(NAMED_ROLES)))
    for each in range(number):
        sim.node(f"n{each}", *roles, ttl=TTL, rate=1.0)
        sim.run(interval / number)
    sim.run(1.0)
    leader = sim.oracles.leader("r")
    assert leader
    leader.leave()
    sim.run(1.5 * interval)
    for _ in range(slices):
        with _counted(messages.Renew, "control") as renewals:
            sim.run(interval / slices)
        sim.expect(len(renewals) <= number / 2, f"{len(renewals)} renewals within {interval / slices} s")


@scenario()
def named_successor(sim: Simulation) -> None:
    """The leader of many nodes resigns, or leaves: one node tries for the role, at once (R24)."""
    for number in range(20):
        sim.node(f"n{number}", "r", ttl=TTL)
    sim.run(5.0)
    for leaves in (False, True):
        leader, since = _from_the_leader(sim, 1)[0], sim.core.now
        with _counted(messages.Acquire, "control") as attempts:
            if leaves:
                leader.leave()
            else:
                leader.resign("r")
            sim.run(0.1)
        gap = sim.oracles.next_term_after("r", since)
        sim.expect(gap is not None, "the successor leads within milliseconds")
        # A node that looks or renews in that very moment sees the vacancy, and tries as well.
        sim.expect(len(attempts) <= MOST, f"{len(attempts)} attempts for one role")
        sim.run(2.0)


@scenario()
def frozen_heir(sim: Simulation) -> None:
    """The leader resigns, and the node that it names is frozen: the others act in its place."""
    for number in range(3):
        sim.node(f"n{number}", "r", ttl=4 * TTL)
    sim.run(5.0)
    leader, heir, *_ = _from_the_leader(sim, 3)
    heir.pause()
    since = sim.core.now
    leader.resign("r")
    _led_within(sim, timing.SLICE_S + 1.0, since, "the leader resigned while its heir was frozen")


@scenario()
def frozen_successor(sim: Simulation) -> None:
    """The leader dies, and the node that should notice is frozen: the others act in its place."""
    for number in range(8):
        sim.node(f"n{number}", "r", ttl=TTL)
    sim.run(5.0)
    leader, successor, *_ = _from_the_leader(sim, 8)
    successor.pause()
    since = sim.core.now
    leader.crash()
    _led_within(sim, timing.SLICE_S + 1.0, since, "the leader died while its successor was frozen")


@scenario()
def leader_far_away(sim: Simulation) -> None:
    """The leader freezes, with all the nodes that look at it as their neighbour: the other candidates look, too."""
    for number in range(12):
        sim.node(f"n{number}", "r", ttl=TTL, takeover="strict")
    sim.run(TTL)
    frozen, since = _from_the_leader(sim, 9), sim.core.now
    for node in frozen:
        node.pause()
    _led_within(sim, SILENCE, since, "the leader's neighbours froze with it")


@scenario()
def silent_neighbours(sim: Simulation) -> None:
    """As before, but the other candidates have too many roles to look at all the holders."""
    with mock.patch("tenure.core.roles.LOOKED_AT", 0):
        for number in range(20):
            sim.node(f"n{number}", "r", ttl=TTL, takeover="strict")
        sim.run(TTL)
        frozen, since = _from_the_leader(sim, 16), sim.core.now
        for node in frozen:
            node.pause()
        _led_within(sim, 2 * SILENCE + TTL, since, "the leader's neighbours froze with it")


@scenario()
def dead_neighbours(sim: Simulation) -> None:
    """The leader dies with many neighbours, and the others have too many roles to look at all the holders."""
    with mock.patch("tenure.core.roles.LOOKED_AT", 0):
        for number in range(20):
            sim.node(f"n{number}", "r", ttl=TTL, listens=False)
        sim.run(TTL)
        since = sim.core.now
        for node in _from_the_leader(sim, 16):
            node.crash()
        _led_within(sim, 0.5, since, "the leader's neighbours died with it")


# Many roles ----------------------------------------------------------------------------------------------------------


@scenario()
def lost_acquire_among_many_roles(sim: Simulation) -> None:
    """A node acquires a role that it withdraws from, and the reply is lost: the next renewal reads all roles."""
    with _rarely_reading_all_roles():
        leader = sim.node("leader", "r", ttl=TTL, takeover="strict")
        sim.elect("r", leader)
        sim.run(CONNECTED_S)
        leader.stand("s")
        asked = lambda: isinstance(leader._control_ask, messages.Acquire)  # noqa: E731
        sim.run_until(asked, 1.0, "the acquire", step=0.0001)
        assert leader.control
        leader.control.down.stalled_until = sim.core.now + TTL
        sim.run(0.01)
        leader.withdraw("s")
        sim.node("other", "s", ttl=TTL)
        leader.control.down.unstall()
        sim.server.end(leader.control, "cut")
        leader.connection_closed(leader.control)
        sim.calm(TTL)


@scenario()
def request_among_many_roles(sim: Simulation) -> None:
    """An operator asks the leader of many roles to resign one."""
    with _rarely_reading_all_roles():
        leader = sim.node("leader", "r", ttl=TTL)
        sim.elect("r", leader)
        sim.node("other", "r", ttl=TTL)
        sim.run(CONNECTED_S)
        since = sim.core.now
        sim.server.database.request("r")
        sim.run(TTL)
        gap = sim.oracles.next_term_after("r", since)
        sim.expect(gap is not None and gap <= TTL, "the request to resign is heard")


@scenario()
def vacancy_among_many_roles(sim: Simulation) -> None:
    """The leader of one role among many is ended by a node that does not stand for it, and nobody is told."""
    with _rarely_reading_all_roles():
        leader = sim.node("leader", "r", ttl=TTL)
        sim.elect("r", leader)
        heir = sim.node("heir", "r", ttl=TTL, listens=False)
        sim.node("witness", "s", ttl=TTL)
        sim.run(CONNECTED_S)
        assert heir.watch
        heir.watch.up.stalled_until = heir.watch.down.stalled_until = sim.core.now + 2.0
        leader.crash()
        sim.run(2.0)
        heir.watch.up.unstall()
        heir.watch.down.unstall()
        sim.calm(2.0)
