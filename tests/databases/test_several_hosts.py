"""A URL with several hosts, one of which is dead: only the first connection may pay for it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

import tenure
from tenure.databases.postgres import servers
from tenure.databases.postgres.connect import PostgresConnector
from tenure.databases.postgres.servers import why_unusable
from tenure.errors import ConfigError, StoreUnavailable
from tests.cli.test_cli_doctor import Visit
from tests.conftest import missing
from tests.support.cluster import LEDGER, Cluster
from tests.support.hosts import FrozenHost
from tests.support.mariadb import NO_MARIADB, MariaDbServer, mariadb_program
from tests.support.servers import free_port
from tests.support.store_by_hand import execute


@pytest.fixture
def frozen_host() -> Iterator[FrozenHost]:
    with contextlib.closing(FrozenHost()) as host:
        yield host


def with_first_host(url: str, port: int) -> str:
    """The URL with one more host in front."""
    server, _, database = url.partition("@")[2].partition("/")
    return f"postgresql://postgres@127.0.0.1:{port},{server}/{database}?target_session_attrs=read-write"


def test_host_that_answered_last_is_dialled_first(postgres_url, frozen_host):
    url = with_first_host(postgres_url, frozen_host.port)
    connector = PostgresConnector(url, "tenure", 10.0, "tests")
    with contextlib.closing(connector.open("tests", 10.0)) as session:
        assert frozen_host.dialled == 1
        for _ in range(3):
            connector.connect("tests").close()
        assert connector.knocker(session)()() == session.server_start
    assert frozen_host.dialled == 1


def test_knock_goes_to_the_server_of_the_session_and_to_no_other(postgres_url, frozen_host):
    connector = PostgresConnector(with_first_host(postgres_url, frozen_host.port), "tenure", 10.0, "tests")
    with contextlib.closing(connector.open("tests", 10.0)) as session:
        knock = connector.knocker(session)
        connector.hosts._answered = 0  # as if the first host had been the last to answer
        assert knock()() == session.server_start
    assert frozen_host.dialled == 1


def test_every_host_is_dialled_again_when_the_last_one_is_gone(make_postgres_server):
    first, second = make_postgres_server(fsync=False), make_postgres_server(fsync=False)
    name = first.create_database().rpartition("/")[2]
    second.create_database()
    url = f"postgresql://postgres@127.0.0.1:{first.port},127.0.0.1:{second.port}/{name}"
    connector = PostgresConnector(url, "tenure", 10.0, "tests")
    answered = []

    def dial() -> None:
        with connector.connect("tests") as connection:
            answered.append(connection.info.port)

    dial()
    first.stop()
    dial()
    first.start()
    dial()  # the one that answered last still does
    second.stop()
    dial()
    assert answered == [first.port, second.port, second.port, first.port]


def test_nodes_lead_write_and_fail_over_beside_a_dead_host(postgres_url, frozen_host, tmp_path):
    url = with_first_host(postgres_url, frozen_host.port)
    execute(postgres_url, LEDGER["postgresql"])  # psycopg itself would wait for the dead host
    with Cluster(url, tmp_path, ttl=30) as cluster:
        cluster.start(2)
        leader, token = cluster.wait_for_leader()
        leader.tell("write")
        before = frozen_host.dialled
        leader.kill()
        successor, _ = cluster.wait_for_leader(above=token)
        successor.tell("write")
        assert frozen_host.dialled == before


def test_standby_is_passed_over_although_the_url_does_not_say_so(replica):
    name = replica.primary.create_database().rpartition("/")[2]
    replica.catch_up()
    url = f"postgresql://postgres@127.0.0.1:{replica.port},127.0.0.1:{replica.primary.port}/{name}"
    with tenure.Node(url) as node, node.lead("r", timeout=30) as term, term.transaction() as transaction:
        assert transaction.execute("select pg_is_in_recovery()").fetchone() == (False,)
    replica.primary.stop()
    with pytest.raises(StoreUnavailable, match=rf"127.0.0.1:{replica.port}: .*hot standby") as error:
        PostgresConnector(url, "tenure", 10.0, "tests").open("tests", 10.0)
    assert f"127.0.0.1:{replica.primary.port}: " in str(error.value)


def test_many_dead_hosts_before_the_living_one_do_not_stop_a_node_with_a_short_ttl(postgres_url):
    with contextlib.ExitStack() as stack:
        dead = [stack.enter_context(contextlib.closing(FrozenHost())) for _ in range(6)]
        places = ",".join(f"127.0.0.1:{host.port}" for host in dead)
        server, _, name = postgres_url.partition("@")[2].partition("/")
        with tenure.Node(f"postgresql://postgres@{places},{server}/{name}", ttl=3) as node:
            with node.lead("r", timeout=30) as term, term.transaction() as transaction:
                transaction.execute("select 1")
            # The two lanes are opened at the same time, so each of them may have dialled all.
            assert all(1 <= host.dialled <= 2 for host in dead)


def test_closing_a_node_does_not_wait_for_dead_hosts(frozen_host):
    url = f"postgresql://postgres@127.0.0.1:{frozen_host.port},127.0.0.1:{frozen_host.port}/app?connect_timeout=60"
    connector = PostgresConnector(url, "tenure", 10.0, "tests")
    threading.Timer(0.5, connector.abort).start()
    before = time.monotonic()
    with pytest.raises(StoreUnavailable, match="not needed any more"):
        connector.connect("tests")
    assert time.monotonic() - before < 30


def test_several_poolers_lead_to_the_primary(postgres_server, postgres_url, make_pgbouncer):
    """A pooler may not report whether its server is a standby; then libpq asks."""
    poolers = [make_pgbouncer(postgres_server, pool_mode="transaction") for _ in range(2)]
    database = postgres_url.rpartition("/")[2]
    places = ",".join(pooler.through(postgres_url).partition("@")[2].partition("/")[0] for pooler in poolers)
    url = f"postgresql://postgres@{places}/{database}"
    poolers[0].kill()
    with tenure.Node(url) as node, node.lead("r", timeout=30) as term, term.transaction() as transaction:
        assert transaction.execute("select 1").fetchone() == (1,)
        assert node.mode == "lease"


@pytest.mark.parametrize(
    ("rest", "complaint"),
    [
        ("a,b:5432,c:1/app?hostaddr=127.0.0.1", r"differ in length \(host: 3, hostaddr: 1, port: 3\)"),
        ("/app?host=a,b&port=1,2,3", r"differ in length \(host: 2, port: 3\)"),
    ],
)
def test_lists_of_the_url_must_match(rest, complaint):
    with pytest.raises(ConfigError, match=complaint):
        tenure.Node(f"postgresql://{rest}")


# --- names ----------------------------------------------------------------------------------------------------


ASK = {
    "postgresql": """
