"""Nodes that lead at once, without a database, and do as a test tells them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tenure.aio.bridge import run_in_thread
from tenure.aio.node import AsyncNode
from tenure.base.clock import now
from tenure.engine.engine import Engine
from tenure.errors import ConfigError, WaitTimeout
from tenure.internals import engine_of
from tenure.node import BaseNode, Node
from tenure.testing.backend import MemoryBackend

WITHIN_S = 10.0
URL = "sqlite:///tenure.testing"
"""Never opened: a node checks that it has a URL."""


class _Told:
    """What a test tells a node of this module. Each call waits until the node has noticed."""

    def __init__(self, node: BaseNode[Any]) -> None:
        self._engine: Engine = engine_of(node)

    def lose(self, role: str) -> None:
        """Let another node take the role."""
        latest = self._engine.candidacy(role).latest
        if latest is None or latest.reason is not None:
            raise ConfigError(f"role {role!r}: this node does not lead it, so it cannot lose it")
        self._backend.taken.add(role)
        self._ask_again()
        self._wait(lambda: latest.reason is not None, f"lost role {role!r}")

    def win(self, role: str) -> None:
        """Let this node lead the role again that it has lost."""
        self._backend.taken.discard(role)
        self._ask_again()
        self._wait(lambda: self._engine.candidacy(role).holding is not None, f"won role {role!r}")

    def suspend(self) -> None:
        """Cut the node off from its database."""
        self._backend.reachable = False
        self._engine.control.wake()
        self._wait(lambda: now() >= self._engine.lease.deadline, "been suspended")

    def resume(self) -> None:
        """Let the node reach its database again."""
        self._backend.reachable = True
        self._engine.control.wake()
        self._wait(lambda: now() < self._engine.lease.deadline, "resumed")

    @property
    def _backend(self) -> MemoryBackend:
        self._engine.check_running()
        backend = self._engine.backend
        assert isinstance(backend, MemoryBackend)
        return backend

    def _ask_again(self) -> None:
        self._backend.news = True
        self._engine.control.wake()

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        if not self._engine.wait_for(condition, WITHIN_S):
            raise WaitTimeout(f"node {self._engine.settings.name!r} has not {what} within {WITHIN_S:g} s")


class LocalNode(Node):
    """A node for tests: it leads every role that it stands for, at once and without a database.

    It is a real :class:`tenure.Node`, with its threads, its terms, its events and its services. Only the database is
    made up, so whatever needs one raises ConfigError: fences, transactions, claims, records, and a running schedule.
    """

    _make_backend = MemoryBackend

    def __init__(self, *, name: str = "local", ttl: float = 10.0) -> None:
        """Prepare a node; start it as any other, with ``with`` or ``start()``."""
        super().__init__(URL, name=name, ttl=ttl, mode="hybrid")

    def lose(self, role: str) -> None:
        """Let another node take ``role``; return when the term is over. This node leads it again after :meth:`win`."""
        _Told(self).lose(role)

    def win(self, role: str) -> None:
        """Let this node lead ``role`` again, under a new token; return when it does."""
        _Told(self).win(role)

    def suspend(self) -> None:
        """Cut the node off from its database: no term is valid, and none is over yet. Return when that is so.

        Unless :meth:`resume` follows in time, the terms lapse, as they do in production.
        """
        _Told(self).suspend()

    def resume(self) -> None:
        """Let the node reach its database again, and go on under the same terms; return when it does."""
        _Told(self).resume()


class LocalAsyncNode(AsyncNode):
    """The same as :class:`LocalNode` for async code: a real :class:`tenure.AsyncNode` without a database."""

    _make_backend = MemoryBackend

    def __init__(self, *, name: str = "local", ttl: float = 10.0) -> None:
        """Prepare a node; start it as any other, with ``async with`` or ``await start()``."""
        super().__init__(URL, name=name, ttl=ttl, mode="hybrid")

    async def lose(self, role: str) -> None:
        """Let another node take ``role``; see :meth:`LocalNode.lose`."""
        await run_in_thread(lambda: _Told(self).lose(role))

    async def win(self, role: str) -> None:
        """Let this node lead ``role`` again; see :meth:`LocalNode.win`."""
        await run_in_thread(lambda: _Told(self).win(role))

    async def suspend(self) -> None:
        """Cut the node off from its database; see :meth:`LocalNode.suspend`."""
        await run_in_thread(_Told(self).suspend)

    async def resume(self) -> None:
        """Let the node reach its database again; see :meth:`LocalNode.resume`."""
        await run_in_thread(_Told(self).resume)
