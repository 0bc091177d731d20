"""One run of a job: claimed before it begins, marked as done when it is over. And what the job can ask about it."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from datetime import datetime
from types import TracebackType
from typing import Any, TypeVar

import anyio
import anyio.to_thread

from tenure.async_term import AsyncTransaction
from tenure.errors import ConfigError, Fenced, NodeClosed, NotLeader, TenureError
from tenure.term import Term, Transaction

T = TypeVar("T")

log = logging.getLogger("tenure.apscheduler")

RETRY_S = 0.3
"""The pause after which a claim is tried again where the database cannot be reached, as long as the term stands."""
ATTEMPTS = 3
"""How often a run is tried whose own transaction does not commit, before it is left to the next leader."""

_current: ContextVar[Run] = ContextVar("tenure_run")


class AlreadyRan(TenureError):
    """This run of the job, or a later one, was claimed or done before: it does not run again."""


class Run:
    """One run of a job, under the term of its leader."""

    def __init__(self, job: str, due: datetime, term: Term) -> None:
        """Made by the scheduler, not by you."""
        self.job = job
        """The job's id, with the job store's alias before it if that is not ``default``; a hash of that, where it is
        too long for the database, or blank."""
        self.due = due
        """The moment at which it is due, whenever it really began."""
        self.term = term
        """The term under which it runs; ``term.valid`` says whether it still counts."""
        self.opened = False
        """Whether the job marked it as done itself, in a transaction that was committed or not."""
        self.done = False
        """Whether it is over, and not to be repeated."""

    def __repr__(self) -> str:
        """Show job, due time and token."""
        return f"<Run of {self.job!r} due {self.due.isoformat()} token={self.term.token}>"

    def transaction(self) -> RunTransaction:
        """Open a fenced transaction that marks this run as done; once in a run.

        ``with`` in a plain function gives a Transaction, ``async with`` in a coroutine an AsyncTransaction. What is
        written there is committed together with the mark: with ``at-least-once`` it happens exactly once.
        """
        return RunTransaction(self)

    def finish(self, connection: Any) -> None:
        """Fence the transaction of a connection of yours, and mark this run as done in it; see :meth:`transaction`.

        The connection is a blocking one; with SQLAlchemy's async ones ``await session.run_sync(run.finish)``.
        """
        self.open()
        self.mark(functools.partial(self.term.finish, connection))

    def open(self) -> None:
        """Take in that the job marks the run as done itself; once."""
        if self.opened:
            raise ConfigError(f"{self!r} was marked as done already: once in a run, in the transaction of its effects")
        self.opened = True

    def mark(self, finish: Callable[[str, datetime], bool]) -> None:
        """Mark the run as done; raise if it is."""
        if not finish(self.job, self.due):
            raise AlreadyRan(f"{self!r}: it, or a later one, was marked as done before")


class RunTransaction:
    """A fenced transaction that marks a run as done."""

    def __init__(self, run: Run) -> None:
        """Made by the run, not by you."""
        self._run = run
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Transaction:
        """Begin, fence, and mark the run as done."""
        self._run.open()
        with contextlib.ExitStack() as stack:
            transaction = stack.enter_context(self._run.term.transaction())
            self._run.mark(transaction.finish)
            self._open = stack.pop_all()
        return transaction

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        """Commit, or roll back on an error: then it is not done."""
        return self._open.__exit__(kind, error, trace)

    async def __aenter__(self) -> AsyncTransaction:
        """Begin, fence, and mark the run as done."""
        with anyio.CancelScope(shield=True):  # what was opened is not left behind
            transaction = await in_thread(self.__enter__)
        return AsyncTransaction(transaction)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        """Commit, or roll back on an error: then it is not done."""
        with anyio.CancelScope(shield=True):
            swallowed = await in_thread(functools.partial(self.__exit__, kind, error, trace))
        return swallowed  # noqa: RET504 - a scope may swallow, thinks mypy


def current_run() -> Run:
    """Return the run that the calling job is in."""
    run = _current.get(None)
    if run is None:
        raise ConfigError("there is no run here: call current_run() in a job of a leader-only scheduler")
    return run


@contextlib.contextmanager
def running(run: Run) -> Iterator[None]:
    """Let ``current_run()`` return this one in the block."""
    token = _current.set(run)
    try:
        yield
    finally:
        _current.reset(token)


def write(term: Term, ask: Callable[[Transaction], T]) -> T:
    """Ask in a fenced transaction; again where the database cannot be reached, for as long as the term stands.

    A claim whose outcome is unknown may have been made: then the second try is refused, and the run is lost, which is
    what ``at-most-once`` says.
    """
    while True:
        try:
            with term.transaction() as transaction:
                return ask(transaction)
        except (ConfigError, NodeClosed):
            raise
        except Exception as error:
            if (isinstance(error, Fenced) and not error.retryable) or term.wait_lost(RETRY_S):
                raise


async def in_thread(function: Callable[[], T]) -> T:
    """Call a blocking function without blocking the event loop, and without waiting for the application's threads."""
    return await anyio.to_thread.run_sync(function, limiter=anyio.CapacityLimiter(1))  # of nobody else's


# --- running it ---------------------------------------------------------------------------------------------


def perform(run: Run, job: Any, *, repeats: bool) -> Any:
    """Claim the run, call the job, and mark the run as done where runs are repeated."""
    _claim(run, repeats=repeats)
    attempt = 1
    while True:
        try:
            with running(run):
                result = job.func(*job.args, **job.kwargs)
        except Exception as error:
            if repeats and not _lost(error):
                if not run.opened:
                    _finish(run)  # it ran, and failed: that is not mended by running it again
                elif attempt < ATTEMPTS and not run.term.wait_lost(RETRY_S):
                    attempt = _again(run, error, attempt)
                    continue
            raise
        if repeats:
            _finish(run)
        return result


async def perform_async(run: Run, job: Any, *, repeats: bool) -> Any:
    """Do as ``perform`` does, with a job that is a coroutine function."""
    await in_thread(functools.partial(_claim, run, repeats=repeats))
    attempt = 1
    while True:
        try:
            with running(run):
                result = await job.func(*job.args, **job.kwargs)
        except Exception as error:
            if repeats and not _lost(error):
                if not run.opened:
                    await in_thread(functools.partial(_finish, run))
                elif attempt < ATTEMPTS and not await in_thread(functools.partial(run.term.wait_lost, RETRY_S)):
                    attempt = _again(run, error, attempt)
                    continue
            raise
        if repeats:
            await in_thread(functools.partial(_finish, run))
        return result


def _claim(run: Run, *, repeats: bool) -> None:
    """Claim it; where runs are repeated, who claimed it before has not done it."""
    if not write(run.term, lambda transaction: transaction.claim(run.job, run.due)) and not repeats:
        raise AlreadyRan(f"{run!r}: it, or a later one, was claimed before")


def _lost(error: Exception) -> bool:
    """Whether an error says that the term is over: then the run is the next leader's."""
    return isinstance(error, NotLeader) and not (isinstance(error, Fenced) and error.retryable)


def _again(run: Run, error: Exception, attempt: int) -> int:
    log.warning("%r failed before it was done, and is tried again: %r", run, error)
    run.opened = False
    return attempt + 1


def _finish(run: Run) -> None:
    """Mark it as done, unless the job has done that itself."""
    if not run.opened:
        write(run.term, lambda transaction: transaction.finish(run.job, run.due))
    run.done = True
