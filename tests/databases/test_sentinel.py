"""Sentinels: locks that live and die with their holder, by one interface; an alarm, and never the authority."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import time
from pathlib import Path

import pytest

from tenure.core import messages
from tenure.databases.mysql.connect import MySqlConnector
from tenure.databases.mysql.sentinel import UserLockSentinel
from tenure.databases.postgres.connect import PostgresConnector
from tenure.databases.postgres.sentinel import CLASS_ID, AdvisoryActions, AdvisorySentinel, AdvisoryWatch
from tenure.databases.sqlite.connect import SqliteConnector
from tenure.databases.sqlite.sentinel import FileSentinel
from tenure.store import migrations
from tenure.store.session import Failed
from tests.conftest import INSTALLATIONS, NO_POSTGRES, missing
from tests.support.store_by_hand import Desk, Nodes, connected, execute, until
from tests.verification.torture.victims import LIBRARIES, TorturedPostgres

KEY = 20_240_229


@pytest.fixture
def make_sentinel(store_url):
    """Makes sentinels on connections of their own, as the lanes of different nodes have them."""
    with contextlib.ExitStack() as stack:

        def make():
            if store_url.startswith("sqlite"):
                connector = SqliteConnector(store_url.partition(":///")[2], 1.0)
                session = connector.open()
                sentinel = FileSentinel(connector.sentinels, session, threading.Event())
                stack.callback(sentinel.abandon)
            elif store_url.startswith("mysql"):
                session = MySqlConnector(store_url, 30.0, "tests").open("tests")
                sentinel = UserLockSentinel(session)
            else:
                session = PostgresConnector(store_url, "tenure", 30.0, "tests").open("tests", 10.0)
                sentinel = AdvisorySentinel(session)
            stack.callback(session.close)
            sentinel.session = session
            return sentinel

        yield make


def test_sentinel_is_held_by_one_and_seen_by_all(make_sentinel):
    holder, other = make_sentinel(), make_sentinel()
    assert holder.hold(KEY)
    assert not other.hold(KEY)
    assert holder.standing([KEY, KEY + 1]) >= {KEY}
    assert KEY in other.standing([KEY])
    holder.release(KEY)
    assert other.hold(KEY)


def test_wait_ends_when_the_holder_lets_go(make_sentinel):
    holder, watcher = make_sentinel(), make_sentinel()
    holder.hold(KEY)
    watcher.standing([KEY])
    woken = queue.Queue()
    thread = threading.Thread(target=lambda: woken.put(watcher.wait(KEY, 30)))
    thread.start()
    began = time.monotonic()
    holder.release(KEY)
    woken.get(timeout=20)
    assert time.monotonic() - began < 5
    thread.join()


def test_wait_ends_when_the_holders_connection_does(make_sentinel):
    holder, watcher = make_sentinel(), make_sentinel()
    holder.hold(KEY)
    watcher.standing([KEY])
    woken = queue.Queue()
    thread = threading.Thread(target=lambda: woken.put(watcher.wait(KEY, 30)))
    thread.start()
    holder.session.close()
    holder.abandon()  # what the end of a process does to its descriptors
    woken.get(timeout=20)
    thread.join()
    assert KEY not in watcher.standing([KEY])


def test_wait_ends_after_its_slice_and_leaves_nothing_held(make_sentinel):
    holder, watcher, third = make_sentinel(), make_sentinel(), make_sentinel()
    holder.hold(KEY)
    watcher.wait(KEY, 0.05)
    assert KEY in watcher.standing([KEY])
    holder.release(KEY)
    watcher.wait(KEY, 0.05)
    assert third.hold(KEY), "the wait itself does not lock the key"


def test_wait_that_times_out_as_the_lock_is_granted_leaves_nothing_held(every_postgres_url):
    """The server's process sleeps through both; when it wakes, it has the lock and fails all the same."""
    connector = PostgresConnector(every_postgres_url, "tenure", 30.0, "tests")
    with (
        contextlib.closing(connector.open("holds", 10.0)) as holds,
        contextlib.closing(connector.open("waits", 10.0)) as waits,
    ):
        holder, slice_s = AdvisorySentinel(holds), 0.5
        assert holder.hold(KEY)
        thread = threading.Thread(target=AdvisorySentinel(waits).wait, args=(KEY, slice_s))
        thread.start()
        until(lambda: execute(every_postgres_url, f"select 1 from pg_locks where pid = {waits.pid} and not granted"))
        os.kill(waits.pid, signal.SIGSTOP)
        try:
            holder.release(KEY)
            time.sleep(slice_s)
        finally:
            os.kill(waits.pid, signal.SIGCONT)
        thread.join()
        assert holder.hold(KEY)


