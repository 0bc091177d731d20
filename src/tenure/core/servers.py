"""Which server it is, and where its tables are trusted: what a restart, a promotion or a copy changes."""

from __future__ import annotations

from typing import NamedTuple

from tenure.core import timing


class Server(NamedTuple):
    """The identity of a server, as far as proofs of death and tokens depend on it."""

    start: str
    """Its start time: no sentinel outlives a restart."""
    incarnation: str
    """The line of data it continues (PostgreSQL: system identifier and timeline)."""
    timeline: int = 1
    place: str = ""
    """Where the tables are on it (PostgreSQL: oids). A restored copy has another place."""
    promoted: bool = False
    """Whether it may have been a replica. If so, it may lack rows that its primary had committed."""
    file: str = ""
    """Which file it is (SQLite). It is never stored in the file, because it would be wrong in a copy."""

    @property
    def line(self) -> str:
        """What distinguishes these tables from others with the same rows."""
        return f"{self.incarnation} {self.place}"

    @property
    def floor(self) -> int:
        """The lowest token of this timeline. It exceeds all earlier ones, some of which a promoted replica may lack."""
        return (self.timeline - 1) * 2**40

    def follows(self, before: Server | Confirmed) -> bool:
        """Whether this is a promoted replica of a server on the line ``before``."""
        system, _, timeline = before.incarnation.rpartition(":")
        promoted = self.incarnation.rpartition(":")[0] == system and 0 < int(timeline or 0) < self.timeline
        return promoted and before.place == self.place

    @property
    def unconfirmed(self) -> str:
        """An incarnation of this system that no server ever has: timelines begin at 1."""
        return self.incarnation.rpartition(":")[0] + ":0"


class Confirmed(NamedTuple):
    """The namespace's row: where its tables are trusted, and which TTLs are permitted."""

    incarnation: str
    base: int
    max_ttl: float
    ripe_ttl: float
    """The longest TTL that a membership may begin with: less than ``max_ttl`` while a raise ripens (R14)."""
    limits: int = 0
    """Counts how often the largest TTL was set."""
    place: str = ""
    loses_nothing: bool = False
    """Whether an operator has said that a promoted replica has every commit that was acknowledged (R17)."""
    replicated: bool = True
    """Whether commits wait for a replica at this moment. It decides nothing: right after a promotion they do not."""

    @property
    def line(self) -> str:
        """The :attr:`Server.line` on which the tables are trusted."""
        return f"{self.incarnation} {self.place}"

    @property
    def made_on_a_promoted_server(self) -> bool:
        """Whether the namespace was missing on a server that may have been promoted, and was created there (R15)."""
        return self.incarnation.endswith(":0")

    def lacks_nothing(self, before: Server | Confirmed, server: Server) -> bool:
        """Whether the tables of this server have everything that was acknowledged on the line ``before`` (R17)."""
        return self.loses_nothing and server.follows(before)

    @property
    def longest_lease(self) -> float:
        """The longest TTL that may have been given elsewhere, as far as this server can know."""
        return max(self.max_ttl, timing.DEFAULT_MAX_TTL_S) if self.made_on_a_promoted_server else self.max_ttl
