"""How the engine's threads reach an event loop, and how a task on it waits for them. asyncio and trio.

Nothing here blocks a thread of the engine's: an event loop that is busy hears later, and that is all it costs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import anyio
import anyio.to_thread

log = logging.getLogger("tenure.callbacks")

T = TypeVar("T")
THREADS = 8
"""How many blocking calls of one node may be under way at once, apart from the application's, which may be many."""


class Loop:
    """The event loop of the task that makes it."""

    def __init__(self) -> None:
        """Remember the running loop."""
        self._soon = _soon()
        self._threads = anyio.CapacityLimiter(THREADS)

    def call(self, action: Callable[[], object]) -> None:
        """Have ``action`` called on the loop, from any thread. A loop that has ended calls nothing any more."""

        def careful() -> None:
            try:
                action()
            except Exception:
                log.exception("a callback failed")

        with contextlib.suppress(RuntimeError):
            self._soon(careful)

    async def run(self, blocking: Callable[[], T], *, abandon: bool = False) -> T:
        """Run a blocking call in a thread; a cancelled task waits for its end, unless it may be abandoned."""
        return await anyio.to_thread.run_sync(blocking, abandon_on_cancel=abandon, limiter=self._threads)

    async def until(
        self,
        when: Callable[[Callable[[], object]], Callable[[], None]],
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> bool:
        """Wait until ``when`` calls what it is given; False if ``timeout`` seconds pass first."""
        event = anyio.Event()
        forget = when(lambda: self.call(event.set))
        try:
            with anyio.move_on_after(timeout):
                await event.wait()
                return True
            return False
        finally:
            forget()


def _soon() -> Callable[[Callable[[], object]], Any]:
    trio = sys.modules.get("trio")
    if trio is not None:
        with contextlib.suppress(RuntimeError):
            return trio.lowlevel.current_trio_token().run_sync_soon  # type: ignore[no-any-return]
    return asyncio.get_running_loop().call_soon_threadsafe
