"""The protocol: values in, decisions out. No I/O, no clock, no thread; ``now`` is an argument, chance is a seed.

One object is one node. Its two lanes (see ``asks``) call :meth:`control` and :meth:`watch` for their next job, run it,
and hand the answer to :meth:`answer` or :meth:`fail`; the keeper calls :meth:`expire` when :meth:`deadline` is reached.
What must be told to the application piles up in ``news``.

**Who is the authority.** The member's row in the database. The node believes in it until ``trusted_until``: the moment
just before the last successful renewal was *sent*, plus the TTL less a margin. An answer that never came, or came too
late, extends nothing. A term that lapsed is never taken up again; its role is acquired anew, with a new token.

**The states of a membership** (``TABLE`` below is what the code runs):

    NONE      no row of ours that counts; joins as soon as the connection is open
    JOINING   the row is being inserted
    LIVE      the row stands; terms are trusted until the deadline
    DOUBT     the connection that carries the sentinel broke: nobody can say whether the others have proof of our
              death. Suspended: reads as "not leader", nothing lost or cancelled yet
    RESUMING  the server was restarted, so nobody had proof: sentinel and row are being taken up again
    LEAVING   on the way out
    GONE      left; nothing is asked any more
"""

from __future__ import annotations

import enum
import random
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tenure import asks, timing
from tenure.asks import Confirmed, Member, Server, Verdict
from tenure.candidacy import LONG_AGO, NEVER, RETRY_S, Candidacy
from tenure.events import Event, LeaderChanged, Resumed, Suspended
from tenure.observation import Observation

TIDY_EVERY_S = 3600.0


class Phase(enum.Enum):
    """Where a membership is in its life."""

    NONE = "none"
    JOINING = "joining"
    LIVE = "live"
    DOUBT = "doubt"
    RESUMING = "resuming"
    LEAVING = "leaving"
    GONE = "gone"


TABLE: dict[tuple[Phase, str], Phase] = {
    # (phase, what happened): next phase. Anything not listed changes nothing.
    (Phase.NONE, "join"): Phase.JOINING,
    (Phase.JOINING, "joined"): Phase.LIVE,
    (Phase.JOINING, "failed"): Phase.NONE,
    (Phase.LIVE, "sentinel lost"): Phase.DOUBT,
    (Phase.LIVE, "over"): Phase.NONE,
    (Phase.DOUBT, "restarted"): Phase.RESUMING,
    (Phase.DOUBT, "over"): Phase.NONE,
    (Phase.RESUMING, "resumed"): Phase.LIVE,
    (Phase.RESUMING, "sentinel lost"): Phase.DOUBT,
    (Phase.RESUMING, "over"): Phase.NONE,
    (Phase.NONE, "leave"): Phase.GONE,
    (Phase.JOINING, "leave"): Phase.LEAVING,
    (Phase.LIVE, "leave"): Phase.LEAVING,
    (Phase.DOUBT, "leave"): Phase.LEAVING,
    (Phase.RESUMING, "leave"): Phase.LEAVING,
    (Phase.LEAVING, "left"): Phase.GONE,
}


@dataclass(frozen=True)
class Settings:
    """What a node was told: fixed for its life."""

    name: str
    ttl: float = timing.DEFAULT_TTL_S
    renew_every: float = timing.DEFAULT_TTL_S / 4
    takeover: str = "instant"
    sentinels: bool = True
    """Whether to hold a sentinel at all (hybrid) or to live by the lease alone."""
    metadata: str = "{}"


@dataclass
class _Membership:
    member: Member
    server: Server
    trusted_until: float


@dataclass
class _Backoff:
    """When to try again: at once, then later and later, with jitter so that nodes do not march in step."""

    chance: random.Random
    longest_s: float
    at: float = LONG_AGO
    _failures: int = 0

    def failed(self, now: float) -> None:
        pause = min(self.longest_s, RETRY_S * 2**self._failures)
        self.at = now + pause * (0.5 + 0.5 * self.chance.random())
        self._failures = min(self._failures + 1, 10)

    def worked(self) -> None:
        self.at, self._failures = LONG_AGO, 0


