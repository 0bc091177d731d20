"""A replica is promoted: its tables may lack the last terms, so nobody trusts them before every old lease has run out.

The nodes' URL names both servers, and they find the one that takes writes by themselves. The price of a promotion is
the namespace's largest permitted TTL, counted by each node from when it first saw the new primary.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

import tenure
from tenure import registry as tenure_registry
from tenure.core import messages, timing
from tenure.databases.postgres import doctor as postgres_doctor
from tenure.fence.fence import fence
from tenure.settings import node_settings
from tenure.store.session import Failed
from tests.cli.test_cli import Answer
from tests.support.cluster import ROOT, Cluster, NodeProcess
from tests.support.servers import PostgresServer, Replica
from tests.support.store_by_hand import Desk, execute, until

pytestmark = pytest.mark.long

TTL_S = 3.0
MAX_TTL_S = 4.0
TIMELINE_2 = 2**40
"""The least token of the second timeline."""


def make_database(server: PostgresServer) -> str:
    """Create an empty database and return its name."""
    return server.create_database().rpartition("/")[2]


def permit_no_longer_ttl(cluster: Cluster) -> None:
    cluster.execute(f"update tenure.namespaces set max_ttl_ms = {MAX_TTL_S * 1000:.0f}")


def promote(cluster: Cluster, replica: Replica) -> int:
    """Lose the primary without a word and promote its replica; return the moment (ns) before it was one."""
    cluster.fault("stop", "the primary")
    replica.primary.stop("immediate")
    promoting = cluster.fault("promote", "the replica")
    replica.promote()
    return promoting


def wait_for_successor(cluster: Cluster, token: int, promoting_ns: int) -> tuple[NodeProcess, int]:
    """Wait until somebody leads on the new primary, and assert that it was neither too early nor too late."""
    successor, new_token = cluster.wait_for_leader(token)
    took_s = (cluster.elected_at(new_token) - promoting_ns) / 1e9
    print(f"led again {took_s:.2f} s after the promotion")
    assert MAX_TTL_S <= took_s < MAX_TTL_S + 10
    assert new_token >= TIMELINE_2
    successor.tell("write")
    return successor, new_token


def test_hot_standby_is_refused_until_it_is_promoted(every_replica):
    name = make_database(every_replica.primary)
    every_replica.catch_up()
    remedy = "is a hot standby; .* the primary's URL, or a URL of all hosts with target_session_attrs=read-write"
    with pytest.raises(tenure.StoreUnavailable, match=remedy):
        tenure.Node(every_replica.url(name)).start()
    page = (ROOT / "docs" / "how-to" / "replication.md").read_text()
    ours = re.search(r"picks the primary: `(postgresql://app@db1,db2/app)`", page)[1]
    both = f"127.0.0.1:{every_replica.port},127.0.0.1:{every_replica.primary.port}"
    ours = ours.replace("app@db1,db2/app", f"postgres@{both}/{name}")
    with tenure.Node(ours) as node:
        assert node.election("r").wait(20).token == 1
    every_replica.primary.stop()
    every_replica.promote()
    with tenure.Node(every_replica.url(name)) as node:
        assert node.election("r").leader() is None


def test_term_that_the_promoted_replica_takes_for_the_latest_is_fenced_off(every_replica):
    """Of its end and its successor's term the replica has not heard: only the timeline tells."""
    primary = every_replica.primary
    name = make_database(primary)
    with Desk(primary.url(name)) as old, Desk(primary.url(name)) as new:
        claim = old.lead("r")
        every_replica.catch_up()
        every_replica.cut_off()
        assert new.succeed(old, "r").token > claim.token
    primary.stop()
    every_replica.promote()
    latest = (
        "select r.token from tenure.roles r join tenure.members m on m.id = r.holder and m.ended_at is null"
        " where m.id = %s"
    )
    assert every_replica.execute(latest, [claim.member_id], dbname=name) == [(claim.token,)]
    with psycopg.connect(every_replica.url(name)) as connection, pytest.raises(tenure.Fenced):
        fence(connection, claim, 1.0)


