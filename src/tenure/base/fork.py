"""What Tenure does when its process forks. Modules register their hooks here, which run in a fixed order.

A forked child inherits the memory and the open files of its parent, but only the thread that forked. It must not lead,
must not write to an inherited connection, and must not keep a lock of its parent's. Each module registers what it has
to do for that. The order is that of :class:`Place`, whichever module was imported first.

A system without ``fork`` has no ``os.register_at_fork``. There is nothing to do there.
"""

from __future__ import annotations

import contextlib
import enum
import logging  # noqa: F401 - for its hook, see below
import os
from collections.abc import Callable


class Place(enum.IntEnum):
    """When a module's hooks run: after a fork in this order, and before a fork in the reverse order."""

    ENGINE = 1
    """First. A signal handler may run between two hooks, and it must not find a child that leads."""
    CONNECTIONS = 2
    """Before everything that may drop a connection: the driver of a connection that is dropped writes to its socket.

    Before a fork it comes last, and afterwards it comes first. Connections opened between the two are given up.
    """
    SQLITE = 3
    """Before a fork it waits for other threads, so it comes before CONNECTIONS there."""
    SQLITE_LOCKS = 4
    """After SQLITE, which frees the lock that this one takes while it closes descriptors."""
    DJANGO = 5
    """Last. It drops the parent's node, and no destructor that runs then may find an open socket of the parent."""


Hook = Callable[[], object]

_hooks: dict[str, dict[Place, Hook]] = {"before": {}, "in_parent": {}, "in_child": {}}


def register(place: Place, **hooks: Hook) -> None:
    """Register functions to be called ``before`` each fork, and after it ``in_parent`` and ``in_child``."""
    for moment, hook in hooks.items():
        _hooks[moment][place] = hook


def _run(moment: str) -> None:
    # A hook that raises must not keep the others from running. An exit stack ensures that. It calls the last one first.
    with contextlib.ExitStack() as stack:
        for _, hook in sorted(_hooks[moment].items(), reverse=moment != "before"):
            stack.callback(hook)


# Before a fork the interpreter calls those hooks first that were registered last. The hook of `logging` takes a lock.
# It is registered when `logging` is imported, which is why that happens above: it must take its lock after Tenure's
# hooks have waited for other threads, because those threads may want to log.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=lambda: _run("before"),
        after_in_parent=lambda: _run("in_parent"),
        after_in_child=lambda: _run("in_child"),
    )
