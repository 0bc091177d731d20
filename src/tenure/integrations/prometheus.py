"""Prometheus (``pip install 'tenure[prometheus]'``): what a node measures, on the page that Prometheus reads.

    from tenure.integrations.prometheus import observe

    observe(node)                            # into prometheus_client's own registry
    prometheus_client.start_http_server(9400)

Everything is read from ``node.stats()`` and ``node.services()`` at the moment of the scrape: no thread, no I/O, and
``tenure_is_leader`` is as honest as ``is_leader`` itself. ``ops/alerts.yml`` and ``ops/grafana.json`` stand on these
names.
"""

from __future__ import annotations

from collections.abc import Iterator

from tenure.async_node import AsyncNode
from tenure.errors import ConfigError, NodeClosed
from tenure.integrations import extra
from tenure.meter import NodeStats
from tenure.node import Node
from tenure.services import ServiceInfo
from tenure.version import __version__

with extra("prometheus"):
    from prometheus_client import REGISTRY, CollectorRegistry
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

INFINITE = float("inf")
NODE = ("node", "namespace")
ROLE = (*NODE, "role")
SERVICE = (*ROLE, "service")


def observe(*nodes: Node | AsyncNode, registry: CollectorRegistry = REGISTRY) -> TenureCollector:
    """Show nodes in a registry; all of a process that share one in one call. Return what ``unregister()`` takes."""
    collector = TenureCollector(*nodes)
    try:
        registry.register(collector)
    except ValueError:
        raise ConfigError(
            "this registry shows nodes already: name all of them in one call, observe(one, another), or give each "
            "application (each create_app() of a test) a registry=CollectorRegistry() of its own"
        ) from None
    return collector


class TenureCollector:
    """Collects from nodes, started or not, when it is asked to. In a forked child the parent's nodes show nothing."""

    def __init__(self, *nodes: Node | AsyncNode) -> None:
        """Collect from these nodes; their names must differ, or nobody could tell their series apart."""
        if not nodes:
            raise ConfigError("there is no node to observe: observe(node)")
        for node in nodes:
            if not isinstance(node, (Node, AsyncNode)):
                raise ConfigError(f"{node!r} is no node: observe(node)")
        names = [(node.namespace, node.name) for node in nodes]
        if len(set(names)) < len(names):
            raise ConfigError("nodes that are observed together need names that differ: give them name=")
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
            except NodeClosed:  # this is a forked child: the numbers are the parent's to show
                continue
        return iter(page.metrics)


class Page:
    """The metrics of one scrape."""

    def __init__(self) -> None:
        """Begin with none of them known."""
        self._build = GaugeMetricFamily("tenure_build_info", "1, labelled with the version.", labels=("version",))
        self._ttl = GaugeMetricFamily("tenure_ttl_seconds", "For how long the node's lease is good.", labels=NODE)
        self._trust = GaugeMetricFamily(
            "tenure_trust_remaining_seconds",
            "Until the node's terms lapse unless its lease is renewed; 0 in doubt and without a lease.",
            labels=NODE,
        )
        self._renewed = GaugeMetricFamily(
            "tenure_seconds_since_renewal",
            "Since the node last renewed its lease; since its start, if never.",
            labels=NODE,
        )
        self._latency = HistogramMetricFamily(
            "tenure_renewal_seconds", "How long successful renewals took.", labels=NODE
        )
        self._failed = CounterMetricFamily(
            "tenure_renewals_failed", "Renewals that were refused or got no answer.", labels=NODE
        )
        self._leads = GaugeMetricFamily("tenure_is_leader", "1 while the node leads the role.", labels=ROLE)
        self._token = GaugeMetricFamily(
            "tenure_token", "The fencing token of the term that the node holds; 0 while it holds none.", labels=ROLE
        )
        self._transitions = CounterMetricFamily(
            "tenure_transitions",
            "Terms of the node: elected, suspended, resumed, and their ends by reason.",
            labels=(*ROLE, "reason"),
        )
        self._seen = GaugeMetricFamily(
            "tenure_seconds_since_leader_seen",
            "Since the node last saw anybody hold the role, itself or another; since it stands, if never.",
            labels=ROLE,
        )
        self._up = GaugeMetricFamily(
            "tenure_service_up", "1 while the service runs. Of a role it is to run on the leader only.", labels=SERVICE
        )
        self._failures = CounterMetricFamily(
            "tenure_service_failures", "How often the service failed to start, raised or returned.", labels=SERVICE
        )
        self._build.add_metric((__version__,), 1)

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """All of them, in the order of the page."""
        of_node = (self._build, self._ttl, self._trust, self._renewed, self._latency, self._failed)
        return (*of_node, self._leads, self._token, self._transitions, self._seen, self._up, self._failures)

    def add(self, stats: NodeStats, services: list[ServiceInfo]) -> None:
        """Add what one node shows."""
        node = (stats.node, stats.namespace)
        buckets = [
            ("+Inf" if bound == INFINITE else str(bound), float(count)) for bound, count in stats.renewals.buckets
        ]
        self._ttl.add_metric(node, stats.ttl)
        self._trust.add_metric(node, stats.trust_remaining)
        self._latency.add_metric(node, buckets, stats.renewals.seconds)
        self._failed.add_metric(node, stats.renewals_failed)
        if stats.renewed_ago is not None:
            self._renewed.add_metric(node, stats.renewed_ago)
        for role in stats.roles:
            labels = (*node, role.role)
            self._leads.add_metric(labels, role.is_leader)
            self._token.add_metric(labels, role.token)
            if role.leader_seen_ago is not None:
                self._seen.add_metric(labels, role.leader_seen_ago)
            for reason, count in role.transitions.items():
                self._transitions.add_metric((*labels, reason), count)
        for service in services:
            names = (*node, service.role or "", service.name)
            self._up.add_metric(names, service.state == "running")
            self._failures.add_metric(names, service.failures)
