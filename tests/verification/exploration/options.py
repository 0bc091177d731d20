"""What can happen to one node in a state: what is due, what the server may execute, which faults may begin or end."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tenure.core import messages
from tests.verification.exploration.lines import CLOSE
from tests.verification.exploration.node import ROLE, Place

Move = tuple[Any, ...]


@dataclass
class Seen:
    """What is kept of a node's state: all that the whole needs to know, and the node itself, pickled."""

    pickled: bytes
    alive: bool
    believes: int
    excepted: bool
    member: str | None
    keys: frozenset[int]
    fallen: frozenset[str]
    due: tuple[Move, ...]
    requests: tuple[tuple[int, int, int | None], ...]
    """(line, request, key that must be free first) of what the server may execute now."""
    free: tuple[Move, ...]
    faults: tuple[Move, ...]
    open: tuple[int, ...]


class Options:
    """Knows which faults a world has; ``number`` gives a request its number."""

    def __init__(self, kinds: tuple[str, ...], number: Callable[[Any], int]) -> None:
        self._kinds = kinds
        self._value = number

    def see(self, place: Place) -> Seen:
        """What is kept of this node."""
        due: list[Move] = []
        protocol = place.protocol
        if protocol and not place.paused and place.now >= protocol.deadline():
            due.append(("keeper",))
        due.extend(("hang", lane) for lane in place.age if place.hangs(lane))
        requests = []
        for index, line in enumerate(place.lines):
            if line.down and place.hears and not line.slow_down:
                due.append(("hear", index))
            if line.up and place.isolated is None and not line.slow_up:
                requests.extend(self._request(place, index))
        return Seen(
            pickle.dumps(place, pickle.HIGHEST_PROTOCOL),
            protocol is not None,
            place.believes,
            place.excepted,
            protocol.member_id if protocol else None,
            frozenset(line.key for line in place.lines if line.key is not None),
            frozenset(place.fallen),
            tuple(due),
            tuple(requests),
            tuple(self._free(place)),
            tuple(self._faults(place)),
            tuple(index for index, line in enumerate(place.lines) if line.open),
        )

    def _request(self, place: Place, index: int) -> Iterator[tuple[int, int, int | None]]:
        """What lies at the head of a line, and the key that a look waits for until its slice is over."""
        request = place.lines[index].up[0]
        waits = isinstance(request, messages.Look) and request.seconds and place.protocol and not place.age["watch"]
        if waits and request.wait_for is None:
            return
        yield index, self._value(request), request.wait_for if waits else None

    def _free(self, place: Place) -> Iterator[Move]:
        """What may happen at any time, at no cost: faults come to an end."""
        if place.protocol is None and not (place.isolated is not None and place.lines):
            yield ("start",)
        if place.paused:
            yield ("wake",)
        if place.isolated is not None and place.protocol:
            yield ("heal",)
        for index, line in enumerate(place.lines):
            if line.slow_up:
                yield ("quick_up", index)
            if line.slow_down:
                yield ("quick_down", index)

    def _faults(self, place: Place) -> Iterator[Move]:
        if place.protocol is None:
            return
        yield from ((kind,) for kind in ("die", "host") if self._may(kind, place) and place.isolated is None)
        if self._may("pause", place) and not place.paused:
            yield ("pause",)
        if self._may("isolate", place) and place.isolated is None:
            yield ("isolate",)
        if self._may("leave", place) and not place.paused and place.protocol.phase.name == "LIVE":
            yield ("leave",)
        if self._may("resign", place) and not place.paused and ROLE in place.protocol.roles.holding:
            yield ("resign",)
        for index, line in enumerate(place.lines):
            if line.open and line.used:
                yield from self._line_faults(place, index)

    def _line_faults(self, place: Place, index: int) -> Iterator[Move]:
        line = place.lines[index]
        if self._may("cut" if line.lane == "control" else "cut watch", place):
            yield ("cut", index)
        if self._may("cut late", place) and line.lane == "control":
            yield ("cut_late", index)
        if self._may(f"slow {line.lane} up", place) and not line.slow_up and line.up:
            yield ("slow_up", index)
        if self._may(f"slow {line.lane} down", place) and not line.slow_down and line.down:
            yield ("slow_down", index)
        if self._may("fail", place) and line.up and line.up[0] != CLOSE:
            yield ("fail", index)

    def _may(self, kind: str, place: Place) -> bool:
        """Whether the world has this fault, for all nodes or for this one."""
        return kind in self._kinds or f"{kind} {place.name}" in self._kinds
