"""A service: something that runs for as long as it should, on the leader or everywhere.

    coroutine function   runs on the event loop; it is cancelled to stop it
    plain function       runs in a thread; takes the term, and returns when it is over; if it runs everywhere, it takes
                         an event ``stop`` instead, and returns when that is set
    object               ``start()`` and ``stop()``, each a coroutine function or a plain one (called in a thread);
                         ``warm()`` is called on standbys, so that a start takes milliseconds; ``alive()`` is called
                         every second, and False means that the service has died

A function that returns has failed, like one that raises, because a node must not lead with nothing running. With
``on_return="done"`` it has finished, for this term.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

from tenure.aio.call import is_async
from tenure.base.words import Word
from tenure.errors import ConfigError
from tenure.services.kinds import OnFailure, OnReturn, OnStuck
from tenure.settings import check_choice, check_name, check_seconds


class ServiceState(Word):
    """What a service does at this moment. Each state is a public string."""

    STANDBY = "standby"
    """It is not wanted here now."""
    WARMING = "warming"
    STARTING = "starting"
    RUNNING = "running"
    FAILED = "failed"
    """It is started again soon."""
    DONE = "done"
    """It has finished for this term."""
    STOPPING = "stopping"
    STUCK = "stuck"
    """It did not stop in time."""


@dataclass(frozen=True)
class ServiceInfo:
    """A service of this node, as it is at this moment.

    ``state`` is ``standby`` (not wanted here now), ``warming``, ``starting``, ``running``, ``failed`` (it is started
    again soon), ``done`` (it has finished for this term), ``stopping`` or ``stuck`` (it did not stop in time). ``role``
    is None for a service that runs everywhere. ``failures`` counts from the start of the node; ``error`` describes the
    last failure.
    """

    name: str
    role: str | None
    state: str
    failures: int
    error: str | None


@dataclass(frozen=True)
class Service:
    """What to run, and what to do when it fails or does not stop. Times are in seconds."""

    target: Any
    name: str
    leader_only: bool
    start_within: float
    drain_within: float
    stop_within: float | None = None
    on_failure: OnFailure = "restart"
    on_return: OnReturn | None = None
    """What to do when a function returns; None if that is a failure like any other."""
    on_stuck: OnStuck = "log"

    def __post_init__(self) -> None:
        """Raise ConfigError for a target that cannot be started, or cannot be asked to stop."""
        check_choice("on_failure", self.on_failure, get_args(OnFailure))
        check_choice("on_return", self.on_return, (None, *get_args(OnReturn)))
        check_choice("on_stuck", self.on_stuck, get_args(OnStuck))
        check_seconds("start_within", self.start_within)
        check_seconds("drain_within", self.drain_within)
        if not self.leader_only and getattr(self.target, "_leader_only", False):
            raise ConfigError(f"service {self.name!r} is a schedule, which runs on the leader: use leader_only()")
        if self.is_object:
            if inspect.isclass(self.target):
                raise ConfigError(f"service {self.name!r} is a class: give an instance, {self.name}()")
            if self.on_return is not None:
                raise ConfigError(
                    f"service {self.name!r} is an object with start() and stop(), which does not return: leave "
                    f"on_return={self.on_return!r} out, or give a function"
                )
        elif not callable(self.target):
            raise ConfigError(f"service {self.target!r} must be a function, or an object with start() and stop()")
        elif inspect.isgeneratorfunction(self.target) or inspect.isasyncgenfunction(self.target):
            raise ConfigError(f"service {self.name!r} is a generator, and Tenure does not iterate it: remove the yield")
        elif not is_async(self.target) and not takes_argument(self.target):
            gets = "term" if self.leader_only else "stop"
            until = "term.wait_lost(1)" if self.leader_only else "stop.wait(1)"
            raise ConfigError(
                f"service {self.name!r}: a plain function runs in a thread, which only the function itself can end: "
                f"let it take `{gets}` and return in time (`while not {until}: …`), or make it a coroutine function"
            )

    @property
    def jobs(self) -> frozenset[str]:
        """The names of its jobs, if it is a schedule."""
        return frozenset(self.target.jobs) if getattr(self.target, "_leader_only", False) else frozenset()

    @property
    def longest_drain(self) -> float:
        """Seconds for stopping on a hand-over. A schedule needs more if it lets runs finish."""
        needed: float = getattr(self.target, "_drain_within", 0.0)
        return max(self.drain_within, needed)

    @property
    def is_object(self) -> bool:
        """Whether the target is an object to start and stop, rather than a function that runs."""
        return all(callable(getattr(self.target, verb, None)) for verb in ("start", "stop"))


def service(target: Any, name: str | None, settings: dict[str, Any]) -> Service:
    """Return a service, or raise ConfigError."""
    own_name = getattr(target, "__name__", type(target).__name__)
    return Service(target, check_name("name", own_name if name is None else name), **settings)


def takes_argument(function: Callable[..., object]) -> bool:
    """Whether the function takes the term: its first parameter has no default, or is called ``term``."""
    try:
        first = next(iter(inspect.signature(function).parameters.values()), None)
    except ValueError:
        # A builtin may have no signature.
        return True
    if first is None or first.kind not in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD):
        return False
    return first.default is first.empty or first.name == "term"


@dataclass(frozen=True)
class Arguments:
    """The arguments that services are started with: the term, or the event ``stop`` if they run everywhere."""

    for_coroutines: tuple[Any, ...]
    for_threads: tuple[Any, ...]

    def of(self, function: Callable[..., object]) -> tuple[Any, ...]:
        """Return the arguments for this function."""
        given = self.for_coroutines if is_async(function) else self.for_threads
        return given if takes_argument(function) else ()
