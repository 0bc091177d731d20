"""The one server of the small world: the tables, who it is, and how it stops.

The simulator's model of the tables executes a request at one instant. Counts of renewals are kept at zero: instead, a
renewal moves what others have seen of it one further back (``Place.do_shift``), so that states repeat.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tenure.core import messages, timing
from tenure.core.servers import Confirmed, Server
from tests.verification.exploration.forms import plain
from tests.verification.exploration.lines import CLOSED
from tests.verification.exploration.names import OLDEST, called
from tests.verification.exploration.node import FAST, ROLE, TICK_S
from tests.verification.simulation.model import ModelStore, Tables


@dataclass
class Effect:
    """What a request did, beside its answer."""

    answer: Any
    renewed: str | None = None
    evicted: tuple[str, ...] = ()
    ended: tuple[tuple[str, str], ...] = ()
    broken: str | None = None


class Sentinels:
    """Which keys stand; who takes one is the business of its connection (``Place.do_execute``)."""

    def __init__(self, standing: Iterable[int]) -> None:
        self._standing = frozenset(standing)

    def hold(self, _: int) -> bool:
        return True

    def release(self, key: int) -> None:
        pass

    def standing(self, keys: Iterable[int]) -> set[int]:
        return self._standing.intersection(keys)


@dataclass
class Base:
    """The server."""

    max_ttl: float
    store: type[ModelStore]
    tables: Tables
    start: int = 1
    timeline: int = 1
    phase: str = "up"
    """``up``, ``stopping`` (no new connections) or ``down``."""
    issued: int = 0
    announced: int = 0
    image: Tables | None = None
    """What the replica has."""
    lag: int = 0
    """For how many ticks it has got nothing. One that lacks as much as a raise takes to ripen is not promoted."""
    write: tuple[int, int] | None = None
    """A fenced transaction: its token, and for how many ticks it has been open."""

    def form(self) -> Any:
        for tables in (self.tables, self.image):
            if tables:
                _tidy(tables)
        flags = (self.start, self.timeline, self.phase, self.issued, self.announced, self.write, self.lag)
        return flags, plain(self.tables), plain(self.image)

    @property
    def identity(self) -> Server:
        promoted = self.timeline > 1
        return Server(f"start-{self.start}", f"system:{self.timeline}", self.timeline, promoted=promoted)

    @property
    def living(self) -> frozenset[str]:
        return frozenset(id_ for id_, row in self.tables.members.items() if not row.ended_at)

    def stale_fence(self) -> str | None:
        """No term but the latest passes the fence, or has a transaction open that could still commit."""
        if self.write and self.write[0] < self.issued:
            return f"a write fenced with {ROLE} {self.write[0]} can commit after {self.issued} was begun"
        for (role, token), term in self.tables.terms.items():
            if token < self.issued and self.tables.fenced(role, token, term.member_id, self.identity.line):
                return f"the fence lets {role} {token} through after {self.issued} was begun"
        return None

    # Requests ------------------------------------------------------------------------------------------------------

    def execute(self, request: Any, standing: Iterable[int]) -> Effect:
        store = self.store(
            lambda: self.tables,
            Sentinels(standing),
            tell=lambda _: None,
            now=lambda: "ended",
            server=lambda: self.identity,
            locked=lambda: (ROLE,) if self.write else (),
        )
        if isinstance(request, messages.Evict):
            return Effect(messages.Done(), evicted=tuple(sorted(set(request.member_ids) - self.living)))
        if isinstance(request, messages.Join) and request.member.id in self.tables.members:
            return Effect(CLOSED, broken=f"the id of {called(request.member.id)} was used again")
        if isinstance(request, (messages.Open, messages.OpenWatch, messages.Knock, messages.Look, messages.Unblock)):
            return Effect(self._answer(request, store))
        return self._examine(request, store.perform(request))

    def _answer(self, request: Any, store: ModelStore) -> Any:
        """The answer to what changes no table."""
        up = self.phase == "up"
        if isinstance(request, messages.Knock):
            return messages.Knocked(up and request.server_start == self.identity.start)
        if isinstance(request, messages.Look):
            rows, vacancy = store.roster(request)
            seen = store.sightings(rows)
            fallen = any(member.key == request.wait_for and not member.sentinel_stands for member in seen)
            knocked = up and request.wait_for is not None and fallen
            return messages.Looked(self.identity, seen, vacancy, knocked=knocked)
        if isinstance(request, messages.Unblock):
            if self.write and self.write[1] * TICK_S > request.bound_s:
                self.write = None
            return messages.Done()
        if isinstance(request, messages.Open):
            if not up:
                return CLOSED
            store.open(None)
            if self.tables.limit_by == "open":
                self.tables.limit_ttl(self.max_ttl)
            return messages.Opened(*store.open(None))
        return messages.Watching() if up else CLOSED

    def _examine(self, request: Any, answer: Any) -> Effect:
        """What a job of the control lane did that matters to others."""
        effect = Effect(answer)
        if isinstance(request, (messages.Renew, messages.Resume)) and answer.alive:
            effect.renewed = request.member_id if isinstance(request, messages.Renew) else request.member.id
            self._count(effect.renewed)
        elif isinstance(request, messages.End):
            reasons = {verdict.member_id: verdict.reason for verdict in request.verdicts}
            effect.ended = tuple((id_, reasons[id_]) for id_ in answer.ids)
        if isinstance(request, (messages.Acquire, messages.End)):
            for token in answer.tokens.values():
                if token <= self.issued:
                    effect.broken = f"{called(request.member_id)} was given {ROLE} {token} after {self.issued}"
                self.issued = max(self.issued, token)
        return effect

    def _count(self, member_id: str) -> None:
        self.tables.members[member_id].renewals -= 1
        if self.image and member_id in self.image.members:
            row = self.image.members[member_id]
            row.renewals = max(OLDEST, row.renewals - 1)

    # Time, stops, promotion, writes --------------------------------------------------------------------------------

    def do_tick(self) -> None:
        self.lag = self.lag + 1 if self.image else 0
        if self.lag * TICK_S >= timing.RIPENS_AFTER_S:
            self.image, self.lag = None, 0
        if self.write:
            token, age = self.write
            self.write = (token, age + 1)
            if (age + 1) * TICK_S * FAST >= self.max_ttl:  # the fence's own bound
                self.write = None

    def do_stopping(self) -> None:
        self.phase, self.write = "stopping", None

    def do_down(self) -> None:
        self.phase, self.write = "down", None

    def do_up(self) -> None:
        self.phase = "up"
        self.start += 1

    def do_snapshot(self) -> None:
        self.image, self.lag = self.tables.copy(), 0

    def raise_limit(self, seconds: float) -> None:
        """Begin with a namespace whose largest TTL was raised just now; the replica lacks it."""
        self.tables.confirmed = Confirmed(self.identity.incarnation, 0, self.max_ttl, self.max_ttl)
        self.tables.limit_by = "operator"
        self.do_snapshot()
        self.tables.limit_ttl(seconds)

    def do_promote(self) -> list[tuple[str, int]]:
        """The host is lost; the replica has what it has. Return how far counts went back."""
        assert self.image
        self.tables, self.image, self.lag = copy.deepcopy(self.image), None, 0
        self.timeline += 1
        self.do_down()
        back = [(id_, -row.renewals) for id_, row in self.tables.members.items() if row.renewals]
        for row in self.tables.members.values():
            row.renewals = 0
        return back

    def fenced(self) -> int:
        """The token under which a transaction could be fenced now, or 0."""
        row = self.tables.roles.get(ROLE)
        if self.phase == "up" and row and row.holder:
            here = self.identity.line
            return row.token if self.tables.fenced(ROLE, row.token, row.holder, here) else 0
        return 0

    def do_begin(self) -> None:
        self.write = (self.fenced(), 0)

    def do_commit(self) -> None:
        self.write = None

    def do_announce(self, token: int) -> None:
        self.announced = max(self.announced, token)


def _tidy(tables: Tables) -> None:
    """Drop rows that decide nothing more: ended members that hold nothing, their candidacies, terms that are over."""
    held = {name for role in tables.roles.values() for name in (role.holder, role.reserved_for)}
    for id_ in [id_ for id_, row in tables.members.items() if row.ended_at and id_ not in held]:
        del tables.members[id_]
    tables.candidates = {pair for pair in tables.candidates if tables.lives(pair[1])}
    latest = {(name, role.token) for name, role in tables.roles.items()}
    tables.terms = {term: row for term, row in tables.terms.items() if term in latest}
