"""Runs of jobs, claimed under the fence: which run of a job was claimed last, and which was done last.

A run is named by the moment at which it is due. A job has one row for each role, so the table stays as small as the
list of jobs. The row keeps the latest run that was claimed and the latest that was done; a claim of that run or of an
earlier one is refused. The fence comes first, so only the latest term can claim, and the next leader sees every claim
of earlier terms. If two transactions of one term claim the same job, one waits until the other has ended.

A claim belongs to the application's transaction. If that is rolled back, the run was never claimed. The transaction's
other writes are committed together with the claim, or not at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

from tenure.errors import ConfigError
from tenure.fence import fence
from tenure.fence.verdicts import TermIdentity
from tenure.settings import check_name
from tenure.store import statements
from tenure.store.records import EPOCH, job_records, moment
from tenure.store.session import Result, Step


@dataclass(frozen=True)
class JobStatement:
    """Some statements about jobs, and a function that interprets the result of the last one."""

    steps: tuple[Step, ...]
    meaning: Callable[[Result], Any]


def claim(term: TermIdentity, job: str, due: datetime) -> JobStatement:
    """Claim the run of ``job`` that is due at ``due``; True if neither it nor a later run was claimed before."""
    return _statement(term, job, _changed, statements.ADD_JOB, statements.CLAIM, us=_microseconds("due", due))


def finish(term: TermIdentity, job: str, due: datetime) -> JobStatement:
    """Mark the run of ``job`` due at ``due`` as done; True if neither it nor a later run was marked before."""
    return _statement(term, job, _changed, statements.ADD_JOB, statements.FINISH, us=_microseconds("due", due))


def anchor(term: TermIdentity, job: str, at: datetime) -> JobStatement:
    """Set the moment from which a job's interval is counted, unless one is set; return the moment that is set then."""
    texts = (statements.ADD_JOB, statements.SET_ANCHOR, statements.ANCHOR)
    return _statement(term, job, lambda result: moment(result.rows[0][0]), *texts, us=_microseconds("at", at))


def forget(term: TermIdentity, job: str) -> JobStatement:
    """Delete a job's row; True if there was one."""
    return _statement(term, job, _changed, statements.FORGET_JOB)


def jobs(term: TermIdentity) -> JobStatement:
    """Return the records of all jobs of the term's role."""
    step = Step(statements.JOBS, {"namespace": term.namespace, "role": term.role})
    return JobStatement((step,), lambda result: job_records(result.rows))


def perform(connection: Any, term: TermIdentity, bound_s: float, statement: JobStatement) -> Any:
    """Fence the transaction of ``connection``, then run the statement in it."""
    return statement.meaning(fence.fence(connection, term, bound_s, *statement.steps))


async def perform_async(connection: Any, term: TermIdentity, bound_s: float, statement: JobStatement) -> Any:
    """Do the same as ``perform``, on a connection whose driver is asynchronous."""
    return statement.meaning(await fence.fence_async(connection, term, bound_s, *statement.steps))


def _microseconds(what: str, at: datetime) -> int:
    """Return a moment as microseconds since the epoch; raise ConfigError if it is not a usable datetime."""
    if not isinstance(at, datetime):
        raise ConfigError(f"{what}={at!r} must be a datetime with a time zone")
    if at.utcoffset() is None:
        raise ConfigError(
            f"{what}={at!r} has no time zone, so it means a different moment on each machine: give it one, as in "
            "datetime.now(timezone.utc)"
        )
    try:
        at.astimezone(timezone.utc)
    except OverflowError:
        raise ConfigError(f"{what}={at!r} is not within the years 1 to 9999 in UTC: use a moment that is") from None
    return (at - EPOCH) // timedelta(microseconds=1)


def _statement(
    term: TermIdentity, job: str, meaning: Callable[[Result], Any], *texts: str, **parameters: Any
) -> JobStatement:
    named = {"namespace": term.namespace, "role": term.role, "token": term.token, "job": check_name("job", job)}
    return JobStatement(tuple(Step(text, named | parameters) for text in texts), meaning)


def _changed(result: Result) -> bool:
    return result.count == 1