def test_nobody_leads_beside_a_leader_whose_election_the_promoted_replica_lacks(replica, tmp_path):
    """The leader knows the old primary only and goes on believing for most of its TTL, while the others are on the new
    one, where the role is one of theirs."""
    name = make_database(replica.primary)
    with Cluster(replica.url_of_both(name), tmp_path, ttl=TTL_S, takeover="strict") as cluster:
        cluster.make_ledger()
        others = cluster.start(2)
        (leader,) = cluster.start(1, url=replica.primary.url(name))
        permit_no_longer_ttl(cluster)
        known, old_token = cluster.wait_for_leader()
        replica.catch_up()
        replica.cut_off()
        known.tell(f"resign {leader.name}")
        leads, token = cluster.wait_for_leader(old_token)
        assert leads is leader
        leader.tell("write")

        promoting = promote(cluster, replica)
        assert replica.execute("select max(token) from tenure.terms", dbname=name) == [(old_token,)]
        assert leader.wait_event("deposed", token=token)["reason"] == "lapsed"
        successor, _ = wait_for_successor(cluster, token, promoting)
        assert successor in others
        cluster.wait_for_candidates(*others)


def test_synchronous_replica_has_every_acknowledged_write_and_takes_no_more_of_the_old_term(replica, tmp_path):
    name = make_database(replica.primary)
    with replica.synchronous(), Cluster(replica.url_of_both(name), tmp_path, ttl=TTL_S) as cluster:
        cluster.make_ledger()
        for node in cluster.start(3):
            node.tell("writes")
        permit_no_longer_ttl(cluster)
        leader, token = cluster.wait_for_leader()
        leader.tell("write")

        promoting = promote(cluster, replica)
        in_time = cluster.ledger()
        leader.ask("write")
        acknowledged = [line for line in cluster.history.of_kind("write") if line.ok and line.token == token]
        assert len(in_time) >= len(acknowledged) > 0
        assert replica.execute("select token from tenure.terms", dbname=name)[0] == (token,)
        successor, new_token = wait_for_successor(cluster, token, promoting)
        cluster.wait_for_candidates(*cluster.nodes)
        assert {written for _, written in cluster.ledger()[len(in_time) :]} == {new_token}

        # And everything is in place: the next death is seen at once.
        successor.kill()
        cluster.wait_for_leader(new_token)


def limit_ttl(url: str, seconds: float) -> None:
    """Do what `tenure init --max-ttl` does."""
    tenure_registry.Registry(url).create(max_ttl=seconds)


def test_a_raise_of_the_largest_ttl_that_the_promoted_replica_lacks_lets_nobody_lead_beside_another(replica, tmp_path):
    """The leader has the new TTL and knows the old primary only; on the new one the old limit stands."""
    name = make_database(replica.primary)
    limit_ttl(replica.primary.url(name), 2)
    replica.catch_up()
    replica.cut_off()
    limit_ttl(replica.primary.url(name), 30)
    with Cluster(replica.url_of_both(name), tmp_path, takeover="strict") as cluster:
        (leader,) = cluster.start(1, url=replica.primary.url(name), ttl=30)
        _, token = cluster.wait_for_leader()
        promote(cluster, replica)
        (successor,) = cluster.start(1, ttl=2)
        assert cluster.wait_for_leader(token)[0] is successor
        assert not leader.tell("status")["leader"]


@pytest.mark.parametrize("lost", ["the namespace", "the tables"])
def test_a_namespace_that_the_promoted_replica_lacks_lets_nobody_lead_beside_another(replica, tmp_path, lost):
    name = make_database(replica.primary)
    if lost == "the namespace":
        tenure_registry.Registry(replica.primary.url(name), namespace="another").create()
    replica.catch_up()
    replica.cut_off()
    with Cluster(replica.url_of_both(name), tmp_path, takeover="strict", ttl=10) as cluster:
        (leader,) = cluster.start(1, url=replica.primary.url(name))
        _, token = cluster.wait_for_leader()
        promote(cluster, replica)
        (other,) = cluster.start(1)
        leader.wait_event("deposed", token=token)
        assert other.events("elected") == []