def test_keys_of_other_databases_do_not_count(postgres_server, postgres_url):
    """The server's list of locks is one for all databases."""
    elsewhere = postgres_server.create_database("elsewhere")
    try:
        with contextlib.ExitStack() as stack:
            here, there = (
                AdvisorySentinel(
                    stack.enter_context(
                        contextlib.closing(PostgresConnector(url, "tenure", 30.0, "tests").open("tests", 10))
                    )
                )
                for url in (postgres_url, elsewhere)
            )
            assert there.hold(KEY)
            assert here.standing([KEY]) == set()
            assert here.hold(KEY)
            assert here.standing([KEY]) == {KEY}
    finally:
        postgres_server.drop_database("elsewhere")


@pytest.mark.parametrize(
    "lock",
    ["pg_advisory_lock({key})", "pg_advisory_lock({other_class}, {key})", "pg_advisory_lock_shared({class_id}, {key})"],
)
def test_other_locks_of_the_same_number_do_not_count(postgres_url, lock):
    with (
        connected(postgres_url) as stranger,
        contextlib.closing(PostgresConnector(postgres_url, "tenure", 30.0, "tests").open("tests", 10)) as session,
    ):
        stranger.execute("select " + lock.format(key=KEY, class_id=CLASS_ID, other_class=CLASS_ID + 1))
        assert AdvisorySentinel(session).standing([KEY]) == set()


def test_slice_stays_below_what_the_server_would_log(postgres_server, postgres_url):
    def slice_with(**settings):
        with (
            postgres_server.configured(**settings),
            contextlib.closing(PostgresConnector(postgres_url, "tenure", 30.0, "tests").open("tests", 10)) as session,
        ):
            sentinel = AdvisorySentinel(session)
            sentinel.survey(None, 0)
            return sentinel.slice_s

    assert slice_with(log_lock_waits=False, log_min_duration_statement=-1) == 1.0
    assert slice_with(log_lock_waits=True, deadlock_timeout="1s") == pytest.approx(0.8)
    assert slice_with(log_lock_waits=True, deadlock_timeout="250ms") == pytest.approx(0.2)
    assert slice_with(log_min_duration_statement=500) == pytest.approx(0.4)
    assert slice_with(log_min_duration_statement=500, log_lock_waits=True, deadlock_timeout="5ms") == pytest.approx(0.4)


@pytest.mark.parametrize(
    "settings", [{"log_min_duration_statement": 5}, {"log_lock_waits": True, "deadlock_timeout": 5}]
)
def test_settings_that_log_every_wait_do_not_make_a_node_ask_more_often(
    postgres_server, postgres_url, monkeypatch, settings
):
    """What the server logs in any case is not worth a hundred looks a second."""
    looks = []
    perform = AdvisoryWatch.perform

    def counting(watch, ask):
        looks.append(ask)
        return perform(watch, ask)

    monkeypatch.setattr(AdvisoryWatch, "perform", counting)
    with postgres_server.configured(**settings), Nodes(postgres_url) as nodes:
        nodes.pair("r")
        time.sleep(1.2)  # the first looks are at once
        looks.clear()
        time.sleep(2)
        assert 2 <= len(looks) <= 2 * 2 * 5


@pytest.mark.long
def test_waits_that_the_server_ends_too_early_do_not_make_a_node_ask_more_often(monkeypatch):
    """PostgreSQL does that while its clock is behind and deadlock_timeout is short."""
    if not LIBRARIES:
        missing("no libfaketime found: install faketime")
    if not INSTALLATIONS:
        missing(NO_POSTGRES)
    looks = []
    perform = AdvisoryWatch.perform
    monkeypatch.setattr(AdvisoryWatch, "perform", lambda watch, ask: (looks.append(ask), perform(watch, ask))[1])
    with TorturedPostgres(INSTALLATIONS[0], fsync=False) as server, Nodes(server.create_database()) as nodes:
        nodes.pair("r")
        server.configure(deadlock_timeout="10ms", log_lock_waits=True, log_min_duration_statement="10ms")
        server.clock.set("-3600")
        time.sleep(1.2)  # the waits that are under way end as before
        looks.clear()
        time.sleep(2)
        assert 2 <= len(looks) <= 2 * 2 * 6


# --- the knock ----------------------------------------------------------------------------------------------


