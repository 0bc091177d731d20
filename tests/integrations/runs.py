"""What a table of runs proves: which due times ran twice, which not at all, and what ran under an old token."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone


@dataclass(frozen=True, slots=True)
class Run:
    """A row of the table, in the order in which they were inserted."""

    job: str
    due: datetime
    token: int | None
    replica: str
    pid: int
    at: datetime

    def __str__(self) -> str:
        return f"{self.replica} (pid {self.pid}, token {self.token}, at {clock(self.at)})"


@dataclass(frozen=True, slots=True)
class Fault:
    """What was done to whom, and when."""

    what: str
    at: datetime


class Runs:
    """What a table of runs proves: for each kind of fault a list of sentences, empty if there is none.

    A job is due every `every` seconds (a number for all, or one for each job); its first due time is the earliest one
    in the table. `jobs` are the names, `rows` all runs in the order of their insertion.
    """

    def __init__(
        self, rows: Sequence[Run], every: float | Mapping[str, float] = 1.0, faults: Sequence[Fault] = ()
    ) -> None:
        self.rows, self.faults = list(rows), list(faults)
        self.jobs = sorted({run.job for run in rows})
        self.every = every if isinstance(every, Mapping) else dict.fromkeys(self.jobs, every)

    def of(self, job: str) -> list[Run]:
        return [run for run in self.rows if run.job == job]

    @property
    def duplicates(self) -> list[str]:
        """Due times that ran more than once."""
        found = []
        for job in self.jobs:
            by_due: dict[datetime, list[Run]] = {}
            for run in self.of(job):
                by_due.setdefault(run.due, []).append(run)
            found += [
                f"job {job!r}, due {clock(due)}, ran {len(runs)} times: {'; '.join(map(str, runs))}"
                for due, runs in sorted(by_due.items())
                if len(runs) > 1
            ]
        return found

    @property
    def missing(self) -> list[str]:
        """Due times between the first and the last that did not run."""
        found = []
        for job in self.jobs:
            dues = [run.due for run in self.of(job)]
            first, every = min(dues), self.every[job]
            seen = {round((due - first).total_seconds() / every) for due in dues}
            found += [
                f"job {job!r}, due {clock(first + timedelta(seconds=step * every))}, did not run"
                for step in range(max(seen))
                if step not in seen
            ]
        return found

    @property
    def out_of_phase(self) -> list[str]:
        """Due times that are not a whole number of steps away from the first."""
        found = []
        for job in self.jobs:
            runs = self.of(job)
            first, every = min(run.due for run in runs), self.every[job]
            for run in runs:
                off = math.remainder((run.due - first).total_seconds(), every)
                if abs(off) > 0.001:
                    found.append(f"job {job!r}, due {clock(run.due)}, is {off:+.3f} s off: {run}")
        return found

    @property
    def stale(self) -> list[str]:
        """Runs that were inserted under a smaller token than one before them."""
        found = []
        for job in self.jobs:
            last: Run | None = None
            for run in self.of(job):
                if run.token is None:
                    continue
                if last is not None and run.token < (last.token or 0):
                    found.append(f"job {job!r}, due {clock(run.due)}, ran late: {run}, after {last}")
                else:
                    last = run
        return found

    @property
    def gaps(self) -> list[tuple[str, datetime, float]]:
        """Job, due time and seconds to the next due time that ran, wherever that is more than one step."""
        found = []
        for job in self.jobs:
            dues = sorted({run.due for run in self.of(job)})
            pairs = ((one, (other - one).total_seconds()) for one, other in itertools.pairwise(dues))
            found += [(job, due, length) for due, length in pairs if length > self.every[job] + 0.001]
        return found

    @property
    def largest_gap(self) -> float:
        """Seconds between two neighbouring due times of a job with some missing in between, at most; 0 if none is."""
        return max((length for _, _, length in self.gaps), default=0.0)

    @property
    def statement(self) -> str:
        """Everything in one line, for the report."""
        runs, missing, twice = len(self.rows), len(self.missing), len(self.duplicates)
        due = len({(run.job, run.due) for run in self.rows}) + missing
        tokens = [run.token for run in self.rows if run.token is not None]
        words = f"{runs} runs of {due} due times, {twice} more than once, {missing} missed"
        if self.gaps:
            each = ", ".join(f"{length:g} s {self._cause(since, length)}" for _, since, length in self.gaps)
            words += f" in {len(self.gaps)} gaps ({each})"
        return f"{words}; tokens {min(tokens)} to {max(tokens)}" if tokens else words

    def _cause(self, since: datetime, length: float) -> str:
        """The first fault inside the gap, or the last one before it."""
        before = [fault for fault in self.faults if fault.at < since + timedelta(seconds=length)]
        inside = [fault for fault in before if fault.at > since]
        return f"after {(inside or before[-1:])[0].what}" if before else "without a fault"


def clock(at: datetime) -> str:
    return f"{at.astimezone(timezone.utc):%H:%M:%S.%f}"[:-3]


def now() -> datetime:
    """The clock of the table: the server is on this machine."""
    return datetime.now(timezone.utc)
