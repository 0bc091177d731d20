"""A service: something that runs for as long as it should, on the leader or everywhere.

    coroutine function   runs on the event loop; cancelled to stop it
    plain function       runs in a thread; takes the term (or, everywhere, an event ``stop``) and returns when that ends
    object               ``start()`` and ``stop()``, each a coroutine function or a plain one (called in a thread);
                         ``warm()`` is called on standbys, so that a start takes milliseconds; ``alive()`` is asked
                         every second, and False is a death

A function that returns has died, as one that raised: whoever leads must not do so with nothing running.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from tenure.candidacy import NEVER
from tenure.clock import now
from tenure.errors import ConfigError
from tenure.jobs import Job, is_async
from tenure.loops import done
from tenure.settings import check_name, check_seconds, one_of

ON_FAILURE = ("restart", "resign")
ON_STUCK = ("log", "exit")
RESTART_FIRST_S = 0.5
RESTART_LONGEST_S = 30.0
"""Pauses before a service that died is started again: twice as long each time, until it has run for the longest."""
ALIVE_EVERY_S = 1.0
ALIVE_WITHIN_S = 10.0
LOOK_EVERY_S = 0.1
"""How often whoever waits for a service to stop asks how much time is left: it may become less."""


@dataclass(frozen=True)
class ServiceInfo:
    """A service of this node, as it is at this moment.

    ``state`` is ``standby`` (not to run here now), ``warming``, ``starting``, ``running``, ``failed`` (it is started
    again soon), ``stopping`` or ``stuck`` (it did not stop in time). ``role`` is None for a service that runs
    everywhere. ``failures`` counts since the node was started; ``error`` is the last one.
    """

    name: str
    role: str | None
    state: str
    failures: int
    error: str | None


@dataclass(frozen=True)
class Service:
    """What to run, and what to do when it fails or will not stop. Times in seconds."""

    target: Any
    name: str
    leader_only: bool
    on_failure: str
    on_stuck: str
    start_within: float
    stop_within: float | None
    drain_within: float

    def __post_init__(self) -> None:
        """Refuse what could not be started, or not be told to stop."""
        one_of("on_failure", self.on_failure, ON_FAILURE)
        one_of("on_stuck", self.on_stuck, ON_STUCK)
        check_seconds("start_within", self.start_within)
        check_seconds("drain_within", self.drain_within)
        if self.is_object:
            if inspect.isclass(self.target):
                raise ConfigError(f"service {self.name!r}: give an object, not the class: {self.name}()")
        elif not callable(self.target):
            raise ConfigError(f"service {self.target!r} must be a function, or an object with start() and stop()")
        elif inspect.isgeneratorfunction(self.target) or inspect.isasyncgenfunction(self.target):
            raise ConfigError(f"service {self.name!r} is a generator, which nobody would iterate: do not yield in it")
        elif not is_async(self.target) and not takes_argument(self.target):
            gets = "term" if self.leader_only else "stop"
            until = "term.wait_lost(1)" if self.leader_only else "stop.wait(1)"
            raise ConfigError(
                f"service {self.name!r}: a plain function runs in a thread, which nobody can stop: let it take "
                f"`{gets}` and return when it ends (`while not {until}: …`), or make it a coroutine function"
            )

    @property
    def is_object(self) -> bool:
        """Whether it is an object to start and stop; else a function that runs."""
        return all(callable(getattr(self.target, verb, None)) for verb in ("start", "stop"))


def service(target: Any, name: str | None, settings: dict[str, Any]) -> Service:
    """Return a service, or say what is wrong with it."""
    own_name = getattr(target, "__name__", type(target).__name__)
    return Service(target, check_name("name", own_name if name is None else name), **settings)


def takes_argument(function: Callable[..., object]) -> bool:
    """Whether it wants the term: its first parameter is one that it cannot do without, or is called so."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # a builtin without a signature
        return True
    positional = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    return bool(positional) and (positional[0].default is inspect.Parameter.empty or positional[0].name == "term")


def _unfinished(result: object) -> BaseException | None:
    """Return what is wrong with a result that is work which nobody does."""
    if not (inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result)):
        return None
    if inspect.iscoroutine(result):
        result.close()
    return TypeError(f"it returned a {type(result).__name__}, which nobody runs: make it a coroutine function")


class Died(Exception):
    """A service has ended by itself; the text says how."""


@dataclass(frozen=True)
class Arguments:
    """What a service is started with: the term for one facade or the other; or the event, where there is no term."""

    for_coroutines: tuple[Any, ...]
    for_threads: tuple[Any, ...]

    def of(self, function: Callable[..., object]) -> tuple[Any, ...]:
        """Return what this function is called with."""
        given = self.for_coroutines if is_async(function) else self.for_threads
        return given if takes_argument(function) else ()


