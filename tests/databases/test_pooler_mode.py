"""Behind a pooler a session's lock belongs to nobody, so a node runs on its lease alone and leaves no trace.

The pooler is a real PgBouncer, with fewer server connections than there are nodes.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time

import psycopg
import pytest

import tenure
from tenure.core import messages
from tenure.databases.postgres.backend import PostgresBackend
from tenure.databases.postgres.connect import PostgresConnector
from tenure.errors import StoreUnavailable
from tenure.store.session import Step
from tests.support.cluster import PATIENCE_S, ROOT, Cluster
from tests.support.store_by_hand import Desk, execute, until

pytestmark = pytest.mark.long

TTL_S = 2.0
BOUND_S = 20.0
"""Far more than a TTL, a look and a slow machine."""
LONG_TTL_S = 30.0
AT_ONCE_S = 10.0
"""Far more than a look and a slow machine; far less than the long TTL."""

# What belongs to a server connection and would be there for the next client of the pooler.
# Those of the language appear when somebody first uses it, and are nobody's.
SETTINGS = "select name, setting, source from pg_settings where name not like 'plpgsql.%' order by name"
LEFT_BEHIND = {
    "advisory locks": "select classid, objid from pg_locks where locktype = 'advisory'",
    "prepared statements": "select name, statement from pg_prepared_statements",
    "channels": "select * from pg_listening_channels()",
    "temporary tables": "select relname from pg_class where relpersistence = 't'",
}


@pytest.fixture
def pooler(postgres_server, make_pgbouncer):
    return make_pgbouncer(postgres_server, pool_size=2)


def members(cluster):
    """The living members: name and sentinel."""
    return dict(cluster.execute("select name, sentinel_key from tenure.members where ended_at is null"))


def test_commits_through_a_pooler_are_on_disk(postgres_server, postgres_url, pooler):
    database = postgres_url.rpartition("/")[2]
    postgres_server.execute(f"alter database {database} set synchronous_commit = off")
    connector = PostgresConnector(pooler.through(postgres_url), "tenure", TTL_S, "test")
    with contextlib.closing(connector.open("control", TTL_S)) as session:
        assert session.pooled
        assert session.read(Step("select pg_catalog.current_setting('synchronous_commit')", {}))[0].rows == [("local",)]


def test_one_leader_through_kill_and_pause(pooler, postgres_url, tmp_path):
    with Cluster(pooler.through(postgres_url), tmp_path, ttl=TTL_S) as cluster:
        cluster.make_ledger()
        for node in cluster.start(3):
            node.tell("writes")
        leader, token = cluster.wait_for_leader()
        assert members(cluster) == dict.fromkeys(["node-0", "node-1", "node-2"])

        killed = leader.kill()
        leader, new_token = cluster.wait_for_leader(token)
        assert (cluster.elected_at(new_token) - killed) / 1e9 < BOUND_S
        leader.tell("write")

        stopped = leader.stop()
        successor, token = cluster.wait_for_leader(new_token)
        assert (cluster.elected_at(token) - stopped) / 1e9 < BOUND_S
        woken = leader.cont()
        assert leader.ask("ensure")["error"] == "LeadershipLost"
        leader.assert_fenced()
        assert leader.wait_event("leaderchanged", token=token)["name"] == successor.name
        reads = [
            line for line in cluster.history.of_kind("read") if line.node == leader.name and line.at_before >= woken
        ]
        assert reads
        assert not any(read.leader for read in reads)
        successor.tell("write")
        assert successor.tell("status")["leader"]


def test_the_same_leader_goes_on_when_the_pooler_restarts_and_a_leave_costs_a_look(pooler, postgres_url, tmp_path):
    with Cluster(pooler.through(postgres_url), tmp_path, ttl=LONG_TTL_S) as cluster:
        cluster.make_ledger()
        cluster.start(3)
        leader, token = cluster.wait_for_leader()
        restarted = cluster.fault("the pooler restarts")
        pooler.restart()
        leader.tell("write")
        for node in cluster.nodes:  # each by its own connection, which must be back: nobody hears a leave without one
            cluster.wait_for_candidates(node, *cluster.nodes)
        assert [node.events("elected", "deposed", "suspended", since=restarted) for node in cluster.nodes] == [[]] * 3
        assert leader.tell("status") == {**leader.tell("status"), "leader": True, "token": token}

        left = cluster.fault("leave", leader.name)
        leader.tell("leave")
        successor, new_token = cluster.wait_for_leader(token)
        assert (cluster.elected_at(new_token) - left) / 1e9 < AT_ONCE_S
        successor.tell("write")


def test_other_clients_of_the_pooler_find_nothing_of_ours(postgres_server, postgres_url, make_pgbouncer):
    """They share the one server connection with everything that a node does, and with the application's writes."""
    url = make_pgbouncer(postgres_server, pool_size=1).through(postgres_url)
    with (
        psycopg.connect(url, autocommit=True, prepare_threshold=None, application_name="tests") as client,
        psycopg.connect(postgres_url, autocommit=True) as direct,
    ):

        def look():
            [(renewals,)] = direct.execute("select max(renewals) from tenure.members").fetchall()
            assert client.execute(SETTINGS).fetchall() == before
            assert {what: client.execute(text).fetchall() for what, text in LEFT_BEHIND.items()} == nothing
            return renewals

        client.execute("do $$ begin end $$")  # loads PL/pgSQL, which has settings of its own
        before = client.execute(SETTINGS).fetchall()
        nothing = {what: [] for what in LEFT_BEHIND}
        client.execute("create table work (n integer)")
        [(backend,)] = client.execute("select pg_backend_pid()").fetchall()
        # A long TTL: with all of them on one connection, a busy machine would let a short lease lapse.
        with tenure.Node(url, ttl=20, renew_every=0.3) as node, node.lead("role", timeout=PATIENCE_S) as term:
            election = node.election("role")
            election.on_event(print)  # which listens, where there is something to hear
            assert (election.leader().token, len(election.candidates())) == (term.token, 1)
            renewals = look()
            for _ in range(2):  # a driver that prepares would leave the first one's statement for the second
                with term.transaction() as transaction:
                    for n in range(10):
                        transaction.execute("insert into work values (%s)", [n])
                look()
            with pytest.raises(ZeroDivisionError), term.transaction():
                _ = 1 / 0
            deadline = time.monotonic() + PATIENCE_S
            while look() < renewals + 3:
                assert time.monotonic() < deadline
            # Before the node closes: it may do so before the pooler has read the end of the last reply, and the pooler
            # then replaces its connection to the server.
            assert client.execute("select count(*), pg_backend_pid() from work").fetchall() == [(20, backend)]
        look()


