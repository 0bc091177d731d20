"""Runs the application's callbacks and feeds its event loops, away from the engine's threads.

A callback may block or raise; the engine must not notice. One thread, started with the first thing to do.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

log = logging.getLogger("tenure.callbacks")


class Dispatcher:
    """Calls things in order, on one thread of its own."""

    def __init__(self, name: str) -> None:
        """Start no thread yet."""
        self._name = name
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._lock = threading.Lock()

    def call(self, action: Callable[[], object]) -> None:
        """Have ``action`` called soon."""
        with self._lock:
            self._queue.put(action)
            if self._closed:
                self._queue.put(None)  # a latecomer: its thread ends with it
            if self._closed or self._thread is None:
                self._thread = threading.Thread(target=self._loop, name=f"tenure-callbacks-{self._name}", daemon=True)
                self._thread.start()

    def close(self, timeout: float) -> None:
        """Finish what was asked for, and end the thread."""
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
            except Exception:
                log.exception("a callback failed")
