"""How a job is run: an executor of APScheduler calls it for each due time, after the run was claimed.

The executor gets a stand-in for the job, whose function runs under a claim, and an iterator over the due times that
remembers the current one. If runs are repeated (``at-least-once``), the runs of one job follow each other in the order
in which they are due, because the database keeps only the last run that is done.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any

import anyio

from tenure import LeadershipLost, NotLeader, Term
from tenure.events import EndReason
from tenure.integrations import extra, job_name
from tenure.integrations.apscheduler.due_times import utc
from tenure.integrations.apscheduler.run import perform, perform_async
from tenure.schedule.run import Run, is_over

with extra("apscheduler"):
    from apscheduler.executors.asyncio import AsyncIOExecutor
    from apscheduler.util import iscoroutinefunction_partial

log = logging.getLogger("tenure.apscheduler")

MANY = 1_000_000


def key_of(job_id: str, alias: str | None) -> str:
    """Return the name of a job in the database: its id, with the alias of its store if that is not the default."""
    return job_name(job_id if alias in (None, "default") else f"{alias}:{job_id}")


def key(job: Any) -> str:
    """Return the name of a job in the database."""
    return key_of(job.id, job._jobstore_alias)  # noqa: SLF001 - there is no public name for it


class PendingRuns:
    """The runs of one job under this term."""

    def __init__(self) -> None:
        self.dues: deque[datetime] = deque()
        """Due times whose runs have not begun, if runs are repeated."""
        self.batches = 0
        """How many batches of due times are under way."""
        self.last = False
        """Whether no run follows these: the job is removed when they are over."""


class Batch:
    """A job and some of its due times. An executor iterates over the times, and calls the job for each.

    ``dues`` may grow meanwhile.
    """

    def __init__(self, executor: ClaimingExecutor, job: Any, pending: PendingRuns, dues: deque[datetime]) -> None:
        self.job = job
        self.key = key(job)
        self.pending = pending
        self.dues = dues
        self.present: datetime | None = None
        self._executor = executor

    def __iter__(self) -> Iterator[datetime]:
        """Yield the due times, oldest first."""
        while (due := self._executor.take(self)) is not None:
            self.present = due
            yield due


class ClaimedJob:
    """A stand-in for a job, which an executor takes for the job itself."""

    def __init__(self, job: Any, function: Callable[[], Any], *, repeats: bool) -> None:
        self._job = job
        self.id = job.id
        self.func = function
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        self.misfire_grace_time = None if repeats else job.misfire_grace_time
        self.max_instances = MANY if repeats else job.max_instances
        self._jobstore_alias = job._jobstore_alias  # noqa: SLF001

    def __str__(self) -> str:
        return str(self._job)


class ClaimingExecutor:
    """Claims and makes the runs of one scheduler, under one term at a time.

    It calls ``over`` with a job whose last run is over.
    """

    def __init__(self, role: str, catch_up: int, over: Callable[[Any], object], *, repeats: bool) -> None:
        self._role = role
        self._catch_up = catch_up
        self._over = over
        self._repeats = repeats
        self._changed = threading.Condition()
        self._at_work = 0
        self._scopes: dict[anyio.CancelScope, asyncio.AbstractEventLoop] = {}
        self._seen: dict[str, datetime] = {}
        """The last due time of each job, in UTC, that was handled under this term."""
        self._pending: dict[str, PendingRuns] = {}
        self.term: Term | None = None
        """The current term; None while this node does not lead."""

    def open(self, term: Term, seen: Mapping[str, datetime]) -> None:
        """Begin a term; ``seen`` has the last due time of each job, in UTC, that was handled in earlier terms."""
        with self._changed:
            self._pending, self._seen, self.term = {}, dict(seen), term

    def close(self) -> None:
        """Start no more runs, and wait for those under way. If the term was lost, coroutines are cancelled."""
        with self._changed:
            term, self.term = self.term, None
            for pending in self._pending.values():
                pending.dues.clear()
            if term is not None and term.lost_reason not in (None, EndReason.RESIGNED):
                for scope, loop in self._scopes.items():
                    loop.call_soon_threadsafe(scope.cancel)
            self._changed.wait_for(lambda: not self._at_work)

    def submit(self, executor: Any, job: Any, run_times: list[datetime]) -> None:
        """Have an executor make the runs that are due, except those handled before: a restored store repeats them."""
        with self._changed:
            seen = self._seen.get(key(job))
            fresh = [due for due in run_times if seen is None or utc(due) > seen]
            if self.term is None or not fresh:
                return
            self._seen[key(job)] = utc(fresh[-1])
        self.make(executor, job, fresh)

    def make(self, executor: Any, job: Any, dues: list[datetime]) -> None:
        """Have an executor run the job for each due time."""
        with self._changed:
            pending = self._pending.setdefault(key(job), PendingRuns())
            if self._repeats:
                pending.dues.extend(dues)
                self._limit(job, pending)
                if pending.batches:
                    # The current batch continues with these due times.
                    return
            pending.batches += 1
        batch = Batch(self, job, pending, pending.dues if self._repeats else deque(dues))
        is_coroutine = isinstance(executor, AsyncIOExecutor) and iscoroutinefunction_partial(job.func)
        function = functools.partial(self.run_async if is_coroutine else self.run, batch)
        stand_in = ClaimedJob(job, function, repeats=self._repeats)
        try:
            type(executor).submit_job(executor, stand_in, batch)
        except BaseException:
            with self._changed:
                pending.batches -= 1
            raise

    def _limit(self, job: Any, pending: PendingRuns) -> None:
        """Drop the oldest due times if there are too many."""
        too_many = len(pending.dues) - self._catch_up
        if too_many > 0:
            log.warning("job %s takes longer than the time between its runs: %d runs are dropped", job, too_many)
            for _ in range(too_many):
                pending.dues.popleft()

    def is_last(self, name: str) -> bool:
        """Record that the runs under way are the job's last. Return False if none is under way."""
        with self._changed:
            pending = self._pending.get(name)
            if pending is None or not pending.batches:
                return False
            pending.last = True
            return True

    # Called by executors ---------------------------------------------------------------------------------------

    def take(self, batch: Batch) -> datetime | None:
        """Return the next due time of a batch; None if there is none left."""
        pending = batch.pending
        with self._changed:
            if batch.dues:
                return batch.dues.popleft()
            pending.batches -= 1
            is_over = pending.last and not pending.batches and self.term is not None
        if is_over:
            self._over(batch.job)
        return None

    def run(self, batch: Batch) -> Any:
        """Claim the run of the current due time, and call the job."""
        run = self._enter(batch)
        try:
            return perform(run, batch.job, repeats=self._repeats)
        finally:
            self._leave(run, batch.pending)

    async def run_async(self, batch: Batch) -> Any:
        """Do the same as ``run``, for a job that is a coroutine function."""
        run = self._enter(batch)
        scope = anyio.CancelScope()
        try:
            with scope:
                self._scopes[scope] = asyncio.get_running_loop()
                return await perform_async(run, batch.job, repeats=self._repeats)
        finally:
            self._scopes.pop(scope, None)
            self._leave(run, batch.pending)
        raise LeadershipLost(f"{run!r} was cancelled: the term is over", role=self._role, token=run.term.token)

    def _enter(self, batch: Batch) -> Run:
        assert batch.present is not None
        with self._changed:
            if self.term is None:
                raise NotLeader(
                    f"role {self._role!r}: this node does not lead any more, so job {batch.key!r}, due "
                    f"{batch.present.isoformat()}, is left to the next leader",
                    role=self._role,
                )
            self._at_work += 1
            return Run(batch.key, batch.present, self.term)

    def _leave(self, run: Run, pending: PendingRuns) -> None:
        with self._changed:
            self._at_work -= 1
            if self._repeats and not is_over(run):
                # The run is repeated, so the job is not over.
                pending.last = False
            self._changed.notify_all()
