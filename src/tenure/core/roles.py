"""What one node does about its roles: stand, hold, give up, stand back. Pure; no I/O, no clock.

A role goes through a node like this:

    standing ──> wanted ──> holding ──> dropped
                   │  ^        │
                   v  │        v
                  busy      vacating

*wanted* is worth an attempt: it was seen vacant, or not looked at yet. *busy* is wanted, but its row is locked by an
open transaction, so it gets an attempt of its own that waits a moment. *vacating* was given up here, and the database
does not know yet. A token that was *dropped* (given up, or lapsed) is never taken up again: the role is acquired anew.
"""

from __future__ import annotations

from tenure import timing
from tenure.asks import Acquire, Acquired, Held, Stand, Vacancy, Vacate
from tenure.events import Deposed, Elected, Event

NEVER = float("inf")
LONG_AGO = float("-inf")
RETRY_S = 0.05


class Candidacy:
    """The roles of one node."""

    def __init__(self, ttl: float, news: list[Event]) -> None:
        """Stand for nothing yet; tell what happens by appending to ``news``."""
        self.holding: dict[str, int] = {}
        """The terms held: role to token."""
        self.standing: set[str] = set()
        self.wanted: set[str] = set()
        self.busy: list[str] = []
        self.busy_until = LONG_AGO
        self.unregistered: set[str] = set()
        """Roles stood for, whose candidate's row has not been written for the present membership."""
        self.withdrawn: set[str] = set()
        self._ttl = ttl
        self._news = news
        self.untold: set[str] = set()
        """Roles that were given up here, and the database has not heard of it yet."""
        self.working: set[str] = set()
        """Roles whose work goes on: given up or lost meanwhile, they are vacated here when it has ended (R12)."""
        self._vacating: dict[str, tuple[int, str | None, float]] = {}
        self._dropped: dict[str, int] = {}
        self._stand_back: dict[str, tuple[int, float]] = {}
        self._reservations: dict[str, tuple[int, float]] = {}
        self._unreserved: set[str] = set()

    def stand(self, role: str) -> None:
        """Become a candidate."""
        if role not in self.standing:
            self.standing.add(role)
            self.withdrawn.discard(role)
            self.unregistered.add(role)

    def withdraw(self, role: str, now: float) -> None:
        """Stop standing; a term that is held is resigned."""
        if role in self.standing:
            self.resign(role, now)
            self.standing.discard(role)
            self.unregistered.discard(role)
            self.wanted.discard(role)
            self.withdrawn.add(role)

    def resign(self, role: str, now: float, to: str | None = None) -> None:
        """Give up a term, stand back for a TTL, and reserve the role for the member ``to`` if one is named."""
        token = self.holding.get(role)
        if token is not None:
            self.lose(role, "resigned")
            self._stand_back[role] = (token, now + self._ttl)
            self._vacating[role] = (token, to, now)
            self.untold.add(role)

    def lose(self, role: str, reason: str) -> None:
        """End a term here."""
        token = self.holding.pop(role)
        self._dropped[role] = token
        self._news.append(Deposed(role, token, reason))

    def start_over(self) -> None:
        """Forget what belonged to a membership that is over; go on standing."""
        self.wanted.clear()
        self.busy.clear()
        self.withdrawn.clear()
        self._vacating.clear()
        self.untold.clear()
        self._unreserved.clear()
        self.unregistered = set(self.standing)

    # What to ask

    def standing_back(self, now: float) -> tuple[str, ...]:
        """Return the roles that were resigned less than a TTL ago."""
        return tuple(role for role, (_, until) in self._stand_back.items() if now < until)

    @property
    def untried(self) -> bool:
        """Whether some role stood for has not been tried for since it last looked vacant."""
        return bool(self.unregistered or self.wanted or self.busy)

    @property
    def vacate_at(self) -> float:
        """When the next role is to be vacated in the database."""
        return min((at for role, (_, _, at) in self._vacating.items() if role not in self.working), default=NEVER)

    def stand_ask(self, me: str) -> Stand:
        """Return what to write about candidacies."""
        return Stand(me, tuple(sorted(self.unregistered)), tuple(sorted(self.withdrawn)))

    def vacate_ask(self, me: str) -> Vacate:
        """Return which role to vacate."""
        idle = ((role, term) for role, term in self._vacating.items() if role not in self.working)
        role, (token, to, _) = min(idle, key=lambda item: item[1][2])
        return Vacate(me, role, token, to)

    def acquire_ask(self, me: str, name: str, floor: int) -> Acquire:
        """Return what to acquire: everything that is wanted, in one batch; a busy role by itself, patiently."""
        patient = not self.wanted
        roles = self.busy[:1] if patient else sorted(self.wanted)
        unreserved = tuple(sorted(self._unreserved.intersection(roles)))
        return Acquire(me, name, tuple(roles), floor, unreserved, patient=patient)

    # What was answered

    def stood(self, ask: Stand, now: float) -> None:
        """Take in that candidacies were written: the roles are worth an attempt."""
        self.unregistered.difference_update(ask.roles)
        self.withdrawn.difference_update(ask.withdrawn)
        self.wanted.update(self.standing.intersection(ask.roles).difference(self.holding, self.standing_back(now)))

    def acquired(self, ask: Acquire, answer: Acquired, now: float, *, trusted: bool) -> None:
        """Take in which roles were acquired, and which are busy."""
        self.wanted.difference_update(ask.roles)
        self._unreserved.difference_update(ask.roles)
        self.busy = [role for role in self.busy if role not in ask.roles]
        self.busy.extend(role for role in answer.busy if role in self.standing)
        self.busy_until = now + RETRY_S
        for role, token in answer.tokens.items():
            self._elect(role, token, now, trusted=trusted)

    def vacated(self, ask: Vacate, now: float, *, done: bool) -> None:
        """Take in that the term was marked, and whether the role is vacant; while it is fenced, try again soon."""
        self.untold.discard(ask.role)
        if done:
            self._vacating.pop(ask.role, None)
            if ask.role in self._stand_back:  # from now on: what ran under the term may have taken long to stop
                self._stand_back[ask.role] = (ask.token, now + self._ttl)
        elif ask.role in self._vacating:
            self._vacating[ask.role] = (ask.token, ask.reserved_for, now + RETRY_S)

    def reconcile(self, held: tuple[Held, ...], now: float, *, trusted: bool) -> None:
        """Bring the terms held here and the roles held by this member in the database into line."""
        tokens = {mine.role: mine.token for mine in held}
        for role, token in list(self.holding.items()):
            if tokens.get(role) != token:
                self.lose(role, "the role was taken")
                if role in self.standing and role not in tokens:
                    self.unregistered.add(role)  # its row may be gone altogether: somebody deleted it by hand
        for mine in held:
            role, token = mine.role, mine.token
            if self.holding.get(role) == token:
                if mine.requested:
                    self.resign(role, now, mine.requested_for)
            elif role in self._vacating:
                pass
            elif role not in self.standing:
                self._vacating[role] = (token, None, now)
            elif token > self._dropped.get(role, 0):
                self._elect(role, token, now, trusted=trusted)  # the reply to an acquire was lost
            else:
                self.wanted.add(role)  # it lapsed: only a new token will do

    def consider(self, vacant: tuple[Vacancy, ...], alone_in: tuple[str, ...], me: str, now: float) -> None:
        """Decide which vacant roles to go for: not while standing back, not while reserved for another.

        A reservation is waited out on the own clock, from when it was first seen; it ends with its member. Standing
        back ends early where nobody else stands, and where somebody else has led since: whoever resigns after a short
        turn must not find that everybody is being polite.
        """
        for vacancy in vacant:
            role = vacancy.role
            if role not in self.standing or role in self.holding or role in self._vacating:
                continue
            if vacancy.reserved_for not in (None, me):
                seen = self._reservations.get(role)
                if seen is None or seen[0] != vacancy.token:
                    seen = self._reservations[role] = (vacancy.token, now)
                if now < seen[1] + timing.silence(self._ttl):
                    continue
                self._unreserved.add(role)
            resigned, until = self._stand_back.get(role, (0, LONG_AGO))
            standing_back = now < until and vacancy.token <= resigned
            if standing_back and vacancy.reserved_for != me and role not in alone_in:
                continue
            self.wanted.add(role)

    def hear_vacant(self, role: str, now: float) -> bool:
        """Go for a role said to be vacant; False if that takes a look first, as it was resigned here lately."""
        if role in self.standing_back(now):
            return False
        if role in self.standing.difference(self.holding, self._vacating, self.unregistered):
            self.wanted.add(role)
        return True

    def _elect(self, role: str, token: int, now: float, *, trusted: bool) -> None:
        """Begin a term, if the lease behind it is still trusted and somebody here still wants it."""
        if role not in self.standing:
            self._vacating[role] = (token, None, now)
        elif trusted:
            self.holding[role] = token
            # An adopted term ends the attempts planned before the reply was lost: another would replace it unannounced.
            self.wanted.discard(role)
            self.busy = [other for other in self.busy if other != role]
            self._stand_back.pop(role, None)
            self._reservations.pop(role, None)
            self._news.append(Elected(role, token))
        else:
            self._dropped[role] = token
