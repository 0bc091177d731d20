"""The control lane's requests, each as one short transaction.

Locks are taken in this order: the member, then roles by name. The texts in ``statements`` decide on the server; this
module only puts them in order. A request commits as a whole or not at all, and its reply is sent after the commit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from tenure.core import messages, timing
from tenure.core.messages import Held, Vacancy
from tenure.core.servers import Confirmed, Server
from tenure.events import EndReason
from tenure.settings import LOSES_NOTHING
from tenure.store import statements, tables
from tenure.store.dialects import listed
from tenure.store.session import NAMED_ROLES, Failed, Gone, Result, Run, Sentinel, Session, Step
from tenure.store.tidying import tidy

TerminateSilentMember = Callable[[str, str, int | None], None]
"""Called with a namespace, a member's id and its count of renewals, to terminate that member's connections."""


class Identity(NamedTuple):
    """Where a node runs, for operators to read in its member's row."""

    host: str
    pid: int
    version: str


class ControlStore:
    """The tables of one namespace, on the control connection."""

    def __init__(
        self,
        session: Session,
        sentinel: Sentinel,
        namespace: str,
        identity: Identity,
        terminate_silent_member: TerminateSilentMember | None = None,
    ) -> None:
        """Work on an open session; the tables exist.

        ``terminate_silent_member`` ends the connections of a silent member that keeps its own row locked.
        """
        self.session = session
        self.sentinel = sentinel
        self.namespace = namespace
        self.identity = identity
        self._terminate_silent_member = terminate_silent_member
        self._key: int | None = None
        self.watch_backend: tuple[int, str] = (0, "")
        """The watch connection's process. It is written to the member's row, so that others can end the connections."""
        self._handlers: dict[type, Callable[[Any], messages.ControlReply]] = {
            messages.Join: self._join,
            messages.Renew: self._renew,
            messages.Resume: self._resume,
            messages.End: self._end,
            messages.Stand: self._stand,
            messages.Acquire: self._acquire,
            messages.Vacate: self._vacate,
            messages.Confirm: self._confirm,
            messages.Ripen: self._ripen,
            messages.Leaders: self._leaders,
            messages.Tidy: self._tidy,
            messages.Leave: self._leave,
        }

    def perform(self, request: messages.ControlRequest) -> messages.ControlReply:
        """Carry out a request and return the reply; raise ``Gone`` or ``Failed``."""
        try:
            return self._handlers[type(request)](request)
        except Failed as error:
            if self.session.schema.is_missing(error.__cause__):
                raise Gone("the tables were dropped: the node creates them again when it reconnects") from error
            raise

    def open(self, ttl: float | None) -> tuple[Server, Confirmed]:
        """Return which server this is, and on which server the namespace's tables are trusted.

        Create the namespace if it is missing. ``ttl`` is the TTL of a node that will join, and None for a caller that
        will not: it leaves the limit of a new namespace to the first node (R16).
        """
        server = self.session.server()
        limit = timing.DEFAULT_MAX_TTL_S if ttl is None else timing.first_limit(ttl)
        limits = {"max_ttl_ms": round(limit * 1000), "ripe_ttl_ms": round(min(limit, timing.DEFAULT_MAX_TTL_S) * 1000)}
        add = self._step(
            statements.ADD_NAMESPACE,
            incarnation=server.incarnation,
            unconfirmed=server.unconfirmed,
            promoted=int(server.promoted),
            line=server.line,
            limit_by="open" if ttl is None else "nodes",
            **limits,
        )
        steps = [add]
        if ttl is not None:
            steps.append(self._step(statements.SETTLE_MAX_TTL, **limits))
            # A longer TTL needs an operator's word: a mistyped one would make every later promotion wait for it.
            if ttl <= timing.DEFAULT_MAX_TTL_S:
                steps.append(self._step(statements.RAISE_MAX_TTL, ttl_ms=round(ttl * 1000)))
        *_, found = self.session.run(*steps, self._step(statements.CONFIRMED))
        return server, confirmed(found, server)

    def _step(self, text: str, **parameters: object) -> Step:
        return Step(text, {"namespace": self.namespace, **parameters})

    def _notify(self, kind: str, about: str, where: Step | None = None) -> None:
        self.session.notify(self.namespace, f"{kind} {about}", where)

    # Membership ------------------------------------------------------------------------------------------------

    def _join(self, request: messages.Join) -> messages.Joined:
        for orphan in request.replaces:
            self._notify("vacant", orphan, where=self._step(statements.HOLDS, id=orphan))
            self.session.run(self._step(statements.END_SELF, id=orphan, reason="replaced"))
        self.release()
        member = request.member
        if member.key is not None and not self.sentinel.hold(member.key):
            return messages.Joined(sentinel=False)
        self._key = member.key
        self.session.run(self.entry(member, request.server))
        return messages.Joined(sentinel=True)

    def entry(self, member: messages.Member, server: Server) -> Step:
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

    def _renew(self, request: messages.Renew) -> messages.Standing:
        renewal = self._step(statements.RENEW, id=request.member_id, **self._backends())
        return self._standing(renewal, request.member_id, request.alone_in, thorough=request.thorough)

    def _resume(self, request: messages.Resume) -> messages.Standing:
        """Resume a membership. The sentinel must be held here before the row names this server."""
        self.release()
        member = request.member
        if member.key is not None and not self.sentinel.hold(member.key):
            return messages.Standing(alive=False)
        self._key = member.key
        renewal = self._step(
            statements.RESUME,
            id=member.id,
            key=member.key,
            epoch=request.epoch,
            server_start=request.server.start,
            incarnation=request.server.incarnation,
            was=request.was,
            **self._backends(),
        )
        return self._standing(renewal, member.id, (), thorough=True)

    def _standing(
        self, renewal: Step, member_id: str, alone_in: tuple[str, ...], *, thorough: bool
    ) -> messages.Standing:
        """Renew, and read in the same transaction which roles the member holds and which it could take."""
        renewed, held, vacant, contested, found = self.session.run(
            renewal,
            self._step(statements.HELD if thorough else statements.REQUESTED, id=member_id),
            self._step(statements.VACANT if thorough else statements.VACATED, id=member_id),
            self._step(statements.CONTESTED, id=member_id, names=listed(alone_in)),
            self._step(statements.CONFIRMED),
        )
        if renewed.count == 0:
            return messages.Standing(alive=False)
        row = confirmed(found, self.session.server())
        self._check_replicated(row.loses_nothing)
        others_stand = {role for (role,) in contested.rows}
        return messages.Standing(
            alive=True,
            held=tuple(
                Held(role, token, requested == token, to if requested == token else None)
                for role, token, requested, to in held.rows
            ),
            vacant=_vacancies(vacant),
            alone_in=tuple(role for role in alone_in if role not in others_stand),
            confirmed=row,
            clock_us=found.rows[0][-1],
            requests=found.rows[0][-2],
        )

    def _leave(self, request: messages.Leave) -> messages.Done:
        me = request.member_id
        marks = (
            self._step(statements.MARK_RESIGNED, id=me, role=role, token=token) for role, token in request.given_up
        )
        self._unlock_after()
        self.session.notify_successors(
            self.namespace, me, self._step(statements.SUCCESSORS, id=me, reserved_for=None, limit=NAMED_ROLES + 1)
        )
        self.session.run(*marks, self._step(statements.END_SELF, id=me, reason=EndReason.LEFT))
        self.release()
        return messages.Done()

    def _end(self, request: messages.End) -> messages.Ended:
        """End each member in a separate transaction, which changes only its row and reads which roles became vacant.

        The other nodes are notified only if one of these is a role that this node does not stand for: otherwise this
        node acts alone. A member that cannot be ended does not stop the rest: the next look judges it again.
        """
        if request.succession is not None and (succeeded := self._succeed(request, request.succession)) is not None:
            return succeeded
        ended: list[str] = []
        vacant: tuple[Vacancy, ...] = ()
        failure: Failed | None = None
        for verdict in request.verdicts:
            try:
                count, vacancies = self._end_one(verdict, request.member_id)
            except Failed as error:
                failure = error
                continue
            if count:
                ended.append(verdict.member_id)
                vacant = vacancies
        if failure and not ended:
            raise failure
        return messages.Ended(tuple(ended), vacant, {})

    def _succeed(self, request: messages.End, succession: messages.Succession) -> messages.Ended | None:
        """End dead members, and take the roles that they leave, in one transaction (R23); None if a row is locked.

        It waits for no role: one that an open transaction has locked is left for an acquisition of its own, so that the
        end takes effect at once, and the fence refuses new transactions of the dead member.
        """
        me, ids = request.member_id, tuple(verdict.member_id for verdict in request.verdicts)
        try:
            with self.session.transaction() as run:
                promotion, _, *ends, left = run(
                    self._step(statements.PROMOTION),
                    self._step(statements.LOCK_MEMBER, id=me),
                    *map(self._end_step, request.verdicts),
                    self._step(statements.LOCK_LEFT, id=me, names=listed(ids)),
                )
                acquire = messages.Acquire(me, succession.name, (), succession.floor)
                taken = self._take_locked(run, statements.TAKE, acquire, left)
                (vacant,) = run(self._step(statements.VACATED, id=me))
                self._notify("changed", me, where=self._step(statements.HOLDS, id=me))
                for id_ in ids:
                    self._notify("vacant", me, where=self._step(statements.LEFT_OVER, ended=id_, id=me))
        except Failed:
            return None
        self._check_promotion(promotion)
        ended = tuple(id_ for id_, end in zip(ids, ends, strict=True) if end.count)
        return messages.Ended(ended, _vacancies(vacant) if ended else (), dict(taken.rows))

    def _end_one(self, verdict: messages.Verdict, me: str) -> tuple[int, tuple[Vacancy, ...]]:
        try:
            return self._write_end(verdict, me)
        except Failed:
            if verdict.reason != EndReason.SILENCE or self._terminate_silent_member is None:
                raise
            # The member may have stopped inside a transaction that locks its own row, and may hang there for ever.
            self._terminate_silent_member(self.namespace, verdict.member_id, verdict.renewals)
            return self._write_end(verdict, me)

    def _write_end(self, verdict: messages.Verdict, me: str) -> tuple[int, tuple[Vacancy, ...]]:
        self._notify("vacant", me, where=self._step(statements.LEFT_OVER, ended=verdict.member_id, id=me))
        end, vacancies = self.session.run(self._end_step(verdict), self._step(statements.VACANT, id=me))
        return end.count, _vacancies(vacancies)

    def _end_step(self, verdict: messages.Verdict) -> Step:
        text = statements.END_SILENT if verdict.reason == EndReason.SILENCE else statements.END_DEAD
        guard = {"renewals": verdict.renewals, "epoch": verdict.epoch, "server_start": verdict.server_start}
        return self._step(text, id=verdict.member_id, **guard)

    def release(self) -> None:
        """Release the sentinel, if one is held."""
        if self._key is not None:
            self.sentinel.release(self._key)
            self._key = None

    # Roles -----------------------------------------------------------------------------------------------------

    def _stand(self, request: messages.Stand) -> messages.Done:
        steps = []
        if request.withdrawn:
            steps.append(
                self._step(statements.REMOVE_CANDIDACIES, id=request.member_id, names=listed(request.withdrawn))
            )
        if request.roles:
            steps.append(self._step(statements.ADD_ROLES, names=listed(request.roles)))
            steps.append(self._step(statements.ADD_CANDIDACIES, id=request.member_id, names=listed(request.roles)))
        self.session.run(*steps)
        return messages.Done()

    def _acquire(self, request: messages.Acquire) -> messages.Acquired:
        """Take vacant roles.

        Lock, then decide: a later statement sees what was committed before the locks were granted.
        """
        lock = statements.LOCK_PATIENTLY if request.patient else statements.LOCK_FREE
        take = statements.CLAIM if request.claim else statements.TAKE
        with self.session.transaction() as run:
            promotion, present, locked = run(
                self._step(statements.PROMOTION),
                self._step(statements.LOCK_MEMBER, id=request.member_id),
                self._step(lock, names=listed(request.roles)),
            )
            taken = self._take_locked(run, take, request, locked)
            self._notify(
                "changed",
                request.member_id,
                where=self._step(statements.HOLDS_SOME, id=request.member_id, names=listed(request.roles)),
            )
        self._check_promotion(promotion)
        unlocked = set(request.roles).difference(self.session.names(locked)) if present.rows else set()
        return messages.Acquired(dict(taken.rows), busy=self._busy(unlocked, request.member_id))

    def _busy(self, unlocked: set[str], me: str) -> tuple[str, ...]:
        """Return those of the roles that an open transaction keeps from being taken: they are vacant, or held by me.

        A role that a living member holds is not busy: transactions of the leader block no candidate. This is read after
        the commit, and a failure must not hide what was taken: the next look finds the roles.
        """
        if not unlocked:
            return ()
        try:
            vacant, held = self.session.read(self._step(statements.VACANT, id=me), self._step(statements.HELD, id=me))
            mine = {row[0] for row in (*vacant.rows, *held.rows)}
        except Failed:
            return ()
        return tuple(sorted(unlocked & mine))

    def _take_locked(self, run: Run, text: str, request: messages.Acquire, locked: Result) -> Result:
        """Take those of the locked roles that are vacant: nothing can change them meanwhile."""
        mine: dict[str, Any] = {"id": request.member_id, "locked": self.session.locked(locked)}
        _, _, taken = run(
            self._step(text, floor=request.floor, unreserved=listed(request.unreserved), **mine),
            self._step(statements.RECORD, name=request.name, **mine),
            self._step(statements.TAKEN, **mine),
        )
        return taken

    def _check_promotion(self, promotion: Result) -> None:
        self._check_replicated(promotion.rows[0][0] == LOSES_NOTHING if promotion.rows else False)

    def _check_replicated(self, loses_nothing: bool) -> None:
        """Raise ``Failed`` if the commit should be on a replica, and its wait was cancelled (R17)."""
        if loses_nothing and self.session.unreplicated:
            raise Failed("the wait for the replica was cancelled: the commit does not count before the next one")

    def _vacate(self, request: messages.Vacate) -> messages.Vacated:
        """Vacate the role. If fenced transactions are open, only mark the term, so that no new one begins."""
        term: dict[str, Any] = {"id": request.member_id, "role": request.role, "token": request.token}
        reserved: dict[str, Any] = {"reserved_for": request.reserved_for}
        with self.session.transaction() as run:
            _, locked = run(
                self._step(statements.MARK_RESIGNED, **term),
                self._step(statements.LOCK_FREE, names=listed((request.role,))),
            )
            (vacated,) = run(self._step(statements.VACATE, locked=self.session.locked(locked), **reserved, **term))
            self._unlock_after(request)
            successor = self._step(statements.SUCCESSOR, **reserved, **term)
            self.session.notify_successors(self.namespace, request.member_id, successor)
        if vacated.count:
            return messages.Vacated(done=True)
        # Either an open transaction has locked the role, or this member does not hold it any more.
        (mine,) = self.session.read(self._step(statements.MINE, **term))
        return messages.Vacated(done=not mine.rows)

    def _unlock_after(self, vacate: messages.Vacate | None = None) -> None:
        """Release the vacated role's lock, or all locks, after the commit and before others are notified (R21)."""

    # The namespace ---------------------------------------------------------------------------------------------

    def _confirm(self, request: messages.Confirm) -> messages.Done:
        """Trust this server from now on. The caller has waited for the longest lease that ``old`` permits."""
        old, server = request.old, request.server
        same_system = old.incarnation.split(":")[0] == server.incarnation.split(":")[0]
        waited = old.longest_lease >= timing.DEFAULT_MAX_TTL_S and not old.lacks_nothing(old, server)
        confirm = self._step(
            statements.CONFIRM,
            old=old.incarnation,
            old_place=old.place,
            incarnation=server.incarnation,
            place=server.place,
            same_tokens=int(same_system and old.place == server.place),
            above=server.floor,
            waited_on=server.line if waited else None,
        )
        self.session.run(confirm)
        return messages.Done()

    def _ripen(self, request: messages.Ripen) -> messages.Done:
        seen = request.seen
        limit = {"max_ttl_ms": round(seen.max_ttl * 1000), "limits": seen.limits}
        self.session.run(self._step(statements.RIPEN, incarnation=seen.incarnation, **limit))
        return messages.Done()

    def _leaders(self, request: messages.Leaders) -> messages.LeadersAre:
        self.session.listen(self.namespace, "changed")
        (leaders,) = self.session.read(self._step(statements.LEADERS, names=listed(request.roles)))
        return messages.LeadersAre(tuple(messages.Leader(*row) for row in leaders.rows))

    def _tidy(self, request: messages.Tidy) -> messages.Done:
        tidy(self.session, self.namespace)
        (live,) = self.session.read(self._step(statements.LIVE_KEYS))
        self.sentinel.sweep({key for (key,) in live.rows})
        return messages.Done()

    def _backends(self) -> dict[str, Any]:
        names = ("control_pid", "control_start", "watch_pid", "watch_start")
        return dict(zip(names, (self.session.pid, self.session.started, *self.watch_backend), strict=True))


def confirmed(result: Result, server: Server) -> Confirmed:
    """Return the contents of a namespace's row; raise ``Gone`` if this connection cannot work with them."""
    if not result.rows:
        raise Gone("the namespace was deleted: the node creates it again when it reconnects")
    incarnation, base, max_ttl_ms, ripe_ttl_ms, limits, place, here, oldest, promotion, standbys, *_ = result.rows[0]
    if here != server.place:
        raise Gone("the tables were replaced by others of the same name while the node was connected")
    if (oldest or 0) > tables.MIGRATIONS[-1].version:
        raise Gone("a newer release has changed the tables so that this one cannot work with them: upgrade Tenure here")
    loses_nothing = promotion == LOSES_NOTHING
    limit = (max_ttl_ms / 1000, ripe_ttl_ms / 1000, limits)
    return Confirmed(incarnation, base, *limit, place, loses_nothing, replicated=bool(standbys))


def _vacancies(result: Result) -> tuple[Vacancy, ...]:
    return tuple(Vacancy(*row) for row in result.rows)
