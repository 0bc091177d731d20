"""The scheduler of a replica, controlled by its node.

This module replaces five methods of the APScheduler instance:

    add_job, _real_add_job   a standby writes nothing to a shared job store that the leader works on
    remove_job               a job whose last run has begun is removed when that run is over
    _process_jobs            jobs are started only under a valid term; an error of a job store does not end the thread
    submit_job (executors)   runs are claimed first, by the executor of this package

When the node is elected, only the database decides which runs are over, and so which are due. The state of this replica
and of the job store does not count.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

from tenure import ConfigError, JobRecord, Term, Transaction
from tenure.integrations import extra
from tenure.integrations.apscheduler import due_times
from tenure.integrations.apscheduler.executor import ClaimingExecutor, key, key_of
from tenure.schedule.run import write

with extra("apscheduler"):
    from apscheduler.jobstores.base import ConflictingIdError, JobLookupError
    from apscheduler.jobstores.memory import MemoryJobStore
    from apscheduler.schedulers.base import STATE_RUNNING, STATE_STOPPED, BaseScheduler
    from apscheduler.triggers.interval import IntervalTrigger

log = logging.getLogger("tenure.apscheduler")

START_WITHIN_S = 25.0
LOOK_AGAIN_S = 0.1
"""How soon a scheduler checks its jobs again while its term is in doubt."""
RETRY_S = 1.0
"""How soon a scheduler checks its jobs again after a job store failed."""
_RANDOM_ID = re.compile("[0-9a-f]{12}4[0-9a-f]{3}[89ab][0-9a-f]{15}")
"""A uuid4().hex, which APScheduler picks for a job without an id."""


class Paused:
    """The service on every replica: the scheduler, started and paused."""

    def __init__(self, scheduler: BaseScheduler) -> None:
        self._scheduler = scheduler

    def start(self) -> Any:
        """Start the scheduler, paused."""
        if self._scheduler.running:
            raise ConfigError("this scheduler is already running: do not call scheduler.start(); the node starts it")
        self._scheduler.start(paused=True)

    def stop(self) -> Any:
        """Shut the scheduler down. No run is under way any more."""
        if self._scheduler.running:
            self._scheduler.shutdown(wait=False)


class PausedOnLoop(Paused):
    """The same for a scheduler on an event loop."""

    async def start(self) -> None:
        """Start the scheduler on this loop, paused."""
        super().start()

    async def stop(self) -> None:
        """Shut the scheduler down, and wait until the loop has done that."""
        super().stop()
        while self._scheduler.running:  # noqa: ASYNC110 - it has no event to wait for
            await asyncio.sleep(0.01)


class Leading:
    """The service on the leader: the scheduler at work. ``repeats`` means ``at-least-once``."""

    def __init__(self, scheduler: BaseScheduler, role: str, catch_up: int, *, repeats: bool) -> None:
        self._scheduler = scheduler
        self._catch_up = catch_up
        self._repeats = repeats
        self._executor = ClaimingExecutor(role, catch_up, self._over, repeats=repeats)
        self._held: dict[tuple[str, str], tuple[Any, bool]] = {}
        """Jobs for shared stores that wait for the election, and whether each replaces a job with the same id."""
        self._missed: list[tuple[Any, list[datetime]]] = []
        """Jobs with missed runs that are made up for in the next pass."""
        self._added = False
        """Whether jobs were added that the database does not know yet."""
        self._gone: set[str] = set()
        """Jobs whose rows in the database are not needed any more."""
        self._passing: int | None = None
        """The thread that is making a pass over the jobs."""
        self._plain_add = scheduler._real_add_job  # noqa: SLF001 - none of this has a public name
        self._plain_pass = scheduler._process_jobs  # noqa: SLF001
        self._plain_remove = scheduler.remove_job

    def take_over(self) -> None:
        """Replace the methods of the scheduler; refuse jobs without an id."""
        for job in self._scheduler.get_jobs():
            _check_id(job)
        self._scheduler.add_job = functools.partial(self._add_job, self._scheduler.add_job)
        self._scheduler.remove_job = self._remove_job
        self._scheduler._real_add_job = self._real_add_job  # noqa: SLF001
        self._scheduler._process_jobs = self._process_jobs  # noqa: SLF001

    # Called by the node ----------------------------------------------------------------------------------------

    def start(self, term: Term) -> None:
        """Set each job's next run from its record in the database, and resume the scheduler."""
        self._wait_started()
        self._added = False
        for (alias, _), (job, replaces) in list(self._held.items()):
            # The store may have the job already, and that one must not be replaced.
            with contextlib.suppress(ConflictingIdError):
                self._plain_add(job, alias, replaces)
        self._held.clear()
        now = datetime.now(timezone.utc)
        jobs = self._jobs()
        records, young = write(term, lambda transaction: _records(transaction, jobs, now))
        self._say_what_is_begun(records, jobs)
        if not self._repeats:
            write(term, lambda transaction: _settle(transaction, [records[name] for name in jobs]))
        self._gone, self._missed = set(), []
        seen = {}
        for name, job in jobs.items():
            with self._pausing(job):
                if name in young:
                    self._anchor(job, records[name], now)
                else:
                    seen[name] = self._catch_up_with(job, records[name], now)
        self._executor.open(term, seen)
        self._scheduler.resume()

    def stop(self) -> None:
        """Start no more runs, and wait for those under way."""
        if self._scheduler.running:
            self._scheduler.pause()
        with self._scheduler._jobstores_lock:  # noqa: SLF001 - waits for the end of a pass over the jobs
            pass
        self._executor.close()

    def alive(self) -> bool:
        """Return whether the scheduler works. The node calls this about every second; other regular work is done here.

        New jobs get their anchors, and the rows of jobs that are gone are deleted.
        """
        term, thread = self._executor.term, getattr(self._scheduler, "_thread", None)
        if term is None or not self._scheduler.running or (thread is not None and not thread.is_alive()):
            return False
        if self._added:
            self._added = False
            now = datetime.now(timezone.utc)
            jobs = self._jobs()
            records, _ = write(term, lambda transaction: _records(transaction, jobs, now))
            for name, job in jobs.items():
                with self._pausing(job):
                    self._anchor(job, records[name], now)
        if self._gone:
            gone, self._gone = self._gone, set()
            write(term, lambda transaction: [transaction.forget(name) for name in gone])
        if any(map(_is_shared, self._scheduler._jobstores.values())):  # noqa: SLF001
            # Another replica may have added a job.
            self._scheduler.wakeup()
        return True

    def _wait_started(self) -> None:
        deadline = time.monotonic() + START_WITHIN_S
        while not self._scheduler.running:
            if time.monotonic() > deadline:
                raise ConfigError("the scheduler was not started: see the log of tenure.services for the reason")
            time.sleep(LOOK_AGAIN_S / 10)

    # When jobs are due -----------------------------------------------------------------------------------------

    def _jobs(self) -> dict[str, Any]:
        """Return the jobs by their names in the database."""
        jobs: dict[str, Any] = {}
        for job in self._scheduler.get_jobs():
            other = jobs.setdefault(key(job), job)
            if other is not job:
                log.error(
                    "jobs %r and %r of the stores %r and %r have the same name in the database, %r, so each run of "
                    "one counts as a run of the other: give one of them another id",
                    *(other.id, job.id, other._jobstore_alias, job._jobstore_alias, key(job)),  # noqa: SLF001
                )
        return jobs

    @contextlib.contextmanager
    def _pausing(self, job: Any) -> Iterator[None]:
        """Pause a job if its due times cannot be computed in the block. The other jobs are not affected."""
        try:
            yield
        except Exception:
            log.exception(
                "job %s: its trigger %r cannot compute when it is due, so it is paused; fix the trigger, then call "
                "resume_job(%r)",
                *(job, job.trigger, job.id),
            )
            self._modify(job, next_run_time=None)

    def _say_what_is_begun(self, records: Mapping[str, JobRecord], jobs: Mapping[str, Any]) -> None:
        """Log which runs were begun and are not marked as done, and whether they are repeated."""
        for name, record in records.items():
            # Only schedulers set an anchor.
            if record.anchor is None or not due_times.is_begun(record):
                continue
            if name not in jobs:
                fate = "is left alone: this scheduler has no such job"
            elif self._repeats:
                fate = "is repeated"
            else:
                fate = "is not repeated: delivery is 'at-most-once'"
            # After an upgrade this is logged once for each job, because older releases do not mark runs as done if
            # delivery is at-most-once. A run that is lost without a warning would be worse.
            log.warning("job %r: the run due %s was begun and is not marked as done; it %s", name, record.claimed, fate)

    def _anchor(self, job: Any, record: JobRecord, now: datetime) -> None:
        """Count a job's interval from the anchor in the database."""
        trigger = _anchored(job.trigger, record)
        changes = self._options()
        if trigger is not job.trigger:
            next_run = None if job.next_run_time is None else due_times.after(trigger, now)
            changes |= {"trigger": trigger, "next_run_time": next_run}
        self._modify(job, **changes)

    def _catch_up_with(self, job: Any, record: JobRecord, now: datetime) -> datetime:
        """Set a job's next run from its record in the database; return the last due time that was handled."""
        trigger = _anchored(job.trigger, record)
        plan = due_times.plan(job, trigger, record, now, self._catch_up, repeats=self._repeats)
        if plan.late:
            number = f"more than {plan.late}" if plan.dropped else plan.late
            grace_s = job.misfire_grace_time
            log.warning(
                "job %s: %s runs were missed and are left out: misfire_grace_time is %d s", job, number, grace_s
            )
        elif plan.dropped:
            log.warning("job %s: more than %d runs were missed; the newest of them run now", job, len(plan.dues))
        elif plan.dues:
            log.info("job %s: runs that were missed run now: %s", job, ", ".join(map(str, plan.dues)))
        if plan.next_run is None and not plan.paused:
            if not plan.dues:
                self._plain_remove(job.id, job._jobstore_alias)  # noqa: SLF001
                return now
            # APScheduler removes a job when it makes the job's last run.
            plan = replace(plan, dues=plan.dues[:-1], next_run=plan.dues[-1])
        if plan.dues:
            self._missed.append((job, plan.dues))
        self._modify(job, trigger=trigger, next_run_time=plan.next_run, **self._options())
        return now if plan.next_run is None else min(now, due_times.utc(plan.next_run) - due_times.TICK)

    def _options(self) -> dict[str, Any]:
        """Return the options that keep APScheduler from skipping due times, if runs are repeated."""
        return {"coalesce": False, "misfire_grace_time": None} if self._repeats else {}

    def _modify(self, job: Any, **changes: Any) -> None:
        if any(not _is_same(getattr(job, name), value) for name, value in changes.items()):
            self._scheduler.modify_job(job.id, job._jobstore_alias, **changes)  # noqa: SLF001

    def _over(self, job: Any) -> None:
        """Remove a job whose last run is over."""
        with contextlib.suppress(JobLookupError):
            self._plain_remove(job.id, job._jobstore_alias)  # noqa: SLF001
        self._forget_soon(job.id, job._jobstore_alias)  # noqa: SLF001

    def _forget_soon(self, job_id: str, alias: str) -> None:
        """Have a job's row deleted, unless its store is in memory: then other replicas have the job, too."""
        if _is_shared(self._scheduler._lookup_jobstore(alias)):  # noqa: SLF001
            self._gone.add(key_of(job_id, alias))

    # Called by APScheduler -------------------------------------------------------------------------------------

    def _add_job(self, add: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        job = add(*args, **kwargs)
        if self._scheduler.state == STATE_STOPPED:
            try:
                _check_id(job)
            except ConfigError:
                job.remove()
                raise
        return job

    def _real_add_job(self, job: Any, alias: str, replace_existing: bool) -> None:
        """Add a job to its store; hold it back if that would change a shared store that another leader works on."""
        shared = _is_shared(self._scheduler._lookup_jobstore(alias))  # noqa: SLF001
        if not shared:
            _check_id(job)
        job._modify(**self._options())  # noqa: SLF001
        starting = self._scheduler.state == STATE_STOPPED
        if shared and self._executor.term is None and (starting or replace_existing):
            self._held[alias, job.id] = job, replace_existing
        else:
            self._plain_add(job, alias, replace_existing)
            self._added = True

    def _remove_job(self, job_id: str, jobstore: str | None = None) -> None:
        """Remove a job. If its last run has just begun, the job stays, without a next run, until that run is done."""
        if self._passing != threading.get_ident() or jobstore is None:
            self._plain_remove(job_id, jobstore)
            return
        under_way = self._executor.is_last(key_of(job_id, jobstore))
        if under_way and self._repeats:
            self._scheduler.modify_job(job_id, jobstore, next_run_time=None)
        else:
            self._plain_remove(job_id, jobstore)
        if not under_way:
            self._forget_soon(job_id, jobstore)

    def _process_jobs(self) -> float | None:
        """Make the runs that are due if this node leads; otherwise leave them to the leader."""
        if self._scheduler.state == STATE_RUNNING:
            term = self._executor.term
            if term is None or not term.valid:
                return LOOK_AGAIN_S
            for executor in self._scheduler._executors.values():  # noqa: SLF001
                executor.submit_job = functools.partial(self._executor.submit, executor)
            self._make_missed()
        self._passing = threading.get_ident()
        try:
            wait_s: float | None = self._plain_pass()
        except Exception:
            log.exception("the scheduler could not check for due jobs; it tries again in %g s", RETRY_S)
            return RETRY_S
        finally:
            self._passing = None
        return wait_s

    def _make_missed(self) -> None:
        missed, self._missed = self._missed, []
        for job, run_times in missed:
            try:
                self._executor.make(self._scheduler._lookup_executor(job.executor), job, run_times)  # noqa: SLF001
            except Exception:
                log.exception("job %s: %d missed runs could not be made up for", job, len(run_times))


def _records(transaction: Transaction, jobs: Mapping[str, Any], now: datetime) -> tuple[dict[str, JobRecord], set[str]]:
    """Return the database's records of jobs, and which jobs had none. Every job has an anchor afterwards."""
    records = {record.job: record for record in transaction.jobs()}
    young = jobs.keys() - records.keys()
    for name, job in jobs.items():
        record = records.get(name, JobRecord(name, None, None, None, 0))
        if record.anchor is None:
            start = job.trigger.start_date if isinstance(job.trigger, IntervalTrigger) else now
            record = replace(record, anchor=transaction.anchor(name, start))
        records[name] = record
    return records, young


def _settle(transaction: Transaction, records: Iterable[JobRecord]) -> None:
    """Mark the claimed runs as done, so that they are not repeated if delivery is changed to at-least-once.

    This release marks each run when it claims it; older releases did not.
    """
    for record in records:
        if record.claimed is not None and due_times.is_begun(record):
            transaction.finish(record.job, record.claimed)


def _is_same(value: Any, other: Any) -> bool:
    """Whether two values are the same; times are the same if they are the same moment."""
    if isinstance(value, datetime) and isinstance(other, datetime):
        value, other = due_times.utc(value), due_times.utc(other)
    return bool(value == other)


def _anchored(trigger: Any, record: JobRecord) -> Any:
    """Return the trigger; for an interval, a copy that counts from the anchor."""
    assert record.anchor is not None
    if not isinstance(trigger, IntervalTrigger) or due_times.utc(trigger.start_date) == record.anchor:
        return trigger
    anchored = copy(trigger)
    anchored.start_date = record.anchor.astimezone(trigger.timezone)
    return anchored


def _is_shared(store: Any) -> bool:
    return not isinstance(store, MemoryJobStore)


def _check_id(job: Any) -> None:
    if _RANDOM_ID.fullmatch(job.id):
        raise ConfigError(
            f"job {job.name!r} has no id, so replicas cannot know that they have the same job: give it one, as in "
            f"add_job(…, id={job.name!r})"
        )
