"""How the engine's threads reach an event loop, and how a task on it waits for them: on asyncio and trio.

Nothing here blocks a thread of the engine. A busy event loop only notices a change later. A wait belongs to the loop of
the task that waits, so a node may be used from another loop than the one on which it was started.
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
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

if TYPE_CHECKING:
    from tenure.engine.engine import Engine

log = logging.getLogger("tenure.callbacks")

T = TypeVar("T")
CUT_EVERY_S = 0.05
"""Seconds between two attempts to cut a call short: at the first attempt the call may not have begun."""


class Loop:
    """The event loop of the task that creates this object."""

    def __init__(self) -> None:
        if trio := running_trio():
            self._soon = trio.lowlevel.current_trio_token().run_sync_soon
        else:
            # With the context of this task, because a thread of the engine has none of the application's variables.
            soon, context = asyncio.get_running_loop().call_soon_threadsafe, contextvars.copy_context()
            self._soon = functools.partial(soon, context=context)

    def call(self, action: Callable[[], object]) -> None:
        """Call ``action`` on the loop, from any thread. A loop that has ended calls nothing."""

        def careful() -> None:
            try:
                action()
            except Exception:
                log.exception("a callback failed")

        with contextlib.suppress(RuntimeError):
            self._soon(careful)


async def wait_for_wakeup(
    when: Callable[[Callable[[], object]], Callable[[], object]],
    timeout: float | None = None,  # noqa: ASYNC109
) -> bool:
    """Wait for a wake-up; False if ``timeout`` seconds pass first.

    ``when`` takes a function that wakes this task, and returns a function that cancels the wake-up.
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


async def wait_for(engine: Engine, condition: Callable[[], bool], timeout: float | None = None) -> bool:  # noqa: ASYNC109
    """Wait until a condition holds, checked after every change; False if ``timeout`` seconds pass first."""
    engine.check_own()
    return condition() or await wait_for_wakeup(lambda wake: engine.call_when(condition, wake), timeout)


async def wait_for_future(answer: Future[Any], timeout: float | None = None) -> bool:  # noqa: ASYNC109
    """Wait until a thread has completed a future; False if ``timeout`` seconds pass first."""

    def when(wake: Callable[[], object]) -> Callable[[], object]:
        answer.add_done_callback(lambda _: wake())
        # `bool` does nothing here. There is nothing to cancel, because a late wake-up does no harm.
        return bool

    return await wait_for_wakeup(when, timeout)


async def run_in_thread(
    blocking: Callable[[], T], *, abandon: bool = False, cut: Callable[[], object] | None = None
) -> T:
    """Run a blocking call in a new thread.

    A cancelled task waits for the end of the call, even if asyncio's own ``cancel()``, which ignores shields, has
    cancelled it. There are two exceptions: a call that may be abandoned, and a call that ``cut`` can cut short.

    A pool of threads could block. The application's pool may have no thread left. And in a pool of fixed size, a call
    might wait for a lock of a transaction that itself waits for a thread.
    """
    answer = begin(blocking, "tenure-call")
    with anyio.CancelScope(shield=not (abandon or cut)) as scope:
        try:
            await wait_for_future(answer)
        except anyio.get_cancelled_exc_class():
            scope.shield = True
            while not (abandon or answer.done()):
                with contextlib.suppress(anyio.get_cancelled_exc_class()):
                    if cut is not None:
                        await run_in_thread(cut)
                    await wait_for_future(answer, CUT_EVERY_S if cut else None)
            raise
    return answer.result()


def begin(blocking: Callable[[], T], thread: str) -> Future[T]:
    """Begin a blocking call in a new thread of that name, in the context of the caller; return its answer to be."""
    answer: Future[T] = Future()
    work = (contextvars.copy_context(), blocking, answer)
    threading.Thread(target=_work, args=work, name=thread, daemon=True).start()
    return answer


def _work(context: contextvars.Context, blocking: Callable[[], T], answer: Future[T]) -> None:
    try:
        answer.set_result(context.run(blocking))
    except BaseException as error:  # noqa: BLE001 - the task that waits for the answer gets it
        answer.set_exception(error)


def running_trio() -> Any:
    """Return trio if the present task runs on it; None on asyncio."""
    trio = sys.modules.get("trio")
    return trio if trio is not None and trio.lowlevel.in_trio_run() else None
