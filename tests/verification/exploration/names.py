"""Ids, keys, counts of renewals: what would only grow is kept small here, so that states repeat.

Ids and keys are drawn one after the other. A count of renewals is counted back from the one in the row, which is always
zero: all that matters is whether a count is the row's.
"""

from __future__ import annotations

import uuid
from typing import Any

from tenure.core import messages

NAMES = "abc"
OLDEST = -7
"""Counts of renewals are counted back from the row's; older ones are all the same, for none of them is the row's."""


class Chance:
    """What the protocol takes for chance: ids one after the other, and no jitter."""

    def __init__(self, node: int) -> None:
        self.node = node
        self.drawn = 0
        self.keys = 0

    def getrandbits(self, bits: int) -> int:
        if bits == 31:
            self.keys += 1
            return (self.drawn * 16 + self.keys) * 16 + self.node
        self.drawn += 1
        self.keys = 0
        return (self.node * 16 + self.drawn) << 96

    def random(self) -> float:
        return 0.0


def owner(member_id: str) -> int:
    """The number of the node that drew this id."""
    return (uuid.UUID(member_id).int >> 96) // 16


def called(member_id: str | None) -> str:
    """A member's id as people read it: the node's name and the number of the membership."""
    if member_id is None:
        return "nobody"
    if owner(member_id) >= len(NAMES):
        return member_id
    return f"{NAMES[owner(member_id)]}{(uuid.UUID(member_id).int >> 96) % 16}"


def shifted(value: Any, member_id: str, by: int) -> Any:
    """A request or an answer, with the counts of this member's renewals shifted."""
    if type(value) is tuple:
        return tuple(shifted(item, member_id, by) for item in value)
    if isinstance(value, messages.End):
        return value._replace(verdicts=shifted(value.verdicts, member_id, by))
    if isinstance(value, messages.Looked):
        members = tuple(shifted(member, member_id, by) for member in value.members)
        return value._replace(members=members)
    if isinstance(value, messages.Verdict) and value.member_id == member_id and value.renewals is not None:
        return value._replace(renewals=max(OLDEST, value.renewals + by))
    if isinstance(value, messages.Sighting) and value.id == member_id:
        return value._replace(renewals=max(OLDEST, value.renewals + by))
    return value
