"""A MariaDB URL with several hosts: nodes use the primary, and no replica, although replicas take writes, too."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import pytest

import tenure
from tenure.databases.mysql.connect import MySqlConnector, parse_hosts, parse_url
from tenure.databases.mysql.servers import why_no_primary, why_unusable
from tenure.databases.mysql.session import interrupt
from tenure.errors import ConfigError, StoreUnavailable
from tests.cli.test_cli_doctor import Visit
from tests.conftest import missing
from tests.support.hosts import FrozenHost
from tests.support.mariadb import ADDRESS, NO_MARIADB, MariaDbServer, mariadb_program
from tests.support.secrets import CANARY, assert_untold

MAY_SEE = "grant slave monitor on *.* to tenure@'%'"
MAY_NOT_SEE = "revoke slave monitor on *.* from tenure@'%'"


class Pair(NamedTuple):
    """A primary and its replica, which takes writes, as replicas of MariaDB do unless they are told not to."""

    primary: MariaDbServer
    replica: MariaDbServer

    def url(self, *hosts: int, user: str = "tenure") -> str:
        """A URL of these ports."""
        return f"mariadb://{user}@{','.join(f'{ADDRESS}:{port}' for port in hosts)}/test_app"

    @property
    def replica_first(self) -> str:
        return self.url(self.replica.port, self.primary.port)


@contextlib.contextmanager
def replicated() -> Iterator[Pair]:
    if mariadb_program() is None:
        missing(NO_MARIADB)
    with contextlib.ExitStack() as stack:
        primary, replica = (
            stack.enter_context(MariaDbServer(settings={"log_bin": "log", "server_id": number})) for number in (1, 2)
        )
        replica.replicate_from(primary)
        primary.execute("create database test_app")
        primary.execute(MAY_SEE)
        replica.catch_up(primary)
        yield Pair(primary, replica)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """Two servers for all tests that leave them as they are."""
    with replicated() as pair:
        yield pair


@pytest.fixture
def own_pair() -> Iterator[Pair]:
    """Two servers to be broken at will."""
    with replicated() as pair:
        yield pair


@pytest.fixture
def frozen_host() -> Iterator[FrozenHost]:
    with contextlib.closing(FrozenHost()) as host:
        yield host


def connector(url: str) -> MySqlConnector:
    return MySqlConnector(url, 10.0, "tests")


def port_of(connection) -> int:
    with connection.cursor() as cursor:
        cursor.execute("select @@port")
        return cursor.fetchone()[0]


def test_url_lists_hosts_each_with_its_port():
    url = "mariadb://me:p%2Cw@db1:3307,[::1],db3/app?connect_timeout=1"
    assert parse_hosts(url) == [
        {"host": "db1", "port": 3307},
        {"host": "::1", "port": 3306},
        {"host": "db3", "port": 3306},
    ]
    assert parse_url(url) == {
        **parse_hosts(url)[0],
        "database": "app",
        "user": "me",
        "password": "p,w",
        "connect_timeout": 1.0,
    }
    assert repr(connector(url)) == "MariaDB at db1:3307, ::1:3306, db3:3306 database app as me"


@pytest.mark.parametrize(
    ("rest", "complaint"),
    [
        (f"me:{CANARY}@a,,b/app", None),
        (f"me:{CANARY}@a,b:99999/app", "port in the MariaDB URL"),
        (f"me:{CANARY}@a,b c:x/app", "malformed"),
        (f"me:{CANARY}@a,b/app?unix_socket=/s", "several hosts and a unix_socket"),
    ],
)
def test_list_that_makes_no_sense_is_refused_and_shows_no_password(rest, complaint):
    if complaint is None:
        assert [host["host"] for host in parse_hosts(f"mysql://{rest}")] == ["a", "localhost", "b"]
        return
    with pytest.raises(ConfigError, match=complaint) as error:
        tenure.Node(f"mysql://{rest}")
    assert_untold(error.value)


def test_nodes_lead_and_write_on_the_primary_whichever_host_comes_first(pair):
    pair.primary.execute("create or replace table test_app.written (port int)")
    for url in (pair.replica_first, pair.url(pair.primary.port, pair.replica.port)):
        with tenure.Node(url) as node, node.lead("r", timeout=30) as term, term.transaction() as transaction:
            transaction.execute("insert into written values (@@port)")
    rows = pair.primary.execute("select port from test_app.written")
    assert rows == [(pair.primary.port,)] * 2
    pair.replica.catch_up(pair.primary)
    assert pair.replica.execute("select port from test_app.written") == rows, "nobody wrote there"


def test_replica_is_refused_while_the_primary_is_gone_and_taken_once_it_is_promoted(own_pair):
    of_both = connector(own_pair.replica_first)
    alone = connector(own_pair.url(own_pair.replica.port))
    with contextlib.closing(alone.connect("tests")) as connection, connection.cursor() as cursor:
        cursor.execute("create or replace table nothing_refuses_this (n int)")  # so Tenure has to
        cursor.execute("drop table nothing_refuses_this")
    own_pair.primary.stop()
    for purpose in ("control", "transaction"):
        with pytest.raises(StoreUnavailable, match=rf"127.0.0.1:{own_pair.replica.port}: is a replica of 127.0.0.1"):
            of_both.connect(purpose)
    own_pair.replica.execute("stop slave")
    with pytest.raises(StoreUnavailable, match=r"is a replica of 127\.0\.0\.1"):
        of_both.open("control")  # it may go on at any time
    own_pair.replica.promote()
    with contextlib.closing(of_both.open("control")) as session:
        assert port_of(session.connection) == own_pair.replica.port


def test_several_hosts_are_refused_where_replicas_cannot_be_seen(pair):
    pair.primary.execute(MAY_NOT_SEE)
    pair.replica.catch_up(pair.primary)
    try:
        for url in (pair.replica_first, pair.url(pair.primary.port, pair.replica.port)):
            with pytest.raises(
                ConfigError, match=r"grant SLAVE MONITOR on \*\.\* to it on each server, or .* one host"
            ):
                tenure.Node(url).start()
        with tenure.Node(pair.url(pair.primary.port)) as node:
            assert node.election("r").wait(30)
        (finding,) = Visit(pair.replica_first).findings
        assert finding["check"] == "hosts", "once for all hosts"
        assert "grant SLAVE MONITOR" in finding["remedy"]
    finally:
        pair.primary.execute(MAY_SEE)


def test_read_only_replica_is_passed_over(pair):
    of_both = connector(pair.replica_first)
    with pair.replica.configured(read_only=True), contextlib.closing(of_both.open("tests")) as session:
        assert port_of(session.connection) == pair.primary.port


def test_dead_host_is_dialled_once(pair, frozen_host):
    of_both = connector(pair.url(frozen_host.port, pair.primary.port))
    with contextlib.closing(of_both.open("watch")) as session:
        for _ in range(3):
            of_both.connect("transaction").close()
        assert of_both.knock(session) == session.server_start
    assert frozen_host.dialled == 1


def test_knock_and_interruption_go_to_the_server_of_their_connection(pair, frozen_host):
    """The number of a connection means another connection on another server."""
    of_both = connector(pair.url(frozen_host.port, pair.primary.port))
    with contextlib.closing(of_both.open("watch")) as session:
        connection = of_both.connect("transaction")
        of_both.hosts._answered = 0  # as if the first host had been the last to answer
        assert of_both.knock(session) == session.server_start
        with contextlib.closing(connection):
            interrupt(connection)
            assert connection.open, "it was not cut: the server was reached"
    assert frozen_host.dialled == 1


# --- what the doctor says ---------------------------------------------------------------------------------------


def hosts_of(visit: Visit) -> dict[str, str]:
    return {one["text"]: one["level"] for one in visit.findings if one["check"] == "hosts"}


def test_doctor_says_what_each_host_is(pair, frozen_host):
    visit = Visit(pair.url(frozen_host.port, pair.replica.port, pair.primary.port))
    here = ADDRESS
    found = hosts_of(visit)
    assert found.pop(f"{here}:{pair.replica.port} is a replica of {here}") == "ok"
    assert found.pop(f"{here}:{pair.primary.port} takes writes") == "ok"
    ((text, level),) = found.items()
    assert (text.startswith(f"{here}:{frozen_host.port} is dead: "), level) == (True, "warning")
    assert visit.levels["primary"] == "ok"


def test_doctor_warns_of_two_that_take_writes_and_of_a_replica_that_does(own_pair):
    visit = Visit(own_pair.url(own_pair.replica.port))
    assert visit.levels["primary"] == "warning"
    assert "takes writes, and is a replica of 127.0.0.1" in visit.texts["primary"]
    own_pair.replica.promote()
    visit = Visit(own_pair.replica_first)
    here = ADDRESS
    both = f"{here}:{own_pair.replica.port} and {here}:{own_pair.primary.port} take writes"
    assert any(text.startswith(both) and level == "warning" for text, level in hosts_of(visit).items())
    same = Visit(own_pair.url(own_pair.primary.port).replace(here, f"localhost:{own_pair.primary.port},{here}"))
    assert set(hosts_of(same).values()) == {"ok"}, "two names of the same server"


# --- other servers, and modes of this one -----------------------------------------------------------------------


def test_server_that_calls_itself_tidb_is_refused_by_name():
    if mariadb_program() is None:
        missing(NO_MARIADB)
    with MariaDbServer(settings={"version": "8.0.11-TiDB-v8.5.3"}) as server:
        url = server.create_database()
        with pytest.raises(
            ConfigError, match=r"is TiDB \(8.0.11-TiDB-v8.5.3\), where LOCK IN SHARE MODE locks nothing"
        ):
            tenure.Node(url).start()
        visit = Visit(url)
        assert (visit.levels["server"], visit.remedies["server"]) == ("error", "use MariaDB, or PostgreSQL")
        assert "is TiDB (8.0.11-TiDB-v8.5.3)" in visit.texts["server"]


def test_innodb_that_is_read_only_as_on_readers_of_aurora_is_no_primary():
    if mariadb_program() is None:
        missing(NO_MARIADB)
    with MariaDbServer() as server:
        url = server.create_database()
        server.stop()
        server.settings["innodb_read_only"] = 1
        server.start()
        with pytest.raises(StoreUnavailable, match=r"as readers of Aurora are; .* give the end point of the cluster"):
            tenure.Node(url).start()
        assert Visit(url).remedies["primary"] == "give the end point of the cluster, which leads to the writer"


@pytest.mark.parametrize(
    ("version", "variables", "refusal"),
    [
        ("5.7.25-TiDB-v6.1.0", {}, "is TiDB"),
        ("8.0.36", {"group_replication_single_primary_mode": "OFF"}, "with several primaries"),
        ("8.0.36", {"group_replication_single_primary_mode": "ON"}, None),
        ("10.11.2-MariaDB", {"wsrep_on": "ON"}, "is a Galera cluster"),
        ("10.11.2-MariaDB", {"wsrep_on": "OFF"}, None),
        ("10.5.8-MariaDB", {}, "upgrade it to MariaDB 10.6"),
    ],
)
def test_servers_are_known_by_what_they_say(version, variables, refusal):
    said = why_unusable(version, variables)
    assert (said is None) == (refusal is None)
    assert refusal is None or refusal in said


@pytest.mark.parametrize("value", ["ON", "1", "NO_LOCK", "NO_LOCK_NO_ADMIN"])
@pytest.mark.parametrize("name", ["read_only", "super_read_only", "innodb_read_only"])
def test_every_way_to_be_read_only_is_seen(name, value):
    assert why_no_primary({name: value})
    assert why_no_primary({name: "OFF"}) is None
    assert why_no_primary({}) is None
