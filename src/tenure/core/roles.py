"""The roles of one node: standing, leading, resigning, standing back, handing over. Pure; no I/O, no clock.

A role goes through a node like this:

    standing ──> wanted ──> holding ──> dropped
                   │  ^        │
                   v  │        v
                  busy      vacating

The node tries for a *wanted* role: it was seen vacant, or has not been checked yet. A *busy* role is wanted, but an
open transaction has locked its row, so it gets a separate attempt that waits a moment. A *vacating* role was resigned
here, but not in the database yet. A *dropped* token (resigned, or lapsed) is never taken up again: the node acquires
the role anew.
"""

from __future__ import annotations

from itertools import islice

from tenure.core.messages import Acquire, Acquired, Held, Renew, Stand, Vacancy, Vacate
from tenure.core.servers import Server
from tenure.core.timing import LONG_AGO, NEVER, RETRY_S, server_patience, silence
from tenure.events import Deposed, Elected, EndReason, Event

FEW_ROLES = 1000
"""A node with at most this many roles reads all of them with each renewal (R20)."""
READ_ROLE_S = 0.001
"""A node with more roles reads all of them at an interval of this many seconds per role."""
LOOKED_AT = 32
"""Of how many roles a node looks at the holders itself. Beyond that, it relies on the ring (R19)."""


