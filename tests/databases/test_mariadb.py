"""MariaDB: what is different there. Whatever is the same, the tests of every store show (`[mariadb]`)."""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote

import pymysql
import pytest
import sqlalchemy
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

import tenure
from tenure import ConfigError, Fenced, NotCommitted, PoolerDetected, StoreUnavailable, TenureError
from tenure.core import messages
from tenure.databases.mysql.connect import MySqlConnector, parse_url
from tenure.databases.mysql.schema import MySqlSchema
from tenure.databases.mysql.sentinel import UserLockSentinel
from tenure.fence.fence import fence
from tenure.store import migrations
from tenure.store.dialects import MYSQL
from tenure.store.session import Failed, Gone, Step
from tenure.store.tables import MIGRATIONS
from tenure.term import cut_short
from tests.conftest import missing
from tests.support.certificates import make_certificate
from tests.support.cluster import Cluster
from tests.support.mariadb import NO_MARIADB, MariaDbServer, mariadb_program
from tests.support.secrets import CANARY, assert_untold, ways_in
from tests.support.store_by_hand import QUICK, Desk, Nodes, connect, connected, execute, renewals, until


def connector(url, ttl=30.0):
    return MySqlConnector(url, ttl, "tests")


@contextlib.contextmanager
def opened(url, ttl=30.0):
    with contextlib.closing(connector(url, ttl).open("tests")) as session:
        yield session


def variables(session, *names):
    return dict(session.read(Step("show session variables where variable_name in :wanted", {"wanted": names}))[0].rows)


# --- how one gets there -------------------------------------------------------------------------------------


def test_url_has_many_names(mariadb_url):
    rest = mariadb_url.removeprefix("mysql")
    assert {tenure.Node(scheme + rest).database for scheme in ("mysql", "mariadb", "mysql+pymysql")} == {"mysql"}
    with tenure.Node("MariaDB+pymysql" + rest) as node:
        assert node.election("r").wait(20).token == 1


def test_unix_socket_leads_there_too(mariadb_server, mariadb_url):
    url = f"{mariadb_url}?unix_socket={quote(str(mariadb_server.socket))}&charset=utf8mb4"
    mariadb_server.execute("create or replace user tenure@localhost")
    mariadb_server.execute(r"grant all on `test\_%`.* to tenure@localhost")
    with tenure.Node(url) as node:
        assert node.election("r").wait(20).token == 1
        assert str(mariadb_server.socket) in repr(node._engine.backend._connector)


def test_url_says_everything_to_the_driver():
    assert parse_url(
        "mysql://a%40b:p%2Fw@[::1]:3307/my%20db?ssl_ca=/ca&ssl_verify_identity=true&connect_timeout=2"
    ) == {
        "user": "a@b",
        "password": "p/w",
        "host": "::1",
        "port": 3307,
        "database": "my db",
        "ssl_ca": "/ca",
        "ssl_verify_cert": True,
        "ssl_verify_identity": True,
        "connect_timeout": 2.0,
    }
    assert parse_url("mysql:///db") == {"host": "localhost", "port": 3306, "database": "db"}


@pytest.mark.parametrize(
    "rest",
    [
        f"me:{CANARY}@host",
        f"me:{CANARY}@host/",
        f"me:{CANARY}@host/a/b",
        f"me:{CANARY}/x@host/db",
        f"me:{CANARY}@x@host/db",
        f"me:{CANARY}@host:port/db",
        f"me:{CANARY}@host:0/db",
        f"me:{CANARY}@host:123456/db",
        f"me:{CANARY}@[::1/db",
        f"me:{CANARY}@host/db?passwd={CANARY}",
        f"me:{CANARY}@host/db?charset={CANARY}",
        f"me:{CANARY}@host/db?ssl_verify_cert={CANARY}",
        f"me:{CANARY}@host/db?connect_timeout={CANARY}",
    ],
)
def test_malformed_url_is_refused_and_shows_no_password(rest):
    with pytest.raises(ConfigError, match="MariaDB URL") as error:
        tenure.Node(f"mysql://{rest}")
    assert_untold(error.value)


def test_wrong_password_shows_nowhere(mariadb_server, caplog):
    secret = CANARY + "ü"
    mariadb_server.execute("create or replace user guarded@'%%' identified by %s", secret)
    mariadb_server.execute(r"grant all on `test\_%`.* to guarded@'%'")
    url = mariadb_server.create_database()
    theirs = mariadb_server.url(url.rpartition("/")[2], user="guarded")
    bad = (
        tenure.Node(theirs),
        tenure.Node(theirs.replace("guarded", f"guarded:{quote(secret)}-wrong")),
        tenure.Node(theirs, password=lambda: f"{secret}-wrong"),
    )
    for node in bad:
        with pytest.raises(StoreUnavailable, match=r"cannot connect to MariaDB at .*Access denied") as error:
            node.start()
        assert_untold(error.value, records=caplog.records, things=[node, node._settings, node._engine.backend])
    for node in (
        tenure.Node(theirs.replace("guarded", f"guarded:{quote(secret)}")),
        tenure.Node(theirs, password=secret),
    ):
        with node:
            assert node.election("r").wait(20)
    mariadb_server.drop_database(url.rpartition("/")[2])