class Post:
    """One service of one node, at work or not. All of it happens on one event loop; anybody may read the state."""

    def __init__(self, service: Service, ring: Callable[[], object], say: Callable[[int, str, Post], object]) -> None:
        """Begin on standby; ``ring`` is called when something here may need attention, ``say`` logs."""
        self.service = service
        self.state = "standby"
        self.failures = 0
        self.error: str | None = None
        self.cause: BaseException | None = None
        """What it raised when it last failed."""
        self.due = 0.0
        """When to start it (again)."""
        self._ring = ring
        self._say = say
        self._pause_s = RESTART_FIRST_S
        self._started_at = 0.0
        self.run: Job | None = None
        """The service from its start to its end, or its warm-up."""
        self._call: Job | None = None
        """What of it is under way just now: the function, or the object's start or stop."""
        self._to_stop: Future[None] = Future()
        """Done when it is to stop."""

    @property
    def idle(self) -> bool:
        """Whether nothing of it runs: it may be started."""
        return self.run is None or self.run.over

    # What is done with it

    def warm(self) -> None:
        """Begin to get ready, where the service can. Having failed to only costs time, so it is said and forgotten."""
        if self.idle and self.service.is_object and hasattr(self.service.target, "warm"):
            self._begin("warming", self._warm)

    def start(self, arguments: Arguments) -> None:
        """Begin to run it; ``check()`` tells what comes of it."""
        self._started_at = now()
        self._to_stop = Future()
        if self.service.is_object:
            self._begin("starting", self._run_object, arguments)
        else:
            self._begin("running", self._run_function, arguments)

    def summon(self) -> None:
        """It is wanted from now on: a warm-up that is under way counts as a part of the start."""
        self._started_at = now()

    def let_go(self) -> bool:
        """Whether nothing of it runs any more; then it is on standby again, if it was stuck."""
        if self.state == "stuck" and self.idle:
            self.state = "standby"
        return self.idle

    def check(self) -> str | None:
        """Return why it failed, if it just has."""
        if self.state in ("starting", "running") and self.run is not None and self.run.over:
            error = self.run.error
            return self.fail("returned" if error is None else str(error), error.__cause__ if error else None)
        if self.state in ("warming", "starting") and now() >= self.look_at:
            return self.fail(f"did not start within {self.service.start_within:g} s")
        return None

    @property
    def look_at(self) -> float:
        """When to look after it even if nothing rings."""
        if self.state in ("warming", "starting"):
            return self._started_at + self.service.start_within
        return self.due if self.state == "failed" else NEVER

    async def stop(self, patience: Callable[[], float]) -> bool:
        """Stop it; False if something of it still runs when ``patience()``, the seconds left, has run out."""
        self.state = "stopping"
        self._ask_to_stop()
        ask_again_at = patience() / 2
        while not self.idle and patience() > 0:
            assert self.run is not None
            await self.run.wait(min(patience(), LOOK_EVERY_S))
            if patience() < ask_again_at:
                ask_again_at = 0.0
                self._ask_to_stop()
        self.state = "standby" if self.idle else "stuck"
        return self.idle

    # What runs

    async def _warm(self) -> None:
        error = await self._do(self.service.target.warm)
        if error is not None:
            self._say(logging.WARNING, f"service {self.service.name}: warm() failed: {error!r}", self)
        if self.state == "warming":
            self.state = "standby"

    async def _run_function(self, arguments: Arguments) -> None:
        error = await self._do(self.service.target, *arguments.of(self.service.target))
        if error is not None:
            raise Died(f"failed: {error!r}") from error

    async def _run_object(self, arguments: Arguments) -> None:
        target = self.service.target
        error = await self._do(target.start, *arguments.of(target.start))
        if error is not None and not self._to_stop.done():
            raise Died(f"start() failed: {error!r}") from error
        if self.state == "starting":
            self.state = "running"
            self._ring()
        died = await self._watch()
        error = await self._do(target.stop)
        if error is not None:
            self._say(logging.ERROR, f"service {self.service.name}: stop() failed: {error!r}", self)
        if died:
            raise Died(died)

    async def _watch(self) -> str | None:
        """Wait until the object is to be stopped; return why it died, if that comes first."""
        alive: Any = getattr(self.service.target, "alive", None)
        while not await done(self._to_stop, None if alive is None else ALIVE_EVERY_S):
            question = Job(alive)
            until = now() + ALIVE_WITHIN_S
            while not (question.over or self._to_stop.done()) and now() < until:
                await question.wait(LOOK_EVERY_S)
            if self._to_stop.done():
                break
            if not question.over:
                return f"alive() did not answer within {ALIVE_WITHIN_S:g} s"
            if question.error is not None:
                return f"alive() failed: {question.error!r}"
            if question.answer.result() is False:
                return "is not alive"
        return None

    async def _do(self, function: Callable[..., Any], *arguments: Any) -> BaseException | None:
        """Call it and wait for its end, however long that takes; return what it raised."""
        self._call = Job(function, *arguments)
        await self._call.wait()
        return self._call.error or _unfinished(self._call.answer.result())

    def _begin(self, state: str, function: Callable[..., Any], *arguments: Any) -> None:
        self.state = state
        self.run = Job(function, *arguments)
        self.run.answer.add_done_callback(lambda _: self._ring())

    def _ask_to_stop(self) -> None:
        """Cancel what is under way; but for the stop() of an object, which may take its time."""
        first = not self._to_stop.done()
        if first:
            self._to_stop.set_result(None)
        if self._call is not None and (first or not self.service.is_object):
            self._call.cancel()

    def fail(self, reason: str, cause: BaseException | None = None) -> str:
        """Take in that it failed, and when to start it again."""
        self.cause = cause
        if now() - self._started_at > RESTART_LONGEST_S:
            self._pause_s = RESTART_FIRST_S
        self.due = now() + self._pause_s
        self._pause_s = min(2 * self._pause_s, RESTART_LONGEST_S)
        self.failures += 1
        self.error = reason
        self.state = "failed"
        if not self._to_stop.done():
            self._to_stop.set_result(None)  # a start that ends after all is followed by its stop
        return reason
