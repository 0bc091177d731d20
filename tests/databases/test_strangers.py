"""Strangers: what a database role that may only CONNECT can do to the nodes of somebody else."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections import Counter

import psycopg
import pytest
import sqlalchemy

import tenure
from tenure import StoreUnavailable, manual
from tenure.core.protocol import NodeProtocol
from tenure.databases.postgres import session as postgres_session
from tenure.databases.postgres.backend import PostgresBackend
from tenure.databases.postgres.sentinel import CLASS_ID
from tenure.databases.postgres.session import PostgresSession
from tenure.store.control import ControlStore
from tenure.store.dialects import postgresql
from tenure.store.session import Step
from tests.conftest import INSTALLATIONS, fresh_database, missing
from tests.store.test_migrations import at_once
from tests.support.servers import PostgresServer
from tests.support.store_by_hand import Desk, Nodes, connected, execute, until

FAR_BELOW_THE_TTL_S = 10
LONG_TTL = 60
FLOOD_S = 3.0


@contextlib.contextmanager
def stranger_on(server, database):
    """The URL of a role that may connect to the database and has no other privilege."""
    name = f"stranger_{database}"
    server.execute(f'create role "{name}" login')
    try:
        yield server.url(database, user=name)
    finally:
        if server.running:
            server.execute(f'drop role "{name}"')


@pytest.fixture
def stranger_url(postgres_server, postgres_url):
    with stranger_on(postgres_server, postgres_url.rpartition("/")[2]) as url:
        yield url


def channel(kind):
    return postgres_session.channel(postgresql("tenure"), "default", kind)


def sentinel_locks(connection):
    """The keys that a stranger reads from the server's list of locks."""
    rows = connection.execute(
        f"select objid::bigint from pg_locks where locktype = 'advisory' and classid = {CLASS_ID} and granted "
        "and mode = 'ExclusiveLock'"
    )
    return [key for (key,) in rows]


# --- the queue of notifications ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def full_queue():
    """A server whose queue of notifications a stranger has filled, from another database."""
    newest = max(INSTALLATIONS, key=lambda one: one.major, default=None)
    if newest is None or newest.major < 17:
        missing("no PostgreSQL 17 or newer found, whose queue of notifications can be made small")
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(PostgresServer(newest, fsync=False, settings={"max_notify_queue_pages": 64}))
        server.create_database("elsewhere")
        url = stack.enter_context(stranger_on(server, "elsewhere"))
        listener = stack.enter_context(connected(url, autocommit=True))
        listener.execute("listen anything")
        listener.execute("begin")
        listener.execute("select 1")
        sender = stack.enter_context(connected(url, autocommit=True))
        fill = "do $$ begin for n in 1..100000 loop perform pg_notify('anything', repeat('x', 7000) || n); commit; {}"
        with pytest.raises(psycopg.Error, match="too many notifications"):
            sender.execute(fill.format("end loop; end $$"))
        yield server


def test_full_queue_of_notifications_keeps_nobody_from_being_elected(full_queue):
    with fresh_database(full_queue) as url:
        with Nodes(url, ttl=LONG_TTL) as nodes:
            leads, stands = nodes.pair("r")
            leads.resign()
            assert stands.wait(FAR_BELOW_THE_TTL_S).token == 2, "handed over by a resignation"
            with tenure.Registry(url) as registry:
                assert registry.resign("r", timeout=FAR_BELOW_THE_TTL_S).name == "leader"
        with Desk(url, ttl=LONG_TTL) as dead, Nodes(url, ttl=LONG_TTL) as nodes:
            dead.lead("r")
            heir = nodes("heir").election("r")
            dead.session.close()
            assert heir.wait(FAR_BELOW_THE_TTL_S).token == 5, "taken over from the dead"


def test_full_queue_fails_no_transaction_of_the_application(full_queue):
    """A step-by-step election inside a transaction of the application must not make its commit fail."""
    with fresh_database(full_queue) as url:
        with Desk(url):
            pass
        engine = sqlalchemy.create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
        try:
            with engine.begin() as connection:
                assert manual.elect("me", session=connection).mine
            with engine.begin() as connection:
                assert manual.unregister_candidate("me", session=connection)
        finally:
            engine.dispose()