def test_failure_to_connect_has_no_password_in_the_variables_of_its_traceback(mariadb_server, mariadb_url, tmp_path):
    mariadb_server.execute("create or replace user guarded@'%%' identified by %s", CANARY)
    theirs = mariadb_server.url(mariadb_url.rpartition("/")[2], user="guarded")
    right, wrong = (
        theirs.replace("guarded", f"guarded:{quote(word, safe='')}") for word in (CANARY, CANARY + "-wrong")
    )
    with socket.socket() as taken:  # bound and deaf: it refuses every connection
        taken.bind(("127.0.0.1", 0))
        for where, arguments, complaint in (
            (wrong, {}, "Access denied"),
            (theirs, {"password": CANARY + "-wrong"}, "Access denied"),
            (theirs, {"password": functools.partial(str, CANARY + "-wrong")}, "Access denied"),
            (theirs, {"password": functools.partial(int, CANARY)}, "raised ValueError"),
            (theirs, {"password": CANARY.encode}, "password must be text"),
            (f"mysql://me:{CANARY}@127.0.0.1:{taken.getsockname()[1]}/app", {}, "refused"),
            (f"mysql://me:{CANARY}@not..a..name/app", {}, "label"),
            (f"{right}?ssl_ca={tmp_path}/none", {}, "TLS cannot be used"),
            (f"{right}?ssl_cert={tmp_path}/none&ssl_key_password={CANARY}", {}, "TLS cannot be used"),
        ):
            for connect in ways_in(where, **arguments):
                with pytest.raises(TenureError, match=complaint) as error:
                    connect()
                assert_untold(error.value)


def cipher(store):
    return store.session.read(Step("show status like 'Ssl_version'", {}))[0].rows


def test_traffic_is_encrypted_where_the_server_can_and_checked_where_the_url_says_so(tmp_path):
    import pwd

    if mariadb_program() is None:
        missing(NO_MARIADB)
    server = MariaDbServer()
    with contextlib.closing(server):
        certificate = make_certificate(server.log.parent, "127.0.0.1")
        for file in (certificate, certificate.with_suffix(".key")):
            shutil.chown(file, *pwd.getpwuid(server.log.parent.stat().st_uid)[2:4])
        server.settings |= {"ssl_cert": certificate, "ssl_key": certificate.with_suffix(".key")}
        server.start()
        url = server.create_database()
        for parameters in ("", f"?ssl_ca={certificate}&ssl_verify_cert=true&ssl_verify_identity=true"):
            with Nodes(url + parameters, namespace=parameters[:5] or "n", **QUICK) as nodes:
                leads, stands = nodes.pair("r")
                assert leads._engine.query(cipher)[0][1].startswith("TLS")
                seen = renewals(url)[0]
                until(lambda seen=seen: renewals(url)[0] > seen + 2, "renewals")
                server.execute(f"kill {leads._engine.control.session.pid}")
                until(lambda stands=stands: (leader := stands.leader()) and leader.token == 2, "either of them leads")
        (tmp_path / "other").mkdir()
        other = make_certificate(tmp_path / "other", "127.0.0.1")
        with pytest.raises(StoreUnavailable, match="certificate verify failed"):
            tenure.Node(f"{url}?ssl_ca={other}&ssl_verify_cert=true").start()


