"""Where runs are made: an executor of APScheduler's calls a job for each due time, and each is claimed first.

An executor is given a stand-in for the job, whose function runs under a claim, and due times that remember which is the
present one. Where runs are repeated (``at-least-once``), those of one job are made one after the other, in the order in
which they are due: what the database keeps is the last one done.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any

import anyio

from tenure.errors import LeadershipLost, NotLeader
from tenure.integrations import extra, job_name
from tenure.integrations.apscheduler.runs import Run, perform, perform_async
from tenure.term import Term

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
    return key_of(job.id, job._jobstore_alias)  # noqa: SLF001 - it has no public name


class Line:
    """What is known of one job under this term."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self.dues: deque[datetime] = deque()
        """Due times that wait for their run, where runs are repeated."""
        self.batches = 0
        """How many batches of due times are under way."""
        self.last = False
        """Whether no run comes after these: the job goes when they are over."""


class Batch:
    """A job and some due times, as an executor needs them: it iterates over the times, and calls the job for each."""

    def __init__(self, workshop: Workshop, job: Any, line: Line, dues: deque[datetime]) -> None:
        """Hand out ``dues``, which may grow meanwhile."""
        self.job = job
        self.key = key(job)
        self.line = line
        self.dues = dues
        self.present: datetime | None = None
        self._workshop = workshop

    def __iter__(self) -> Iterator[datetime]:
        """Hand out the due times, oldest first."""
        while (due := self._workshop.take(self)) is not None:
            self.present = due
            yield due

    def call(self) -> Any:
        """Run the job for the present due time."""
        return self._workshop.run(self)

    async def call_async(self) -> Any:
        """Run the job, a coroutine function, for the present due time."""
        return await self._workshop.run_async(self)


class StandIn:
    """What an executor takes for a job."""

    def __init__(self, job: Any, function: Callable[[], Any], *, repeats: bool) -> None:
        """Stand in for the job, with another function."""
        self._job = job
        self.id = job.id
        self.func = function
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        self.misfire_grace_time = None if repeats else job.misfire_grace_time
        self.max_instances = MANY if repeats else job.max_instances
        self._jobstore_alias = job._jobstore_alias  # noqa: SLF001

    def __str__(self) -> str:
        """Show the job."""
        return str(self._job)


class Workshop:
    """The runs of one scheduler, under one term at a time."""

    def __init__(self, role: str, catch_up: int, over: Callable[[Any], object], *, repeats: bool) -> None:
        """Begin without a term; ``over`` is told of a job whose last run is over."""
        self._role = role
        self._catch_up = catch_up
        self._over = over
        self._repeats = repeats
        self._changed = threading.Condition()
        self._at_work = 0
        self._scopes: dict[anyio.CancelScope, asyncio.AbstractEventLoop] = {}
        self._seen: dict[str, datetime] = {}
        """Up to which due time each job has been dealt with under this term."""
        self._lines: dict[str, Line] = {}
        self.term: Term | None = None
        """The term to work under."""

    def open(self, term: Term, seen: Mapping[str, datetime]) -> None:
        """Work under a term; ``seen`` says up to which due time jobs have been dealt with."""
        with self._changed:
            self._lines, self._seen, self.term = {}, dict(seen), term

    def close(self) -> None:
        """Begin no run any more, and wait for those under way. Coroutines of a term that was lost are cancelled."""
        with self._changed:
            term, self.term = self.term, None
            for line in self._lines.values():
                line.dues.clear()
            if term is not None and term.lost_reason not in (None, "resigned"):
                for scope, loop in self._scopes.items():
                    loop.call_soon_threadsafe(scope.cancel)
            self._changed.wait_for(lambda: not self._at_work)

    def submit(self, executor: Any, job: Any, run_times: list[datetime]) -> None:
        """Have an executor make the runs that are due. A job store that was set back does not bring old ones back."""
        with self._changed:
            seen = self._seen.get(key(job))
            fresh = [due for due in run_times if seen is None or due > seen]
            if self.term is None or not fresh:
                return
            self._seen[key(job)] = fresh[-1]
        self.make(executor, job, fresh)

    def make(self, executor: Any, job: Any, dues: list[datetime]) -> None:
        """Have an executor make runs."""
        with self._changed:
            line = self._lines.setdefault(key(job), Line())
            if self._repeats:
                line.dues.extend(dues)
                self._limit(job, line)
                if line.batches:  # it goes on with these
                    return
            line.batches += 1
        batch = Batch(self, job, line, line.dues if self._repeats else deque(dues))
        is_coroutine = isinstance(executor, AsyncIOExecutor) and iscoroutinefunction_partial(job.func)
        stand_in = StandIn(job, batch.call_async if is_coroutine else batch.call, repeats=self._repeats)
        try:
            type(executor).submit_job(executor, stand_in, batch)
        except BaseException:
            with self._changed:
                line.batches -= 1
            raise

    def _limit(self, job: Any, line: Line) -> None:
        """Drop the oldest of too many."""
        too_many = len(line.dues) - self._catch_up
        if too_many > 0:
            log.warning("job %s is slower than it is due: %d runs are dropped", job, too_many)
            for _ in range(too_many):
                line.dues.popleft()

    def is_last(self, name: str) -> bool:
        """Take in that no run of a job comes after those under way; False if none is."""
        with self._changed:
            line = self._lines.get(name)
            if line is None or not line.batches:
                return False
            line.last = True
            return True

    # What an executor calls ------------------------------------------------------------------------------------

    def take(self, batch: Batch) -> datetime | None:
        """Return the next due time of a batch; None at its end."""
        line = batch.line
        with self._changed:
            if batch.dues:
                return batch.dues.popleft()
            line.batches -= 1
            is_over = line.last and not line.batches and self.term is not None
        if is_over:
            self._over(batch.job)
        return None

    def run(self, batch: Batch) -> Any:
        """Make the present run."""
        run = self._enter(batch)
        try:
            return perform(run, batch.job, repeats=self._repeats)
        finally:
            self._leave(run, batch.line)

    async def run_async(self, batch: Batch) -> Any:
        """Make the present run of a coroutine function."""
        run = self._enter(batch)
        scope = anyio.CancelScope()
        try:
            with scope:
                self._scopes[scope] = asyncio.get_running_loop()
                return await perform_async(run, batch.job, repeats=self._repeats)
        finally:
            self._scopes.pop(scope, None)
            self._leave(run, batch.line)
        raise LeadershipLost(f"{run!r} was cancelled: the term is over", role=self._role, token=run.term.token)

    def _enter(self, batch: Batch) -> Run:
        assert batch.present is not None
        with self._changed:
            if self.term is None:
                raise NotLeader(
                    f"role {self._role!r}: this node leads no more, so job {batch.key!r}, due "
                    f"{batch.present.isoformat()}, is left to whoever does",
                    role=self._role,
                )
            self._at_work += 1
            return Run(batch.key, batch.present, self.term)

    def _leave(self, run: Run, line: Line) -> None:
        with self._changed:
            self._at_work -= 1
            if self._repeats and not run.done:
                line.last = False  # it is not over
            self._changed.notify_all()
