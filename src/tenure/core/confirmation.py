"""Whether the tables of the current server are trusted, and which TTL is ripe (R4b, R14). Pure; no I/O, no clock.

A promoted replica may lack the last commits of its primary. Some of them may be leases. So a row of the namespace names
the line of data on which its tables are trusted. If the current server continues another line, the node acquires
nothing until every lease that may have been given elsewhere is over. Then it writes the new line into that row.

A raise of the largest TTL is such a commit, too. A node relies on it only when it is ``timing.RIPENS_AFTER_S`` old. A
promoted replica lacks only younger commits, so it has the raise, and its nodes wait for the new limit.
"""

from __future__ import annotations

from tenure.core import timing
from tenure.core.servers import Confirmed, Server


class Confirmation:
    """The current server, and what the namespace's row says about it. A new connection does not restart the waits."""

    server: Server
    confirmed: Confirmed
    """The current server and the namespace's row, as they were last seen; unset before the first connection."""

    def __init__(self) -> None:
        self._unconfirmed: tuple[str, float] = ("", timing.NEVER)
        """The server that is not confirmed, and when this node first saw it."""
        self._unripe: tuple[tuple[object, ...], float] = ((), timing.NEVER)
        """The raise of the largest TTL that is not ripe, and when this node first saw it."""

    def see(self, server: Server, confirmed: Confirmed, now: float) -> None:
        """Record the current server and the namespace's row, as of ``now``."""
        self.server, self.confirmed = server, confirmed
        # Another start may be another server: two replicas of one primary are promoted to the same timeline.
        here = f"{server.line} {server.start}"
        if confirmed.line != server.line and self._unconfirmed[0] != here:
            self._unconfirmed = (here, now)
        # A limit that was changed and changed back counts anew. So does one that is found on another line of data.
        if confirmed.ripe_ttl >= confirmed.max_ttl:
            self.ripened()
        # Whether commits wait for a replica is not part of the limit, and may change at any time.
        elif self._unripe[0] != (seen := (server.line, confirmed._replace(replicated=True))):
            self._unripe = (seen, now)

    def ripened(self) -> None:
        """Forget the raise. The next renewal shows whether it is ripe now, or whether an operator set another limit."""
        self._unripe = ((), timing.NEVER)

    @property
    def trusted(self) -> bool:
        """Whether the tables of the current server are confirmed."""
        return self.confirmed.line == self.server.line

    @property
    def floor(self) -> int:
        """The lowest token that may be issued on the current server."""
        return self.confirmed.base + self.server.floor

    @property
    def confirm_at(self) -> float:
        """When every lease that may have been given elsewhere is over, counted from the first sight of this server."""
        if self.trusted:
            return timing.NEVER
        # If the promotion has lost nothing, every lease is in these tables, and its holder with its own TTL (R17).
        if self.confirmed.lacks_nothing(self.confirmed, self.server):
            return self._unconfirmed[1]
        return self._unconfirmed[1] + timing.silence(self.confirmed.longest_lease)

    @property
    def ripe_at(self) -> float:
        """When the raise is old enough, even if this node's clock runs fast."""
        return self._unripe[1] + timing.RIPENS_AFTER_S * (1 + timing.DRIFT) if self.trusted else timing.NEVER
