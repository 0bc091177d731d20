"""One node's decisions, without I/O, clock or thread: ``now`` is passed in, and randomness comes from a seed.

One object is one node. Its two lanes (see ``messages``) call :meth:`~NodeProtocol.control` and
:meth:`~NodeProtocol.watch` for their next request, run it, and hand the outcome to ``answer`` or ``fail``
(``answer_watch`` or ``fail_watch``). The keeper calls :meth:`~NodeProtocol.expire` when
:meth:`~NodeProtocol.deadline` is reached. Events for the application are collected in ``news``.

The package's docstring explains the theory. The parts are ``membership`` (phase and trust), ``confirmation`` (a
promoted server), ``roles``, ``watch_lane`` with ``evidence``, and ``leaders``.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from tenure.core import messages
from tenure.core.backoff import Backoff, Throttle
from tenure.core.confirmation import Confirmation
from tenure.core.evidence import TURN_S
from tenure.core.leaders import ObservedLeaders
from tenure.core.membership import ControlConnection, Membership, Phase, PhaseEvent, random_uuid
from tenure.core.options import ProtocolOptions
from tenure.core.roles import Roles
from tenure.core.timing import LONG_AGO, NEVER, RETRY_S
from tenure.core.watch_lane import WatchLane
from tenure.events import EndReason, Event, Resumed, Suspended

TIDY_EVERY_S = 3600.0
LEAVE_WITHIN_S = 2.0
"""How long a node that leaves without a connection tries to open one."""
LONGEST_PAUSE_S = 1.0


class NodeProtocol:
    """One node's decisions. Not thread-safe: the caller holds a lock around every call."""

    def __init__(self, settings: ProtocolOptions, seed: int) -> None:
        """Start with no connection and no membership; ``seed`` is the only source of randomness."""
        self.settings = settings
        self.news: list[Event] = []
        self.roles = Roles(settings.ttl, self.news)
        self.generation = 0
        """Counts how often all terms were lost at once: trust in one generation says nothing about the next."""
        self.stop_within = 0.0
        """Seconds of trust kept back for stopping what runs under the terms: terms end that much earlier."""
        self._chance = random.Random(seed)  # noqa: S311 - ids need to be unique, not secret
        self._membership = Membership(settings.ttl, settings.renew_every)
        self._confirmation = Confirmation()
        self._connection = ControlConnection(self._backoff(settings.ttl / 20), settings.sentinels)
        self._retry = self._backoff(LONGEST_PAUSE_S)
        self._watch = WatchLane(self._backoff(LONGEST_PAUSE_S))
        self._leaders, self._vacancies = ObservedLeaders(), Throttle()
        self._tidy_at, self._leave_by = LONG_AGO, NEVER

    def _backoff(self, longest_s: float) -> Backoff:
        return Backoff(RETRY_S, min(LONGEST_PAUSE_S, longest_s), self._chance)

    def reseed(self, seed: int) -> None:
        """Seed the random numbers again, before the first one is drawn."""
        self._chance.seed(seed)

    # What the application wants --------------------------------------------------------------------------------

    def stand(self, role: str) -> None:
        """Become a candidate for ``role``, and look at once whether the role's holder lives."""
        if self.roles.stand(role):
            self._watch.look_at_once = True

    def withdraw(self, role: str, now: float) -> None:
        """Stop standing for ``role``; a term that is held is resigned."""
        self.expire(now)
        self.roles.withdraw(role, now)

    def resign(self, role: str, now: float, to: str | None = None) -> None:
        """Give up the term of ``role``, if it is held; reserve the role for the member ``to`` if one is named."""
        self.expire(now)
        self.roles.resign(role, now, to)

    def leave(self, now: float) -> None:
        """Give up every term and end the membership."""
        self.expire(now)
        self._lose_all(EndReason.LEFT)
        self._leave_by = now + LEAVE_WITHIN_S
        self._membership.step(PhaseEvent.LEAVE)

    def observe(self, role: str) -> None:
        """Report changes of ``role``'s leader from now on."""
        self._leaders.observe(role)

    # What the engine reads -------------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        """The current phase of the membership."""
        return self._membership.phase

    @property
    def member_id(self) -> str | None:
        """The current membership's id; None while there is none."""
        return self._membership.member.id if self._membership.row else None

    @property
    def ttl(self) -> float:
        """The current membership's TTL; before the node has joined, the configured TTL."""
        return self._membership.ttl

    @property
    def most_kept_back(self) -> float:
        """The most seconds of trust that can be kept back: with more, one lost renewal would end the terms."""
        return self._membership.most_kept_back

    @property
    def trusted_until(self) -> float:
        """Until when the terms held may be trusted; long ago while in doubt."""
        return self._membership.trusted_until

    @property
    def election_decided(self) -> bool:
        """Whether the elections are decided for now: dead members were ended, and vacant roles tried for."""
        return self._membership.row is not None and self._watch.election_decided and not self.roles.untried

    def deadline(self) -> float:
        """Return when :meth:`expire` must be called next."""
        return self._membership.deadline

    def expire(self, now: float) -> bool:
        """Drop every term if trust has run out; True if it ran out just now."""
        lapsed = self._membership.expire(now)
        if lapsed:
            self._lose_all(EndReason.LAPSED)
        return lapsed

    # The control lane ------------------------------------------------------------------------------------------

    def control(self, now: float) -> messages.ControlRequest | float:
        """Return the next request of the control lane, or when to ask again."""
        self.expire(now)
        connection, membership = self._connection, self._membership
        connection.sent = now
        if self.phase is Phase.LEAVING and not (membership.row and (connection.is_open or now < self._leave_by)):
            membership.step(PhaseEvent.LEFT)
        if self.phase is Phase.GONE:
            return NEVER
        if not connection.is_open:
            return messages.Open() if now >= connection.reopen.at else min(connection.reopen.at, self._leave_by)
        if self.phase is Phase.LEAVING:
            return messages.Leave(membership.member.id, self.roles.given_up)
        if self.phase is Phase.NONE:
            # Joining ends the previous membership and so frees its roles: the work under them must have ended.
            due = NEVER if self.roles.held_for_work else self._retry.at
            return self._join() if now >= due else due
        if self.phase is Phase.RESUMING:
            return self._resume() if now >= self._retry.at else self._retry.at
        return self._work(now)

    def _work(self, now: float) -> messages.ControlRequest | float:
        """Return the first request that is due. Renewal comes first, so nothing starves it (R0)."""
        me, retry = self._membership.member.id, self._retry.at
        roles, confirmation, leaders = self.roles, self._confirmation, self._leaders
        server, confirmed = confirmation.server, confirmation.confirmed
        acquire_at = retry if confirmation.trusted else NEVER
        acquire = partial(roles.acquire_request, me, self.settings.name, confirmation.floor)
        # A role with a lock is taken lock first (R21), and no role is taken on a server that is not trusted yet.
        may_succeed = confirmation.trusted and not roles.bound
        succession = messages.Succession(self.settings.name, confirmation.floor) if may_succeed else None
        requests: tuple[tuple[float, Callable[[], messages.ControlRequest]], ...] = (
            (self._membership.renew_at, lambda: roles.renew_request(me, now)),
            (retry if self._watch.urgent else NEVER, lambda: self._watch.urgent_request(me, server.line, succession)),
            (retry if roles.unregistered or roles.withdrawn else NEVER, lambda: roles.stand_request(me)),
            (max(retry, roles.vacate_at), lambda: roles.vacate_request(me)),
            (max(retry, confirmation.confirm_at), lambda: messages.Confirm(confirmed, server)),
            (max(retry, confirmation.ripe_at), lambda: messages.Ripen(confirmed)),
            (NEVER if confirmation.trusted else max(retry, roles.claim_at), partial(acquire, claim=True)),
            (acquire_at if roles.wanted else NEVER, acquire),
            (max(acquire_at, roles.busy_until) if roles.busy else NEVER, acquire),
            # Members that held nothing come after the roles that are vacant now.
            (retry if self._watch.verdicts else NEVER, lambda: self._watch.end_request(me, server.line)),
            (max(retry, leaders.ask_at), leaders.request),
            (self._tidy_at, messages.Tidy),
        )
        for due, request in requests:
            if now >= due:
                return request()
        return min(due for due, _ in requests)

    def answer(self, request: messages.ControlRequest, answer: messages.ControlReply, now: float) -> None:
        """Process the answer to a request of the control lane, received at ``now``."""
        # Before anything else: an answer that comes after the deadline revives nothing.
        self.expire(now)
        if not isinstance(request, messages.Open):
            self._connection.proven = True
            self._retry.worked()
        self._ANSWERED[type(request)](self, request, answer, now)

    def fail(self, request: messages.ControlRequest, now: float, *, lost: bool) -> None:
        """Process a failure; ``lost`` if the connection is gone, so that the outcome is unknown."""
        self.expire(now)
        # The request may have taken effect. Only a renewal that reads all roles shows that.
        self.roles.read_all_at = LONG_AGO
        if isinstance(request, messages.Open):
            self._connection.reopen.failed(now)
            return
        if isinstance(request, messages.Join):
            if lost:
                self._membership.orphans.append(request.member.id)
            self._membership.step(PhaseEvent.FAILED)
        if lost:
            self.lost_control(now)
            return
        self._retry.failed(now)
        if isinstance(request, messages.Renew):
            self._membership.renew_at = self._retry.at
        elif isinstance(request, messages.Tidy):
            self._tidy_at = now + TIDY_EVERY_S
        elif isinstance(request, messages.Leave):
            self._membership.step(PhaseEvent.LEFT)

    def server_answered(self, server_start: str, now: float) -> None:
        """Decide a doubt as soon as the server accepts a connection, before the connection is usable.

        If the server was not restarted, only this node's connection was cut. The others then have proof that its
        sentinel has fallen, and the terms are over. What runs under them must end at once: another may take over now.
        """
        self.expire(now)
        row = self._membership.row
        if self.phase is Phase.DOUBT and row and row.member.key is not None and row.server.start == server_start:
            self._over(EndReason.CUT)

    def lost_control(self, now: float) -> None:
        """Process the loss of the control connection, and of the sentinel with it."""
        self.expire(now)
        connection, membership = self._connection, self._membership
        connection.is_open = False
        if connection.proven:
            connection.reopen.worked()
        else:
            connection.reopen.failed(now)
        connection.proven = False
        # The locks of roles end with the connection as well, in strict mode, too (R21).
        watched = self.settings.takeover == "instant" and membership.row and membership.member.key is not None
        if watched or (membership.row and self.roles.locked):
            self._suspend()

    def notified(self, note: str, now: float) -> None:
        """Process a notification: a role is ``vacant``, has ``changed`` hands, or should be resigned.

        If it names a vacant role, the node tries for it at once; the database refuses if the role is not vacant. If it
        names another member, that one acts, and the next look shows whether it did (R24). The work that notifications
        cause is bounded, because any client can send them.
        """
        kind, parties, role = (*note.split(" ", 2), "", "")[:3]
        sender, _, heir = parties.partition(">")
        if sender == self.member_id or (heir and heir != self.member_id):
            return
        if kind == "changed":
            self._leaders.notified(now)
        elif not role or role in self.roles.standing:
            due = self._vacancies.due(now)
            if due > now or not role or not self.roles.hear_vacant(role, now):
                self._membership.renew_by(due)

    # The watch lane --------------------------------------------------------------------------------------------

    def watch(self, now: float) -> messages.WatchRequest | float:
        """Return the next request of the watch lane, or when to ask again."""
        if self.phase in (Phase.LEAVING, Phase.GONE):
            return NEVER
        return self._watch.next(self.member_id, self.ttl, self.roles.busy, self.roles.held_by_others, now)

    def answer_watch(self, request: messages.WatchRequest, answer: messages.WatchReply, now: float) -> None:
        """Process the answer to a request of the watch lane, received at ``now``."""
        self.expire(now)
        if self._watch.answer(request, answer, self.member_id, self.roles.held_by_others, now):
            self._membership.renew_by(now)

    def fail_watch(self, request: messages.WatchRequest, now: float, *, lost: bool) -> None:
        """Process the failure of a request of the watch lane; ``lost`` if its connection is gone."""
        self._watch.fail(request, now, lost=lost)

    def awaits_control(self, now: float) -> bool:
        """Whether the watch lane has found work for the control lane. Most looks find none."""
        return bool(self._watch.verdicts) or now >= self._membership.renew_at

    # The requests ----------------------------------------------------------------------------------------------

    def _join(self) -> messages.Join:
        """Return the request to join under a new id: commits that a promotion lost may contain a row with an old id."""
        self._membership.step(PhaseEvent.JOIN)
        # In strict mode no node acts on a sentinel, so there is none, and the node is never in doubt.
        has_sentinel = self._connection.sentinels and self.settings.takeover == "instant"
        member = messages.Member(
            id=random_uuid(self._chance.getrandbits(128)),
            name=self.settings.name,
            ttl=min(self.settings.ttl, self._confirmation.confirmed.ripe_ttl),
            takeover=self.settings.takeover,
            key=self._chance.getrandbits(31) if has_sentinel else None,
            metadata=self.settings.metadata,
        )
        return messages.Join(member, self._confirmation.server, tuple(self._membership.orphans))

    def _resume(self) -> messages.Resume:
        """Return the request to resume the membership's row, with a new random key and an epoch that was never used."""
        row = self._membership.row
        assert row is not None
        row.epoch += 1
        member = row.member._replace(key=None if row.member.key is None else self._chance.getrandbits(31))
        return messages.Resume(member, self._confirmation.server, row.epoch, row.server.incarnation, self.roles.locked)

    # The answers -----------------------------------------------------------------------------------------------

    def _opened(self, request: messages.Open, opened: messages.Opened, now: float) -> None:
        self._connection.is_open = True
        self._connection.sentinels = self.settings.sentinels and opened.sentinels
        self._confirmation.see(opened.server, opened.confirmed, now)
        self.roles.connected(opened.server, now)
        row = self._membership.row
        if row is None:
            return
        if row.server.line != opened.server.line:
            if not opened.confirmed.lacks_nothing(row.server, opened.server):
                # While this node's trust is valid, no other node leads, whatever the server lacks (R22). A node with a
                # sentinel is in doubt now, and trusts nothing: others may have had proof of its death.
                claims = self._membership.trusts(now) and opened.server.follows(row.server)
                self.roles.claims = set(self.roles.holding) if claims else set()
                self._over(EndReason.REPLACED)
            else:
                self._carry_over()
        elif row.server.file != opened.server.file:
            self._over(EndReason.FILE_REPLACED)
        elif self.phase is not Phase.DOUBT:
            self._membership.renew_by(now)
        elif row.member.key is None or row.server.start != opened.server.start:
            self._membership.step(PhaseEvent.RESTARTED)
        else:
            self._over(EndReason.CUT)

    def _carry_over(self) -> None:
        """Take the row up again on the promoted server, which has it (R18). The fence refuses the terms until then."""
        self._suspend()
        self._membership.step(PhaseEvent.RESTARTED)
        self._watch.verdicts.clear()

    def _joined(self, request: messages.Join, joined: messages.Joined, now: float) -> None:
        membership = self._membership
        if not joined.sentinel:
            membership.step(PhaseEvent.FAILED)
            return
        membership.orphans = [orphan for orphan in membership.orphans if orphan not in request.replaces]
        membership.begin(request.member, request.server)
        membership.extend(self._connection.sent, self.stop_within, self._chance.random())
        self._connection.reopen.longest_s = min(LONGEST_PAUSE_S, self.ttl / 20)
        self.roles.start_over()
        self._watch.look_at_once = True

    def _renewed(self, request: messages.Renew | messages.Resume, standing: messages.Standing, now: float) -> None:
        membership = self._membership
        if membership.row is None:
            return
        if not standing.alive:
            self._over(EndReason.ENDED)
            return
        if isinstance(request, messages.Resume):
            # A candidacy may be missing there: no node checks whether its commit has waited for the replica.
            if membership.row.server.line != request.server.line:
                self.roles.unregistered.update(self.roles.standing)
            membership.row.member, membership.row.server = request.member, request.server
        resumed = membership.step(PhaseEvent.RESUMED)
        membership.extend(self._connection.sent, self.stop_within, self._chance.random())
        if standing.confirmed:
            self._confirmation.see(self._confirmation.server, standing.confirmed, now)
        before = set(self.roles.holding.items())
        if isinstance(request, messages.Renew) and not request.thorough:
            self.roles.requested(standing.held, now)
        else:
            self.roles.reconcile(standing.held, now, trusted=membership.trusts(now))
        # Only terms that were held before: one that was adopted in this very answer was never suspended.
        if resumed:
            self.news.extend(Resumed(*term) for term in self.roles.holding.items() if term in before)
        self.roles.consider(standing.vacant, standing.alone_in, membership.member.id, now)
        self._leaders.ask_at_once()

    def _ended(self, request: messages.End, ended: messages.Ended, now: float) -> None:
        self._watch.ended(request, ended, self._confirmation.server.line)
        self.roles.begin(ended.tokens, now, trusted=self._membership.trusts(now))
        self.roles.consider(ended.vacant, (), self._membership.member.id, now)

    def _stood(self, request: messages.Stand, _: messages.Done, now: float) -> None:
        self.roles.stood(request, now)
        # A renewal shows whether another node stands for the role.
        if self.roles.standing_back(now):
            self._membership.renew_by(now)

    def _acquired(self, request: messages.Acquire, acquired: messages.Acquired, now: float) -> None:
        self.roles.acquired(request, acquired, now, trusted=self._membership.trusts(now))

    def _vacated(self, request: messages.Vacate, vacated: messages.Vacated, now: float) -> None:
        self.roles.vacated(request, now, done=vacated.done)
        # A renewal shows that the role is vacant, if its lock was missing; or whether other nodes stand for it. The
        # second can wait: it would only delay the successor's commit.
        if vacated.done and request.role in self.roles.bound:
            self._membership.renew_by(now)
        elif vacated.done and request.role in self.roles.standing_back(now):
            self._membership.renew_by(now + TURN_S)

    def _ripened(self, request: messages.Ripen, _: messages.Done, now: float) -> None:
        self._confirmation.ripened()
        self._membership.renew_by(now)

    def _tidied(self, request: messages.Tidy, _: messages.Done, now: float) -> None:
        self._tidy_at = now + TIDY_EVERY_S

    _ANSWERED: ClassVar[dict[type, Callable[[Any, Any, Any, float], None]]] = {
        messages.Open: _opened,
        messages.Join: _joined,
        messages.Renew: _renewed,
        messages.Resume: _renewed,
        messages.End: _ended,
        messages.Stand: _stood,
        messages.Acquire: _acquired,
        messages.Vacate: _vacated,
        messages.Confirm: lambda self, _request, _answer, now: self._membership.renew_by(now),
        messages.Ripen: _ripened,
        messages.Leaders: lambda self, _request, answer, _now: self.news.extend(self._leaders.answered(answer)),
        messages.Tidy: _tidied,
        messages.Leave: lambda self, *_: self._membership.step(PhaseEvent.LEFT),
    }

    # What the answers share ------------------------------------------------------------------------------------

    def _suspend(self) -> None:
        was_live = self.phase is Phase.LIVE
        self._membership.step(PhaseEvent.SENTINEL_LOST)
        if was_live and self.phase is Phase.DOUBT:
            self.news.extend(Suspended(role, token) for role, token in self.roles.holding.items())

    def _lose_all(self, reason: EndReason) -> None:
        self.generation += 1
        for role in list(self.roles.holding):
            self.roles.lose(role, reason)

    def _over(self, reason: EndReason) -> None:
        """Drop the membership with all its terms."""
        self._lose_all(reason)
        self._membership.end()
        self._watch.verdicts.clear()
        self.roles.start_over()
