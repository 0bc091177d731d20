"""One run of a job: claimed before it begins, and marked as done when it is over. ``current_run()`` returns it."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from datetime import datetime
from typing import Any, TypeVar

from tenure import AsyncTransaction, Term, Transaction
from tenure.aio import bridge
from tenure.aio.term import in_threads
from tenure.errors import ConfigError, Fenced, NodeClosed, NotCommitted, NotLeader, TenureError
from tenure.integrations.apscheduler.due_times import utc

T = TypeVar("T")

log = logging.getLogger("tenure.apscheduler")

RETRY_S = 0.3
"""The pause before a claim is tried again if the database cannot be reached, as long as the term lasts."""
ATTEMPTS = 3
"""How many times a run is tried if its transaction does not commit. After that it is left to the next leader."""

_current: ContextVar[Run] = ContextVar("tenure_run")


class AlreadyRan(TenureError):
    """This run of the job, or a later one, was claimed or done before, so it is not made again."""


class NotDone(TenureError):
    """The transaction in which the job marks this run as done was not committed in any attempt."""


class Run:
    """One run of a job, under the term of its leader."""

    def __init__(self, job: str, due: datetime, term: Term) -> None:
        """Only the scheduler creates runs."""
        self.job = job
        """The job's id, with the job store's alias before it if that is not ``default``; if this text is blank or too
        long for the database, a hash of it."""
        self.due = due
        """The moment at which the run is due. It may begin later."""
        self.term = term
        """The term under which the run is made; ``term.valid`` says whether it is still valid."""
        self.opened = False
        """Whether the job has begun a transaction that marks the run as done."""
        self.committed = False
        """Whether that transaction is known to be committed."""
        self.done = False
        """Whether the run is over, and is not repeated."""

    def __repr__(self) -> str:
        """Show job, due time and token."""
        return f"<Run of {self.job!r} due {self.due.isoformat()} token={self.term.token}>"

    def transaction(self) -> RunTransaction:
        """Open a fenced transaction that marks this run as done. Open it once in a run.

        ``with`` in a plain function gives a Transaction, ``async with`` in a coroutine an AsyncTransaction. Your writes
        in it are committed together with the mark. So with ``at-least-once`` they take effect exactly once.
        """
        return RunTransaction(self)

    def finish(self, connection: Any) -> None:
        """Fence the transaction of your own connection, and mark this run as done in it; see :meth:`transaction`.

        The connection is a blocking one. For SQLAlchemy's async sessions use ``await session.run_sync(run.finish)``.
        """
        self.open()
        self.check(fresh=self.term.finish(connection, self.job, self.due))

    @contextlib.contextmanager
    def marking(self) -> Iterator[Transaction]:
        """Open a fenced transaction that marks the run as done at its end.

        The mark comes last because a statement of the block may commit implicitly: that would commit an earlier mark
        without the statements that follow.
        """
        self.open()
        with self.term.transaction() as transaction:
            self.check(fresh=not _is_marked(self, transaction))
            yield transaction
            try:
                fresh = transaction.finish(self.job, self.due)
            except TenureError:
                raise
            except Exception as error:  # from the driver: the connection is lost, or the job ignored a failed statement
                raise NotCommitted(
                    f"{self!r} was rolled back, because it could not be marked as done: {error}"
                ) from error
            self.check(fresh=fresh)
        self.committed = True

    def open(self) -> None:
        """Note that the job marks the run as done itself; raise if it has done so before."""
        if self.opened:
            raise ConfigError(
                f"the transaction of {self!r} was opened already: open it once per run, and write all of the run's "
                "effects in it"
            )
        self.opened = True

    def check(self, *, fresh: bool) -> None:
        """Raise if another node has marked the run as done. With at-most-once the run's own claim has marked it."""
        if not fresh and not self.done:
            raise AlreadyRan(f"{self!r}: this run, or a later one, was marked as done before")


