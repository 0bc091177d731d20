"""What the protocol asks of the database, and what it hears: plain values, a pair a job.

A node has two lanes, each a thread with a connection of its own that runs one ask at a time. The control lane holds
the node's own sentinel and does everything that writes; the watch lane only looks and waits.

| lane    | ask        | answer     | what happens on the server                                             |
|---------|------------|------------|------------------------------------------------------------------------|
| control | Open       | Opened     | connect, create the tables if need be, read who the server is          |
| control | Join       | Joined     | take a sentinel, insert the member's row                               |
| control | Renew      | Standing   | count one renewal; read the roles held and the ones that are vacant    |
| control | Resume     | Standing   | after a restart of the server: sentinel and row taken up again         |
| control | End        | Ended      | end members that are silent or dead                                    |
| control | Stand      | Done       | stand for roles, and withdraw from others                              |
| control | Acquire    | Acquired   | take vacant roles, in one batch                                        |
| control | Vacate     | Vacated    | mark the term resigned, then give the role up                          |
| control | Confirm    | Done       | write down that the tables of this server are trusted from now on      |
| control | Leaders    | LeadersAre | who holds the roles that somebody here observes                        |
| control | Tidy       | Done       | delete old history and old memberships                                 |
| control | Leave      | Done       | end the own membership                                                 |
| watch   | OpenWatch  | Watching   | connect                                                                |
| watch   | Look       | Looked     | wait for a sentinel, then read every member and which sentinels stand  |
| watch   | Knock      | Knocked    | open a fresh connection: is this server still open for business?       |
| watch   | Evict      | Done       | terminate the connections of a member that was ended by silence        |
| watch   | Unblock    | Done       | end abandoned transactions that keep a role from being acquired        |
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Server:
    """Which server this is, as far as it matters to the proof of death and to tokens."""

    start: str
    """Its start time: sentinels live as long as this."""
    incarnation: str
    """The line of data it continues (PostgreSQL: system identifier and timeline)."""
    timeline: int = 1


@dataclass(frozen=True)
class Confirmed:
    """The namespace's row: the incarnation on which its tables are trusted."""

    incarnation: str
    base: int
    max_ttl: float


@dataclass(frozen=True)
class Member:
    """A membership as it is written into its row on joining; only its renewals and epoch change later."""

    id: str
    name: str
    ttl: float
    takeover: str
    key: int | None
    """The sentinel's key; None where nobody may act on one (strict, or lease alone). To have one is to be instant."""
    metadata: str = "{}"


@dataclass(frozen=True)
class Sighting:
    """Another member as one look saw it."""

    id: str
    ttl: float
    renewals: int
    key: int | None
    epoch: int
    server_start: str
    sentinel_stands: bool


@dataclass(frozen=True)
class Verdict:
    """The reason for ending a member, with the guard that must still hold when the end is written.

    Silence names the count of renewals that was watched; death names the server and the epoch of the sentinel.
    """

    member_id: str
    reason: str
    incarnation: str
    renewals: int | None = None
    epoch: int | None = None
    server_start: str | None = None


@dataclass(frozen=True)
class Held:
    """A role whose holder is the asking member."""

    role: str
    token: int
    requested: bool = False
    """Somebody asks for this term to be resigned."""
    requested_for: str | None = None


@dataclass(frozen=True)
class Vacancy:
    """A role that the asking member stands for and nobody living holds."""

    role: str
    token: int
    reserved_for: str | None = None
    """A living member for which the last holder reserved the role."""


@dataclass(frozen=True)
class Leader:
    """Who holds a role."""

    role: str
    token: int
    member_id: str | None
    name: str | None


# The control lane ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Open:
    """Connect, and read who the server is."""


@dataclass(frozen=True)
class Opened:
    """The connection stands."""

    server: Server
    confirmed: Confirmed
    sentinels: bool = True
    """Whether a sentinel can be held on this connection; not where it leads through a pooler."""


@dataclass(frozen=True)
class Join:
    """Become a member."""

    member: Member
    server: Server
    replaces: tuple[str, ...] = ()
    """Earlier memberships of this node, to be ended first."""


@dataclass(frozen=True)
class Joined:
    """The answer to joining."""

    sentinel: bool
    """Whether the sentinel was taken; False if the key belongs to somebody else."""


