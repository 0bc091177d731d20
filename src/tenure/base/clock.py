"""The clock by which a node measures its trust.

Trust is elapsed time, so the clock must also count the time for which a machine sleeps. On Linux CLOCK_MONOTONIC stops
during suspend, and CLOCK_BOOTTIME does not. On macOS CLOCK_MONOTONIC goes on. The clock's value means nothing outside
this machine and is never sent anywhere.
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
"""Seconds on a clock that also counts while the machine is suspended, and that is never set."""
