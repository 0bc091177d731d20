"""The thread that calls the application's callbacks, which may block or raise without disturbing the engine."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from tenure.base.safe_log import SafeLog

log = SafeLog("tenure.callbacks")


class CallbackThread:
    """Calls actions in order, on one thread that is started with the first of them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._lock = threading.Lock()

    def call(self, action: Callable[[], object]) -> None:
        """Call ``action`` soon, on the thread."""
        with self._lock:
            self._queue.put(action)
            if self._closed:
                # This call comes after close(), so the new thread ends right after it.
                self._queue.put(None)
            if self._closed or self._thread is None:
                thread = threading.Thread(target=self._loop, name=f"tenure-callbacks-{self._name}", daemon=True)
                # If the system cannot start it now, the next call tries again, and the queue has this action.
                thread.start()
                self._thread = thread

    def close(self, timeout: float) -> None:
        """Call what is queued, and end the thread."""
        with self._lock:
            already, self._closed = self._closed, True
            thread = self._thread
        if thread is not None:
            if not already:
                self._queue.put(None)
            if thread is not threading.current_thread():
                thread.join(timeout)

    def _loop(self) -> None:
        while (action := self._queue.get()) is not None:
            try:
                action()
            except BaseException:
                # The callbacks that follow are called even after sys.exit(), and whatever the application's logs raise.
                log.exception("a callback failed")
