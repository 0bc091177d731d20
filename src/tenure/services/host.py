"""The services of a node: how it is told of them, and how it shows them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, overload

from tenure.engine.engine import Engine
from tenure.errors import ConfigError
from tenure.settings import check_name, check_stop_within

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from tenure.services.kinds import (
        EverywherePolicy,
        EverywhereService,
        EverywhereServiceT,
        LeaderPolicy,
        LeaderService,
        LeaderServiceT,
        OnFailure,
        OnReturn,
        OnStuck,
    )
    from tenure.services.service import ServiceInfo
    from tenure.services.supervisor import Supervisor


class BaseServiceHost:
    """What a node does with services."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._supervisor: Supervisor | None = None
        self._campaigns: set[str] = set()
        """The roles that this node leads, or wants to lead, for one user: services, ``lead()`` or ``terms()``."""

    @overload
    def leader_only(
        self, role: str, service: LeaderServiceT, /, *more: LeaderService, **policy: Unpack[LeaderPolicy]
    ) -> LeaderServiceT: ...

    @overload
    def leader_only(self, role: str, **policy: Unpack[LeaderPolicy]) -> Callable[[LeaderServiceT], LeaderServiceT]: ...

    def leader_only(
        self,
        role: str,
        *services: Any,
        name: str | None = None,
        on_failure: OnFailure = "restart",
        on_return: OnReturn | None = None,
        on_stuck: OnStuck = "log",
        start_within: float = 30.0,
        stop_within: float | None = None,
        drain_within: float = 10.0,
        lock_id: int | str | None = None,
    ) -> Any:
        """Run services here while this node leads ``role``. Without services it is a decorator that adds one.

        A service is a coroutine function, which is cancelled to stop it; a plain function, which runs in a thread,
        takes the term and returns when ``term.wait_lost()`` is True; or an object with ``start()`` and ``stop()``.
        They are started in order when this node is elected, and stopped in reverse order when the term is over: on
        ``resign()`` and ``close()`` before the role is released. Call this before the node is started.

        Args:
            role: the role to lead.
            services: what to run.
            name: the name of the service in logs and metrics; by default, that of the function or class.
            on_failure: what to do when a service fails to start or raises: ``restart`` it, after a pause that grows,
                or ``resign``.
            on_return: what to do when a function returns before the term is over: ``restart`` it or ``resign``, as
                after a failure; or ``done``: it has finished, and is started again in the next term. By default, the
                node does what ``on_failure`` says.
            on_stuck: what to do when a service has not stopped in time: ``log`` it and go on, or ``exit``, which ends
                the process.
            start_within: seconds for a ``start()``.
            stop_within: seconds for all services of the role to stop when it is lost, a quarter of the TTL by
                default. The node stops trusting its lease that much earlier. The largest value of all services counts.
            drain_within: seconds for all of them to stop on ``resign()`` and ``close()``, before the role is released.
            lock_id: the number of an advisory lock that the node must hold to lead (PostgreSQL), as in ``election()``.

        Raises:
            ConfigError: for something that is not a service, and for times that leave too little of the TTL.
        """
        if callable(role):
            raise ConfigError('name the role that is to be led: @node.leader_only("scheduler")')
        role = check_name("role", role)
        if lock_id is not None:
            self._engine.assign_lock(role, lock_id)
        kept_back = check_stop_within(
            self._engine.settings.ttl / 4 if stop_within is None else stop_within, self._engine.settings
        )
        return self._add_services(
            *(services, role, name),
            on_failure=on_failure,
            on_return=on_return,
            on_stuck=on_stuck,
            start_within=start_within,
            stop_within=None if stop_within is None else kept_back,
            drain_within=drain_within,
        )

    @overload
    def everywhere(
        self, service: EverywhereServiceT, /, *more: EverywhereService, **policy: Unpack[EverywherePolicy]
    ) -> EverywhereServiceT: ...

    @overload
    def everywhere(self, **policy: Unpack[EverywherePolicy]) -> Callable[[EverywhereServiceT], EverywhereServiceT]: ...

    def everywhere(
        self, *services: Any, name: str | None = None, start_within: float = 30.0, drain_within: float = 10.0
    ) -> Any:
        """Run services while the node runs, leader or not. Without services it is a decorator that adds one.

        They are started before those of :meth:`leader_only` and stopped after them. A plain function takes an event
        ``stop`` and returns when it is set; one that fails or returns is started again, after a pause that grows.
        """
        return self._add_services(services, None, name, start_within=start_within, drain_within=drain_within)

    def services(self) -> list[ServiceInfo]:
        """Return the services of this node as they are now, in the order in which they are started."""
        return self._supervisor.infos() if self._supervisor is not None else []

    def _add_services(self, services: tuple[Any, ...], role: str | None, name: str | None, **settings: Any) -> Any:
        """Add services and return the first; without services, return a decorator that adds one."""
        from tenure.services.service import service  # noqa: PLC0415
        from tenure.services.supervisor import Supervisor  # noqa: PLC0415 - loads an event loop

        if name is not None and len(services) > 1:
            raise ConfigError(
                f"name={name!r} is for a single service, but {len(services)} were given: add them one by one"
            )

        def add(target: Any) -> Any:
            if self._engine.launched:
                raise ConfigError(
                    f"node {self._engine.settings.name!r} was already started: add services before start()"
                )
            if getattr(target, "_leader_only", False):
                if not self._engine.has_tokens:
                    raise ConfigError(
                        "mode='lock' keeps no record of runs, so a schedule cannot work: use mode='hybrid'"
                    )
                self._engine.backend.check_fence()
            if self._supervisor is None:
                self._supervisor = Supervisor(self._engine)
            candidacy = None if role is None else self._engine.candidacy(role)
            self._supervisor.add(service(target, name, {"leader_only": role is not None, **settings}), candidacy)
            self._engine.reserve_stop_time(self._supervisor.stop_within)
            if role is not None:
                self._campaigns.add(role)
                self._engine.assign_lock(role, None)
            return target

        for target in services:
            add(target)
        return services[0] if services else add