def test_init_waits_for_a_new_namespace_on_a_promoted_server_once(replica):
    name = make_database(replica.primary)
    replica.catch_up()
    replica.primary.stop()
    replica.promote()
    url, waits = replica.url(name), []
    with tenure.Node(url, namespace="beside", ttl=3) as node, pytest.raises(tenure.WaitTimeout):
        node.election("r").wait(1)
    tenure_registry.Registry(url).create(max_ttl=5, waits=waits.append)
    tenure_registry.Registry(url).create(max_ttl=5, waits=waits.append)
    assert waits == [pytest.approx(61.2)]
    for namespace in ("default", "made later"):  # for which the same wait counts
        with tenure.Node(url, namespace=namespace, ttl=3) as node:
            assert node.election("r").wait(20).token == TIMELINE_2


def test_node_works_with_the_old_limit_until_a_raise_is_ripe(every_replica, caplog, monkeypatch):
    """And then joins with the new one, but not anew for it."""
    caplog.set_level("INFO")
    url = every_replica.primary.url(make_database(every_replica.primary))
    for limit in (2, 30):
        limit_ttl(url, limit)
    monkeypatch.setattr(timing, "RIPENS_AFTER_S", 3.0)
    with tenure.Node(url, ttl=30) as node:
        member = (node.election("r").wait(20), node.member_id)[1]
        assert (node.ttl, node.stats().ttl) == (2, 2)
        assert "using ttl=2 instead of 30" in caplog.text
        ripe = "select ripe_ttl_ms from tenure.namespaces"
        until(lambda: execute(url, ripe) == [(30_000,)], "a ripe raise")
        assert (node.member_id, node.ttl) == (member, 2)
    with tenure.Node(url, ttl=30) as node:
        node.election("r").wait(20)
        assert node.ttl == 30


@pytest.mark.parametrize("takeover", ["instant", "strict"])
def test_leader_resumes_its_term_on_a_promoted_replica_that_lacks_nothing(replica, tmp_path, takeover):
    """Under the same token, which is below those of the new timeline; and nobody waits for the largest TTL (R18)."""
    name = make_database(replica.primary)
    with replica.synchronous(), Cluster(replica.url_of_both(name), tmp_path, ttl=20, takeover=takeover) as cluster:
        cluster.make_ledger()
        tenure_registry.Registry(replica.primary.url(name)).create(promotion="loses-nothing")
        nodes = cluster.start(3)
        leader, token = cluster.wait_for_leader()
        leader.tell("write")
        promote(cluster, replica)
        leader.wait_event("resumed", token=token)
        leader.tell("write")
        assert [written for _, written in cluster.ledger()] == [token, token]
        incarnations = (
            "select distinct m.incarnation = tenure.incarnation() from tenure.members m where ended_at is null"
        )
        until(lambda: replica.execute(incarnations, dbname=name) == [(True,)], "members that came over")
        assert not [event for node in nodes for event in node.events("deposed")]

        # And the next term of that role has a token of the new timeline.
        leader.kill()
        successor, new_token = cluster.wait_for_leader(token)
        assert successor is not leader
        assert new_token == TIMELINE_2


def test_strict_leader_takes_its_role_at_once_on_a_promoted_replica(replica, tmp_path):
    """The replica lacks its election, and nobody else is elected there before the largest TTL has passed (R22)."""
    name = make_database(replica.primary)
    with Cluster(replica.url_of_both(name), tmp_path, ttl=20, takeover="strict") as cluster:
        cluster.make_ledger()
        tenure_registry.Registry(replica.primary.url(name)).create()
        replica.catch_up()
        replica.cut_off()
        cluster.start(3)
        leader, token = cluster.wait_for_leader()
        promoting_ns = promote(cluster, replica)
        again, new_token = cluster.wait_for_leader(token)
        assert again is leader
        assert new_token == TIMELINE_2
        with tenure_registry.Registry(replica.url(name)) as registry:
            assert registry.waits()[0].reason.startswith("no other node is elected before ")
        took_s = (cluster.elected_at(new_token) - promoting_ns) / 1e9
        print(f"led again {took_s:.2f} s after the promotion")
        assert took_s < 15, "the others wait for 20 s at least"
        leader.tell("write")
        assert [written for _, written in cluster.ledger()] == [new_token]


