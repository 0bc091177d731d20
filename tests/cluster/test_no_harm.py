"""Promise 6: no harm to the database. Idle or busy, Tenure costs little, says nothing in the log and leaves nothing."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter

import psutil
import pytest

import tenure
from tenure.core import messages
from tenure.databases.postgres.sentinel import AdvisorySentinel
from tenure.store import tidying
from tenure.store.session import Step
from tests.conftest import INSTALLATIONS, NO_POSTGRES, missing
from tests.support.servers import PostgresServer
from tests.support.store_by_hand import QUICK, Desk, connect, execute, until

IDLE_S = 60.0
SETTINGS = [{"log_lock_waits": True}, {"log_min_duration_statement": 500}]
STALLS = 20
"""What a busy machine may add by standing still. A wait that is too long is logged each time: 180 times and more."""


def members_of(election):
    return {candidate.name for candidate in election.candidates()}


@contextlib.contextmanager
def cluster(url, roles, nodes=3, **settings):
    """A leader of every role and its standbys, all of them settled."""
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(tenure.Node(url, name=f"n{number}", **settings)) for number in range(nodes)]
        for role in roles:
            running[0].election(role)
        for role in roles:
            running[0].election(role).wait(60)
        for node in running[1:]:
            for role in roles:
                node.election(role)
        for role in (roles[0], roles[-1]):
            until(lambda role=role: len(members_of(running[0].election(role))) == nodes, "all standing")
        yield running
        closing = [threading.Thread(target=node.close) for node in running]  # together: each may take a slice
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()


# --- a minute of doing nothing ------------------------------------------------------------------------------


class Horizons(threading.Thread):
    """Watches how long any of the nodes' connections holds the vacuum horizon at one place, while time goes on."""

    def __init__(self, server):
        super().__init__()
        self.longest_s = 0.0
        self.seen = 0
        self._server = server
        self._over = threading.Event()

    def run(self):
        since = {}
        with contextlib.closing(self._server.connect()) as connection:
            while not self._over.wait(0.05):
                connection.execute("select pg_current_xact_id()")  # or a new snapshot would look like the old one
                rows = connection.execute(
                    "select pid, backend_xmin::text, extract(epoch from clock_timestamp()) from pg_stat_activity"
                    " where application_name like 'tenure %' and backend_xmin is not null"
                ).fetchall()
                self.seen += len(rows)
                since = {(pid, xmin): since.get((pid, xmin), now) for pid, xmin, now in rows}
                self.longest_s = max([self.longest_s, *(float(now - since[pid, xmin]) for pid, xmin, now in rows)])

    def stop(self):
        self._over.set()
        self.join()


@pytest.mark.long
@pytest.mark.xdist_group("idle")
def test_idle_minute_leaves_no_line_in_the_log_and_holds_no_horizon():
    if not INSTALLATIONS:
        missing(NO_POSTGRES)
    with contextlib.ExitStack() as stack:
        # One setting on the first installation and the other on the last, both in the same minute.
        servers = [
            stack.enter_context(PostgresServer(installation, fsync=False, settings=settings))
            for installation, settings in zip((INSTALLATIONS[0], INSTALLATIONS[-1]), SETTINGS, strict=True)
        ]
        for server in servers:
            stack.enter_context(cluster(server.create_database(), ["r"]))
        horizons = [Horizons(server) for server in servers]
        for horizon in horizons:
            horizon.start()
        time.sleep(1)  # whatever the beginning has to say
        marks = [server.log_mark() for server in servers]
        time.sleep(IDLE_S)
        lines = [
            [line for line in server.log_lines(mark) if not line.startswith("\t")]  # one line for each thing said
            for server, mark in zip(servers, marks, strict=True)
        ]
        for horizon in horizons:
            horizon.stop()
    for server, said in zip(servers, lines, strict=True):
        assert len(said) <= STALLS, (server.installation.id, said)
    for horizon in horizons:
        assert horizon.seen, "the watchers wait, and that shows"
        assert horizon.longest_s < 2.5, "a slice is a second at most; the rest is what a busy machine adds"


# --- what it costs ------------------------------------------------------------------------------------------


SENT = re.compile(r"/tenure (?:control|watch|knock) default/(\w+) LOG: +(?:execute|statement)")


def statements_by_node(lines):
    """How many statements each node sent, by the names of its connections in the log."""
    sent = [SENT.search(line) for line in lines]
    return Counter(match[1] for match in sent if match)


@pytest.mark.long
def test_statements_do_not_grow_with_the_roles(postgres_server):
    counts = {}
    with contextlib.ExitStack() as stack:
        for number in (1, 200):
            url = postgres_server.create_database(f"with_{number}_roles")
            stack.callback(postgres_server.drop_database, f"with_{number}_roles")
            execute(url, f"alter database with_{number}_roles set log_statement = 'all'")
            stack.enter_context(cluster(url, [f"r{role}" for role in range(number)], nodes=2, ttl=4))
        time.sleep(1)
        mark = postgres_server.log_mark()
        time.sleep(8)
        lines = postgres_server.log_lines(mark)
        for number in (1, 200):
            counts[number] = statements_by_node([line for line in lines if f"@with_{number}_roles/" in line])
    for node in ("n0", "n1"):
        assert 0 < counts[1][node] < 8 * 25, "about 8 for a renewal, every second here, and 4 for a look"
        assert counts[200][node] < counts[1][node] * 1.5


