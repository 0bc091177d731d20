"""A term: one holding of a role, numbered by its token. It is valid until a deadline, which renewals extend."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any

import tenure
from tenure.base.clock import now
from tenure.engine.candidacy import Holding
from tenure.errors import ConfigError, Fenced, LeadershipLost, NodeClosed, NotLeader
from tenure.fence import job_runs
from tenure.fence.fence import fence
from tenure.internals import engine_of
from tenure.settings import check_bound, check_callback, check_timeout
from tenure.transaction import OwnTransaction, fenced

if TYPE_CHECKING:
    from typing_extensions import Self

    from tenure.election import BaseElection, Election

NOT_FENCEABLE = (
    "mode='lock' has no fencing token, so nothing can be fenced: a paused leader's late write is not refused. Use "
    "mode='hybrid', which needs tables"
)


CUT_AGAIN_S = 1.0
"""How long a statement may take to end after the server was asked to cancel it."""


class BaseTerm:
    """What :class:`Term` and :class:`AsyncTerm` have in common: a view of what the engine knows about a term."""

    def __init__(self, election: BaseElection[Any], holding: Holding) -> None:
        """Only an election creates terms."""
        self._election = election
        self._engine = engine_of(election)
        self._holding = holding
        self._call = election._call  # noqa: SLF001 - calls the application's callbacks on the right thread

    def __repr__(self) -> str:
        """Show role, token and state."""
        state = f"lost: {self.lost_reason}" if self.lost_reason else ("valid" if self.valid else "not valid")
        return f"<{type(self).__name__} role={self.role!r} token={self.token} {state}>"

    @property
    def role(self) -> str:
        """The role that is held."""
        return self._holding.role

    @property
    def namespace(self) -> str:
        """The namespace of the role."""
        return self._holding.namespace

    @property
    def token(self) -> int:
        """The fencing token: it only grows from term to term. 0 in mode ``lock``, where there is none."""
        return self._holding.token

    @property
    def member_id(self) -> str:
        """The membership under which the role was acquired."""
        return self._holding.member_id

    @property
    def valid(self) -> bool:
        """Whether this term may be acted on at this moment. False in doubt; False for good once lost."""
        return self._holding.valid

    @property
    def remaining(self) -> float:
        """Seconds until trust ends unless it is renewed; 0 if it has ended."""
        return max(0.0, self._holding.lease.deadline - now()) if self.lost_reason is None else 0.0

    @property
    def lost_reason(self) -> str | None:
        """Why the term is over; None while it is not."""
        return self._holding.reason

    def on_lost(self, callback: Callable[[Self], object]) -> None:
        """Call ``callback(term)`` when the term is over; at once if it already is.

        A ``Node`` calls it on a thread for callbacks, an ``AsyncNode`` on its event loop.
        """
        check_callback(callback)
        with self._engine.lock:
            if self.lost_reason is None:
                self._engine.check_own()
                self._holding.on_end.append(lambda: self._call(lambda: callback(self)))
                return
        self._call(lambda: callback(self))

    def _check(self) -> None:
        """Announce the end of trust if it is due; raise NodeClosed if no thread is running that could end a doubt."""
        self._engine.announce_expiry()
        if self.lost_reason is None:
            self._engine.check_running()

    def _is_own_end(self, error: BaseException | None) -> bool:
        """Whether an error only says that this term is over: then its block has ended as it should."""
        over = isinstance(error, LeadershipLost) or (isinstance(error, Fenced) and not error.retryable)
        return over and (error.role, error.token) == (self.role, self.token)  # type: ignore[union-attr]

    def _bound(self, bound: float | None) -> float:
        if not self._engine.has_tokens:
            raise ConfigError(NOT_FENCEABLE)
        self._engine.backend.check_fence()
        return self._engine.ttl if bound is None else check_bound(bound)

    @contextlib.contextmanager
    def _fenced(self, bound: float | None) -> Iterator[Transaction]:
        bound_s = self._bound(bound)
        with self._engine.backend.transaction() as connection, self._ended_with_the_term(connection, bound_s) as cuts:
            own = fenced(connection, self._holding, bound_s)
            cuts.append(own.cut)
            yield Transaction(own, self._holding)
            own.commit()

    @contextlib.contextmanager
    def _ended_with_the_term(self, connection: Any, bound_s: float) -> Iterator[list[Callable[[], object]]]:
        """End a call that is still under way when the term has been over for ``bound_s`` seconds.

        The server may be frozen, or gone without a word: then no call on the connection would ever return. Yield the
        list of the ways to end a call; the last one is tried first.
        """
        backend, left = self._engine.backend, threading.Event()
        cuts: list[Callable[[], object]] = [lambda: backend.cut(connection)]

        def end() -> None:
            for cut in reversed(cuts):
                if left.is_set():
                    return
                # The block may just have closed the connection.
                with contextlib.suppress(Exception):
                    cut()
                left.wait(CUT_AGAIN_S)

        timer = threading.Timer(bound_s, end)
        timer.daemon = True
        with contextlib.ExitStack() as stack:
            stack.callback(left.set)
            stack.callback(timer.cancel)
            # In a forked child, which may write under its parent's term, nothing tells when that is over.
            with contextlib.suppress(NodeClosed):
                stack.callback(self._engine.call_when(lambda: self._holding.reason is not None, timer.start))
            yield cuts


class Term(BaseTerm):
    """One holding of one role by this node. Once lost, it stays lost.

    As a context manager it ends with its block. Leaving the block resigns the term if it is not over. A LeadershipLost
    or Fenced which says that this term is over is swallowed, so that a loop over ``node.terms(role)`` campaigns again.
    """

    _election: Election

    def ensure(self) -> None:
        """Return if the term is valid; raise LeadershipLost if it is over.

        In doubt (while the database restarts) it waits until the doubt is over: until trust runs out at the latest.
        """
        if self.valid:
            return
        self._check()
        self._engine.wait_for(lambda: not self._holding.in_doubt)
        self._holding.raise_if_lost()

    def wait_lost(self, timeout: float | None = None) -> bool:
        """Wait until the term is over; False if ``timeout`` seconds pass first."""
        self._engine.wait_for(lambda: self.lost_reason is not None, check_timeout(timeout))
        # After a pause, this thread may run before the keeper has announced the loss.
        self._engine.announce_expiry()
        return self.lost_reason is not None

    def fence(self, connection: Any, *, bound: float | None = None) -> None:
        """Check in ``connection``'s transaction that this term is the latest; it stays so until the transaction ends.

        Raises Fenced if it is not: on PostgreSQL the transaction then cannot commit, elsewhere it has been rolled
        back. The database decides, without any local clock. The server ends the transaction after ``bound`` seconds
        (the TTL by default), so that a paused leader delays its successor no longer than that.
        """
        fence(connection, self._holding, self._bound(bound))

    def claim(self, connection: Any, job: str, due: datetime, *, bound: float | None = None) -> bool:
        """Fence the transaction of ``connection``, and claim in it the run of ``job`` that is due at ``due``.

        True if no term of the role has claimed that run, or a later one, before. The claim takes effect when the
        transaction commits, and so does what the transaction writes: at most once for each run. Raises Fenced as
        :meth:`fence` does.
        """
        return self._perform(connection, bound, job_runs.claim(self._holding, job, due))

    def finish(self, connection: Any, job: str, due: datetime, *, bound: float | None = None) -> bool:
        """Fence the transaction of ``connection``, and mark in it the run of ``job`` that was due at ``due`` as done.

        True if neither that run nor a later one was marked before. To write the results of a repeatable run once, write
        them in the same transaction, and roll back if this returns False.
        """
        return self._perform(connection, bound, job_runs.finish(self._holding, job, due))

    def _perform(self, connection: Any, bound: float | None, statement: job_runs.JobStatement) -> bool:
        return bool(job_runs.perform(connection, self._holding, self._bound(bound), statement))

    def transaction(self, *, bound: float | None = None) -> contextlib.AbstractContextManager[Transaction]:
        """Open a fenced transaction on a new connection; it commits only if this term is still the latest.

        Leaving the block commits everything in it, or raises. NotCommitted says that a statement ended the transaction
        inside the block, or that one failed and its error was swallowed.
        """
        return self._fenced(bound)

    def resign(self, to: str | None = None) -> None:
        """Hand over now; see :meth:`Election.resign`.

        A term that is over has nothing to hand over: without ``to`` nothing happens, with it LeadershipLost is raised.
        """
        if to is not None:
            self._holding.raise_if_lost()
        if self.lost_reason is None:
            self._election.resign(to)

    def __enter__(self) -> Self:
        """Begin the block of this term."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Resign if the term is not over; swallow the error which says that it is over."""
        # A forked child leaves the parent's term alone, and the term may have been lost just now.
        with contextlib.suppress(NodeClosed, NotLeader):
            self.resign()
        return self._is_own_end(error)


