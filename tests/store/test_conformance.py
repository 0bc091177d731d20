"""One suite for every way to a database: the same tests, the same promises, whatever stands behind the URL."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

import tenure
from tests.cluster.test_pause import stop_between_writes
from tests.support.cluster import Cluster
from tests.support.store_by_hand import Nodes, until

pytestmark = pytest.mark.long

TTL_S = 2.0
BOUND_S = 20.0
"""Far more than a TTL, a look and a slow machine: without a sentinel a crash costs the TTL."""


@dataclass(frozen=True)
class Way:
    """A way to a database, and the mode in which nodes lead there."""

    url: str
    mode: str
    settings: dict[str, Any] = field(default_factory=dict)


@pytest.fixture(params=["postgres", "postgres-lease", "pgbouncer", "mariadb", "sqlite"])
def way(request: pytest.FixtureRequest) -> Way:
    """Each way in its turn."""
    if request.param == "postgres-lease":
        return Way(request.getfixturevalue("postgres_url"), "lease", {"mode": "lease"})
    if request.param == "pgbouncer":
        pooler = request.getfixturevalue("make_pgbouncer")(request.getfixturevalue("postgres_server"), pool_size=8)
        return Way(pooler.through(request.getfixturevalue("postgres_url")), "lease")
    return Way(request.getfixturevalue(f"{request.param}_url"), "hybrid")


@pytest.fixture
def cluster(way, tmp_path):
    with Cluster(way.url, tmp_path, ttl=TTL_S, sample_every_s=0.005, **way.settings) as cluster:
        yield cluster


def contested(cluster: Cluster) -> tuple[Any, int]:
    """Start three that write all the time; return who leads."""
    cluster.make_ledger()
    for node in cluster.start(3):
        node.tell("writes")
    return cluster.wait_for_leader()


def succeeded(cluster: Cluster, since_ns: int, token: int) -> tuple[Any, int]:
    """Wait for the successor; it does not take for ever, and its writes are taken."""
    successor, new_token = cluster.wait_for_leader(token)
    assert (cluster.elected_at(new_token) - since_ns) / 1e9 < BOUND_S
    successor.tell("write")
    return successor, new_token


def test_of_eight_that_start_at_once_one_leads_and_everybody_knows_it(cluster):
    nodes = cluster.start_at_once(8)
    leader, token = cluster.wait_for_leader()
    cluster.wait_for_candidates(*nodes)
    answers = [node.tell("leader") for node in nodes]
    assert {(answer["name"], answer["token"]) for answer in answers} == {(leader.name, token)}


def test_leader_that_is_killed_is_succeeded(cluster):
    leader, token = contested(cluster)
    succeeded(cluster, leader.kill(), token)


def test_leader_that_is_paused_is_succeeded_and_knows_it_when_it_wakes(cluster):
    leader, token = contested(cluster)
    stopped = stop_between_writes(cluster, leader)
    succeeded(cluster, stopped, token)
    leader.cont()
    assert leader.ask("ensure")["error"] == "LeadershipLost"
    leader.assert_fenced()


def test_leader_that_leaves_is_succeeded(cluster):
    leader, token = contested(cluster)
    cluster.recorder.fault("leave", leader.name)
    left = leader.send("leave")
    deposed = leader.wait_event("deposed", token=token)
    succeeded(cluster, deposed["at"], token)
    assert "error" not in leader.reply(left)


def test_tokens_grow_stale_writes_are_refused_and_history_tells(way):
    with Nodes(way.url, ttl=30, renew_every=0.5, **way.settings) as nodes:
        first, second = nodes("first"), nodes("second")
        elections = [first.election("r")]
        old = elections[0].wait(20)
        elections.append(second.election("r"))
        assert (first.mode, second.mode) == (way.mode, way.mode)
        until(lambda: len(elections[0].candidates()) == 2, "two candidates")
        with old.transaction() as transaction:
            assert transaction.execute("select 1") is not None
        elections[0].resign(to="second")
        new = elections[1].wait(20)
        assert new.token > old.token
        with pytest.raises(tenure.NotLeader), old.transaction():
            pytest.fail("a stale write was let in")
        with new.transaction():
            pass
        assert [(term.token, term.name, term.reason) for term in elections[1].history()] == [
            (new.token, "second", None),
            (old.token, "first", "resigned"),
        ]


def test_thousand_roles_are_led_and_handed_over(way):
    roles = [f"role {number}" for number in range(1000)]
    with Nodes(way.url, ttl=30, **way.settings) as nodes:
        first = nodes("first")
        terms = [first.election(role) for role in roles]
        until(lambda: all(election.is_leader for election in terms), "all of them are led", 60)
        second = nodes("second")
        others = [second.election(role) for role in roles]
        until(lambda: len(others[-1].candidates()) == 2, "a second candidate", 60)
        first.close()
        until(lambda: all(election.is_leader for election in others), "all of them are led again", 60)
        assert {election.term.token for election in others} == {2}
