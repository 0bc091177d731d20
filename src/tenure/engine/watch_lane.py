"""The watch lane: it waits for another member's sentinel to fall, and reads a few members."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tenure.base import clock
from tenure.core import messages, timing
from tenure.engine.lane import Lane
from tenure.store.session import Failed
from tenure.store.watch import WatchStore

if TYPE_CHECKING:
    from tenure.engine.engine import Engine


class WatchLane(Lane):
    """The connection on which the node watches the others, and the thread that works on it."""

    name = "watch"
    harmless = (Failed,)
    store: WatchStore | None

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine, engine.protocol.answer_watch, engine.protocol.fail_watch)
        self._blind_since = timing.NEVER
        self._told_blind = False

    def loop(self) -> None:
        """Watch until the node is closed."""
        engine = self._engine
        try:
            while True:
                with engine.lock:
                    # Under the lock: otherwise close() could notify before the wait below begins.
                    if engine.stopping.is_set():
                        break
                    request = engine.protocol.watch(clock.now())
                    if isinstance(request, float):
                        engine.changed.wait(None if request == timing.NEVER else max(0.0, request - clock.now()))
                        continue
                if isinstance(request, messages.Look) and self.store and not self.store.waits(request):
                    engine.stopping.wait(request.seconds)
                if not engine.stopping.is_set():
                    error = self.run(request)
                    if error is None:
                        self._blind_since, self._told_blind = timing.NEVER, False
                        self._wake_control()
                    elif not engine.stopping.is_set():
                        self._report(request, error)
        finally:
            self.drop()

    def _open(self) -> messages.Watching:
        self._adopt(*self._engine.backend.open_watch())
        return messages.Watching()

    def _wake_control(self) -> None:
        with self._engine.lock:
            awaited = self._engine.protocol.awaits_control(clock.now())
        if awaited:
            self._engine.control.wake()

    def _report(self, request: messages.WatchRequest, error: Exception) -> None:
        """Log a failure at DEBUG, because it is tried again and again; after a TTL without success, warn once."""
        engine, now = self._engine, clock.now()
        self._blind_since = min(self._blind_since, now)
        if now >= self._blind_since + engine.settings.ttl and not (self._told_blind or engine.control.outage):
            self._told_blind = True
            engine.log.warning(
                "%s: cannot watch the other nodes, nor replace a silent one: %s", engine.settings.name, error
            )
        else:
            engine.log.debug("%s: %s failed: %s", engine.settings.name, type(request).__name__, error)
