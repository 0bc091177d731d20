"""The one node of this process, and the services that are registered with it.

The first call of :func:`get_node` creates the node, anew in a forked child. So a server that loads the application and
then forks its workers (gunicorn with ``preload_app``) gets a node in each of them. The node is a candidate only after
:func:`start`, which only a process that serves should call.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, overload

from django.db import connections

from tenure import ConfigError, Node, NodeClosed
from tenure.base import fork
from tenure.integrations.django.conf import node_arguments

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from tenure.services.kinds import (
        EverywherePolicy,
        EverywhereService,
        EverywhereServiceT,
        LeaderPolicy,
        LeaderService,
        LeaderServiceT,
    )

log = logging.getLogger("tenure.django")

_services: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
"""The services that were registered: the method of the node that takes them, and its arguments."""


class _Here:
    """The state of this process, which a forked child does not share."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.node: Node | None = None
        self.starter: threading.Thread | None = None
        """The thread that starts the node; None before :func:`start`."""


_here = _Here()


def _after_fork() -> None:
    global _here  # noqa: PLW0603
    _here = _Here()


fork.register(fork.Place.DJANGO, in_child=_after_fork)


def get_node() -> Node:
    """Return the node of this process, created from the settings. It runs only after :func:`start`."""
    with _here.lock:
        if _here.node is None:
            node = Node(**{"start": "wait", **node_arguments()})
            for method, arguments, policy in _services:
                getattr(node, method)(*arguments, **policy)
            _here.node = node
        return _here.node


def start() -> Node:
    """Start the node of this process, and return it. May be called twice.

    For processes that serve: in wsgi.py or asgi.py, or in the ``post_worker_init`` of gunicorn. If the database cannot
    be reached, the node waits for it in the background, unless ``TENURE["START"]`` is ``raise``. The node leaves when
    the process ends.

    Raises:
        ConfigError: for settings that cannot work, and in gunicorn's master, which handles no requests.
        StoreUnavailable: if ``START`` is ``raise``, and the database cannot be reached.
    """
    _refuse_in_master()
    with _here.lock:
        node = get_node()
        if _here.starter is None:
            _here.starter = threading.Thread(target=_start, args=(node,), name="tenure-start", daemon=True)
            atexit.unregister(stop)
            atexit.register(stop)
            if node.waits:
                _here.starter.start()
            else:
                try:
                    node.start()
                except BaseException:
                    _here.node = _here.starter = None
                    raise
        return node


def _refuse_in_master() -> None:
    """Refuse to start in gunicorn's master, which imports the application if ``preload_app`` is set."""
    frame, callers = inspect.currentframe(), set()
    while frame is not None:
        callers.add(frame.f_globals.get("__name__"))
        frame = frame.f_back
    if "gunicorn.arbiter" in callers and "gunicorn.workers.base" not in callers:
        raise ConfigError(
            "start() was called in gunicorn's master, which handles no requests: with preload_app, call it in the "
            "post_worker_init of gunicorn.conf.py instead of in wsgi.py"
        )


def _start(node: Node) -> None:
    try:
        node.start()
    except NodeClosed:
        # This process ends before the database can be reached.
        pass
    except Exception:
        log.exception("node %s cannot start, so this process never leads", node.name)


def stop() -> None:
    """Stop the services, hand over, leave, and drop the node. For tests: a process that ends does this itself."""
    with _here.lock:
        node, starter = _here.node, _here.starter
        _here.node = _here.starter = None
    if node is not None and starter is not None:
        node.close()
        # The starting thread may not have called start() when close() ran.
        while starter.is_alive():
            node.close()
            starter.join(0.05)


@overload
def leader_only(
    role: str, service: LeaderServiceT, /, *more: LeaderService, **policy: Unpack[LeaderPolicy]
) -> LeaderServiceT: ...


@overload
def leader_only(role: str, **policy: Unpack[LeaderPolicy]) -> Callable[[LeaderServiceT], LeaderServiceT]: ...


def leader_only(role: str, *services: Any, **policy: Any) -> Any:
    """Register services that run only while this process leads ``role``, in processes that called :func:`start`.

    See :meth:`tenure.Node.leader_only` for services and policies. Without services, this is a decorator. Call it in an
    app's ``ready()``, or in a module that this method imports. A plain function runs in a thread; Django's connections
    of that thread are closed when the function has ended.
    """
    return _register("leader_only", (role,), services, policy)


@overload
def everywhere(
    service: EverywhereServiceT, /, *more: EverywhereService, **policy: Unpack[EverywherePolicy]
) -> EverywhereServiceT: ...


@overload
def everywhere(**policy: Unpack[EverywherePolicy]) -> Callable[[EverywhereServiceT], EverywhereServiceT]: ...


def everywhere(*services: Any, **policy: Any) -> Any:
    """Register services that run in every process that called :func:`start`; otherwise like :func:`leader_only`."""
    return _register("everywhere", (), services, policy)


def _register(method: str, arguments: tuple[Any, ...], services: tuple[Any, ...], policy: dict[str, Any]) -> Any:
    if not services:
        return lambda service: _register(method, arguments, (service,), policy)
    registered = (method, (*arguments, *map(_closing, services)), policy)
    with _here.lock:
        if _here.node is not None:
            getattr(_here.node, method)(*registered[1], **policy)
        _services.append(registered)
    return services[0]


def _closing(service: Any) -> Any:
    """Wrap a plain function so that it closes its thread's connections: Django does that only after a request."""
    if not inspect.isfunction(service) or inspect.iscoroutinefunction(service):
        return service

    @functools.wraps(service)
    def closing(*arguments: Any) -> Any:
        try:
            return service(*arguments)
        finally:
            connections.close_all()

    return closing