def test_thousand_roles_need_two_connections_and_few_transactions(postgres_server, postgres_url):
    database = postgres_url.rpartition("/")[2]
    roles = [f"role-{number}" for number in range(1000)]
    with cluster(postgres_url, roles, nodes=2) as (leader, standby):
        assert all(leader.election(role).is_leader for role in roles)
        assert len(postgres_server.backends(database)) == 4
        ((acquiring, acquired),) = execute(
            postgres_url, "select count(distinct xmin::text), count(*) from tenure.terms"
        )
        assert acquired == 1000
        assert acquiring < 200
        leader.close()
        tokens = {standby.election(role).wait(30).token for role in roles}
        assert tokens == {2}
        ((acquiring,),) = execute(postgres_url, "select count(distinct xmin::text) from tenure.terms where token = 2")
        assert acquiring < 20, "a takeover is a batch"


def test_no_notification_without_a_change(postgres_server, postgres_url):
    """Nobody is woken for nothing: an idle cluster sends no notification at all."""
    with (
        cluster(postgres_url, ["r"], nodes=2, **QUICK),
        contextlib.closing(connect(postgres_url, autocommit=True)) as connection,
    ):
        channels = execute(postgres_url, "select query from pg_stat_activity where query like 'listen \"tenure%'")
        (channel,) = re.findall(r'"(tenure_\w+)"', channels[0][0]) if channels else ("",)
        if channel:
            connection.execute(f'listen "{channel}"')
            assert list(connection.notifies(timeout=2.5)) == []


# --- what is left after it ----------------------------------------------------------------------------------


def threads_of(name):
    return [thread.name for thread in threading.enumerate() if name in thread.name]


def descriptors():
    gc.collect()
    return psutil.Process(os.getpid()).num_fds()


def test_nothing_is_left_after_close(store_url, postgres_server):
    def live_once():
        with cluster(store_url, ["r"], nodes=2) as (leader, standby):
            leader.election("r").on_event(print)
            events = standby.election("r").events()
            with leader.election("r").wait(10).transaction() as transaction:
                transaction.execute("select 1")
            assert len(threads_of("-n0")) >= 3
        assert list(events) is not None

    live_once()  # what is loaded for the first time stays: the driver, its own descriptors
    before = descriptors()
    live_once()
    assert threads_of("-n0") == threads_of("-n1") == []
    until(lambda: descriptors() <= before, "descriptors closed")
    database = store_url.rpartition("/")[2]
    if store_url.startswith("mysql"):
        others = "select count(*) from information_schema.processlist where db = %s and id <> connection_id()"
        with contextlib.closing(connect(store_url)) as connection:
            until(lambda: connection.execute(others, [database]).fetchone() == (0,), "connections closed")
    elif not store_url.startswith("sqlite"):
        with contextlib.closing(connect(store_url)) as connection:
            others = "select count(*) from pg_stat_activity where datname = %s and pid <> pg_backend_pid()"
            until(lambda: connection.execute(others, [database]).fetchone() == (0,) or connection.rollback())
            locks = "select count(*) from pg_locks l join pg_database d on d.oid = l.database where datname = %s"
            assert connection.execute(locks + " and locktype = 'advisory'", [database]).fetchone() == (0,)
    else:
        path = store_url.partition(":///")[2]
        assert os.listdir(path + ".sentinels") == []  # noqa: PTH208


def test_start_that_fails_leaves_nothing(postgres_server):
    url = postgres_server.url("no_such_database")

    def fail_once():
        node = tenure.Node(url, name="failing")
        with pytest.raises(tenure.StoreUnavailable):
            node.start()

    fail_once()
    before = descriptors()
    fail_once()
    assert threads_of("-failing") == []
    assert descriptors() <= before


def test_wait_that_the_server_forgets_to_end_is_ended_by_the_node(postgres_server, postgres_url, monkeypatch):
    """As when its clock is stepped: the time-outs do not come, and a waiting backend does not see its client go."""
    survey, hung = AdvisorySentinel.survey, []

    def wait_for_ever(sentinel, wait_for, seconds, *steps, **more):
        if wait_for is not None and not hung:
            hung.append(sentinel._session.pid)
            sentinel._wait_ms = max(1, round(seconds * 1000))
            for setting in ("lock_timeout", "statement_timeout"):
                sentinel._session.read(Step(f"select set_config('{setting}', '0', false)", {}))
        return survey(sentinel, wait_for, seconds, *steps, **more)

    monkeypatch.setattr(AdvisorySentinel, "survey", wait_for_ever)
    with cluster(postgres_url, ["r"], nodes=2, ttl=2):
        until(lambda: hung, "a wait without end")
        until(lambda: hung[0] not in [one.pid for one in postgres_server.backends()], "the wait is ended")


