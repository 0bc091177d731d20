"""The pooler that the tests stand on pools, shares what a pooler shares, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import socket
import time

import psutil
import psycopg
import pytest

from tests.harness.test_servers import assert_cleaned_up_after, needs_root
from tests.support import servers
from tests.support.poolers import PgBouncer, PoolerFailed

pytestmark = pytest.mark.harness


def connect(url):
    return psycopg.connect(url, autocommit=True, prepare_threshold=None)


def backend_of(connection):
    return connection.execute("select pg_backend_pid()").fetchone()[0]


@pytest.mark.parametrize("pool_mode", ["session", "transaction", "statement"])
def test_server_connections_are_shared_as_the_mode_says(postgres_server, make_pgbouncer, pool_mode):
    pooler = make_pgbouncer(postgres_server, pool_mode=pool_mode, pool_size=1)
    url = pooler.through(postgres_server.url())
    with connect(url) as one:
        backend = backend_of(one)
        assert backend != one.info.backend_pid  # how a pooler is told from a server
        if pool_mode != "session":  # where the next one waits until this one has gone
            with connect(url) as other:
                assert backend_of(other) == backend
        if pool_mode == "statement":
            with pytest.raises(psycopg.Error, match="not allowed in statement pooling mode"):
                one.execute("begin")
        else:
            with one.transaction():
                assert backend_of(one) == backend


def test_what_a_client_sets_is_what_the_next_one_finds(postgres_server, make_pgbouncer):
    """The trap: this is what Tenure must not do behind a pooler."""
    url = make_pgbouncer(postgres_server, pool_size=1).through(postgres_server.url())
    with connect(url) as careless, connect(url) as other:
        careless.execute("set work_mem = '77MB'")
        careless.execute("select pg_advisory_lock(1)")
        assert other.execute("show work_mem").fetchone() == ("77MB",)
        assert other.execute("select pg_try_advisory_lock(1)").fetchone() == (True,)


def test_no_more_server_connections_than_the_pool_has(postgres_server, postgres_url, make_pgbouncer):
    pooler = make_pgbouncer(postgres_server, pool_size=2)
    url = pooler.through(postgres_url)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(contextlib.closing(connect(url))) for _ in range(5)]
        for client in clients[:2]:
            client.execute("begin")
        for client in clients[2:]:
            client.pgconn.send_query(b"select 1")
        deadline = time.monotonic() + 20
        while (waiting := sum(pool["cl_waiting"] for pool in pooler.admin("show pools"))) < 3:
            assert time.monotonic() < deadline, f"{waiting} clients wait"
            time.sleep(0.02)
        assert len(postgres_server.backends(postgres_url.rpartition("/")[2])) == 2


def test_restart_cuts_every_client_and_keeps_the_port(postgres_server, make_pgbouncer):
    pooler = make_pgbouncer(postgres_server)
    url, pid = pooler.through(postgres_server.url()), pooler.pid
    with connect(url) as client:
        pooler.restart()
        with pytest.raises(psycopg.OperationalError):
            client.execute("select 1")
    assert pooler.pid != pid
    with connect(url) as client:
        assert client.execute("select 1").fetchone() == (1,)


def test_port_taken_meanwhile_is_given_up_for_another(postgres_server, make_pgbouncer):
    with contextlib.closing(PgBouncer(postgres_server)) as pooler, socket.create_server(("127.0.0.1", pooler.port)):
        taken = pooler.port
        pooler.start()
        assert pooler.port != taken
        assert pooler.admin("show version")
        # From here on clients know the port, so it must not change any more.
        pooler.kill()
        with socket.create_server(("127.0.0.1", pooler.port)), pytest.raises(PoolerFailed, match="in use"):
            pooler.start()


def test_setting_that_does_not_exist_is_an_error_with_its_log(postgres_server, make_pgbouncer):
    with pytest.raises(PoolerFailed, match="no_such"):
        make_pgbouncer(postgres_server, settings={"no_such": 1})


@needs_root
def test_pooler_runs_without_privileges(postgres_server, make_pgbouncer):
    process = psutil.Process(make_pgbouncer(postgres_server).pid)
    assert 0 not in (*process.uids(), *process.gids())


def test_nothing_is_left_of_a_pooler_that_was_closed(postgres_server, make_pgbouncer):
    pooler = make_pgbouncer(postgres_server)
    process = psutil.Process(pooler.pid)
    pooler.close()
    assert not pooler.log.parent.exists()
    assert not servers._alive(process)


def test_nothing_is_left_of_a_pooler_whose_test_process_was_killed(postgres_server, make_pgbouncer):
    program = (
        "import sys, time; from types import SimpleNamespace; from tests.support.poolers import PgBouncer\n"
        f"pooler = PgBouncer(SimpleNamespace(listen='127.0.0.1', port={postgres_server.port})); pooler.start()\n"
        "print(pooler.pid, pooler.log.parent, flush=True); time.sleep(60)"
    )
    assert_cleaned_up_after(program)
