"""How a node connects to PostgreSQL: libpq's parameters, TLS, passwords that change; and that no password is shown."""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import logging
import os
import re
import shutil
import socket
import traceback
from urllib.parse import quote

import anyio
import psutil
import pytest

import tenure
from tenure import ConfigError, StoreUnavailable, TenureError
from tenure.core import messages
from tenure.databases.backend import backend_for
from tenure.settings import node_settings
from tenure.store.session import Step
from tests.cli.test_cli import Answer
from tests.conftest import INSTALLATIONS, NO_POSTGRES, missing
from tests.support.certificates import make_certificate, use_tls
from tests.support.secrets import CANARY, PIECE, assert_untold, ways_in
from tests.support.servers import PostgresServer
from tests.support.store_by_hand import Desk, Nodes, execute, until

pytestmark = pytest.mark.xdist_group("connecting")  # one server for all of them


def outside_address() -> str | None:
    """An IPv4 address of this machine that is not loopback."""
    addresses = (
        entry.address
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family == socket.AF_INET
    )
    return next((address for address in addresses if not ipaddress.ip_address(address).is_loopback), None)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """A server that asks for a password and speaks TLS, at an address that is not loopback if there is one."""
    if not INSTALLATIONS:
        missing(NO_POSTGRES)
    if shutil.which("openssl") is None:
        missing("TLS needs a certificate: install openssl")
    server = PostgresServer(listen=outside_address() or "127.0.0.1", fsync=False, password=CANARY)
    try:
        use_tls(server)
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture
def url(guarded):
    """An empty database there, under the superuser's password."""
    url = guarded.create_database()
    yield url
    guarded.drop_database(url.rpartition("/")[2])


def bare(url):
    """The URL without the password."""
    return url.replace(":" + quote(CANARY, safe=""), "")


@pytest.fixture
def log(caplog):
    """Whatever any logger says."""
    for name in ("", "psycopg", "tenure"):
        caplog.set_level(logging.DEBUG, logger=name)
    return caplog


# --- no password is shown -----------------------------------------------------------------------------------


def test_password_shows_nowhere_while_the_server_is_down(log):
    with socket.socket() as taken:  # bound and deaf: refused, and no other test's server can come up there meanwhile
        taken.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{taken.getsockname()[1]}/app"
        for node in (
            tenure.Node(f"postgresql://someone:{CANARY}@{where}"),
            tenure.Node(f"postgresql://{where}?user=someone&password={CANARY}&sslpassword={CANARY}"),
            tenure.Node(f"postgresql://someone@{where}", password=CANARY),
            tenure.Node(f"postgresql://someone@{where}", password=lambda: CANARY),
        ):
            place = r"PostgreSQL at 127\.0\.0\.1 port \d+ database app as someone"
            with pytest.raises(StoreUnavailable, match=f"cannot connect to {place}: .*refused") as error:
                node.start()
            assert_untold(error.value, records=log.records, things=insides(node))
    assert any(record.name == "psycopg" for record in log.records), "the driver was heard"


def test_wrong_password_shows_nowhere(guarded, url, log):
    wrong = quote(CANARY, safe="") + "-wrong"
    for node in (
        tenure.Node(url.replace(quote(CANARY, safe=""), wrong)),
        tenure.Node(bare(url), password=CANARY + "-wrong"),
        tenure.Node(bare(url), password=lambda: CANARY + "-wrong"),
    ):
        with pytest.raises(StoreUnavailable, match='password authentication failed for user "postgres"') as error:
            node.start()
        assert_untold(error.value, records=log.records, things=insides(node))
    servers_log = "\n".join(guarded.log_lines())
    assert "password authentication failed" in servers_log
    assert PIECE not in servers_log


def test_traceback_of_a_wrong_password_is_short_and_ends_with_the_cause(guarded, url):
    async def start_async() -> None:
        await tenure.AsyncNode(bare(url), password="wrong").start()

    for start in (tenure.Node(bare(url), password="wrong").start, functools.partial(anyio.run, start_async)):
        with pytest.raises(StoreUnavailable) as error:
            start()
        lines = "".join(traceback.format_exception(error.value)).splitlines()
        assert "password authentication failed" in " ".join(lines[-2:])
        assert not [line for line in lines if "direct cause" in line or "During handling" in line]
        calls = [line for line in lines if f"{os.sep}tenure{os.sep}" in line]
        assert len(calls) == 1, "the node's own start() only, and none of the calls in its threads"


