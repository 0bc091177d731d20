"""A call under way, which may be waited for, asked to end, and left behind.

A coroutine function runs as a task of its own on the event loop, a plain one in a thread of its own. Not in a task
group: what will not end must not keep the rest from going on.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from tenure.loops import done


def is_async(function: Callable[..., object]) -> bool:
    """Whether calling it makes a coroutine: an ``async def``, a partial of one, or an object called like one."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - not whether, but how
    )


class Job:
    """One call, begun when this is made, on the event loop of the task that makes it."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Begin."""
        self.answer: Future[Any] = Future()
        """Done when the call is over, one way or another."""
        self.cancel: Callable[[], object] = bool
        """Asks a coroutine to end, by cancelling it; a thread cannot be asked that way."""
        if not is_async(function):
            work = (contextvars.copy_context().run, function, arguments)
            threading.Thread(target=self._work, args=work, name="tenure-service", daemon=True).start()
        elif _on_trio():
            self._begin_on_trio(function, arguments)
        else:
            self._task = asyncio.create_task(self._await(function, arguments))
            self._task.add_done_callback(lambda _: self._settle(error=asyncio.CancelledError()))  # if it never began
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
        """Wait until it is over; False if ``timeout`` seconds pass first."""
        return self.over or await done(self.answer, timeout)

    def _work(self, run: Callable[..., Any], function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        try:
            self._settle(run(function, *arguments))
        except BaseException as error:  # noqa: BLE001 - it is for whoever waits
            self._settle(error=error)

    async def _await(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        """Run it. What would end the whole event loop (SystemExit) ends only this."""
        try:
            self._settle(await function(*arguments))
        except BaseException as error:  # noqa: BLE001 - as in _work
            self._settle(error=error)

    def _begin_on_trio(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        import trio  # noqa: PLC0415 - it runs already

        scope = trio.CancelScope()
        self.cancel = scope.cancel

        async def task() -> None:
            with scope:
                await self._await(function, arguments)

        trio.lowlevel.spawn_system_task(task, context=contextvars.copy_context())

    def _settle(self, result: object = None, *, error: BaseException | None = None) -> None:
        if self.answer.done():
            return
        if error is None:
            self.answer.set_result(result)
        else:
            self.answer.set_exception(error)


def _on_trio() -> bool:
    trio = sys.modules.get("trio")
    return trio is not None and trio.lowlevel.in_trio_run()