def test_promoted_replica_that_lacks_nothing_is_trusted_at_once(replica):
    """Even if the namespace's largest TTL is an hour, and nobody is left who could resume."""
    name = make_database(replica.primary)
    with replica.synchronous():
        tenure_registry.Registry(replica.primary.url(name)).create(max_ttl=3600, promotion="loses-nothing")
        with Desk(replica.primary.url(name), ttl=5) as desk:
            desk.lead("r")
            desk.ask(messages.Leave(desk.id))
        replica.primary.stop()
        replica.promote()
    with tenure.Node(replica.url(name), ttl=5) as node:
        assert node.election("r").wait(60).token == TIMELINE_2
    assert replica.execute("select waited_on from tenure.namespaces", dbname=name) == [(None,)]


def test_without_the_word_nodes_of_a_synchronous_replica_wait_and_say_until_when(replica):
    """The limit is the first node's TTL, 10 s at least, and the tables show the wait for it."""
    name = make_database(replica.primary)
    with replica.synchronous():
        with tenure.Node(replica.primary.url(name), ttl=3) as node:
            node.election("r").wait(20)
        replica.primary.stop()
        replica.promote()
    assert replica.execute("select max_ttl_ms, limit_by from tenure.namespaces", dbname=name) == [(10_000, "nodes")]
    with tenure_registry.Registry(replica.url(name)) as registry:
        (wait,) = registry.waits()
        assert (wait.role, wait.ends) == (None, None), "no node has come yet"
        with pytest.raises(tenure.ConfigError, match=r"promotion='loses-nothing' cannot be set while .* waits"):
            tenure_registry.Registry(replica.url(name)).create(promotion="loses-nothing")
        with tenure.Node(replica.url(name), ttl=3) as node:
            election = node.election("r")
            until(registry.members, "a member")
            (wait,) = registry.waits()
            assert wait.reason.startswith("no node is elected before every lease that another server")
            ((joined,),) = replica.execute(
                "select min(joined_at) from tenure.members where ended_at is null", dbname=name
            )
            assert (wait.ends - joined).total_seconds() == pytest.approx(10.2)
            assert not election.is_leader
            election.wait(60)
            assert registry.waits() == []


@pytest.mark.parametrize("word", ["loses-nothing", "may-lose"])
def test_commit_whose_wait_for_the_replica_was_cancelled_counts_only_where_promotions_may_lose_it(replica, word):
    """Although the user's own setting is not to wait at all, and the server may speak any language."""
    name = make_database(replica.primary)
    tenure_registry.Registry(replica.primary.url(name)).create(promotion=word)
    weak = replica.primary.url(name) + "?options=-csynchronous_commit%3Dlocal"
    with Desk(weak) as desk, replica.synchronous():
        desk.stand("r")
        replica.cut_off()
        requests = [messages.Acquire(desk.id, "desk", ("r",), 0), messages.Renew(desk.id)]
        if word == "may-lose":
            assert desk.ask(requests[0]).tokens == {"r": 1}
            assert desk.ask(requests[1]).alive
            return
        waits = f"select wait_event from pg_stat_activity where pid = {desk.session.pid}"
        with ThreadPoolExecutor(1) as thread:
            for request in requests:
                answer = thread.submit(desk.ask, request)
                until(lambda: replica.primary.execute(waits) == [("SyncRep",)], "a commit that waits")
                replica.primary.execute(f"select pg_cancel_backend({desk.session.pid})")
                with pytest.raises(Failed, match="the wait for the replica was cancelled"):
                    answer.result(20)
        replica.follow()
        standing = desk.ask(messages.Renew(desk.id))
        assert [held.token for held in standing.held] == [1], "now the replica has it"


