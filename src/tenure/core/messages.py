"""Requests of the protocol to the database, and their answers: plain values, in pairs.

A node has two lanes. Each is a thread with its own connection, and runs one request at a time. The control lane holds
the node's sentinel and makes every change; the watch lane only reads and waits.

| lane    | request    | answer     | what happens on the server                                             |
|---------|------------|------------|------------------------------------------------------------------------|
| control | Open       | Opened     | connect, create missing tables, read the server's identity             |
| control | Join       | Joined     | take a sentinel, insert the member's row                               |
| control | Renew      | Standing   | count one renewal; read the roles that are vacant, and those held      |
| control | Resume     | Standing   | after a restart of the server: take a new sentinel and the old row     |
| control | End        | Ended      | end members that are silent or dead                                    |
| control | Stand      | Done       | stand for roles, and withdraw from others                              |
| control | Acquire    | Acquired   | take vacant roles, in one batch                                        |
| control | Vacate     | Vacated    | mark the term resigned, then give the role up                          |
| control | Confirm    | Done       | record that the tables of this server are trusted from now on          |
| control | Ripen      | Done       | let new memberships rely on a raise of the largest TTL                 |
| control | Leaders    | LeadersAre | read who holds the roles that the application observes                 |
| control | Tidy       | Done       | delete old history and old memberships                                 |
| control | Leave      | Done       | end this membership                                                    |
| watch   | OpenWatch  | Watching   | connect                                                                |
| watch   | Look       | Looked     | wait for a sentinel, then read some members and their sentinels; on    |
|         |            |            | PostgreSQL, knock meanwhile if the awaited sentinel has fallen         |
| watch   | Knock      | Knocked    | open a fresh connection, to see whether the server accepts any         |
| watch   | Evict      | Done       | terminate the connections of a member that was ended by silence        |
| watch   | Unblock    | Done       | end abandoned transactions that keep a role from being acquired        |

They are named tuples, because a process that starts waits for the creation of all these classes, and a frozen data
class takes four times as long to create. A named tuple compiles each annotation that is a string, so this module does
without ``from __future__ import annotations``. Two messages of different types are equal if their fields are, and a
message without fields is false. Code that may meet several types compares the type as well.
"""

from typing import NamedTuple

from tenure.core.servers import Confirmed, Server
from tenure.events import EndReason

MANUAL = "manual"
"""The ``takeover`` of a candidate of ``tenure.manual``, which renews by hand and looks at no other member."""


class Member(NamedTuple):
    """A membership as the join writes it. Only a resume changes its key later."""

    id: str
    name: str
    ttl: float
    takeover: str
    key: int | None
    """The sentinel's key; None if the member has no sentinel (takeover ``strict``, or mode ``lease``)."""
    metadata: str = "{}"


class Sighting(NamedTuple):
    """Another member as one look saw it."""

    id: str
    ttl: float
    renewals: int
    key: int | None
    epoch: int
    server_start: str
    sentinel_stands: bool
    looks: bool = True
    """Whether it looks at other members itself. A candidate of ``tenure.manual`` does not."""
    holds: bool = True
    """Whether it holds a role."""


class Verdict(NamedTuple):
    """The reason for ending a member, with the guard that must still hold when the end is written.

    Silence names the count of renewals that was watched; death names the server and the epoch of the sentinel.
    """

    member_id: str
    reason: EndReason
    line: str
    renewals: int | None = None
    epoch: int | None = None
    server_start: str | None = None
    urgent: bool = True
    """Whether the member holds a role, which other nodes may wait for."""


class Held(NamedTuple):
    """A role that the asking member holds."""

    role: str
    token: int
    requested: bool = False
    """Whether an operator, or another process, asks the leader to resign this term."""
    requested_for: str | None = None
    unlocked: bool = False
    """Whether the role needs a lock that this connection does not hold (R21)."""


class Vacancy(NamedTuple):
    """A role that the asking member stands for, and that no living member holds."""

    role: str
    token: int
    reserved_for: str | None = None
    """The living member for which the last holder reserved the role."""


class Leader(NamedTuple):
    """Who holds a role."""

    role: str
    token: int
    member_id: str | None
    name: str | None


# The control lane ----------------------------------------------------------------------------------------------


class Open(NamedTuple):
    """Connect, and read the server's identity."""


class Opened(NamedTuple):
    """The connection is open."""

    server: Server
    confirmed: Confirmed
    sentinels: bool = True
    """Whether a sentinel can be held on this connection. Behind a pooler it cannot."""


class Join(NamedTuple):
    """Become a member."""

    member: Member
    server: Server
    replaces: tuple[str, ...] = ()
    """Earlier memberships of this node. They are ended first."""


class Joined(NamedTuple):
    """The answer to joining."""

    sentinel: bool
    """Whether the sentinel was taken; False if another client holds the key."""


class Renew(NamedTuple):
    """Count one renewal."""

    member_id: str
    alone_in: tuple[str, ...] = ()
    """Roles that the node stands back from. The answer says for which of them no other node stands."""
    thorough: bool = True
    """Whether to read every role that is held or wanted. Otherwise: those that changed, as far as an index shows it."""


