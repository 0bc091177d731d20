"""Durations for people, in one style: ``0.4 ms``, ``850 ms``, ``4.9 s``, ``3 min 20 s``, ``2 h 5 min``, ``3 d 4 h``.

The command line, the dashboard and the doctor all use it. JSON has seconds instead.
"""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Return a duration for people. A negative one, from two clocks that differ, counts as none."""
    if seconds < 0.9995:
        ms = max(0.0, seconds * 1000)
        return f"{_number(ms)} ms" if ms < 9.95 else f"{ms:.0f} ms"
    if seconds < 59.95:
        return f"{_number(seconds)} s"
    if round(seconds) < 3600:
        return _pair(round(seconds), 60, "min", "s")
    if round(seconds / 60) < 1440:
        return _pair(round(seconds / 60), 60, "h", "min")
    return _pair(round(seconds / 3600), 24, "d", "h")


def _pair(count: int, size: int, large: str, small: str) -> str:
    """Return a number of small units as large ones and the rest."""
    whole, rest = divmod(count, size)
    return f"{whole} {large}" + (f" {rest} {small}" if rest else "")


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def exact(seconds: float) -> str:
    """Return a duration that was set, such as a TTL or an interval, without rounding it."""
    parts = []
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        count, seconds = divmod(seconds, size)
        if count:
            parts.append(f"{count:.0f} {unit}")
    if seconds or not parts:
        parts.append(f"{seconds:g} s")
    return " ".join(parts)