import sys
from tenure.databases.postgres import servers
from tenure.databases.postgres.connect import PostgresConnector
connector = PostgresConnector(sys.argv[1], "tenure", 10.0, "tests")
for _ in sys.stdin:
    with connector.connect("tests") as connection:
        print(connection.info.hostaddr, flush=True)
""",
    "mysql": """
import sys
from tenure.databases.mysql.connect import MySqlConnector
connector = MySqlConnector(sys.argv[1], 10.0, "tests")
for _ in sys.stdin:
    with connector.connect("tests") as connection:
        print(connection._sock.getpeername()[0], flush=True)
""",
}
"""Programs that print, for each line of their input, to which address a new connection leads."""


@pytest.fixture(params=["postgresql", "mysql"])
def moving(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """Two servers, at 127.0.0.2 and 127.0.0.3 on the same port: the kind of database, and a URL without hosts."""
    port = free_port("127.0.0.2")
    with contextlib.ExitStack() as stack:
        if request.param == "postgresql":
            make = request.getfixturevalue("make_postgres_server")
            for address in ("127.0.0.2", "127.0.0.3"):
                make(listen=address, port=port, fsync=False)
            yield request.param, f"postgresql://postgres@{{}}:{port}/postgres"
            return
        if mariadb_program() is None:
            missing(NO_MARIADB)
        for address in ("127.0.0.2", "127.0.0.3"):
            server = stack.enter_context(MariaDbServer(settings={"bind_address": address, "port": port}))
            server.execute("create database test_app")
            server.execute("grant slave monitor on *.* to tenure@'%'")
        yield request.param, f"mysql://tenure@{{}}:{port}/test_app"


@pytest.mark.parametrize("hosts", [["moves.test"], ["gone.test", "moves.test"]], ids=["one", "several"])
@pytest.mark.twin("one")
def test_name_that_moves_is_resolved_anew_for_each_connection(moving, hosts, tmp_path):
    """A managed failover moves the name. The system's own resolver reads it, from a file of hosts of the test's own."""
    database, url = moving
    if shutil.which("unshare") is None or subprocess.run(["unshare", "--mount", "true"], check=False).returncode:
        missing("a file of hosts of one's own needs root")
    names = tmp_path / "hosts"
    port = url.rpartition(":")[2].partition("/")[0]
    names.write_text("127.0.0.2 moves.test\n127.0.0.9 gone.test\n")  # nobody listens there
    script = 'mount --bind "$1" /etc/hosts && shift && exec "$@"'
    program = [sys.executable, "-c", ASK[database], url.format(f":{port},".join(hosts))]
    with subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", script, "sh", names, *program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        answers = []
        for address in ("127.0.0.2", "127.0.0.3", "127.0.0.2"):
            names.write_text(f"{address} moves.test\n127.0.0.9 gone.test\n")
            child.stdin.write("\n")
            child.stdin.flush()
            answers.append(child.stdout.readline().strip())
        child.stdin.close()
    assert answers == ["127.0.0.2", "127.0.0.3", "127.0.0.2"]


# --- other servers, and what the doctor says --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "release", "cockroach", "refusal"),
    [
        (130000, "13.0.0", "CockroachDB CCL v24.1.0", "is CockroachDB, "),
        (150012, "15.12-YB-2025.1.0.0-b0", None, "is YugabyteDB (15.12-YB-2025.1.0.0-b0), "),
        (110002, "11.2-YB-2.20.1.0-b0", None, "is YugabyteDB "),
        (130000, "13.11", None, "has version 13: upgrade the server to 14 or newer"),
        (150018, "15.18 (Debian 15.18-0+deb12u1)", None, None),
    ],
)
def test_servers_are_known_by_what_they_say(version, release, cockroach, refusal):
    said = why_unusable(version, release, cockroach)
    assert (said is None) == (refusal is None)
    assert refusal is None or refusal in said


def test_refusal_reaches_nodes_and_the_doctor(postgres_url, monkeypatch):
    """By a server whose version is called too old: none of the others is to be had."""
    monkeypatch.setattr(servers, "OLDEST_VERSION", 990000)
    with pytest.raises(ConfigError, match=r"has version \d+: upgrade the server"):
        tenure.Node(postgres_url).start()
    visit = Visit(postgres_url)
    assert (visit.levels["server"], visit.remedies["server"]) == ("error", "upgrade the server to 14 or newer")
    visit = Visit(postgres_url.replace("127.0.0.1", "localhost:1,127.0.0.1"))
    assert visit.levels["hosts"] == "error"


def test_reader_of_aurora_is_refused_by_name(replica):
    """A standby with a function that only Aurora has."""
    url = replica.primary.create_database()
    execute(url, "create function aurora_version() returns text language sql as $$ select '16.1.0' $$")
    replica.catch_up()
    theirs = replica.url(url.rpartition("/")[2])
    with pytest.raises(StoreUnavailable, match=r"is a reader of Aurora, .* give the end point of the cluster"):
        tenure.Node(theirs).start()
    assert Visit(theirs).remedies["primary"] == "give the end point of the cluster, which leads to the writer"
    with pytest.raises(StoreUnavailable, match="is a hot standby"):
        tenure.Node(replica.url()).start()


def test_doctor_says_what_each_host_is_and_warns_of_two_primaries(replica, frozen_host):
    here = "127.0.0.1"
    standby, primary, dead = (f"{here}:{port}" for port in (replica.port, replica.primary.port, frozen_host.port))
    visit = Visit(f"postgresql://postgres@{dead},{standby},{primary}/postgres")
    found = {one["text"].partition(": ")[0]: one["level"] for one in visit.findings if one["check"] == "hosts"}
    assert found == {f"{dead} is dead": "warning", f"{standby} is a standby": "ok", f"{primary} takes writes": "ok"}
    assert visit.levels["primary"] == "ok"
    visit = Visit(f"postgresql://postgres@{standby},localhost:{replica.port}/postgres")
    assert (visit.code, visit.levels) == (2, {"hosts": "error"})
    assert visit.texts["hosts"] == f"no host takes writes: {standby}, localhost:{replica.port}"
    assert visit.remedies["hosts"] == "promote one, or add the primary to the URL"
    replica.promote()
    visit = Visit(f"postgresql://postgres@{standby},{primary},localhost:{replica.primary.port}/postgres")
    assert visit.levels["hosts"] == "warning"
    assert visit.texts["hosts"].startswith(f"{standby} and {primary} take writes: ")
