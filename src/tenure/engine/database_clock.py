"""What time it is on the database server: the time that the last reply told, counted on by this process's clock."""

from __future__ import annotations

from tenure.base import clock


class DatabaseClock:
    """The database's clock, as far as this node knows it. Any thread may use it.

    It runs behind by the time that a reply takes, and never ahead. Only schedules read it: no election depends on it.
    """

    def __init__(self) -> None:
        self._heard: tuple[int, float] | None = None
        self.requests = 0
        """How often operators have asked something of the schedules of the namespace."""

    def heard(self, us: int) -> None:
        """Take over the time that the database has just told, in microseconds since 1970."""
        self._heard = (us, clock.now())

    def now_us(self) -> int:
        """Return the time, in microseconds since 1970; 0 before the database has told it."""
        if self._heard is None:
            return 0
        us, at = self._heard
        return us + round((clock.now() - at) * 1_000_000)
