"""The control lane's work: each ask of the protocol as one short transaction.

Lock order is the member, then roles by name. What the texts in ``statements`` decide, they decide on the server; this
file only puts them in order. A job either commits whole or not at all, and its outcome is reported after the commit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tenure import asks, schema, statements
from tenure.asks import Confirmed, Held, Vacancy
from tenure.dialects import listed
from tenure.session import Failed, Gone, Result, Sentinel, Session, Step

KEPT_MEMBERS = 100
KEPT_TERMS = 100
"""How many ended memberships of a namespace, and terms of a role, are kept for people to read."""


Oust = Callable[[str, str, int | None], None]
"""Terminates the connections of (namespace, member id, count of renewals), where a server can do that."""


@dataclass(frozen=True)
class Identity:
    """Where a node runs, for people to read in its member's row."""

    host: str
    pid: int
    version: str


class Store:
    """The tables of one namespace, on the control connection."""

    def __init__(
        self, session: Session, sentinel: Sentinel, namespace: str, identity: Identity, oust: Oust | None = None
    ) -> None:
        """Work on an open session; the tables exist. ``oust`` cuts off a silent member that locks its own row."""
        self.session = session
        self.sentinel = sentinel
        self.namespace = namespace
        self.identity = identity
        self._oust = oust
        self._key: int | None = None
        self.watch_backend: tuple[int, str] = (0, "")
        """The watch connection's process, written down so that a zombie's connections can be told from others'."""
        self._jobs: dict[type, Callable[[Any], asks.ControlAnswer]] = {
            asks.Join: self._join,
            asks.Renew: self._renew,
            asks.Resume: self._resume,
            asks.End: self._end,
            asks.Stand: self._stand,
            asks.Acquire: self._acquire,
            asks.Vacate: self._vacate,
            asks.Confirm: self._confirm,
            asks.Leaders: self._leaders,
            asks.Tidy: self._tidy,
            asks.Leave: self._leave,
        }

    def perform(self, ask: asks.ControlAsk) -> asks.ControlAnswer:
        """Do what is asked and return the answer; raise ``Gone`` or ``Failed``."""
        return self._jobs[type(ask)](ask)

    def open(self, default_max_ttl: float) -> tuple[asks.Server, Confirmed]:
        """Return which server this is, and which one the namespace's tables are trusted on."""
        server = self.session.server()
        _, confirmed = self.session.run(
            self._step(
                statements.ADD_NAMESPACE, incarnation=server.incarnation, max_ttl_ms=round(default_max_ttl * 1000)
            ),
            self._step(statements.CONFIRMED),
        )
        return server, _confirmed(confirmed)

    def _step(self, text: str, **parameters: object) -> Step:
        return Step(text, {"namespace": self.namespace, **parameters})

    def _telling(self, kind: str, about: str, where: str = "", **parameters: object) -> tuple[Step, ...]:
        """Return the steps that tell the other nodes when the transaction commits (none where they have to look)."""
        step = self.session.notify(self.namespace, f"{kind} {about}")
        if step is None:
            return ()
        condition = f" where exists ({where})" if where else ""
        return (Step(step.text + condition, {**step.parameters, **parameters}),)

    # Membership ------------------------------------------------------------------------------------------------

    def _join(self, ask: asks.Join) -> asks.Joined:
        for orphan in ask.replaces:
            end = self._step(statements.END_SELF, id=orphan, reason="replaced")
            self.session.run(end, *self._telling("vacant", orphan))
        self.release()
        member = ask.member
        if member.key is not None and not self.sentinel.hold(member.key):
            return asks.Joined(sentinel=False)
        self._key = member.key
        self.session.run(self.entry(member, ask.server), *self._rehearsal(member.id))
        return asks.Joined(sentinel=True)

    def _rehearsal(self, member_id: str) -> tuple[Step, ...]:
        """Return the steps of a takeover and of a hand-over, of nothing: PostgreSQL is quicker the second time."""
        if self.session.dialect.name != "postgresql":
            return ()
        nobody: dict[str, Any] = {"id": "", "role": "", "token": 0, "reserved_for": None}
        nobody |= {"renewals": 0, "epoch": 0, "server_start": ""}
        nothing: dict[str, Any] = {"id": member_id, "name": "", "floor": 0, "unreserved": "[]", "names": listed(())}
        takeover = (statements.LOCK_MEMBER, statements.LOCK_FREE, statements.TAKE, statements.RECORD, statements.TAKEN)
        ends = (statements.END_DEAD, statements.MARK_RESIGNED, statements.MINE, statements.VACATE)
        return (*(self._step(text, **nothing) for text in takeover), *(self._step(text, **nobody) for text in ends))

    def entry(self, member: asks.Member, server: asks.Server) -> Step:
        """Return the step that inserts a member's row."""
        return self._step(
            statements.JOIN,
            id=member.id,
            name=member.name,
            host=self.identity.host,
            pid=self.identity.pid,
            version=self.identity.version,
            metadata=member.metadata,
            takeover=member.takeover,
            ttl_ms=round(member.ttl * 1000),
            key=member.key,
            server_start=server.start,
            incarnation=server.incarnation,
            **self._backends(),
        )

    def _renew(self, ask: asks.Renew) -> asks.Standing:
        renewal = self._step(statements.RENEW, id=ask.member_id, **self._backends())
        return self._standing(renewal, ask.member_id, ask.alone_in)

    def _resume(self, ask: asks.Resume) -> asks.Standing:
        """Take the sentinel first: the row must not name this server while nobody holds it here."""
        member = ask.member
        if member.key is not None and not self.sentinel.retake(member.key):
            return asks.Standing(alive=False)
        self._key = member.key
        renewal = self._step(
            statements.RESUME,
            id=member.id,
            server_start=ask.server.start,
            incarnation=ask.server.incarnation,
            **self._backends(),
        )
        return self._standing(renewal, member.id, ())

    def _standing(self, renewal: Step, member_id: str, alone_in: tuple[str, ...]) -> asks.Standing:
        """Renew, and read in the same transaction what the member holds and could hold."""
        renewed, held, vacant, contested, confirmed = self.session.run(
            renewal,
            self._step(statements.HELD, id=member_id),
            self._step(statements.VACANT, id=member_id),
            self._step(statements.CONTESTED, id=member_id, names=listed(alone_in)),
            self._step(statements.CONFIRMED),
        )
        if renewed.count == 0:
            return asks.Standing(alive=False)
        others_stand = {role for (role,) in contested.rows}
        return asks.Standing(
            alive=True,
            held=tuple(
                Held(role, token, request == token, to if request == token else None)
                for role, token, request, to in held.rows
            ),
            vacant=_vacancies(vacant),
            alone_in=tuple(role for role in alone_in if role not in others_stand),
            confirmed=_confirmed(confirmed),
        )

    def _leave(self, ask: asks.Leave) -> asks.Done:
        end = self._step(statements.END_SELF, id=ask.member_id, reason="left")
        self.session.run(end, *self._telling("vacant", ask.member_id))
        self.release()
        return asks.Done()

    def _end(self, ask: asks.End) -> asks.Ended:
        """End each member in a transaction of its own that changes only its row; see there what became vacant.

        Nobody else is told, so that only this node acts, unless a role is left over that this node does not stand for.
        One that cannot be ended does not keep the others from it: the next look judges it again.
        """
        ended: list[str] = []
        vacant: tuple[Vacancy, ...] = ()
        failure: Failed | None = None
        for verdict in ask.verdicts:
            try:
                count, vacancies = self._end_one(verdict, ask.member_id)
            except Failed as error:
                failure = error
                continue
            if count:
                ended.append(verdict.member_id)
                vacant = vacancies
        if failure and not ended:
            raise failure
        return asks.Ended(tuple(ended), vacant)

    def _end_one(self, verdict: asks.Verdict, me: str) -> tuple[int, tuple[Vacancy, ...]]:
        try:
            return self._write_end(verdict, me)
        except Failed:
            if verdict.reason != "silence" or self._oust is None:
                raise
            # It may have stopped inside a transaction of its own that locks its row, and may stand there for ever.
            self._oust(self.namespace, verdict.member_id, verdict.renewals)
            return self._write_end(verdict, me)

    def _write_end(self, verdict: asks.Verdict, me: str) -> tuple[int, tuple[Vacancy, ...]]:
        text = statements.END_SILENT if verdict.reason == "silence" else statements.END_DEAD
        guard = {"renewals": verdict.renewals, "epoch": verdict.epoch, "server_start": verdict.server_start}
        end, vacancies, *_ = self.session.run(
            self._step(text, id=verdict.member_id, **guard),
            self._step(statements.VACANT, id=me),
            *self._telling("vacant", me, where=statements.LEFT_OVER, ended=verdict.member_id, id=me),
        )
        return end.count, _vacancies(vacancies)

    def release(self) -> None:
        """Let go of the sentinel, if one is held."""
        if self._key is not None:
            self.sentinel.release(self._key)
            self._key = None

    # Roles -----------------------------------------------------------------------------------------------------

    def _stand(self, ask: asks.Stand) -> asks.Done:
        steps = []
        if ask.withdrawn:
            steps.append(self._step(statements.REMOVE_CANDIDACIES, id=ask.member_id, names=listed(ask.withdrawn)))
        if ask.roles:
            steps.append(self._step(statements.ADD_ROLES, names=listed(ask.roles)))
            steps.append(self._step(statements.ADD_CANDIDACIES, id=ask.member_id, names=listed(ask.roles)))
        self.session.run(*steps)
        return asks.Done()

    def _acquire(self, ask: asks.Acquire) -> asks.Acquired:
        """Lock, then decide: the second statement sees what was committed before the locks were granted."""
        lock = statements.LOCK_PATIENTLY if ask.patient else statements.LOCK_FREE
        with self.session.transaction() as run:
            me, free = run(
                self._step(statements.LOCK_MEMBER, id=ask.member_id), self._step(lock, names=listed(ask.roles))
            )
            if not me.rows:
                return asks.Acquired()
            locked = tuple(role for (role,) in free.rows)
            busy = set(ask.roles).difference(locked)
            if busy:  # not where somebody living holds it: a leader's own transactions are in nobody's way
                vacant, held = run(
                    self._step(statements.VACANT, id=ask.member_id), self._step(statements.HELD, id=ask.member_id)
                )
                unheld = {row[0] for row in (*vacant.rows, *held.rows)}
                busy &= unheld
            mine: dict[str, Any] = {"id": ask.member_id, "names": listed(locked)}
            _, _, taken, *_ = run(
                self._step(statements.TAKE, floor=ask.floor, unreserved=listed(ask.unreserved), **mine),
                self._step(statements.RECORD, name=ask.name, **mine),
                self._step(statements.TAKEN, **mine),
                *self._telling("changed", ask.member_id),
            )
        return asks.Acquired(dict(taken.rows), busy=tuple(sorted(busy)))

    def _vacate(self, ask: asks.Vacate) -> asks.Vacated:
        """Vacate, unless fenced transactions are open: then mark the term, so that no new one begins, and try again."""
        term: dict[str, Any] = {"id": ask.member_id, "role": ask.role, "token": ask.token}
        with self.session.transaction() as run:
            _, free, mine = run(
                self._step(statements.MARK_RESIGNED, **term),
                self._step(statements.LOCK_FREE, names=listed((ask.role,))),
                self._step(statements.MINE, **term),
            )
            if mine.rows and not free.rows:
                return asks.Vacated(done=False)
            vacate = self._step(statements.VACATE, reserved_for=ask.reserved_for, **term)
            # A role that is free to all is named: they try for it at once, and need not look first.
            about = ask.member_id if ask.reserved_for else f"{ask.member_id} {ask.role}"
            run(vacate, *self._telling("vacant", about))
        return asks.Vacated(done=True)

    # The namespace ---------------------------------------------------------------------------------------------

    def _confirm(self, ask: asks.Confirm) -> asks.Done:
        same_system = ask.old.split(":")[0] == ask.server.incarnation.split(":")[0]
        self.session.run(
            self._step(
                statements.CONFIRM, old=ask.old, incarnation=ask.server.incarnation, same_system=int(same_system)
            )
        )
        return asks.Done()

    def _leaders(self, ask: asks.Leaders) -> asks.LeadersAre:
        self.session.listen(self.namespace, "changed")
        (leaders,) = self.session.read(self._step(statements.LEADERS, names=listed(ask.roles)))
        return asks.LeadersAre(tuple(asks.Leader(*row) for row in leaders.rows))

    def _tidy(self, ask: asks.Tidy) -> asks.Done:
        _, last_kept, long = self.session.run(
            self._step(statements.DELETE_CANDIDACIES),
            self._step(statements.LAST_KEPT_END, kept=KEPT_MEMBERS),
            self._step(statements.LONG_HISTORIES, kept=KEPT_TERMS),
        )
        for (before,) in last_kept.rows:
            self.session.run(
                self._step(statements.CLOSE_TERMS, before=before), self._step(statements.DELETE_MEMBERS, before=before)
            )
        for (role,) in long.rows:
            self.session.run(self._step(statements.DELETE_TERMS, role=role, kept=KEPT_TERMS))
        (live,) = self.session.read(self._step(statements.LIVE_KEYS))
        self.sentinel.sweep({key for (key,) in live.rows})
        return asks.Done()

    def _backends(self) -> dict[str, Any]:
        watch_pid, watch_start = self.watch_backend
        return {
            "control_pid": self.session.pid,
            "control_start": self.session.started,
            "watch_pid": watch_pid,
            "watch_start": watch_start,
        }


def _confirmed(result: Result) -> Confirmed:
    if not result.rows:
        raise Gone("somebody has deleted the namespace: it is made anew with the next connection")
    incarnation, base, max_ttl_ms, oldest = result.rows[0]
    if (oldest or 0) > schema.MIGRATIONS[-1].version:
        raise Gone("a newer release has changed the tables so that this one cannot work with them: upgrade Tenure here")
    return Confirmed(incarnation, base, max_ttl_ms / 1000)


def _vacancies(result: Result) -> tuple[Vacancy, ...]:
    return tuple(Vacancy(*row) for row in result.rows)
