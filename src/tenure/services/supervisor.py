"""All services of one node."""

from __future__ import annotations

import contextvars
import logging
from concurrent.futures import Future, wait

from tenure.aio.bridge import wait_for_future
from tenure.aio.call import Call
from tenure.engine.candidacy import Candidacy
from tenure.engine.engine import Engine
from tenure.errors import ConfigError, NodeClosed
from tenure.services.group import EverywhereServices, ServiceGroup
from tenure.services.leader import LeaderServices
from tenure.services.runner import ServiceRunner
from tenure.services.service import Service, ServiceInfo

INSIDE: contextvars.ContextVar[object] = contextvars.ContextVar("tenure_services", default=None)
"""The supervisor of the service that runs the current code; None outside services."""


class Supervisor:
    """Runs all services of one node."""

    def __init__(self, engine: Engine) -> None:
        self._everywhere = EverywhereServices(engine)
        self._roles: dict[str, LeaderServices] = {}
        self._to_close: Future[None] = Future()
        self._closed: Future[None] = Future()
        self._begun = False

    def add(self, service: Service, candidacy: Candidacy | None) -> None:
        """Add a service, to be started after those that were added before for the same role."""
        group: ServiceGroup = self._everywhere
        if candidacy is not None:
            group = self._roles.setdefault(candidacy.role, LeaderServices(candidacy))
        if any(runner.service.name == service.name for runner in group.runners):
            raise ConfigError(f"service {service.name!r} already exists: give this one another name (name=…)")
        for runner in group.runners:
            if twice := service.jobs & runner.service.jobs:
                raise ConfigError(
                    f"job {min(twice)!r} is in two schedules of one role, so it would run twice: give it two names, or "
                    "add the schedules to two roles"
                )
        group.runners.append(ServiceRunner(service, group.wake, group.log))

    @property
    def stop_within(self) -> float:
        """The seconds of trust that the node keeps back for stopping services."""
        return max((group.stop_within for group in self._roles.values()), default=0.0)

    def infos(self) -> list[ServiceInfo]:
        """Return every service as it is now, in the order in which they are started."""
        return [
            ServiceInfo(runner.service.name, group.role, runner.state, runner.failures, runner.error)
            for group in self._groups
            for runner in group.runners
        ]

    @property
    def _groups(self) -> list[ServiceGroup]:
        return [*([self._everywhere] if self._everywhere.runners else []), *self._roles.values()]

    def begin(self) -> None:
        """Make ``close()`` wait for ``run()``, which will be awaited soon."""
        self._begun = True

    async def run(self) -> None:
        """Run all groups until ``close()``. The group that runs everywhere starts first and stops last."""
        if not self._to_close.done():
            INSIDE.set(self)
            runs = [(group, Call(_run, group)) for group in self._groups]
            await wait_for_future(self._to_close)
            for services in self._roles.values():
                services.close()
            for group, run in reversed(runs):
                group.close()
                await run.wait()
        self._closed.set_result(None)

    def close(self) -> None:
        """Stop all services and wait for them. Must not be called on the event loop that runs them.

        Raises:
            ConfigError: if a service calls this, because it would wait for itself.
        """
        if not self._begun:
            return
        if INSIDE.get() is self:
            raise ConfigError(
                "a service cannot close the node that runs it: it would wait for itself. Return, or call term.resign()"
            )
        if not self._to_close.done():
            self._to_close.set_result(None)
        bound = sum(sorted((group.drain_within for group in self._groups), reverse=True)[:2]) + 1.0
        if not wait([self._closed], bound).done:
            self._everywhere.log(logging.ERROR, f"the services did not stop within {bound:g} s")


async def _run(group: ServiceGroup) -> None:
    try:
        await group.run()
    except NodeClosed:
        pass
    except Exception:  # noqa: BLE001 - it is logged
        group.log(logging.ERROR, f"services {group.names} stopped because of a bug in Tenure", exc_info=True)
