"""A database that exists only in the memory of one node: it elects that node, and does as a test tells it.

The node, its engine and its protocol are the real ones. Only what a server would answer is made up here.
"""

from __future__ import annotations

import contextlib
import socket
import time
from typing import Any, NoReturn

from tenure.core import messages
from tenure.core.messages import Held, Opened, Vacancy
from tenure.core.servers import Confirmed, Server
from tenure.core.timing import MAX_TTL_S
from tenure.databases.backend import Backend, Control, TellStart, Watch, ignore_start, this_process
from tenure.errors import ConfigError, StoreUnavailable
from tenure.settings import NodeSettings
from tenure.store.control import ControlStore
from tenure.store.session import Gone, LaneSession, wait_readable
from tenure.store.watch import NoSentinel, WatchActions, WatchStore

NO_DATABASE = (
    "a node of tenure.testing has no database, so it cannot fence a write, open a transaction or read records: test "
    'this part with tenure.Node("sqlite:///…") and a file in a temporary directory'
)
INCARNATION = "testing:1"


def refuse(*_: object) -> NoReturn:
    """Raise ConfigError, because this needs a database."""
    raise ConfigError(NO_DATABASE)


class MemoryBackend(Backend):
    """What a server would know: who holds each role, and whether the server can be reached."""

    mode: str | None = "hybrid"

    def __init__(self, settings: NodeSettings) -> None:
        super().__init__(settings)
        self.reachable = True
        self.news = False
        """Whether the node should ask at once what it holds."""
        self.taken: set[str] = set()
        """The roles that another node leads, as far as this node can know."""
        self.standing: set[str] = set()
        self.held: dict[str, int] = {}
        self.tokens: dict[str, int] = {}
        self._starts = 0

    @property
    def server(self) -> Server:
        """The server, which was restarted whenever it could not be reached."""
        return Server(str(self._starts), INCARNATION)

    def cut(self, connection: Any) -> None:
        """Do nothing: there is no connection."""

    def assign_lock(self, role: str, lock_id: int | None) -> None:
        """Do nothing: no other program could hold the lock."""

    def check_fence(self) -> None:
        refuse()

    def open_session(self) -> LaneSession:
        refuse()

    def transaction(self) -> contextlib.AbstractContextManager[Any]:
        refuse()

    def open_control(self, server_answered: TellStart = ignore_start) -> Control:
        if not self.reachable:
            raise StoreUnavailable("the test has suspended this node")
        self._starts += 1
        server_answered(self.server.start)
        confirmed = Confirmed(INCARNATION, 0, MAX_TTL_S, MAX_TTL_S)
        store = MemoryStore(self, self._settings.namespace)
        return store, MemorySession(self), Opened(self.server, confirmed)

    def open_watch(self) -> Watch:
        store = MemoryWatch(self, self._settings.namespace)
        return store, MemorySession(self)


class MemorySession(LaneSession):
    """The connection of a lane."""

    def __init__(self, backend: MemoryBackend) -> None:
        self._backend = backend

    def idle(self, waker: socket.socket, seconds: float | None) -> list[str]:
        if self._backend.reachable and not self._backend.news:
            wait_readable([waker], seconds)
        if not self._backend.reachable:
            raise Gone("the test has suspended this node")
        told, self._backend.news = self._backend.news, False
        return ["vacant somewhere"] if told else []

    def transaction(self) -> contextlib.AbstractContextManager[Any]:
        refuse()

    def read(self, *_: Any) -> NoReturn:
        refuse()

    def close(self) -> None:
        """Do nothing."""

    def abort(self) -> None:
        """Do nothing: no call on it hangs."""


class MemorySentinel(NoSentinel):
    """A sentinel that can be held, since no other process wants it."""

    def hold(self, key: int) -> bool:  # noqa: ARG002
        return True


class MemoryStore(ControlStore):
    """Answers the requests of the control lane."""

    def __init__(self, backend: MemoryBackend, namespace: str) -> None:
        super().__init__(MemorySession(backend), MemorySentinel(backend.stop), namespace, this_process())
        self._backend = backend

    def perform(self, request: messages.ControlRequest) -> messages.ControlReply:  # noqa: PLR0911 - one a request
        """Answer as a server would that this node is alone on, but for the roles that a test has taken."""
        it = self._backend
        if isinstance(request, messages.Join):
            it.held.clear()
            return messages.Joined(sentinel=True)
        if isinstance(request, messages.Renew):
            return self._reply(request.alone_in)
        if isinstance(request, messages.Resume):
            return self._reply()
        if isinstance(request, messages.Stand):
            it.standing = it.standing.union(request.roles).difference(request.withdrawn)
        if isinstance(request, messages.Acquire):
            return messages.Acquired({role: self._take(role) for role in request.roles if role not in it.taken})
        if isinstance(request, messages.Vacate):
            it.held.pop(request.role, None)
            return messages.Vacated(done=True)
        if isinstance(request, messages.End):
            return messages.Ended((), (), {})
        if isinstance(request, messages.Leaders):
            return messages.LeadersAre(())
        return messages.Done()

    def _take(self, role: str) -> int:
        it = self._backend
        it.tokens[role] = it.held[role] = it.tokens.get(role, 0) + 1
        return it.held[role]

    def _reply(self, alone_in: tuple[str, ...] = ()) -> messages.Standing:
        it = self._backend
        for role in it.taken.intersection(it.held):
            # The new token is that of the other node.
            it.tokens[role] = it.held.pop(role) + 1
        vacant = it.standing.difference(it.held, it.taken)
        return messages.Standing(
            alive=True,
            held=tuple(Held(role, token) for role, token in it.held.items()),
            vacant=tuple(Vacancy(role, it.tokens.get(role, 0)) for role in sorted(vacant)),
            alone_in=tuple(role for role in alone_in if role not in it.taken),
            clock_us=time.time_ns() // 1000,
        )


class MemoryWatch(WatchStore):
    """Answers the requests of the watch lane: there is no other member."""

    def __init__(self, backend: MemoryBackend, namespace: str) -> None:
        sentinel = MemorySentinel(backend.stop)
        super().__init__(MemorySession(backend), sentinel, WatchActions(), namespace, lambda: backend.server.start)
        self._backend = backend

    def perform(self, request: messages.WatchRequest) -> messages.WatchReply:
        """Answer that this node is alone. Then it never asks anything but to look."""
        return messages.Looked(self._backend.server, ()) if isinstance(request, messages.Look) else messages.Done()
