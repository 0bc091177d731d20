"""A leader that dies or leaves is succeeded at once, whoever goes with it.

"At once" is far below the TTL of 30 s: these tests pass by proof of death, or not at all.
"""

from __future__ import annotations

import signal

import pytest

from tests.support import history
from tests.support.cluster import Cluster, NodeProcess

TTL_S = 30.0
AT_ONCE_S = 5.0

one_of_each = pytest.mark.parametrize("store_url", ["sqlite", "postgres", "mariadb"], indirect=True)
one_of_two = pytest.mark.parametrize("store_url", ["sqlite", "postgres"], indirect=True)
"""Where MariaDB adds nothing to what another test shows there."""


def succession(cluster: Cluster, since_ns: int, above: int) -> tuple[NodeProcess, int]:
    """Wait for the successor and assert that it did not take long."""
    successor, token = cluster.wait_for_leader(above)
    took_s = (cluster.elected_at(token) - since_ns) / 1e9
    print(f"succeeded after {took_s * 1000:.1f} ms")
    assert took_s < AT_ONCE_S
    return successor, token


def assert_leads(node: NodeProcess, token: int) -> None:
    """The word of the node and that of the database."""
    status, database = node.tell("status"), node.tell("leader")
    assert (status["leader"], status["token"]) == (True, token)
    assert (database["name"], database["token"]) == (node.name, token)
    assert "error" not in node.ask("write")


def test_killed_leaders_are_succeeded_at_once(store_url, tmp_path):
    with Cluster(store_url, tmp_path, ttl=TTL_S) as cluster:
        cluster.make_ledger()
        for node in cluster.start(3):
            node.tell("writes")
        leader, token = cluster.wait_for_leader()
        for _ in range(2):  # until one is left
            leader, token = succession(cluster, leader.kill(), token)
        assert_leads(leader, token)


def test_ten_nodes_elect_one_successor(postgres_url, tmp_path):
    with Cluster(postgres_url, tmp_path, ttl=TTL_S, sample_every_s=0.005) as cluster:
        cluster.make_ledger()
        cluster.start(10)
        leader, token = cluster.wait_for_leader()
        for _ in range(3):
            leader, token = succession(cluster, leader.kill(), token)
        assert_leads(leader, token)


@one_of_two
@pytest.mark.parametrize("neighbour", ["watcher", "watched"])
@pytest.mark.twin("watcher-postgres", "watched-sqlite")
def test_two_ring_neighbours_that_die_together_are_succeeded_at_once(store_url, tmp_path, neighbour):
    with Cluster(store_url, tmp_path, ttl=TTL_S) as cluster:
        cluster.make_ledger()
        cluster.start(4)
        leader, token = cluster.wait_for_leader()
        ring = cluster.in_ring()
        step = 1 if neighbour == "watcher" else -1
        other = ring[(ring.index(leader) + step) % len(ring)]
        other.signal(signal.SIGKILL)
        successor, token = succession(cluster, leader.kill(), token)
        assert successor not in (leader, other)
        assert_leads(successor, token)


@one_of_each
def test_a_leader_that_leaves_is_succeeded_at_once(store_url, tmp_path):
    with Cluster(store_url, tmp_path, ttl=TTL_S) as cluster:
        cluster.make_ledger()
        cluster.start(3)
        leader, token = cluster.wait_for_leader()
        cluster.recorder.fault("leave", leader.name)
        left = leader.send("leave")
        deposed = leader.wait_event("deposed", token=token)
        assert deposed["reason"] == "left"
        successor, token = succession(cluster, deposed["at"], token)
        assert "error" not in leader.reply(left)
        assert_leads(successor, token)


@one_of_two
@pytest.mark.twin("postgres")
def test_a_leader_ended_by_sigterm_is_succeeded_at_once(store_url, tmp_path):
    with Cluster(store_url, tmp_path, ttl=TTL_S) as cluster:
        cluster.make_ledger()
        cluster.start(3)
        leader, token = cluster.wait_for_leader()
        successor, token = succession(cluster, leader.kill(signal.SIGTERM), token)
        assert_leads(successor, token)


@one_of_each
def test_a_new_node_succeeds_at_once_where_all_were_killed(store_url, tmp_path):
    with Cluster(store_url, tmp_path, ttl=TTL_S) as cluster:
        cluster.make_ledger()
        cluster.start(3)
        leader, token = cluster.wait_for_leader()
        for node in sorted(cluster.nodes, key=lambda node: node is leader):  # it last, or another one would lead
            node.kill()
        (late,) = cluster.load("late")
        since = history.now_ns()
        late.tell("start")
        successor, token = succession(cluster, since, token)
        assert successor is late
        assert_leads(late, token)
