"""The watch lane's work: wait for a sentinel to fall, look at everybody, and make sure before anyone is ended."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from tenure import asks, statements, timing
from tenure.asks import Sighting
from tenure.session import Result, Sentinel, Session, Step


class Watcher(Protocol):
    """What only a particular server can do for the watch lane."""

    def slice_s(self) -> float:
        """Return how long a wait may last without a line in the server's log."""
        ...

    def evict(self, namespace: str, member_ids: tuple[str, ...]) -> None:
        """Terminate the connections of members that were ended."""
        ...

    def unblock(self, namespace: str, control_pid: int, bound_s: float) -> None:
        """End transactions that have blocked the control connection for longer than their bound."""
        ...


class Bystander:
    """A watcher that can do nothing about other members' connections."""

    def slice_s(self) -> float:
        """Return the longest wait between two looks."""
        return timing.SLICE_S

    def evict(self, namespace: str, member_ids: tuple[str, ...]) -> None:
        """Do nothing."""

    def unblock(self, namespace: str, control_pid: int, bound_s: float) -> None:
        """Do nothing."""


class NoSentinel:
    """Where none can be held or looked at: whatever another member has is taken to stand, so only silence ends it."""

    def __init__(self, stop: threading.Event) -> None:
        """Wait for nothing but ``stop``."""
        self._stop = stop

    def hold(self, key: int) -> bool:
        """Refuse."""
        return False

    def retake(self, key: int) -> bool:
        """Refuse."""
        return False

    def release(self, key: int) -> None:
        """Do nothing."""

    def wait(self, key: int, seconds: float) -> None:
        """Let the time pass."""
        self._stop.wait(seconds)

    def sweep(self, keys: set[int]) -> None:
        """Do nothing."""

    def abandon(self) -> None:
        """Do nothing."""

    def duplicates(self) -> list[int]:
        """Return none."""
        return []

    def standing(self, keys: Sequence[int]) -> set[int]:
        """Return them all."""
        return set(keys)


class Watch:
    """Looks at the members of one namespace, on the watch connection."""

    def __init__(
        self, session: Session, sentinel: Sentinel, watcher: Watcher, namespace: str, knock: Callable[[], str | None]
    ) -> None:
        """Work on an open session; ``knock`` opens a fresh connection and returns the server's start time."""
        self.session = session
        self.sentinel = sentinel
        self.watcher = watcher
        self.namespace = namespace
        self.knock = knock
        self.control_pid = 0

    def perform(self, ask: asks.WatchAsk) -> asks.WatchAnswer:
        """Do what is asked and return the answer; raise ``Gone`` or ``Failed``."""
        if isinstance(ask, asks.Look):
            return self.look(ask.member_id, ask.wait_for, ask.seconds)
        if isinstance(ask, asks.Knock):
            return asks.Knocked(self.knock() == ask.server_start)
        if isinstance(ask, asks.Evict):
            self.watcher.evict(self.namespace, ask.member_ids)
        elif isinstance(ask, asks.Unblock):
            self.watcher.unblock(self.namespace, self.control_pid, ask.bound_s)
        return asks.Done()

    def look(self, member_id: str, wait_for: int | None = None, seconds: float = 0.0) -> asks.Looked:
        """Wait for a sentinel to fall, so long at most; then read every member, and then which sentinels stand.

        In this order: a sentinel is taken before its row names it, so a row that was seen has a sentinel that
        stands, unless its owner is gone.
        """
        server = self.session.server()
        mine = {"namespace": self.namespace, "id": member_id}
        steps = Step(statements.ROSTER, mine), Step(statements.ANY_VACANCY, mine)
        (roster, vacancy), standing = self._survey(wait_for, seconds, *steps)
        members = tuple(
            Sighting(id_, ttl_ms / 1000, renewals, key, epoch, start, key in standing)
            for id_, ttl_ms, renewals, key, epoch, start in roster.rows
        )
        return asks.Looked(server, members, bool(vacancy.rows), self.watcher.slice_s())

    def _survey(
        self, wait_for: int | None, seconds: float, roster: Step, vacancy: Step
    ) -> tuple[Sequence[Result], set[int]]:
        """Wait and read; return also which sentinels of the roster stand."""
        if wait_for is not None:
            self.sentinel.wait(wait_for, seconds)
        results = self.session.read(roster, vacancy)
        keys = [key for _, _, _, key, _, _ in results[0].rows if key is not None]
        return results, self.sentinel.standing(keys)