def watching(url, begin_knock, stack):
    """A look that waits for KEY, which another connection holds, and that connection."""
    connector = PostgresConnector(url, "tenure", 30.0, "tests")
    holder, session = (stack.enter_context(contextlib.closing(connector.open("tests", 10.0))) for _ in range(2))
    migrations.prepare(session)
    assert AdvisorySentinel(holder).hold(KEY)
    sentinel = AdvisorySentinel(session)
    begin = connector.knocker(session) if begin_knock is None else begin_knock
    return AdvisoryWatch(session, sentinel, AdvisoryActions(session, sentinel), "n", begin), holder


def look_for(seconds):
    return messages.Look("me", KEY, seconds, 4)


@pytest.mark.parametrize("knock", [None, lambda: lambda: None, lambda: lambda: "another server"])
def test_look_knocks_when_the_awaited_sentinel_falls(postgres_url, knock):
    with contextlib.ExitStack() as stack:
        watch, holder = watching(postgres_url, knock, stack)
        assert not watch.look(look_for(0.05)).knocked, "the sentinel stands"
        ends = threading.Timer(0.3, holder.close)
        ends.start()
        assert watch.look(look_for(30)).knocked == (knock is None)
        ends.join()
        assert not watch.look(messages.Look("me", None, 0, 4)).knocked, "waits for none"


def test_knock_begins_before_the_members_are_read_and_ends_even_if_the_look_fails(postgres_url):
    asked, ended = [], []
    with contextlib.ExitStack() as stack:
        watch, holder = watching(postgres_url, lambda: (asked.append(1), lambda: ended.append(1))[1], stack)
        holder.close()
        execute(postgres_url, "drop table tenure.members")
        with pytest.raises(Failed):
            watch.look(look_for(5))
        assert (asked, ended) == ([1], [1])


# --- squatters ----------------------------------------------------------------------------------------------


def keys(url):
    return [key for (key,) in execute(url, "select sentinel_key from tenure.members where ended_at is null")]


def test_squatted_key_of_a_living_leader_robs_nobody(postgres_url):
    with Nodes(postgres_url) as nodes, connected(postgres_url, autocommit=True) as squatter:
        leads, stands = nodes.pair("r")
        for key in keys(postgres_url):
            squatter.execute(f"select pg_try_advisory_lock({CLASS_ID}, {key})")
            squatter.execute(f"select pg_try_advisory_lock_shared({CLASS_ID}, {key})")
        assert not leads.term.wait_lost(2)
        assert not stands.is_leader


def test_node_whose_key_is_taken_joins_with_another(postgres_url, monkeypatch):
    with connected(postgres_url, autocommit=True) as squatter, Nodes(postgres_url) as nodes:
        refused = []
        hold = AdvisorySentinel.hold

        def squatted_once(sentinel, key):
            if not refused:
                refused.append(key)
                squatter.execute(f"select pg_advisory_lock({CLASS_ID}, {key})")
            return hold(sentinel, key)

        monkeypatch.setattr(AdvisorySentinel, "hold", squatted_once)
        assert nodes("a").election("r").wait(20).token == 1
        assert keys(postgres_url) != refused


# --- files --------------------------------------------------------------------------------------------------


def sentinel_files(url):
    return Path(url.partition(":///")[2] + ".sentinels")


def test_missing_sentinel_file_proves_nothing(sqlite_url):
    with Nodes(sqlite_url) as nodes:
        leads, stands = nodes.pair("r")
        for file in sentinel_files(sqlite_url).iterdir():
            file.unlink()
        assert not leads.term.wait_lost(2)
        assert not stands.is_leader


def test_files_of_the_dead_are_swept_and_those_of_the_living_stay(sqlite_url):
    from tenure.core import messages

    with Desk(sqlite_url) as desk, Desk(sqlite_url) as dead:
        dead.close()
        assert len(list(sentinel_files(sqlite_url).glob("*.lock"))) == 2
        desk.ask(messages.Tidy())
        assert len(list(sentinel_files(sqlite_url).glob("*.lock"))) == 2, "not ended yet"
        desk.end(dead.id)
        desk.ask(messages.Tidy())
        (left,) = sentinel_files(sqlite_url).glob("*.lock")
        assert desk.store._key == int(left.stem)


def test_sentinels_are_private(sqlite_url):
    with Desk(sqlite_url):
        directory = sentinel_files(sqlite_url)
        assert directory.stat().st_mode & 0o077 == 0
        assert {file.stat().st_mode & 0o077 for file in directory.iterdir()} == {0}
