"""Runs of jobs, claimed and recorded under the fence.

A run is named by the moment at which it is due. A job has one row for each role, which keeps the latest run that was
claimed and the latest that was done; a claim of that run or of an earlier one is refused. The fence comes first, so
only the latest term can claim, and the next leader sees every claim of earlier terms. If two transactions of one term
claim the same job, one waits until the other has ended. A second table has a row for each run: see
``store.job_statements``.

A claim belongs to the application's transaction. If that is rolled back, the run was never claimed. The transaction's
other writes are committed together with the claim, or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from tenure.base.moments import microseconds, moment
from tenure.fence import fence
from tenure.fence.verdicts import TermIdentity
from tenure.settings import check_name
from tenure.store import job_statements as texts
from tenure.store.dialects import listed
from tenure.store.session import Result, Step

if TYPE_CHECKING:
    from tenure.store.records import JobRecord

DETAIL_LENGTH = 200


class JobStatement(NamedTuple):
    """Some statements about jobs, and a function that interprets their results."""

    steps: tuple[Step, ...]
    meaning: Callable[[Sequence[Result]], Any]


class Claimed(NamedTuple):
    """What came of an attempt to claim a run that a schedule found to be due."""

    mine: bool
    """Whether the run was claimed."""
    mark_us: int | None
    """The latest run that is claimed now."""
    paused: bool
    now_us: int
    """The database's clock."""
    outcome: str | None
    """What this term has recorded about the run: in this transaction, or in one whose commit was not answered."""
    skipped: int = 0
    """How many due times were skipped because the job is paused."""


# What the application asks for --------------------------------------------------------------------------------


def claim(term: TermIdentity, job: str, due: datetime, *, once: bool = False) -> JobStatement:
    """Claim the run of ``job`` that is due at ``due``; True if neither it nor a later run was claimed before.

    ``once`` marks the run as done with the claim, because it is not to be repeated.
    """
    steps = (texts.ADD_JOB, texts.CLAIM, texts.RECORD_CLAIM, *((texts.FINISH_CLAIMED,) if once else ()))
    return _statement(term, job, lambda results: _changed(results[1]), *steps, us=microseconds(due, "due"))


def finish(term: TermIdentity, job: str, due: datetime) -> JobStatement:
    """Mark the run of ``job`` due at ``due`` as done; True if neither it nor a later run was marked before."""
    steps = (texts.ADD_JOB, texts.FINISH, texts.RECORD_DONE)
    return _statement(term, job, lambda results: _changed(results[1]), *steps, us=microseconds(due, "due"))


def anchor(term: TermIdentity, job: str, at: datetime) -> JobStatement:
    """Set the moment from which a job's interval is counted, unless one is set; return the moment that is set then."""
    steps = (texts.ADD_JOB, texts.SET_ANCHOR, texts.ANCHOR)
    return _statement(term, job, lambda results: moment(results[2].rows[0][0]), *steps, us=microseconds(at, "at"))


def forget(term: TermIdentity, job: str) -> JobStatement:
    """Delete a job's rows; True if there were any."""
    return _statement(term, job, lambda results: _changed(results[1]), texts.FORGET_RUNS, texts.FORGET_JOB)


def jobs(term: TermIdentity) -> JobStatement:
    """Return the records of all jobs of the term's role."""
    from tenure.store.records import job_records  # noqa: PLC0415 - slow to import, and a node leads without it

    step = Step(texts.JOBS, {"namespace": term.namespace, "role": term.role})
    return JobStatement((step,), lambda results: job_records(results[0].rows))


# What schedules ask for ---------------------------------------------------------------------------------------


def claim_due(term: TermIdentity, job: str, us: int, *, once: bool) -> JobStatement:
    """Claim a run, unless the job is paused, or the database's clock has not reached the due time."""
    mark = (texts.FINISH_CLAIMED,) if once else ()
    steps = (texts.ADD_JOB, texts.CLAIM_DUE, texts.RECORD_CLAIM, *mark, texts.STATE)

    def meaning(results: Sequence[Result]) -> Claimed:
        ((mark_us, paused_us, now_us, outcome),) = results[-1].rows
        return Claimed(_changed(results[1]), mark_us, paused_us is not None, now_us, outcome)

    return _statement(term, job, meaning, *steps, us=us)


def lose_earlier(term: TermIdentity, job: str) -> JobStatement:
    """Record that the runs of earlier terms are lost which did not end."""
    return _statement(term, job, bool, texts.LOSE_EARLIER)


def repeat(term: TermIdentity, job: str, us: int) -> JobStatement:
    """Record one more attempt at the run that was claimed last; return its number."""
    steps = (texts.LOSE_RUN, texts.RECORD_ATTEMPT, texts.ATTEMPT)
    return _statement(term, job, lambda results: int(results[2].rows[0][0] or 1), *steps, us=us)


