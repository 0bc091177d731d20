"""One service of one node, from its start to its end."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from tenure.aio.bridge import wait_for_future
from tenure.aio.call import Call
from tenure.base.clock import now
from tenure.core.backoff import Backoff
from tenure.core.timing import NEVER
from tenure.services.kinds import OnReturn
from tenure.services.service import Arguments, Service, ServiceState

ALIVE_EVERY_S = 1.0
ALIVE_WITHIN_S = 10.0
RETURNED = "returned"
LOOK_EVERY_S = 0.1
"""Seconds between two checks while a service is stopping: the time left for it may shrink."""


class Died(Exception):
    """A service has ended by itself; the message says how."""


class ServiceRunner:
    """One service of one node, running or not. It belongs to one event loop; any thread may read its state."""

    def __init__(
        self, service: Service, wake: Callable[[], object], log: Callable[[int, str, ServiceRunner], object]
    ) -> None:
        """Begin on standby. ``wake`` is called when the group should check this runner."""
        self.service = service
        self.state = ServiceState.STANDBY
        self.failures = 0
        self.error: str | None = None
        self.remedy: OnReturn = service.on_failure
        """What to do about its last end."""
        self.cause: BaseException | None = None
        """What the service raised when it last failed."""
        self.due = 0.0
        """When to start the service (again)."""
        self.run: Call | None = None
        """The call that covers the service from its start to its end, or its warm-up."""
        self._wake = wake
        self._log = log
        self._restart = Backoff()
        self._started_at = 0.0
        self._call: Call | None = None
        """The part of the service that is running now: the function, or the object's start or stop."""
        self._to_stop: Future[None] = Future()
        """Completed when the service is to stop."""

    @property
    def idle(self) -> bool:
        """Whether no part of the service is running, so that it may be started."""
        return self.run is None or self.run.over

    # What the group does with it

    def warm(self) -> None:
        """Begin to warm up, if the service can. A failure is logged and ignored: it only makes the start slower."""
        if self.idle and self.service.is_object and hasattr(self.service.target, "warm"):
            self._begin(ServiceState.WARMING, self._warm)

    def start(self, arguments: Arguments) -> None:
        """Start the service, without waiting for it; ``check()`` reports a failure."""
        self._started_at = now()
        self._to_stop = Future()
        if self.service.is_object:
            self._begin(ServiceState.STARTING, self._run_object, arguments)
        else:
            self._begin(ServiceState.RUNNING, self._run_function, arguments)

    def mark_wanted(self) -> None:
        """Count a warm-up that is under way as a part of the start, from now on."""
        self._started_at = now()

    def reap(self) -> bool:
        """Return whether no part of it is running any more; if so, a stuck service goes back to standby."""
        if self.state is ServiceState.STUCK and self.idle:
            self.state = ServiceState.STANDBY
        return self.idle

    def check(self) -> str | None:
        """Return how the service ended, if it has failed or returned since the last check."""
        if self.state in (ServiceState.STARTING, ServiceState.RUNNING) and self.run is not None and self.run.over:
            error = self.run.error
            return self._returned() if error is None else self.fail(str(error), error.__cause__)
        if self._is_beginning and now() >= self.look_at:
            return self.fail(f"did not start within {self.service.start_within:g} s")
        return None

    @property
    def _is_beginning(self) -> bool:
        return self.state in (ServiceState.WARMING, ServiceState.STARTING)

    @property
    def look_at(self) -> float:
        """When to check the service even if nothing wakes the group."""
        if self._is_beginning:
            return self._started_at + self.service.start_within
        return self.due if self.state is ServiceState.FAILED else NEVER

    async def stop(self, patience: Callable[[], float]) -> None:
        """Stop the service. It is stuck if a part of it still runs when ``patience()``, the seconds left, is 0."""
        self.state = ServiceState.STOPPING
        self._ask_to_stop()
        ask_again_at = patience() / 2
        while (run := self.run) is not None and not run.over and patience() > 0:
            await run.wait(min(patience(), LOOK_EVERY_S))
            if patience() < ask_again_at:
                ask_again_at = 0.0
                self._ask_to_stop()
        self.state = ServiceState.STANDBY if self.idle else ServiceState.STUCK

    def fail(self, reason: str, cause: BaseException | None = None) -> str:
        """Record that the service failed, and when to start it again."""
        self.remedy = self.service.on_failure
        self.cause = cause
        self.due = self._restart.ended(self._started_at, now())
        self.failures += 1
        self.error = reason
        self.state = ServiceState.FAILED
        # A start that hangs may still end; then stop() must follow.
        if not self._to_stop.done():
            self._to_stop.set_result(None)
        return reason

    def _returned(self) -> str:
        if self.service.on_return == "done":
            self.cause = None
            self.remedy = "done"
            self.state = ServiceState.DONE
            return RETURNED
        reason = self.fail(RETURNED)
        self.remedy = self.service.on_return or self.service.on_failure
        return reason

    # What runs

    async def _warm(self) -> None:
        error = await self._do(self.service.target.warm)
        if error is not None:
            self._log(logging.WARNING, f"service {self.service.name}: warm() failed: {error!r}", self)
        if self.state is ServiceState.WARMING:
            self.state = ServiceState.STANDBY

    async def _run_function(self, arguments: Arguments) -> None:
        error = await self._do(self.service.target, *arguments.of(self.service.target))
        if error is not None:
            raise Died(f"failed: {error!r}") from error

    async def _run_object(self, arguments: Arguments) -> None:
        target = self.service.target
        error = await self._do(target.start, *arguments.of(target.start))
        if error is not None and not self._to_stop.done():
            raise Died(f"start() failed: {error!r}") from error
        if self.state is ServiceState.STARTING:
            self.state = ServiceState.RUNNING
            self._wake()
        died = await self._watch()
        error = await self._do(target.stop)
        if error is not None:
            self._log(logging.ERROR, f"service {self.service.name}: stop() failed: {error!r}", self)
        if died:
            raise Died(died)

    async def _watch(self) -> str | None:
        """Wait until the object is to be stopped; if it dies first, return why."""
        alive: Any = getattr(self.service.target, "alive", None)
        while not await wait_for_future(self._to_stop, None if alive is None else ALIVE_EVERY_S):
            question = Call(alive)
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
        """Call the function and wait for its end, however long that takes; return what it raised."""
        self._call = Call(function, *arguments)
        await self._call.wait()
        return self._call.error or _unfinished(self._call.answer.result())

    def _begin(self, state: ServiceState, function: Callable[..., Any], *arguments: Any) -> None:
        self.state = state
        self.run = Call(function, *arguments)
        self.run.answer.add_done_callback(lambda _: self._wake())

    def _ask_to_stop(self) -> None:
        """Cancel the running call, unless it is an object's stop(), which may take its time."""
        first = not self._to_stop.done()
        if first:
            self._to_stop.set_result(None)
        if self._call is not None and (first or not self.service.is_object):
            self._call.cancel()


def _unfinished(result: object) -> BaseException | None:
    """Return an error if the result is a coroutine or a generator, which would have to be run."""
    if not (inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result)):
        return None
    if inspect.iscoroutine(result):
        result.close()
    return TypeError(
        f"the function returned a {type(result).__name__}, which Tenure does not run: define it by `async def`"
    )
