"""A process that stands still (SIGSTOP, suspend, a VM pause) and wakes is not a leader any more, and knows it at once.

The pauses here are real ones, longer than a short TTL. Nothing in the woken process may run before the first answer
is honest, so the record of the sampler is the judge: its first question after waking.
"""

from __future__ import annotations

import sqlite3
import time

import pytest

from tests.support import history
from tests.support.cluster import Cluster, NodeProcess

TTL_S = 3.0
BOUND_S = 20.0
"""Far more than a TTL, a poll and a slow machine; far less than a takeover that waits for somebody to wake up."""

one_of_each = pytest.mark.parametrize("store_url", ["sqlite", "postgres", "mariadb"], indirect=True)


def reads_since(cluster: Cluster, node: NodeProcess, since: int) -> list[history.Line]:
    """The recorded answers of is_leader to questions that were put after `since`."""
    return [line for line in cluster.history.of_kind("read") if line.node == node.name and line.at_before >= since]


def stop_between_writes(cluster: Cluster, node: NodeProcess) -> int:
    """SIGSTOP where it does not hold SQLite's one write lock: a process that stops there blocks everybody."""
    while True:
        at = node.stop()
        if not cluster.url.startswith("sqlite"):
            return at
        try:
            cluster.execute("begin immediate", "rollback", timeout=1)
        except sqlite3.OperationalError:
            node.cont()
        else:
            return at


@one_of_each
@pytest.mark.twin("sqlite")
def test_a_leader_that_was_paused_for_longer_than_the_ttl_wakes_as_a_follower(store_url, tmp_path):
    with Cluster(store_url, tmp_path, ttl=TTL_S) as cluster:
        cluster.make_ledger()
        for node in cluster.start(3):
            node.tell("writes")
        leader, token = cluster.wait_for_leader()
        stopped = stop_between_writes(cluster, leader)
        successor, new_token = cluster.wait_for_leader(token)
        assert (cluster.elected_at(new_token) - stopped) / 1e9 < BOUND_S

        woken = leader.cont()
        assert leader.ask("ensure")["error"] == "LeadershipLost"
        leader.assert_fenced()
        leader.wait_event("deposed", token=token)
        cluster.wait_for_candidates(leader, successor)
        reads = reads_since(cluster, leader, woken)
        assert reads
        assert not any(read.leader for read in reads)
        assert successor.tell("status")["leader"]


@one_of_each
def test_a_leader_that_was_paused_alone_leads_again_under_a_new_token_only(store_url, tmp_path):
    with Cluster(store_url, tmp_path, ttl=1) as cluster:
        (leader,) = cluster.start(1)
        _, token = cluster.wait_for_leader()
        leader.stop()
        time.sleep(1.2)
        woken = leader.cont()
        ensured = leader.send("ensure")
        _, new_token = cluster.wait_for_leader(token)
        # Asked about the old term; or, if it was slow to be asked, about the new one, which is fine.
        assert leader.reply(ensured).get("error", "LeadershipLost") == "LeadershipLost"
        assert new_token > token
        assert token not in {read.token for read in reads_since(cluster, leader, woken)}


@pytest.mark.twin("postgres")
def test_a_leader_that_was_paused_for_a_moment_goes_on(store_url, tmp_path):
    with Cluster(store_url, tmp_path, ttl=30) as cluster:
        cluster.make_ledger()
        cluster.start(2)
        leader, token = cluster.wait_for_leader()
        stop_between_writes(cluster, leader)
        time.sleep(0.5)
        woken = leader.cont()
        leader.tell("ensure")
        leader.tell("write")
        assert all(read.leader for read in reads_since(cluster, leader, woken))
        assert cluster.wait_for_leader() == (leader, token)


@pytest.mark.parametrize("bound", ["", "unbounded"], ids=["bounded by the server", "ended by the successor"])
def test_a_pause_inside_a_fenced_transaction_delays_the_takeover_for_its_bound_only(postgres_url, tmp_path, bound):
    """Unless it takes the server's bound off, the server ends it; else whoever takes over does."""
    with Cluster(postgres_url, tmp_path, ttl=TTL_S) as cluster:
        cluster.make_ledger()
        cluster.start(2)
        leader, token = cluster.wait_for_leader()
        leader.tell(f"begin {bound}")
        stopped = leader.stop()
        successor, new_token = cluster.wait_for_leader(token)
        took_s = (cluster.elected_at(new_token) - stopped) / 1e9
        print(f"taken over after {took_s:.1f} s")
        assert took_s < BOUND_S
        successor.tell("write")

        leader.cont()
        assert "error" in leader.ask("commit")
        leader.assert_fenced()
        assert [written for _, written in cluster.ledger()] == [new_token]


def test_a_candidate_that_is_paused_while_it_takes_the_role_is_ended_nevertheless(
    postgres_server, postgres_url, tmp_path
):
    """It holds locks on the role's row and on its own: the others cut its connection to be able to end it."""
    with (
        Cluster(postgres_url, tmp_path, ttl=4) as cluster,
        postgres_server.connect(postgres_url.rpartition("/")[2]) as rival,
        postgres_server.connect() as look,
    ):
        first, paused, other = cluster.load("first", "paused", "other")
        first.tell("start")
        _, token = cluster.wait_for_leader()
        first.tell("leave")
        at_work = "select 1 from pg_stat_activity where application_name = 'tenure control default/paused' and "
        with rival.transaction():
            rival.execute("select from tenure.roles for update")
            paused.tell("start")
            while True:
                if look.execute(at_work + "wait_event_type = 'Lock'").fetchall():
                    stopped = paused.stop()
                    if look.execute(at_work + "xact_start is not null").fetchall():
                        break
                    paused.cont()
        other.tell("start")
        leader, new_token = cluster.wait_for_leader(token)
        took_s = (cluster.elected_at(new_token) - stopped) / 1e9
        print(f"taken over after {took_s:.1f} s")
        assert leader is other
        assert took_s < BOUND_S


def test_a_long_fenced_transaction_of_a_living_leader_is_left_alone(postgres_url, tmp_path):
    """Nobody waits for a role that is held, so nobody ends what its holder does: however short the others' TTL."""
    with Cluster(postgres_url, tmp_path, ttl=30) as cluster:
        cluster.make_ledger()
        (leader,) = cluster.start(1)
        _, token = cluster.wait_for_leader()
        leader.tell("begin 60")
        (candidate,) = cluster.start(1, ttl=1)
        time.sleep(2.5)
        leader.tell("commit")
        assert candidate.events("elected") == []
        assert [written for _, written in cluster.ledger()] == [token]


def test_a_pause_inside_a_sqlite_transaction_blocks_everybody_and_elects_nobody(sqlite_url, tmp_path):
    """What SQLite cannot do: there is one write lock, and nobody can take it from a process that stands still."""
    with Cluster(sqlite_url, tmp_path, ttl=1) as cluster:
        cluster.make_ledger()
        cluster.start(3)
        leader, token = cluster.wait_for_leader()
        leader.tell("begin")
        leader.stop()
        time.sleep(2.5)
        assert not [node for node in cluster.nodes if node.events("elected") and node is not leader]
        leader.kill()
        successor, new_token = cluster.wait_for_leader(token)
        assert successor is not leader
        successor.tell("write")
        assert [written for _, written in cluster.ledger()] == [new_token]
