"""The watch lane's requests: wait for a sentinel, read the members, knock before a member is ended, and evict it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from tenure.core import messages, timing
from tenure.core.messages import Sighting
from tenure.store import statements
from tenure.store.session import Result, Sentinel, Session, Step


class WatchActions:
    """What the watch connection can do to other connections. By default nothing: databases override what they can."""

    def slice_s(self) -> float:
        """Return how long a wait may last without being written to the server's log."""
        return timing.SLICE_S

    def evict(self, namespace: str, member_ids: tuple[str, ...]) -> None:
        """Terminate the connections of members that were ended. Best effort: the lease holds in any case."""

    def unblock(self, namespace: str, control_pid: int, bound_s: float) -> None:
        """Terminate transactions that have blocked the control connection for longer than their bound."""


class NoSentinel:
    """The sentinel of a connection that can neither hold nor see sentinels.

    The sentinels of other members count as held, so a member is ended only for its silence.
    """

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop

    def hold(self, key: int) -> bool:
        """Return False: no sentinel can be held."""
        return False

    def release(self, key: int) -> None:
        """Do nothing."""

    def sweep(self, keys: set[int]) -> None:
        """Do nothing."""

    def abandon(self) -> None:
        """Do nothing."""

    def wait(self, key: int, seconds: float) -> None:
        """Wait for the time to pass, or for the node to be closed."""
        self._stop.wait(seconds)

    def duplicates(self) -> list[int]:
        """Return an empty list: no descriptor carries a sentinel."""
        return []

    def standing(self, keys: Sequence[int]) -> set[int]:
        """Return all the keys: each counts as held."""
        return set(keys)


class WatchStore:
    """Carries out the watch lane's requests for one namespace, on the watch connection."""

    def __init__(
        self,
        session: Session,
        sentinel: Sentinel,
        watcher: WatchActions,
        namespace: str,
        knock: Callable[[], str | None],
    ) -> None:
        """Work on an open session; ``knock`` opens a new connection and returns the server's start time."""
        self.session = session
        self.sentinel = sentinel
        self.watcher = watcher
        self.namespace = namespace
        self.knock = knock
        self.control_pid = 0

    def perform(self, request: messages.WatchRequest) -> messages.WatchReply:
        """Carry out a request and return the reply; raise ``Gone`` or ``Failed``."""
        if isinstance(request, messages.Look):
            return self.look(request.member_id, request.wait_for, request.seconds)
        if isinstance(request, messages.Knock):
            return messages.Knocked(self.knock() == request.server_start)
        if isinstance(request, messages.Evict):
            self.watcher.evict(self.namespace, request.member_ids)
        elif isinstance(request, messages.Unblock):
            self.watcher.unblock(self.namespace, self.control_pid, request.bound_s)
        return messages.Done()

    def look(self, member_id: str, wait_for: int | None = None, seconds: float = 0.0) -> messages.Looked:
        """Wait up to ``seconds`` for a sentinel to be released; read every member; then read which sentinels are held.

        The order matters. A member takes its sentinel before its row names it, so the sentinel of a row that was read
        is held, unless its owner is gone.
        """
        server = self.session.server()
        mine = {"namespace": self.namespace, "id": member_id}
        steps = Step(statements.ROSTER, mine), Step(statements.ANY_VACANCY, mine)
        (roster, vacancy), standing = self._survey(wait_for, seconds, *steps)
        members = tuple(
            Sighting(member, ttl_ms / 1000, renewals, key, epoch, start, (key, pid) in standing)
            for member, ttl_ms, renewals, key, epoch, start, pid in roster.rows
        )
        return messages.Looked(server, members, bool(vacancy.rows), self.watcher.slice_s())

    def _survey(
        self, wait_for: int | None, seconds: float, roster: Step, vacancy: Step
    ) -> tuple[Sequence[Result], set[tuple[int, int]]]:
        """Wait, then read. Return the results and the held sentinels, each as its key and its owner's process."""
        if wait_for is not None:
            self.sentinel.wait(wait_for, seconds)
        results = self.session.read(roster, vacancy)
        owners = [(key, pid) for _, _, _, key, _, _, pid in results[0].rows if key is not None]
        standing = self.sentinel.standing([key for key, _ in owners])
        return results, {(key, pid) for key, pid in owners if key in standing}
