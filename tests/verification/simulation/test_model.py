"""The simulator's model of the tables gives the same answers as the real SQL, request by request.

Random sequences of requests go through ``ControlStore`` and ``WatchStore`` on in-memory SQLite, and through
``ModelStore``. Answers, notifications, fences and the final tables must be equal. The comparison can fail: it finds
three planted differences.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from tenure.core import messages
from tenure.core.messages import Member, Verdict
from tenure.core.servers import Confirmed, Server
from tests.verification.simulation.databases import ModelDatabase, SqlDatabase
from tests.verification.simulation.model import ModelStore, RoleRow

ROLES = ("alpha", "beta", "gamma")
TTL = 10.0
SLOTS = 4


class Bench:
    """Just enough of a server for one database: locks, identity, and what was told."""

    slice_s = 1.0
    replica_is_away = False

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self.identity = Server("start-1", "system:1", 1)
        self.locks: dict[int, Any] = {}
        self.busy: set[str] = set()
        self.told: list[str] = []
        self.ticks = 0
        self.database = make(self)
        self.lanes = [SimpleNamespace(server=self, pid=pid, started=f"s{pid}") for pid in range(1, SLOTS + 1)]
        self.connect()

    def connect(self) -> None:
        for lane in self.lanes:
            lane.work = self.database.control(lane)
            lane.watch = self.database.watch(lane)

    def lock(self, key: int, connection: Any) -> bool:
        return self.locks.setdefault(key, connection) is connection

    def unlock(self, key: int, connection: Any) -> None:
        if self.locks.get(key) is connection:
            del self.locks[key]

    def terminate(self, connection: Any) -> None:
        for key in [key for key, holder in self.locks.items() if holder is connection]:
            del self.locks[key]

    def locked_roles(self) -> set[str]:
        return self.busy

    def tell(self, payload: str) -> None:
        self.told.append(payload)

    def timestamp(self) -> str:
        self.ticks += 1
        return f"{self.ticks:09d}"

    def knock(self) -> str | None:
        return self.identity.start

    def maybe_fail(self) -> None:
        pass

    def evict(self, member_ids: tuple[str, ...]) -> None:
        pass

    unblock = evict


# An operation is a verb and some small numbers; what they mean depends on what is in the tables when it comes up, so
# that most operations speak of members, roles and tokens that exist, and some of ones that do not.
VERBS = (
    "join", "join", "renew", "renew", "resume", "silence", "death", "stand", "stand", "acquire", "acquire", "acquire",
    "vacate", "vacate", "confirm", "leaders", "tidy", "leave", "look", "fence", "busy", "request", "restart", "promote",
    "restore", "limit", "open", "ripen",
)  # fmt: skip
OPERATIONS = st.lists(st.tuples(st.sampled_from(VERBS), *[st.integers(0, 11)] * 4), min_size=1, max_size=40)


class Comparison:
    """The same operations on both."""

    def __init__(self, model: type[ModelStore]) -> None:
        self.real = Bench(SqlDatabase)
        self.model = Bench(lambda server: PlantedDatabase(server, model))
        self.ids: list[str] = []
        self.slots: dict[str, int] = {}
        for bench in (self.real, self.model):
            bench.lanes[0].work.open(None)
        for number in range(3):  # so that the first operation already finds members
            self.join(number, number, 1, 0)
            self.stand(number, 6, 0, 0)

    def run(self, operations: list[tuple[Any, ...]]) -> None:
        try:
            for verb, *numbers in operations:
                getattr(self, verb)(*numbers)
                assert sorted(self.real.told) == sorted(self.model.told)
            assert dump_sql(self.real.database) == dump_model(self.model.database)
        finally:
            self.real.database.close()

    def member(self, number: int) -> str:
        """A member that has joined at some time, or an id that no member has."""
        return self.ids[number % len(self.ids)] if self.ids and number < 11 else "nobody"

    def roles(self, number: int) -> tuple[str, ...]:
        return tuple(role for bit, role in enumerate(ROLES) if number + 1 & 1 << bit)

    def row(self, role: str) -> RoleRow:
        return self.model.database.tables.roles.get(role, RoleRow())

    def perform(self, slot: int, request: Any) -> None:
        answers = [normal(bench.lanes[slot % SLOTS].work.perform(request)) for bench in (self.real, self.model)]
        assert answers[0] == answers[1], request

    def join(self, slot: int, kind: int, old: int, _: int) -> None:
        id_ = f"m{len(self.ids)}"
        key = None if kind % 3 == 0 else len(self.ids)
        replaces = (self.member(old),) if old % 4 == 0 else ()
        member = Member(id_, f"name{slot}", TTL, "instant" if key is not None else "strict", key)
        self.ids.append(id_)
        self.slots[id_] = slot % SLOTS
        self.perform(slot, messages.Join(member, self.real.identity, replaces))

    def renew(self, who: int, alone: int, *_: int) -> None:
        id_ = self.member(who)
        self.perform(self.slots.get(id_, 0), messages.Renew(id_, self.roles(alone), thorough=alone % 2 == 0))

    def resume(self, who: int, slot: int, key: int, late: int) -> None:
        id_ = self.member(who)
        row = self.model.database.tables.members.get(id_)
        member = Member(id_, "name", TTL, "instant", 99 + key if key % 3 else row.key if row else None)
        epoch = (row.epoch if row else 0) + (late != 0)
        was = row.line.partition(" ")[0] if row and key < 6 else ""
        self.perform(slot, messages.Resume(member, self.real.identity, epoch, was))

    def silence(self, by: int, who: int, stale: int, _: int) -> None:
        id_ = self.member(who)
        row = self.model.database.tables.members.get(id_)
        count = (row.renewals if row else 0) - stale % 2
        self.perform(by, messages.End(self.member(by), (Verdict(id_, "silence", "system:1", renewals=count),)))

    def death(self, by: int, who: int, stale: int, floor: int) -> None:
        id_ = self.member(who)
        row = self.model.database.tables.members.get(id_)
        epoch, start = (row.epoch, row.server_start) if row else (0, "")
        verdict = Verdict(
            id_, "death", "system:1", epoch=epoch - (stale == 1), server_start="old" if stale == 2 else start
        )
        succession = messages.Succession("name", floor) if floor % 2 else None
        self.perform(by, messages.End(self.member(by), (verdict,), succession))

    def stand(self, who: int, roles: int, withdrawn: int, _: int) -> None:
        self.perform(
            0, messages.Stand(self.member(who), self.roles(roles), self.roles(withdrawn) if withdrawn > 8 else ())
        )

    def acquire(self, who: int, roles: int, floor: int, special: int) -> None:
        unreserved = self.roles(roles) if special == 0 else ()
        claims = {"patient": special == 1, "claim": special == 2}
        request = messages.Acquire(self.member(who), "name", self.roles(roles), floor, unreserved, **claims)
        self.perform(0, request)

    def vacate(self, role: int, heir: int, wrong: int, _: int) -> None:
        name = ROLES[role % 3]
        row = self.row(name)
        request = messages.Vacate(
            row.holder or "nobody", name, row.token + (wrong == 0), self.member(heir) if heir % 2 else None
        )
        self.perform(0, request)

    def confirm(self, right: int, *_: int) -> None:
        present = self.model.database.tables.confirmed
        old = present if right else present._replace(incarnation="elsewhere:1")
        self.perform(0, messages.Confirm(old, self.real.identity))

    def limit(self, seconds: int, *_: int) -> None:
        for bench in (self.real, self.model):
            bench.database.limit_ttl(10.0 + 10 * seconds)

    def open(self, slot: int, ttl: int, *_: int) -> None:
        """A node connects, or `tenure init`; on a new connection, which sees where the tables are now."""
        answers = []
        for bench in (self.real, self.model):
            lane = bench.lanes[slot % SLOTS]
            opened = bench.database.control(lane).open((None, 2.0, 10.0, 30.0, 60.0, 90.0)[ttl % 6])
            answers.append(comparable(opened[1]))
        assert answers[0] == answers[1]

    def ripen(self, stale: int, *_: int) -> None:
        present = self.model.database.tables.confirmed
        self.perform(0, messages.Ripen(present._replace(limits=present.limits - (stale == 0))))

    def leaders(self, roles: int, *_: int) -> None:
        self.perform(0, messages.Leaders(self.roles(roles)))

    def tidy(self, *_: int) -> None:
        self.perform(0, messages.Tidy())

    def leave(self, who: int, *_: int) -> None:
        id_ = self.member(who)
        self.perform(self.slots.get(id_, 0), messages.Leave(id_))

    def look(self, who: int, slot: int, reach: int, roles: int) -> None:
        request, looks = messages.Look(self.member(who), None, 0.0, reach % 3, self.roles(roles)), []
        for bench in (self.real, self.model):
            watch = bench.lanes[slot % SLOTS].watch
            looks.append(normal(bench.database.finish_look(watch, request, bench.database.begin_look(watch, request))))
        assert looks[0] == looks[1]

    def fence(self, role: int, wrong: int, who: int, _: int) -> None:
        row = self.row(ROLES[role % 3])
        holder = self.member(who) if wrong == 1 else row.holder or "nobody"
        term = (ROLES[role % 3], row.token + (wrong == 0), holder)
        assert self.real.database.fenced(*term) == self.model.database.fenced(*term)

    def busy(self, role: int, *_: int) -> None:
        for bench in (self.real, self.model):
            bench.busy ^= {ROLES[role % 3]}

    def request(self, role: int, *_: int) -> None:
        for bench in (self.real, self.model):
            bench.database.request(ROLES[role % 3])

    def restart(self, *_: int) -> None:
        for bench in (self.real, self.model):
            bench.locks.clear()
            bench.identity = bench.identity._replace(start=bench.identity.start + "+")
            bench.connect()

    def promote(self, system: int, *_: int) -> None:
        self.restart()
        for bench in (self.real, self.model):
            timeline = bench.identity.timeline + 1
            name = "other" if system == 0 else bench.identity.incarnation.split(":")[0]
            bench.identity = bench.identity._replace(incarnation=f"{name}:{timeline}", timeline=timeline)
            bench.connect()

    def restore(self, *_: int) -> None:
        for bench in (self.real, self.model):
            bench.identity = bench.identity._replace(place=bench.identity.place + "+")
            bench.connect()


class PlantedDatabase(ModelDatabase):
    """A model database whose store may have a difference planted in it."""

    def __init__(self, server: Any, store: type[ModelStore]) -> None:
        super().__init__(server)
        self.store = store

    def control(self, connection: Any) -> ModelStore:
        made = super().control(connection)
        made.__class__ = self.store
        return made

    watch = control


def normal(answer: Any) -> Any:
    """Answers without the order in which rows happened to come."""
    if isinstance(answer, messages.Standing):  # each has its own clock
        answer = answer._replace(clock_us=None, confirmed=answer.confirmed and comparable(answer.confirmed))
    return type(answer), [sorted(value, key=repr) if type(value) is tuple else value for value in answer]


def comparable(confirmed: Confirmed) -> Confirmed:
    """Without what decides nothing, and what the model does not know."""
    return confirmed._replace(replicated=True)


def dump_sql(database: SqlDatabase) -> Any:
    def rows(text: str) -> list[Any]:
        return sorted(database.sqlite.execute(text).fetchall(), key=repr)

    return [
        rows(
            "select id, renewals, sentinel_epoch, server_start, incarnation || ' ' || place, end_reason "
            "from tenure_members"
        ),
        rows("select name, token, holder, reserved_for, request_token, request_to from tenure_roles"),
        rows("select role, member_id from tenure_candidates"),
        rows("select role, token, member_id, resigned_at is not null from tenure_terms"),
        rows(
            "select incarnation || ' ' || place, base, max_ttl_ms, ripe_ttl_ms, limits, limit_by from tenure_namespaces"
        ),
    ]


def dump_model(database: ModelDatabase) -> Any:
    tables, row = database.tables, database.tables.confirmed
    found = [
        [(i, m.renewals, m.epoch, m.server_start, m.line, m.end_reason) for i, m in tables.members.items()],
        [(n, r.token, r.holder, r.reserved_for, r.request_token, r.request_to) for n, r in tables.roles.items()],
        list(tables.candidates),
        [(role, token, t.member_id, int(t.resigned)) for (role, token), t in tables.terms.items()],
        [(*(row.line, row.base, round(row.max_ttl * 1000), round(row.ripe_ttl * 1000), row.limits), tables.limit_by)],
    ]
    return [sorted(table, key=repr) for table in found]


@settings(max_examples=300, deadline=None, database=None, derandomize=True)
@given(OPERATIONS)
def test_the_model_answers_as_the_sql_does(operations: list[tuple[Any, ...]]) -> None:
    Comparison(ModelStore).run(operations)


class WithoutFloor(ModelStore):
    def _next_token(self, old: int, floor: int) -> int:  # noqa: ARG002
        return old + 1


class WithoutCount(ModelStore):
    def _guarded(self, verdict: Verdict) -> bool:
        return verdict.reason == "silence" or super()._guarded(verdict)


class WithoutReservations(ModelStore):
    def _unreserved(self, role: RoleRow, me: str) -> bool:  # noqa: ARG002
        return True


@pytest.mark.long
@pytest.mark.parametrize("planted", [WithoutFloor, WithoutCount, WithoutReservations])
def test_a_planted_difference_is_found(planted: type[ModelStore]) -> None:
    def differs(operations: list[tuple[Any, ...]]) -> bool:
        try:
            Comparison(planted).run(operations)
        except AssertionError:
            return True
        return False

    found = settings(max_examples=2000, deadline=None, database=None, derandomize=True, phases=[Phase.generate])
    assert find(OPERATIONS, differs, settings=found)
