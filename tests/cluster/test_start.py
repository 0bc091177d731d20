"""Processes that start at the same instant on an empty database: all come up, and one leads."""

from __future__ import annotations

import pytest

from tests.support.cluster import Cluster


@pytest.mark.twin("sqlite")
def test_eight_processes_that_start_at_once_elect_one(store_url, tmp_path):
    with Cluster(store_url, tmp_path, ttl=10, sample_every_s=0.005) as cluster:
        nodes = cluster.start_at_once(8)
        leader, token = cluster.wait_for_leader()
        cluster.wait_for_candidates(*nodes)
        answers = [node.tell("leader") for node in nodes]
        assert {(answer["name"], answer["token"]) for answer in answers} == {(leader.name, token)}
        assert [node for node in nodes if node.tell("status")["leader"]] == [leader]
        assert {belief.token for belief in cluster.history.beliefs()} == {token}
