"""A leader that is cut off from the database: it stops believing, the server lets go of its sentinel, others lead.

The leader sits in a network of its own, the server and the second candidate in another. Nobody gets a reset or an
error: packets are lost, both ways or on the way back only.
"""

from __future__ import annotations

import time

import pytest

from tests.support import history
from tests.support.cluster import Cluster
from tests.support.servers import PostgresServer

TTL_S = 4.0


def wait_until_freed(server: PostgresServer, name: str, timeout: float) -> int:
    """Wait until the server has let go of a node's control connection, and so of its sentinel; return when (ns)."""
    deadline = time.monotonic() + timeout
    query = (
        "select 1 from pg_locks l join pg_stat_activity a using (pid)"
        " where l.locktype = 'advisory' and l.mode = 'ExclusiveLock' and a.application_name = %s"
    )
    with server.connect() as connection:
        while connection.execute(query, [f"tenure control default/{name}"]).fetchall():
            assert time.monotonic() < deadline, f"the server still holds the sentinel of {name}"
            time.sleep(0.02)
    return history.now_ns()


@pytest.mark.long
@pytest.mark.parametrize("lost", ["both ways", "from the server"])
def test_a_leader_that_is_cut_off_is_succeeded_after_it_stopped_believing(
    network, make_postgres_server, tmp_path, lost
):
    server = make_postgres_server(listen=network.server_address, netns=network.server, fsync=False)
    with Cluster(server.create_database(), tmp_path, ttl=TTL_S) as cluster:
        (leader,) = cluster.spawn("far", netns=network.client)
        _, token = cluster.wait_for_leader()
        (candidate,) = cluster.spawn("near", netns=network.server)
        cluster.wait_for_candidates(leader, candidate)

        cut = cluster.fault(f"cut {lost}")
        if lost == "both ways":
            network.cut()
        else:
            network.cut_one_way("server")
        deposed = leader.wait_event("deposed", token=token)
        successor, new_token = cluster.wait_for_leader(token)
        freed = wait_until_freed(server, leader.name, 3 * TTL_S)
        believed_until = max(belief.until for belief in cluster.history.beliefs() if belief.node == leader.name)
        for what, at in {"deposed": deposed["at"], "elected": cluster.elected_at(new_token), "freed": freed}.items():
            print(f"{what} after {(at - cut) / 1e9:.2f} s")
        assert successor is candidate
        assert (believed_until - cut) / 1e9 < TTL_S
        assert (cluster.elected_at(new_token) - cut) / 1e9 < 2 * TTL_S
        assert believed_until < freed

        network.heal()
        cluster.wait_for_candidates(candidate, leader)  # it comes back, as a follower
        assert not leader.tell("status")["leader"]
        assert candidate.tell("status") | {"leader": True, "token": new_token} == candidate.tell("status")


@pytest.mark.long
@pytest.mark.parametrize("lost", ["both ways", "from the server"])
def test_the_server_lets_go_of_a_lost_leader_by_itself(network, make_postgres_server, tmp_path, lost):
    """With nobody there who could end its connections: by the server's own keepalive, and not before the TTL."""
    server = make_postgres_server(listen=network.server_address, netns=network.server, fsync=False)
    with Cluster(server.create_database(), tmp_path, ttl=TTL_S) as cluster:
        (leader,) = cluster.spawn("far", netns=network.client)
        _, token = cluster.wait_for_leader()
        cut = cluster.fault(f"cut {lost}")
        if lost == "both ways":
            network.cut()
        else:
            network.cut_one_way("server")
        freed = wait_until_freed(server, leader.name, 5 * TTL_S)
        deposed = leader.wait_event("deposed", token=token)
        print(f"deposed after {(deposed['at'] - cut) / 1e9:.2f} s, freed after {(freed - cut) / 1e9:.2f} s")
        assert max(belief.until for belief in cluster.history.beliefs()) < freed
        network.heal()
        cluster.wait_for_leader(token)
