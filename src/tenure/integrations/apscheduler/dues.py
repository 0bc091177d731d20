"""When a job was and is due: what follows from its trigger and from what the database knows. No I/O here.

A trigger is asked by ``get_next_fire_time(None, moment)``, so that the answer depends on the moment alone and not on
what this replica has seen; an interval counts from its anchor, and that is in the database.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from tenure.values import JobRecord

TICK = timedelta(microseconds=1)
FIRST_WINDOW = timedelta(seconds=1)
PATIENCE = 10_000
"""How many due times of a trigger that always begins at its beginning are passed over."""


@dataclass(frozen=True)
class Plan:
    """What a new leader does with a job."""

    dues: list[datetime]
    """What to run now, oldest first."""
    next_run: datetime | None
    """When it is due next; None if never again, or if it is paused."""
    dropped: bool
    """Whether there was more to make up for than is allowed."""
    paused: bool
    """Whether somebody has paused it: it has no next run, and stays."""


def after(trigger: Any, moment: datetime) -> datetime | None:
    """Return the first due time after a moment."""
    due: datetime | None = trigger.get_next_fire_time(None, moment + TICK)
    for _ in range(PATIENCE):
        if due is None or due > moment:
            break
        due = trigger.get_next_fire_time(due, moment + TICK)
    return due


def between(trigger: Any, since: datetime, until: datetime, limit: int) -> tuple[list[datetime], bool]:
    """Return the newest due times after ``since`` up to ``until``, and whether there are more.

    It looks back in steps that grow: a job that was due a million times is not counted out.
    """
    window = FIRST_WINDOW
    while True:
        start = max(since, until - window)
        newest: deque[datetime] = deque(maxlen=limit)
        number, due = 0, after(trigger, start)
        while due is not None and start < due <= until:
            newest.append(due)
            number, due = number + 1, after(trigger, due)
        if number > limit or start == since:
            return list(newest), number > limit
        window *= 2


def plan(job: Any, trigger: Any, record: JobRecord, now: datetime, limit: int, *, repeats: bool) -> Plan:
    """Return what to do with a job that the database knows; its trigger is anchored.

    What was due before the last run that counts is over: the last that was done where runs are repeated, else the last
    that was claimed. A job that is paused has nothing to make up for but a run that was begun and is not done.
    """
    assert record.anchor is not None
    last = record.done if repeats else record.claimed
    since = record.anchor - TICK if last is None else last
    paused = job.next_run_time is None
    missed: list[datetime] = []
    dropped = False
    if not paused:
        grace = None if repeats else job.misfire_grace_time
        first = since if grace is None else max(since, now - timedelta(seconds=grace))
        missed, dropped = between(trigger, first, now, limit)
    if repeats and record.claimed is not None and record.claimed > since and record.claimed not in missed:
        missed = sorted((*missed, record.claimed))[-limit:]
    if not repeats and job.coalesce:
        missed, dropped = missed[-1:], False
    next_run = after(trigger, max(now, since))
    if not paused or (missed and next_run is None):
        return Plan(missed, next_run, dropped=dropped, paused=False)
    return Plan(missed, None, dropped=dropped, paused=record.claimed is None or next_run is not None)
