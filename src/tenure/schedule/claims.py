"""What a schedule writes in its fenced transactions: definitions, claims, and the due times that are skipped.

Each function works in the transaction of its caller, who commits it. Where the answer to a commit may be lost, the
caller tries again, and ``again`` is True: then the function looks for what the earlier try has recorded.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime

from tenure.base.moments import microseconds, moment
from tenure.fence import job_runs
from tenure.fence.verdicts import TermIdentity
from tenure.schedule import plan
from tenure.schedule.due_times import SECOND_US, from_text
from tenure.schedule.jobs import Job
from tenure.store.records import JobRecord
from tenure.term import Transaction, ask

log = logging.getLogger("tenure.schedule")


def mark_of(record: JobRecord) -> int:
    """Return up to which moment the due times of a job are accounted for."""
    return max(us_of(record.since), us_of(record.claimed))


def us_of(at: datetime | None) -> int:
    """Return a moment of a record in microseconds; 0 for None."""
    return 0 if at is None else microseconds(at)


# The beginning of a term ----------------------------------------------------------------------------------------


def begin_term(
    transaction: Transaction, term: TermIdentity, jobs: Iterable[Job]
) -> tuple[int, set[str], dict[str, JobRecord]]:
    """Return the database's time, the jobs that lost a run, and the record of each job.

    New and changed definitions count from now.
    """
    by_name = {job.name: job for job in jobs}
    now, lost_jobs, known = ask(transaction, job_runs.begin_term(term, tuple(by_name)))
    found = {record.job: record for record in known}
    for name, job in by_name.items():
        found[name] = _describe(transaction, term, job, _define(transaction, term, job, found.get(name), now))
    return now, lost_jobs, found


def _define(transaction: Transaction, term: TermIdentity, job: Job, record: JobRecord | None, now: int) -> JobRecord:
    """Write a definition that is new, and return the job's record."""
    text = job.due_times.text
    if record is None:
        record = JobRecord(job.name, None, None, None, term.token)
    if record.spec != text:
        if record.spec is not None:
            _account_for_old(transaction, term, record, now)
        ask(transaction, job_runs.define(term, job.name, text, now))
        record = replace(record, spec=text, since=moment(now), zone_data=None)
    return record


def _describe(transaction: Transaction, term: TermIdentity, job: Job, record: JobRecord) -> JobRecord:
    """Write what operators read about a job, if it has changed. Warn if two hosts have different time zones."""
    here = job.due_times.zone_data
    if record.zone_data not in (here, None):
        log.warning(
            "job %r: this host has other time zone data than the host that led before (%s, not %s), so they may "
            "disagree about due times: install the same tzdata on all hosts",
            *(job.name, here, record.zone_data),
        )
    if (record.zone_data, record.jitter) != (here, job.jitter):
        ask(transaction, job_runs.describe(term, job.name, here, round(job.jitter * SECOND_US)))
    return record


def _account_for_old(transaction: Transaction, term: TermIdentity, record: JobRecord, now: int) -> None:
    """Record the due times that a definition had which is replaced now, and which no run was made for."""
    old = from_text(record.spec or "")
    mark = mark_of(record)
    if old is None:
        log.warning("job %r: its old definition %r is unknown, and is not counted", record.job, record.spec)
        return
    number = old.count(mark, now)
    log.info("job %r: its definition was %r; %d due times of it were not run", record.job, record.spec, number)
    first, last = old.after(mark), old.latest(mark, now)
    if first is not None and last is not None:
        _record_skipped(transaction, term, record.job, mark, plan.Stretch(first, last, number, plan.MISSED))


# Runs -----------------------------------------------------------------------------------------------------------


def claim(
    transaction: Transaction, term: TermIdentity, job: Job, mark: int, decision: plan.Make, *, again: bool
) -> job_runs.Claimed:
    """Claim a run, and record what is skipped: before it, or the run itself if the job is paused."""
    claimed: job_runs.Claimed = ask(transaction, job_runs.claim_due(term, job.name, decision.due, once=not job.repeats))
    if claimed.mine:
        for stretch in decision.skipped:
            _record_skipped(transaction, term, job.name, mark, stretch)
            mark = stretch.last
    elif again and claimed.outcome is not None:
        claimed = claimed._replace(mine=claimed.outcome == "begun", paused=claimed.outcome == "skipped")
    elif claimed.paused:
        paused = plan.stretch_of(job, mark, decision.due, plan.PAUSED)
        if paused is not None:
            _record_skipped(transaction, term, job.name, mark, paused)
            ask(transaction, job_runs.pass_over(term, job.name, paused.last))
            claimed = claimed._replace(skipped=paused.number)
    return claimed


def _record_skipped(transaction: Transaction, term: TermIdentity, job: str, mark: int, stretch: plan.Stretch) -> None:
    """Record due times that are not run: as part of the stretch that ends at the mark, or as one of their own."""
    last, number, reason = stretch.last, stretch.number, stretch.reason
    if not ask(transaction, job_runs.extend_skipped(term, job, mark, last, number, reason)):
        ask(transaction, job_runs.record_skipped(term, job, stretch.first, last, number, reason))


def repeat(transaction: Transaction, term: TermIdentity, job: Job, due: int) -> int | None:
    """Record one more attempt at a run that did not end; return its number, or None if the job is paused."""
    if ask(transaction, job_runs.is_paused(term, job.name)):
        return None
    attempt: int = ask(transaction, job_runs.repeat(term, job.name, due))
    return attempt


def take_request(transaction: Transaction, term: TermIdentity, job: Job, at: int, *, again: bool) -> bool:
    """Take the request of an operator, and record its run; False if another run has answered it."""
    if again and ask(transaction, job_runs.request_is_taken(term, job.name, at)):
        return True
    taken: bool = ask(transaction, job_runs.take_request(term, job.name, at))
    if taken:
        ask(transaction, job_runs.record_requested(term, job.name, at))
    return taken
