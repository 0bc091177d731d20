"""This node's membership: which phase it is in, and until when its terms are trusted. Pure; no I/O, no clock.

    NONE      the node has no live row; it joins as soon as the connection is open
    JOINING   the row is being inserted
    LIVE      the row is in the table; terms are trusted until the deadline
    DOUBT     the connection with the sentinel broke, and the node cannot know whether the others have proof of its
              death; its terms are suspended: they read as "not leader", but nothing is lost or cancelled yet
    RESUMING  the server was restarted, so no node had proof; the row is being taken up again with a new sentinel
    LEAVING   the node is closing; for a while it tries to reopen a lost connection, to notify the others
    GONE      the node has left; it sends no more requests

The row in the database is the authority. The node trusts it until ``trusted_until``: the moment just before the last
successful renewal was *sent*, plus the TTL, less a margin (R2). A lost or late answer extends nothing. A term that has
lapsed is never taken up again.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from tenure.core import timing
from tenure.core.backoff import Backoff
from tenure.core.messages import Member
from tenure.core.servers import Server

Phase = enum.Enum("Phase", "NONE JOINING LIVE DOUBT RESUMING LEAVING GONE")
"""The phases of a membership."""
PhaseEvent = enum.Enum("PhaseEvent", "JOIN JOINED FAILED SENTINEL_LOST RESTARTED RESUMED OVER LEAVE LEFT")
"""The events that can move a membership to another phase."""

TABLE: dict[Phase, dict[PhaseEvent, Phase]] = {
    # Phase: what happened, and the next phase. An event that is not listed for a phase changes nothing.
    Phase.NONE: {PhaseEvent.JOIN: Phase.JOINING, PhaseEvent.LEAVE: Phase.GONE},
    Phase.JOINING: {PhaseEvent.JOINED: Phase.LIVE, PhaseEvent.FAILED: Phase.NONE, PhaseEvent.LEAVE: Phase.LEAVING},
    Phase.LIVE: {PhaseEvent.SENTINEL_LOST: Phase.DOUBT, PhaseEvent.OVER: Phase.NONE, PhaseEvent.LEAVE: Phase.LEAVING},
    Phase.DOUBT: {PhaseEvent.RESTARTED: Phase.RESUMING, PhaseEvent.OVER: Phase.NONE, PhaseEvent.LEAVE: Phase.LEAVING},
    Phase.RESUMING: {
        PhaseEvent.RESUMED: Phase.LIVE,
        PhaseEvent.SENTINEL_LOST: Phase.DOUBT,
        PhaseEvent.OVER: Phase.NONE,
        PhaseEvent.LEAVE: Phase.LEAVING,
    },
    Phase.LEAVING: {PhaseEvent.LEFT: Phase.GONE},
    Phase.GONE: {},
}


@dataclass(eq=False, repr=False)
class ControlConnection:
    """The control connection, which holds the member's sentinel."""

    reopen: Backoff
    sentinels: bool
    """Whether a sentinel can be held on it."""
    is_open: bool = False
    proven: bool = False
    """Whether a request has succeeded on it."""
    sent: float = timing.LONG_AGO
    """The moment just before the last request was sent. Trust is counted from it."""


@dataclass(eq=False, repr=False)
class Row:
    """The row of the current membership, as this node wrote it."""

    member: Member
    server: Server
    trusted_until: float = timing.LONG_AGO
    epoch: int = 0
    """Counts the attempts to resume the row."""


class Membership:
    """This node's memberships, one at a time."""

    def __init__(self, ttl: float, renew_every: float) -> None:
        self.phase = Phase.NONE
        self.row: Row | None = None
        self.orphans: list[str] = []
        """Earlier memberships whose rows may still be live. The next join ends them."""
        self.renew_at = timing.LONG_AGO
        self._planned = timing.LONG_AGO
        """When the next renewal is due if nothing calls for an earlier one."""
        self._lapsed = True
        self._ttl = ttl
        self._renew_every = renew_every

    def step(self, event: PhaseEvent) -> bool:
        """Move to the phase that the table names; return whether it is another one. An unknown event is an error."""
        before, self.phase = self.phase, TABLE[self.phase].get(PhaseEvent(event), self.phase)
        return self.phase is not before

    @property
    def member(self) -> Member:
        """The member that this node is now. There must be a membership."""
        assert self.row is not None
        return self.row.member

    @property
    def ttl(self) -> float:
        """The current membership's TTL; before the node has joined, the configured TTL."""
        return self.row.member.ttl if self.row else self._ttl

    @property
    def renew_every(self) -> float:
        """Seconds between two renewals: the configured share of the current TTL."""
        return self._renew_every * self.ttl / self._ttl

    @property
    def most_kept_back(self) -> float:
        """The most seconds of trust that can be kept back: with more, one lost renewal would end the terms."""
        return timing.trust(self.ttl) - 2 * self.renew_every

    @property
    def trusted_until(self) -> float:
        """Until when the terms may be trusted; long ago while in doubt."""
        if self.row is None or self.phase in (Phase.DOUBT, Phase.RESUMING):
            return timing.LONG_AGO
        return self.row.trusted_until

    @property
    def deadline(self) -> float:
        """When trust runs out; NEVER if it has run out already, or if there is no membership."""
        return timing.NEVER if self._lapsed or self.row is None else self.row.trusted_until

    def trusts(self, now: float) -> bool:
        """Whether a term may begin now."""
        return self.phase is Phase.LIVE and now < self.trusted_until

    def begin(self, member: Member, server: Server) -> None:
        """Record the row that was inserted."""
        self.row = Row(member, server)
        self._planned = timing.NEVER
        self.step(PhaseEvent.JOINED)

    def extend(self, sent: float, kept_back: float, chance: float) -> None:
        """Extend trust, counted from ``sent``, the moment before the request was sent, and not from its answer.

        A notification can make every node renew at once, and a deployment can make them join at once. So after an early
        renewal, and after joining, ``chance`` (from 0 to 1) decides when the next one is due: otherwise all of them
        would renew at the same moment from then on.
        """
        assert self.row is not None
        until = sent + timing.trust(self.ttl) - min(kept_back, self.most_kept_back)
        self.row.trusted_until = max(self.row.trusted_until, until)
        self._lapsed = False
        early = sent < self._planned
        self.renew_at = self._planned = sent + self.renew_every * ((1 + chance) / 2 if early else 1)

    def renew_by(self, due: float) -> None:
        """Renew at ``due``, if nothing calls for an earlier renewal."""
        self.renew_at = min(self.renew_at, due)

    def expire(self, now: float) -> bool:
        """Return whether trust has run out just now."""
        if now < self.deadline:
            return False
        self._lapsed = True
        return True

    def end(self) -> None:
        """Drop the membership. Its row may still be live, so the next join ends it."""
        self.orphans.append(self.member.id)
        self.row = None
        self._lapsed = True
        self.step(PhaseEvent.OVER)


def random_uuid(bits: int) -> str:
    """Return a UUID of version 4 with 122 of these 128 random bits, without the weight of the module ``uuid``."""
    digits = f"{bits & ~(0xF << 76) & ~(0b11 << 62) | 4 << 76 | 0b10 << 62:032x}"
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
