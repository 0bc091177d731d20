"""A knock: a new connection, to show that the server still accepts connections, and one query on it.

It uses libpq directly, because a takeover waits for it: it takes 5.3 ms, and 7.5 ms through psycopg's ``connect`` and a
cursor. Most of that is the server's time.
"""

from __future__ import annotations

import contextlib
import selectors
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tenure.base import clock
from tenure.databases.connecting import load
from tenure.store.session import wait_readable

if TYPE_CHECKING:
    from psycopg import pq


FIRST_MESSAGE_S = 0.002
"""How long a knock that has begun waits until it can send its first message: it takes a round trip."""

BeginKnock = Callable[[], Callable[[], "str | None"]]
"""Begins a knock, and returns a function that waits for the answer to its question."""


class Knock:
    """One connection, from the first packet to the answer."""

    def __init__(self, libpq: pq.abc.PGconn) -> None:
        self._psycopg: Any = load()
        self._libpq = libpq
        self._status = self._psycopg.pq.PollingStatus.WRITING

    @classmethod
    def dialler(cls, parameters: dict[str, Any]) -> Callable[[], Knock | None]:
        """Return a function that begins to connect to a host whose address is given, without waiting.

        It returns None if libpq refuses the parameters.
        """
        psycopg = load()
        try:
            told = psycopg.conninfo.make_conninfo(**parameters).encode()
        except (psycopg.Error, ValueError):
            # The error is not raised, because its traceback has the password.
            return lambda: None

        def dial() -> Knock | None:
            try:
                return cls(psycopg.pq.PGconn.connect_start(told))
            except (psycopg.Error, OSError, ValueError):
                return None

        return dial

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        return int(self._libpq.socket)

    def begin(self) -> None:
        """Send the first message to the server, unless that takes too long. ``ask`` goes on from there."""
        with contextlib.suppress(self._psycopg.Error, OSError, ValueError):
            if wait_readable([self], FIRST_MESSAGE_S, selectors.EVENT_WRITE):
                self._status = self._libpq.connect_poll()

    def ask(self, question: str, seconds: float) -> str | None:
        """Return the single value that a query gives; None after any error, and if the time is over."""
        until = clock.now() + seconds
        try:
            return self._answer(question, until) if self._connected(until) else None
        except (self._psycopg.Error, OSError, ValueError):
            # ValueError means that the socket is gone.
            return None
        finally:
            self._libpq.finish()

    def _connected(self, until: float) -> bool:
        polling = self._psycopg.pq.PollingStatus
        events = {polling.READING: selectors.EVENT_READ, polling.WRITING: selectors.EVENT_WRITE}
        while self._status in events and wait_readable([self], until - clock.now(), events[self._status]):
            self._status = self._libpq.connect_poll()
        return bool(self._status == polling.OK)

    def _answer(self, question: str, until: float) -> str | None:
        self._libpq.send_query(question.encode())
        while self._libpq.is_busy() and wait_readable([self], until - clock.now()):
            self._libpq.consume_input()
        result = None if self._libpq.is_busy() else self._libpq.get_result()
        value = result.get_value(0, 0) if result is not None and result.ntuples else None
        return value.decode() if value is not None else None