WAITS_FOR_EVER = """
import sys, tenure
from tenure.databases.postgres.sentinel import AdvisorySentinel
from tenure.store.session import Step

survey = AdvisorySentinel.survey

def wait_for_ever(sentinel, wait_for, seconds, *steps, **more):
    if wait_for is not None:
        sentinel._wait_ms = max(1, round(seconds * 1000))
        for setting in ("lock_timeout", "statement_timeout"):
            sentinel._session.read(Step(f"select set_config('{setting}', '0', false)", {}))
        print(sentinel._session.pid, flush=True)
    return survey(sentinel, wait_for, seconds, *steps, **more)

AdvisorySentinel.survey = wait_for_ever
with tenure.Node(sys.argv[1], name="hangs", ttl=60, renew_every=0.3) as node:
    node.election("r")
    sys.stdin.read()
"""


def test_connections_of_a_dead_member_are_ended(postgres_server, postgres_url):
    """A process dies while its wait hangs on the server, which has forgotten to end it and does not see it go."""
    command = [sys.executable, "-c", WAITS_FOR_EVER, postgres_url]
    with (
        cluster(postgres_url, ["r"], nodes=2, ttl=60, renew_every=0.3),
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as hangs,
    ):
        try:
            pid = int(hangs.stdout.readline())
            waiting = f"select 1 from pg_locks where pid = {pid} and locktype = 'advisory' and not granted"
            until(lambda: execute(postgres_url, waiting), "a wait without end")
            named = f"select 1 from tenure.members where name = 'hangs' and watch_pid = {pid}"
            until(lambda: execute(postgres_url, named), "its row names the connection that waits")
        finally:
            hangs.kill()
        until(lambda: pid not in [one.pid for one in postgres_server.backends()], "the wait is ended")


def test_connections_of_a_node_that_leaves_are_ended(postgres_server, postgres_url):
    """A node leaves while its wait hangs on the server, which has forgotten to end it and does not see it go."""
    command = [sys.executable, "-c", WAITS_FOR_EVER, postgres_url]
    with (
        cluster(postgres_url, ["r"], nodes=2, ttl=60, renew_every=0.3),
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as hangs,
    ):
        pid = int(hangs.stdout.readline())
        waiting = f"select 1 from pg_locks where pid = {pid} and locktype = 'advisory' and not granted"
        until(lambda: execute(postgres_url, waiting), "a wait without end")
        hangs.stdin.close()
        until(lambda: pid not in [one.pid for one in postgres_server.backends()], "the wait is ended")
        assert hangs.wait() == 0


def test_node_that_was_never_started_holds_nothing(sqlite_url):
    before = descriptors()
    tenure.Node(sqlite_url)
    assert descriptors() <= before
    assert not os.path.exists(sqlite_url.partition(":///")[2])  # noqa: PTH110


# --- tables -------------------------------------------------------------------------------------------------


def count(desk, table):
    return desk.session.read(Step(f"select count(*) from {{{table}}}", {}))[0].rows[0][0]


@pytest.fixture
def keep_few(monkeypatch):
    """Less is enough to see that more is deleted."""
    monkeypatch.setattr(tidying, "KEPT_MEMBERS", 20)
    monkeypatch.setattr(tidying, "KEPT_TERMS", 20)


def test_tables_stay_small_however_many_came_and_went(store_url, keep_few):
    with Desk(store_url, join=False) as desk:
        for _ in range(tidying.KEPT_MEMBERS + 20):
            desk.join()
            assert desk.acquire("r")
            desk.ask(messages.Leave(desk.id))
        desk.join()
        assert desk.acquire("r") == {"r": tidying.KEPT_MEMBERS + 21}
        for _ in range(tidying.KEPT_TERMS + 20):
            assert desk.acquire("other")
        desk.ask(messages.Tidy())
        assert tidying.KEPT_MEMBERS <= count(desk, "members") <= tidying.KEPT_MEMBERS + 1
        assert count(desk, "terms") == 2 * tidying.KEPT_TERMS
        assert count(desk, "candidates") == 2
        assert count(desk, "roles") == 2
        # What is left is the newest, and the role goes on where it was.
        assert desk.acquire("r") == {"r": tidying.KEPT_MEMBERS + 22}


def test_role_outlives_the_row_of_its_holder(store_url, keep_few):
    """The holder's row may be tidied away: a role whose holder nobody knows is vacant, and its token stays."""
    with Desk(store_url) as old, Desk(store_url, join=False) as desk:
        old.lead("r")
        old.ask(messages.Leave(old.id))
        for _ in range(tidying.KEPT_MEMBERS + 1):
            desk.join()
            desk.ask(messages.Leave(desk.id))
        desk.ask(messages.Tidy())
        holders = desk.session.read(Step("select id from {members} where id = :id", {"id": old.id}))[0].rows
        assert list(holders) == []
        desk.join()
        assert desk.acquire("r") == {"r": 2}