class Transaction:
    """A fenced transaction: run statements on it, nothing else. It commits when its block is left."""

    def __init__(self, own: OwnTransaction, holding: Holding) -> None:
        """Only ``term.transaction()`` creates transactions."""
        self._own = own
        self._holding = holding

    def execute(self, sql: str, parameters: Any = ()) -> Any:
        """Run a statement and return the cursor; parameters are in the driver's style (sqlite3 ``?``, else ``%s``)."""
        return self._own.execute(sql, parameters)

    def claim(self, job: str, due: datetime) -> bool:
        """Claim the run of ``job`` that is due at ``due``; see :meth:`Term.claim`."""
        return bool(self._ask(job_runs.claim(self._holding, job, due)))

    def finish(self, job: str, due: datetime) -> bool:
        """Mark the run of ``job`` that was due at ``due`` as done; see :meth:`Term.finish`."""
        return bool(self._ask(job_runs.finish(self._holding, job, due)))

    def anchor(self, job: str, at: datetime) -> datetime:
        """Set the moment from which the interval of ``job`` is counted, if it has none; return the one that applies."""
        anchor: datetime = self._ask(job_runs.anchor(self._holding, job, at))
        return anchor

    def jobs(self) -> list[tenure.JobRecord]:
        """Return the jobs of the role, sorted by name, as this transaction sees them."""
        records: list[tenure.JobRecord] = self._ask(job_runs.jobs(self._holding))
        return records

    def forget(self, job: str) -> bool:
        """Forget everything about ``job``, its claims included; False if there was nothing. For removed jobs."""
        return bool(self._ask(job_runs.forget(self._holding, job)))

    def _ask(self, statement: job_runs.JobStatement) -> Any:
        with self._own.used():
            return statement.meaning(self._own.run(*statement.steps))


def ask(transaction: Transaction, statement: job_runs.JobStatement) -> Any:
    """Run a statement about jobs in a fenced transaction, for Tenure's own packages."""
    return transaction._ask(statement)  # noqa: SLF001


def cut_short(transaction: Transaction) -> None:
    """Make a statement that is under way in another thread fail, within a second."""
    transaction._own.cut()  # noqa: SLF001
