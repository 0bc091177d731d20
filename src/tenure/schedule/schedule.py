"""Schedule: a list of jobs that runs on the leader."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from tenure.errors import ConfigError
from tenure.schedule import due_times
from tenure.schedule.due_times import DueTimes, zone_of
from tenure.schedule.durations import Duration
from tenure.schedule.jobs import Delivery, Job, Missed, OnHandover, Overlap, make_job

if TYPE_CHECKING:
    from tenure.aio.term import AsyncTerm
    from tenure.schedule.run import Run

log = logging.getLogger("tenure.schedule")

F = TypeVar("F", bound="Callable[[Run], object]")

MOST_WORKERS = 1000
LONGEST_DRAIN_S = 86400.0
"""How long a hand-over waits for a run that may finish and has no timeout."""


class Schedule:
    """Jobs that run once at each due time, on the node that leads.

    Fill it with jobs, and give it to a node::

        schedule = tenure.Schedule(zone="Europe/Paris")


        @schedule.cron("30 2 * * *")
        def invoices(run):
            with run.transaction() as transaction:
                transaction.execute("insert into invoices (day) values (%s)", [run.due])


        node.leader_only("scheduler", schedule)

    A job takes the :class:`Run`. A plain function runs in a thread, a coroutine function on the event loop. Every node
    must have the same jobs; the list of the node that leads counts.
    """

    _leader_only = True
    """Tells a node that this service needs a leader with tokens and tables."""

    def __init__(self, zone: str = "UTC", *, workers: int = 8) -> None:
        """Begin with no jobs.

        Args:
            zone: the time zone of cron expressions, such as ``Europe/Paris``.
            workers: how many plain functions may run at the same time.
        """
        self._zone = zone_of(zone)
        if workers not in range(1, MOST_WORKERS + 1):
            raise ConfigError(f"workers={workers!r} must be a whole number from 1 to {MOST_WORKERS}")
        self._workers = workers
        self._jobs: dict[str, Job] = {}
        self._started = False

    def __repr__(self) -> str:
        """Show the names of the jobs."""
        return f"<Schedule of {', '.join(self._jobs) or 'no jobs'}>"

    @property
    def jobs(self) -> tuple[str, ...]:
        """The names of the jobs, in the order in which they were added."""
        return tuple(self._jobs)

    @property
    def _drain_within(self) -> float:
        """The seconds that a hand-over may have to wait for runs that finish first."""
        return max(
            (job.timeout or LONGEST_DRAIN_S for job in self._jobs.values() if job.on_handover == "finish"), default=0.0
        )

    def cron(
        self,
        expression: str,
        *,
        name: str | None = None,
        zone: str | None = None,
        missed: Missed = "once",
        within: Duration | None = None,
        overlap: Overlap = "skip",
        delivery: Delivery = "at-most-once",
        attempts: int = 1,
        timeout: Duration | None = None,
        jitter: Duration = 0,
        on_handover: OnHandover = "interrupt",
    ) -> Callable[[F], F]:
        """Add a job that is due when a cron expression matches. Use it as a decorator.

        Where clocks change, a job at a fixed time runs once a day: after the gap if its time is skipped, and at the
        first of two equal times. Durations are texts such as ``"5 min"`` (units s, min, h, d), numbers of seconds, or
        timedeltas.

        Args:
            expression: minute, hour, day of the month, month, day of the week; or ``@daily`` and the like.
            name: the name of the job, the same on every node; by default, that of the function.
            zone: the time zone, if it is not that of the schedule.
            missed: what to do about due times that passed while no node led: ``once`` makes one run for the latest of
                them, ``each`` makes a run for each, ``skip`` makes a run only if the latest is at most 30 s ago.
            within: how late a run may begin. Older due times are skipped. ``each`` needs it.
            overlap: what to do about due times that pass while a run is under way: ``skip`` them, or let them ``wait``
                until the run has ended, and then do as ``missed`` says.
            delivery: ``at-most-once``: a run that did not end is lost. ``at-least-once``: the next leader makes it
                again.
            attempts: how many times a run is attempted if the function raises.
            timeout: how long an attempt may take. A coroutine is cancelled then; a plain function must look at
                ``run.stopping``.
            jitter: how long to delay runs at most, by an amount that depends on the job and the due time only.
            on_handover: when the node hands over, ``interrupt`` the run, or let it ``finish`` first. Other jobs of the
                role wait meanwhile.

        Raises:
            ConfigError: for an expression that is wrong or never due, an unknown zone, two jobs of one name, and
                options that cannot work.
        """
        _refuse_bare(expression, '@schedule.cron("30 2 * * *")')
        where = self._zone if zone is None else zone_of(zone)
        options = {"missed": missed, "within": within, "overlap": overlap, "delivery": delivery, "attempts": attempts}
        options |= {"timeout": timeout, "jitter": jitter, "on_handover": on_handover}
        return self._adding(due_times.cron(expression, where), where, name, options)

    def every(
        self,
        interval: Duration,
        *,
        name: str | None = None,
        missed: Missed = "once",
        within: Duration | None = None,
        overlap: Overlap = "skip",
        delivery: Delivery = "at-most-once",
        attempts: int = 1,
        timeout: Duration | None = None,
        jitter: Duration = 0,
        on_handover: OnHandover = "interrupt",
    ) -> Callable[[F], F]:
        """Add a job that is due at regular intervals of at least a second. Use it as a decorator.

        Intervals are counted from 1970 in UTC, so that every node computes the same due times: ``"5 min"`` is due at
        10:00, 10:05 and so on. The options are those of :meth:`cron`.
        """
        _refuse_bare(interval, '@schedule.every("5 min")')
        options = {"missed": missed, "within": within, "overlap": overlap, "delivery": delivery, "attempts": attempts}
        options |= {"timeout": timeout, "jitter": jitter, "on_handover": on_handover}
        return self._adding(due_times.interval(interval), self._zone, name, options)

    def _adding(self, when: DueTimes, zone: Any, name: str | None, options: dict[str, Any]) -> Callable[[F], F]:
        def add(function: F) -> F:
            if self._started:
                raise ConfigError("this schedule has already been started: add all jobs before the node is started")
            job = make_job(function, when, zone, name=name, **options)
            if job.name in self._jobs:
                raise ConfigError(f"job {job.name!r} already exists: give this one another name (name=…)")
            self._jobs[job.name] = job
            return function

        return add

    async def __call__(self, term: AsyncTerm) -> None:
        """Make the runs that are due, as a service of the leader, until the node stops it."""
        from tenure.schedule.scheduler import Scheduler  # noqa: PLC0415 - loads an event loop

        self._started = True
        if not self._jobs:
            log.warning("role %r: the schedule has no jobs: add them with @schedule.every or @schedule.cron", term.role)
        await Scheduler(tuple(self._jobs.values()), self._workers, term).run()


def _refuse_bare(given: object, remedy: str) -> None:
    """Refuse a function in the place of the due times: the decorator was used without a call."""
    if callable(given):
        raise ConfigError(f"job {getattr(given, '__name__', given)!r} has no due times: write {remedy} above it")


def jobs_of(schedule: Schedule) -> dict[str, Job]:
    """Return the jobs of a schedule by name, for Tenure's own packages."""
    return schedule._jobs  # noqa: SLF001 - of this module