@dataclass(frozen=True)
class Renew:
    """Count one renewal."""

    member_id: str
    alone_in: tuple[str, ...] = ()
    """Roles that the node stands back from: does anybody else stand for them?"""


@dataclass(frozen=True)
class Resume:
    """Take up sentinel and row again, after a restart of the server."""

    member: Member
    server: Server


@dataclass(frozen=True)
class Standing:
    """The answer to a renewal: what this member is and could be."""

    alive: bool
    held: tuple[Held, ...] = ()
    vacant: tuple[Vacancy, ...] = ()
    alone_in: tuple[str, ...] = ()
    confirmed: Confirmed | None = None


@dataclass(frozen=True)
class End:
    """End members that are silent or dead."""

    member_id: str
    verdicts: tuple[Verdict, ...]


@dataclass(frozen=True)
class Ended:
    """Who was ended, and what became vacant by it."""

    ids: tuple[str, ...]
    vacant: tuple[Vacancy, ...] = ()


@dataclass(frozen=True)
class Stand:
    """Stand for roles, and withdraw from others."""

    member_id: str
    roles: tuple[str, ...]
    withdrawn: tuple[str, ...] = ()


@dataclass(frozen=True)
class Acquire:
    """Take vacant roles, in one batch."""

    member_id: str
    name: str
    roles: tuple[str, ...]
    floor: int
    unreserved: tuple[str, ...] = ()
    """Roles whose reservation has been waited out."""
    patient: bool = False
    """Wait for the rows' locks for a moment instead of skipping rows that are locked."""


@dataclass(frozen=True)
class Acquired:
    """Which roles were taken, and under which tokens."""

    tokens: dict[str, int] = field(default_factory=dict)
    busy: tuple[str, ...] = ()
    """Roles whose row is locked by an open transaction."""


@dataclass(frozen=True)
class Vacate:
    """Mark a term resigned, then give its role up."""

    member_id: str
    role: str
    token: int
    reserved_for: str | None = None


@dataclass(frozen=True)
class Vacated:
    """Whether the role was given up."""

    done: bool
    """False while a fenced transaction is still open."""


@dataclass(frozen=True)
class Confirm:
    """Write down that the tables of this server are trusted from now on."""

    old: str
    server: Server


@dataclass(frozen=True)
class Leaders:
    """Ask who holds some roles."""

    roles: tuple[str, ...]


@dataclass(frozen=True)
class LeadersAre:
    """Who holds them."""

    leaders: tuple[Leader, ...]


@dataclass(frozen=True)
class Tidy:
    """Delete old history and old memberships."""


@dataclass(frozen=True)
class Leave:
    """End the own membership."""

    member_id: str


@dataclass(frozen=True)
class Done:
    """It is done, and there is nothing to say about it."""


# The watch lane ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OpenWatch:
    """Connect for looking and waiting."""


@dataclass(frozen=True)
class Watching:
    """The watch connection stands."""


@dataclass(frozen=True)
class Look:
    """Wait for a sentinel, then look at everybody."""

    member_id: str
    wait_for: int | None
    """The predecessor's key, or None where there is nobody to wait for."""
    seconds: float


@dataclass(frozen=True)
class Looked:
    """What one look saw."""

    server: Server
    members: tuple[Sighting, ...]
    vacancy: bool = False
    """Some role that the asking member stands for is vacant."""
    slice_s: float = 1.0
    """How long the next wait may be without leaving a line in the server's log."""


@dataclass(frozen=True)
class Knock:
    """Ask for a fresh connection, to see whether this server is still open for business."""

    server_start: str


@dataclass(frozen=True)
class Knocked:
    """Whether it was."""

    open: bool


@dataclass(frozen=True)
class Evict:
    """Terminate the connections of members that were ended."""

    member_ids: tuple[str, ...]


@dataclass(frozen=True)
class Unblock:
    """End abandoned transactions that keep a role from being acquired."""

    roles: tuple[str, ...]
    bound_s: float


ControlAsk = Open | Join | Renew | Resume | End | Stand | Acquire | Vacate | Confirm | Leaders | Tidy | Leave
ControlAnswer = Opened | Joined | Standing | Ended | Acquired | Vacated | LeadersAre | Done
WatchAsk = OpenWatch | Look | Knock | Evict | Unblock
WatchAnswer = Watching | Looked | Knocked | Done
