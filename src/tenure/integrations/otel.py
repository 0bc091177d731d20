"""OpenTelemetry (``pip install 'tenure[otel]'``): the terms of a node as traces.

    from tenure.integrations.otel import observe

    observe(node)                            # with the application's tracer provider

A term is one trace of two spans:

    tenure.elected   a moment, exported as soon as the node leads
    tenure.term      its child: from the election to the end of the term, exported at the end

There are two because a span is exported when it ends: with one span only, a leader that is killed would leave no trace.
There are no log events, because OpenTelemetry's API for them is not stable in Python. An application that exports the
standard library's logging exports Tenure's lines too, with their fields.

Both spans have ``tenure.role``, ``tenure.token``, ``tenure.node`` and ``tenure.namespace``. The second span also has
``tenure.reason``, events ``suspended`` and ``resumed``, and the status ERROR unless the node gave the term up itself.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from tenure import AsyncNode, Deposed, Elected, Event, Node, __version__
from tenure.events import EndReason
from tenure.integrations import extra

with extra("otel"):
    from opentelemetry import trace
    from opentelemetry.context import Context

GIVEN_UP = (EndReason.RESIGNED, EndReason.LEFT)
"""The reasons for which a term ends without an error."""
DOUBTS_KEPT = 100
"""How many suspensions and resumptions of one term are exported: the last ones."""


def observe(node: Node | AsyncNode, *, tracer_provider: trace.TracerProvider | None = None) -> None:
    """Trace the terms of ``node``, for every role. Call it once, before the node stands for a role."""
    tracer = trace.get_tracer("tenure", __version__, tracer_provider)
    node.on_event(Terms(node.name, node.namespace, tracer).happened)


@dataclass
class Term:
    """A term that is not over."""

    context: Context
    began_ns: int
    doubts: deque[tuple[str, int]] = field(default_factory=lambda: deque(maxlen=DOUBTS_KEPT))


class Terms:
    """The terms that one node holds, role by role."""

    def __init__(self, node: str, namespace: str, tracer: trace.Tracer) -> None:
        self._names = {"tenure.node": node, "tenure.namespace": namespace}
        self._tracer = tracer
        self._terms: dict[str, Term] = {}

    def happened(self, event: Event) -> None:
        """Handle an event of this node."""
        now_ns = time.time_ns()
        if isinstance(event, Elected):
            self._terms[event.role] = self._begin(event, now_ns)
        elif isinstance(event, Deposed):
            self._end(self._terms.pop(event.role, None), event, now_ns)
        elif event.role in self._terms:
            self._terms[event.role].doubts.append((type(event).__name__.lower(), now_ns))

    def _attributes(self, event: Event) -> dict[str, str | int]:
        return {**self._names, "tenure.role": event.role, "tenure.token": event.token}

    def _begin(self, event: Elected, now_ns: int) -> Term:
        attributes = self._attributes(event)
        # In an empty context: a term is not part of the request that the event loop may be serving.
        span = self._tracer.start_span("tenure.elected", Context(), attributes=attributes, start_time=now_ns)
        span.end(now_ns)
        return Term(trace.set_span_in_context(span, Context()), now_ns)

    def _end(self, term: Term | None, event: Deposed, now_ns: int) -> None:
        if term is None:
            # The term began before observe() was called.
            return
        attributes = {**self._attributes(event), "tenure.reason": event.reason}
        span = self._tracer.start_span("tenure.term", term.context, attributes=attributes, start_time=term.began_ns)
        for name, at_ns in term.doubts:
            span.add_event(name, timestamp=at_ns)
        if event.reason not in GIVEN_UP:
            span.set_status(trace.StatusCode.ERROR, event.reason)
        span.end(now_ns)