class Resume(NamedTuple):
    """Take up the row again with a new sentinel, after a restart of the server or a promotion that lost nothing."""

    member: Member
    """As before, but with a new key: another client could have taken the old one while it was free."""
    server: Server
    epoch: int
    """Higher than in every earlier attempt, so that no earlier attempt can take effect after this one."""
    was: str = ""
    """The incarnation under which the row was written, which a promotion may have changed."""
    locks: tuple[str, ...] = ()
    """Roles whose locks to take before the row (R21)."""


class Standing(NamedTuple):
    """The answer to a renewal: whether the member lives, which roles it holds, and which ones it could take."""

    alive: bool
    held: tuple[Held, ...] = ()
    """All roles that the member holds; if the renewal was not thorough, those that it is asked to resign."""
    vacant: tuple[Vacancy, ...] = ()
    alone_in: tuple[str, ...] = ()
    confirmed: Confirmed | None = None
    clock_us: int | None = None
    """The database's clock, in microseconds since 1970. No election depends on it: schedules do."""
    requests: int = 0
    """Counts what operators have asked of the leaders' schedules."""


class Succession(NamedTuple):
    """What a member needs to take the roles of a dead member that it stands for, in the transaction that ends it."""

    name: str
    floor: int


class End(NamedTuple):
    """End members that are silent or dead."""

    member_id: str
    verdicts: tuple[Verdict, ...]
    succession: Succession | None = None
    """None if the roles that the members leave are not to be taken with this request."""


class Ended(NamedTuple):
    """Which members were ended, which roles are vacant now, and which of theirs were taken, under which tokens."""

    ids: tuple[str, ...]
    vacant: tuple[Vacancy, ...]
    tokens: dict[str, int]


class Stand(NamedTuple):
    """Stand for roles, and withdraw from others."""

    member_id: str
    roles: tuple[str, ...]
    withdrawn: tuple[str, ...] = ()


class Acquire(NamedTuple):
    """Take vacant roles, in one batch."""

    member_id: str
    name: str
    roles: tuple[str, ...]
    floor: int
    unreserved: tuple[str, ...] = ()
    """Roles to take although they are reserved for another member, because that member has had its time."""
    patient: bool = False
    """Whether to wait for locked rows for a moment. Otherwise they are skipped."""
    claim: bool = False
    """Whether the node led these roles when it met this promoted server (R22): what the rows say about earlier holders
    does not count, and only a token of this timeline keeps the node from taking a role."""


class Acquired(NamedTuple):
    """Which roles were taken under which tokens, and the roles whose row is locked by an open transaction."""

    tokens: dict[str, int]
    busy: tuple[str, ...] = ()


class Vacate(NamedTuple):
    """Mark a term resigned, then give its role up."""

    member_id: str
    role: str
    token: int
    reserved_for: str | None = None


class Vacated(NamedTuple):
    """Whether the role was given up."""

    done: bool
    """False while a fenced transaction is still open."""


class Confirm(NamedTuple):
    """Record that the tables of this server are trusted from now on."""

    old: Confirmed
    server: Server


class Ripen(NamedTuple):
    """Let new memberships rely on the raise of the largest TTL that this node saw."""

    seen: Confirmed


class Leaders(NamedTuple):
    """Ask who holds some roles."""

    roles: tuple[str, ...]


class LeadersAre(NamedTuple):
    """Who holds the roles that were asked for."""

    leaders: tuple[Leader, ...]


class Tidy(NamedTuple):
    """Delete old history and old memberships."""


class Leave(NamedTuple):
    """End this membership; in the history, mark the terms as resigned that were resigned but not vacated yet."""

    member_id: str
    given_up: tuple[tuple[str, int], ...] = ()


class Done(NamedTuple):
    """The request succeeded, and there is nothing to report."""


# The watch lane ------------------------------------------------------------------------------------------------


class OpenWatch(NamedTuple):
    """Connect the watch lane."""


class Watching(NamedTuple):
    """The watch connection is open."""


class Look(NamedTuple):
    """Wait for a sentinel to fall; then read the members before this one on the ring, and the holders of some roles."""

    member_id: str
    wait_for: int | None
    """The predecessor's key; None if there is no member to wait for."""
    seconds: float
    reach: int
    """How many members to read: the nearest ones before this member on the ring."""
    roles: tuple[str, ...] = ()
    """Roles whose holders to read."""


class Looked(NamedTuple):
    """What one look found."""

    server: Server
    members: tuple[Sighting, ...]
    vacancy: bool = False
    """Whether some role that the asking member stands for is vacant."""
    slice_s: float = 1.0
    """How long the next wait may last without causing a line in the server's log."""
    knocked: bool = False
    """Whether the server accepted a fresh connection that was begun after the awaited sentinel had fallen."""


class Knock(NamedTuple):
    """Open a fresh connection, to see whether this server still accepts any."""

    server_start: str


class Knocked(NamedTuple):
    """Whether the server accepted the connection."""

    open: bool


class Evict(NamedTuple):
    """Terminate the connections that ended members left behind."""

    member_ids: tuple[str, ...]


class Unblock(NamedTuple):
    """End abandoned transactions that keep a role from being acquired."""

    roles: tuple[str, ...]
    bound_s: float


ControlRequest = (
    Open | Join | Renew | Resume | End | Stand | Acquire | Vacate | Confirm | Ripen | Leaders | Tidy | Leave
)
ControlReply = Opened | Joined | Standing | Ended | Acquired | Vacated | LeadersAre | Done
WatchRequest = OpenWatch | Look | Knock | Evict | Unblock
WatchReply = Watching | Looked | Knocked | Done
