"""The scheduler of a replica, in the hands of its node.

It stands between APScheduler and its parts in five places, by attributes of the one instance:

    add_job, _real_add_job   a standby writes nothing to a shared job store that the leader works on
    remove_job               a job whose last run has begun goes when that run is over
    _process_jobs            no pass over the jobs without a valid term; an error of a job store ends no thread
    submit_job (executors)   runs are made in the workshop

On election the database says which runs are over, and so what is due: what this replica, or the job store, believes
is put aside.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

from tenure.errors import ConfigError
from tenure.integrations import extra
from tenure.integrations.apscheduler import dues
from tenure.integrations.apscheduler.runs import write
from tenure.integrations.apscheduler.workshop import Workshop, key, key_of
from tenure.term import Term, Transaction
from tenure.values import JobRecord

with extra("apscheduler"):
    from apscheduler.jobstores.base import ConflictingIdError, JobLookupError
    from apscheduler.jobstores.memory import MemoryJobStore
    from apscheduler.schedulers.base import STATE_RUNNING, STATE_STOPPED, BaseScheduler
    from apscheduler.triggers.interval import IntervalTrigger

log = logging.getLogger("tenure.apscheduler")

START_WITHIN_S = 25.0
LOOK_AGAIN_S = 0.1
"""How soon a scheduler looks again while its term is in doubt."""
RETRY_S = 1.0
"""How soon it looks again after a job store failed."""
_RANDOM_ID = re.compile("[0-9a-f]{12}4[0-9a-f]{3}[89ab][0-9a-f]{15}")  # uuid4().hex, APScheduler's own


class Paused:
    """The scheduler on every replica: started, and not at work."""

    def __init__(self, scheduler: BaseScheduler) -> None:
        """Take a scheduler that was not started."""
        self._scheduler = scheduler

    def start(self) -> None:
        """Start it, paused."""
        self._start()

    def stop(self) -> None:
        """Shut it down. Whatever it ran has been waited for."""
        self._stop()

    def _start(self) -> None:
        if self._scheduler.running:
            raise ConfigError("this scheduler runs already: leave scheduler.start() out, the node starts it")
        self._scheduler.start(paused=True)

    def _stop(self) -> None:
        if self._scheduler.running:
            self._scheduler.shutdown(wait=False)


class PausedOnLoop(Paused):
    """The same for one that lives on an event loop."""

    async def start(self) -> None:  # type: ignore[override]
        """Start it on this loop, paused."""
        self._start()

    async def stop(self) -> None:  # type: ignore[override]
        """Shut it down, and wait until the loop has done that."""
        self._stop()
        while self._scheduler.running:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.01)


class Leading:
    """The scheduler on the leader: what its node starts on election, and stops when the term is over."""

    def __init__(self, scheduler: BaseScheduler, role: str, catch_up: int, *, repeats: bool) -> None:
        """Take a scheduler that was not started; ``repeats`` is ``at-least-once``."""
        self._scheduler = scheduler
        self._catch_up = catch_up
        self._repeats = repeats
        self._workshop = Workshop(role, catch_up, self._over, repeats=repeats)
        self._held: dict[tuple[str, str], tuple[Any, bool]] = {}
        """Jobs for shared stores that wait for an election, and whether they replace what is there."""
        self._missed: list[tuple[Any, list[datetime]]] = []
        """Jobs whose missed runs are to be made up for."""
        self._added = False
        """Whether jobs were added that the database does not know."""
        self._gone: set[str] = set()
        """Jobs whose rows nobody needs any more."""
        self._passing: int | None = None
        """The thread that looks for due jobs at this moment."""
        self._plain_add = scheduler._real_add_job  # noqa: SLF001 - there is no public place for any of this
        self._plain_pass = scheduler._process_jobs  # noqa: SLF001
        self._plain_remove = scheduler.remove_job

    def take_over(self) -> None:
        """Stand between the scheduler and its parts; refuse jobs that it has and that cannot be led."""
        for job in self._scheduler.get_jobs():
            _check_id(job)
        self._scheduler.add_job = functools.partial(self._add_job, self._scheduler.add_job)
        self._scheduler.remove_job = self._remove_job
        self._scheduler._real_add_job = self._real_add_job  # noqa: SLF001
        self._scheduler._process_jobs = self._process_jobs  # noqa: SLF001

    # What the node does ----------------------------------------------------------------------------------------

    def start(self, term: Term) -> None:
        """Put the jobs in order by what the database knows, and begin to work."""
        self._wait_started()
        self._added = False
        for (alias, _), (job, replaces) in list(self._held.items()):
            with contextlib.suppress(ConflictingIdError):  # it is there already, and is not to be replaced
                self._plain_add(job, alias, replaces)
        self._held.clear()
        now = datetime.now(timezone.utc)
        jobs = {key(job): job for job in self._scheduler.get_jobs()}
        records, young = write(term, lambda transaction: _records(transaction, jobs, now))
        self._gone, self._missed = set(), []
        seen = {}
        for name, job in jobs.items():
            if name in young:
                self._anchor(job, records[name], now)
            else:
                seen[name] = self._catch_up_with(job, records[name], now)
        self._workshop.open(term, seen)
        self._scheduler.resume()

    def stop(self) -> None:
        """Begin no run any more, and wait for those under way."""
        if self._scheduler.running:
            self._scheduler.pause()
        with self._scheduler._jobstores_lock:  # noqa: SLF001 - a pass over the jobs that is under way is waited for
            pass
        self._workshop.close()

    def alive(self) -> bool:
        """Say whether it works; and do what is due every second."""
        term, thread = self._workshop.term, getattr(self._scheduler, "_thread", None)
        if term is None or not self._scheduler.running or (thread is not None and not thread.is_alive()):
            return False
        if self._added:
            self._added = False
            now = datetime.now(timezone.utc)
            jobs = {key(job): job for job in self._scheduler.get_jobs()}
            records, _ = write(term, lambda transaction: _records(transaction, jobs, now))
            for name, job in jobs.items():
                self._anchor(job, records[name], now)
        if self._gone:
            gone, self._gone = self._gone, set()
            write(term, lambda transaction: [transaction.forget(name) for name in gone])
        if any(map(_is_shared, self._scheduler._jobstores.values())):  # noqa: SLF001
            self._scheduler.wakeup()  # another replica may have added a job
        return True

    def _wait_started(self) -> None:
        deadline = time.monotonic() + START_WITHIN_S
        while not self._scheduler.running:
            if time.monotonic() > deadline:
                raise ConfigError("the scheduler was not started: the log of tenure.services says why")
            time.sleep(LOOK_AGAIN_S / 10)

    # The jobs, in order ----------------------------------------------------------------------------------------

    def _anchor(self, job: Any, record: JobRecord, now: datetime) -> None:
        """Count a job's interval from the anchor in the database."""
        trigger = _anchored(job.trigger, record)
        if trigger is not job.trigger:
            next_run = None if job.next_run_time is None else dues.after(trigger, now)
            self._modify(job, trigger=trigger, next_run_time=next_run)

    def _catch_up_with(self, job: Any, record: JobRecord, now: datetime) -> datetime:
        """Set when a job is due by what the database knows of its runs; return up to when it has been dealt with."""
        trigger = _anchored(job.trigger, record)
        plan = dues.plan(job, trigger, record, now, self._catch_up, repeats=self._repeats)
        if plan.dropped:
            log.warning("job %s: more than %d runs were missed; the newest of them run now", job, len(plan.dues))
        if plan.next_run is None and not plan.paused:
            if not plan.dues:
                self._plain_remove(job.id, job._jobstore_alias)  # noqa: SLF001
                return now
            plan = replace(plan, dues=plan.dues[:-1], next_run=plan.dues[-1])  # APScheduler removes it with that one
        if plan.dues:
            self._missed.append((job, plan.dues))
        options = {"coalesce": False, "misfire_grace_time": None} if self._repeats else {}
        self._modify(job, trigger=trigger, next_run_time=plan.next_run, **options)
        return now if plan.next_run is None else min(now, plan.next_run - dues.TICK)

    def _modify(self, job: Any, **changes: Any) -> None:
        if any(getattr(job, name) != value for name, value in changes.items()):
            self._scheduler.modify_job(job.id, job._jobstore_alias, **changes)  # noqa: SLF001

    def _over(self, job: Any) -> None:
        """Let go of a job whose last run is over."""
        with contextlib.suppress(JobLookupError):
            self._plain_remove(job.id, job._jobstore_alias)  # noqa: SLF001
        self._forget_soon(job.id, job._jobstore_alias)  # noqa: SLF001

    def _forget_soon(self, job_id: str, alias: str) -> None:
        """Have a job's row deleted; not where other replicas have the job, each in its own memory."""
        if _is_shared(self._scheduler._lookup_jobstore(alias)):  # noqa: SLF001
            self._gone.add(key_of(job_id, alias))

    # What APScheduler does -------------------------------------------------------------------------------------

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
        """Add a job to its store; hold back what would change a shared store under the leader."""
        shared = _is_shared(self._scheduler._lookup_jobstore(alias))  # noqa: SLF001
        if not shared:
            _check_id(job)
        if self._repeats:
            job._modify(coalesce=False, misfire_grace_time=None)  # noqa: SLF001
        starting = self._scheduler.state == STATE_STOPPED
        if shared and self._workshop.term is None and (starting or replace_existing):
            self._held[alias, job.id] = job, replace_existing
        else:
            self._plain_add(job, alias, replace_existing)
            self._added = True

    def _remove_job(self, job_id: str, jobstore: str | None = None) -> None:
        """Remove a job. One whose last run has just begun stays, without a next one, until that is done."""
        if self._passing != threading.get_ident() or jobstore is None:
            self._plain_remove(job_id, jobstore)
            return
        under_way = self._workshop.is_last(key_of(job_id, jobstore))
        if under_way and self._repeats:
            self._scheduler.modify_job(job_id, jobstore, next_run_time=None)
        else:
            self._plain_remove(job_id, jobstore)
        if not under_way:
            self._forget_soon(job_id, jobstore)

    def _process_jobs(self) -> float | None:
        """Make the runs that are due, if this node leads at this moment: else they are another leader's."""
        if self._scheduler.state == STATE_RUNNING:
            term = self._workshop.term
            if term is None or not term.valid:
                return LOOK_AGAIN_S
            for executor in self._scheduler._executors.values():  # noqa: SLF001
                executor.submit_job = functools.partial(self._workshop.submit, executor)
            self._make_missed()
        self._passing = threading.get_ident()
        try:
            wait_s: float | None = self._plain_pass()
        except Exception:
            log.exception("the scheduler could not look for due jobs; looking again in %g s", RETRY_S)
            return RETRY_S
        finally:
            self._passing = None
        return wait_s

    def _make_missed(self) -> None:
        missed, self._missed = self._missed, []
        for job, run_times in missed:
            try:
                self._workshop.make(self._scheduler._lookup_executor(job.executor), job, run_times)  # noqa: SLF001
            except Exception:
                log.exception("job %s: %d missed runs could not be made up for", job, len(run_times))