# --- floods -------------------------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch):
    """Counts what the nodes of this process ask the database, by kind."""
    counts = Counter()
    perform = ControlStore.perform

    def counting(store, ask):
        counts[type(ask).__name__] += 1
        return perform(store, ask)

    monkeypatch.setattr(ControlStore, "perform", counting)
    return counts


PAYLOADS = ["vacant somebody", "vacant somebody r", "vacant", "changed somebody", "", " ", "vacant  r  r", "x" * 7999]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["vacant", "changed"])
def test_what_notifications_cause_is_bounded(postgres_url, stranger_url, asked, kind):
    """200 a second, each of which names a vacancy that is none."""
    with Nodes(postgres_url, ttl=LONG_TTL) as nodes, connected(stranger_url, autocommit=True) as stranger:
        leads, stands = nodes.pair("r")
        for election in (leads, stands):
            election.on_event(lambda _: None)
        until(lambda: asked["Leaders"] >= 2, "somebody observes the role")
        asked.clear()
        until_s, number = time.monotonic() + FLOOD_S, 0
        while time.monotonic() < until_s:
            payload = PAYLOADS[number % len(PAYLOADS)]
            stranger.execute("select pg_notify(%s, %s)", [channel(kind), payload])
            number += 1
            time.sleep(0.005)
        assert number > 100
        assert sum(asked.values()) < 2 * 2 * (20 + 6 * FLOOD_S), asked
        assert leads.is_leader


@pytest.mark.long
def test_flood_of_notifications_costs_a_term_a_minute_at_most(postgres_url, stranger_url, caplog):
    """Thousands in a second, on a busy machine too. Renewals may be late until a node stops listening."""
    flood = f"""
        do $$ begin
            for number in 1..100000000 loop
                perform pg_notify('{channel("vacant")}', repeat('x', 790) || number);
                if number % 20 = 0 then
                    commit;
                end if;
            end loop;
        end $$"""
    ended = []
    with (
        Nodes(postgres_url, ttl=10) as nodes,
        caplog.at_level(logging.WARNING, "tenure"),
        contextlib.ExitStack() as stack,
    ):
        leads, stands = pair = nodes.pair("r")
        strangers = [stack.enter_context(connected(stranger_url, autocommit=True)) for _ in range(2)]

        def send(connection):
            with contextlib.suppress(psycopg.Error):
                connection.execute(flood)
            ended.append(connection)

        threads = [threading.Thread(target=send, args=[connection]) for connection in strangers]
        for thread in threads:
            thread.start()
        try:
            until(lambda: caplog.text.count("too many notifications") == 2, "two nodes that listen no more", timeout=60)
            leader, other = until(lambda: (leads.is_leader and pair) or (stands.is_leader and pair[::-1]), "a leader")
            term = leader.term
            assert not term.wait_lost(15)
            assert not ended, "the flood goes on"
            leader.resign()
            assert other.wait(FAR_BELOW_THE_TTL_S).token == term.token + 1
        finally:
            for connection in strangers:
                connection.cancel()
            for thread in threads:
                thread.join()


def test_node_whose_connection_hung_does_not_listen_on_the_next_one(postgres_url, caplog):
    """A flood can keep the server from reading anything that the node asks, for as long as it lasts."""
    who = "select control_pid from tenure.members where ended_at is null"
    with Nodes(postgres_url, ttl=2) as nodes, caplog.at_level(logging.WARNING, "tenure.postgres"):
        nodes("one").election("r").wait(20)
        # Between two renewals: a process that is stopped in a transaction would keep its locks.
        renewals = "select control_pid from tenure.members where ended_at is null and renewals = "
        until(lambda: execute(postgres_url, renewals + "2"), "a second renewal")
        ((hung,),) = until(lambda: execute(postgres_url, renewals + "3"), "a third renewal")
        os.kill(hung, signal.SIGSTOP)
        try:
            until(lambda: [row for row in execute(postgres_url, who) if row != (hung,)], "another connection")
        finally:
            os.kill(hung, signal.SIGCONT)
    assert "the previous connection did not answer" in caplog.text