class Roles:
    """The roles of one node."""

    def __init__(self, ttl: float, news: list[Event]) -> None:
        self.holding: dict[str, int] = {}
        """The terms held: role to token."""
        self.standing: set[str] = set()
        self.wanted: set[str] = set()
        self.busy: list[str] = []
        self.busy_until = LONG_AGO
        self.claims: set[str] = set()
        """Roles that the node led when it met a promoted server, and may take there before any other node (R22)."""
        self.unregistered: set[str] = set()
        """Roles that the node stands for, but whose candidacy the current membership has not written yet."""
        self.withdrawn: set[str] = set()
        self._server: Server | None = None
        self._ttl = ttl
        self._news = news
        self.unreleased: set[str] = set()
        """Roles that were resigned here, and whose term is not marked in the database yet."""
        self.read_all_at = LONG_AGO
        """When to read all roles again, those included whose change no index shows."""
        self._read_all_until = LONG_AGO
        self.held_for_work: set[str] = set()
        """Roles whose work still runs. If one is resigned or lost, it is vacated when its work has ended (R12)."""
        self.bound: set[str] = set()
        """Roles that the node leads only while its control connection holds their lock (R21)."""
        self._vacating: dict[str, tuple[int, str | None, float]] = {}
        self._dropped: dict[str, int] = {}
        self._stand_back: dict[str, tuple[int, float]] = {}
        self._reservations: dict[str, tuple[int, float]] = {}
        self._unreserved: set[str] = set()

    def stand(self, role: str) -> bool:
        """Become a candidate for the role; return whether the node was none."""
        if role in self.standing:
            return False
        self.standing.add(role)
        self.withdrawn.discard(role)
        self.unregistered.add(role)
        return True

    def withdraw(self, role: str, now: float) -> None:
        """Stop standing for the role; a term that is held is resigned."""
        if role in self.standing:
            self.resign(role, now)
            self.standing.discard(role)
            self.unregistered.discard(role)
            self.wanted.discard(role)
            self.claims.discard(role)
            self.withdrawn.add(role)

    def resign(self, role: str, now: float, to: str | None = None) -> None:
        """Give a term up and stand back for a TTL; reserve the role for the member ``to`` if one is named."""
        token = self.holding.get(role)
        if token is not None:
            self.lose(role, EndReason.RESIGNED)
            self._stand_back[role] = (token, now + self._ttl)
            self._vacating[role] = (token, to, now)
            self.unreleased.add(role)

    def lose(self, role: str, reason: EndReason) -> None:
        """End a term."""
        token = self.holding.pop(role)
        self._dropped[role] = token
        self._news.append(Deposed(role, token, reason))
        # The database may still name this member as the holder. Only a renewal that reads all roles shows that.
        if reason is not EndReason.RESIGNED:
            self.read_all_at = LONG_AGO

    def start_over(self) -> None:
        """Forget what belonged to the last membership; stay a candidate for the same roles."""
        self.wanted.clear()
        self.busy.clear()
        self.withdrawn.clear()
        self._vacating.clear()
        self.unreleased.clear()
        self._unreserved.clear()
        self.read_all_at = LONG_AGO
        self.unregistered = set(self.standing)

    def connected(self, server: Server, now: float) -> None:
        """Read all roles with each renewal, until no request can take effect that waits on an older connection."""
        # What the node led when it met another server says nothing about this one.
        if self._server != server:
            self._server = server
            self.claims.clear()
        self.read_all_at = LONG_AGO
        self._read_all_until = now + server_patience(self._ttl)

    # What to ask

    def standing_back(self, now: float) -> tuple[str, ...]:
        """Return the roles that were resigned less than a TTL ago."""
        return tuple(role for role, (_, until) in self._stand_back.items() if now < until)

    @property
    def untried(self) -> bool:
        """Whether some role that may be vacant has not been tried for yet."""
        return bool(self.unregistered or self.wanted or self.busy)

    @property
    def held_by_others(self) -> tuple[str, ...]:
        """Some of the roles that the node stands for and does not hold: all of them, if there are few."""
        # A node holds only roles for which it stands. To go through ten thousand of them takes milliseconds.
        if len(self.holding) == len(self.standing):
            return ()
        others = (role for role in self.standing if role not in self.holding)
        return tuple(sorted(islice(others, LOOKED_AT)))

    @property
    def locked(self) -> tuple[str, ...]:
        """The roles whose lock this node needs now: it leads them, or gives them up, and their work may still run."""
        return tuple(sorted(self.bound.intersection((*self.holding, *self._vacating, *self.held_for_work))))

    @property
    def vacate_at(self) -> float:
        """When the next role is to be vacated in the database."""
        return min((at for role, (_, _, at) in self._vacating.items() if role not in self.held_for_work), default=NEVER)

    @property
    def claim_at(self) -> float:
        """When to try for the roles that the node led when it met this server."""
        return self.busy_until if self.claims else NEVER

    @property
    def given_up(self) -> tuple[tuple[str, int], ...]:
        """The terms (role and token) that were resigned and are not vacated in the database yet."""
        return tuple(sorted((role, token) for role, (token, _, _) in self._vacating.items()))

    def renew_request(self, me: str, now: float) -> Renew:
        """Return the renewal, with what to read."""
        return Renew(me, self.standing_back(now), thorough=now >= self.read_all_at)

    def stand_request(self, me: str) -> Stand:
        """Return which candidacies to write and to remove."""
        return Stand(me, tuple(sorted(self.unregistered)), tuple(sorted(self.withdrawn)))

    def vacate_request(self, me: str) -> Vacate:
        """Return which role to vacate."""
        idle = ((role, term) for role, term in self._vacating.items() if role not in self.held_for_work)
        role, (token, to, _) = min(idle, key=lambda item: item[1][2])
        return Vacate(me, role, token, to)

    def acquire_request(self, me: str, name: str, floor: int, *, claim: bool = False) -> Acquire:
        """Return what to acquire: all wanted roles in one batch; if there are none, one busy role with a short wait.

        With ``claim``: the roles that the node led when it met this server.
        """
        if claim:
            return Acquire(me, name, tuple(sorted(self.claims)), floor, claim=True)
        patient = not self.wanted
        roles = self.busy[:1] if patient else sorted(self.wanted)
        unreserved = tuple(sorted(self._unreserved.intersection(roles)))
        return Acquire(me, name, tuple(roles), floor, unreserved, patient=patient)

    # What was answered

    def stood(self, request: Stand, now: float) -> None:
        """Process the answer to a Stand request: candidacies were written, and the node now tries for these roles."""
        self.unregistered.difference_update(request.roles)
        self.withdrawn.difference_update(request.withdrawn)
        self.wanted.update(self.standing.intersection(request.roles).difference(self.holding, self.standing_back(now)))

    def acquired(self, request: Acquire, answer: Acquired, now: float, *, trusted: bool) -> None:
        """Process the answer to an Acquire request: which roles were acquired, and which are busy."""
        self.wanted.difference_update(request.roles)
        self._unreserved.difference_update(request.roles)
        if request.claim:
            self.claims.difference_update(set(request.roles).difference(answer.busy))
        self.busy = [role for role in self.busy if role not in request.roles]
        self.busy.extend(role for role in answer.busy if role in self.standing)
        self.busy_until = now + RETRY_S
        self.begin(answer.tokens, now, trusted=trusted)

    def begin(self, tokens: dict[str, int], now: float, *, trusted: bool) -> None:
        """Begin the terms that the database has given to this member."""
        for role, token in tokens.items():
            self._elect(role, token, now, trusted=trusted)

    def vacated(self, request: Vacate, now: float, *, done: bool) -> None:
        """Process the answer to a Vacate request; ``done`` is False while a fenced transaction is open."""
        self.unreleased.discard(request.role)
        if done:
            self._vacating.pop(request.role, None)
            # Stand back from now on: the work under the term may have taken long to stop.
            if request.role in self._stand_back:
                self._stand_back[request.role] = (request.token, now + self._ttl)
        elif request.role in self._vacating:
            self._vacating[request.role] = (request.token, request.reserved_for, now + RETRY_S)

    def reconcile(self, held: tuple[Held, ...], now: float, *, trusted: bool) -> None:
        """Bring the terms held here into line with all roles that this member holds in the database."""
        number = max(len(self.standing), len(held))
        always = number <= FEW_ROLES or now < self._read_all_until
        self.read_all_at = LONG_AGO if always else now + READ_ROLE_S * number
        tokens = {mine.role: mine.token for mine in held}
        for role, token in list(self.holding.items()):
            if tokens.get(role) != token:
                self.lose(role, EndReason.TAKEN)
                # The role's row may be gone altogether, if an operator deleted it.
                if role in self.standing and role not in tokens:
                    self.unregistered.add(role)
        self.requested(held, now)
        for mine in held:
            if mine.role not in self._vacating:
                self._recognise(mine, now, trusted=trusted)

    def _recognise(self, mine: Held, now: float, *, trusted: bool) -> None:
        """Go on with a role that this member holds in the database, take it up, or give it up."""
        role, token = mine.role, mine.token
        # The lock ended with an earlier connection, and another program may have it.
        if mine.unlocked:
            if role in self.holding:
                self.lose(role, EndReason.LOCK_TAKEN)
            self._vacating[role] = (token, None, now)
        elif self.holding.get(role) == token:
            pass
        elif role not in self.standing:
            self._vacating[role] = (token, None, now)
        # A token that this node has never dropped: the answer to its acquisition was lost.
        elif token > self._dropped.get(role, 0):
            self._elect(role, token, now, trusted=trusted)
        # The term lapsed here, so the role needs a new token.
        else:
            self.wanted.add(role)

    def requested(self, held: tuple[Held, ...], now: float) -> None:
        """Resign the terms that an operator, or another process, asks this node to resign."""
        for mine in held:
            if mine.requested and self.holding.get(mine.role) == mine.token:
                self.resign(mine.role, now, mine.requested_for)

    def consider(self, vacant: tuple[Vacancy, ...], alone_in: tuple[str, ...], me: str, now: float) -> None:
        """Decide which vacant roles to try for: not while standing back, not while reserved for another member.

        The node waits for a reserved role for a TTL on its own clock, from when it first saw the reservation. Standing
        back ends early if no other node stands, or if another node has led since. Otherwise nodes that each resign
        after a short term would all stand back, and no node would lead.
        """
        for vacancy in vacant:
            role = vacancy.role
            if role not in self.standing or role in self.holding or role in self._vacating:
                continue
            if vacancy.reserved_for not in (None, me):
                seen = self._reservations.get(role)
                if seen is None or seen[0] != vacancy.token:
                    seen = self._reservations[role] = (vacancy.token, now)
                if now < seen[1] + silence(self._ttl):
                    continue
                self._unreserved.add(role)
            resigned, until = self._stand_back.get(role, (0, LONG_AGO))
            standing_back = now < until and vacancy.token <= resigned
            if standing_back and vacancy.reserved_for != me and role not in alone_in:
                continue
            self.wanted.add(role)

    def hear_vacant(self, role: str, now: float) -> bool:
        """Try for a role that was announced as vacant; False if the node stands back, and must renew first."""
        if role in self.standing_back(now):
            return False
        if role in self.standing.difference(self.holding, self._vacating, self.unregistered):
            self.wanted.add(role)
        return True

    def _elect(self, role: str, token: int, now: float, *, trusted: bool) -> None:
        """Begin a term, if the lease is still trusted and the node still stands for the role."""
        if role not in self.standing:
            self._vacating[role] = (token, None, now)
        elif trusted:
            self.holding[role] = token
            # If the term was adopted, an attempt may still be planned. It would replace the term without an event.
            self.wanted.discard(role)
            self.claims.discard(role)
            self.busy = [other for other in self.busy if other != role]
            self._stand_back.pop(role, None)
            self._reservations.pop(role, None)
            self._news.append(Elected(role, token))
        else:
            self._dropped[role] = token
            self.read_all_at = LONG_AGO
