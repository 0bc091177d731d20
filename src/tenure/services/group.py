"""Services that are started and stopped together, and by when they must have stopped."""

from __future__ import annotations

import abc
import logging
import threading
from collections.abc import Callable
from typing import Any

import anyio

from tenure.aio.bridge import Loop
from tenure.base.clock import now
from tenure.base.safe_log import SafeLog
from tenure.core.timing import NEVER
from tenure.engine.candidacy import Lease
from tenure.engine.engine import Engine
from tenure.services.runner import RETURNED, ServiceRunner
from tenure.services.service import Arguments, ServiceState

log = SafeLog("tenure.services")

STILL_RUNS = "could not be started again, because a part of it still runs"
GRACE_S = 0.2
"""The seconds that services get if their time was over before the node noticed, because the process was paused."""


class Deadline:
    """The deadline by which a group must have stopped. Its event loop and a watchdog thread read it."""

    def __init__(self, lease: Lease | None, lost_at: float | None, *, stop_within: float, drain_within: float) -> None:
        """Start the countdown. ``lost_at`` is None if the term was given up: the lease then still protects the role."""
        self._lease = lease
        self._stop_within = stop_within
        self._lapsed = lost_at is not None
        self._at = now() + drain_within if lost_at is None else max(lost_at + stop_within, now() + GRACE_S)

    def left(self) -> float:
        """Return the seconds that are left. They become fewer if trust runs out while the services drain."""
        if not self._lapsed and self._lease is not None and now() >= self._lease.deadline:
            self._lapsed = True
            self._at = min(self._at, now() + self._stop_within)
        return self._at - now()


class ServiceGroup(abc.ABC):
    """Services that are started in order, and stopped in reverse order."""

    role: str | None = None

    def __init__(self, engine: Engine) -> None:
        self.runners: list[ServiceRunner] = []
        self._engine = engine
        self._loop: Loop | None = None
        self._bell: anyio.Event | None = None
        self._closing = False

    @property
    def drain_within(self) -> float:
        """Seconds for stopping all services unless the role is lost: the largest ``drain_within`` of any of them."""
        return max(runner.service.longest_drain for runner in self.runners)

    @property
    def names(self) -> str:
        """The names of its services, for log messages."""
        return ", ".join(runner.service.name for runner in self.runners)

    @abc.abstractmethod
    async def run(self) -> None:
        """Run the services whenever they should run, until the group is closed."""

    def close(self) -> None:
        """Make ``run()`` stop everything and end. May be called from any thread."""
        self._closing = True
        self.wake()

    def wake(self) -> None:
        """Make ``run()`` check the services. May be called from any thread."""
        if self._loop is not None:
            self._loop.call(self._ring)

    def log(self, level: int, text: str, runner: ServiceRunner | None = None, **fields: Any) -> None:
        """Log something about the group, or about one of its services."""
        extra = {
            "tenure_node": self._engine.settings.name,
            "tenure_namespace": self._engine.settings.namespace,
            "tenure_role": self.role,
            "tenure_service": runner.service.name if runner else None,
            "tenure_token": fields.get("token"),
            "tenure_reason": fields.get("reason"),
        }
        log.log(level, "%s: %s", self._engine.settings.name, text, extra=extra, exc_info=fields.get("exc_info"))

    def _ring(self) -> None:
        if self._bell is not None:
            self._bell.set()

    async def _rest(self, until: float = NEVER) -> None:
        """Wait for ``wake()``. No wake-up is missed: the task has checked the services since it last awaited."""
        self._bell = anyio.Event()
        with anyio.move_on_after(None if until == NEVER else max(0.0, until - now())):
            await self._bell.wait()

    async def _keep_running(self, arguments: Arguments, over: Callable[[], bool]) -> None:
        """Start each service when those before it are running, and restart those that fail, until ``over()``."""
        for runner in self.runners:
            runner.mark_wanted()
        while not over():
            for runner in self.runners:
                reason = runner.check()
                if reason is not None:
                    self._ended(runner, reason)
            held_up = False
            look_at = NEVER
            for runner in self.runners:
                if runner.state in (ServiceState.STANDBY, ServiceState.FAILED) and not held_up and now() >= runner.due:
                    if runner.idle:
                        runner.start(arguments)
                    else:
                        self._cannot_restart(runner)
                # A failed service that is held up is checked when the service before it is running.
                if runner.state is not ServiceState.FAILED or not held_up:
                    look_at = min(look_at, runner.look_at)
                held_up = held_up or runner.state not in (ServiceState.RUNNING, ServiceState.DONE)
            await self._rest(look_at)

    def _ended(self, runner: ServiceRunner, reason: str) -> None:
        """Log that a service failed or returned; it is started again when it is due."""
        self._log_end(runner, reason, f"starting it again in {max(0.0, runner.due - now()):.1f} s")

    def _log_end(self, runner: ServiceRunner, reason: str, remedy: str) -> None:
        """Log how a service ended and what is done about it, and which option says so if it returned."""
        text = f"service {runner.service.name} {reason}; {remedy}"
        if reason == RETURNED and runner.service.on_return is not None:
            text += f" (on_return={runner.service.on_return!r})"
        elif reason == RETURNED and self.role is not None:
            text += f" (on_failure={runner.service.on_failure!r}); if it has finished, set on_return='done'"
        level = logging.INFO if runner.remedy == "done" else logging.ERROR
        self.log(level, text, runner, reason=reason, exc_info=runner.cause)

    def _cannot_restart(self, runner: ServiceRunner) -> None:
        """Handle a service that is due to start again while a part of it still runs."""
        self._ended(runner, runner.fail(STILL_RUNS))

    async def _stop(self, deadline: Deadline) -> list[ServiceRunner]:
        """Stop all services, in reverse order, each with its share of the time; return those that are stuck."""
        for index, runner in reversed(list(enumerate(self.runners))):
            until = now() + deadline.left() / (index + 1)
            await runner.stop(lambda until=until: min(deadline.left(), until - now()))  # type: ignore[misc]
        for runner in self.runners:
            if not runner.idle:
                await runner.stop(deadline.left)
        stuck = [runner for runner in self.runners if not runner.idle]
        for runner in stuck:
            self.log(logging.ERROR, f"service {runner.service.name} did not stop in time and still runs", runner)
        return stuck


class EverywhereServices(ServiceGroup):
    """The services that run on every node, from its start to its end."""

    async def run(self) -> None:
        """Run the services until the group is closed."""
        self._loop = Loop()
        stop = threading.Event()
        await self._keep_running(Arguments((), (stop,)), lambda: self._closing)
        stop.set()
        await self._stop(Deadline(None, None, stop_within=0.0, drain_within=self.drain_within))
