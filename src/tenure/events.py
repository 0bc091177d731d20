"""What happens to a role, as values. The protocol creates them, and the application receives them."""

from __future__ import annotations

from dataclasses import dataclass

from tenure.base.words import Word


class EndReason(Word):
    """Why a term ended. Each reason is a public string.

    A node reports the reasons that it knows itself. The history has those that the database knows.
    """

    RESIGNED = "resigned"
    LEFT = "left"
    """The node was closed."""
    LAPSED = "lapsed"
    """No renewal succeeded in time."""
    CUT = "the connection was cut"
    """The server was not restarted, so the others had proof that this node's sentinel had fallen."""
    REPLACED = "the server was replaced"
    FILE_REPLACED = "the file was replaced"
    ENDED = "the membership was ended"
    """Another node or an operator ended the membership."""
    TAKEN = "the role was taken"
    LOCK_TAKEN = "the lock was taken"
    """Another program took the role's ``lock_id`` while this node had no connection."""
    SILENCE = "silence"
    """Another node ended the member: it did not renew for a TTL."""
    DEATH = "death"
    """Another node ended the member: its sentinel had fallen."""
    SUPERSEDED = "superseded"
    """Only in the history: the role's row names another holder."""


@dataclass(frozen=True)
class _TermEvent:
    """What every event tells: the role, and the token of the term that it is about."""

    role: str
    token: int


class Elected(_TermEvent):
    """This node leads the role from now on, under a new token."""


class Suspended(_TermEvent):
    """This node's connection broke. It does not count as leader until it knows more; the term is not lost yet."""


class Resumed(_TermEvent):
    """The doubt is over: the same term goes on under the same token."""


@dataclass(frozen=True)
class Deposed(_TermEvent):
    """The term is over, and never comes back. ``reason`` is one of ``EndReason``, which are strings."""

    reason: str


@dataclass(frozen=True)
class LeaderChanged(_TermEvent):
    """The role has another leader, or none (``member_id`` and ``name`` are None)."""

    member_id: str | None
    name: str | None


Event = Elected | Suspended | Resumed | Deposed | LeaderChanged
