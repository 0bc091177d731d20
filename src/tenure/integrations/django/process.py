"""The one node of this process, and the services that are registered with it.

It is made when somebody asks for it, and anew in a forked child: a server that loads the application first and forks
its workers then (gunicorn with ``preload_app``) gets a node for each. It stands only after :func:`start`, which only a
process that serves calls.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import logging
import os
import threading
from collections.abc import Callable
from typing import Any

from django.db import connections

from tenure.errors import ConfigError, NodeClosed
from tenure.integrations.django.conf import node_arguments
from tenure.node import Node

log = logging.getLogger("tenure.django")

_services: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
"""What was registered, for each node that is made here: the method of the node, and its arguments."""


class _Here:
    """What belongs to this process, and to no child of it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.node: Node | None = None
        self.starter: threading.Thread | None = None
        """Starts the node; None before :func:`start`."""


_here = _Here()


def _after_fork() -> None:
    global _here  # noqa: PLW0603
    _here = _Here()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def get_node() -> Node:
    """Return the node of this process, by the settings. It runs only after :func:`start`."""
    with _here.lock:
        if _here.node is None:
            node = Node(**{"start": "wait", **node_arguments()})
            for method, arguments, policy in _services:
                getattr(node, method)(*arguments, **policy)
            _here.node = node
        return _here.node


def start() -> Node:
    """Let the node of this process stand, and run its services; return it. May be called twice.

    For processes that serve: in wsgi.py or asgi.py, or in the ``post_worker_init`` of gunicorn. A database that is away
    is waited for in the background, unless ``TENURE["START"]`` is ``raise``. The node leaves when the process ends.

    Raises:
        ConfigError: for settings that cannot work, and in gunicorn's master, which serves nothing.
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
    """Refuse to stand in gunicorn's master, where ``preload_app`` has the application imported."""
    frame, callers = inspect.currentframe(), set()
    while frame is not None:
        callers.add(frame.f_globals.get("__name__"))
        frame = frame.f_back
    if "gunicorn.arbiter" in callers and "gunicorn.workers.base" not in callers:
        raise ConfigError(
            "start() was called in gunicorn's master, which serves nothing: with preload_app, call it in the "
            "post_worker_init of gunicorn.conf.py instead of in wsgi.py"
        )


def _start(node: Node) -> None:
    try:
        node.start()
    except NodeClosed:
        pass  # this process ends before the database has come
    except Exception:
        log.exception("node %s cannot start: this process does not stand for anything", node.name)


def stop() -> None:
    """Stop the services, hand over and leave, and forget the node. For tests; a process that ends does it by itself."""
    with _here.lock:
        node, starter = _here.node, _here.starter
        _here.node = _here.starter = None
    if node is not None and starter is not None:
        node.close()
        while starter.is_alive():  # it may not have begun yet
            node.close()
            starter.join(0.05)


def leader_only(role: str, *services: Any, **policy: Any) -> Any:
    """Register services that run only while this process leads ``role``, in processes that called :func:`start`.

    As :meth:`tenure.Node.leader_only`, which says what a service is and what policies there are; without services it
    is a decorator. Call it from an app's ``ready()``, or a module that it imports. A plain function runs in a thread,
    and Django's connections of that thread are closed when it has ended.
    """
    return _register("leader_only", (role,), services, policy)


def everywhere(*services: Any, **policy: Any) -> Any:
    """Register services that run in every process that called :func:`start`; else as :func:`leader_only`."""
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
    """Have a plain function close the connections of its thread: nobody else does, outside of a request."""
    if not inspect.isfunction(service) or inspect.iscoroutinefunction(service):
        return service
    function: Callable[..., object] = service

    @functools.wraps(function)
    def closing(*arguments: Any) -> object:
        try:
            return function(*arguments)
        finally:
            connections.close_all()

    return closing
