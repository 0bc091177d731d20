"""A term for async code: its block is cancelled when it is lost."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import anyio
import anyio.lowlevel

import tenure
from tenure.aio.bridge import Loop, run_in_thread, wait_for
from tenure.engine.candidacy import Holding
from tenure.engine.engine import Engine
from tenure.errors import ConfigError, NodeClosed, NotLeader
from tenure.fence import job_runs
from tenure.fence.adapter import is_async
from tenure.fence.fence import fence, fence_async
from tenure.settings import check_timeout
from tenure.term import BaseTerm, Transaction, cut_short

if TYPE_CHECKING:
    from typing_extensions import Self

    from tenure.aio.election import AsyncElection

T = TypeVar("T")


class AsyncTerm(BaseTerm):
    """One holding of one role by this node. Once lost, it stays lost.

    As a context manager, the term and its block end together. A loss cancels the block. Leaving the block resigns the
    term if it is not over. A LeadershipLost or Fenced which says that this term is over is swallowed, so that a loop
    over ``node.terms(role)`` campaigns again. Use it with ``terms()`` only: ``lead()`` has its own block.
    """

    _election: AsyncElection
    _block: contextlib.AbstractContextManager[None] | None = None

    async def ensure(self) -> None:
        """Return if the term is valid; raise LeadershipLost if it is over.

        In doubt (while the database restarts) it waits until the doubt is over: until trust runs out at the latest.
        """
        self._engine.check_own()
        await anyio.lowlevel.checkpoint()
        if self.valid:
            return
        self._check()
        await wait_for(self._engine, lambda: not self._holding.in_doubt)
        self._holding.raise_if_lost()

    async def wait_lost(self, timeout: float | None = None) -> bool:  # noqa: ASYNC109 - as in Term
        """Wait until the term is over; False if ``timeout`` seconds pass first."""
        await wait_for(self._engine, lambda: self.lost_reason is not None, check_timeout(timeout))
        # After a pause, this task may run before the keeper has announced the loss.
        self._engine.announce_expiry()
        return self.lost_reason is not None

    def fence(self, connection: Any, *, bound: float | None = None) -> Coroutine[Any, Any, None]:
        """Check in ``connection``'s transaction that this term is the latest; it stays so until the transaction ends.

        ``await`` it. A connection that is not async (inside SQLAlchemy's ``run_sync``, say) is already fenced when this
        returns, and the await is optional. See :meth:`Term.fence` for the rest.
        """
        bound_s = self._bound(bound)
        if is_async(connection):
            return fence_async(connection, self._holding, bound_s)
        fence(connection, self._holding, bound_s)
        return _Done(None)

    def claim(
        self, connection: Any, job: str, due: datetime, *, bound: float | None = None
    ) -> Coroutine[Any, Any, bool]:
        """Fence the transaction of ``connection``, and claim in it the run of ``job`` that is due at ``due``.

        ``await`` it. See :meth:`Term.claim` for the rest.
        """
        return self._perform(connection, bound, job_runs.claim(self._holding, job, due))

    def finish(
        self, connection: Any, job: str, due: datetime, *, bound: float | None = None
    ) -> Coroutine[Any, Any, bool]:
        """Fence the transaction of ``connection``, and mark in it the run of ``job`` that was due at ``due`` as done.

        ``await`` it. See :meth:`Term.finish` for the rest.
        """
        return self._perform(connection, bound, job_runs.finish(self._holding, job, due))

    def _perform(
        self, connection: Any, bound: float | None, statement: job_runs.JobStatement
    ) -> Coroutine[Any, Any, bool]:
        bound_s = self._bound(bound)
        if is_async(connection):
            return job_runs.perform_async(connection, self._holding, bound_s, statement)
        return _Done(bool(job_runs.perform(connection, self._holding, bound_s, statement)))

    def transaction(self, *, bound: float | None = None) -> contextlib.AbstractAsyncContextManager[AsyncTransaction]:
        """Open a fenced transaction on a new connection; it commits only if this term is still the latest.

        Leaving the block commits everything in it, or raises; see :meth:`Term.transaction`.
        """
        return in_threads(self._fenced(bound))

    async def resign(self, to: str | None = None) -> None:
        """Hand over now; see :meth:`Term.resign`."""
        if to is not None:
            self._holding.raise_if_lost()
        if self.lost_reason is None:
            await self._election.resign(to)

    async def __aenter__(self) -> Self:
        """Begin the block of this term."""
        if self._block is not None:
            raise ConfigError(
                f"role {self.role!r}: the term with token {self.token} already has a block: use one at a time"
            )
        self._block = cancelled_when_lost(self._engine, self._holding)
        self._block.__enter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Resign if the term is not over; swallow the error which says that it is over."""
        assert self._block is not None
        block, self._block = self._block, None
        swallowed = False
        try:
            swallowed = bool(block.__exit__(kind, error, trace))
        finally:
            # A forked child leaves the parent's term alone, and the term may have been lost just now.
            with anyio.CancelScope(shield=True), contextlib.suppress(NodeClosed, NotLeader):
                await self.resign()
        return swallowed or self._is_own_end(error)


@contextlib.contextmanager
def cancelled_when_lost(engine: Engine, holding: Holding) -> Iterator[None]:
    """Cancel the block when the term is over, and swallow that cancellation."""
    loop = Loop()
    with anyio.CancelScope() as scope:
        forget = engine.call_when(lambda: holding.reason is not None, lambda: loop.call(scope.cancel))
        try:
            yield
        finally:
            forget()


class AsyncTransaction:
    """A fenced transaction: run statements on it, nothing else. It commits when its block is left."""

    def __init__(self, transaction: Transaction) -> None:
        """Wrap a blocking transaction, which works on every database and every event loop."""
        self._transaction = transaction

    async def execute(self, sql: str, parameters: Any = ()) -> Any:
        """Run a statement; parameters are in the driver's style (psycopg ``%s``, sqlite3 ``?``). Return the cursor.

        ``fetchall()`` and the like are plain calls on it, without ``await``. If the task is cancelled, the statement is
        cut short.
        """
        return await self._run(lambda: self._transaction.execute(sql, parameters))

    async def claim(self, job: str, due: datetime) -> bool:
        """Claim the run of ``job`` that is due at ``due``; see :meth:`Term.claim`."""
        return await self._run(lambda: self._transaction.claim(job, due))

    async def finish(self, job: str, due: datetime) -> bool:
        """Mark the run of ``job`` that was due at ``due`` as done; see :meth:`Term.finish`."""
        return await self._run(lambda: self._transaction.finish(job, due))

    async def anchor(self, job: str, at: datetime) -> datetime:
        """Set the moment from which the interval of ``job`` is counted, if it has none; return the one that applies."""
        return await self._run(lambda: self._transaction.anchor(job, at))

    async def jobs(self) -> list[tenure.JobRecord]:
        """Return the jobs of the role, sorted by name, as this transaction sees them."""
        return await self._run(self._transaction.jobs)

    async def forget(self, job: str) -> bool:
        """Forget everything about ``job``, its claims included; False if there was nothing. For removed jobs."""
        return await self._run(lambda: self._transaction.forget(job))

    async def _run(self, blocking: Callable[[], T]) -> T:
        return await run_in_thread(blocking, cut=lambda: cut_short(self._transaction))


@contextlib.asynccontextmanager
async def in_threads(block: contextlib.AbstractContextManager[Transaction]) -> AsyncIterator[AsyncTransaction]:
    """Enter and leave the block of a blocking transaction without blocking the event loop."""
    # The stack has what was opened, even if the task was cancelled meanwhile.
    stack = contextlib.ExitStack()
    try:
        yield AsyncTransaction(await run_in_thread(lambda: stack.enter_context(block)))
    except BaseException as error:
        roll_back = functools.partial(stack.__exit__, type(error), error, error.__traceback__)
        if not await run_in_thread(roll_back):
            raise
    else:
        # The task waits for a commit that was sent, because the outcome matters.
        await run_in_thread(stack.close)


class _Done(Coroutine[Any, Any, T], Generic[T]):
    """An awaitable that is already done, and need not be awaited."""

    def __init__(self, value: T) -> None:
        self._value = value

    def __await__(self) -> Generator[Any, Any, T]:
        yield from ()
        return self._value

    def send(self, _: Any) -> Any:
        raise StopIteration(self._value)

    def throw(self, *error: Any) -> Any:
        raise error[0]

    def close(self) -> None:
        pass
