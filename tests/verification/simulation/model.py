"""A plain-Python model of the tables and of every request: quick, and an independent statement of what the SQL means.

``tests/verification/simulation/test_model.py`` drives the same random requests through this and through the real
``ControlStore`` on SQLite and wants equal answers, so a simulation on the model says something about the texts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tenure.core import messages, timing
from tenure.core.messages import Held, Sighting, Vacancy
from tenure.core.servers import Confirmed, Server
from tenure.store.session import NAMED_ROLES, Failed, Gone


@dataclass
class MemberRow:
    name: str
    ttl: float
    key: int | None
    server_start: str
    line: str
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
    limit_by: str = ""
    members: dict[str, MemberRow] = field(default_factory=dict)
    roles: dict[str, RoleRow] = field(default_factory=dict)
    candidates: set[tuple[str, str]] = field(default_factory=set)
    terms: dict[tuple[str, int], TermRow] = field(default_factory=dict)

    def copy(self) -> Tables:
        return copy.deepcopy(self)

    def limit_ttl(self, seconds: float) -> None:
        """What `tenure init --max-ttl` writes."""
        row = self.confirmed
        if row and (row.max_ttl, self.limit_by) != (seconds, "operator"):
            self.limit_by = "operator"
            self._set_limit(row, seconds)

    def raise_limit(self, ttl: float) -> None:
        """What a node writes whose TTL is above the limit."""
        row = self.confirmed
        if row and self.limit_by == "nodes" and row.max_ttl < ttl <= timing.DEFAULT_MAX_TTL_S:
            self._set_limit(row, ttl)

    def _set_limit(self, row: Confirmed, seconds: float) -> None:
        ripe = min(row.ripe_ttl, seconds)
        self.confirmed = row._replace(max_ttl=seconds, ripe_ttl=ripe, limits=row.limits + 1)

    def settle_limit(self, ttl: float) -> None:
        """What the first node writes."""
        row = self.confirmed
        if row and self.limit_by == "open":
            limit = timing.first_limit(ttl)
            given = [member.ttl for member in self.members.values() if member.ended_at is None]
            ripe = min(limit, timing.DEFAULT_MAX_TTL_S)
            self.confirmed = row._replace(max_ttl=max([limit, *given]), ripe_ttl=ripe)
            self.limit_by = "nodes"

    def set_promotion(self, server: Server, *, loses_nothing: bool) -> None:
        """What `tenure init --promotion` writes."""
        row = self.confirmed
        if row and (row.line == server.line or not loses_nothing):
            self.confirmed = row._replace(loses_nothing=loses_nothing)

    def lives(self, member_id: str | None) -> bool:
        member = self.members.get(member_id) if member_id else None
        return member is not None and member.ended_at is None

    def fenced(self, role: str, token: int, member_id: str, line: str) -> bool:
        """Whether the fence lets this term through."""
        row, term = self.roles.get(role), self.terms.get((role, token))
        return (
            row is not None
            and (row.token, row.holder) == (token, member_id)
            and self.lives(member_id)
            and self.members[member_id].line == line
            and not (term and term.resigned)
        )


class ModelStore:
    """``ControlStore`` and ``WatchStore`` in plain Python.

    ``locked`` says which roles' rows are locked by open transactions.
    """

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
        unreplicated: Callable[[], bool] = lambda: False,
    ) -> None:
        self._unreplicated = unreplicated
        self._tables = tables
        self.sentinel = sentinel
        self.tell = tell
        self.now = now
        self.server = server
        self.locked = locked
        self.backend = backend
        self.watch_backend: tuple[int, str] = (0, "")
        self._key: int | None = None
        self._met: Server | None = None

    @property
    def tables(self) -> Tables:
        return self._tables()

    def perform(self, request: messages.ControlRequest) -> messages.ControlReply:
        return getattr(self, "_" + type(request).__name__.lower())(request)

    def open(self, ttl: float | None) -> tuple[Server, Confirmed]:
        tables, server = self.tables, self.server()
        self._met = server
        if tables.confirmed is None:
            trusted = server.unconfirmed if server.promoted else server.incarnation
            limit = timing.DEFAULT_MAX_TTL_S
            tables.confirmed, tables.limit_by = Confirmed(trusted, 0, limit, limit, place=server.place), "open"
        if ttl is not None:
            tables.settle_limit(ttl)
            tables.raise_limit(ttl)
        return server, tables.confirmed

    # Membership

    def _join(self, request: messages.Join) -> messages.Joined:
        for orphan in request.replaces:
            self._end_one(orphan, "replaced")
            self._tell_if_it_held(orphan)
        self.release()
        member = request.member
        if member.key is not None and not self.sentinel.hold(member.key):
            return messages.Joined(sentinel=False)
        self._key = member.key
        assert member.id not in self.tables.members, "a member's id was used again"
        self.tables.members[member.id] = MemberRow(
            member.name, member.ttl, member.key, request.server.start, request.server.line, control=self.backend
        )
        return messages.Joined(sentinel=True)

    def _renew(self, request: messages.Renew) -> messages.Standing:
        if not self.tables.lives(request.member_id):
            return messages.Standing(alive=False)
        row = self.tables.members[request.member_id]
        row.renewals += 1
        row.control, row.watch = self.backend, self.watch_backend
        return self._standing(request.member_id, request.alone_in, thorough=request.thorough)

    def _resume(self, request: messages.Resume) -> messages.Standing:
        self.release()
        member = request.member
        if member.key is not None and not self.sentinel.hold(member.key):
            return messages.Standing(alive=False)
        self._key = member.key
        if not self.tables.lives(member.id) or not self._resumable(self.tables.members[member.id], request):
            return messages.Standing(alive=False)
        row = self.tables.members[member.id]
        row.renewals += 1
        row.key, row.epoch = member.key, request.epoch
        row.control, row.server_start = self.backend, request.server.start
        row.line = request.server.line
        return self._standing(member.id, (), thorough=True)

    def _resumable(self, row: MemberRow, request: messages.Resume) -> bool:
        lines = [f"{incarnation} {request.server.place}" for incarnation in (request.was, request.server.incarnation)]
        return row.line in lines and row.epoch < request.epoch

    def _standing(self, me: str, alone_in: tuple[str, ...], *, thorough: bool) -> messages.Standing:
        tables = self.tables
        if self._met and self._met.place != self.server().place:
            raise Gone("the tables were replaced")
        self._check_replicated()
        contested = {role for role, member in tables.candidates if member != me and tables.lives(member)}
        return messages.Standing(
            alive=True,
            held=tuple(
                Held(name, role.token, asked, role.request_to if asked else None)
                for name, role in tables.roles.items()
                for asked in [role.request_token == role.token]
                if role.holder == me and (thorough or role.request_token is not None)
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

    def _leave(self, request: messages.Leave) -> messages.Done:
        for term in map(self.tables.terms.get, request.given_up):
            if term and term.member_id == request.member_id:
                term.resigned = True
        left = [name for name, role in self.tables.roles.items() if role.holder == request.member_id]
        if len(left) > NAMED_ROLES:
            self.tell(f"vacant {request.member_id}")
        else:
            for name in left:
                self._tell_vacant(request.member_id, name, self._successor(request.member_id, name))
        self._end_one(request.member_id, "left")
        self.release()
        return messages.Done()

    def _tell_if_it_held(self, member_id: str) -> None:
        if any(role.holder == member_id for role in self.tables.roles.values()):
            self.tell(f"vacant {member_id}")

    def _end(self, request: messages.End) -> messages.Ended:
        ended = []
        for verdict in request.verdicts:
            if self._guarded(verdict) and self._end_one(verdict.member_id, verdict.reason):
                ended.append(verdict.member_id)
            held = {name for name, role in self.tables.roles.items() if role.holder == verdict.member_id}
            if any((name, request.member_id) not in self.tables.candidates for name in held):
                self.tell(f"vacant {request.member_id}")
        tokens = self._succeed(request, request.succession) if request.succession and ended else {}
        return messages.Ended(tuple(ended), self._vacant(request.member_id) if ended else (), tokens)

    def _succeed(self, request: messages.End, succession: messages.Succession) -> dict[str, int]:
        me, dead = request.member_id, {verdict.member_id for verdict in request.verdicts}
        left = [name for name, role in self.tables.roles.items() if role.holder in dead]
        mine = tuple(name for name in left if (name, me) in self.tables.candidates)
        return self._acquire(messages.Acquire(me, succession.name, mine, succession.floor)).tokens

    def _guarded(self, verdict: messages.Verdict) -> bool:
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

    def _stand(self, request: messages.Stand) -> messages.Done:
        tables = self.tables
        for role in request.withdrawn:
            tables.candidates.discard((role, request.member_id))
        for role in request.roles:
            tables.roles.setdefault(role, RoleRow())
            tables.candidates.add((role, request.member_id))
        return messages.Done()

    def _acquire(self, request: messages.Acquire) -> messages.Acquired:
        tables, locked, tokens = self.tables, set(self.locked()), {}
        if not tables.lives(request.member_id) or tables.members[request.member_id].line != self.server().line:
            return messages.Acquired({})
        free = [role for role in request.roles if role in tables.roles and role not in locked]
        for name in free:
            role = tables.roles[name]
            if self._takeable(role, name, request):
                role.token = self._next_token(role.token, request.floor)
                role.holder = request.member_id
                role.reserved_for = role.request_token = role.request_to = None
                tables.terms[name, role.token] = TermRow(request.member_id, request.name)
                tokens[name] = role.token
        if any(name in request.roles and role.holder == request.member_id for name, role in tables.roles.items()):
            self.tell(f"changed {request.member_id}")
        self._check_replicated()
        mine = {name for name, role in tables.roles.items() if role.holder == request.member_id}
        unheld = mine.union(vacancy.role for vacancy in self._vacant(request.member_id))
        return messages.Acquired(
            tokens, busy=tuple(role for role in request.roles if role in unheld and role not in free)
        )

    def _check_replicated(self) -> None:
        """A commit that is on no replica does not count, if promotions are said to lose nothing."""
        if self.tables.confirmed and self.tables.confirmed.loses_nothing and self._unreplicated():
            raise Failed("the wait for the replica was cancelled")

    def _takeable(self, role: RoleRow, name: str, request: messages.Acquire) -> bool:
        if request.claim:
            return role.holder == request.member_id or role.token < request.floor
        vacant = role.holder == request.member_id or not self.tables.lives(role.holder)
        return vacant and (self._unreserved(role, request.member_id) or name in request.unreserved)

    def _unreserved(self, role: RoleRow, me: str) -> bool:
        return role.reserved_for == me or not self.tables.lives(role.reserved_for)

    def _next_token(self, old: int, floor: int) -> int:
        return max(old + 1, floor)

    def _vacate(self, request: messages.Vacate) -> messages.Vacated:
        term, role = self.tables.terms.get((request.role, request.token)), self.tables.roles.get(request.role)
        if term and term.member_id == request.member_id:
            term.resigned = True
        if role and (role.token, role.holder) == (request.token, request.member_id):
            if request.role in self.locked():
                return messages.Vacated(done=False)
            role.holder, role.reserved_for = None, request.reserved_for
            role.request_token = role.request_to = None
        if role and (role.token, role.holder) == (request.token, None):
            heir = self._successor(request.member_id, request.role, request.reserved_for)
            self._tell_vacant(request.member_id, request.role, heir)
        return messages.Vacated(done=True)

    def _successor(self, me: str, role: str, reserved_for: str | None = None) -> str | None:
        """The living candidate that a notification names: the one with the reservation, or the next on the ring."""
        tables = self.tables
        others = [member for name, member in tables.candidates if name == role and member != me]
        return min(
            filter(tables.lives, others), key=lambda member: (member != reserved_for, member < me, member), default=None
        )

    def _tell_vacant(self, me: str, role: str, heir: str | None) -> None:
        self.tell(f"vacant {me}>{heir} {role}" if heir else f"vacant {me} {role}")

    # The namespace

    def _confirm(self, request: messages.Confirm) -> messages.Done:
        present, server = self.tables.confirmed, request.server
        if present and present.line == request.old.line and server.place == self.server().place:
            base = present.base
            same_system = present.incarnation.split(":")[0] == server.incarnation.split(":")[0]
            if not same_system or present.place != server.place:
                highest = max((role.token for role in self.tables.roles.values()), default=0)
                base = 2**32 + max(base, highest - server.floor)
            self.tables.confirmed = present._replace(incarnation=server.incarnation, base=base, place=server.place)
        return messages.Done()

    def _ripen(self, request: messages.Ripen) -> messages.Done:
        present, seen = self.tables.confirmed, request.seen
        if present and (present.max_ttl, present.limits, present.incarnation) == (
            seen.max_ttl,
            seen.limits,
            seen.incarnation,
        ):
            self.tables.confirmed = present._replace(ripe_ttl=present.max_ttl)
        return messages.Done()

    def _leaders(self, request: messages.Leaders) -> messages.LeadersAre:
        tables, leaders = self.tables, []
        for name in request.roles:
            if name in tables.roles:
                token, holder = tables.roles[name].token, tables.roles[name].holder
                living = holder if tables.lives(holder) else None
                leaders.append(messages.Leader(name, token, living, tables.members[living].name if living else None))
        return messages.LeadersAre(tuple(leaders))

    def _tidy(self, request: messages.Tidy) -> messages.Done:  # noqa: ARG002
        """Candidacies of ended members go; old members and terms are kept here (nothing is decided by them)."""
        tables = self.tables
        ended = {id_ for id_, row in tables.members.items() if row.ended_at is not None}
        tables.candidates = {pair for pair in tables.candidates if pair[1] not in ended}
        return messages.Done()

    # The watch lane

    def roster(self, request: messages.Look) -> tuple[list[tuple[Any, ...]], bool]:
        """What a look reads first: the rows. The sentinels come after, maybe a moment later."""
        tables, me = self.tables, request.member_id
        around = lambda id_: (id_ < me, id_)  # noqa: E731
        ring = sorted((id_ for id_ in tables.members if tables.lives(id_) and id_ != me), key=around, reverse=True)
        holders = {tables.roles[name].holder for name in request.roles if name in tables.roles}.difference({None, me})
        nearest = sorted((str(id_) for id_ in holders), key=around, reverse=True)[:8]
        watched = sorted({*ring[: request.reach], *filter(tables.lives, nearest)})
        held = {role.holder for role in tables.roles.values()}
        rows = [
            (id_, row.ttl, row.renewals, row.key, row.epoch, row.server_start, id_ in held)
            for id_, row in ((id_, tables.members[id_]) for id_ in watched)
        ]
        vacancy = any(
            role.holder is None or (role.holder in tables.members and not tables.lives(role.holder))
            for name, role in tables.roles.items()
            if (name, me) in tables.candidates
        )
        requested = any(role.holder == me and role.request_token == role.token for role in tables.roles.values())
        return rows, vacancy or requested

    def sightings(self, rows: Sequence[tuple[Any, ...]]) -> tuple[Sighting, ...]:
        standing = self.sentinel.standing([row[3] for row in rows if row[3] is not None])
        return tuple(Sighting(*row[:6], row[3] in standing, holds=row[6]) for row in rows)
