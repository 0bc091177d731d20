"""When two states are the same. What is equal in form behaves alike, so only one of them is followed.

The protocol compares times with ``now`` and with each other, and every event here happens at a whole tick of its clock.
So a time is a number of ticks from now, rounded up: whatever falls between two ticks is noticed at the second. A time
further back than any duration that it is compared with is simply past.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable
from typing import Any

from tenure.core import messages

PAST = -9
"""Ticks. Longer ago than that is all the same: no duration of a world is as long."""
AGES = frozenset({"_since", "_unconfirmed", "_unripe", "_reservations", "sent"})
"""Attributes with moments that something is counted from. All others are due times: what is past is due, however long.
"""
NEVER = 99
DURATIONS = frozenset({"_ttl", "_renew_every", "stop_within", "_slice_s", "first_s", "longest_s"})
"""Attributes that are lengths of time; every other float is a moment."""
LEFT_OUT = frozenset(
    {"settings", "generation", "news", "_news", "_failures", "_tidy_at", "_chance", "chance", "_spread"}
)
"""What decides nothing here: settings do not change, pauses are a tick however many attempts failed before."""
ATOMS = frozenset({str, int, bool, type(None)})
MESSAGES = frozenset(kind for kind in vars(messages).values() if isinstance(kind, type))


def ticks(moment: float, now: float, step: float, oldest: int) -> int:
    """How far a moment is from now, in ticks of a clock that goes on by ``step`` with each."""
    if math.isinf(moment):
        return NEVER if moment > 0 else oldest
    return max(oldest, math.ceil(round((moment - now) / step, 6)))


def form(value: Any, now: float, step: float, oldest: int = 0) -> Any:  # noqa: PLR0911 - one return a type reads best
    """The value as something that can be compared and hashed, with every moment as ticks from now."""
    kind = type(value)
    if kind in ATOMS:
        return value
    if kind is float:
        return ticks(value, now, step, oldest)
    if kind in (list, tuple):
        return tuple([form(item, now, step, oldest) for item in value])
    if kind is dict:
        return tuple(sorted((key, form(item, now, step, oldest)) for key, item in value.items()))
    if kind in (set, frozenset):
        return tuple(sorted(value))
    if isinstance(value, enum.Enum):
        return value.name
    if kind in MESSAGES:  # plain values, without moments
        return plain(value)
    return tuple(
        [
            item if item.__class__ in ATOMS or name in DURATIONS else form(item, now, step, PAST if name in AGES else 0)
            for name, item in vars(value).items()
            if name not in LEFT_OUT
        ]
    )


def plain(value: Any) -> Any:
    """A value without moments, hashable."""
    if type(value) in MESSAGES:
        # Messages are tuples, and those of different types may have equal fields. Some of them hold a dict.
        with_dict = isinstance(value, (messages.Acquired, messages.Ended))
        return (type(value).__name__, plain(tuple(value)) if with_dict else value)
    if isinstance(value, dict):
        return tuple(sorted((key, plain(item)) for key, item in value.items()))
    if isinstance(value, (list, tuple)):
        return tuple([plain(item) for item in value])
    if isinstance(value, set):
        return tuple(sorted(value))
    if dataclasses.is_dataclass(value):
        return (type(value).__name__, *[plain(getattr(value, field.name)) for field in dataclasses.fields(value)])
    return value


class Numbers:
    """Numbers things by their form: what has the same form has the same number."""

    def __init__(self, look: Callable[[Any], Any]) -> None:
        self._known: dict[Any, int] = {}
        self._look = look
        self.kept: list[Any] = []

    def number(self, shape: Any, thing: Any) -> int:
        """The number of a thing; ``look`` makes of a new one what is kept of it."""
        known = self._known.get(shape)
        if known is None:
            known = self._known[shape] = len(self.kept)
            self.kept.append(self._look(thing))
        return known
