"""A connection: both of its ends, and what is on its way between them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

CLOSE = "close"
CLOSED = "closed"
FAILED = "failed"


@dataclass
class Line:
    """A connection, with what is on its way."""

    lane: str
    up: list[Any] = field(default_factory=list)
    down: list[Any] = field(default_factory=list)
    open: bool = False
    """The server's end stands."""
    used: bool = True
    """The client's end is in use."""
    mute: bool = False
    """The host behind it is gone: nothing will ever come back."""
    slow_up: bool = False
    slow_down: bool = False
    key: int | None = None
    """The sentinel that is held on it."""
    member: str | None = None
    age: int = 0
    """Ticks since it was opened, as far as that matters."""
