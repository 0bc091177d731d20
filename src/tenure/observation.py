"""What one node knows of the others: who is silent, who is dead, whom to watch. Pure; no I/O, no clock.

Two kinds of evidence end another member's term, and each carries a guard that must still hold when the end is
written, because anything may have happened between the look and the write:

- **Silence.** The same count of renewals was seen for the member's own TTL plus drift, counted from the *receipt* of
  the first answer that showed it. Whatever renewal produced that count was sent earlier than it was seen, so the
  leader's trust in it ends first. Guard: the count. An observation is void when the connection broke: after an
  outage everybody gets a whole TTL to come back.
- **Death.** The member's own row names this very server and a sentinel that nobody holds any more (a strict member has
  none, whatever the watcher's mode), and a fresh connection was accepted *after* that look: a server that shuts down
  frees sentinels too, but it refuses new connections first. Guard: the sentinel's epoch and the server's start time.
"""

from __future__ import annotations

from tenure import timing
from tenure.asks import Looked, Server, Sighting, Verdict


class Observation:
    """The other members, as the looks on one unbroken connection showed them. A new connection needs a new one."""

    def __init__(self) -> None:
        """Know nobody yet."""
        self._since: dict[str, tuple[int, float]] = {}
        self._server: Server | None = None
        self._predecessor: Sighting | None = None
        self._suspects: tuple[Sighting, ...] = ()
        self.silence_due = float("inf")
        """When the next of the others will have been silent too long, unless it renews."""

    @property
    def predecessor_key(self) -> int | None:
        """The sentinel to wait for: the nearest lower member's, around the ring."""
        return self._predecessor.key if self._predecessor else None

    @property
    def suspects(self) -> bool:
        """Whether some sentinel has fallen and the server has not been asked for a fresh connection yet."""
        return bool(self._suspects)

    @property
    def server_start(self) -> str:
        """The server on which the last look was made."""
        return self._server.start if self._server else ""

    def look(self, looked: Looked, me: str, now: float) -> tuple[Verdict, ...]:
        """Take in one look, received at ``now``; return the verdicts on members that were silent too long."""
        if self._server and self._server.incarnation != looked.server.incarnation:
            self._since.clear()
        self._server = looked.server
        others = [member for member in looked.members if member.id != me]
        self._since = {member.id: self._first_seen(member, now) for member in others}
        self._suspects = tuple(member for member in others if self._fallen(member))
        self._predecessor = _predecessor([m for m in others if m.sentinel_stands], me)
        due = (self._since[member.id][1] + timing.silence(member.ttl) for member in others)
        self.silence_due = min(due, default=float("inf"))
        return tuple(
            Verdict(member.id, "silence", looked.server.incarnation, renewals=member.renewals)
            for member in others
            if now - self._since[member.id][1] >= timing.silence(member.ttl)
        )

    def knocked(self, *, accepted: bool) -> tuple[Verdict, ...]:
        """Take in whether the server accepted a fresh connection; return the verdicts on the fallen."""
        suspects, self._suspects = self._suspects, ()
        if not accepted or self._server is None:
            return ()
        return tuple(
            Verdict(member.id, "death", self._server.incarnation, epoch=member.epoch, server_start=member.server_start)
            for member in suspects
        )

    def _first_seen(self, member: Sighting, now: float) -> tuple[int, float]:
        seen = self._since.get(member.id)
        return seen if seen and seen[0] == member.renewals else (member.renewals, now)

    def _fallen(self, member: Sighting) -> bool:
        """Whether the row and the server's locks say that this member's connection is gone."""
        return (
            member.key is not None
            and self._server is not None
            and member.server_start == self._server.start
            and not member.sentinel_stands
        )


def _predecessor(members: list[Sighting], me: str) -> Sighting | None:
    """Return the nearest lower member, wrapping around; None where there is nobody else."""
    if not members:
        return None
    return max(members, key=lambda member: (member.id < me, member.id))