def test_failure_to_connect_has_no_password_in_the_variables_of_its_traceback(url, log):
    wrong = CANARY + "-wrong"
    with socket.socket() as taken:  # bound and deaf: it refuses every connection
        taken.bind(("127.0.0.1", 0))
        for where, arguments, complaint in (
            (url.replace(quote(CANARY, safe=""), quote(wrong, safe="")), {}, "authentication failed"),
            (bare(url), {"password": wrong}, "authentication failed"),
            (bare(url), {"password": lambda: wrong}, "authentication failed"),
            (bare(url), {"password": functools.partial(str, wrong)}, "authentication failed"),
            (bare(url), {"password": functools.partial(int, wrong)}, "raised ValueError"),
            (bare(url), {"password": wrong.encode}, "password must be text"),
            (f"postgresql://me:{CANARY}@127.0.0.1:{taken.getsockname()[1]}/app", {}, "refused"),
            (f"postgresql://me:{CANARY}@not..a..name/app", {}, "cannot connect to PostgreSQL at not..a..name .* label"),
            (f"{url}?sslmode=verify-full&sslrootcert=/none", {}, "does not exist"),
            (f"{url}?connect_timeout=soon", {}, "soon"),
        ):
            for connect in ways_in(where, **arguments):
                with pytest.raises(TenureError, match=complaint) as error:
                    connect()
                assert_untold(error.value)
    assert_untold(records=log.records)
    assert not [record for record in log.records if "bug in Tenure" in record.getMessage()]


def test_right_password_shows_nowhere(guarded, url, log):
    with tenure.Node(url, name="worker-1", namespace="jobs", ttl=5) as node, node.lead("r", timeout=20) as term:
        with term.transaction() as transaction:
            transaction.execute("select 1")
        assert (node.name, node.namespace, node.ttl) == ("worker-1", "jobs", 5.0)
        assert repr(node) == "<Node 'worker-1' namespace='jobs' on postgresql>"
        assert_untold(records=log.records, things=(*insides(node), term, node.election("r"), *guarded.backends()))


def insides(node):
    engine = node._engine
    return node, node._settings, engine.backend._connector, *map(vars, (node, engine, engine.backend))


# --- password= ----------------------------------------------------------------------------------------------


def test_password_may_be_given_beside_the_url(url):
    asked = []
    with Nodes(bare(url), ttl=30) as nodes:
        nodes("text", password=CANARY).election("r").wait(20)
        asking = nodes("function", password=lambda: asked.append(1) or CANARY)
        term = asking.election("s").wait(20)
        until(lambda: len(asked) >= 2, "control and watch connection")
        before = len(asked)
        with term.transaction() as transaction:
            transaction.execute("select 1")
        assert len(asked) == before + 1, "once for every connection"


def test_function_is_asked_again_when_the_password_has_changed(guarded, url, log):
    """The old one is refused, then the function fails: neither ends the node, and the next password works."""
    guarded.execute("drop role if exists rotating")
    guarded.execute(f"create role rotating superuser login password '{CANARY}'")
    answers = [CANARY]

    def password():
        if answers[-1] is None:
            raise RuntimeError(f"cannot decide between {answers}")
        return answers[-1]

    with Nodes(bare(url).replace("postgres@", "rotating@"), ttl=30) as nodes:
        election = nodes("a", password=password).election("r")
        term = election.wait(20)
        guarded.execute(f"alter role rotating password '{CANARY}-2'")
        guarded.execute("select pg_terminate_backend(pid) from pg_stat_activity where usename = 'rotating'")
        heard(log, r'password authentication failed for user "rotating".*; trying again until it is back')
        with pytest.raises(StoreUnavailable, match="password authentication failed"), term.transaction():
            pytest.fail("the server accepted the old password")
        answers.append(None)
        with pytest.raises(StoreUnavailable, match="given as password= raised RuntimeError") as error:
            term.transaction().__enter__()
        assert_untold(error.value)
        heard(log, "OpenWatch failed: the function given as password= raised RuntimeError")
        answers.append(f"{CANARY}-2")
        assert election.wait(20).token == 2
    assert_untold(records=log.records)
    guarded.drop_database(url.rpartition("/")[2])
    guarded.execute("drop role rotating")


