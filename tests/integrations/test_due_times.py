"""When jobs are due, over every time zone and every change of its clocks: none is lost, none twice, nothing hangs.

What is expected comes from APScheduler's triggers, asked as a scheduler asks that is never interrupted. More cases:

    make test ARGS="-m frameworks tests/integrations/test_due_times.py --timeout 0" FUZZ=10000
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from zoneinfo import ZoneInfo, available_timezones

import pytest
from apscheduler.triggers.base import BaseTrigger
from apscheduler.triggers.calendarinterval import CalendarIntervalTrigger
from apscheduler.triggers.cron import CronTrigger
from apscheduler.triggers.date import DateTrigger
from apscheduler.triggers.interval import IntervalTrigger
from hypothesis import assume, given
from hypothesis import strategies as st

from tenure.integrations.apscheduler import due_times
from tenure.integrations.apscheduler.executor import ClaimingExecutor
from tenure.store.records import JobRecord
from tests.support.fuzzing import fuzzed

UTC = timezone.utc
ZONES = sorted(available_timezones())
FIRST_YEAR, LAST_YEAR = 1960, 2040
SECOND, MINUTE, HOUR, DAY = (timedelta(**{unit: 1}) for unit in ("seconds", "minutes", "hours", "days"))
MANY = 1_000_000
ENOUGH_ASKS = 20_000
"""A computation that asks its trigger more often than this does not end."""


# --- the world ----------------------------------------------------------------------------------------------


@functools.cache
def changes(zone: str) -> list[datetime]:
    """The moments at which the clocks of a zone change."""
    info = ZoneInfo(zone)
    found = []
    early, offset = datetime(FIRST_YEAR, 1, 1, tzinfo=UTC), None
    while early.year < LAST_YEAR:
        late = early + DAY
        here = late.astimezone(info).utcoffset()
        if offset is not None and here != offset:
            low, high = early, late
            while high - low > SECOND:
                middle = low + (high - low) // 2
                low, high = (middle, high) if middle.astimezone(info).utcoffset() == offset else (low, middle)
            found.append(high.replace(microsecond=0))
        early, offset = late, here
    return found


class Counted(BaseTrigger):
    """A trigger that is asked a bounded number of times."""

    def __init__(self, trigger):
        self.trigger, self.asks = trigger, 0

    def get_next_fire_time(self, previous, now):
        self.asks += 1
        assert self.asks < ENOUGH_ASKS, f"{self.trigger!r} is asked for ever"
        return self.trigger.get_next_fire_time(previous, now)

    def __repr__(self):
        return repr(self.trigger)


@dataclass
class Case:
    """A job, its due times around a change of the clocks, and a time without a leader."""

    trigger: Counted
    since: datetime
    due: list[datetime]
    """What a scheduler that is never interrupted runs until `now`."""
    following: datetime | None
    """What it runs next."""
    now: datetime
    zone: ZoneInfo

    def plan(self, last, *, begun=False, limit=MANY, repeats=True, **options):
        """What a leader does that is elected `now`; run number `last` was the last one."""
        done = None if last is None else self.due[last]
        claimed = done
        if begun:
            done = self.due[last - 1] if last else None
        record = JobRecord("job", self.since, claimed, done, 1)
        return due_times.plan(job(self.trigger, **options), self.trigger, record, self.now, limit, repeats=repeats)

    def is_due(self, moment):
        """Whether the trigger says so when it is asked just before."""
        due = self.trigger.get_next_fire_time(None, moment - due_times.TICK)
        return due is not None and due.astimezone(UTC) == moment


def job(trigger, **options):
    told = {"misfire_grace_time": None, "coalesce": False, "max_instances": 1, "func": print} | options
    return SimpleNamespace(id="job", _jobstore_alias="default", trigger=trigger, next_run_time=MANY, **told)


def utc(moments):
    return [moment.astimezone(UTC) for moment in moments]


def walk(trigger, since, until):
    """Go through due times as APScheduler does, one by one."""
    found, due = [], trigger.get_next_fire_time(None, since)
    while due is not None and due.astimezone(UTC) <= until:
        found.append(due.astimezone(UTC))
        due = trigger.get_next_fire_time(
            due, due.astimezone(UTC) + due_times.TICK
        )  # a scheduler wakes up a little later
    return found, due and due.astimezone(UTC)


@st.composite
def cases(draw):
    zone = draw(st.sampled_from(ZONES))
    info = ZoneInfo(zone)
    change = draw(st.sampled_from(changes(zone) or [datetime(2026, 10, 25, 1, tzinfo=UTC)]))
    scale, step = draw(st.sampled_from([(MINUTE, SECOND), (HOUR, MINUTE), (DAY, HOUR), (30 * DAY, DAY)]))
    shift = draw(st.sampled_from([0, 1, -1])) * HOUR if scale == MINUTE else 0 * HOUR
    since = change + shift - draw(st.integers(0, 180)) * scale / 60
    now = since + draw(st.integers(1, 360)) * scale / 60
    # A cron trigger that is first asked in a repeated hour carries that into later ones; a running one does not.
    while scale > MINUTE and since.astimezone(info).fold:
        since -= HOUR
    kind = draw(st.sampled_from(["cron", "interval", "date", "calendar"]))
    if kind == "cron":
        trigger = draw(crons(step, change.astimezone(info), info))
    elif kind == "interval":
        anchor = since - draw(st.integers(0, 100_000)) * step + draw(st.integers(0, 999_999)) * due_times.TICK
        length = draw(st.sampled_from([1, 2, 7, 10, 24, 30, 60])) * step
        trigger = IntervalTrigger(seconds=length.total_seconds(), start_date=anchor.astimezone(info), timezone=info)
    elif kind == "date":
        trigger = DateTrigger((since + draw(st.integers(0, 360)) * scale / 60).astimezone(info))
    else:
        wall = change.astimezone(info) - draw(st.integers(0, 3)) * timedelta(minutes=30)
        start = (since - draw(st.integers(1, 40)) * DAY).date()
        days, hour, minute = draw(st.sampled_from([1, 7])), wall.hour, wall.minute
        trigger = CalendarIntervalTrigger(days=days, start_date=start, hour=hour, minute=minute, timezone=info)
    due, following = walk(trigger, since, now)
    due = [moment for moment in due if moment >= since]  # a calendar's begin at its beginning, whenever it is asked
    return Case(Counted(trigger), since, due, following, now, info)


@st.composite
def crons(draw, step, wall, info):
    """Fields as fine as `step`; those above it are often those of the change."""
    hour = (wall.hour - draw(st.integers(0, 2))) % 24
    any_day = {"day": "*"}, {"day_of_week": "sun"}, {"day_of_week": "mon-fri"}, {"day": f"{wall.day}"}, {"day": "last"}
    any_month = {}, {"month": "3,4,9,10,11"}, {"month": f"{wall.month}"}, {"month": f"1,{wall.month}"}
    fields = dict(draw(st.sampled_from(any_month))) | dict(draw(st.sampled_from(any_day)))
    minutes = st.sampled_from(["0", "15", "30", "59", "0,30", "*/20"])
    if step == SECOND:
        fields = {"second": draw(st.sampled_from(["*", "*/2", "*/7", "0,59"]))}
    elif step == MINUTE:
        fields = {"minute": draw(st.sampled_from(["*", "*/10", "*/7", "0,59"]))}
    elif step == HOUR:
        fields = {"hour": draw(st.sampled_from(["*", "*/2", f"{hour}", "0,1,2,3,23"])), "minute": draw(minutes)}
    else:
        fields |= {"hour": draw(st.sampled_from([f"{hour}", f"{hour}", "0", "23"])), "minute": draw(minutes)}
    return CronTrigger(**fields, timezone=info)


# --- properties ---------------------------------------------------------------------------------------------


@fuzzed(150)
@given(cases(), st.data())
def test_new_leader_makes_up_for_what_an_uninterrupted_scheduler_would_have_run(case, data):
    last = data.draw(st.none() | st.integers(0, len(case.due) - 1)) if case.due else None
    begun = last is not None and data.draw(st.booleans())
    limit = data.draw(st.sampled_from([1, 3, MANY]))
    plan = case.plan(last, begun=begun, limit=limit)
    missed = case.due[0 if last is None else last if begun else last + 1 :]
    found = utc(plan.dues)
    if len(missed) <= limit:
        assert found == missed
        assert plan.next_run is case.following or plan.next_run.astimezone(UTC) == case.following
    # Cron triggers pass over a midnight after some changes, unless they are asked after the change: see the page.
    assert found == sorted({*missed, *filter(case.is_due, found)})[-limit:]
    assert plan.dropped == (len(missed) > limit)


@fuzzed(150)
@given(cases(), st.data())
def test_new_leader_at_most_once_runs_what_is_not_too_late(case, data):
    last = data.draw(st.none() | st.integers(0, len(case.due) - 1)) if case.due else None
    grace_s = data.draw(st.none() | st.sampled_from([1, 60, 7200, 100_000]))
    coalesce = data.draw(st.booleans())
    plan = case.plan(last, repeats=False, misfire_grace_time=grace_s, coalesce=coalesce)
    missed = case.due[0 if last is None else last + 1 :]
    if grace_s is not None:
        missed = [due for due in missed if due > case.now - grace_s * SECOND]
    assert utc(plan.dues) == (missed[-1:] if coalesce else missed)
    assert plan.next_run is case.following or plan.next_run.astimezone(UTC) == case.following


@fuzzed(150)
@given(cases(), st.integers(0, 1000))
def test_due_times_follow_from_any_moment_and_advance(case, part):
    """Whatever zone the moment is told in."""
    assume(case.due)
    moment = case.due[0] + (case.now - case.due[0]) * part / 1000
    if isinstance(case.trigger.trigger, CronTrigger):  # whose answers in an hour after a change depend on the last run
        moment = max(due for due in case.due if due <= moment)
    expected = next((due for due in case.due if due > moment), case.following)
    for told in (moment, moment.astimezone(case.zone)):
        found = due_times.after(case.trigger, told)
        assert found is expected or found.astimezone(UTC) == expected


class Collector:
    """An executor that notes what it is told to run."""

    def __init__(self):
        self.made = []

    def submit_job(self, _job, run_times):
        self.made += run_times


@pytest.mark.parametrize("repeats", [True, False], ids=["at-least-once", "at-most-once"])
@fuzzed(150)
@given(case=cases())
def test_leader_goes_on_through_a_change_of_the_clocks(repeats, case):
    """Each due time that APScheduler finds is run, in the hour that is repeated, too."""
    local = [due.astimezone(case.zone) for due in case.due]
    workshop = ClaimingExecutor("scheduler", MANY, print, repeats=repeats)
    workshop.open(SimpleNamespace(), {})
    executor = Collector()
    for due in local:
        workshop.submit(executor, job(case.trigger), [due])
    assert utc(executor.made) == case.due
    for due in local:  # a job store that was set back brings none of them back
        workshop.submit(executor, job(case.trigger), [due])
    assert utc(executor.made) == case.due