def test_word_is_taken_back_only_with_the_replica(replica):
    """A replica that lacks the commit would still be trusted at once. So it waits, whatever the user's setting."""
    name = make_database(replica.primary)
    weak = replica.primary.url(name) + "?options=-csynchronous_commit%3Dlocal"
    tenure_registry.Registry(weak).create(promotion="loses-nothing")
    waiting = "select pid from pg_stat_activity where wait_event = 'SyncRep' and application_name like 'tenure%'"
    with replica.synchronous():
        replica.cut_off()
        with ThreadPoolExecutor(1) as thread:
            answer = thread.submit(tenure_registry.Registry(weak).create, promotion="may-lose")
            ((pid,),) = until(lambda: replica.primary.execute(waiting), "a commit that waits")
            replica.primary.execute(f"select pg_cancel_backend({pid})")
            with pytest.raises(tenure.StoreUnavailable, match="do not promote it before it has caught up"):
                answer.result(20)
        replica.follow()


def test_operator_is_told_that_the_change_waits_for_the_replica(replica, monkeypatch):
    """The commit is made, and counts as soon as the replica is back: the server does not take it back."""
    url = replica.primary.url(make_database(replica.primary))
    with replica.synchronous():
        said = Answer("init", "--promotion", "loses-nothing", url=url)
        assert (said.code, said.err) == (0, ""), "commits wait, so there is no warning"
        monkeypatch.setattr("tenure.registry.LOOK_TIMEOUT_S", 1.0)
        replica.cut_off()
        said = Answer("init", "--promotion", "may-lose", url=url)
        assert said.code == 2
        assert "no answer within 1 s: if the server is alive, the commit waits for a synchronous replica" in said.err
        assert "the change may still take effect; check with `tenure doctor`" in said.err
        replica.follow()
        promotion = "select promotion from tenure.namespaces"
        until(lambda: execute(url, promotion) == [("may-lose",)], "the change")


def test_step_by_step_candidates_and_the_word_exclude_each_other(postgres_url):
    """A candidate cannot see that its commit did not wait for the replica."""
    manual = tenure.manual
    manual.use(postgres_url)
    assert manual.elect("worker-1").mine
    registry = tenure_registry.Registry(postgres_url)
    with pytest.raises(tenure.ConfigError, match=r"has step-by-step candidates, .*: unregister them, .*\(worker-1\)"):
        registry.create(promotion="loses-nothing")
    assert manual.unregister_candidate("worker-1")
    registry.create(promotion="loses-nothing")
    with pytest.raises(tenure.ConfigError, match="promotion=loses-nothing, which step-by-step candidates do not"):
        manual.elect("worker-1")
    registry.create(promotion="may-lose")
    assert manual.elect("worker-1").mine
    manual.close()


def test_release_that_does_not_know_the_word_is_refused_while_it_stands(replica):
    url = replica.primary.url(make_database(replica.primary))
    oldest = "select value from tenure.meta where name = 'oldest'"
    for word, needed in (("loses-nothing", 6), ("may-lose", 1)):
        tenure_registry.Registry(url).create(promotion=word)
        assert execute(url, oldest) == [(needed,)]


def test_node_and_doctor_warn_while_the_word_cannot_be_true(replica, caplog):
    name = make_database(replica.primary)
    url = replica.primary.url(name)
    tenure_registry.Registry(url).create(promotion="loses-nothing")
    settings = node_settings(url)
    with tenure.Node(url, ttl=2):
        until(lambda: "synchronous_standby_names is empty" in caplog.text, "a warning")
        (finding,) = [one for one in postgres_doctor.examine(settings) if one.check == "promotion"]
        assert (finding.level, finding.remedy[:4]) == ("error", "set ")
        caplog.set_level("INFO")
        with replica.synchronous():
            until(lambda: "commits wait for a replica again" in caplog.text, "the end of the warning")
            (finding,) = [one for one in postgres_doctor.examine(settings) if one.check == "promotion"]
            assert finding.level == "ok"
    assert caplog.text.count("synchronous_standby_names is empty") <= 2
