"""Words that are enums inside, and plain strings for users."""

from __future__ import annotations

import enum


class Word(str, enum.Enum):
    """An enum of public strings: each member compares, prints and formats as its string."""

    # ``enum.StrEnum`` needs Python 3.11, and ``str()`` and ``format()`` of a ``(str, Enum)`` differ between versions.
    __str__ = str.__str__
    __repr__ = str.__repr__

    def __format__(self, form: str) -> str:
        return str.__format__(self, form)
