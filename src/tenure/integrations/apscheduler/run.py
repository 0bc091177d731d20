"""One run of a job of APScheduler: claimed before it begins, and recorded when it is over.

``current_run()`` returns it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from tenure.aio import bridge
from tenure.errors import ConfigError
from tenure.schedule.run import (
    RETRY_S,
    NotDone,
    Run,
    claim,
    described,
    is_committed,
    is_now_over,
    is_over,
    lost,
    marks_itself,
    record_end,
    try_again,
)

log = logging.getLogger("tenure.apscheduler")

ATTEMPTS = 3
"""How many times a run is tried if its transaction does not commit. After that it is left to the next leader."""

_current: ContextVar[Run] = ContextVar("tenure_run")


def current_run() -> Run:
    """Return the run of the job that calls this."""
    run = _current.get(None)
    if run is None:
        raise ConfigError("there is no run: call current_run() in a job of a leader-only scheduler")
    return run


@contextlib.contextmanager
def running(run: Run) -> Iterator[None]:
    """Let ``current_run()`` return this run in the block."""
    token = _current.set(run)
    try:
        yield
    finally:
        _current.reset(token)


def perform(run: Run, job: Any, *, repeats: bool) -> Any:
    """Claim the run, call the job, and record how the run ended."""
    claim(run, repeats=repeats)
    result: Any = None
    error: Exception | None = None
    for tries_left in reversed(range(ATTEMPTS)):
        result, error = None, None
        try:
            with running(run):
                result = job.func(*job.args, **job.kwargs)
        except Exception as caught:  # noqa: BLE001 - it is raised below
            error = caught
        if _is_over(run, error, tries_left):
            break
    if error is not None:
        raise error
    return result


async def perform_async(run: Run, job: Any, *, repeats: bool) -> Any:
    """Do the same as ``perform``, for a job that is a coroutine function."""
    await bridge.run_in_thread(functools.partial(claim, run, repeats=repeats))
    result: Any = None
    error: Exception | None = None
    for tries_left in reversed(range(ATTEMPTS)):
        result, error = None, None
        try:
            with running(run):
                result = await job.func(*job.args, **job.kwargs)
        except Exception as caught:  # noqa: BLE001 - it is raised below
            error = caught
        if await bridge.run_in_thread(functools.partial(_is_over, run, error, tries_left)):
            break
    if error is not None:
        raise error
    return result


def _is_over(run: Run, error: Exception | None, tries_left: int) -> bool:
    """Handle the end of a run; False if the run has to be tried again.

    If the job does not mark its run as done, this does. That includes a job that raised: running it again would not
    help. If the job marks its run itself, the run is done only if that transaction is committed. If it is not, the run
    is tried again, whether the job raised the error or ignored it.
    """
    if error is not None and lost(error, run.term):
        return True
    if is_over(run) or not marks_itself(run):
        _record(run, error)
    elif is_committed(run):
        is_now_over(run)
    elif tries_left and not run.term.wait_lost(RETRY_S):
        log.warning("%r was not committed, and is tried again: %r", run, error)
        run.attempt += 1
        try_again(run)
        return False
    elif error is None:
        raise NotDone(
            f"{run!r} is not done: the transaction that marks it was not committed, and the job ignored the error"
        )
    return True


def _record(run: Run, error: Exception | None) -> None:
    """Record how a run ended. If the claim has marked it as done, a record that cannot be written is only a loss."""
    outcome, detail = ("done", None) if error is None else ("failed", described(error))
    try:
        record_end(run, outcome, detail, over=True)
    except Exception as failure:
        if not is_over(run):
            raise
        log.warning("%r has ended (%s), but this could not be recorded: %s", run, outcome, failure)
