"""The due times of a schedule, and its runs, by hand."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from tenure.aio.call import is_async
from tenure.aio.term import AsyncTerm
from tenure.base.moments import microseconds
from tenure.election import Election
from tenure.errors import ConfigError
from tenure.internals import engine_of, holding_of
from tenure.schedule.jobs import Job
from tenure.schedule.run import Run
from tenure.schedule.schedule import Schedule, jobs_of
from tenure.term import Term


def due_times(schedule: Schedule, job: str, after: datetime, count: int = 1) -> list[datetime]:
    """Return the next ``count`` due times of a job after a moment, in the job's time zone; fewer if it has no more.

    Raises:
        ConfigError: for a job that the schedule does not have, and a moment without a time zone.
    """
    found: list[datetime] = []
    it, us = _job(schedule, job), microseconds(after, "after")
    while len(found) < count and (due := it.due_times.after(us)) is not None:
        us = due
        found.append(it.local(due))
    return found


def run_job(
    schedule: Schedule, job: str, due: datetime, term: Term | AsyncTerm, *, attempt: int = 1, missed: int = 0
) -> Any:
    """Call the function of a job once, for a due time, in this thread; return what it returns.

    A coroutine function needs a term of an AsyncNode, and returns a coroutine, to be awaited. Any node will do. With a
    real one, such as ``tenure.Node("sqlite:///…")``, ``run.transaction()`` works as in production; with a
    :class:`LocalNode` it raises ConfigError. Nothing else is written: the run is not claimed, recorded or repeated.

    Raises:
        ConfigError: for a job that the schedule does not have, a due time without a time zone, and a term of the wrong
            kind of node.
    """
    it = _job(schedule, job)
    if is_async(it.function) != isinstance(term, AsyncTerm):
        needs = "coroutine function, so it needs a term of an AsyncNode"
        needs = needs if is_async(it.function) else "plain function, so it needs a term of a Node"
        raise ConfigError(f"job {job!r} is a {needs}")
    blocking = term if isinstance(term, Term) else _blocking(term)
    local = it.local(microseconds(due, "due"))
    return it.function(Run(it.name, local, blocking, term, attempt=attempt, missed=missed))


def _blocking(term: AsyncTerm) -> Term:
    """Return the same term for threads, in which a run of a coroutine opens its transaction."""
    candidacy = engine_of(term).candidacy(term.role)
    return Term(Election(candidacy, lambda action: action()), holding_of(term))


def _job(schedule: Schedule, name: str) -> Job:
    jobs = jobs_of(schedule)
    if name not in jobs:
        raise ConfigError(f"job {name!r} is not in this schedule: it has {', '.join(jobs) or 'no jobs'}")
    return jobs[name]
