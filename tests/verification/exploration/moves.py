"""From one state of the whole to the next ones, and what must never be true of any.

A state is a tuple of numbers: the server's, each node's, and how many faults are left. Behind each number stands one
server or one node in full (``forms.Numbers``); a step is taken once by the real objects and remembered, so that most of
the many combinations cost a look into a dictionary.

Time passes only when nothing else is due: a message is late only by a fault (``slow``, ``isolate``, ``pause``). What
nodes have sent at the same tick the server executes in every order.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tenure.core import messages
from tenure.core.options import ProtocolOptions
from tests.verification.exploration.forms import Numbers, form
from tests.verification.exploration.lines import CLOSE
from tests.verification.exploration.names import NAMES, called, owner
from tests.verification.exploration.node import ROLE, Place
from tests.verification.exploration.options import Move, Options, Seen
from tests.verification.exploration.server import Base, Effect
from tests.verification.exploration.worlds import World

State = tuple[int, ...]
Step = tuple[str, Move, State, str | None]
"""What kind of step, which, the state it leads to, and the promise that it breaks."""
FAULT, START, FREE, DUE, TIME = "fault", "start", "free", "due", "time"


@dataclass
class Stands:
    """What is kept of the server's state."""

    pickled: bytes
    phase: str
    living: frozenset[str]
    fenced: int
    write: bool
    image: bool
    promoted: bool
    announced: int
    broken: str | None


