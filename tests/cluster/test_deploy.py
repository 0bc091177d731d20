"""A rolling deploy with all the faults of a bad day, among nodes that do not agree on anything but the database."""

from __future__ import annotations

import pytest

from tests.cluster.test_pause import stop_between_writes
from tests.support.cluster import Cluster

KINDS = ({"takeover": "strict", "ttl": 1.5}, {"takeover": "instant", "ttl": 3}, {"takeover": "strict", "ttl": 2})


@pytest.mark.long
@pytest.mark.parametrize("store_url", ["sqlite", "postgres"], indirect=True)
def test_strict_and_instant_nodes_with_different_ttls_never_lead_together(store_url, tmp_path):
    """Each leader goes in its own way, and a new process of the same kind takes its place."""
    with Cluster(store_url, tmp_path) as cluster:
        cluster.make_ledger()
        for kind in KINDS:
            cluster.start(1, **kind)
        for node in cluster.nodes:
            node.tell("writes")
        leader, token = cluster.wait_for_leader()
        for fault in ("kill", "pause", "leave", "pause", "kill"):
            cluster.fault(fault, leader.name)
            if fault == "kill":
                leader.kill()
            elif fault == "leave":
                leader.tell("leave")
            else:
                stop_between_writes(cluster, leader)
            old, (leader, token) = leader, cluster.wait_for_leader(token)
            assert leader is not old
            if fault == "pause":
                old.cont()
                old.assert_fenced()
                old.kill()
            (new,) = cluster.start(1, **{key: old.options[key] for key in ("takeover", "ttl")})
            new.tell("writes")
        assert leader.tell("leader")["token"] >= token
