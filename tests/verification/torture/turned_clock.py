"""A node's clock that the test can turn: fast or slow, as the oscillator of a machine may be.

Only Tenure reads it. The history is stamped by the true clock, so that the checkers see what really happened. The wall
clock can be stepped, too, for the whole process. (Not by libfaketime: there Python's time.sleep() fails, EINVAL.)
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from tenure.base import clock


class TurnedClock:
    """Says the time at a rate of its own. It never steps, whenever it is turned."""

    def __init__(self, true_s: Callable[[], float]) -> None:
        self._true_s = true_s
        at_s = true_s()
        self._since = (at_s, at_s, 1.0)  # replaced as a whole: others read it meanwhile

    def __call__(self) -> float:
        at_s, said_s, rate = self._since
        return said_s + (self._true_s() - at_s) * rate

    def turn(self, rate: float) -> None:
        """Run at this rate from now on; 1 is true."""
        self._since = (self._true_s(), self(), rate)


_true_wall_clock, _true_wall_clock_ns = time.time, time.time_ns


def step_wall_clock(seconds: float) -> None:
    """Let `time.time()` and `time.time_ns()` of this process be so far from the truth."""
    time.time = lambda: _true_wall_clock() + seconds
    time.time_ns = lambda: _true_wall_clock_ns() + round(seconds * 1e9)


def install() -> TurnedClock:
    """Put a clock that can be turned in the place of Tenure's, in the modules that have taken theirs already, too."""
    true_now, turned = clock.now, TurnedClock(clock.now)
    for name, module in list(sys.modules.items()):
        if name.startswith("tenure.") and getattr(module, "now", None) is true_now:
            module.now = turned  # type: ignore[attr-defined]
    assert clock.now is turned
    return turned
