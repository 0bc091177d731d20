"""A lane: one connection of the node, and how the lane's thread runs the protocol's requests on it."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from tenure.base import clock
from tenure.core import messages, timing
from tenure.store.session import LaneSession

if TYPE_CHECKING:
    from tenure.engine.engine import Engine


class Lane(abc.ABC):
    """What the control lane and the watch lane have in common."""

    name: str
    harmless: tuple[type[Exception], ...]
    """Errors after which the connection can still be used."""
    store: Any = None
    """Performs requests; None while there is no connection."""
    session: LaneSession | None = None

    def __init__(self, engine: Engine, answer: Callable[..., None], fail: Callable[..., None]) -> None:
        """``answer`` and ``fail`` pass a reply and a failure to the protocol."""
        self._engine = engine
        self._answer = answer
        self._fail = fail
        self._busy_since = timing.NEVER

    @abc.abstractmethod
    def _open(self) -> Any:
        """Connect; return the reply for the protocol."""

    def run(self, request: Any) -> Exception | None:
        """Run a request, and pass the outcome to the protocol; return the error if the request failed.

        Never raises, because that would end the lane's thread. If the protocol cannot process a reply (a row was edited
        by hand, say), the connection is closed and opened again.
        """
        try:
            return self._run(request)
        except Exception as error:  # noqa: BLE001
            self._engine.is_expected(request, error)
            self._lose(request)
            return error

    def _run(self, request: Any) -> Exception | None:
        asked_at = clock.now()
        try:
            reply = self._perform(request)
        except Exception as error:  # noqa: BLE001
            lost = not (self._engine.is_expected(request, error) and isinstance(error, self.harmless))
            with self._engine.deciding():
                self._engine.recorder.failed(request)
                self._fail(request, clock.now(), lost=lost)
            if lost:
                self.drop()
            return error
        with self._engine.deciding() as protocol:
            now = clock.now()
            self._answer(request, reply, now)
            self._engine.recorder.answered(request, reply, protocol.roles, now - asked_at, now)
        return None

    def _perform(self, request: Any) -> Any:
        if isinstance(request, (messages.Open, messages.OpenWatch)):
            self.drop()
            return self._open()
        with self.timed():
            return self.store.perform(request)

    def _lose(self, request: Any) -> None:
        """Give up the connection; the protocol puts the terms in doubt before it is closed."""
        with self._engine.deciding():
            self._fail(request, clock.now(), lost=True)
        self.drop()

    def _adopt(self, store: Any, session: LaneSession) -> None:
        with self._engine.lock:
            self.store, self.session = store, session
            self._engine.share_backend_pids()

    def drop(self) -> None:
        """Close the connection, if there is one."""
        with self._engine.lock:
            session = self.session
            self.store = self.session = None
        if session is not None:
            session.close()

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Let the keeper cut the connection if the block hangs."""
        with self._engine.lock:
            self._busy_since = clock.now()
        try:
            yield
        finally:
            with self._engine.lock:
                self._busy_since = timing.NEVER

    def cut_if_hung(self, now: float, patience_s: float) -> float:
        """Cut the connection if a call on it has taken longer than ``patience_s``.

        Return when the current call will reach that limit. The caller holds the lock.
        """
        if now >= self._busy_since + patience_s and self.session:
            name = self._engine.settings.name
            self._engine.log.info("%s: no answer on the %s connection for too long; cutting it", name, self.name)
            self._busy_since = timing.NEVER
            self.session.abort()
        return self._busy_since + patience_s
