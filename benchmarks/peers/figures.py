"""Medians, and how figures are written."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def median(values: Sequence[float | None]) -> float | None:
    """Return the median, with what never happened as longer than anything."""
    return _ranked(values, 0.5)


def p95(values: Sequence[float | None]) -> float | None:
    return _ranked(values, 0.95)


def _ranked(values: Sequence[float | None], share: float) -> float | None:
    ranked = sorted(values, key=lambda value: float("inf") if value is None else value)
    if share == 0.5 and len(ranked) > 1 and None not in ranked:
        return statistics.median(value for value in ranked if value is not None)
    return ranked[min(len(ranked) - 1, int(len(ranked) * share))] if ranked else None


def time_of(milliseconds: float | None, never: str = "never") -> str:
    if milliseconds is None:
        return never
    if milliseconds >= 1000:
        return f"{milliseconds / 1000:.1f} s"
    return f"{milliseconds:.1f} ms"


def ratio(value: float | None, to: float | None) -> str:
    return "" if value is None or not to else f"{value / to:.2f}"