def test_missing_driver_is_named_by_the_extra_that_brings_it():
    program = (
        "import sys; sys.modules['pymysql'] = None\n"
        "import tenure\n"
        "try: tenure.Node('mysql://me:c4n4ry@host/db')\n"
        "except tenure.ConfigError as error: print(error)"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert (said.stdout, said.stderr) == ("MariaDB and MySQL need PyMySQL: pip install 'tenure[mysql]'\n", "")


def test_read_only_server_is_no_primary(mariadb_server, mariadb_url):
    refusal = pytest.raises(StoreUnavailable, match=r"is read-only, as replicas are; .* give the primary's URL")
    with mariadb_server.configured(read_only=True), refusal:
        tenure.Node(mariadb_url).start()


def test_primary_that_becomes_read_only_is_left(mariadb_server, mariadb_url):
    with Desk(mariadb_url) as desk, mariadb_server.configured(read_only=True), pytest.raises(Gone):
        desk.ask(messages.Renew(desk.id))


@pytest.mark.parametrize(
    ("version", "told", "error", "message"),
    [
        ("10.5.8-MariaDB", {}, ConfigError, "runs MariaDB 10.5.8-MariaDB: upgrade it to MariaDB 10.6 or newer"),
        ("5.7.44-log", {}, ConfigError, "runs MySQL 5.7.44-log: upgrade it to MySQL 8.0 or newer"),
        ("10.11.2-MariaDB", {"wsrep_on": "ON"}, ConfigError, "is a Galera cluster"),
        ("8.0.36", {"super_read_only": "ON"}, StoreUnavailable, "is read-only"),
        ("10.11.2-MariaDB", {}, PoolerDetected, "leads through a proxy"),
    ],
)
def test_server_that_cannot_be_used_is_refused(mariadb_url, version, told, error, message):
    with opened(mariadb_url) as session, pytest.raises(error, match=message):
        connector(mariadb_url)._check(session.connection, session.pid + 1, version, told)


def test_settings_of_the_server_do_not_reach_the_node(mariadb_server, mariadb_url):
    strange = {
        "tx_isolation": "READ-UNCOMMITTED",
        "autocommit": 0,
        "completion_type": "RELEASE",
        "sql_mode": "ANSI_QUOTES,NO_BACKSLASH_ESCAPES,PIPES_AS_CONCAT",
        "sql_safe_updates": 1,
        "wait_timeout": 1,
        "idle_transaction_timeout": 1,
        "default_storage_engine": "MyISAM",
        "character_set_server": "latin1",
        "long_query_time": 0,
    }
    role = "it's a \\ 'rôle'"
    with mariadb_server.configured(**strange), Desk(mariadb_url) as desk, Desk(mariadb_url) as other:
        claim = desk.lead(role)
        time.sleep(1.2)  # longer than wait_timeout
        assert desk.ask(messages.Renew(desk.id)).held[0].role == role
        assert other.succeed(desk, role).token == 2
        with connected(mariadb_url) as connection, pytest.raises(Fenced):
            fence(connection, claim, 30)
        assert execute(
            mariadb_url, "select distinct engine from information_schema.tables where table_schema = database()"
        )


def test_control_connection_is_given_up_by_the_server_with_the_trust_of_its_owner(mariadb_url):
    """Not before the owner has stopped trusting itself, and not much later."""
    with Desk(mariadb_url, ttl=2.5) as desk:
        assert variables(desk.session, "wait_timeout", "tx_isolation") == {
            "wait_timeout": "3",
            "tx_isolation": "READ-COMMITTED",
        }
    with opened(mariadb_url) as session:
        assert variables(session, "wait_timeout") == {"wait_timeout": "28800"}, "a watcher holds nothing"


def test_examples_of_its_page_run_on_it(mariadb_url, tmp_path):
    page = Path(__file__).parents[2] / "docs" / "how-to" / "mariadb.md"
    examples = re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert examples
    for example in examples:
        command = [sys.executable, "-c", example]
        environment = {"TENURE_URL": mariadb_url, "PATH": os.defpath, "HOME": str(tmp_path)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "led under token 1\n", "")


# --- sentinels ----------------------------------------------------------------------------------------------


def test_names_of_locks_fit_and_other_databases_do_not_count(mariadb_server, mariadb_url):
    long = "test_" + "x" * 59
    mariadb_server.execute(f"create database {long}")
    try:
        with opened(mariadb_url) as here, opened(mariadb_server.url(long)) as there:
            sentinels = UserLockSentinel(here), UserLockSentinel(there)
            assert max(len(sentinel.name(2**31)) for sentinel in sentinels) <= 64
            assert sentinels[0].hold(7)
            assert sentinels[1].hold(7)
            assert sentinels[0].standing([7, 8]) == {7}
    finally:
        mariadb_server.drop_database(long)


def test_waits_leave_no_line_in_the_log(mariadb_server, mariadb_url):
    with mariadb_server.configured(slow_query_log=True, long_query_time=0.01, slow_query_log_file="slow"):
        mark = mariadb_server.log_mark()
        with opened(mariadb_url) as holder, opened(mariadb_url) as waiter:
            UserLockSentinel(holder).hold(7)
            UserLockSentinel(waiter).wait(7, 0.1)
        assert mariadb_server.log_lines(mark) == []
        slow = (mariadb_server.log.parent / "data" / "slow").read_text()
        assert "get_lock" not in slow


@contextlib.contextmanager
def waiting(desk, holder):
    """A look of the desk that waits for the holder's sentinel, for a minute; yields what it found, when it did."""
    watch, session = desk.backend.open_watch()
    ((key,),) = holder.session.read(Step("select sentinel_key from {members} where id = :id", {"id": holder.id}))[
        0
    ].rows
    desk.store.watch_backend = session.pid, session.started
    desk.ask(messages.Renew(desk.id))
    found: queue.Queue[messages.Looked] = queue.Queue()
    look = messages.Look(desk.id, key, 60.0, 4, ("r",))
    thread = threading.Thread(target=lambda: found.put(watch.perform(look)))
    with contextlib.closing(session):
        thread.start()
        waits = f"select 1 from information_schema.processlist where id = {session.pid} and state = 'User lock'"
        until(lambda: execute(desk.settings.url, waits), "the look waits")
        yield found
        thread.join(20)


def test_resignation_ends_the_wait_of_the_successor(mariadb_url):
    """MariaDB has no notifications: the next look would come after a second (R24)."""
    with Desk(mariadb_url) as leader, Desk(mariadb_url) as candidate:
        token = leader.lead("r").token
        candidate.stand("r")
        with waiting(candidate, leader) as found:
            assert leader.ask(messages.Vacate(leader.id, "r", token)).done
            assert found.get(timeout=20).vacancy


def kills(server):
    return int(dict(server.execute("show global status like 'Com_kill'"))["Com_kill"])


def test_successor_of_several_roles_is_woken_once(mariadb_server, mariadb_url):
    """The second time would hit the look that the first has caused."""
    with Desk(mariadb_url) as leader, Desk(mariadb_url) as candidate:
        leader.acquire("a", "b", "c")
        candidate.stand("a", "b", "c")
        before = kills(mariadb_server)
        with waiting(candidate, leader) as found:
            leader.ask(messages.Leave(leader.id))
            assert found.get(timeout=20).vacancy
        assert kills(mariadb_server) == before + 1


def test_resignation_that_fails_wakes_nobody_later(mariadb_server, mariadb_url):
    with Desk(mariadb_url) as leader, Desk(mariadb_url) as candidate, waiting(candidate, leader):
        before = kills(mariadb_server)
        for attempt in (leader.session.run, in_one_transaction(leader.session)):
            leader.session.notify(leader.settings.namespace, f"vacant {leader.id}>{candidate.id} r")
            with pytest.raises(Failed):
                attempt(Step("select 1 from no_such_table", {}))
        leader.session.run(Step("select 1", {}))
        assert kills(mariadb_server) == before
        leader.store.release()


def in_one_transaction(session):
    def run(step):
        with session.transaction() as run:
            run(step)

    return run


def test_look_that_is_ended_instead_of_the_wait_before_it_is_repeated(mariadb_url):
    """Without that, the next look would come after another wait."""
    with Desk(mariadb_url) as candidate, connected(mariadb_url) as other, ThreadPoolExecutor() as pool:
        watch, session = candidate.backend.open_watch()
        with contextlib.closing(session):
            session.server()
            other.execute("lock tables tenure_members write")
            found = pool.submit(watch.perform, messages.Look(candidate.id, None, 0.0, 4))
            waits = (
                f"select 1 from information_schema.processlist where id = {session.pid} and state like 'Waiting for%'"
            )
            until(lambda: execute(mariadb_url, waits), "the look waits for the table")
            execute(mariadb_url, f"kill query {session.pid}")
            other.execute("unlock tables")
            assert found.result(20).members == ()


def test_watch_connection_gets_every_answer_whenever_its_statements_are_ended(mariadb_url):
    """MariaDB does not answer the rest of a packet if the statement before was ended just as it was done."""
    with Desk(mariadb_url) as other, Desk(mariadb_url) as candidate, ThreadPoolExecutor() as pool:
        watch, session = candidate.backend.open_watch()
        key, stop = other.store._key, threading.Event()

        def look():
            while not stop.is_set():
                with contextlib.suppress(Failed):
                    watch.perform(messages.Look(candidate.id, key, 0.002, 4))

        with contextlib.closing(session):
            looks = pool.submit(look)
            ended = time.monotonic() + 3
            while time.monotonic() < ended:
                other.session.read(Step("kill query :pid", {"pid": session.pid}))
            stop.set()
            try:
                looks.result(5)
            finally:
                session.abort()


def test_request_to_resign_ends_the_wait_of_the_leader(mariadb_url):
    with Desk(mariadb_url, namespace="default") as leader, Desk(mariadb_url, namespace="default") as candidate:
        leader.lead("r")
        candidate.stand("r")
        with waiting(leader, candidate) as found, tenure.Registry(mariadb_url) as registry:
            with pytest.raises(tenure.WaitTimeout):
                registry.resign("r", timeout=0.1)
            assert found.get(timeout=20).vacancy


def test_no_connection_is_disturbed_that_has_the_number_of_a_watch_before_a_restart(mariadb_url):
    with Desk(mariadb_url) as leader, Desk(mariadb_url) as candidate, connected(mariadb_url) as innocent:
        token = leader.lead("r").token
        candidate.stand("r")
        candidate.store.watch_backend = innocent.thread_id(), "before the restart"
        candidate.ask(messages.Renew(candidate.id))
        with ThreadPoolExecutor() as pool:
            slept = pool.submit(lambda: innocent.execute("select sleep(1)").fetchone())
            working = (
                f"select 1 from information_schema.processlist where id = {innocent.thread_id()} and info is not null"
            )
            until(lambda: execute(mariadb_url, working), "the statement runs")
            leader.ask(messages.Vacate(leader.id, "r", token))
            assert slept.result() == (0,), "the statement was not ended"


def test_leader_whose_connection_is_killed_hears_of_it_at_once(mariadb_server, mariadb_url, tmp_path):
    with Cluster(mariadb_url, tmp_path, ttl=30, strictly=False) as cluster:
        cluster.make_ledger()
        cluster.start(3)
        leader, token = cluster.wait_for_leader()
        row = (
            f"select m.control_pid from tenure_members m join tenure_roles r on r.holder = m.id where r.token = {token}"
        )
        ((pid,),) = cluster.execute(row)
        cut = cluster.fault("kill connection", leader.name)
        mariadb_server.execute(f"kill {pid}")
        assert leader.wait_event("deposed", token=token, since=cut)["reason"] == "the connection was cut"
        successor, _ = cluster.wait_for_leader(token)
        successor.tell("write")
        if successor is not leader:  # it may have been the first to come back
            leader.assert_fenced()


def test_connections_of_a_silent_member_are_ended_without_any_privilege(mariadb_url):
    with Desk(mariadb_url) as silent, Desk(mariadb_url) as desk:
        watch, session = desk.backend.open_watch()
        with contextlib.closing(session):
            assert watch.perform(messages.Evict((silent.id,))) == messages.Done()
            assert silent.ask(messages.Renew(silent.id)).alive, "not ended yet"
            assert desk.end(silent.id)
            watch.perform(messages.Evict((silent.id, desk.id)))
            assert desk.ask(messages.Renew(desk.id)).alive
            with pytest.raises(Gone):
                silent.ask(messages.Renew(silent.id))


def test_member_that_stopped_in_a_transaction_of_its_own_is_ended_all_the_same(mariadb_url):
    with Desk(mariadb_url) as silent, Desk(mariadb_url) as desk:
        silent.lead("r")
        silent.session._query("begin", "select * from tenure_members lock in share mode")
        assert desk.end(silent.id)
        assert desk.acquire("r") == {"r": 2}


def test_another_server_is_not_trusted_and_terms_of_the_old_one_do_not_pass_there(mariadb_server, mariadb_url):
    """As after a promotion: replicas have ids of their own."""
    with Desk(mariadb_url) as desk:
        claim = desk.lead("r")
        with mariadb_server.configured(server_id=7), connected(mariadb_url) as connection:
            with pytest.raises(Fenced):
                fence(connection, claim, 30)
            with Desk(mariadb_url, join=False) as other:
                assert other.opened.server.incarnation.startswith("7@")
                assert other.opened.confirmed.incarnation == desk.opened.server.incarnation


# --- the fence ----------------------------------------------------------------------------------------------


def test_idle_fenced_transaction_is_ended_by_the_server_after_its_bound(mariadb_url):
    with Desk(mariadb_url) as desk, Desk(mariadb_url) as other, connected(mariadb_url) as connection:
        claim = desk.lead("r")
        fence(connection, claim, 1.0)
        assert other.end(desk.id)
        assert until(lambda: other.acquire("r")) == {"r": 2}
        with pytest.raises(pymysql.err.OperationalError):
            connection.commit()


def test_fence_has_its_bound_from_the_first_moment_on(mariadb_url, monkeypatch):
    """A process that was paused between the lock and its bound kept every node from leading for as long as it stood."""
    with Desk(mariadb_url) as desk, Desk(mariadb_url) as other, connected(mariadb_url) as connection:
        claim = desk.lead("r")
        # This comes after the lock, and would not come from a process that is paused.
        monkeypatch.setattr("tenure.databases.mysql.session.in_transaction", lambda _: sys.exit("paused"))
        with pytest.raises(SystemExit):
            fence(connection, claim, 1.0)
        assert other.end(desk.id)
        assert other.acquire("r") == {}, "the lock stands"
        assert until(lambda: other.acquire("r")) == {"r": 2}


def test_tighter_bound_of_the_callers_stays(mariadb_url):
    with Desk(mariadb_url) as desk, connected(mariadb_url) as connection:
        connection.execute("set session idle_transaction_timeout = 3")
        for bound_s, left_s in ((10, 3), (2, 2), (0.5, 1)):
            fence(connection, desk.lead("r"), bound_s)
            assert connection.execute("select @@idle_transaction_timeout").fetchall() == ((left_s,),)
            connection.rollback()


def test_fence_locks_the_role_and_nothing_else(mariadb_url):
    """A renewal, another role and another fence must not wait for a fenced transaction."""
    with Desk(mariadb_url) as desk, connected(mariadb_url) as one, connected(mariadb_url) as another:
        claim = desk.lead("r")
        for isolation in ("read committed", "repeatable read"):
            for connection in (one, another):
                connection.execute(f"set session transaction isolation level {isolation}")
                fence(connection, claim, 30)
            assert desk.ask(messages.Renew(desk.id)).alive
            assert desk.acquire("another")
            one.rollback()
            another.rollback()


def test_old_snapshot_does_not_save_an_old_term(mariadb_url):
    """Under REPEATABLE READ the row's present state counts, whatever the transaction saw before."""
    with Desk(mariadb_url) as desk, Desk(mariadb_url) as other, connected(mariadb_url) as connection:
        claim = desk.lead("r")
        connection.execute("set session transaction isolation level repeatable read")
        connection.execute("select * from tenure_roles")
        other.succeed(desk, "r")
        with pytest.raises(Fenced):
            fence(connection, claim, 30)


def test_transaction_that_lost_a_deadlock_is_over_although_the_error_was_swallowed(mariadb_url):
    execute(mariadb_url, "create table pair (id int primary key) engine = InnoDB", "insert into pair values (1), (2)")
    lock = "select * from pair where id = {} for update"
    with Nodes(mariadb_url) as nodes, connected(mariadb_url) as other:
        term = nodes("one").election("r").wait(20)
        over = pytest.raises(NotCommitted, match="rolled this fenced transaction back because a statement in it failed")
        with over as raised, term.transaction() as transaction:
            other.execute("insert into pair values (3), (4), (5)")  # has more to lose, so this one has to
            other.execute(lock.format(2))
            transaction.execute(lock.format(1))
            waits = threading.Thread(target=other.execute, args=[lock.format(1)])
            waits.start()
            with pytest.raises(pymysql.err.OperationalError, match="Deadlock"):
                transaction.execute(lock.format(2))
            waits.join()
            with contextlib.suppress(NotCommitted):
                transaction.execute("insert into pair values (6)")
        assert "Deadlock" in str(raised.value.__cause__)
        other.rollback()
        assert execute(mariadb_url, "select id from pair order by id") == [(1,), (2,)]


# --- XA: the share lock does not outlive XA PREPARE ---------------------------------------------------------------


def pymysql_xa(url):
    """A global transaction by hand; return its connection, and how to commit it."""
    connection = connect(url)
    connection.execute("xa start 'app'")

    def commit():
        for statement in ("xa end 'app'", "xa prepare 'app'", "xa commit 'app'"):
            connection.execute(statement)

    return connection, commit


def sqlalchemy_connection_xa(url):
    connection = sqlalchemy.create_engine(url.replace("mysql:", "mysql+pymysql:"), poolclass=NullPool).connect()
    transaction = connection.begin_twophase()

    def commit():
        transaction.prepare()
        transaction.commit()

    return connection, commit


def sqlalchemy_session_xa(url):
    engine = sqlalchemy.create_engine(url.replace("mysql:", "mysql+pymysql:"), poolclass=NullPool)
    session = Session(engine, twophase=True)
    return session, session.commit


def sqlalchemy_xa_by_hand(url):
    connection = sqlalchemy.create_engine(url.replace("mysql:", "mysql+pymysql:"), poolclass=NullPool).connect()
    connection.exec_driver_sql("xa start 'app'")

    def commit():
        for statement in ("xa end 'app'", "xa prepare 'app'", "xa commit 'app'"):
            connection.exec_driver_sql(statement)

    return connection, commit


@pytest.mark.parametrize("autocommit", [0, 1])
@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize("begin", [pymysql_xa, sqlalchemy_connection_xa, sqlalchemy_session_xa, sqlalchemy_xa_by_hand])
def test_fence_refuses_a_global_transaction_which_then_cannot_commit(
    mariadb_server, mariadb_url, begin, stale, autocommit
):
    """A prepared one holds the share lock no more: token 1 would commit after token 2 has written."""
    execute(mariadb_url, "create table ledger (token bigint) engine = InnoDB")
    with mariadb_server.configured(autocommit=autocommit), Desk(mariadb_url) as desk, Desk(mariadb_url) as other:
        claim = desk.lead("r")
        if stale:
            other.succeed(desk, "r")
        connection, commit = begin(mariadb_url)
        with contextlib.closing(connection):
            refused = pytest.raises(Fenced) if stale else pytest.raises(ConfigError, match=r"XA .*: use an ordinary")
            with refused:
                fence(connection, claim, 30)
            with contextlib.suppress(pymysql.err.Error, sqlalchemy.exc.SQLAlchemyError):
                write = "insert into ledger values (1)"
                connection.execute(write if begin is pymysql_xa else sqlalchemy.text(write))
                commit()
        if begin is not sqlalchemy_session_xa:  # it begins another, unfenced: what it does after a rollback
            assert execute(mariadb_url, "select * from ledger") == []
        assert mariadb_server.execute("xa recover") == []
        if not stale:
            assert other.end(desk.id)
            assert until(lambda: other.acquire("r"), "the lock to go") == {"r": 2}


def test_fence_inside_a_global_transaction_that_has_ended_its_work_is_refused(mariadb_url):
    with Desk(mariadb_url) as desk:
        claim = desk.lead("r")
        connection, commit = pymysql_xa(mariadb_url)
        with contextlib.closing(connection):
            connection.execute("xa end 'app'")
            with pytest.raises(ConfigError, match="XA"):
                fence(connection, claim, 30)
            with pytest.raises(pymysql.err.Error):
                commit()


@pytest.mark.parametrize("mode", ["", "ANSI", "ORACLE"])
def test_look_for_a_global_transaction_disturbs_no_other(mariadb_url, mode):
    """It is a statement that fails in every ordinary transaction, and is caught on the server."""
    execute(mariadb_url, "create table ledger (token bigint) engine = InnoDB")
    with Desk(mariadb_url) as desk, connected(mariadb_url) as connection:
        claim = desk.lead("r")
        connection.execute(f"set session sql_mode = '{mode}'")
        connection.execute("insert into ledger values (1)")
        connection.execute("savepoint here")
        fence(connection, claim, 30)
        connection.execute("insert into ledger values (2)")
        connection.execute("rollback to savepoint here")
        assert connection.execute("show warnings").fetchall() == ()
        connection.commit()
        assert execute(mariadb_url, "select * from ledger") == [(1,)]


def test_cancelled_statement_is_ended_on_the_server(mariadb_url):
    execute(mariadb_url, "create table one (id int primary key) engine = InnoDB", "insert into one values (1)")
    with Nodes(mariadb_url) as nodes, connected(mariadb_url) as blocker:
        blocker.execute("select * from one for update")
        term = nodes("one").election("r").wait(20)
        with term.transaction() as transaction:
            threading.Timer(0.2, cut_short, [transaction]).start()
            with pytest.raises(pymysql.err.OperationalError, match="interrupted"):
                transaction.execute("update one set id = 2")
            assert transaction.execute("select 1").fetchall() == ((1,),)


# --- tables and privileges ----------------------------------------------------------------------------------


def test_names_that_differ_by_a_blank_or_a_capital_are_different_roles(mariadb_url):
    roles = ("r", "r ", "R", "ŕ", "ß", "ss", "é", "😀", "x" * 255, "日" * 85)
    with Desk(mariadb_url, namespace="n ") as desk, Desk(mariadb_url, namespace="N") as other:
        assert desk.acquire(*roles) == dict.fromkeys(roles, 1)
        assert desk.acquire("r ") == {"r ": 2}
        assert other.acquire("r") == {"r": 1}


def test_node_that_died_while_it_made_the_tables_is_no_hindrance(mariadb_url):
    texts = [MYSQL.text(text) for text in MySqlSchema(MYSQL).statements_of(MIGRATIONS[0])]
    execute(mariadb_url, *texts[:4])
    with Desk(mariadb_url) as desk:
        assert desk.acquire("r") == {"r": 1}
    execute(mariadb_url, "drop table tenure_meta")  # a user who does that does not want the tokens back at 1
    with Desk(mariadb_url) as desk:
        assert desk.acquire("r") == {}, "the other member lives on"
        assert migrations.require(desk.session) == MIGRATIONS[-1].version


def test_least_privileges_are_enough(mariadb_server, mariadb_url):
    database = mariadb_url.rpartition("/")[2]
    mariadb_server.execute("create or replace user worker@'%'")
    url = mariadb_server.url(database, user="worker")
    with pytest.raises(StoreUnavailable, match=r"cannot connect to .*Access denied"):
        tenure.Node(url).start()
    with Desk(mariadb_url, join=False):
        pass
    grants = MySqlSchema(MYSQL).grants("worker")
    for text in grants[:-1]:
        mariadb_server.execute(text, dbname=database)
    with pytest.raises(StoreUnavailable, match=r"INSERT command denied .*tenure_(jobs|runs).* --grants USER` prints"):
        tenure.Node(url).start()
    mariadb_server.execute(grants[-1], dbname=database)
    with Desk(url) as desk, Desk(url) as other, connected(url) as connection:
        fence(connection, desk.lead("r"), 30)
        connection.rollback()
        watch, session = other.backend.open_watch()
        with contextlib.closing(session):
            assert [seen.id for seen in watch.look(messages.Look(other.id, None, 0.0, 1)).members] == [desk.id]
            assert other.succeed(desk, "r").token == 2
            watch.perform(messages.Evict((desk.id,)))
        other.ask(messages.Tidy())
        other.ask(messages.Leave(other.id))


# --- sessions -----------------------------------------------------------------------------------------------


def test_statement_that_takes_too_long_fails_and_keeps_the_connection(mariadb_url):
    """R0: control never starves; a time-out is not a loss."""
    with Desk(mariadb_url, renew_every=0.2) as desk:
        with pytest.raises(Failed, match="max_statement_time"):
            desk.session.run(Step("select sleep(5), 1 from {members} for update", {}))
        assert desk.ask(messages.Renew(desk.id)).alive


def test_lock_that_does_not_come_fails_in_time(mariadb_url):
    with Desk(mariadb_url, renew_every=0.2) as desk, connected(mariadb_url) as blocker:
        blocker.execute("select * from tenure_members for update")
        with pytest.raises(Failed):
            desk.ask(messages.Renew(desk.id))
        blocker.rollback()
        assert desk.ask(messages.Renew(desk.id)).alive


def test_transaction_that_lost_a_deadlock_is_tried_again(mariadb_url):
    update = "update pair set n = n + 1 where id = {}"
    with opened(mariadb_url) as one, opened(mariadb_url) as other:
        one.run(Step("create table pair (id int primary key, n int) engine = InnoDB", {}))
        one.run(Step("insert into pair values (1, 0), (2, 0)", {}))
        loses = threading.Thread(target=other.run, args=[Step(update.format(id_), {}) for id_ in (2, 1)])
        with one.transaction() as run:
            more = Step("insert into pair values (3, 0), (4, 0), (5, 0)", {})  # so that the other one has to lose
            assert [result.count for result in run(more, Step(update.format(1), {}))] == [3, 1]
            loses.start()
            waits = Step("select 1 from information_schema.processlist where state = 'Updating'", {})
            until(lambda: one.read(waits)[0].rows)
            assert run(Step(update.format(2), {}))[0].count == 1
        loses.join()
        assert one.read(Step("select n from pair where id <= 2", {}))[0].rows == ((2,), (2,))


def test_call_that_hangs_is_cut_from_another_thread(mariadb_url):
    with opened(mariadb_url) as session:
        threading.Timer(0.2, session.abort).start()
        with pytest.raises(Gone):
            session.read(Step("select sleep(20)", {}))


def test_child_of_a_fork_neither_ends_the_connection_nor_keeps_it(mariadb_server, mariadb_url):
    database = mariadb_url.rpartition("/")[2]
    with opened(mariadb_url) as session:
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                session.close()
                signal.pause()
            os._exit(0)
        try:
            assert session.read(Step("select 1", {}))[0].rows == ((1,),)
            session.abort()  # as the death of the parent: the child's copy must not keep the connection
            until(lambda: mariadb_server.connections(database) == [])
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_certificate_that_is_not_there_is_named(mariadb_url):
    with pytest.raises(tenure.ConfigError, match=r"TLS cannot be used as the MariaDB URL says \(ssl_ca=/nonexistent\)"):
        tenure.Node(mariadb_url + "?ssl_ca=/nonexistent").start()


def test_a_namespace_that_is_new_on_a_server_that_was_a_replica_is_not_trusted_yet(mariadb_server, mariadb_url):
    """A server that has followed another may have lost a namespace of that name when it was promoted."""
    with Desk(mariadb_url, join=False) as before:
        assert before.opened.confirmed.line == before.opened.server.line
    with mariadb_server.configured(gtid_slave_pos="0-99-5"):
        with Desk(mariadb_url, namespace="new", join=False) as desk:
            assert desk.opened.confirmed.made_on_a_promoted_server
        with Desk(mariadb_url, join=False) as desk:
            assert desk.opened.confirmed.line == desk.opened.server.line