class RunTransaction:
    """A fenced transaction that marks a run as done: a context manager, and an asynchronous one."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def __enter__(self) -> Transaction:
        """Begin and fence; raise if the run is done already."""
        self._block = self._run.marking()
        return self._block.__enter__()

    def __exit__(self, *error: Any) -> bool | None:  # noqa: PYI036 - handed on
        """Mark the run as done and commit; roll back on an error: then the run is not done."""
        return self._block.__exit__(*error)

    async def __aenter__(self) -> AsyncTransaction:
        """Begin and fence; raise if the run is done already."""
        self._async_block = in_threads(self._run.marking())
        return await self._async_block.__aenter__()

    async def __aexit__(self, *error: Any) -> bool | None:  # noqa: PYI036 - handed on
        """Mark the run as done and commit; roll back on an error: then the run is not done."""
        return await self._async_block.__aexit__(*error)


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


def write(term: Term, ask: Callable[[Transaction], T]) -> T:
    """Call ``ask`` in a fenced transaction; try again if the database cannot be reached, as long as the term lasts.

    A claim whose outcome is unknown may have been committed. Then the second attempt is refused and the run is lost,
    which ``at-most-once`` permits.
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


# --- running it ---------------------------------------------------------------------------------------------


def perform(run: Run, job: Any, *, repeats: bool) -> Any:
    """Claim the run and call the job; if runs are repeated, mark the run as done."""
    _claim(run, repeats=repeats)
    attempt = 0
    while True:
        attempt, result, error = attempt + 1, None, None
        try:
            with running(run):
                result = job.func(*job.args, **job.kwargs)
        except Exception as caught:  # noqa: BLE001 - it is raised below
            error = caught
        if not repeats or _is_over(run, error, attempt):
            if error is not None:
                raise error
            return result


async def perform_async(run: Run, job: Any, *, repeats: bool) -> Any:
    """Do the same as ``perform``, for a job that is a coroutine function."""
    await bridge.run(functools.partial(_claim, run, repeats=repeats))
    attempt = 0
    while True:
        attempt, result, error = attempt + 1, None, None
        try:
            with running(run):
                result = await job.func(*job.args, **job.kwargs)
        except Exception as caught:  # noqa: BLE001 - it is raised below
            error = caught
        if not repeats or await bridge.run(functools.partial(_is_over, run, error, attempt)):
            if error is not None:
                raise error
            return result


def _claim(run: Run, *, repeats: bool) -> None:
    """Claim the run. If runs are repeated, an earlier claim does not matter: that run was not done.

    If runs are not repeated, a claimed run is over, and is marked as done in the same transaction. So no run is
    repeated if delivery is changed later.
    """

    def ask(transaction: Transaction) -> bool:
        is_mine = transaction.claim(run.job, run.due)
        if is_mine and not repeats:
            transaction.finish(run.job, run.due)
        return is_mine

    if not write(run.term, ask) and not repeats:
        raise AlreadyRan(f"{run!r}: this run, or a later one, was claimed before")
    run.done = not repeats


def _lost(error: Exception) -> bool:
    """Whether an error says that the term is over. Then the run is left to the next leader."""
    return isinstance(error, NotLeader) and not (isinstance(error, Fenced) and error.retryable)


def _is_over(run: Run, error: Exception | None, attempt: int) -> bool:
    """Handle the end of a run; False if the run has to be tried again.

    If the job does not mark its run as done, this does. That includes a job that raised: running it again would not
    help. If the job marks its run itself, the run is done only if that transaction is committed. If it is not, the run
    is tried again, whether the job raised the error or ignored it.
    """
    if error is not None and _lost(error):
        return True
    if not run.opened:
        write(run.term, lambda transaction: transaction.finish(run.job, run.due))
    elif not run.committed and not write(run.term, functools.partial(_is_marked, run)):
        if attempt < ATTEMPTS and not run.term.wait_lost(RETRY_S):
            log.warning("%r was not committed, and is tried again: %r", run, error)
            run.opened = False
            return False
        if error is None:
            raise NotDone(
                f"{run!r} is not done: the transaction that marks it was not committed, and the job ignored the error"
            )
        return True
    run.done = True
    return True


def _is_marked(run: Run, transaction: Transaction) -> bool:
    """Whether the run, or a later one, is marked as done in the database."""
    done = next((record.done for record in transaction.jobs() if record.job == run.job), None)
    return done is not None and done >= utc(run.due)
