"""A plain-Python model of the tables and of every ask: quick, and an independent statement of what the SQL means.

``tests/test_model.py`` drives the same random asks through this and through the real ``Store`` on SQLite and wants
equal answers, so a simulation on the model says something about the texts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tenure import asks
from tenure.asks import Confirmed, Held, Server, Sighting, Vacancy


@dataclass
class MemberRow:
    name: str
    ttl: float
    key: int | None
    server_start: str
    incarnation: str
    renewals: int = 0
    epoch: int = 0
    ended_at: str | None = None
    end_reason: str | None = None
    control: tuple[int, str] = (0, "")
    watch: tuple[int, str] = (0, "")


@dataclass
class RoleRow:
    token: int = 0
    holder: str | None = None
    reserved_for: str | None = None
    request_token: int | None = None
    request_to: str | None = None


@dataclass
class TermRow:
    member_id: str
    name: str
    resigned: bool = False


@dataclass
class Tables:
    """What the database stores, for one namespace."""

    confirmed: Confirmed | None = None
    members: dict[str, MemberRow] = field(default_factory=dict)
    roles: dict[str, RoleRow] = field(default_factory=dict)
    candidates: set[tuple[str, str]] = field(default_factory=set)
    terms: dict[tuple[str, int], TermRow] = field(default_factory=dict)

    def copy(self) -> Tables:
        return copy.deepcopy(self)

    def lives(self, member_id: str | None) -> bool:
        member = self.members.get(member_id) if member_id else None
        return member is not None and member.ended_at is None

    def fenced(self, role: str, token: int, member_id: str, incarnation: str) -> bool:
        """Whether the fence lets this term through."""
        row, term = self.roles.get(role), self.terms.get((role, token))
        return (
            row is not None
            and (row.token, row.holder) == (token, member_id)
            and self.lives(member_id)
            and self.members[member_id].incarnation == incarnation
            and not (term and term.resigned)
        )


class ModelStore:
    """``Store`` and ``Watch`` in plain Python. ``locked`` says which roles' rows are locked by open transactions."""

    def __init__(
        self,
        tables: Callable[[], Tables],
        sentinel: Any,
        *,
        tell: Callable[[str], None],
        now: Callable[[], str],
        server: Callable[[], Server],
        locked: Callable[[], Iterable[str]] = tuple,
        backend: tuple[int, str] = (0, ""),
    ) -> None:
        self._tables = tables
        self.sentinel = sentinel
        self.tell = tell
        self.now = now
        self.server = server
        self.locked = locked
        self.backend = backend
        self.watch_backend: tuple[int, str] = (0, "")
        self._key: int | None = None

    @property
    def tables(self) -> Tables:
        return self._tables()

    def perform(self, ask: asks.ControlAsk) -> asks.ControlAnswer:
        return getattr(self, "_" + type(ask).__name__.lower())(ask)

    def open(self, default_max_ttl: float) -> tuple[Server, Confirmed]:
        tables, server = self.tables, self.server()
        if tables.confirmed is None:
            tables.confirmed = Confirmed(server.incarnation, 0, default_max_ttl)
        return server, tables.confirmed

    # Membership

    def _join(self, ask: asks.Join) -> asks.Joined:
        for orphan in ask.replaces:
            self._end_one(orphan, "replaced")
            self.tell(f"vacant {orphan}")
        self.release()
        member = ask.member
        if member.key is not None and not self.sentinel.hold(member.key):
            return asks.Joined(sentinel=False)
        self._key = member.key
        assert member.id not in self.tables.members, "a member's id was used again"
        self.tables.members[member.id] = MemberRow(
            member.name, member.ttl, member.key, ask.server.start, ask.server.incarnation, control=self.backend
        )
        return asks.Joined(sentinel=True)

    def _renew(self, ask: asks.Renew) -> asks.Standing:
        if not self.tables.lives(ask.member_id):
            return asks.Standing(alive=False)
        row = self.tables.members[ask.member_id]
        row.renewals += 1
        row.control, row.watch = self.backend, self.watch_backend
        return self._standing(ask.member_id, ask.alone_in)

    def _resume(self, ask: asks.Resume) -> asks.Standing:
        member = ask.member
        if member.key is not None and not self.sentinel.retake(member.key):
            return asks.Standing(alive=False)
        self._key = member.key
        if not self.tables.lives(member.id) or self.tables.members[member.id].incarnation != ask.server.incarnation:
            return asks.Standing(alive=False)
        row = self.tables.members[member.id]
        row.renewals += 1
        row.epoch += 1
        row.control, row.server_start = self.backend, ask.server.start
        return self._standing(member.id, ())

    def _standing(self, me: str, alone_in: tuple[str, ...]) -> asks.Standing:
        tables = self.tables
        contested = {role for role, member in tables.candidates if member != me and tables.lives(member)}
        return asks.Standing(
            alive=True,
            held=tuple(
                Held(name, role.token, asked, role.request_to if asked else None)
                for name, role in tables.roles.items()
                for asked in [role.request_token == role.token]
                if role.holder == me
            ),
            vacant=self._vacant(me),
            alone_in=tuple(role for role in alone_in if role not in contested),
            confirmed=tables.confirmed,
        )

    def _vacant(self, me: str) -> tuple[Vacancy, ...]:
        tables = self.tables
        return tuple(
            Vacancy(name, role.token, role.reserved_for if tables.lives(role.reserved_for) else None)
            for name, role in tables.roles.items()
            if (name, me) in tables.candidates and not tables.lives(role.holder)
        )

    def _leave(self, ask: asks.Leave) -> asks.Done:
        self._end_one(ask.member_id, "left")
        self.tell(f"vacant {ask.member_id}")
        self.release()
        return asks.Done()

    def _end(self, ask: asks.End) -> asks.Ended:
        ended = []
        for verdict in ask.verdicts:
            if self._guarded(verdict) and self._end_one(verdict.member_id, verdict.reason):
                ended.append(verdict.member_id)
            held = {name for name, role in self.tables.roles.items() if role.holder == verdict.member_id}
            if any((name, ask.member_id) not in self.tables.candidates for name in held):
                self.tell(f"vacant {ask.member_id}")
        return asks.Ended(tuple(ended), self._vacant(ask.member_id) if ended else ())

    def _guarded(self, verdict: asks.Verdict) -> bool:
        """Whether what the verdict was founded on still holds."""
        row = self.tables.members.get(verdict.member_id)
        if row is None:
            return False
        if verdict.reason == "silence":
            return row.renewals == verdict.renewals
        return (row.epoch, row.server_start) == (verdict.epoch, verdict.server_start)

    def _end_one(self, member_id: str, reason: str) -> bool:
        if not self.tables.lives(member_id):
            return False
        row = self.tables.members[member_id]
        row.ended_at, row.end_reason = self.now(), reason
        return True

    def release(self) -> None:
        if self._key is not None:
            self.sentinel.release(self._key)
            self._key = None

    # Roles

    def _stand(self, ask: asks.Stand) -> asks.Done:
        tables = self.tables
        for role in ask.withdrawn:
            tables.candidates.discard((role, ask.member_id))
        for role in ask.roles:
            tables.roles.setdefault(role, RoleRow())
            tables.candidates.add((role, ask.member_id))
        return asks.Done()

    def _acquire(self, ask: asks.Acquire) -> asks.Acquired:
        tables, locked, tokens = self.tables, set(self.locked()), {}
        if not tables.lives(ask.member_id):
            return asks.Acquired()
        free = [role for role in ask.roles if role in tables.roles and role not in locked]
        for name in free:
            role = tables.roles[name]
            if self._takeable(role, name, ask):
                role.token = self._next_token(role.token, ask.floor)
                role.holder = ask.member_id
                role.reserved_for = role.request_token = role.request_to = None
                tables.terms[name, role.token] = TermRow(ask.member_id, ask.name)
                tokens[name] = role.token
        self.tell(f"changed {ask.member_id}")
        return asks.Acquired(tokens, busy=tuple(role for role in ask.roles if role not in free))

    def _takeable(self, role: RoleRow, name: str, ask: asks.Acquire) -> bool:
        vacant = role.holder == ask.member_id or not self.tables.lives(role.holder)
        return vacant and (self._unreserved(role, ask.member_id) or name in ask.unreserved)

    def _unreserved(self, role: RoleRow, me: str) -> bool:
        return role.reserved_for == me or not self.tables.lives(role.reserved_for)

    def _next_token(self, old: int, floor: int) -> int:
        return max(old + 1, floor)

    def _vacate(self, ask: asks.Vacate) -> asks.Vacated:
        term, role = self.tables.terms.get((ask.role, ask.token)), self.tables.roles.get(ask.role)
        if term and term.member_id == ask.member_id:
            term.resigned = True
        if role and (role.token, role.holder) == (ask.token, ask.member_id):
            if ask.role in self.locked():
                return asks.Vacated(done=False)
            role.holder, role.reserved_for = None, ask.reserved_for
            role.request_token = role.request_to = None
        self.tell(f"vacant {ask.member_id}" if ask.reserved_for else f"vacant {ask.member_id} {ask.role}")
        return asks.Vacated(done=True)

    # The namespace

    def _confirm(self, ask: asks.Confirm) -> asks.Done:
        present = self.tables.confirmed
        if present and present.incarnation == ask.old:
            base = present.base
            if ask.old.split(":")[0] != ask.server.incarnation.split(":")[0]:
                base = max(base, max((role.token for role in self.tables.roles.values()), default=0))
            self.tables.confirmed = Confirmed(ask.server.incarnation, base, present.max_ttl)
        return asks.Done()

    def _leaders(self, ask: asks.Leaders) -> asks.LeadersAre:
        tables, leaders = self.tables, []
        for name in ask.roles:
            if name in tables.roles:
                token, holder = tables.roles[name].token, tables.roles[name].holder
                living = holder if tables.lives(holder) else None
                leaders.append(asks.Leader(name, token, living, tables.members[living].name if living else None))
        return asks.LeadersAre(tuple(leaders))

    def _tidy(self, ask: asks.Tidy) -> asks.Done:  # noqa: ARG002
        """Candidacies of ended members go; old members and terms are kept here (nothing is decided by them)."""
        tables = self.tables
        ended = {id_ for id_, row in tables.members.items() if row.ended_at is not None}
        tables.candidates = {pair for pair in tables.candidates if pair[1] not in ended}
        return asks.Done()

    # The watch lane

    def roster(self, me: str) -> tuple[list[tuple[Any, ...]], bool]:
        """What a look reads first: the rows. The sentinels come after, maybe a moment later."""
        tables = self.tables
        rows = [
            (id_, row.ttl, row.renewals, row.key, row.epoch, row.server_start)
            for id_, row in tables.members.items()
            if row.ended_at is None
        ]
        vacancy = any(
            role.holder is None or (role.holder in tables.members and not tables.lives(role.holder))
            for name, role in tables.roles.items()
            if (name, me) in tables.candidates
        )
        return rows, vacancy

    def sightings(self, rows: Sequence[tuple[Any, ...]]) -> tuple[Sighting, ...]:
        standing = self.sentinel.standing([row[3] for row in rows if row[3] is not None])
        return tuple(Sighting(*row, row[3] in standing) for row in rows)