class Space:
    """All states of one world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.values = Numbers(lambda value: value)
        self.places = Numbers(Options(world.faults, self._value).see)
        self.bases = Numbers(self._stand)
        self.exceptions = 0
        self._steps: dict[Any, Any] = {}
        self._executed: dict[Any, tuple[int, int, Effect]] = {}
        self._based: dict[Any, Any] = {}
        self._ticked: dict[int, int] = {}

    # Begin ---------------------------------------------------------------------------------------------------------

    def first(self) -> State:
        world = self.world
        base = Base(world.ttl, world.store, world.tables())
        if world.ttls:
            base.raise_limit(max(world.ttls))
        places = [
            Place(number, ProtocolOptions(NAMES[number], ttl, ttl / 4, takeover), world.rates[number])
            for number, takeover in enumerate(world.takeovers)
            for ttl in [world.ttls[number] if world.ttls else world.ttl]
        ]
        if not world.settled:
            return (self._number_base(base), *[self._number(place) for place in places], world.budget)
        for place in places[1:]:
            place.do_die()
        state = self._run((self._number_base(base), *[self._number(place) for place in places], 0))
        for number in range(1, len(places)):
            state = self._run(self._one(state, number, ("start",))[0])
        return (*state[:-1], world.budget)

    def _run(self, state: State) -> State:
        """Let everything that is due happen, for some TTLs."""
        left = 4 * int(self.world.ttl)
        while left:
            moves = {kind: (move, after) for kind, move, after, _ in self.successors(state)}
            move, state = moves[DUE] if DUE in moves else moves[TIME]
            left -= move == ("tick",)
        return state

    def _number(self, place: Place) -> int:
        return self.places.number(place.form(), place)

    def _number_base(self, base: Base) -> int:
        return self.bases.number(base.form(), base)

    def _value(self, value: Any) -> int:
        return self.values.number(form(value, 0.0, 1.0), value)

    # Steps of one ------------------------------------------------------------------------------------------------

    def step(self, place: int, move: Move) -> tuple[int, tuple[int, ...], str | None]:
        """One node takes a step: its next state, the tokens it announces, the promise it breaks."""
        known = self._steps.get((place, move))
        if known is None:
            node: Place = pickle.loads(self.places.kept[place].pickled)
            arguments = move[1:]
            if move[0] == "execute":
                arguments = (move[1], self.values.kept[move[2]])
            getattr(node, "do_" + move[0])(*arguments)
            elected, node.elected = tuple(node.elected), []
            broken, node.broken = "; ".join(node.broken) or None, []
            known = self._steps[place, move] = (self._number(node), elected, broken)
        return known

    def _stand(self, base: Base) -> Stands:
        return Stands(
            pickle.dumps(base, pickle.HIGHEST_PROTOCOL),
            base.phase,
            base.living,
            base.fenced(),
            base.write is not None,
            base.image is not None,
            base.timeline > 1,
            base.announced,
            base.stale_fence(),
        )

    def base(self, base: int, move: Move) -> tuple[int, Any]:
        """The server takes a step."""
        known = self._based.get((base, move))
        if known is None:
            server: Base = pickle.loads(self.bases.kept[base].pickled)
            result = getattr(server, "do_" + move[0])(*move[1:])
            known = self._based[base, move] = (self._number_base(server), result)
        return known

    def execute(self, base: int, request: int, standing: frozenset[int]) -> tuple[int, int, Effect]:
        """The server executes a request: its next state, the answer's number, and what else happened."""
        value = self.values.kept[request]
        key = (base, request, standing if isinstance(value, messages.Look) else None)
        known = self._executed.get(key)
        if known is None:
            server: Base = pickle.loads(self.bases.kept[base].pickled)
            effect = Effect(None) if value == CLOSE else server.execute(value, standing)
            known = self._executed[key] = (self._number_base(server), self._value(effect.answer), effect)
        return known

    # Steps of the whole ----------------------------------------------------------------------------------------------

    def successors(self, state: State) -> Iterator[Step]:
        """Everything that can happen next."""
        seen = [self.places.kept[place] for place in state[1:-1]]
        due = False
        for move in self._due(state, seen):
            due = True
            yield move
        for number, one in enumerate(seen):
            for move in one.free:
                kind = START if move == ("start",) else FREE
                yield kind, (number, *move), *self._one(state, number, move)
        yield from self._server_moves(state, seen)
        if not due:
            yield TIME, ("tick",), *self._all(state, ("tick",), ("tick",))
        if state[-1]:
            left = (*state[:-1], state[-1] - 1)
            for number, one in enumerate(seen):
                for move in one.faults:
                    yield FAULT, (number, *move), *self._one(left, number, move)
            yield from self._server_faults(left)

    def _due(self, state: State, seen: list[Seen]) -> Iterator[Step]:
        """What happens before time passes: what is heard; then, or at the same time, what the server executes."""
        heard = False
        for number, one in enumerate(seen):
            for move in one.due:
                heard = True
                yield DUE, (number, *move), *self._one(state, number, move)
            if heard and self.world.eager:
                return
        standing = frozenset().union(*[node.keys for node in seen])
        for number, one in enumerate(seen):
            for index, request, key in one.requests:
                if key is None or key not in standing:
                    yield DUE, (number, "execute", index), *self._execute(state, number, index, request, standing)

    def _one(self, state: State, number: int, move: Move) -> tuple[State, str | None]:
        place, elected, broken = self.step(state[1 + number], move)
        base = state[0]
        for token in elected:
            stands = self.bases.kept[base]
            if token <= stands.announced and not self.places.kept[place].excepted:
                broken = broken or f"{NAMES[number]} announces {ROLE} {token} after {stands.announced}"
            base = self.base(base, ("announce", token))[0]
        return (base, *state[1 : 1 + number], place, *state[2 + number :]), broken

    def _all(self, state: State, on_base: Move, on_place: Move) -> tuple[State, str | None]:
        base, back = self.base(state[0], on_base)
        after, broken = (base, *state[1:]), None
        for number in range(len(state) - 2):
            after, bad = self._one(after, number, on_place)
            broken = broken or bad
            for member, by in back or ():
                after = self._one(after, number, ("shift", member, by))[0]
        return after, broken

    def _execute(
        self, state: State, number: int, index: int, request: int, standing: frozenset[int]
    ) -> tuple[State, str | None]:
        base, answer, effect = self.execute(state[0], request, standing)
        after, broken = self._one((base, *state[1:]), number, ("execute", index, answer))
        if effect.renewed:
            for other in range(len(state) - 2):
                if other != number:
                    after = self._one(after, other, ("shift", effect.renewed, -1))[0]
        if effect.evicted:
            for other in range(len(state) - 2):
                after, bad = self._one(after, other, ("evict", effect.evicted))
                broken = broken or bad
        for member in self.bases.kept[state[0]].living - self.bases.kept[base].living:
            if owner(member) < len(state) - 2:
                after = self._one(after, owner(member), ("forget", member))[0]
        if effect.ended:
            broken = broken or self._unjust(state, number, effect)
        return after, effect.broken or broken

    def _unjust(self, state: State, number: int, effect: Effect) -> str | None:
        """No member is declared dead because the server stopped."""
        by = NAMES[number]
        for member, reason in effect.ended:
            if reason == "death" and member not in self.places.kept[state[1 + owner(member)]].fallen:
                return f"{by} declares {called(member)} dead, but only the server had stopped"
        return None

    # The server ------------------------------------------------------------------------------------------------------

    def _server_moves(self, state: State, seen: list[Seen]) -> Iterator[Step]:
        stands = self.bases.kept[state[0]]
        if stands.phase == "down":
            yield FREE, ("up",), (self.base(state[0], ("up",))[0], *state[1:]), None
        if stands.phase == "stopping":
            lines = [(number, index) for number, one in enumerate(seen) for index in one.open]
            for number, index in lines:
                yield FREE, (number, "end", index), *self._one(state, number, ("end", index))
            if not lines:
                yield FREE, ("down",), (self.base(state[0], ("down",))[0], *state[1:]), None
        if stands.image and stands.phase == "up":
            for told in (True, False):
                yield FREE, ("promote", told), *self._all(state, ("promote",), ("stop", told))
        if stands.write:
            yield FREE, ("commit",), (self.base(state[0], ("commit",))[0], *state[1:]), None

    def _server_faults(self, state: State) -> Iterator[Step]:
        stands, kinds = self.bases.kept[state[0]], self.world.faults
        if stands.phase == "up" and "stop" in kinds:
            yield FAULT, ("stop",), *self._all(state, ("down",), ("stop", True))
        if stands.phase == "up" and "fast stop" in kinds:
            yield FAULT, ("stopping",), (self.base(state[0], ("stopping",))[0], *state[1:]), None
        if stands.phase == "up" and "promotion" in kinds and not stands.image:
            yield FAULT, ("snapshot",), (self.base(state[0], ("snapshot",))[0], *state[1:]), None
        if stands.fenced and "write" in kinds and not stands.write:
            yield FAULT, ("begin",), (self.base(state[0], ("begin",))[0], *state[1:]), None

    # What must never be true -----------------------------------------------------------------------------------------

    def leads(self, state: State) -> bool:
        """Whether a node leads, or no process is there to do it."""
        seen = [self.places.kept[place] for place in state[1:-1]]
        return any(node.believes for node in seen) or not any(node.alive for node in seen)

    def broken(self, state: State) -> str | None:
        """The promise that this state breaks."""
        stands = self.bases.kept[state[0]]
        if stands.broken:
            return str(stands.broken)
        believers = []
        for number, place in enumerate(state[1:-1]):
            one = self.places.kept[place]
            if one.believes:
                believers.append((number, one))
                if one.member not in stands.living and not stands.promoted and not one.excepted:
                    return f"{NAMES[number]} leads {ROLE} {one.believes}, though its membership was ended"
        if len(believers) > 1:
            if sum(not one.excepted for _, one in believers) > 1:
                names = " and ".join(NAMES[number] for number, _ in believers)
                return f"two leaders of {ROLE}: {names}"
            self.exceptions += 1
        return None
