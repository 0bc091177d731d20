"""A running call, which can be waited for, cancelled, and left behind.

A coroutine function runs as a new task on the event loop, a plain function in a new thread. Calls do not share a task
group, because a call that does not end must not hold up the others.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from tenure.aio.bridge import begin, running_trio, wait_for_future


def is_async(function: Callable[..., object]) -> bool:
    """Whether the function is an ``async def``, a partial of one, or an object whose ``__call__`` is one."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - its kind matters, not its presence
    )


class Call:
    """One call. It begins when this object is created, on the event loop of the task that creates it."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.answer: Future[Any] = Future()
        """Completed when the call is over, whatever its outcome."""
        self.cancel: Callable[[], object] = bool
        """Cancels a coroutine; does nothing to a thread."""
        if not is_async(function):
            self.answer = begin(partial(function, *arguments), "tenure-service")
        elif trio := running_trio():
            self._begin_on_trio(trio, function, arguments)
        else:
            self._task = asyncio.create_task(self._await(function, arguments))
            # If the task is cancelled before it begins, `_await()` never runs. This callback completes the answer.
            self._task.add_done_callback(lambda _: self._finish(error=asyncio.CancelledError()))
            self.cancel = self._task.cancel

    @property
    def over(self) -> bool:
        """Whether the call has ended."""
        return self.answer.done()

    @property
    def error(self) -> BaseException | None:
        """What a call that has ended raised; None if it returned."""
        return self.answer.exception(0)

    async def wait(self, timeout: float | None = None) -> bool:
        """Wait until the call is over; False if ``timeout`` seconds pass first."""
        return self.over or await wait_for_future(self.answer, timeout)

    async def _await(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        """Await the function. An exception that would end the whole event loop (SystemExit) ends only this call."""
        try:
            self._finish(await function(*arguments))
        except BaseException as error:  # noqa: BLE001 - the task that waits gets it
            self._finish(error=error)

    def _begin_on_trio(self, trio: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        scope = trio.CancelScope()
        self.cancel = scope.cancel

        async def task() -> None:
            with scope:
                await self._await(function, arguments)

        trio.lowlevel.spawn_system_task(task, context=contextvars.copy_context())

    def _finish(self, result: object = None, *, error: BaseException | None = None) -> None:
        if self.answer.done():
            return
        if error is None:
            self.answer.set_result(result)
        else:
            self.answer.set_exception(error)
