"""One run of a job: its transaction, and how it is claimed and recorded. Schedules and APScheduler's jobs share it."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from typing import Any, TypeVar

from tenure.aio.term import AsyncTerm, AsyncTransaction, in_threads
from tenure.base import clock
from tenure.base.moments import microseconds
from tenure.core.backoff import Backoff
from tenure.errors import ConfigError, Fenced, NodeClosed, NotCommitted, NotLeader, TenureError
from tenure.fence import job_runs
from tenure.internals import holding_of
from tenure.term import Term, Transaction, ask

T = TypeVar("T")

log = logging.getLogger("tenure.schedule")

RETRY_S = 0.3
LONGEST_RETRY_S = 5.0
"""The first and the longest pause before a write is tried again if the database cannot be reached."""


class AlreadyRan(TenureError):
    """This run of the job, or a later one, was claimed or done before, so it is not run again."""


class NotDone(TenureError):
    """The transaction in which the job marks this run as done was not committed."""


class Run:
    """One run of a job, under the term of its leader."""

    def __init__(
        self,
        job: str,
        due: datetime,
        term: Term,
        view: Term | AsyncTerm | None = None,
        *,
        attempt: int = 1,
        missed: int = 0,
        requested: bool = False,
    ) -> None:
        """Only a schedule creates runs."""
        self.job = job
        """The name of the job."""
        self.due = due
        """The moment at which the run is due. It may begin later."""
        self.term: Any = view or term
        """The term under which the run is made: an AsyncTerm in a coroutine, else a Term."""
        self.attempt = attempt
        """1, and one more for each earlier attempt at this run."""
        self.missed = missed
        """How many due times before this one were not run, since the run before."""
        self.requested = requested
        """Whether an operator asked for this run. Then ``due`` is the moment of the request."""
        self._term = term
        self._stop = threading.Event()
        self._opened = False
        self._marks_itself = False
        self._committed = False
        self._done = False

    def __repr__(self) -> str:
        """Show job, due time and token."""
        return f"<Run of {self.job!r} due {self.due.isoformat()} token={self._term.token}>"

    @property
    def stopping(self) -> bool:
        """Whether a function in a thread should return: its time is over, or the term is."""
        return self._stop.is_set() or self._term.lost_reason is not None

    def wait(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds; True as soon as the function should return. For functions in threads."""
        return self._stop.wait(timeout) or self.stopping

    def transaction(self) -> RunTransaction:
        """Open a fenced transaction that marks this run as done. Open it once in a run.

        ``with`` in a plain function gives a Transaction, ``async with`` in a coroutine an AsyncTransaction. Your writes
        in it are committed together with the mark. So with ``at-least-once`` they take effect exactly once.
        """
        return RunTransaction(self)

    def finish(self, connection: Any) -> Any:
        """Fence the transaction of your own connection, and mark this run as done in it; see :meth:`transaction`.

        In a coroutine, ``await`` it.
        """
        # Nobody sees the commit of this connection. Where no mark shows it, the function says how the run ended.
        marks = not self.requested and not self._done
        if self.requested:
            answer = self.term.fence(connection)
            self._open(marks=marks)
            return answer if isinstance(self.term, AsyncTerm) else None
        if isinstance(self.term, AsyncTerm):
            return self._finish_async(connection, marks=marks)
        self._open(marks=marks)
        self._check(fresh=self.term.finish(connection, self.job, self.due))
        return None

    async def _finish_async(self, connection: Any, *, marks: bool) -> None:
        self._open(marks=marks)
        self._check(fresh=await self.term.finish(connection, self.job, self.due))

    @contextlib.contextmanager
    def _marking(self) -> Iterator[Transaction]:
        """Open a fenced transaction that marks the run as done at its end.

        The mark comes last because a statement of the block may commit implicitly: that would commit an earlier mark
        without the statements that follow.
        """
        self._open()
        with self._term.transaction() as transaction:
            if not self.requested:
                self._check(fresh=not is_marked(self, transaction))
            yield transaction
            if not self.requested:
                self._check(fresh=self._mark(transaction))
        self._committed = True

    def _mark(self, transaction: Transaction) -> bool:
        try:
            return transaction.finish(self.job, self.due)
        except TenureError:
            raise
        except Exception as error:
            # The driver raised this error. The connection is lost, or the job ignored a failed statement.
            raise NotCommitted(f"{self!r} was rolled back, because it could not be marked as done: {error}") from error

    def _open(self, *, marks: bool = True) -> None:
        """Note that the job opens the run's transaction; raise if it has done so before, or comes too late.

        ``marks`` says whether that transaction decides if the run is done.
        """
        if self._opened:
            raise ConfigError(
                f"the transaction of {self!r} was opened already: open it once per run, and write all of the run's "
                "effects in it"
            )
        if self._stop.is_set():
            raise NotCommitted(f"{self!r} is over: its time has run out, or it was interrupted; nothing was written")
        self._opened, self._marks_itself = True, marks

    def _check(self, *, fresh: bool) -> None:
        """Raise if another node has marked the run as done. With at-most-once the run's own claim has marked it."""
        if not fresh and not self._done:
            raise AlreadyRan(f"{self!r}: this run, or a later one, was marked as done before")


