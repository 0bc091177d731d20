"""How the engine's threads reach an event loop, and how a task on it waits for them. asyncio and trio.

Nothing here blocks a thread of the engine's: an event loop that is busy hears later, and that is all it costs. A wait
belongs to the loop of the task that waits, so a node may be used from another loop than the one it was started on.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import logging
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import anyio

log = logging.getLogger("tenure.callbacks")

T = TypeVar("T")
CUT_EVERY_S = 0.05
"""How often a call that is to be cut short is cut: the first time it may not have begun."""


class Loop:
    """The event loop of the task that makes it."""

    def __init__(self) -> None:
        """Remember the running loop."""
        self._soon = _soon()

    def call(self, action: Callable[[], object]) -> None:
        """Have ``action`` called on the loop, from any thread. A loop that has ended calls nothing any more."""

        def careful() -> None:
            try:
                action()
            except Exception:
                log.exception("a callback failed")

        with contextlib.suppress(RuntimeError):
            self._soon(careful)


async def until(
    when: Callable[[Callable[[], object]], Callable[[], object]],
    timeout: float | None = None,  # noqa: ASYNC109
) -> bool:
    """Wait until ``when`` calls what it is given; False if ``timeout`` seconds pass first.

    ``when`` returns what takes that back.
    """
    loop = Loop()
    event = anyio.Event()
    forget = when(lambda: loop.call(event.set))
    try:
        with anyio.move_on_after(timeout):
            await event.wait()
            return True
        return False
    finally:
        forget()


async def done(answer: Future[Any], timeout: float | None = None) -> bool:  # noqa: ASYNC109
    """Wait until a future of some thread's is done; False if ``timeout`` seconds pass first."""

    def when(wake: Callable[[], object]) -> Callable[[], object]:
        answer.add_done_callback(lambda _: wake())
        return bool  # nothing to take back: it would wake nobody

    return await until(when, timeout)


async def run(blocking: Callable[[], T], *, abandon: bool = False, cut: Callable[[], object] | None = None) -> T:
    """Run a blocking call in a thread of its own.

    A cancelled task waits for its end, be it cancelled by a scope or by asyncio's own ``cancel()``, which knows no
    shield; unless it may be abandoned, or can be cut short by ``cut``.

    Not in one of the application's threads, of which there may be none left, nor in one of a fixed number: what a call
    waits for may be held by a transaction that waits for a thread.
    """
    answer: Future[T] = Future()
    threading.Thread(
        target=_work, args=(contextvars.copy_context(), blocking, answer), name="tenure-call", daemon=True
    ).start()
    with anyio.CancelScope(shield=not (abandon or cut)) as scope:
        try:
            await done(answer)
        except anyio.get_cancelled_exc_class():
            scope.shield = True
            while not (abandon or answer.done()):
                with contextlib.suppress(anyio.get_cancelled_exc_class()):
                    if cut is not None:
                        await run(cut)
                    await done(answer, CUT_EVERY_S if cut else None)
            raise
    return answer.result()


def _work(context: contextvars.Context, blocking: Callable[[], T], answer: Future[T]) -> None:
    try:
        answer.set_result(context.run(blocking))
    except BaseException as error:  # noqa: BLE001 - it is the asker's
        answer.set_exception(error)


def _soon() -> Callable[[Callable[[], object]], Any]:
    trio = sys.modules.get("trio")
    if trio is not None:
        with contextlib.suppress(RuntimeError):
            return trio.lowlevel.current_trio_token().run_sync_soon  # type: ignore[no-any-return]
    # In the context of the task: a thread of the engine's has none of the application's variables in its own.
    return functools.partial(asyncio.get_running_loop().call_soon_threadsafe, context=contextvars.copy_context())
