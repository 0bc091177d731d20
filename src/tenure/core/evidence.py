"""What one node knows about the others: which are silent, which are dead, which to watch. Pure; no I/O, no clock.

Two kinds of evidence end another member (R3). Each carries a guard that must still hold when the end is written,
because anything may have happened between the look and the write.

- **Silence.** The node has seen the same count of renewals for the member's own TTL plus drift. It counts from the
  *receipt* of the first answer that showed the count. The renewal was sent earlier than that, so the leader's trust in
  it ends first. Guard: the count. When the connection breaks, the observation is void: after an outage every member has
  a whole TTL to come back.
- **Death.** The member's row names this very server and a sentinel that is free, and the server accepted a fresh
  connection (a knock) that was begun *after* the sentinel had fallen. A server that shuts down frees sentinels, too,
  but it refuses new connections first. A strict member has no sentinel. Guard: the sentinel's epoch and the server's
  start time.

Many nodes may see the same death, and one of them is enough to end the member (R19). So the next living member on the
ring acts at once if the dead one held a role, and the others wait a moment, the longer the more of them are nearer.

A node does not look at every member (R19). On the ring of all living members, by id, it looks at the few that come
before it, and farther back only if none of these is well. It also looks at the holders of roles that it stands for.
"""

from __future__ import annotations

from collections.abc import Sequence

from tenure.core import timing
from tenure.core.messages import Looked, Sighting, Verdict
from tenure.core.servers import Server
from tenure.events import EndReason

NEIGHBOURS = 4
"""How many of the members before it a node reads, as long as one of these is well."""
TURN_S = 0.1
"""How long a node waits for each living node that is nearer to a dead member; up to twice as long."""
NOT_URGENT = 3
"""How many more turns a node waits if the dead member held nothing, so that members with roles come first."""


class Evidence:
    """The other members, as seen on one unbroken connection. A new connection needs a new object."""

    def __init__(self, spread: float | None = None) -> None:
        """``spread`` is this node's part of each delay, from 0 to 1; None if no other node acts in its place."""
        self.silence_due = timing.NEVER
        """When the next member will have been silent for too long, unless it renews."""
        self.predecessor_key: int | None = None
        """The sentinel to wait for: that of the nearest lower member, around the ring."""
        self.suspects: tuple[Sighting, ...] = ()
        """Members whose sentinel has fallen; the server has not been asked for a fresh connection yet."""
        self.due: tuple[Sighting, ...] = ()
        """Those among them that it is this node's turn to end."""
        self.next_due = timing.NEVER
        """When it will be this node's turn to end the next of them, unless another node has."""
        self.reach = NEIGHBOURS
        """How many members before this one the next look should read."""
        self.reach_grew = False
        """Whether the last look found no member that is well, and there are more to look at."""
        self._since: dict[str, tuple[int, float]] = {}
        self._renewed: set[str] = set()
        """Members that have renewed since the reach grew."""
        self._server: Server | None = None
        self._spread = spread
        self._due_at: dict[str, float] = {}

    @property
    def server_start(self) -> str:
        """The start time of the server that answered the last look."""
        return self._server.start if self._server else ""

    def look(self, looked: Looked, me: str, now: float) -> tuple[Verdict, ...]:
        """Process one look, received at ``now``; return the verdicts on members that were silent for too long."""
        if self._server and self._server.line != looked.server.line:
            self._since.clear()
        self._server = looked.server
        others = [member for member in looked.members if member.id != me]
        if self.reach > NEIGHBOURS:
            self._renewed.update(member.id for member in others if member.looks and self._has_renewed(member))
        self._since = {member.id: self._first_seen(member, now) for member in others}
        others.sort(key=lambda member: (member.id < me, member.id), reverse=True)
        self._suspect(others, now)
        predecessor = next((member for member in others if member.sentinel_stands), None)
        self.predecessor_key = predecessor.key if predecessor else None
        self._adjust_reach(others[: self.reach], now)
        silent_at = [(self._since[member.id][1] + timing.silence(member.ttl), member) for member in others]
        self.silence_due = min((at for at, _ in silent_at), default=timing.NEVER)
        silent = [member for at, member in silent_at if now >= at]
        line = self._server.line
        return tuple(Verdict(m.id, EndReason.SILENCE, line, renewals=m.renewals, urgent=m.holds) for m in silent)

    def knocked(self, *, accepted: bool, key: int | None = None) -> tuple[Verdict, ...]:
        """Process the answer to a knock, which the server accepted or not; return the verdicts on the suspects.

        A knock that was begun during the look proves something only about the sentinel with this ``key``, which had
        fallen before it. The others may have fallen after it.
        """
        dead = tuple(member for member in self.due if key in (None, member.key))
        self.due = tuple(member for member in self.due if member not in dead)
        self.suspects = tuple(member for member in self.suspects if member not in dead)
        if not accepted or self._server is None:
            return ()
        line = self._server.line
        return tuple(
            Verdict(m.id, EndReason.DEATH, line, epoch=m.epoch, server_start=m.server_start, urgent=m.holds)
            for m in dead
        )

    def _suspect(self, others: Sequence[Sighting], now: float) -> None:
        """Find the members whose sentinel has fallen, and when to act on each. The nearest come first in ``others``."""
        due_at, nearer = {}, 0
        for member in others:
            if self._fallen(member):
                due_at[member.id] = min(self._due_at.get(member.id, timing.NEVER), now + self._delay(member, nearer))
            elif member.key is not None and member.sentinel_stands and self._is_well(member, now):
                nearer += 1
        self._due_at = due_at
        self.suspects = tuple(member for member in others if member.id in due_at)
        self.due = tuple(member for member in self.suspects if now >= due_at[member.id])
        self.next_due = min((at for at in due_at.values() if at > now), default=timing.NEVER)

    def _delay(self, member: Sighting, nearer: int) -> float:
        """Return how long to leave a dead member to others; ``nearer`` living nodes come before this one."""
        if self._spread is None:
            return 0.0
        steps = min(nearer, NEIGHBOURS) + (0 if member.holds else NOT_URGENT)
        return TURN_S * steps * (1 + self._spread)

    def _first_seen(self, member: Sighting, now: float) -> tuple[int, float]:
        seen = self._since.get(member.id)
        return seen if seen and seen[0] == member.renewals else (member.renewals, now)

    def _has_renewed(self, member: Sighting) -> bool:
        return member.id in self._since and self._since[member.id][0] != member.renewals

    def _adjust_reach(self, ring: Sequence[Sighting], now: float) -> None:
        """Look twice as far back if none of the ``ring``, the members before this one, is well.

        The reach stays until a neighbour has been seen to renew: a member that was seen only now counts as well.
        """
        self.reach_grew = len(ring) == self.reach and not any(self._is_well(member, now) for member in ring)
        if self._renewed.intersection(member.id for member in ring[:NEIGHBOURS]):
            self.reach = NEIGHBOURS
            self._renewed.clear()
        elif self.reach_grew:
            self.reach *= 2

    def _is_well(self, member: Sighting, now: float) -> bool:
        """Whether the member can be relied on to look at those before it."""
        renews = now < self._since[member.id][1] + timing.silence(member.ttl) / 2
        return member.looks and renews and not self._fallen(member)

    def _fallen(self, member: Sighting) -> bool:
        """Whether the row and the server's locks show that this member's connection is gone."""
        return member.key is not None and member.server_start == self.server_start and not member.sentinel_stands
