"""What one node has announced and believed so far, and what must never come next."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tenure.core.timing import LONG_AGO
from tenure.events import Deposed, Elected, Resumed, Suspended


@dataclass
class Record:
    """One life of a node."""

    term: tuple[int, bool] | None = None
    """The term that was announced, and whether it is suspended."""
    believed: int = 0
    until: float = LONG_AGO
    lapsed: int = 0
    """The last token whose trust ran out."""

    def announced(self, event: Any) -> Iterator[str]:
        """Events tell a story that makes sense: a term begins, is suspended and resumed, and ends, once."""
        after: tuple[int, bool] | None
        if isinstance(event, Elected):
            fits, after = self.term is None, (event.token, False)
        elif isinstance(event, Suspended):
            fits, after = self.term == (event.token, False), (event.token, True)
        elif isinstance(event, Resumed):
            fits, after = self.term == (event.token, True), (event.token, False)
        else:
            assert isinstance(event, Deposed)
            fits, after = self.term is not None and self.term[0] == event.token, None
        if not fits:
            yield f"{event} although its term was {self.term}"
        self.term = after

    def believes(self, token: int, until: float, now: float) -> Iterator[str]:
        """A term that lapsed is never taken up again."""
        if self.believed and now >= self.until:
            self.lapsed, self.believed, self.until = self.believed, 0, LONG_AGO
        if token:
            if token == self.lapsed:
                yield f"it takes up term {token} again, after it had lapsed"
            self.believed, self.until = token, until