def heard(log, pattern):
    until(lambda: any(re.search(pattern, record.getMessage(), re.DOTALL) for record in list(log.records)), pattern)


def test_password_that_cannot_be_is_refused_unseen():
    for password in (7, CANARY.encode(), "", f"{CANARY}\0", f"{CANARY}\udcff", ["s3cret"]):
        with pytest.raises(ConfigError, match=r"^password ") as error:
            tenure.Node("postgresql://host/app", password=password)
        assert_untold(error.value)
    for url in (f"postgresql://me:{CANARY}@host/app", f"postgresql://host/app?password={CANARY}"):
        with pytest.raises(ConfigError, match="leave one of them out") as error:
            tenure.Node(url, password=CANARY)
        assert_untold(error.value)
    with pytest.raises(ConfigError, match="password= is for PostgreSQL and MariaDB, but the URL names sqlite"):
        tenure.Node("sqlite:///app.db", password=CANARY)


def test_function_that_gives_no_password_is_named_at_the_start():
    def fails():
        raise RuntimeError(CANARY)

    def takes(argument):
        return CANARY

    for function, kind in ((fails, "RuntimeError"), (takes, "TypeError")):
        with pytest.raises(StoreUnavailable, match=f"the function given as password= raised {kind}") as error:
            tenure.Node("postgresql://host.invalid/app", password=function).start()
        assert_untold(error.value)
    for answer, kind in ((None, "NoneType"), (CANARY.encode(), "bytes")):
        with pytest.raises(ConfigError, match=f"password must be text, .* not {kind}") as error:
            tenure.Node("postgresql://host.invalid/app", password=lambda answer=answer: answer, start="wait").start()
        assert_untold(error.value)


# --- TLS, and libpq's other parameters ----------------------------------------------------------------------


def encrypted(url):
    """Whether the node's connections are encrypted, one by one."""
    return execute(
        url + "?application_name=tests",
        "select ssl from pg_stat_ssl join pg_stat_activity using (pid) "
        "where datname = current_database() and application_name <> 'tests'",
    )


def test_parameters_of_the_url_reach_libpq(guarded, url, tmp_path):
    right = guarded.data / "server.crt"
    wrong = make_certificate(tmp_path, guarded.listen)
    for parameters, is_encrypted in (
        ("sslmode=require&application_name=mine", True),
        ("sslmode=disable&application_name=mine", False),
        (f"sslmode=verify-full&sslrootcert={quote(str(right))}&application_name=mine", True),
    ):
        with tenure.Node(f"{url}?{parameters}") as node, node.lead("r", timeout=20) as term, term.transaction():
            connections = until(lambda: len(them := encrypted(url)) == 3 and them, "control, watch and transaction")
            assert connections == [(is_encrypted,)] * 3
            names = {backend.application_name for backend in guarded.backends(url.rpartition("/")[2])}
            assert names == {"mine"}
    for parameters, complaint in (
        (f"sslmode=verify-full&sslrootcert={quote(str(wrong))}", "certificate verify failed"),
        (f"sslmode=verify-full&sslrootcert={quote(str(tmp_path))}/none", "does not exist"),
        ("sslmode=always", 'invalid sslmode value: "always"'),
        ("connect_timeout=soon", "connect_timeout: 'soon'"),
    ):
        with pytest.raises(StoreUnavailable, match=complaint) as error:
            tenure.Node(f"{url}?{parameters}").start()
        assert_untold(error.value)


def test_open_connection_to_another_machine_is_warned_of_once(guarded, url, postgres_url, log, monkeypatch):
    if guarded.listen == "127.0.0.1":
        missing("this machine has no address but loopback")
    monkeypatch.setattr("tenure.databases.connecting._warned", set())
    socket_url = guarded.url(url.rpartition("/")[2], host=str(guarded.socket_dir))
    for harmless in (postgres_url, socket_url, f"{url}?sslmode=require"):
        with tenure.Node(harmless) as node:
            node.election("r").wait(20)
    assert warnings(log) == []
    for _ in range(2):
        with tenure.Node(f"{url}?sslmode=disable") as node, node.lead("r", timeout=20) as term, term.transaction():
            pass
    server = f"{guarded.listen}:{guarded.port}"
    assert warnings(log) == [
        f"the connection to {server} is not encrypted: add sslmode=require to the URL, or better verify-full"
    ]