def test_nothing_follows_the_end_of_a_transaction_which_would_reserve_a_connection_of_the_pool(
    pooler, postgres_url, tmp_path
):
    connector = PostgresConnector(pooler.through(postgres_url), "tenure", TTL_S, "test")
    with contextlib.closing(connector.open("test", 10)) as session, (tmp_path / "trace").open("w+") as trace:
        session.connection.pgconn.trace(trace.fileno())
        # The replies take a while, so psycopg has to wait for them.
        for _ in range(3):
            session.run(Step("select pg_sleep(0.05)", {}))
        session.connection.pgconn.untrace()
        sent = re.findall(r"\tF\t\d+\t(Sync|Flush)", (tmp_path / "trace").read_text())
    assert sent == ["Sync"] * 3


def test_what_follows_a_commit_has_the_settings_of_every_transaction(postgres_url, pooler):
    """Operators of a stranger in the search path would run as the node's user, and a locked table would stop it."""
    execute(postgres_url, "create table seen (path text, wait text)")
    connector = PostgresConnector(pooler.through(postgres_url), "tenure", TTL_S, "test")
    with contextlib.closing(connector.open("test", 10)) as session:
        settings = "current_setting('search_path'), current_setting('lock_timeout')"
        session.follow(Step(f"insert into public.seen select {settings}", {}))
        session.run(Step("select 1", {}))
    assert execute(postgres_url, "select * from seen") == [("pg_catalog", "100ms")]


