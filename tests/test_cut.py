"""Connections of living nodes cut by the server, at any moment: by an administrator, a time-out, a crash nearby.

A strict leader does not care. In instant mode the cut frees the sentinel of a leader that lives: it hears of it from
its socket, and stops believing, before its successor can have its proof. If it hears later than that (a machine
under load), both read True for a moment; docs/guarantees.md names this one case, and here it is measured.
"""

from __future__ import annotations

import random
import time

import psycopg

from tests import history
from tests.cluster import Cluster
from tests.servers import PostgresServer

TTL_S = 10.0
CUT = "select pg_terminate_backend(pid) from pg_stat_activity where application_name = %s"


class Cutter:
    """Ends one of the nodes' connections after the other, at random moments."""

    def __init__(self, server: PostgresServer, cluster: Cluster) -> None:
        self.cluster = cluster
        self.seed = random.randrange(2**32)
        self.chance = random.Random(self.seed)
        self.connection: psycopg.Connection[tuple[object, ...]] = server.connect()

    def cut(self, name: str, purpose: str) -> bool:
        """End a connection of the node's; False if it has none of this kind at the moment."""
        time.sleep(self.chance.uniform(0, 0.03))  # a moment that nobody chose
        self.cluster.fault(f"cut {purpose}", name)
        return bool(self.connection.execute(CUT, [f"tenure {purpose} default/{name}"]).fetchall())


def test_cut_connections_leave_one_leader(postgres_server, postgres_url, tmp_path):
    """Within what instant mode promises; the figure is printed."""
    with Cluster(postgres_url, tmp_path, ttl=TTL_S, sample_every_s=0.0003, strictly=False) as cluster:
        cluster.make_ledger()
        for node in cluster.start(3):
            node.tell("writes")
        leader, token = cluster.wait_for_leader()
        cutter = Cutter(postgres_server, cluster)
        cuts = 0
        with cutter.connection:
            while cuts < 200:
                victim, purpose = leader, "control"
                if cutter.chance.random() < 0.5:
                    victim = cutter.chance.choice(cluster.nodes)
                    purpose = cutter.chance.choice(["control", "watch"])
                if not cutter.cut(victim.name, purpose):
                    continue
                cuts += 1
                if victim is leader and purpose == "control":
                    leader, token = cluster.wait_for_leader(token)
        spans = history.overlap_spans(cluster.history)
        lengths_ms = sorted((span.until - span.since) / 1e6 for span in spans)
        print(
            f"seed {cutter.seed}: {cuts} cuts, {token} terms, {len(spans)} overlaps,"
            f" {sum(lengths_ms):.2f} ms in total, the longest {max(lengths_ms, default=0):.2f} ms"
        )
        assert max(lengths_ms, default=0) < TTL_S * 1000
        assert len(spans) < cuts / 10


def test_a_strict_leader_goes_on_whatever_is_cut(postgres_server, postgres_url, tmp_path):
    with Cluster(postgres_url, tmp_path, ttl=TTL_S, takeover="strict") as cluster:
        cluster.make_ledger()
        for node in cluster.start(3):
            node.tell("writes")
        leader, token = cluster.wait_for_leader()
        cutter = Cutter(postgres_server, cluster)
        cuts = 0
        with cutter.connection:
            while cuts < 40:
                victim = leader if cutter.chance.random() < 0.5 else cutter.chance.choice(cluster.nodes)
                cuts += cutter.cut(victim.name, cutter.chance.choice(["control", "watch"]))
        assert leader.tell("status")["leader"]
        leader.tell("write")
        assert {belief.token for belief in cluster.history.beliefs()} == {token}
