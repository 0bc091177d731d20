"""Durations for people: one style, and no unit that is left over by rounding."""

from __future__ import annotations

import pytest

from tenure.base.durations import duration, exact


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (-3, "0 ms"),
        (0, "0 ms"),
        (0.00042, "0.4 ms"),
        (0.00996, "10 ms"),
        (0.85, "850 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1 s"),
        (4.87, "4.9 s"),
        (10, "10 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min"),
        (200, "3 min 20 s"),
        (3599.4, "59 min 59 s"),
        (3599.6, "1 h"),
        (7500, "2 h 5 min"),
        (86_369, "23 h 59 min"),
        (86_371, "1 d"),
        (3 * 86_400 + 4 * 3600 + 1, "3 d 4 h"),
        (1e9, "11574 d 2 h"),
    ],
)
def test_duration_has_at_most_two_units_and_is_rounded_to_the_smaller(seconds, shown):
    assert duration(seconds) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0 s"), (0.001, "0.001 s"), (1.25, "1.25 s"), (10, "10 s"), (300, "5 min"), (5400.5, "1 h 30 min 0.5 s")],
)
def test_setting_is_shown_without_rounding(seconds, shown):
    assert exact(seconds) == shown