def test_a_resignation_does_not_wait_for_a_table_that_an_operator_has_locked(postgres_url, pooler):
    with Desk(pooler.through(postgres_url), mode="lease") as desk, psycopg.connect(postgres_url) as operator:
        term = desk.lead("r")
        operator.execute("lock table tenure.candidates in access exclusive mode")
        assert desk.ask(messages.Vacate(desk.id, "r", term.token)).done


@pytest.mark.parametrize("pool_mode", ["transaction", "session"])
def test_a_pooler_is_detected_and_lease_mode_picked_with_one_word_of_warning(
    postgres_server, postgres_url, make_pgbouncer, caplog, pool_mode
):
    url = make_pgbouncer(postgres_server, pool_mode=pool_mode).through(postgres_url)
    with tenure.Node(url, name="n") as node, node.lead("role", timeout=PATIENCE_S):
        assert node.mode == "lease"
    [warning] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "mode lease" in warning
    assert "pooler" in warning
    assert "direct_url=" in warning

    caplog.clear()
    with tenure.Node(url, name="n", mode="lease") as node, node.lead("role", timeout=PATIENCE_S):
        assert node.mode == "lease"
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("pool_mode", ["transaction", "session"])
def test_asked_for_what_needs_a_session_of_its_own_a_node_refuses(
    postgres_server, postgres_url, make_pgbouncer, pool_mode
):
    url = make_pgbouncer(postgres_server, pool_mode=pool_mode).through(postgres_url)
    for settings in ({"mode": "hybrid"}, {"mode": "lock"}, {"direct_url": url}):
        with pytest.raises(tenure.PoolerDetected, match=r"direct_url=.*mode='lease'"):
            tenure.Node(url, **settings).start()


def test_a_pooler_without_transactions_is_refused_in_every_mode(postgres_server, postgres_url, make_pgbouncer):
    url = make_pgbouncer(postgres_server, pool_mode="statement").through(postgres_url)
    for mode in ("auto", "lease", "hybrid", "lock"):
        with pytest.raises(tenure.PoolerDetected, match=r"pool_mode = transaction .*direct_url="):
            tenure.Node(url, mode=mode).start()


def test_the_example_of_the_page_is_hybrid(pooler, postgres_url):
    page = (ROOT / "docs" / "how-to" / "poolers.md").read_text()
    example = re.search(r"```py\n(.*?)```", page, re.DOTALL)[1]
    pages = ("postgresql://app@pgbouncer:6432/app", "postgresql://app@postgres:5432/app")
    for written, real in zip(pages, (pooler.through(postgres_url), postgres_url), strict=True):
        assert written in example
        example = example.replace(written, real)
    names = {"tenure": tenure}
    exec(example, names)
    with names["node"] as node:
        assert node.mode == "hybrid"


def test_a_direct_url_brings_back_failover_at_once(pooler, postgres_url, tmp_path):
    pooled = pooler.through(postgres_url)
    with Cluster(pooled, tmp_path, ttl=LONG_TTL_S, direct_url=postgres_url) as cluster:
        cluster.make_ledger()
        cluster.start(2)
        leader, token = cluster.wait_for_leader()
        assert None not in members(cluster).values()
        cluster.start(1, direct_url=None)  # has no proof of anything, and is in nobody's way
        pooler.restart()  # only the application's transactions go through it
        leader.tell("write")
        assert leader.events("deposed", "suspended") == []
        killed = leader.kill()
        leader, token = cluster.wait_for_leader(token)
        assert (cluster.elected_at(token) - killed) / 1e9 < AT_ONCE_S
        leader.tell("write")
    with tenure.Node(pooled, direct_url=postgres_url, ttl=LONG_TTL_S, namespace="another") as node:
        assert node.mode == "hybrid"
        with node.lead("role", timeout=PATIENCE_S) as term, term.transaction() as transaction:
            backend = transaction.execute("select pg_backend_pid()").fetchone()[0]
            assert backend in [server["remote_pid"] for server in pooler.admin("show servers")]