class Protocol:
    """One node's decisions. Not thread-safe: the caller holds a lock around every call."""

    def __init__(self, settings: Settings, seed: int) -> None:
        """Start with no connection and no membership; ``seed`` is all the chance there is."""
        self.settings = settings
        self.phase = Phase.NONE
        self.news: list[Event] = []
        self.roles = Candidacy(settings.ttl, self.news)
        self.generation = 0
        """Counts how often every term was lost at once: trust in one generation says nothing about the next."""
        self.observed: set[str] = set()
        """Roles whose leader somebody here wants to know of."""
        self.stop_within = 0.0
        """Seconds of trust kept back for stopping what runs under the terms: they are lost so much earlier."""

        self._chance = random.Random(seed)  # noqa: S311 - ids need to be unique, not secret
        self._membership: _Membership | None = None
        self._orphans: list[str] = []
        self._lapsed = True

        self._control_open = False
        self._sentinels = settings.sentinels
        self._proven = False
        self._sent = LONG_AGO
        self._reopen = _Backoff(self._chance, min(1.0, settings.ttl / 20))
        self._retry = _Backoff(self._chance, 1.0)
        self._server: Server | None = None
        self._confirmed: Confirmed | None = None
        self._unconfirmed: tuple[str, float] = ("", NEVER)

        self._renew_at = LONG_AGO
        self._tidy_at = LONG_AGO
        self._verdicts: dict[str, Verdict] = {}
        self._leaders: dict[str, tuple[int, str | None]] = {}
        self._leaders_stale = False

        self._watch_open = False
        self._rewatch = _Backoff(self._chance, 1.0)
        self._observation = Observation()
        self._slice_s = timing.SLICE_S
        self._look_at_once = True
        self._vacancy_swept_at = LONG_AGO
        self._evictions: tuple[str, ...] = ()
        self._unblock_at = LONG_AGO

    def reseed(self, seed: int) -> None:
        """Draw chance anew, before anything has been decided by it."""
        self._chance.seed(seed)

    # What the application wants --------------------------------------------------------------------------------

    def stand(self, role: str) -> None:
        """Become a candidate for ``role``."""
        self.roles.stand(role)

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
        self._lose_all("left")
        self._step("leave")

    def observe(self, role: str) -> None:
        """Report changes of ``role``'s leader from now on."""
        self.observed.add(role)
        self._leaders_stale = True

    # What the keeper asks --------------------------------------------------------------------------------------

    @property
    def member_id(self) -> str | None:
        """The present membership's id."""
        return self._membership.member.id if self._membership else None

    @property
    def trusted_until(self) -> float:
        """Until when the terms held may be believed in; long ago while in doubt."""
        if self._membership is None or self.phase in (Phase.DOUBT, Phase.RESUMING):
            return LONG_AGO
        return self._membership.trusted_until

    @property
    def settled(self) -> bool:
        """Whether all that can be learnt at once has been: everybody looked at, the dead ended, vacancies tried for."""
        looked = self._membership is not None and self._watch_open and not self._look_at_once
        open_questions = self._observation.suspects or self._verdicts or self.roles.untried
        return looked and not open_questions

    def deadline(self) -> float:
        """Return when :meth:`expire` must be called next."""
        return NEVER if self._lapsed or self._membership is None else self._membership.trusted_until

    def expire(self, now: float) -> bool:
        """Drop every term if trust has run out; True if it ran out just now."""
        if now < self.deadline():
            return False
        self._lapsed = True
        self._lose_all("lapsed")
        return True

    # The control lane ------------------------------------------------------------------------------------------

    def control(self, now: float) -> asks.ControlAsk | float:
        """Return the next job of the control lane, or when to ask again."""
        self.expire(now)
        self._sent = now
        if self.phase is Phase.LEAVING and not (self._control_open and self._membership):
            self._step("left")
        if self.phase is Phase.GONE:
            return NEVER
        if not self._control_open:
            return asks.Open() if now >= self._reopen.at else self._reopen.at
        if self.phase is Phase.LEAVING:
            return asks.Leave(self._member.id)
        if self.phase is Phase.NONE:
            # Joining ends the row of the membership before; its roles are free then, and their work must have ended.
            due = NEVER if self.roles.working else self._retry.at
            return self._join() if now >= due else due
        if self.phase is Phase.RESUMING:
            if now < self._retry.at:
                return self._retry.at
            return asks.Resume(self._member, self._known_server)
        jobs: tuple[tuple[float, Callable[[float], asks.ControlAsk]], ...] = (
            # (when due, what to ask): the first that is due is done. Renewal comes first, so nothing starves it.
            (self._renew_at, self._renew),
            (self._pending(self._verdicts), self._end),
            (self._pending(self.roles.unregistered or self.roles.withdrawn), self._stand),
            (max(self._pending(True), self.roles.vacate_at), self._vacate),
            (max(self._pending(not self._trusted_server), self._confirm_at), self._confirm),
            (self._pending(self.roles.wanted and self._trusted_server), self._acquire),
            (max(self._pending(self.roles.busy and self._trusted_server), self.roles.busy_until), self._acquire),
            (self._pending(self.observed and self._leaders_stale), self._ask_leaders),
            (self._tidy_at, self._tidy),
        )
        for due, job in jobs:
            if now >= due:
                return job(now)
        return min(due for due, _ in jobs)

    def answer(self, ask: asks.ControlAsk, answer: asks.ControlAnswer, now: float) -> None:
        """Take in the answer to a job of the control lane, received at ``now``."""
        self.expire(now)  # first: an answer that comes after the deadline revives nothing
        handlers: dict[type, Callable[[Any, Any, float], None]] = {
            asks.Open: self._opened,
            asks.Join: self._joined,
            asks.Renew: self._renewed,
            asks.Resume: self._renewed,
            asks.End: self._ended,
            asks.Stand: self._stood,
            asks.Acquire: self._acquired,
            asks.Vacate: self._vacated,
            asks.Confirm: self._confirmation,
            asks.Leaders: self._leaders_are,
            asks.Tidy: self._tidied,
            asks.Leave: self._left,
        }
        if not isinstance(ask, asks.Open):
            self._proven = True
            self._retry.worked()
        handlers[type(ask)](ask, answer, now)

    def fail(self, ask: asks.ControlAsk, now: float, *, lost: bool) -> None:
        """Take in that a job failed; ``lost`` if the connection is gone, and with it the knowledge of the outcome."""
        self.expire(now)
        if isinstance(ask, asks.Open):
            self._reopen.failed(now)
            return
        if isinstance(ask, asks.Join):
            if lost:
                self._orphans.append(ask.member.id)
            self._step("failed")
        if lost:
            self.lost_control(now)
            return
        self._retry.failed(now)
        if isinstance(ask, asks.Renew):
            self._renew_at = self._retry.at
        elif isinstance(ask, asks.Tidy):
            self._tidy_at = now + TIDY_EVERY_S
        elif isinstance(ask, asks.Leave):
            self._step("left")

    def met(self, server_start: str, now: float) -> None:
        """Take in that this server accepts connections, before the new connection is of any use.

        In doubt that decides it: the server was not restarted, so only this node's connection was cut, and the others
        have their proof. What runs under the terms must end now, for they take no longer than the rest takes here.
        """
        self.expire(now)
        if self.phase is Phase.DOUBT and self._membership and self._membership.server.start == server_start:
            self._over("the connection was cut", orphan=True)

    def lost_control(self, now: float) -> None:
        """Take in that the control connection is gone, and the sentinel with it."""
        self.expire(now)
        self._control_open = False
        if self._proven:
            self._reopen.worked()
        else:
            self._reopen.failed(now)
        self._proven = False
        if self._membership and self.settings.takeover == "instant" and self._member.key is not None:
            was_live = self.phase is Phase.LIVE
            self._step("sentinel lost")
            if was_live and self.phase is Phase.DOUBT:
                self.news.extend(Suspended(role, token) for role, token in self.roles.holding.items())

    def notified(self, kind: str, role: str, now: float) -> None:
        """Take in a notification: some role is ``vacant``, ``changed`` hands, or was asked to be resigned.

        Where it names the vacant role, that is tried for at once; what was said wrongly, the database refuses.
        """
        if kind == "changed":
            self._leaders_stale = True
        elif not role or not self.roles.hear_vacant(role, now):
            self._renew_at = min(self._renew_at, now)

    # The watch lane --------------------------------------------------------------------------------------------

    def watch(self, now: float) -> asks.WatchAsk | float:
        """Return the next job of the watch lane, or when to ask again."""
        if self.phase in (Phase.LEAVING, Phase.GONE):
            return NEVER
        if not self._watch_open:
            return asks.OpenWatch() if now >= self._rewatch.at else self._rewatch.at
        if self._membership is None:
            return NEVER
        if now < self._rewatch.at:
            return self._rewatch.at
        if self._observation.suspects:
            return asks.Knock(self._observation.server_start)
        if self._evictions:
            return asks.Evict(self._evictions)
        if self.roles.busy and now >= self._unblock_at:
            return asks.Unblock(tuple(self.roles.busy), self.settings.ttl)
        if self._look_at_once:
            return asks.Look(self._member.id, None, 0.0)
        soonest = 4 * RETRY_S
        seconds = soonest if self.roles.busy else max(soonest, self._observation.silence_due - now)
        return asks.Look(self._member.id, self._observation.predecessor_key, min(seconds, self._slice_s))

    def answer_watch(self, ask: asks.WatchAsk, answer: asks.WatchAnswer, now: float) -> None:
        """Take in the answer to a job of the watch lane, received at ``now``."""
        self.expire(now)
        self._rewatch.worked()
        if isinstance(answer, asks.Watching):
            self._watch_open = True
            self._look_at_once = True
            self._observation = Observation()
        elif isinstance(answer, asks.Looked):
            self._looked(answer, now)
        elif isinstance(answer, asks.Knocked):
            self._judge(self._observation.knocked(accepted=answer.open))
        elif isinstance(ask, asks.Evict):
            self._evictions = ()
        elif isinstance(ask, asks.Unblock):
            self._unblock_at = now + 4 * RETRY_S

    def fail_watch(self, ask: asks.WatchAsk, now: float, *, lost: bool) -> None:
        """Take in that a job of the watch lane failed; ``lost`` if its connection is gone."""
        self._rewatch.failed(now)
        if isinstance(ask, asks.Evict):
            self._evictions = ()  # best effort: the lease is the authority, nobody waits for a zombie
        if lost:
            self._watch_open = False
            self._observation = Observation()

    def _looked(self, looked: asks.Looked, now: float) -> None:
        if self._membership is None:
            return
        self._look_at_once = False
        self._slice_s = looked.slice_s
        self._judge(self._observation.look(looked, self._member.id, now))
        if not looked.vacancy:
            self._vacancy_swept_at = LONG_AGO
        elif now >= self._vacancy_swept_at + 4 * RETRY_S:
            self._vacancy_swept_at = now
            self._renew_at = min(self._renew_at, now)

    def _judge(self, verdicts: Iterable[Verdict]) -> None:
        for verdict in verdicts:
            self._verdicts.setdefault(verdict.member_id, verdict)

    # The jobs --------------------------------------------------------------------------------------------------

    @property
    def _member(self) -> Member:
        assert self._membership is not None
        return self._membership.member

    @property
    def _known_server(self) -> Server:
        assert self._server is not None
        return self._server

    @property
    def _has_sentinel(self) -> bool:
        """Whether others may act on this node's sentinel: then it takes one, and doubts when it loses it."""
        return self._sentinels and self.settings.takeover == "instant"

    @property
    def _trusted_server(self) -> bool:
        """Whether the tables of the server at hand are confirmed."""
        return self._confirmed is not None and self._confirmed.incarnation == self._known_server.incarnation

    @property
    def _confirm_at(self) -> float:
        """When the largest permitted TTL has passed since this node first saw the unconfirmed server."""
        return self._unconfirmed[1] + (timing.silence(self._confirmed.max_ttl) if self._confirmed else 0)

    def _pending(self, work: object) -> float:
        return self._retry.at if work else NEVER

    def _join(self) -> asks.Join:
        """Join under an id that was never used: a row of the same id may survive in the lost tail of a promotion."""
        self._step("join")
        member = Member(
            id=str(uuid.UUID(int=self._chance.getrandbits(128), version=4)),
            name=self.settings.name,
            ttl=self.settings.ttl,
            takeover=self.settings.takeover,
            key=self._chance.getrandbits(31) if self._has_sentinel else None,
            metadata=self.settings.metadata,
        )
        return asks.Join(member, self._known_server, tuple(self._orphans))

    def _renew(self, now: float) -> asks.Renew:
        return asks.Renew(self._member.id, self.roles.standing_back(now))

    def _end(self, now: float) -> asks.End:
        verdicts = [v for v in self._verdicts.values() if v.incarnation == self._known_server.incarnation]
        return asks.End(self._member.id, tuple(verdicts))

    def _stand(self, now: float) -> asks.Stand:
        return self.roles.stand_ask(self._member.id)

    def _vacate(self, now: float) -> asks.Vacate:
        return self.roles.vacate_ask(self._member.id)

    def _confirm(self, now: float) -> asks.Confirm:
        assert self._confirmed is not None
        return asks.Confirm(self._confirmed.incarnation, self._known_server)

    def _acquire(self, now: float) -> asks.Acquire:
        assert self._confirmed is not None
        floor = self._confirmed.base + (self._known_server.timeline - 1) * 2**40
        return self.roles.acquire_ask(self._member.id, self.settings.name, floor)

    def _ask_leaders(self, now: float) -> asks.Leaders:
        return asks.Leaders(tuple(sorted(self.observed)))

    def _tidy(self, now: float) -> asks.Tidy:
        return asks.Tidy()

    # The answers -----------------------------------------------------------------------------------------------

    def _opened(self, ask: asks.Open, opened: asks.Opened, now: float) -> None:
        self._control_open = True
        self._sentinels = self.settings.sentinels and opened.sentinels
        self._server = opened.server
        self._see_confirmed(opened.confirmed, now)
        if self._membership is None:
            return
        if self._membership.server.incarnation != opened.server.incarnation:
            self._over("the server was replaced", orphan=True)
        elif self.phase is not Phase.DOUBT:
            self._renew_at = now
        elif self._membership.server.start != opened.server.start:
            self._step("restarted")
        else:
            self._over("the connection was cut", orphan=True)

    def _joined(self, ask: asks.Join, joined: asks.Joined, now: float) -> None:
        if not joined.sentinel:
            self._step("failed")
            return
        self._orphans = [orphan for orphan in self._orphans if orphan not in ask.replaces]
        self._membership = _Membership(ask.member, ask.server, LONG_AGO)
        self._extend()
        self._step("joined")
        self.roles.start_over()
        self._look_at_once = True

    def _renewed(self, ask: asks.Renew | asks.Resume, standing: asks.Standing, now: float) -> None:
        if self._membership is None:
            return
        if not standing.alive:
            self._over("the membership was ended", orphan=True)
            return
        if isinstance(ask, asks.Resume):
            self._membership.server = ask.server
        resumed = self._step("resumed")
        self._extend()
        if standing.confirmed:
            self._see_confirmed(standing.confirmed, now)
        before = dict(self.roles.holding)
        self.roles.reconcile(standing.held, now, trusted=self._trusted(now))
        if resumed:  # but a term that was adopted just now begins, and was never suspended
            kept = [(role, token) for role, token in self.roles.holding.items() if before.get(role) == token]
            self.news.extend(Resumed(role, token) for role, token in kept)
        self.roles.consider(standing.vacant, standing.alone_in, self._member.id, now)
        self._leaders_stale = True

    def _ended(self, ask: asks.End, ended: asks.Ended, now: float) -> None:
        """Whatever was not ended had moved on: the guard did its work, and the next look starts afresh."""
        self._evictions += ended.ids
        # Only what was asked: a proof that came in while this was under way must not wait for another slice.
        here = self._known_server.incarnation
        left = [v for v in self._verdicts.values() if v not in ask.verdicts and v.incarnation == here]
        self._verdicts = {verdict.member_id: verdict for verdict in left}
        self.roles.consider(ended.vacant, (), self._member.id, now)

    def _stood(self, ask: asks.Stand, _: asks.Done, now: float) -> None:
        self.roles.stood(ask, now)
        if self.roles.standing_back(now):
            self._renew_at = now  # does anybody else stand?

    def _acquired(self, ask: asks.Acquire, acquired: asks.Acquired, now: float) -> None:
        self.roles.acquired(ask, acquired, now, trusted=self._trusted(now))

    def _vacated(self, ask: asks.Vacate, vacated: asks.Vacated, now: float) -> None:
        self.roles.vacated(ask, now, done=vacated.done)
        if vacated.done and ask.role in self.roles.standing_back(now):
            self._renew_at = now  # does anybody else stand?

    def _confirmation(self, ask: asks.Confirm, _: asks.Done, now: float) -> None:
        self._renew_at = now

    def _leaders_are(self, ask: asks.Leaders, answer: asks.LeadersAre, now: float) -> None:
        self._leaders_stale = False
        for leader in answer.leaders:
            holding = (leader.token, leader.member_id)
            if self._leaders.get(leader.role, (0, None)) != holding:
                self._leaders[leader.role] = holding
                self.news.append(LeaderChanged(leader.role, leader.token, leader.member_id, leader.name))

    def _tidied(self, ask: asks.Tidy, _: asks.Done, now: float) -> None:
        self._tidy_at = now + TIDY_EVERY_S

    def _left(self, ask: asks.Leave, _: asks.Done, now: float) -> None:
        self._step("left")

    # The rules that the answers share --------------------------------------------------------------------------

    def _step(self, event: str) -> bool:
        """Go where the table says; True if that is anywhere."""
        after = TABLE.get((self.phase, event))
        if after is None:
            return False
        self.phase = after
        return True

    def _trusted(self, now: float) -> bool:
        return self.phase is Phase.LIVE and now < self.trusted_until

    def _extend(self) -> None:
        """Trust the lease from the moment before the question was sent, not from the answer."""
        assert self._membership is not None
        until = self._sent + timing.trust(self.settings.ttl) - self.stop_within
        self._membership.trusted_until = max(self._membership.trusted_until, until)
        self._lapsed = False
        self._renew_at = self._sent + self.settings.renew_every

    def _see_confirmed(self, confirmed: Confirmed, now: float) -> None:
        """Remember when an unconfirmed server was first seen, across reconnects."""
        self._confirmed = confirmed
        incarnation = self._known_server.incarnation
        if confirmed.incarnation != incarnation and self._unconfirmed[0] != incarnation:
            self._unconfirmed = (incarnation, now)

    def _lose_all(self, reason: str) -> None:
        self.generation += 1
        for role in list(self.roles.holding):
            self.roles.lose(role, reason)

    def _over(self, reason: str, *, orphan: bool = False) -> None:
        """Drop the membership with every term of it; ``orphan`` if its row must still be ended."""
        self._lose_all(reason)
        if orphan:
            self._orphans.append(self._member.id)
        self._membership = None
        self._lapsed = True
        self._verdicts.clear()
        self.roles.start_over()
        self._step("over")
