"""Tenure with a record of what its threads do. Nothing of it is in Tenure: this module wraps what it wants to see."""

from __future__ import annotations

import contextlib
import functools
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.peers import tenure_node
from tenure.core.protocol import NodeProtocol
from tenure.databases.postgres.knock import Knock
from tenure.databases.postgres.pipeline import Pipeline
from tenure.engine.lane import Lane

NAME = "tenure, traced"
SERVER = tenure_node.SERVER
SURVIVES = tenure_node.SURVIVES
RECEIVED_AT = 128
"""Where TCP_INFO says how many bytes a connection has received."""

Span = tuple[int, int, str, str]
_spans: list[Span] = []
_open: dict[int, tuple[int, str, str]] = {}
"""The requests that are under way, by the identity of their thread."""
_lane = threading.local()


def now_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def lane() -> str:
    """Return which of the node's lanes this thread is, or else the thread's name."""
    return getattr(_lane, "name", None) or threading.current_thread().name.replace(" ", "-")


@contextlib.contextmanager
def recorded(what: str) -> Iterator[None]:
    began = now_ns()
    try:
        yield
    finally:
        _spans.append((began, now_ns(), lane(), what))


def received(connection: Any) -> int:
    """Return how many bytes have come in on a connection."""
    line = socket.socket(fileno=connection.fileno())
    try:
        information = line.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 200)
    finally:
        line.detach()
    return int(struct.unpack_from("=Q", information, RECEIVED_AT)[0])


def wrap(owner: type, name: str, around: Callable[..., Any]) -> None:
    """Put a function around a method; it gets the method as it was, and the method's arguments."""
    method = getattr(owner, name)
    setattr(owner, name, functools.wraps(method)(functools.partialmethod(around, method)))


def run(self: Lane, method: Callable[..., Any], request: Any) -> Any:
    _lane.name = self.name
    what = type(request).__name__
    _open[threading.get_ident()] = (now_ns(), self.name, what)
    try:
        with recorded(what):
            return method(self, request)
    finally:
        del _open[threading.get_ident()]


def next_result(self: Any, method: Callable[..., Any]) -> Any:
    """Record a call that waited for something from the server. The others take what is there."""
    connection = self._connection
    before, began = received(connection), now_ns()
    try:
        return method(self)
    finally:
        if not connection.closed and received(connection) != before:
            _spans.append((began, now_ns(), lane(), "round-trip"))


def notified(self: NodeProtocol, method: Callable[..., Any], note: str, *arguments: Any) -> Any:
    with recorded(f"notified:{note.split(maxsplit=1)[0]}"):
        return method(self, note, *arguments)


def connect(self: Knock, method: Callable[..., Any], *arguments: Any) -> Any:
    with recorded("connect"):
        return method(self, *arguments)


def wrap_everything() -> None:
    wrap(Lane, "run", run)
    wrap(NodeProtocol, "notified", notified)
    wrap(Pipeline, "_next", next_result)
    wrap(Knock, "begin", connect)
    wrap(Knock, "ask", connect)


class Candidate(tenure_node.Candidate):
    def __init__(self, address: str, name: str, lease_s: float) -> None:
        wrap_everything()
        super().__init__(address, name, lease_s)

    def spans(self) -> list[Span]:
        return [*_spans, *((began, now_ns(), where, what) for began, where, what in list(_open.values()))]