def test_question_of_the_application_that_hangs_does_not_keep_the_node_from_connecting_again(postgres_url):
    """The node asks it on the connection with which it renews."""
    hung, stop = [], signal.SIGSTOP

    def ask(store):
        hung.append(store.session.pid)
        os.kill(store.session.pid, stop)
        return store.session.read(Step("select 1", {}))[0].rows.count(0)

    who = "select control_pid from tenure.members where ended_at is null"
    with Nodes(postgres_url, ttl=2) as nodes:
        election = nodes("one").election("r")
        election.wait(20)
        asking = threading.Thread(target=pytest.raises, args=(StoreUnavailable, election._engine.query, ask))
        asking.start()
        until(lambda: hung, "a connection that hangs")
        try:
            until(lambda: [row for row in execute(postgres_url, who) if row != (hung[0],)], "another connection")
        finally:
            os.kill(hung[0], signal.SIGCONT)
            asking.join()


def test_node_that_hangs_while_it_stops_listening_connects_again(postgres_url, stranger_url, monkeypatch):
    """In a flood the server may not read the very command that would end the flood for this node."""
    limit = PostgresSession.limit_notifications
    hung = []

    def limit_on_a_server_that_stands_still(session):
        if session._counted > postgres_session.FLOOD_PER_S and not hung:
            hung.append(session.pid)
            os.kill(session.pid, signal.SIGSTOP)
        limit(session)

    monkeypatch.setattr(postgres_session, "FLOOD_PER_S", 5)
    monkeypatch.setattr(PostgresSession, "limit_notifications", limit_on_a_server_that_stands_still)
    who = "select control_pid from tenure.members where ended_at is null"
    with Nodes(postgres_url, ttl=2) as nodes:
        nodes("one").election("r").wait(20)
        execute(stranger_url, *(f"notify \"{channel('vacant')}\", 'nonsense {number}'" for number in range(10)))
        until(lambda: hung, "a connection that hangs")
        try:
            until(lambda: [row for row in execute(postgres_url, who) if row != (hung[0],)], "another connection")
        finally:
            os.kill(hung[0], signal.SIGCONT)


def test_node_listens_again_when_the_flood_is_over(postgres_url, stranger_url, monkeypatch):
    monkeypatch.setattr("tenure.databases.postgres.session.DEAF_S", 0.2)
    heard = []

    def hear(protocol, note, now):
        heard.append(note.rpartition(" ")[2])

    monkeypatch.setattr(NodeProtocol, "notified", hear)
    with Nodes(postgres_url) as nodes, connected(stranger_url, autocommit=True) as stranger:
        nodes("a").election("r").wait(20)
        stranger.execute(
            "select count(pg_notify(%s, 'vacant x ' || number)) from generate_series(1, 2000) number",
            [channel("vacant")],
        )

        def listens():
            stranger.execute("select pg_notify(%s, 'vacant x afterwards')", [channel("vacant")])
            time.sleep(0.05)
            return "afterwards" in heard

        until(listens, "the node listens again")
        assert len(heard) < 2000


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "WIN1252", "UTF8"])
@pytest.mark.twin("WIN1252")
def test_no_payload_harms_a_node(postgres_server, encoding):
    """In some encodings a payload may be no text at all for a client that expects UTF-8."""
    database = f"encoded_{encoding.lower()}"
    postgres_server.execute(
        f"create database {database} template template0 encoding '{encoding}' lc_collate 'C' lc_ctype 'C'"
    )
    url = postgres_server.url(database)
    try:
        with (
            stranger_on(postgres_server, database) as stranger_url,
            Nodes(url, ttl=LONG_TTL) as nodes,
            connected(stranger_url, autocommit=True) as stranger,
        ):
            leads, stands = nodes.pair("r")
            term = leads.term
            stranger.execute("set client_encoding = 'SQL_ASCII'")
            odd = [] if encoding == "UTF8" else [r"E'\x81\xff'", r"E'vacant \xff\xfe r'"]
            for payload in [*(f"'{payload}'" for payload in PAYLOADS), *odd]:
                stranger.execute(f"select pg_notify('{channel('vacant')}', {payload})".encode())
            assert not term.wait_lost(1)
            leads.resign()
            assert stands.wait(FAR_BELOW_THE_TTL_S).token == term.token + 1
            stands.resign()
            assert leads.wait(FAR_BELOW_THE_TTL_S).token == term.token + 2
    finally:
        postgres_server.drop_database(database)


