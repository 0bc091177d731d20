"""Virtual time: a queue of events, the one source of chance, and the trace that a replay prints."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable


class Violation(Exception):
    """A promise was broken."""


class Clock:
    """One machine's clock: any value, and a rate within the stated drift of true time."""

    def __init__(self, rate: float = 1.0, offset: float = 0.0) -> None:
        self.rate = rate
        self.offset = offset

    def local(self, true: float) -> float:
        return self.offset + self.rate * true

    def true(self, local: float) -> float:
        return (local - self.offset) / self.rate


class Timer:
    """An event that can be called off."""

    __slots__ = ("action",)

    def __init__(self, action: Callable[[], None]) -> None:
        self.action: Callable[[], None] | None = action

    def cancel(self) -> None:
        self.action = None


class Core:
    """The queue of events."""

    def __init__(self, seed: int | str) -> None:
        self.now = 0.0
        self.chance = random.Random(seed)
        self._trace: list[tuple[float, str, tuple[object, ...]]] = []
        self.events = 0
        self._queue: list[tuple[float, int, Timer]] = []
        self._number = 0

    def at(self, time: float, action: Callable[[], None]) -> Timer:
        """Do something at a time, not before now."""
        timer = Timer(action)
        self._number += 1
        heapq.heappush(self._queue, (max(time, self.now), self._number, timer))
        return timer

    def after(self, seconds: float, action: Callable[[], None]) -> Timer:
        return self.at(self.now + seconds, action)

    def run(self, until: float, limit: int = 400_000) -> None:
        """Let time pass. Too many events mean that something spins without time passing."""
        while self._queue and self._queue[0][0] <= until:
            self.now, _, timer = heapq.heappop(self._queue)
            action, timer.action = timer.action, None
            if action is not None:
                self.events += 1
                if self.events > limit:
                    raise Violation(f"more than {limit} events: something spins")
                action()
        self.now = until

    def note(self, text: str, *values: object) -> None:
        """Write a line into the trace. The values are put into the text only when it is read."""
        self._trace.append((self.now, text, values))

    def trace(self) -> list[tuple[float, str]]:
        return [(at, text.format(*map(_short, values)) if values else text) for at, text, values in self._trace]

    def between(self, low: float, high: float) -> float:
        return self.chance.uniform(low, high)

    def chosen(self, probability: float) -> bool:
        return self.chance.random() < probability


def _short(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) < 240 else text[:237] + "..."
