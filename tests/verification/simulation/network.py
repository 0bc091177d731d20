"""The network between a node and the server.

A connection is a pair of ordered streams, as TCP is: nothing overtakes, nothing is lost while both ends live. What a
cut holds back is delivered when the cut is healed (retransmission), also if the client has given the connection up in
the meantime: such a request is still executed, as long as the server's end lives. A stall delays one stream only.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.verification.simulation.core import Core

TO_SERVER, TO_CLIENT = 0, 1


class Link:
    """One node's way to the server."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.typical_s = (0.0002, 0.002)
        self.spike = 0.0
        """How likely a packet is late, and by how much at most."""
        self.spike_s = 0.0
        self.cut = [False, False]
        self._held: list[list[tuple[Stream, Callable[[], None]]]] = [[], []]

    def delay(self) -> float:
        seconds = self.core.between(*self.typical_s)
        if self.spike and self.core.chosen(self.spike):
            seconds += self.core.between(0, self.spike_s)
        return seconds

    def block(self, *directions: int) -> None:
        for direction in directions:
            self.cut[direction] = True

    def heal(self) -> None:
        """Let everything through again, in the order in which it was sent."""
        self.cut = [False, False]
        for direction in (TO_SERVER, TO_CLIENT):
            held, self._held[direction] = self._held[direction], []
            for stream, action in held:
                stream.send(action)

    def hold(self, direction: int, stream: Stream, action: Callable[[], None]) -> None:
        self._held[direction].append((stream, action))


class Stream:
    """One direction of one connection."""

    def __init__(self, link: Link, direction: int) -> None:
        self.link = link
        self.direction = direction
        self.dead = False
        self.stalled_until = 0.0
        self._free_at = 0.0

    def send(self, action: Callable[[], None], at_least: float = 0.0) -> None:
        core = self.link.core
        arrival = max(core.now + max(self.link.delay(), at_least), self._free_at, self.stalled_until)
        self._free_at = arrival
        core.at(arrival, lambda: self._arrive(action))

    def unstall(self) -> None:
        """Let what is sent from now on through; what was held back stays late (and is of no use behind an end)."""
        self.stalled_until = self._free_at = 0.0

    def _arrive(self, action: Callable[[], None]) -> None:
        if self.dead:
            return
        if self.link.cut[self.direction]:
            self.link.hold(self.direction, self, action)
        elif self.link.core.now < self.stalled_until:
            self.send(action)
        else:
            action()
