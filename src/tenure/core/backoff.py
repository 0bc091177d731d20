"""When to act again: after a failure, and after many notifications. Pure; ``now`` and randomness are passed in."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tenure.core.timing import LONG_AGO

HEED_AT_ONCE = 10
HEED_EVERY_S = 0.25
"""How many notifications are acted upon at once, and how often after that."""


@dataclass(eq=False, repr=False)
class Backoff:
    """The one back-off of Tenure: each pause is twice as long as the one before, up to ``longest_s``.

    The defaults suit what is restarted: a service, a command. With ``chance`` a pause is shortened at random, to half
    of its length at most, so that nodes do not try again all at once.
    """

    first_s: float = 0.5
    longest_s: float = 30.0
    chance: random.Random | None = None
    at: float = LONG_AGO
    """When to try again."""
    _failures: int = 0

    @property
    def failures(self) -> int:
        """How many failures there were in a row."""
        return self._failures

    def drawn(self) -> float:
        """Return a random number from 0 to 1."""
        return self.chance.random() if self.chance is not None else 0.0

    def failed(self, now: float) -> float:
        """Pause after one more failure; return when to try again."""
        pause_s = min(self.longest_s, self.first_s * 2**self._failures)
        if self.chance is not None:
            pause_s *= 0.5 + 0.5 * self.drawn()
        # Bounded, because the power would overflow in a node that fails for days.
        self._failures = min(self._failures + 1, 10)
        self.at = now + pause_s
        return self.at

    def ended(self, began: float, now: float) -> float:
        """Pause after a run that began at ``began``; after a long run, begin with the first pause again."""
        if now - began > self.longest_s:
            self.worked()
        return self.failed(now)

    def worked(self) -> None:
        """Forget the failures: try again at once, and begin with the first pause after the next failure."""
        self.at, self._failures = LONG_AGO, 0


@dataclass(eq=False, repr=False)
class Throttle:
    """When to act on a notification. Every client of the database can send any number of them.

    The first ten are acted upon at once. Then there is a pause between two actions, and one action answers all
    notifications that arrived in the pause.
    """

    _due: float = LONG_AGO
    _spent_until: float = LONG_AGO

    def due(self, now: float) -> float:
        """Return when to act on a notification that arrives now."""
        if now >= self._due:
            self._due = max(now, self._spent_until - (HEED_AT_ONCE - 1) * HEED_EVERY_S)
            self._spent_until = max(self._spent_until, self._due) + HEED_EVERY_S
        return self._due