def _records(transaction: Transaction, jobs: Mapping[str, Any], now: datetime) -> tuple[dict[str, JobRecord], set[str]]:
    """Return what the database knows of the jobs, and which of them are new to it. All have an anchor then."""
    records = {record.job: record for record in transaction.jobs() if record.job in jobs}
    young = jobs.keys() - records.keys()
    for name, job in jobs.items():
        record = records.get(name, JobRecord(name, None, None, None, 0))
        if record.anchor is None:
            start = job.trigger.start_date if isinstance(job.trigger, IntervalTrigger) else now
            record = replace(record, anchor=transaction.anchor(name, start))
        records[name] = record
    return records, young


def _anchored(trigger: Any, record: JobRecord) -> Any:
    """Return a trigger that counts from the anchor, if it is one that counts."""
    if not isinstance(trigger, IntervalTrigger) or trigger.start_date == record.anchor:
        return trigger
    assert record.anchor is not None
    anchored = copy(trigger)
    anchored.start_date = record.anchor.astimezone(trigger.timezone)
    return anchored


def _is_shared(store: Any) -> bool:
    return not isinstance(store, MemoryJobStore)


def _check_id(job: Any) -> None:
    if _RANDOM_ID.fullmatch(job.id):
        raise ConfigError(
            f"job {job.name!r} has no id of its own, so no two replicas would mean the same by it: add_job(…, "
            f"id={job.name!r})"
        )
