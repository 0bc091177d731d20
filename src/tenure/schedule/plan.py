"""What a schedule does next with a job: pure decisions.

The mark is the last due time that is accounted for. What follows depends on the mark, the present moment and the job's
options only, so the next leader continues where the last one stopped.
"""

from __future__ import annotations

from dataclasses import dataclass

from tenure.schedule.jobs import Job

MISSED = "missed"
"""The due times passed while no node led, or no node was there to claim them in time."""
OVERLAP = "overlap"
"""The due times passed while an earlier run of the job was under way."""
LATE = "late"
"""The runs could not begin within the time that the job allows."""
PAUSED = "paused"


@dataclass(frozen=True)
class Stretch:
    """Due times that are not run, and why."""

    first: int
    last: int
    number: int
    reason: str


@dataclass(frozen=True)
class Wait:
    """There is nothing to run before ``until``; None if the job is never due again."""

    until: int | None


@dataclass(frozen=True)
class Make:
    """Make the run of ``due``; the due times before it are skipped."""

    due: int
    skipped: tuple[Stretch, ...] = ()

    @property
    def missed(self) -> int:
        """How many due times are skipped."""
        return sum(stretch.number for stretch in self.skipped)


@dataclass(frozen=True)
class Busy:
    """When runs of a job were under way, one after the other. Due times between the two moments overlapped."""

    since: int
    until: int

    def overlaps(self, due: int) -> bool:
        """Whether a due time passed meanwhile."""
        return self.since <= due <= self.until


def decide(job: Job, mark: int, now: int, busy: Busy | None = None) -> Wait | Make:
    """Return what to do with a job of which no run is under way. ``busy`` is about the last runs of this term."""
    due_times = job.due_times
    first = due_times.after(mark)
    if first is None or job.start_of(first) > now:
        return Wait(None if first is None else job.start_of(first))
    oldest = mark if job.within_us is None else max(mark, now - job.within_us - 1)
    due = due_times.after(oldest) if job.missed == "each" else due_times.latest(oldest, now)
    if due is not None and busy is not None and job.overlap == "skip" and busy.overlaps(due):
        due = due_times.after(busy.until)
    if due is None or due > now:
        due = due_times.after(now)
    if due is None or job.start_of(due) > now:
        # What is skipped is recorded together with the next claim.
        return Wait(None if due is None else job.start_of(due))
    return Make(due, _skipped(job, mark, due, now, busy))


def _skipped(job: Job, mark: int, due: int, now: int, busy: Busy | None) -> tuple[Stretch, ...]:
    """Return the due times between the mark and the run that is made, by the reasons why they are skipped."""
    late = mark if job.within_us is None or job.missed == "skip" else now - job.within_us - 1
    cuts = {late, due - 1} | ({busy.since - 1, busy.until} if busy is not None else set())
    found, since = [], mark
    for until in sorted(cut for cut in cuts if mark < cut < due):
        overlapped = busy is not None and busy.overlaps(until)
        reason = OVERLAP if overlapped else LATE if until <= late else MISSED
        if (stretch := stretch_of(job, since, until, reason)) is not None:
            found.append(stretch)
        since = until
    return tuple(found)


def stretch_of(job: Job, since: int, until: int, reason: str) -> Stretch | None:
    """Return the due times after ``since`` and up to ``until``; None if there are none."""
    first, last = job.due_times.after(since), job.due_times.latest(since, until)
    if first is None or last is None:
        return None
    return Stretch(first, last, job.due_times.count(since, until), reason)