class RunTransaction:
    """A fenced transaction that marks a run as done: a context manager, and an asynchronous one."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def __enter__(self) -> Transaction:
        """Begin and fence; raise if the run is done already."""
        self._block = self._run._marking()  # noqa: SLF001 - of this module
        return self._block.__enter__()

    def __exit__(self, *error: Any) -> bool | None:  # noqa: PYI036 - handed on
        """Mark the run as done and commit; roll back on an error: then the run is not done."""
        return self._block.__exit__(*error)

    async def __aenter__(self) -> AsyncTransaction:
        """Begin and fence; raise if the run is done already."""
        self._async_block = in_threads(self._run._marking())  # noqa: SLF001 - of this module
        return await self._async_block.__aenter__()

    async def __aexit__(self, *error: Any) -> bool | None:  # noqa: PYI036 - handed on
        """Mark the run as done and commit; roll back on an error: then the run is not done."""
        return await self._async_block.__aexit__(*error)


# What schedulers do with a run ----------------------------------------------------------------------------------


def interrupt(run: Run) -> None:
    """Ask the function of a run to return; from now on it cannot mark the run as done."""
    run._stop.set()  # noqa: SLF001 - of this module


def is_now_over(run: Run) -> None:
    """Note that the run is marked as done: by its end, or by its claim if runs of this job are not repeated."""
    run._done = True  # noqa: SLF001 - of this module


def try_again(run: Run) -> None:
    """Let the function open the run's transaction again, in another attempt."""
    run._opened = run._marks_itself = False  # noqa: SLF001 - of this module


def is_over(run: Run) -> bool:
    """Whether the run is marked as done, and so is not repeated."""
    return run._done  # noqa: SLF001 - of this module


def is_interrupted(run: Run) -> bool:
    """Whether the function of the run was asked to return."""
    return run._stop.is_set()  # noqa: SLF001 - of this module


def marks_itself(run: Run) -> bool:
    """Whether the function has opened a transaction whose commit decides if the run is done."""
    return run._marks_itself  # noqa: SLF001 - of this module


def is_committed(run: Run) -> bool:
    """Whether the transaction that marks the run as done was committed.

    Reads the database if that is not known. The mark says nothing about a run that its claim has marked.
    """
    if run._committed or run._done or run.requested:  # noqa: SLF001 - of this module
        return run._committed  # noqa: SLF001
    return write(run._term, lambda transaction: is_marked(run, transaction))  # noqa: SLF001


def claim(run: Run, *, repeats: bool) -> None:
    """Claim a run before it begins; raise AlreadyRan if it was claimed before, and is not to be repeated.

    If runs are repeated, an earlier claim does not matter: that run was not done. If they are not, the claim marks the
    run as done, so that no run is repeated if delivery is changed later.
    """
    holding, us = holding_of(run._term), microseconds(run.due)  # noqa: SLF001 - of this module

    def ask_for_it(transaction: Transaction) -> bool:
        is_mine: bool = ask(transaction, job_runs.claim(holding, run.job, run.due, once=not repeats))
        ask(transaction, job_runs.lose_earlier(holding, run.job))
        if not is_mine and repeats:
            run.attempt = ask(transaction, job_runs.repeat(holding, run.job, us))
        return is_mine

    if not write(run._term, ask_for_it) and not repeats:  # noqa: SLF001 - of this module
        raise AlreadyRan(f"{run!r}: this run, or a later one, was claimed before")
    if not repeats:
        is_now_over(run)


def record_end(run: Run, outcome: str, detail: str | None = None, *, over: bool) -> None:
    """Record how a run ended; ``over`` marks it as done, so that it is not repeated."""
    holding = holding_of(run._term)  # noqa: SLF001 - of this module
    statement = job_runs.end(holding, run.job, microseconds(run.due), outcome, detail, over=over)
    write(run._term, lambda transaction: ask(transaction, statement))  # noqa: SLF001 - of this module
    if over:
        is_now_over(run)


def described(error: BaseException) -> str:
    """Return an error as the record of a run shows it."""
    # The application may have written the method that makes the text.
    try:
        return str(error) if isinstance(error, TenureError) else f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - the run has to be recorded all the same
        return type(error).__name__


def is_marked(run: Run, transaction: Transaction) -> bool:
    """Whether the run, or a later one, is marked as done in the database."""
    done = next((record.done for record in transaction.jobs() if record.job == run.job), None)
    return done is not None and done >= run.due.astimezone(timezone.utc)


def lost(error: BaseException, term: Term) -> bool:
    """Whether an error says that this term is over. Then the run is left to the next leader."""
    over = isinstance(error, NotLeader) and not (isinstance(error, Fenced) and error.retryable)
    return over and (error.role, error.token) == (term.role, term.token)  # type: ignore[attr-defined]


def write(term: Term, action: Callable[[Transaction], T]) -> T:
    """Call ``action`` in a fenced transaction; try again if the database cannot be reached, as long as the term lasts.

    A claim whose outcome is unknown may have been committed. Then the second attempt is refused and the run is lost,
    which ``at-most-once`` permits.
    """
    pauses = Backoff(RETRY_S, LONGEST_RETRY_S)
    while True:
        try:
            with term.transaction() as transaction:
                return action(transaction)
        except (ConfigError, NodeClosed):
            raise
        except UnicodeEncodeError as error:
            # Only names are written as they are, and another try would fail in the same way.
            raise ConfigError(
                f"the name of a job cannot be stored in this database, whose encoding has no "
                f"{error.object[error.start]!r}: choose another name, or a database in UTF8"
            ) from None
        except Exception as error:
            if lost(error, term):
                raise
            if not pauses.failures:
                log.warning("role %r: a run cannot be recorded, and this is tried again: %r", term.role, error)
            began = clock.now()
            if term.wait_lost(pauses.failed(began) - began):
                raise
