"""Random faults, several at a time, for the scenarios that try everything at once."""

from __future__ import annotations

from collections.abc import Callable

from tests.verification.simulation.network import TO_CLIENT, TO_SERVER
from tests.verification.simulation.node import SimNode
from tests.verification.simulation.simulation import Simulation

SERVER_FAULTS = ("fast stop", "immediate stop", "promotion", "full", "failing", "clock", "cut", "late cut", "request")
NODE_FAULTS = (
    "pause",
    "crash",
    "host",
    "partition",
    "one way",
    "spikes",
    "stall",
    "resign",
    "resign to",
    "withdraw",
    "leave",
)


class Faults:
    """Breaks things at random until told to stop, and mends what it broke."""

    def __init__(self, simulation: Simulation, kinds: tuple[str, ...], until: float, every_s: float) -> None:
        self.simulation = simulation
        self.core = simulation.core
        self.kinds = kinds
        self.until = until
        self.every_s = every_s
        self.over_at = until
        """When everything is mended."""
        self.core.after(self.core.between(0, every_s), self._next)

    def _next(self) -> None:
        if self.core.now >= self.until:
            return
        kind = self.core.chance.choice(self.kinds)
        if kind in SERVER_FAULTS:
            self._server(kind)
        else:
            self._node(kind, self._victim())
        self.core.after(self.core.chance.expovariate(1 / self.every_s), self._next)

    def _victim(self) -> SimNode:
        """Leaders suffer most."""
        nodes = self.simulation.nodes
        leaders = [node for node in nodes if any(node.believes(role) for role in node.roles)]
        return self.core.chance.choice(leaders if leaders and self.core.chosen(0.6) else nodes)

    def _for_a_while(self, node: SimNode, undo: Callable[[], None]) -> None:
        """Undo it after a part of the TTL, about a TTL, or more."""
        lasts = (
            node.settings.ttl * self.core.chance.choice((0.1, 0.5, 0.9, 1.0, 1.1, 1.5)) * self.core.between(0.8, 1.2)
        )
        self._later(lasts, undo)

    def _later(self, seconds: float, undo: Callable[[], None] = lambda: None) -> None:
        self.core.after(seconds, undo)
        self.over_at = max(self.over_at, self.core.now + seconds)

    def _server(self, kind: str) -> None:
        server, between = self.simulation.server, self.core.between
        if kind == "fast stop":
            stop, down = between(0.01, 1.0), between(0.05, 8.0)
            server.fast_stop(stop, down)
            self._later(stop + down)
        elif kind == "immediate stop":
            down = between(0.05, 12.0)
            server.immediate_stop(down)
            self._later(down)
        elif kind == "promotion":
            lag, down = between(0.0, 3.0), between(0.01, 1.0)
            server.promotion(lag, down, silent=self.core.chosen(0.5))
            self._later(lag + down)
        elif kind == "full":
            server.full = True
            self._later(between(0.1, 5.0), lambda: setattr(server, "full", False))
        elif kind == "failing":
            server.failing = between(0.05, 0.5)
            self._later(between(0.5, 10.0), lambda: setattr(server, "failing", 0.0))
        elif kind == "clock":
            server.clock_step += self.core.chance.choice((-3600.0, 3600.0))
        elif kind == "request":
            server.database.request(self.core.chance.choice(("alpha", "beta", "gamma")))
        else:
            self._cut(late=kind == "late cut")

    def _cut(self, *, late: bool) -> None:
        node = self._victim()
        connection = node.control if self.core.chosen(0.8) else node.watch
        if connection and node.alive:
            seconds = self.core.between(0.05, 15.0) if late else 0.0
            self.simulation.server.terminate(connection, late=seconds)
            self._later(seconds)

    def _node(self, kind: str, node: SimNode) -> None:
        core, link = self.core, node.link
        if not node.alive:
            return
        if kind == "pause":
            node.pause()
            self._for_a_while(node, node.resume)
        elif kind in ("crash", "host"):
            node.crash(host=kind == "host")
            self._later(core.between(0.05, 15.0), node.restart)
        elif kind in ("partition", "one way"):
            core.note(f"{node.name}: {kind}")
            both = (TO_SERVER, TO_CLIENT)
            link.block(*(both if kind == "partition" else (core.chance.choice(both),)))
            self._for_a_while(node, link.heal)
        elif kind == "spikes":
            core.note(f"{node.name}: spikes")
            link.spike, link.spike_s = core.between(0.05, 0.5), core.between(0.05, node.settings.ttl)
            self._for_a_while(node, lambda: self._no_more_spikes(node))
        elif kind == "stall" and node.control:
            connection = core.chance.choice([c for c in (node.control, node.watch) if c])
            stream = core.chance.choice((connection.up, connection.down))
            seconds = node.settings.ttl * core.between(0.2, 1.5)
            core.note(f"{node.name}: {connection.lane} stalls for {seconds:.1f} s")
            stream.stalled_until = core.now + seconds
            self._later(seconds)
        elif node.roles:
            self._command(kind, node)

    def _no_more_spikes(self, node: SimNode) -> None:
        """What is late already comes within the longest delay."""
        node.link.spike = 0.0
        self._later(node.link.spike_s)

    def _command(self, kind: str, node: SimNode) -> None:
        core, role = self.core, self.core.chance.choice(node.roles)
        if kind == "resign":
            node.resign(role)
        elif kind == "resign to":
            others = [n.protocol.member_id for n in self.simulation.nodes if n is not node and n.protocol.member_id]
            node.resign(role, core.chance.choice(others) if others else None)
        elif kind == "withdraw":
            node.withdraw(role)
            self._later(core.between(0.01, 5.0), lambda: node.stand(role))
        elif kind == "leave":
            node.leave()
            self._later(core.between(1.0, 10.0), node.restart)


class Writers:
    """Applications that write under terms, fresh and stale ones alike."""

    def __init__(self, simulation: Simulation, every_s: float, longest_s: float, until: float) -> None:
        self.simulation = simulation
        self.every_s = every_s
        self.longest_s = longest_s
        self.until = until
        self._known: list[tuple[str, int, str, float]] = []
        simulation.core.after(every_s, self._next)

    def _next(self) -> None:
        core = self.simulation.core
        if core.now >= self.until:
            return
        for node in self.simulation.nodes:
            for role, token in node.protocol.roles.holding.items():
                term = (role, token, node.protocol.member_id or "", node.settings.ttl)
                if node.believes(role) and term not in self._known:
                    self._known.append(term)
        if self._known:
            role, token, member, ttl = core.chance.choice(self._known[-4:])
            lasts = core.between(0, self.longest_s)
            core.after(core.between(0, 1.0), lambda: self.simulation.server.begin(role, token, member, ttl, lasts))
        core.after(core.chance.expovariate(1 / self.every_s), self._next)
