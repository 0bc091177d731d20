"""What happens to a role, as values: the protocol makes them, the application receives them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Elected:
    """This node holds the role from now on, under a new token."""

    role: str
    token: int


@dataclass(frozen=True)
class Suspended:
    """This node's connection broke: it does not count as leader until it knows more. Nothing is lost yet."""

    role: str
    token: int


@dataclass(frozen=True)
class Resumed:
    """The doubt is over: the same term goes on under the same token."""

    role: str
    token: int


@dataclass(frozen=True)
class Deposed:
    """The term is over, for the reason given. It never comes back."""

    role: str
    token: int
    reason: str


@dataclass(frozen=True)
class LeaderChanged:
    """Somebody else holds the role, or nobody does (``member_id`` and ``name`` are None)."""

    role: str
    token: int
    member_id: str | None
    name: str | None


Event = Elected | Suspended | Resumed | Deposed | LeaderChanged