def test_notification_that_fails_is_not_reported_as_a_failure_of_the_transaction(postgres_url, monkeypatch, caplog):
    """Whatever keeps the server from telling the others: what was committed was committed."""
    notify = PostgresSession.notify

    def broken(session, namespace, payload, where=None):
        notify(session, namespace, payload + "x" * 8000, where)

    monkeypatch.setattr(PostgresSession, "notify", broken)
    with Nodes(postgres_url, ttl=LONG_TTL) as nodes, caplog.at_level(logging.INFO, "tenure"):
        leads, stands = nodes.pair("r")
        leads.resign()
        assert stands.wait(FAR_BELOW_THE_TTL_S).token == 2
    assert "payload string too long" in caplog.text
    assert " failed: " not in caplog.text


# --- keys ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def waiting_for(url, keys):
    """A stranger who waits for keys, each on a connection of its own, and keeps what he is granted."""
    with contextlib.ExitStack() as stack:
        threads, waiting = [], []
        for key in keys:
            connection = stack.enter_context(connected(url, autocommit=True))
            waiting.append(connection)
            query = f"select pg_advisory_lock({CLASS_ID}, {key})"

            def wait(connection=connection, query=query):
                with contextlib.suppress(psycopg.Error):
                    connection.execute(query)

            threads.append(threading.Thread(target=wait))
            threads[-1].start()
        yield
        for connection in waiting:
            connection.cancel()
        for thread in threads:
            thread.join()


def waiting_strangers(url):
    (count,) = execute(
        url, "select count(*) from pg_locks where locktype = 'advisory' and not granted and mode = 'ExclusiveLock'"
    )[0]
    return count


def test_stranger_who_waits_for_a_key_delays_a_failover_by_a_look(postgres_url, stranger_url):
    """When the leader dies the stranger holds its key, and that is no sentinel."""
    with Desk(postgres_url, ttl=LONG_TTL) as dead, Nodes(postgres_url, ttl=LONG_TTL) as nodes:
        claim = dead.lead("r")
        with connected(stranger_url, autocommit=True) as stranger:
            keys = sentinel_locks(stranger)
        with waiting_for(stranger_url, keys):
            until(lambda: waiting_strangers(postgres_url) == len(keys), "the stranger waits")
            heir = nodes("heir").election("r")
            dead.session.close()
            assert heir.wait(FAR_BELOW_THE_TTL_S).token == claim.token + 1


def test_stranger_who_takes_the_key_during_a_restart_costs_nobody_a_term(make_postgres_server, monkeypatch):
    server = make_postgres_server(fsync=False)
    database = server.create_database().rpartition("/")[2]
    server.execute("create role nodes login")
    server.execute(f'grant create on database "{database}" to nodes')
    url = server.url(database, user="nodes")  # a superuser would end the stranger's connection
    reconnects = threading.Event()
    reconnects.set()
    open_control = PostgresBackend.open_control

    def open_when_told(backend, *arguments):
        reconnects.wait()
        return open_control(backend, *arguments)

    monkeypatch.setattr(PostgresBackend, "open_control", open_when_told)
    with (
        stranger_on(server, database) as stranger_url,
        Nodes(url, ttl=LONG_TTL) as nodes,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(reconnects.set)
        leads, stands = nodes.pair("r")
        term = leads.term
        with connected(stranger_url, autocommit=True) as stranger:
            keys = sentinel_locks(stranger)
        assert len(keys) == 2
        reconnects.clear()
        server.restart("fast")
        stranger = stack.enter_context(connected(stranger_url, autocommit=True))
        for key in keys:
            stranger.execute(f"select pg_advisory_lock({CLASS_ID}, {key})")
        reconnects.set()
        until(lambda: leads.is_leader, "the leader goes on")
        assert leads.term is term
        assert not stands.is_leader
        # And the next death is seen at once.
        (pid,) = execute(url, "select control_pid from tenure.members where name = 'leader' and ended_at is null")[0]
        execute(url, f"select pg_terminate_backend({pid})")
        assert term.wait_lost(FAR_BELOW_THE_TTL_S)
        until(lambda: leads.is_leader or stands.is_leader, "somebody leads again", timeout=FAR_BELOW_THE_TTL_S)
        stranger.close()


# --- the tables ---------------------------------------------------------------------------------------------


def test_stranger_who_holds_the_lock_of_the_schema_keeps_nobody_from_creating_it(postgres_url, stranger_url):
    with connected(stranger_url, autocommit=True) as stranger:
        stranger.execute("select pg_advisory_lock(pg_catalog.hashtextextended('tenure schema', 0))")
        assert at_once(8, lambda: Desk(postgres_url).close()) == []
    assert execute(postgres_url, "select value from tenure.meta where name = 'version'") != []
