"""What the tests of schedules share: time that has passed, and the audit of every due time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tenure
from tenure.base.moments import microseconds
from tenure.schedule.due_times import from_text
from tests.support.store_by_hand import execute, table, until

HOUR_S = 3600


def let_pass(url: str, seconds: float, job: str) -> None:
    """Let a job's last mark be so long ago, as if no node had run since."""
    us = round(seconds * 1_000_000)
    marks = ", ".join(f"{name} = {name} - {us}" for name in ("since_us", "claimed_us", "done_us"))
    execute(
        url,
        f"update {table(url, 'jobs')} set {marks} where job = '{job}'",
        f"update {table(url, 'runs')} set due_us = due_us - {us}, first_us = first_us - {us} where job = '{job}'",
    )


@contextlib.contextmanager
def leading(url: str, schedule: tenure.Schedule, name: str = "a", **settings: Any) -> Iterator[tenure.Node]:
    """A node that leads, with a schedule that works."""
    options = {key: settings.pop(key) for key in ("drain_within",) if key in settings}
    node = tenure.Node(url, name=name, **({"ttl": 10.0} | settings))
    node.leader_only("r", schedule, name="schedule", **options)
    with node:
        until(lambda: node.election("r").is_leader, "elected")
        yield node


def rows(url: str, job: str, limit: int = 100) -> list[tenure.RunRecord]:
    """The record of a job's runs, oldest first."""
    with tenure.Registry(url) as registry:
        return registry.runs(job, limit)[::-1]


def outcomes(url: str, job: str) -> list[str]:
    """The outcomes of a job's runs, oldest first, with the reason and the number of due times of those skipped."""
    return [
        f"{run.outcome} {run.detail} {run.covers}" if run.outcome == "skipped" else run.outcome
        for run in rows(url, job)
    ]


def unaccounted(url: str, namespace: str = "default") -> list[str]:
    """Which due times of any job are in no row, or in more than one: the audit. It should find none."""
    with tenure.Registry(url, namespace=namespace) as registry:
        return [fault for job in registry.jobs() if job.spec is not None for fault in _faults(registry, job)]


def _faults(registry: tenure.Registry, job: tenure.JobRecord) -> Iterator[str]:
    due_times = from_text(job.spec or "")
    assert due_times is not None
    assert job.since is not None
    since, mark = microseconds(job.since), microseconds(job.claimed or job.since)
    runs = sorted(registry.runs(job.job, 1_000_000, role=job.role), key=lambda run: (run.due, run.attempt))
    counted = sum(run.covers for run in runs if microseconds(run.due) > since)
    expected = due_times.count(since, mark)
    if counted != expected:
        yield f"{job.job}: {expected} due times up to the mark, and {counted} in the record"
    at = since
    for run in runs:
        first, last = microseconds(run.first), microseconds(run.due)
        if last <= since or run.attempt == 0 or run.covers == 0:
            continue
        if first <= at:
            yield f"{job.job}: {run.first} is recorded twice"
        if (missing := due_times.count(at, first - 1)) > 0:
            yield f"{job.job}: {missing} due times before {run.first} are not recorded"
        if due_times.count(first - 1, last) != run.covers:
            yield f"{job.job}: the row of {run.due} covers {run.covers} due times"
        at = last
