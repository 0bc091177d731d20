"""Prometheus (``pip install 'tenure[prometheus]'``): the metrics of a node.

    from tenure.integrations.prometheus import observe

    observe(node)                            # in the default registry of prometheus_client
    prometheus_client.start_http_server(9400)

Each scrape reads ``node.stats()`` and ``node.services()``, without a thread or I/O. ``tenure_is_leader`` compares the
term with the clock, as ``is_leader`` does. ``ops/alerts.yml`` and ``ops/grafana.json`` use these names.
"""

from __future__ import annotations

from collections.abc import Iterator

from tenure import AsyncNode, ConfigError, Node, NodeClosed, NodeStats, ServiceInfo, __version__
from tenure.integrations import extra
from tenure.services.service import ServiceState

with extra("prometheus"):
    from prometheus_client import REGISTRY, CollectorRegistry
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

INFINITE = float("inf")
NODE = ("node", "namespace")
ROLE = (*NODE, "role")
SERVICE = (*ROLE, "service")
JOB = (*ROLE, "job")
METRICS: tuple[tuple[type[GaugeMetricFamily | CounterMetricFamily], str, tuple[str, ...], str], ...] = (
    (GaugeMetricFamily, "tenure_build_info", ("version",), "Always 1; the label is the version."),
    (GaugeMetricFamily, "tenure_ttl_seconds", NODE, "Seconds for which the node's lease is good."),
    (GaugeMetricFamily, "tenure_trust_remaining_seconds", NODE,
     "Seconds until the node's terms lapse unless its lease is renewed; 0 in doubt and without a lease."),
    (GaugeMetricFamily, "tenure_seconds_since_renewal", NODE,
     "Seconds since the node last renewed its lease, or since its start if it never did."),
    (CounterMetricFamily, "tenure_renewals_failed", NODE, "Renewals that were refused or got no answer."),
    (GaugeMetricFamily, "tenure_is_leader", ROLE, "1 while the node leads the role."),
    (GaugeMetricFamily, "tenure_token", ROLE,
     "The fencing token of the term that the node holds; 0 while it holds none."),
    (CounterMetricFamily, "tenure_transitions", (*ROLE, "reason"),
     "Terms of the node: elected, suspended, resumed, and their ends by reason."),
    (GaugeMetricFamily, "tenure_seconds_since_leader_seen", ROLE,
     "Seconds since the node last saw a leader of the role, even itself; if never, since it became a candidate."),
    (GaugeMetricFamily, "tenure_service_up", SERVICE,
     "1 while the service runs or is done. A service of a role runs on the leader only."),
    (CounterMetricFamily, "tenure_service_failures", SERVICE,
     "How often the service failed to start, raised or returned."),
    (CounterMetricFamily, "tenure_runs", (*JOB, "outcome"),
     "Runs of a schedule's job: done, failed, interrupted, lost; and due times that were skipped."),
    (GaugeMetricFamily, "tenure_seconds_since_success", JOB,
     "Seconds since a run of the job last succeeded on this node."),
    (GaugeMetricFamily, "tenure_job_overdue_seconds", JOB,
     "For how long a run of the job has been due that has not begun; 0 on nodes that do not lead."),
)  # fmt: skip
"""Every metric but the histogram: its kind, name, labels and help."""


def observe(*nodes: Node | AsyncNode, registry: CollectorRegistry = REGISTRY) -> TenureCollector:
    """Show all nodes of a process in a registry, in one call. Return the collector, for ``unregister()``."""
    collector = TenureCollector(*nodes)
    try:
        registry.register(collector)
    except ValueError:
        raise ConfigError(
            "this registry shows nodes already: pass all of them in one call, observe(node, another), or give each "
            "application (each create_app() of a test) its own registry=CollectorRegistry()"
        ) from None
    return collector


class TenureCollector:
    """Reads nodes, started or not, at each scrape. In a forked child it shows nothing of the parent's nodes.

    The names of the nodes must differ: otherwise their series would be the same.
    """

    def __init__(self, *nodes: Node | AsyncNode) -> None:
        if not nodes:
            raise ConfigError("there is no node to observe: pass at least one, observe(node)")
        for node in nodes:
            if not isinstance(node, (Node, AsyncNode)):
                raise ConfigError(f"{node!r} is not a node: pass a tenure.Node or a tenure.AsyncNode")
        names = [(node.namespace, node.name) for node in nodes]
        if len(set(names)) < len(names):
            raise ConfigError("nodes that are observed together need different names: give each its own name=")
        self._nodes = nodes

    def describe(self) -> Iterator[Metric]:
        """Name the metrics, so that a second collector in the same registry is refused."""
        return iter(Page().metrics)

    def collect(self) -> Iterator[Metric]:
        """Read the nodes."""
        page = Page()
        for node in self._nodes:
            try:
                page.add(node.stats(), node.services())
            except NodeClosed:
                # This is a forked child. The parent shows the numbers.
                continue
        return iter(page.metrics)


class Page:
    """The metrics of one scrape."""

    def __init__(self) -> None:
        self._families = {name: kind(name, text, labels=labels) for kind, name, labels, text in METRICS}
        self._latency = HistogramMetricFamily(
            "tenure_renewal_seconds", "How long successful renewals took.", labels=NODE
        )
        self._add("tenure_build_info", (__version__,), 1)

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Every family of metrics, even one without a value."""
        return (*self._families.values(), self._latency)

    def _add(self, name: str, labels: tuple[str, ...], value: float) -> None:
        self._families[name].add_metric(labels, value)

    def add(self, stats: NodeStats, services: list[ServiceInfo]) -> None:
        """Add the numbers of one node."""
        node = (stats.node, stats.namespace)
        buckets = [
            ("+Inf" if bound == INFINITE else str(bound), float(count)) for bound, count in stats.renewals.buckets
        ]
        self._add("tenure_ttl_seconds", node, stats.ttl)
        self._add("tenure_trust_remaining_seconds", node, stats.trust_remaining)
        self._latency.add_metric(node, buckets, stats.renewals.seconds)
        self._add("tenure_renewals_failed", node, stats.renewals_failed)
        if stats.renewed_ago is not None:
            self._add("tenure_seconds_since_renewal", node, stats.renewed_ago)
        for role in stats.roles:
            labels = (*node, role.role)
            self._add("tenure_is_leader", labels, role.is_leader)
            self._add("tenure_token", labels, role.token)
            if role.leader_seen_ago is not None:
                self._add("tenure_seconds_since_leader_seen", labels, role.leader_seen_ago)
            for reason, count in role.transitions.items():
                self._add("tenure_transitions", (*labels, reason), count)
        for job in stats.jobs:
            of_job = (*node, job.role, job.job)
            self._add("tenure_job_overdue_seconds", of_job, job.overdue)
            if job.succeeded_ago is not None:
                self._add("tenure_seconds_since_success", of_job, job.succeeded_ago)
            for outcome, count in job.runs.items():
                self._add("tenure_runs", (*of_job, outcome), count)
        for service in services:
            names = (*node, service.role or "", service.name)
            self._add("tenure_service_up", names, service.state in (ServiceState.RUNNING, ServiceState.DONE))
            self._add("tenure_service_failures", names, service.failures)
