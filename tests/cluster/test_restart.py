"""A restart of the database is no election: nobody had proof of the leader's death, so the same term goes on.

The danger is in the moments of the stop. A server that shuts down ends its connections one by one, and with the
leader's goes its sentinel, while a watcher's connection may still work. Hundreds of idle connections around the nodes'
own stretch those moments, and the leader's is among the first to go, or among the last.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest

from tests.conftest import fresh_database
from tests.support.cluster import Cluster, NodeProcess
from tests.support.servers import PostgresServer
from tests.support.store_by_hand import until

pytestmark = pytest.mark.long

TTL_S = 30.0
"""So that ttl - margin - renewal interval - stop time, the bound of the promise, is far longer than a restart."""


def connected(server: PostgresServer, nodes: int) -> None:
    """Wait until every node has both of its connections."""
    deadline = time.monotonic() + 30
    while len(them := [b for b in server.backends() if b.application_name.startswith("tenure ")]) < 2 * nodes:
        assert time.monotonic() < deadline, f"not all nodes are back: {them}"
        time.sleep(0.02)


def restart(cluster: Cluster, server: Any, mode: str, leader: NodeProcess, token: int) -> None:
    """Restart the server, and see the leader's term suspended and resumed."""
    stopping = cluster.fault(f"{mode} stop")
    server.stop(mode)
    suspended = leader.wait_event("suspended", token=token, since=stopping)
    assert not leader.tell("status")["leader"]
    starting = cluster.fault("start")
    ensured = leader.send("ensure")  # waits until the doubt is over
    server.start()
    leader.wait_event("resumed", token=token, since=stopping)
    assert leader.reply(ensured) == {}
    leader.tell("write")
    assert leader.tell("status")["leader"]
    in_doubt = [
        read
        for read in cluster.history.of_kind("read")
        if read.node == leader.name and suspended["at"] <= read.at_before and read.at <= starting
    ]
    assert not any(read.leader for read in in_doubt)


@pytest.mark.parametrize(("mode", "position"), [("fast", "first"), ("fast", "last"), ("immediate", "first")])
def test_the_same_leader_goes_on_after_a_restart(every_postgres_server, tmp_path, mode, position):
    server = every_postgres_server
    with fresh_database(server) as url, contextlib.ExitStack() as stack, Cluster(url, tmp_path, ttl=TTL_S) as cluster:

        def idle(connections: int) -> None:
            for _ in range(connections):
                stack.enter_context(contextlib.closing(server.connect()))

        cluster.make_ledger()
        idle(60)
        for _ in range(3):
            cluster.start(1)
            idle(20)
        idle(40)
        leader, token = cluster.wait_for_leader()
        if position == "last":
            leader.tell("resign node-2")
            leader, token = cluster.wait_for_leader(token)
            assert leader.name == "node-2"
        began = cluster.elected_at(token)
        connected(server, 3)
        for _ in range(3):
            restart(cluster, server, mode, leader, token)
            connected(server, 3)
            idle(60)
        assert [node.events("elected", "deposed", since=began + 1) for node in cluster.nodes] == [[], [], []]

        # And everything is in place again: the next death is seen at once.
        leader.kill()
        successor, _ = cluster.wait_for_leader(token, timeout=5)
        successor.tell("write")


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_the_same_leader_goes_on_after_a_restart_of_mariadb(mariadb_server, mariadb_url, tmp_path, mode):
    with Cluster(mariadb_url, tmp_path, ttl=TTL_S) as cluster:
        cluster.make_ledger()
        cluster.start(3)
        leader, token = cluster.wait_for_leader()
        began = cluster.elected_at(token)
        database = mariadb_url.rpartition("/")[2]
        for _ in range(2):
            until(lambda: len(mariadb_server.connections(database)) == 6, "every node has both of its connections")
            restart(cluster, mariadb_server, mode, leader, token)
        until(lambda: len(mariadb_server.connections(database)) == 6, "every node has both of its connections")
        assert [node.events("elected", "deposed", since=began + 1) for node in cluster.nodes] == [[], [], []]
        leader.kill()
        successor, _ = cluster.wait_for_leader(token, timeout=10)
        successor.tell("write")


def test_somebody_leads_again_after_an_outage_longer_than_the_ttl(every_postgres_server, tmp_path):
    ttl_s = 3.0
    with fresh_database(every_postgres_server) as url, Cluster(url, tmp_path, ttl=ttl_s) as cluster:
        cluster.make_ledger()
        cluster.start(3)
        leader, token = cluster.wait_for_leader()
        stopping = cluster.fault("stop")
        every_postgres_server.stop()
        deposed = leader.wait_event("deposed", token=token)
        assert deposed["reason"] == "lapsed"
        assert leader.ask("ensure")["error"] == "LeadershipLost"
        time.sleep(max(0.0, ttl_s - (deposed["at"] - stopping) / 1e9))
        starting = cluster.fault("start")
        every_postgres_server.start()
        successor, new_token = cluster.wait_for_leader(token)
        took_s = (cluster.elected_at(new_token) - starting) / 1e9
        print(f"led again after {took_s:.1f} s")
        assert took_s < 5 * ttl_s
        cluster.wait_for_candidates(*cluster.nodes)  # the same processes, all of them
        successor.tell("write")
