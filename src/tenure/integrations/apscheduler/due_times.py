"""When a job was and is due, computed from its trigger and from its record in the database. No I/O.

The trigger is first asked by ``get_next_fire_time(None, moment)``, with the moment of the last run in the database. So
the answer does not depend on what this replica has seen. After that each due time follows from the previous one, as in
APScheduler. An interval counts from its anchor, which is in the database.

All comparisons and sums are in UTC. Python compares two times of the same zone by the wall clock, and a sum loses which
of two equal wall clock times is meant (``fold``). Both are wrong in the hour that is repeated when summer time ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

from tenure import ConfigError, JobRecord

TICK = timedelta(microseconds=1)
FIRST_WINDOW = timedelta(seconds=1)
PATIENCE = 100_000
"""How many past due times are skipped at most, for a trigger that always starts from its first one."""
CLOSE = timedelta(days=2)
"""Longer than any time that a time zone has ever repeated: an hour, or a day."""


@dataclass(frozen=True)
class Plan:
    """What a new leader does with a job."""

    dues: list[datetime]
    """The due times to run now, oldest first."""
    next_run: datetime | None
    """When the job is due next; None if never, or if it is paused."""
    dropped: bool
    """Whether more runs were missed than the limit, so that some are dropped."""
    late: int
    """How many missed runs, up to the limit, are left out because of ``misfire_grace_time``."""
    paused: bool
    """Whether the job was paused: it has no next run, and is kept."""


def utc(moment: datetime) -> datetime:
    """Return the same moment in UTC, where times can be compared and added to."""
    return moment.astimezone(timezone.utc)


def after(trigger: Any, moment: datetime) -> datetime | None:
    """Return the first due time after a moment, without jitter.

    Raises:
        ConfigError: for a trigger whose due times do not advance.
    """
    return next(_series(trigger, moment), None)


def between(trigger: Any, since: datetime, until: datetime, limit: int) -> tuple[list[datetime], bool, datetime | None]:
    """Return the newest due times after ``since`` up to ``until``, whether there are more, and the one that follows.

    It searches back in growing steps, and halves the last step if that has too many due times. So it need not go
    through a million due times of a job. If there are at most ``limit``, each follows from the previous one, as in
    APScheduler.
    """
    since, until, window = utc(since), utc(until), FIRST_WINDOW
    too_many, too_few = None, until
    start = max(since, until - window)
    while True:
        found, following = _up_to(trigger, start, until, 2 * limit)
        if len(found) > 2 * limit:
            too_many = start
        elif len(found) > limit or start == since:
            return found[-limit:], len(found) > limit, following
        else:
            too_few = start
        if too_many is None:
            window *= 2
            start = max(since, until - window)
        elif too_few - too_many > TICK:
            start = too_many + (too_few - too_many) / 2
        else:
            raise ConfigError(f"trigger {trigger} is due more than {limit} times at {too_few.isoformat()}: change it")


def _up_to(trigger: Any, since: datetime, until: datetime, limit: int) -> tuple[list[datetime], datetime | None]:
    """Return the due times of a window and the one that follows; only ``limit`` + 1 due times if there are more."""
    found: list[datetime] = []
    for due in _series(trigger, since):
        if utc(due) > until:
            return found, due
        found.append(due)
        if len(found) > limit:
            break
    return found, None


def _series(trigger: Any, since: datetime) -> Iterator[datetime]:
    """Yield the due times after a moment, in order. The first follows from the moment, the others from each other."""
    trigger, since = _without_jitter(trigger), utc(since)
    due = trigger.get_next_fire_time(None, since + TICK)
    # Asked in the second of two equal hours, a cron trigger answers with the second of any later two equal hours, and
    # on the wrong side of any later skipped hour, however far away these are. So ask it again from nearby.
    if due is not None and utc(due) > since + CLOSE:
        due = trigger.get_next_fire_time(None, utc(due) - CLOSE)
    passed = 0
    while due is not None:
        if utc(due) > since:
            yield due
        elif (passed := passed + 1) > PATIENCE:
            raise ConfigError(f"trigger {trigger} is due {PATIENCE} times before {since.isoformat()}: start it later")
        last, due = due, trigger.get_next_fire_time(due, max(utc(due), since) + TICK)
        if due is not None and utc(due) <= utc(last):
            raise ConfigError(
                f"trigger {trigger} does not advance: after {last.isoformat()} it is due at {due.isoformat()}; fix it"
            )


def _without_jitter(trigger: Any) -> Any:
    """Return the trigger without its random delays."""
    if not getattr(trigger, "jitter", None):
        return trigger
    trigger = copy(trigger)
    trigger.jitter = None
    return trigger


def plan(job: Any, trigger: Any, record: JobRecord, now: datetime, limit: int, *, repeats: bool) -> Plan:
    """Return what to do with a job that has a record in the database; its trigger is anchored.

    Runs that were due before the last claimed run are over: if runs are repeated, they are claimed in the order in
    which they are due, each after the previous one is over. The claimed run itself is repeated if it is not done. A
    paused job makes up for no other run.
    """
    assert record.anchor is not None
    known = [moment for moment in (record.claimed, record.done) if moment is not None]
    last = max(known, default=record.anchor - TICK)
    begun = [last] if repeats and is_begun(record) else []
    paused = job.next_run_time is None
    if paused:
        missed, dropped, next_run = list[datetime](), False, after(trigger, max(now, last))
    else:
        missed, dropped, next_run = between(trigger, last, now, limit)
    late = 0
    if not repeats:
        in_time = [due for due in missed if _in_time(job, due, now)]
        late, missed = len(missed) - len(in_time), in_time[-1:] if job.coalesce else in_time
        dropped = dropped and (late > 0 or not job.coalesce)
    dropped = dropped or len(begun) + len(missed) > limit
    missed = [*begun, *missed][-limit:]
    if not paused or (missed and next_run is None):
        return Plan(missed, next_run, dropped=dropped, late=late, paused=False)
    return Plan(missed, None, dropped=dropped, late=late, paused=record.claimed is None or next_run is not None)


def is_begun(record: JobRecord) -> bool:
    """Whether the last claimed run is not marked as done."""
    return record.claimed is not None and (record.done is None or record.claimed > record.done)


def _in_time(job: Any, due: datetime, now: datetime) -> bool:
    return job.misfire_grace_time is None or utc(due) > now - timedelta(seconds=job.misfire_grace_time)
