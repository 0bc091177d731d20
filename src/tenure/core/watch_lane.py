"""The watch lane: what to ask next, and what its answers prove about the other members. Pure; no I/O, no clock."""

from __future__ import annotations

from collections.abc import Sequence

from tenure.core import messages, timing
from tenure.core.backoff import Backoff
from tenure.core.evidence import TURN_S, Evidence
from tenure.core.roles import LOOKED_AT
from tenure.events import EndReason

SOON_S = 4 * timing.RETRY_S
"""The least time before the lane repeats a request."""


class WatchLane:
    """Decides what the watch lane asks next, and which members are to be ended."""

    def __init__(self, retry: Backoff) -> None:
        self.look_at_once = True
        self.verdicts: dict[str, messages.Verdict] = {}
        """Members to end, by id. The control lane ends them."""
        self.evictions: tuple[str, ...] = ()
        """Members that were ended. Their connections are still to be terminated."""
        self._retry = retry
        self._open = False
        self._evidence = Evidence()
        self._slice_s = timing.SLICE_S
        self._sweep_at = timing.NEVER
        """When to try for a role that a look has shown as vacant."""
        self._unblock_at = timing.LONG_AGO
        self._stand_aside_until = timing.LONG_AGO

    @property
    def urgent(self) -> bool:
        """Whether a member is to be ended that holds a role."""
        return any(verdict.urgent for verdict in self.verdicts.values())

    @property
    def election_decided(self) -> bool:
        """Whether the lane has looked at the members that concern it, and no suspicion or verdict is open."""
        return self._open and not (
            self.look_at_once or self._evidence.reach_grew or self._evidence.suspects or self.verdicts
        )

    def next(
        self, me: str | None, ttl: float, busy: Sequence[str], wanted: tuple[str, ...], now: float
    ) -> messages.WatchRequest | float:
        """Return the next request, or when to ask again.

        ``busy`` are roles whose rows are locked, ``wanted`` are roles whose holders to look at.
        """
        if now < self._retry.at:
            return self._retry.at
        if not self._open:
            return messages.OpenWatch()
        if me is None:
            return timing.NEVER
        # A fallen sentinel is only a suspicion until the server has accepted a fresh connection.
        if self._evidence.due:
            return messages.Knock(self._evidence.server_start)
        # The control lane acts on the proof first: two threads of one process would only hinder each other.
        if self.urgent and now < self._stand_aside_until:
            return self._stand_aside_until
        if self.evictions:
            return messages.Evict(self.evictions)
        if busy and now >= self._unblock_at:
            return messages.Unblock(tuple(busy), ttl)
        reach = self._evidence.reach
        if self.look_at_once or self._evidence.reach_grew:
            return messages.Look(me, None, 0.0, reach, wanted)
        seconds = SOON_S if busy else max(SOON_S, self._evidence.silence_due - now)
        seconds = min(seconds, max(0.0, min(self._evidence.next_due, self._sweep_at) - now))
        return messages.Look(me, self._evidence.predecessor_key, min(seconds, self._slice_s), reach, wanted)

    def answer(
        self,
        request: messages.WatchRequest,
        answer: messages.WatchReply,
        me: str | None,
        wanted: tuple[str, ...],
        now: float,
    ) -> bool:
        """Process the answer, received at ``now``; return whether to check for vacant roles now."""
        if isinstance(answer, messages.Watching):
            self._open = True
            self.look_at_once = True
            self._evidence = Evidence(spread=self._retry.drawn())
            return False
        # Not for a new connection: one on which nothing works must not be opened again and again without a pause.
        self._retry.worked()
        if isinstance(request, messages.Look) and isinstance(answer, messages.Looked) and me is not None:
            # A look that was under way when the node joined, or stood for one more role, does not count.
            if request.member_id == me and (len(request.roles) == LOOKED_AT or {*wanted} <= {*request.roles}):
                self.look_at_once = False
            return self._looked(request, answer, me, now)
        if isinstance(answer, messages.Knocked):
            self._judge(self._evidence.knocked(accepted=answer.open), now)
        elif isinstance(request, messages.Evict):
            self.evictions = ()
        elif isinstance(request, messages.Unblock):
            self._unblock_at = now + SOON_S
        return False

    def fail(self, request: messages.WatchRequest, now: float, *, lost: bool) -> None:
        """Process the failure of a request; ``lost`` if the connection is gone."""
        self._retry.failed(now)
        # An eviction is tried once: the lease is the authority, and no node waits for the end of a zombie.
        if isinstance(request, messages.Evict):
            self.evictions = ()
        if lost:
            self._open = False
            self._evidence = Evidence()

    def urgent_request(self, me: str, line: str, succession: messages.Succession | None) -> messages.End:
        """Return which members to end that hold a role; the dead ones first, together with their succession.

        A member that fell silent may be in a transaction that locks its rows, so it is ended by itself.
        """
        urgent = [v for v in self.verdicts.values() if v.line == line and v.urgent]
        dead = tuple(v for v in urgent if v.reason is EndReason.DEATH)
        return messages.End(me, dead, succession) if dead else messages.End(me, tuple(urgent))

    def end_request(self, me: str, line: str) -> messages.End:
        """Return which members to end: all."""
        return messages.End(me, tuple(v for v in self.verdicts.values() if v.line == line))

    def ended(self, request: messages.End, ended: messages.Ended, line: str) -> None:
        """Process the answer to an End request: which members were ended.

        A member that renewed or resumed after its verdict is not ended, because the guard no longer holds; the next
        look examines it anew. Only the verdicts of this request are dropped: a proof that arrived meanwhile must not
        wait for another slice.
        """
        self.evictions += ended.ids
        left = [v for v in self.verdicts.values() if v not in request.verdicts and v.line == line]
        self.verdicts = {verdict.member_id: verdict for verdict in left}

    def _looked(self, request: messages.Look, looked: messages.Looked, me: str, now: float) -> bool:
        self._slice_s = looked.slice_s
        self._judge(self._evidence.look(looked, me, now), now)
        if looked.knocked:
            self._judge(self._evidence.knocked(accepted=True, key=request.wait_for), now)
        if not looked.vacancy:
            self._sweep_at = timing.NEVER
        elif self._sweep_at == timing.NEVER or now >= self._sweep_at:
            self._sweep_at = now + SOON_S
            return True
        return False

    def _judge(self, verdicts: Sequence[messages.Verdict], now: float) -> None:
        for verdict in verdicts:
            self.verdicts.setdefault(verdict.member_id, verdict)
            if verdict.reason is EndReason.DEATH:
                self._stand_aside_until = now + TURN_S
