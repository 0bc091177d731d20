"""OpenTelemetry (``pip install 'tenure[otel]'``): the terms of a node as traces.

    from tenure.integrations.otel import observe

    observe(node)                            # with the tracer provider that the application has set

A term is one trace of two spans:

    tenure.elected   a moment, exported as soon as the node leads
    tenure.term      from the election to the end, its child, exported when the term is over

Not one long span: a span is exported when it ends, so a leader that is killed would never have led. Not log events
either: OpenTelemetry's API for them is not stable in Python, and whoever exports the standard library's logging gets
Tenure's lines, with their fields, as they are.

Both carry ``tenure.role``, ``tenure.token``, ``tenure.node`` and ``tenure.namespace``; the second one also
``tenure.reason``, events ``suspended`` and ``resumed``, and the status ERROR unless the node gave the term up itself.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from tenure.async_node import AsyncNode
from tenure.events import Deposed, Elected, Event
from tenure.integrations import extra
from tenure.node import Node
from tenure.version import __version__

with extra("otel"):
    from opentelemetry import trace
    from opentelemetry.context import Context

GIVEN_UP = ("resigned", "left")
"""Why terms end that end as they should."""
DOUBTS_KEPT = 100
"""How many suspensions and resumptions of one term are told, at most: the last ones."""


def observe(node: Node | AsyncNode, *, tracer_provider: trace.TracerProvider | None = None) -> None:
    """Trace the terms of ``node``, of every role; call it once, before the node stands for any."""
    tracer = trace.get_tracer("tenure", __version__, tracer_provider)
    node.on_event(Terms(node.name, node.namespace, tracer).happened)


@dataclass
class Term:
    """A term that goes on."""

    context: Context
    began_ns: int
    doubts: deque[tuple[str, int]] = field(default_factory=lambda: deque(maxlen=DOUBTS_KEPT))


class Terms:
    """The terms that one node holds, role by role."""

    def __init__(self, node: str, namespace: str, tracer: trace.Tracer) -> None:
        """Begin with none."""
        self._names = {"tenure.node": node, "tenure.namespace": namespace}
        self._tracer = tracer
        self._terms: dict[str, Term] = {}

    def happened(self, event: Event) -> None:
        """Take in an event of this node's."""
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
        # In an empty context: a term is nobody's request, whatever the loop does that this callback runs on.
        span = self._tracer.start_span("tenure.elected", Context(), attributes=attributes, start_time=now_ns)
        span.end(now_ns)
        return Term(trace.set_span_in_context(span, Context()), now_ns)

    def _end(self, term: Term | None, event: Deposed, now_ns: int) -> None:
        if term is None:  # it began before anybody observed
            return
        attributes = {**self._attributes(event), "tenure.reason": event.reason}
        span = self._tracer.start_span("tenure.term", term.context, attributes=attributes, start_time=term.began_ns)
        for name, at_ns in term.doubts:
            span.add_event(name, timestamp=at_ns)
        if event.reason not in GIVEN_UP:
            span.set_status(trace.StatusCode.ERROR, event.reason)
        span.end(now_ns)