def warnings(log):
    return [
        record.getMessage()
        for record in log.records
        if record.levelno >= logging.WARNING and record.name == "tenure.postgres"
    ]


def test_doctor_says_whether_the_connection_is_encrypted(guarded, url):
    if guarded.listen == "127.0.0.1":
        missing("this machine has no address but loopback")
    socket_url = guarded.url(url.rpartition("/")[2], host=str(guarded.socket_dir))
    for where, says in (
        (f"{url}?sslmode=require", "ok    tls          the connection is encrypted"),
        (f"{url}?sslmode=disable", "warn  tls          the connection is not encrypted: .* add sslmode=require"),
        (socket_url, "ok    tls          the connection does not leave this machine"),
    ):
        answer = Answer("doctor", url=where)
        assert (answer.code, answer.err) == (0, "")
        assert re.search(says, answer.out)
        assert PIECE not in answer.out


def test_a_connection_has_its_own_settings_whatever_the_database_says(postgres_url):
    name = postgres_url.rpartition("/")[2]
    others = {
        "synchronous_commit": "off",
        "search_path": "public",
        "statement_timeout": "1h",
        "lock_timeout": "1h",
        "idle_session_timeout": "1h",
        "default_transaction_isolation": "serializable",
        "tcp_user_timeout": "1",
        "datestyle": "German, DMY",
    }
    for setting, value in others.items():
        execute(postgres_url, f"alter database {name} set {setting} = '{value}'")
    with contextlib.closing(backend_for(node_settings(postgres_url, ttl=10)).open_session()) as session:
        found = {setting: session.connection.execute(f"show {setting}").fetchone()[0] for setting in others}
    assert found == {
        "synchronous_commit": "local",
        "search_path": "pg_catalog",
        "statement_timeout": "10s",
        "lock_timeout": "100ms",
        "idle_session_timeout": "0",
        "default_transaction_isolation": "read committed",
        "tcp_user_timeout": "11000",
        "datestyle": "ISO, DMY",
    }


def test_commits_stay_on_disk_if_the_server_is_told_later_not_to_wait_for_it(postgres_server, postgres_url):
    """As for a bulk load. A crash would take the tokens back that were issued meanwhile."""
    with (
        contextlib.closing(backend_for(node_settings(postgres_url, ttl=10)).open_session()) as session,
        postgres_server.configured(synchronous_commit="off"),
    ):
        until(lambda: execute(postgres_url, "show synchronous_commit") == [("off",)], "the setting")
        assert session.connection.execute("show synchronous_commit").fetchone() == ("on",)


def test_takeover_reads_no_whole_table_even_if_its_plan_was_made_while_the_tables_were_small(every_postgres_url):
    """The plan is kept when thousands of roles come: then it took quadratic time until the server analysed again."""
    with Desk(every_postgres_url) as desk:
        desk.lead("r")
        execute(every_postgres_url, "analyze")
        for step in desk.store._rehearsal(desk.id):
            plan = "\n".join(line for (line,) in desk.session.read(step._replace(text=f"explain {step.text}"))[0].rows)
            assert "Seq Scan" not in plan


def test_takeover_is_rehearsed_on_a_new_connection_of_the_same_member(postgres_url):
    with Desk(postgres_url) as first, Desk(postgres_url, join=False) as second:
        second.ask(messages.Renew(first.id))
        known = {
            text for (text,) in second.session.read(Step("select statement from pg_prepared_statements", {}))[0].rows
        }
        assert any('update "tenure".roles as r' in text for text in known)


def test_url_without_a_user_that_the_server_does_not_know_gets_the_remedy(postgres_url, monkeypatch):
    place = postgres_url.partition("@")[2]
    monkeypatch.setenv("PGUSER", "a_user_of_no_server")  # as libpq would take the name of the process's user
    with pytest.raises(StoreUnavailable, match="the URL names no user; write one before the host"):
        tenure.Node(f"postgresql://{place}").start()
    with pytest.raises(StoreUnavailable, match=r'role "another_user" does not exist$'):
        tenure.Node(f"postgresql://another_user@{place}").start()
