"""Who leads the roles that the application observes. Pure; no I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterator

from tenure.core.backoff import Throttle
from tenure.core.messages import Leaders, LeadersAre
from tenure.core.timing import LONG_AGO, NEVER
from tenure.events import LeaderChanged


class ObservedLeaders:
    """The leaders of some roles, as the last answer showed them."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, str | None]] = {}
        self._ask_at = LONG_AGO
        self._notifications = Throttle()

    @property
    def ask_at(self) -> float:
        """When to ask for the leaders."""
        return self._ask_at if self._known else NEVER

    def observe(self, role: str) -> None:
        """Report changes of the role's leader from now on."""
        self._known.setdefault(role, (0, None))
        self.ask_at_once()

    def ask_at_once(self) -> None:
        """Ask as soon as possible."""
        self._ask_at = LONG_AGO

    def notified(self, now: float) -> None:
        """Process a notification that a leader has changed: ask soon."""
        self._ask_at = min(self._ask_at, self._notifications.due(now))

    def request(self) -> Leaders:
        """Return which leaders to ask for."""
        return Leaders(tuple(sorted(self._known)))

    def answered(self, answer: LeadersAre) -> Iterator[LeaderChanged]:
        """Yield what has changed since the last answer."""
        self._ask_at = NEVER
        for leader in answer.leaders:
            known, self._known[leader.role] = self._known[leader.role], (leader.token, leader.member_id)
            if known != (leader.token, leader.member_id):
                yield LeaderChanged(leader.role, leader.token, leader.member_id, leader.name)