def take_request(term: TermIdentity, job: str, us: int) -> JobStatement:
    """Take the request of an operator to run a job now; False if another run has answered it."""
    return _statement(term, job, lambda results: _changed(results[0]), texts.TAKE_REQUEST, us=us)


def request_is_taken(term: TermIdentity, job: str, us: int) -> JobStatement:
    """Return whether this term has taken a request, and not ended the run yet."""
    return _statement(term, job, lambda results: bool(results[0].rows), texts.REQUEST_TAKEN, us=us)


def is_paused(term: TermIdentity, job: str) -> JobStatement:
    """Return whether a job is paused."""
    return _statement(term, job, lambda results: any(row[1] is not None for row in results[0].rows), texts.STATE, us=0)


def record_requested(term: TermIdentity, job: str, us: int) -> JobStatement:
    """Record the run that an operator asked for."""
    return _statement(term, job, bool, texts.RECORD_REQUESTED, us=us)


def end(term: TermIdentity, job: str, us: int, outcome: str, detail: str | None, *, over: bool) -> JobStatement:
    """Record how a run ended. ``over`` means that it is not repeated."""
    steps = (texts.RECORD_END, *((texts.FINISH,) if over else ()))
    # Every database can store this text, whatever its encoding.
    short = None if detail is None else ascii(detail)[1:-1][:DETAIL_LENGTH]
    return _statement(term, job, bool, *steps, us=us, outcome=outcome, detail=short)


def extend_skipped(term: TermIdentity, job: str, mark: int, last: int, number: int, reason: str) -> JobStatement:
    """Lengthen the skipped stretch that ends at ``mark``; False if there is none with that reason."""
    parameters = {"mark": mark, "last": last, "number": number, "reason": reason}
    return _statement(term, job, lambda results: _changed(results[0]), texts.EXTEND_SKIPPED, **parameters)


def record_skipped(term: TermIdentity, job: str, first: int, last: int, number: int, reason: str) -> JobStatement:
    """Record a stretch of due times that were not run."""
    parameters = {"first": first, "last": last, "number": number, "reason": reason}
    return _statement(term, job, bool, texts.RECORD_SKIPPED, **parameters)


def pass_over(term: TermIdentity, job: str, last: int) -> JobStatement:
    """Move the marks of a job over the due times up to ``last``, which are not run."""
    return _statement(term, job, bool, texts.PASS_OVER, last=last)


def define(term: TermIdentity, job: str, spec: str, since: int) -> JobStatement:
    """Write a job's definition, and the moment from which its due times count."""
    return _statement(term, job, bool, texts.ADD_JOB, texts.DEFINE, spec=spec, since=since)


def describe(term: TermIdentity, job: str, zone_data: str, jitter_us: int) -> JobStatement:
    """Write with which time zone data a job's due times are computed, and by how much runs may be delayed."""
    return _statement(term, job, bool, texts.DESCRIBE, zone_data=zone_data, jitter=jitter_us)


def begin_term(term: TermIdentity, names: Sequence[str]) -> JobStatement:
    """Mark the runs of earlier terms as lost that were not ended.

    Return the time, the jobs of the runs that were lost, and the records of all jobs.
    """
    parameters = {"namespace": term.namespace, "role": term.role, "token": term.token, "names": listed(tuple(names))}
    from tenure.store.records import job_records  # noqa: PLC0415 - as above; a schedule has imported it before

    steps = tuple(Step(text, parameters) for text in (texts.BEGUN, texts.LOSE, texts.LIST, texts.NOW, texts.JOBS))

    def meaning(results: Sequence[Result]) -> tuple[int, set[str], list[JobRecord]]:
        ((now,),), begun = results[3].rows, {job for (job,) in results[0].rows}
        return now, begun, job_records(results[4].rows)

    return JobStatement(steps, meaning)


# How statements are run ---------------------------------------------------------------------------------------


def perform(connection: Any, term: TermIdentity, bound_s: float, statement: JobStatement) -> Any:
    """Fence the transaction of ``connection``, then run the statement in it."""
    return statement.meaning(fence.fence(connection, term, bound_s, *statement.steps))


async def perform_async(connection: Any, term: TermIdentity, bound_s: float, statement: JobStatement) -> Any:
    """Do the same as ``perform``, on a connection whose driver is asynchronous."""
    return statement.meaning(await fence.fence_async(connection, term, bound_s, *statement.steps))


def _statement(
    term: TermIdentity, job: str, meaning: Callable[[Sequence[Result]], Any], *steps: str, **parameters: Any
) -> JobStatement:
    named = {
        "namespace": term.namespace,
        "role": term.role,
        "token": term.token,
        "id": term.member_id,
        "job": check_name("job", job),
    }
    return JobStatement(tuple(Step(text, named | parameters) for text in steps), meaning)


def _changed(result: Result) -> bool:
    return result.count == 1
