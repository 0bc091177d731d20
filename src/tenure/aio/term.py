"""A term for async code: its block is cancelled when it is lost."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Coroutine, Generator
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import anyio
import anyio.lowlevel

from tenure import claims, connections
from tenure.errors import ConfigError, NodeClosed, NotLeader
from tenure.loops import run
from tenure.settings import check_timeout
from tenure.term import BaseTerm, Transaction
from tenure.values import JobRecord

if TYPE_CHECKING:
    from typing_extensions import Self

    from tenure.async_election import AsyncElection


T = TypeVar("T")


class AsyncTerm(BaseTerm):
    """One holding of one role by this node. Once lost, it stays lost.

    As a context manager it ends with its block, and the block with it: a loss cancels the block, leaving the block
    resigns the term if it still stands, and a LeadershipLost or Fenced that says that this term is over is swallowed,
    so that a loop over ``node.terms(role)`` campaigns again. For ``terms()`` only: the block of ``lead()`` does that
    already.
    """

    _election: AsyncElection
    _block: contextlib.AbstractContextManager[None] | None = None

    async def ensure(self) -> None:
        """Return if the term is valid; raise LeadershipLost if it is over.

        In doubt (the database restarts) it waits until the doubt is over, which takes no longer than the trust lasts.
        """
        self._election.check_own()
        await anyio.lowlevel.checkpoint()
        if self.valid:
            return
        self._check()
        await self._election.wait_for(lambda: self._settled)
        self._raise_if_lost()

    async def wait_lost(self, timeout: float | None = None) -> bool:  # noqa: ASYNC109 - as in Term
        """Wait until the term is over; False if ``timeout`` seconds pass first."""
        await self._election.wait_for(lambda: self._reason is not None, check_timeout(timeout))
        self._election.settle()  # as in Term
        return self._reason is not None

    def fence(self, connection: Any, *, bound: float | None = None) -> Coroutine[Any, Any, None]:
        """Check inside the transaction of ``connection`` that this term is the latest, and keep it so until it ends.

        ``await`` it. A connection that is not async (inside SQLAlchemy's ``run_sync``, say) has been fenced when this
        returns; then there is nothing left to wait for. See :meth:`Term.fence` for the rest.
        """
        bound_s = self._bound(bound)
        if connections.is_async(connection):
            return connections.fence_async(connection, self, bound_s)
        connections.fence(connection, self, bound_s)
        return _Done(None)

    def claim(
        self, connection: Any, job: str, due: datetime, *, bound: float | None = None
    ) -> Coroutine[Any, Any, bool]:
        """Fence the transaction of ``connection``, and claim in it the run of ``job`` that is due at ``due``.

        ``await`` it. See :meth:`Term.claim` for the rest.
        """
        return self._perform(connection, bound, claims.claim(self, job, due))

    def finish(
        self, connection: Any, job: str, due: datetime, *, bound: float | None = None
    ) -> Coroutine[Any, Any, bool]:
        """Fence the transaction of ``connection``, and mark in it the run of ``job`` that was due at ``due`` as done.

        ``await`` it. See :meth:`Term.finish` for the rest.
        """
        return self._perform(connection, bound, claims.finish(self, job, due))

    def _perform(self, connection: Any, bound: float | None, ask: claims.Ask) -> Coroutine[Any, Any, bool]:
        bound_s = self._bound(bound)
        if connections.is_async(connection):
            return claims.perform_async(connection, self, bound_s, ask)
        return _Done(bool(claims.perform(connection, self, bound_s, ask)))

    @contextlib.asynccontextmanager
    async def transaction(self, *, bound: float | None = None) -> AsyncIterator[AsyncTransaction]:
        """Open a fenced transaction on a connection of its own; it commits only if this term is still the latest."""
        stack = contextlib.ExitStack()  # holds what was opened, also if the task was cancelled meanwhile
        try:
            yield AsyncTransaction(await run(lambda: stack.enter_context(self._fenced(bound))))
        except BaseException as error:
            roll_back = functools.partial(stack.__exit__, type(error), error, error.__traceback__)
            if not await run(roll_back):
                raise
        else:
            await run(stack.close)  # a commit that was sent is waited for: its outcome matters

    async def resign(self, to: str | None = None) -> None:
        """Hand over now; see :meth:`Election.resign`."""
        if self._reason is None:
            await self._election.resign(to)

    @contextlib.contextmanager
    def cancelling(self) -> Generator[None, None, None]:
        """Cancel the block when the term is over; what it was doing then ends here."""
        with anyio.CancelScope() as scope:
            forget = self._election.call_when(lambda: self._reason is not None, scope.cancel)
            try:
                yield
            finally:
                forget()

    def raise_if_lost(self) -> None:
        """Raise LeadershipLost if the term is over."""
        self._election.settle()
        self._raise_if_lost()

    async def __aenter__(self) -> Self:
        """Begin the block of this term."""
        if self._block is not None:
            raise ConfigError(
                f"role {self.role!r}: the term with token {self.token} has a block already: use one at a time"
            )
        self._block = self.cancelling()
        self._block.__enter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Resign if the term still stands; swallow its own end."""
        assert self._block is not None
        block, self._block = self._block, None
        swallowed = False
        try:
            swallowed = bool(block.__exit__(kind, error, trace))
        finally:
            with anyio.CancelScope(shield=True), contextlib.suppress(NodeClosed, NotLeader):  # as in Term
                await self.resign()
        return swallowed or self._is_own_end(error)


class AsyncTransaction:
    """A fenced transaction: run statements on it, nothing else. It commits when its block is left."""

    def __init__(self, transaction: Transaction) -> None:
        """Wrap a blocking one: the same on every database and on every event loop."""
        self._transaction = transaction

    async def execute(self, sql: str, parameters: Any = ()) -> Any:
        """Run a statement; parameters are in the driver's style (psycopg ``%s``, sqlite3 ``?``). Return the cursor.

        Its rows are there: ``fetchall()`` and the like are plain calls. A cancelled task cuts the statement short.
        """
        return await run(lambda: self._transaction.execute(sql, parameters), cut=self._transaction.cut)

    async def claim(self, job: str, due: datetime) -> bool:
        """Claim the run of ``job`` that is due at ``due``; see :meth:`Term.claim`."""
        return await run(lambda: self._transaction.claim(job, due), cut=self._transaction.cut)

    async def finish(self, job: str, due: datetime) -> bool:
        """Mark the run of ``job`` that was due at ``due`` as done; see :meth:`Term.finish`."""
        return await run(lambda: self._transaction.finish(job, due), cut=self._transaction.cut)

    async def anchor(self, job: str, at: datetime) -> datetime:
        """Set the moment from which the interval of ``job`` is counted, if it has none; return the one that stands."""
        return await run(lambda: self._transaction.anchor(job, at), cut=self._transaction.cut)

    async def jobs(self) -> list[JobRecord]:
        """Return the jobs of the role, by name, as this transaction sees them."""
        return await run(self._transaction.jobs, cut=self._transaction.cut)

    async def forget(self, job: str) -> bool:
        """Forget everything about ``job``, its claims included; False if there was nothing. For jobs that are gone."""
        return await run(lambda: self._transaction.forget(job), cut=self._transaction.cut)


class _Done(Coroutine[Any, Any, T], Generic[T]):
    """Something to await that is over already, and that nobody need await."""

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
