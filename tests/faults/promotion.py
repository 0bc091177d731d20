"""The nemesis that ends its server: a replica is promoted. A short scenario with servers and nodes of its own.

The nodes' URL names both servers. The primary is lost without a word, its replica promoted, and whoever believes to
lead must have stopped before somebody leads on the new one, under a token above all that were ever given out.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.cluster import Cluster, NodeFailed
from tests.faults.checkers import NOISE_S
from tests.history import now_ns
from tests.servers import PostgresServer, Replica

NAME, WHAT = "promotion", "the primary is lost and its replica promoted (servers and nodes of their own)"


@dataclass(frozen=True)
class Promotion:
    """How long it took until somebody led on the new primary, and what was broken."""

    took_s: float
    bound_s: float
    violations: tuple[str, ...]


def promote(directory: Path, *, ttl: float, takeover: str) -> Promotion:
    """Do it once, and check the history of it by itself."""
    directory.mkdir(parents=True)
    bound_s = ttl + 1 + ttl / 4  # the largest permitted TTL, as from a look, and a renewal until the server is met
    took_s, broken = 0.0, []
    with PostgresServer(fsync=False) as primary, Replica(primary) as replica:
        primary.create_database("torture")
        try:
            with Cluster(replica.url_of_both("torture"), directory, ttl=ttl, takeover=takeover) as cluster:
                cluster.make_ledger()
                for node in cluster.start(3):
                    node.tell("writes")
                cluster.execute(f"update tenure.namespaces set max_ttl_ms = {ttl * 1000:.0f}")
                _, token = cluster.wait_for_leader()
                replica.catch_up()
                cluster.fault("stop", "the primary")
                primary.stop("immediate")
                replica.promote()
                promoted = now_ns()
                _, new_token = cluster.wait_for_leader(token, timeout=10 * ttl)
                took_s = (cluster.elected_at(new_token) - promoted) / 1e9
                if took_s > bound_s + NOISE_S:
                    broken.append(f"led {took_s:.2f} s after the promotion, and the bound is {bound_s:.2f} s")
                if new_token < 2**40:  # the least of the second timeline
                    broken.append(f"token {new_token} on the second timeline, after {token} on the first")
        except (AssertionError, NodeFailed) as error:
            broken.append(str(error))
    return Promotion(took_s, bound_s, tuple(broken))