def test_nodes_on_both_sides_of_the_pooler_elect_one_leader(pooler, postgres_url, tmp_path):
    """Neither side has proof of the other's death, so silence decides."""
    with Cluster(pooler.through(postgres_url), tmp_path, ttl=TTL_S) as cluster:
        cluster.make_ledger()
        (direct,) = cluster.start(1, url=postgres_url)
        _, token = cluster.wait_for_leader()
        (pooled,) = cluster.start(1)
        for node in cluster.nodes:
            node.tell("writes")
        sentinels = members(cluster)
        assert sentinels[direct.name] is not None
        assert sentinels[pooled.name] is None

        stopped = direct.stop()
        assert cluster.wait_for_leader(token) == (pooled, token + 1)
        assert (cluster.elected_at(token + 1) - stopped) / 1e9 < BOUND_S
        direct.cont()
        direct.assert_fenced()
        cluster.wait_for_candidates(direct)

        killed = pooled.kill()
        assert cluster.wait_for_leader(token + 1) == (direct, token + 2)
        assert (cluster.elected_at(token + 2) - killed) / 1e9 < BOUND_S


def test_a_pooler_that_is_switched_to_a_promoted_replica_leaves_the_role_to_its_leader(
    replica, postgres_url, make_pgbouncer, tmp_path
):
    """The replica lacks the last term, and the pooler keeps its clients: they find out by themselves (R22)."""
    pooler = make_pgbouncer(replica.primary, pool_size=2)
    with Cluster(pooler.through(postgres_url), tmp_path, ttl=TTL_S) as cluster:
        cluster.make_ledger()
        cluster.start(2)
        leader, token = cluster.wait_for_leader()
        replica.catch_up()
        replica.cut_off()
        leader.tell("resign")
        leader, token = cluster.wait_for_leader(token)
        leader.tell("write")
        replica.promote()

        cluster.fault("the pooler leads elsewhere")
        pooler.switch(replica)
        assert leader.wait_event("deposed", token=token)["reason"] == "the server was replaced"
        leader.assert_fenced()
        successor, new_token = cluster.wait_for_leader(token)
        assert (successor, new_token >> 40) == (leader, 1)
        successor.tell("write")


def test_pooler_without_a_free_connection_is_an_error_at_the_start_and_keeps_nobody_from_closing(
    postgres_server, postgres_url, make_pgbouncer
):
    pooled = make_pgbouncer(postgres_server, pool_size=1).through(postgres_url)
    with psycopg.connect(pooled) as busy:
        busy.execute("select 1")
        with pytest.raises(StoreUnavailable, match="no answer within 5 s"):
            tenure.Node(pooled, name="impatient").start()
        node = tenure.Node(pooled, name="closed", start="wait")
        closing = threading.Timer(0.5, node.close)
        closing.start()
        with pytest.raises(tenure.NodeClosed):
            node.start()
        closing.join()
        assert [thread.name for thread in threading.enumerate() if "-closed" in thread.name] == []


def test_urls_that_lead_to_different_databases_are_refused(postgres_server, postgres_url, pooler):
    with pytest.raises(tenure.ConfigError, match="lead to different databases"):
        tenure.Node(pooler.through(postgres_url), direct_url=postgres_server.url("postgres")).start()


def test_node_that_cannot_watch_the_others_says_so_once(
    postgres_server, postgres_url, make_pgbouncer, monkeypatch, caplog
):
    monkeypatch.setattr("tenure.databases.connecting.CONNECT_TIMEOUT_S", 3)
    pooled = make_pgbouncer(postgres_server, pool_size=1, pool_mode="session").through(postgres_url)

    def told():
        return [record for record in caplog.records if "cannot watch the other nodes" in record.message]

    # The control lane gets the only connection: the watch lane does not ask for one before.
    controlled = threading.Event()
    open_control, open_watch = PostgresBackend.open_control, PostgresBackend.open_watch

    def open_control_first(backend, *args):
        opened = open_control(backend, *args)
        controlled.set()
        return opened

    def open_watch_after_it(backend):
        assert controlled.wait(20)
        return open_watch(backend)

    monkeypatch.setattr(PostgresBackend, "open_control", open_control_first)
    monkeypatch.setattr(PostgresBackend, "open_watch", open_watch_after_it)
    with tenure.Node(pooled, ttl=1) as node:
        node.election("r").wait(20)
        until(told, "a warning", 30)
    assert len(told()) == 1
    assert told()[0].levelname == "WARNING"
