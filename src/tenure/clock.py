"""The one module that owns the clock.

Trust is elapsed time, so the clock must count the time that a machine sleeps: CLOCK_MONOTONIC stops during suspend
on Linux, CLOCK_BOOTTIME does not. macOS has it the other way round: there CLOCK_MONOTONIC goes on. Its value means
nothing outside this machine and is never sent anywhere.
"""

from __future__ import annotations

import sys
import time
from functools import partial

if sys.platform == "linux":
    now = partial(time.clock_gettime, time.CLOCK_BOOTTIME)
elif sys.platform == "darwin":
    now = partial(time.clock_gettime, time.CLOCK_MONOTONIC)
else:
    now = time.monotonic
"""Seconds on a clock that counts suspend and never steps."""
