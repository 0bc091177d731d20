"""The options of a job, and their checks."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, tzinfo
from typing import Any, Literal, get_args

from tenure.base.moments import moment
from tenure.errors import ConfigError
from tenure.schedule.due_times import SECOND_US, DueTimes
from tenure.schedule.durations import Duration, check_duration
from tenure.settings import check_choice, check_name

Missed = Literal["once", "each", "skip"]
Overlap = Literal["skip", "wait"]
Delivery = Literal["at-most-once", "at-least-once"]
OnHandover = Literal["interrupt", "finish"]

SKIP_WITHIN_S = 30.0
"""How late a run of a job with ``missed="skip"`` may begin: a change of the leader is shorter, and costs no run."""
MOST_ATTEMPTS = 100


@dataclass(frozen=True)
class Job:
    """A function and when to call it. Times are in seconds."""

    name: str
    function: Callable[..., Any]
    due_times: DueTimes
    zone: tzinfo
    missed: Missed = "once"
    within: float | None = None
    """How late a run may begin; None if there is no limit."""
    overlap: Overlap = "skip"
    delivery: Delivery = "at-most-once"
    attempts: int = 1
    timeout: float | None = None
    jitter: float = 0.0
    on_handover: OnHandover = "interrupt"

    @property
    def repeats(self) -> bool:
        """Whether a run that did not end is run again."""
        return self.delivery == "at-least-once"

    @property
    def within_us(self) -> int | None:
        """How long after its due time a run may begin, in microseconds. A delay by ``jitter`` does not make it late."""
        return None if self.within is None else round((self.within + self.jitter) * SECOND_US)

    def start_of(self, due: int) -> int:
        """Return when the run of a due time begins: up to ``jitter`` later, by the same amount on every node."""
        if not self.jitter:
            return due
        following = self.due_times.after(due)
        # Below the time until the next due time, so that runs stay in order.
        most = round(self.jitter * SECOND_US) if following is None else min(
            round(self.jitter * SECOND_US), following - due - 1
        )  # fmt: skip
        digest = hashlib.sha256(f"{self.name} {due}".encode()).digest()
        return due + most * int.from_bytes(digest[:4], "big") // 2**32

    def local(self, us: int) -> datetime:
        """Return a moment in the job's time zone."""
        return moment(us).astimezone(self.zone)


def make_job(
    function: Any,
    due_times: DueTimes,
    zone: tzinfo,
    *,
    name: str | None = None,
    missed: Missed = "once",
    within: Duration | None = None,
    overlap: Overlap = "skip",
    delivery: Delivery = "at-most-once",
    attempts: object = 1,
    timeout: Duration | None = None,
    jitter: Duration = 0,
    on_handover: OnHandover = "interrupt",
) -> Job:
    """Return a job, or raise ConfigError for options that cannot work."""
    check_choice("missed", missed, get_args(Missed))
    check_choice("overlap", overlap, get_args(Overlap))
    check_choice("delivery", delivery, get_args(Delivery))
    check_choice("on_handover", on_handover, get_args(OnHandover))
    job_name = _name(function, name)
    if missed == "each" and within is None:
        raise ConfigError(
            f"job {job_name!r}: missed='each' needs within=, or a long outage would be followed by any number of runs: "
            "say how late a run may begin, as in within='2 h'"
        )
    if not isinstance(attempts, int) or isinstance(attempts, bool) or not 1 <= attempts <= MOST_ATTEMPTS:
        raise ConfigError(f"job {job_name!r}: attempts={attempts!r} must be a whole number from 1 to {MOST_ATTEMPTS}")
    limit_s = None if within is None else check_duration("within", within, 1.0)
    return Job(
        name=job_name,
        function=function,
        due_times=due_times,
        zone=zone,
        missed=missed,
        within=SKIP_WITHIN_S if limit_s is None and missed == "skip" else limit_s,
        overlap=overlap,
        delivery=delivery,
        attempts=attempts,
        timeout=None if timeout is None else check_duration("timeout", timeout, 0.001),
        jitter=check_duration("jitter", jitter, 0.0),
        on_handover=on_handover,
    )


def _name(function: Any, name: str | None) -> str:
    if not callable(function) or inspect.isclass(function):
        raise ConfigError(f"job {function!r} must be a function that takes the run")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(f"job {function!r} is a generator, which a schedule does not iterate: remove the yield")
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        own = getattr(function, "__name__", repr(function))
        example = own if own.isidentifier() else "report"
        raise ConfigError(f"job {own!r} must take one argument, the run: def {example}(run)") from None
    except ValueError:
        # A builtin may have no signature.
        pass
    own = getattr(function, "__name__", "<lambda>")
    if name is None and own == "<lambda>":
        raise ConfigError(
            f"job {function!r} has no name of its own, so two nodes cannot know that it is the same job: give it one, "
            "as in name='invoices'"
        )
    return check_name("name", own if name is None else name)
