"""Blocking calls of requests, each in a thread of its own: a limited number at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from tenure import StoreUnavailable
from tenure.aio.bridge import begin, wait_for_future

AT_ONCE = 50
"""How many calls of one kind may be under way at a time."""

T = TypeVar("T")


class Busy(StoreUnavailable):
    """Too many requests wait for the same already."""


class Threads:
    """The calls of one kind."""

    def __init__(self, busy: str) -> None:
        self._busy = busy
        """What a request is told that finds too many others."""
        self._lock = threading.Lock()
        self._under_way = 0

    async def run(self, blocking: Callable[[], T]) -> T:
        """Run a blocking call in a thread. A request that is cancelled abandons it; it counts until it has ended."""
        with self._lock:
            if self._under_way >= AT_ONCE:
                raise Busy(self._busy)
            self._under_way += 1

        def work() -> T:
            try:
                return blocking()
            finally:
                self._ended()

        try:
            answer = begin(work, "tenure-call")
        except BaseException:
            # The process could not start a thread.
            self._ended()
            raise
        await wait_for_future(answer)
        return answer.result()

    def _ended(self) -> None:
        with self._lock:
            self._under_way -= 1
