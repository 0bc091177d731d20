"""Time zones whose clocks change when a test wants it: summer time ends, or begins, a few seconds from now.

    write_zone(folder / "Test/Change", change=now + 5 s, before=2 h, after=1 h)

makes a zone file as the system has them. A process finds it by its name with PYTHONTZPATH=folder in its environment, so
the clock, the scheduler and the zone's arithmetic are all real.
"""

from __future__ import annotations

import struct
from datetime import datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

SECOND = timedelta(seconds=1)
HOUR = timedelta(hours=1)
ENDS = (2 * HOUR, HOUR)
"""The offsets from UTC before and after a change that ends summer time: an hour of the wall clock is repeated."""
BEGINS = (HOUR, 2 * HOUR)
"""Those of a change that begins it: an hour of the wall clock is left out."""


def write_zone(path: Path, change: datetime, before: timedelta, after: timedelta) -> None:
    """Write a zone file (RFC 8536) of a zone whose offset from UTC changes once."""
    names = b"OLD\0NEW\0"
    types = b"".join(
        struct.pack(">lBB", int(offset.total_seconds()), offset > min(before, after), 4 * number)
        for number, offset in enumerate((before, after))
    )

    # The offset before the first change is that of winter, whatever the file says: so there is a change in 1970, too.
    moments = 0, int(change.timestamp())

    def block(time_format: str) -> bytes:
        counts = struct.pack(">6l", 0, 0, 0, len(moments), 2, len(names))
        times = b"".join(struct.pack(time_format, moment) for moment in moments)
        return b"TZif2" + bytes(15) + counts + times + b"\0\1" + types + names

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(block(">l") + block(">q") + b"\n\n")
    with path.open("rb") as file:
        zone = ZoneInfo.from_file(file)
    offsets = [(change + delay).astimezone(zone).utcoffset() for delay in (-SECOND, 0 * SECOND)]
    assert offsets == [before, after], "this Python reads zone files in another way"
