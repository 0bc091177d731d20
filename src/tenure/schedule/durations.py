"""Durations as people write them: ``"5 min"``, a number of seconds, or a ``timedelta``."""

from __future__ import annotations

import re
from datetime import timedelta

from tenure.base.durations import exact
from tenure.errors import ConfigError

Duration = str | float | timedelta
"""How a duration may be given."""

SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400}
"""The units, in seconds. Months and years are missing because their length varies."""
SPELLINGS = {"sec": "s", "second": "s", "m": "min", "minute": "min", "hour": "h", "day": "d"}
"""Other spellings of the units; a plural is one, too."""
LONGEST_S = 366 * 86400.0

_TEXT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", re.IGNORECASE)


def check_duration(what: str, value: object, least_s: float) -> float:
    """Return a duration in seconds; raise ConfigError if it is not one, or not between ``least_s`` and a year."""
    seconds = _seconds(value)
    if seconds is None:
        raise ConfigError(
            f"{what}={value!r} is not a duration: write a number and a unit (s, min, h or d), as in '5 min'"
        )
    if not least_s <= seconds <= LONGEST_S:
        raise ConfigError(f"{what}={value!r} must be {exact(least_s)} to {exact(LONGEST_S)}")
    return seconds


def _seconds(value: object) -> float | None:
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str) and (match := _TEXT.fullmatch(value)):
        unit = match[2].lower()
        unit = SPELLINGS.get(unit.removesuffix("s"), unit)
        return float(match[1]) * SECONDS[unit] if unit in SECONDS else None
    return None
