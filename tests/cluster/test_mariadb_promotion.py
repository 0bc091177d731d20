"""A replica of MariaDB is promoted, and an address that all nodes have leads to it from then on.

As on PostgreSQL (test_promotion.py) nobody leads on the new primary before every old lease has run out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tenure import registry as tenure_registry
from tests.conftest import missing
from tests.support.cluster import Cluster
from tests.support.mariadb import ADDRESS, NO_MARIADB, REPLICATED, MariaDbReplica, MariaDbServer, mariadb_program
from tests.verification.torture.arena import at
from tests.verification.torture.proxy import Doors

pytestmark = pytest.mark.long

TTL_S = 3.0
MAX_TTL_S = 4.0


@pytest.fixture
def replica() -> Iterator[MariaDbReplica]:
    if mariadb_program() is None:
        missing(NO_MARIADB)
    with MariaDbServer(settings=REPLICATED) as primary, MariaDbReplica(primary) as replica:
        yield replica


@contextlib.contextmanager
def cluster_by_address(replica: MariaDbReplica, directory: Path) -> Iterator[tuple[Cluster, Doors]]:
    """A cluster whose nodes have one address. It leads to the primary at first."""
    url = replica.primary.create_database()
    tenure_registry.Registry(url).create(max_ttl=MAX_TTL_S)
    with Doors() as doors:
        port = doors.open("address", ADDRESS, replica.primary.port)
        with Cluster(at(url, port), directory, ttl=TTL_S, takeover="strict") as cluster:
            yield cluster, doors


def promote(cluster: Cluster, doors: Doors, replica: MariaDbReplica) -> int:
    """Lose the primary without a word, promote its replica, and move the address; return the moment (ns) before."""
    cluster.fault("kill", "the primary")
    replica.primary.stop("immediate")
    at_ns = cluster.fault("promote", "the replica")
    replica.promote()
    doors.lead("address", ADDRESS, replica.port)
    return at_ns


@pytest.mark.parametrize("replication", ["semi-synchronous", "asynchronous"])
def test_nobody_leads_on_a_promoted_mariadb_before_every_old_lease_has_run_out(replica, tmp_path, replication):
    """And tokens grow; and what was acknowledged is there, if the replica had it before the acknowledgement."""
    semi = replication == "semi-synchronous"
    with contextlib.ExitStack() as stack:
        cluster, doors = stack.enter_context(cluster_by_address(replica, tmp_path))
        cluster.make_ledger()
        for node in cluster.start(3):
            node.tell("writes")
        if semi:
            stack.enter_context(replica.semi_synchronous())
        leader, token = cluster.wait_for_leader()
        acknowledged = 0
        if semi:
            leader.tell("write")
            acknowledged = max(n for n, _ in replica.primary.execute("select n, token from ledger", dbname="test_1"))
        else:
            replica.catch_up(replica.primary)
        promoting = promote(cluster, doors, replica)
        successor, new_token = cluster.wait_for_leader(token)
        took_s = (cluster.elected_at(new_token) - promoting) / 1e9
        assert MAX_TTL_S <= took_s < MAX_TTL_S + 10
        successor.tell("write")
        assert {n for n, _ in cluster.ledger()} >= set(range(1, acknowledged + 1))


def test_nobody_leads_beside_a_leader_whose_election_the_promoted_mariadb_lacks(replica, tmp_path):
    """The leader knows the old primary only, and goes on believing for most of its TTL."""
    with cluster_by_address(replica, tmp_path) as (cluster, doors):
        cluster.start(2)
        (leader,) = cluster.start(1, url=replica.primary.url("test_1"))
        known, token = cluster.wait_for_leader()
        replica.catch_up(replica.primary)
        replica.cut_off()
        if known is not leader:
            known.tell(f"resign {leader.name}")
            _, token = cluster.wait_for_leader(token)
        at_ns = promote(cluster, doors, replica)
        leader.wait_event("deposed", token=token)
        _, new_token = cluster.wait_for_leader(token)
        assert (cluster.elected_at(new_token) - at_ns) / 1e9 >= MAX_TTL_S
