"""All states of a world, breadth first: so the first way that is found to a broken promise is a shortest one."""

from __future__ import annotations

import itertools
import time
from array import array
from dataclasses import dataclass, field

from tenure.core import timing
from tests.verification.exploration.moves import FAULT, START, Space, State
from tests.verification.exploration.options import Move
from tests.verification.exploration.worlds import World

RIPENS_AFTER_S = 8.0
"""In ticks, as all durations of a small world; a state looks back no further than ``forms.PAST``."""
BITS = 22
MASK = 2**BITS - 1


def pack(state: State) -> int:
    """A state as one number, since there are millions of them."""
    packed = 0
    for number in reversed(state):
        packed = packed << BITS | number
    return packed


@dataclass
class Found:
    """What an exploration has seen."""

    world: World
    space: Space
    states: int = 0
    transitions: int = 0
    depth: int = 0
    """The longest of all shortest ways from the beginning to a state, in steps."""
    seconds: float = 0.0
    closed: bool = False
    """Nothing is left: every state that can be reached has been."""
    violation: str | None = None
    way: list[Move] = field(default_factory=list)
    leaderless: int = 0
    exceptions: int = 0

    def __str__(self) -> str:
        end = "all of them" if self.closed else "not all"
        return (
            f"{self.states:,} states ({end}), {self.transitions:,} transitions, depth {self.depth}, "
            f"{len(self.space.places.kept):,} states of a node, {len(self.space.bases.kept):,} of the server, "
            f"{self.seconds:.1f} s of CPU"
        )


class Explorer:
    """Looks through one world."""

    def __init__(self, world: World, *, most: int = 8_000_000) -> None:
        self.space = Space(world)
        self.most = most
        self._size = len(world.takeovers) + 2
        self._states: list[int] = []
        self._from = array("i")
        self._moves: list[Move] = []
        self._move_numbers: dict[Move, int] = {}
        self._by = array("i")
        self._sources = array("i")
        self._targets = array("i")

    def run(self) -> Found:
        """Explore until nothing is left, or a promise is broken, or there are too many states."""
        began = time.process_time()
        found = Found(self.space.world, self.space)
        usual = timing.DEFAULT_MAX_TTL_S, timing.RIPENS_AFTER_S
        timing.DEFAULT_MAX_TTL_S, timing.RIPENS_AFTER_S = self.space.world.ttl, RIPENS_AFTER_S
        try:
            self._explore(found)
        finally:
            timing.DEFAULT_MAX_TTL_S, timing.RIPENS_AFTER_S = usual
        if found.closed:
            self._every_state_can_be_led(found)
        found.seconds = time.process_time() - began
        return found

    def _explore(self, found: Found) -> None:
        known: dict[int, int] = {}
        self._add(known, pack(self.space.first()), -1, -1)
        level_ends = 1
        for at in itertools.count():
            if at == level_ends and found.depth != self.space.world.deepest:
                found.depth += 1
                level_ends = len(self._states)
            if at == level_ends or at >= len(self._states) or at > self.most:
                break
            found.violation = self._expand(found, known, at)
            if found.violation:
                break
        found.states, found.closed = len(self._states), at == len(self._states) and not found.violation
        found.exceptions = self.space.exceptions

    def _expand(self, found: Found, known: dict[int, int], at: int) -> str | None:
        """Take every step from one state; return the promise that one of them breaks."""
        for kind, move, after, broken in self.space.successors(self._state(at)):
            found.transitions += 1
            packed = pack(after)
            target = known.get(packed)
            if target is None:
                target = self._add(known, packed, at, self._move_number(move))
                bad = broken or self.space.broken(after)
            else:
                bad = broken
            if bad:
                found.way = [*self._way(at), move]
                return bad
            if kind not in (FAULT, START):
                self._sources.append(at)
                self._targets.append(target)
        return None

    def _add(self, known: dict[int, int], packed: int, before: int, move: int) -> int:
        number = known[packed] = len(self._states)
        self._states.append(packed)
        self._from.append(before)
        self._by.append(move)
        return number

    def _state(self, number: int) -> State:
        packed = self._states[number]
        return tuple([packed >> BITS * place & MASK for place in range(self._size)])

    def _move_number(self, move: Move) -> int:
        number = self._move_numbers.get(move)
        if number is None:
            number = self._move_numbers[move] = len(self._moves)
            self._moves.append(move)
        return number

    def _way(self, target: int) -> list[Move]:
        way = []
        while self._from[target] >= 0:
            way.append(self._moves[self._by[target]])
            target = self._from[target]
        return way[::-1]

    def _every_state_can_be_led(self, found: Found) -> None:
        """From every state a node can come to lead, without another fault and without the return of a dead process.

        Go backwards from the states in which one does, and see what is not reached.
        """
        count, space = len(self._states), self.space
        first_of = array("i", [0]) * (count + 1)
        for target in self._targets:
            first_of[target + 1] += 1
        for number in range(count):
            first_of[number + 1] += first_of[number]
        before, filled = array("i", [0]) * len(self._sources), first_of[:]
        for source, target in zip(self._sources, self._targets, strict=True):
            before[filled[target]] = source
            filled[target] += 1
        led = [number for number in range(count) if space.leads(self._state(number))]
        can = bytearray(count)
        for number in led:
            can[number] = 1
        while led:
            number = led.pop()
            for source in before[first_of[number] : first_of[number + 1]]:
                if not can[source]:
                    can[source] = 1
                    led.append(source)
        found.leaderless = can.count(0)
        if found.leaderless:
            found.violation = f"nobody can ever lead again, from {found.leaderless:,} states"
            found.way = self._way(can.index(0))
