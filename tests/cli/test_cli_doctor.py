"""`tenure doctor` finds each planted fault, names the remedy, and the remedy mends it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

import tenure
from tenure.core import timing
from tenure.databases.doctor import diagnosed, ok, pace
from tenure.databases.postgres.doctor import TIMEOUTS
from tenure.databases.postgres.sentinel import CLASS_ID
from tenure.store.tables import MIGRATIONS, Migration
from tests.cli.test_cli import Answer, tell
from tests.support.secrets import CANARY, PIECE
from tests.support.servers import Scratch, server_account
from tests.support.store_by_hand import Desk, Nodes, connected, execute, until

FIT = {"reachable", "server", "round trip", "primary", "connection", "tls", "keepalive", "connections", "time-outs"}
FIT |= {"durability", "replication", "ttl", "tables", "privileges", "identity", "namespace", "keys", "members"}
FIT |= {"guards"}
FIT_FILE = {"directory", "file", "sentinels", "locks", "log", "tables", "write", "ttl", "namespace", "members"}


class Visit:
    """What the doctor found: the exit code, and the findings by check. More than one of a check: the worst."""

    def __init__(self, url: str, *arguments: str) -> None:
        answer = Answer("doctor", "--json", *arguments, url=url)
        assert not answer.err
        self.code = answer.code
        self.findings = json.loads(answer.out)
        self.levels, self.texts, self.remedies = {}, {}, {}
        for finding in sorted(self.findings, key=lambda one: ["ok", "warning", "error"].index(one["level"])):
            assert set(finding) == {"check", "level", "text", "remedy"}
            assert bool(finding["remedy"]) == (finding["level"] != "ok"), "whatever is not fine has a remedy"
            check = finding["check"]
            self.levels[check], self.texts[check] = finding["level"], finding["text"]
            self.remedies[check] = finding["remedy"]

    def only(self, *expected: str) -> None:
        """Nothing but these (`check level`) is worth more than `ok`, the shared server's want of fsync apart."""
        worse = {f"{check} {level}" for check, level in self.levels.items() if level != "ok"} - {"durability warning"}
        assert worse == set(expected), self.findings


@pytest.fixture
def tables(postgres_url):
    """A database with tables."""
    with Desk(postgres_url, join=False):
        return postgres_url


@pytest.fixture
def worker(postgres_server, postgres_url):
    """A database role that may do nothing, and the URL under which it connects."""
    database = postgres_url.rpartition("/")[2]
    name = f"doctor-{database}"
    execute(postgres_url, f'create role "{name}" login')
    yield name, postgres_server.url(database, user=name)
    execute(postgres_url, f'drop owned by "{name}"', f'drop role "{name}"')


def permit(url: str, name: str) -> None:
    """Give a database role what a node needs."""
    with connected(url, autocommit=True) as connection:
        connection.execute(Answer("sql", "--grants", name).out.encode())


def mend(url: str, visit: Visit, check: str) -> None:
    """Do what the doctor says."""
    with connected(url, autocommit=True) as connection:
        connection.execute(visit.remedies[check].partition(", and see")[0])


# --- fit ----------------------------------------------------------------------------------------------------


def test_fit_server_is_fit_in_every_respect_and_nothing_is_left_behind(postgres_server, postgres_url):
    with postgres_server.configured(fsync=True), Nodes(postgres_url) as nodes:
        nodes.pair("r")
        before = postgres_server.log_mark()
        answer = Answer("doctor", "--strict", url=postgres_url)
        assert (answer.code, answer.err) == (0, "")
        lines = [re.split("  +", line, maxsplit=2) for line in answer.out.splitlines()]
        assert {state for state, _, _ in lines} == {"ok"}
        assert {check for _, check, _ in lines} == FIT
        found = {check: text for _, check, text in lines}
        assert found["connection"] == "direct, and advisory locks hold: a node picks mode hybrid"
        assert found["members"] == "2 living, all renewing"
        assert "tcp_user_timeout=11000" in found["keepalive"]
        assert execute(postgres_url, "select count(*) from tenure.members") == [(2,)]
        assert postgres_server.log_lines(before) == []


def test_fit_file_is_fit_in_every_respect_and_nothing_is_left_behind(sqlite_url, tmp_path):
    with Nodes(sqlite_url) as nodes:
        nodes("one").election("r").wait(20)
        before = execute(sqlite_url, "select name, value from tenure_meta")
        files = sorted(tmp_path.rglob("*"))
        answer = Answer("doctor", "--strict", url=sqlite_url)
        assert (answer.code, answer.err) == (0, "")
        lines = [re.split("  +", line, maxsplit=2) for line in answer.out.splitlines()]
        assert [state for state, _, _ in lines] == ["ok"] * len(FIT_FILE)
        assert {check for _, check, _ in lines} == FIT_FILE
        assert sorted(tmp_path.rglob("*")) == files
        assert execute(sqlite_url, "select name, value from tenure_meta") == before


# --- where it leads -----------------------------------------------------------------------------------------


def test_unreachable_server_is_one_line_without_the_password():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and deaf
        url = f"postgresql://me:{CANARY}@127.0.0.1:{taken.getsockname()[1]}/app"
        answer = Answer("doctor", url=url)
        printed = Answer("doctor", "--json", url=url)
    (line,) = answer.out.splitlines()
    assert (answer.code, answer.err) == (printed.code, printed.err) == (2, "")
    assert re.match(
        r"FAIL  reachable  cannot connect to PostgreSQL at 127.* refused.*; remedy: start the server, ", line
    )
    assert PIECE not in answer.out + printed.out


def test_wrong_arguments_are_one_line(sqlite_url):
    for arguments in (["--ttl", "0"], ["--url", "nothing://x"], ["--schema", "1st"]):
        answer = Answer("doctor", *arguments, url=None if "--url" in arguments else sqlite_url)
        assert (answer.code, answer.out, answer.err.count("\n")) == (2, "", 1)


def test_whatever_hangs_is_a_finding():
    forever = threading.Event()

    def hanging():
        yield ok("first", "quick")
        forever.wait()

    first, last = diagnosed(hanging(), limit_s=0.1)
    forever.set()
    assert (first.check, last.level) == ("first", "error")
    assert last.text == "no answer after 'first' within 0.1 s"


@pytest.mark.parametrize(("pool_mode", "code"), [("transaction", 0), ("statement", 2)])
def test_pooler_in_between_is_found(postgres_server, tables, make_pgbouncer, pool_mode, code):
    pooler = make_pgbouncer(postgres_server, pool_mode=pool_mode, pool_size=1)
    visit = Visit(pooler.through(tables))
    assert visit.code == code, visit.findings
    visit.only("connection warning" if code == 0 else "connection error")
    assert "pooler" in visit.texts["connection"]
    if code == 0:
        assert "a node picks mode lease" in visit.texts["connection"]
        assert "direct_url=" in visit.remedies["connection"]
        strict = Visit(pooler.through(tables), "--strict")
        assert strict.code == 1, strict.findings
    else:
        assert "pool_mode = transaction" in visit.remedies["connection"]


def test_hot_standby_is_found_and_its_primary_tells_of_it(replica):
    visit = Visit(replica.url())
    assert visit.code == 2
    visit.only("primary error")
    assert "target_session_attrs=read-write" in visit.remedies["primary"]
    assert "1 replica, asynchronous" in Visit(replica.primary.url()).texts["replication"]
    with replica.synchronous():
        assert "1 replica, synchronous" in Visit(replica.primary.url()).texts["replication"]
    with replica.primary.configured(synchronous_standby_names="somebody_else"):
        visit = Visit(replica.primary.url())
        assert (visit.code, visit.levels["replication"]) == (2, "error")
        assert "every commit waits for ever" in visit.texts["replication"]


# --- tables and privileges ----------------------------------------------------------------------------------


def test_missing_tables_are_found(postgres_url, worker):
    visit = Visit(postgres_url)
    assert visit.code == 0
    visit.only("tables warning")
    assert visit.remedies["tables"] == "run `tenure init`"
    _, poor = worker
    visit = Visit(poor)
    assert visit.code == 2
    visit.only("tables error", "privileges error")
    with Desk(postgres_url, join=False):
        execute(postgres_url, "drop table tenure.candidates", "drop function tenure.fence")
    visit = Visit(postgres_url)
    visit.only("tables error")
    assert visit.texts["tables"] == "missing in schema 'tenure': candidates, fence"
    execute(postgres_url, "drop table tenure.meta")
    Visit(postgres_url).only("tables error")


def test_missing_column_is_found(tables):
    execute(tables, "alter table tenure.terms drop column end_reason")
    visit = Visit(tables)
    visit.only("tables error")
    assert "end_reason" in visit.texts["tables"]


def test_schema_that_one_may_create_tables_in_is_enough(postgres_url, worker):
    name, url = worker
    execute(postgres_url, "create schema tenure", f'grant usage on schema tenure to "{name}"')
    Visit(url).only("tables error", "privileges error")
    execute(postgres_url, f'grant create on schema tenure to "{name}"')
    Visit(url).only("tables warning")
    with Desk(url, join=False):
        Visit(url).only()


def test_missing_privileges_are_found_and_the_remedy_gives_them(tables, worker):
    name, url = worker
    visit = Visit(url)
    assert visit.code == 2
    visit.only("privileges error")
    assert "lacks USAGE on schema 'tenure', SELECT, INSERT, UPDATE, DELETE on candidates" in visit.texts["privileges"]
    execute(
        tables,
        f'grant usage on schema tenure to "{name}"',
        f'grant select on all tables in schema tenure to "{name}"',
        "revoke execute on function tenure.fence from public",
    )
    assert "UPDATE, DELETE on candidates, EXECUTE on fence, INSERT" in Visit(url).texts["privileges"]
    (command,) = re.findall("`tenure (.*)`", visit.remedies["privileges"])
    with connected(tables, autocommit=True) as connection:
        connection.execute(Answer(*command.split()).out.encode())
    Visit(url).only()


@pytest.mark.twin("postgres")
def test_tables_of_a_newer_release_are_found(one_url):
    with Desk(one_url, join=False) as desk:
        meta = desk.session.dialect.prefix + "meta"
    for oldest, expected, says in (
        (98, "tables error", "needs a release that knows at least version 98"),
        (1, "tables warning", "newer than this release's"),
    ):
        execute(one_url, f"update {meta} set value = case name when 'version' then 99 else {oldest} end")
        visit = Visit(one_url)
        visit.only(expected)
        assert says in visit.texts["tables"]
        assert visit.remedies["tables"] == "upgrade Tenure here"


def test_tables_of_an_older_release_are_found(tables, worker, monkeypatch):
    name, url = worker
    permit(tables, name)
    newest = MIGRATIONS[-1].version
    monkeypatch.setattr("tenure.store.tables.MIGRATIONS", (*MIGRATIONS, Migration(newest + 1, ())))
    visit = Visit(tables)
    visit.only("tables warning")
    assert f"version {newest}, and this release has {newest + 1}" in visit.texts["tables"]
    visit = Visit(url)
    visit.only("tables error")
    assert visit.remedies["tables"] == "run `tenure init` as their owner"


# --- settings -----------------------------------------------------------------------------------------------


SETTINGS = {
    "idle_session_timeout = '1h'": "is 3600 s, set for this role in this database: a node overrides it for itself",
    "idle_in_transaction_session_timeout = '5s'": "is 5 s, .* fenced transaction .* is ended",
    "statement_timeout = '500ms'": "is 0.5 s, ",
    "lock_timeout = '10ms'": "waits longer for a lock",
    "synchronous_commit = off": "a node uses `local` for itself",
}


def test_settings_of_the_role_are_found_and_the_remedies_mend_them(postgres_server, tables):
    with postgres_server.configured(fsync=True):
        for setting in SETTINGS:
            execute(tables, f"alter role postgres in database {tables.rpartition('/')[2]} set {setting}")
        visit = Visit(tables)
        assert visit.code == 0
        found = {finding["text"].split()[0]: finding for finding in visit.findings if finding["level"] == "warning"}
        assert [*found] == sorted(setting.split()[0] for setting in SETTINGS)
        for setting, says in SETTINGS.items():
            finding = found.pop(setting.split()[0])
            assert re.search(says, finding["text"])
            execute(tables, finding["remedy"])
        assert Visit(tables, "--strict").code == 0


def test_long_time_outs_are_told_and_fine(tables):
    execute(tables, f"alter database {tables.rpartition('/')[2]} set statement_timeout = '30s'")
    visit = Visit(tables)
    visit.only()
    assert "statement_timeout is 30 s, set for this database" in visit.texts["time-outs"]
    assert "set by the URL" in Visit(tables + "?options=-cstatement_timeout%3D20s").texts["time-outs"]


def test_node_overrides_every_time_out_as_the_doctor_says(every_postgres_url):
    database = every_postgres_url.rpartition("/")[2]
    set_ = "select name from pg_settings where name = any(%s) and setting = '7000'"
    with connected(every_postgres_url, autocommit=True) as connection:
        known = connection.execute("select name from pg_settings where name = any(%s)", [list(TIMEOUTS)]).fetchall()
        for (name,) in known:
            connection.execute(f"alter database {database} set {name} = '7s'")
    with connected(every_postgres_url) as connection:
        assert len(connection.execute(set_, [list(TIMEOUTS)]).fetchall()) == len(known) >= 4
    with Desk(every_postgres_url, join=False) as desk:
        _, watch = desk.backend.open_watch()
        with contextlib.closing(watch):
            for session in (desk.session, watch):
                assert session.connection.execute(set_, [list(TIMEOUTS)]).fetchall() == []


@pytest.mark.parametrize(("limit", "expected"), [(9, "connections warning"), (1, "connection error")])
def test_want_of_connections_is_found(tables, worker, limit, expected):
    name, url = worker
    permit(tables, name)
    execute(tables, f'alter role "{name}" connection limit {limit}')
    visit = Visit(url)
    visit.only(expected)
    if limit > 1:
        assert f"room for {limit} more" in visit.texts["connections"]


def test_ttl_is_held_against_the_distance_and_the_largest_permitted(tables, monkeypatch):
    monkeypatch.setenv("TENURE_TTL", "3")
    assert "ttl=3: a renewal every 0.75 s" in Visit(tables).texts["ttl"]
    tell("init", "--max-ttl", "60", url=tables)
    visit = Visit(tables, "--ttl", "61")
    visit.only("largest ttl error")
    assert "`tenure init --max-ttl 61`" in visit.remedies["largest ttl"]
    settings = Desk(tables, join=False, ttl=4)
    with settings:
        for round_trip_s, level in ((0.05, "ok"), (0.2, "warning"), (0.6, "error")):
            assert pace(settings.settings, round_trip_s).level == level


def test_ttl_that_is_not_given_is_that_of_the_living_members(store_url):
    tell("init", url=store_url)
    assert Visit(store_url).texts["ttl"].startswith("ttl=10, the default: a renewal every 2.5 s")
    with Desk(store_url, ttl=4):
        assert Visit(store_url).texts["ttl"].startswith("ttl=4, as the living members have it: a renewal every 1 s")
        with Desk(store_url, ttl=6):
            assert Visit(store_url).texts["ttl"].startswith("ttl=4, the shortest of the living members: ")
        assert Visit(store_url, "--ttl", "5").texts["ttl"].startswith("ttl=5: a renewal every 1.25 s")


@pytest.mark.twin("postgres")
def test_limit_that_the_first_node_sets_is_neither_shown_nor_held_against_the_ttl(store_url):
    tell("init", url=store_url)
    visit = Visit(store_url, "--ttl", "100")
    assert "largest ttl" not in visit.levels
    assert visit.texts["namespace"].endswith("the first node sets the largest permitted TTL")
    with Nodes(store_url, ttl=100) as nodes:
        nodes("first").election("r").wait(20)
    assert Visit(store_url).texts["namespace"].endswith("the largest permitted TTL is 1 min 40 s")


# --- what is in the tables ----------------------------------------------------------------------------------


def test_squatted_key_is_found_and_the_remedy_frees_it(tables, worker):
    """Whoever waits for the key of a living member has it when the member dies."""
    name, url = worker
    with Nodes(tables) as nodes, connected(url, autocommit=True) as squatter:
        nodes("victim").election("r").wait(20)
        ((key,),) = execute(tables, "select sentinel_key from tenure.members")
        squatter.execute("select pg_advisory_lock(%s, 7)", [CLASS_ID])
        visit = Visit(tables)
        assert visit.code == 0
        visit.only("keys warning")
        squatter.execute("select pg_advisory_unlock_all()")
        squatter.execute("select pg_advisory_lock(7), pg_advisory_lock(%s, 7)", [CLASS_ID - 1])
        Visit(tables).only()

        waiting = threading.Thread(target=lock, args=(squatter, key))
        waiting.start()
        until(lambda: execute(tables, "select 1 from pg_locks where not granted and mode = 'ExclusiveLock'"))
        visit = Visit(tables)
        assert visit.code == 2
        visit.only("keys error")
        assert f"(user '{name}', application '') waits for the key of 'victim'" in visit.texts["keys"]
        mend(tables, visit, "keys")
        waiting.join(20)
        Visit(tables).only()


def lock(connection, key):
    import psycopg

    with contextlib.suppress(psycopg.OperationalError):
        connection.execute("select pg_advisory_lock(%s, %s)", [CLASS_ID, key])


def test_key_that_another_session_holds_is_found(tables):
    with Desk(tables) as desk, connected(tables, autocommit=True) as squatter:
        ((key,),) = execute(tables, "select sentinel_key from tenure.members")
        desk.store.sentinel.release(key)
        squatter.execute("select pg_advisory_lock(%s, %s)", [CLASS_ID, key])
        visit = Visit(tables)
        visit.only("keys error")
        assert f"holds the key of {desk.settings.name!r}" in visit.texts["keys"]


def test_members_of_another_user_are_no_strangers(tables, worker):
    """The server does not show every user when connections began."""
    name, url = worker
    permit(tables, name)
    with Desk(tables):
        visit = Visit(url)
        visit.only()
        assert visit.texts["members"] == "1 living, all renewing"


def test_namespace_that_waits_is_found(tables):
    execute(tables, "update tenure.namespaces set incarnation = '1:1', max_ttl_ms = 30000")
    visit = Visit(tables)
    visit.only("namespace warning")
    assert "30 s after a node first saw this server" in visit.texts["namespace"]
    visit = Visit(tables, "--namespace", "another")
    visit.only()
    assert visit.texts["namespace"] == "'another' is new: the first node creates it"


@pytest.mark.twin("postgres")
def test_member_that_no_other_watches_is_found(one_url):
    with Desk(one_url) as desk:
        members, long_ago = desk.session.dialect.prefix + "members", "2001-01-01 00:00:00.000"
        execute(one_url, f"update {members} set renewed_at = '{long_ago}'")
        visit = Visit(one_url)
        visit.only("members warning")
        assert re.search(
            rf"{desk.settings.name!r} \(process {os.getpid()} on .* its TTL is 30 s", visit.texts["members"]
        )
        assert "start a node" in visit.remedies["members"]


@pytest.mark.parametrize(("ago_s", "overdue"), [(20, False), (31, True), (60, True), (1000, True)])
@pytest.mark.twin("postgres")
def test_doctor_and_status_agree_on_who_is_overdue(one_url, ago_s, overdue):
    with Desk(one_url, ttl=30) as desk:
        members = desk.session.dialect.prefix + "members"
        renewed = datetime.now(timezone.utc) - timedelta(seconds=ago_s)
        offset = "" if one_url.startswith("mysql") else "+00:00"
        execute(one_url, f"update {members} set renewed_at = '{renewed:%Y-%m-%d %H:%M:%S.%f}{offset}'")
        assert ("overdue" in Answer("status", url=one_url).out) == overdue
        visit = Visit(one_url)
        visit.only(*(["members warning"] if overdue else []))
        assert ("overdue" in visit.texts["members"]) == overdue


# --- SQLite -------------------------------------------------------------------------------------------------


def test_missing_file_is_not_created(tmp_path):
    url = f"sqlite:///{tmp_path}/new.db"
    visit = Visit(url)
    assert visit.code == 0
    visit.only("file warning")
    assert list(tmp_path.iterdir()) == []
    visit = Visit(f"sqlite:///{tmp_path}/no/new.db")
    assert visit.code == 2
    visit.only("directory error")
    Visit(f"sqlite:///{tmp_path}").only("file error")


def test_file_of_another_program_is_not_changed(tmp_path):
    garbage, other = tmp_path / "garbage % ?.db", tmp_path / "other.db"
    garbage.write_text("not a database, but long enough to be taken for one" * 100)
    visit = Visit(f"sqlite:///{garbage}")
    assert visit.code == 2
    visit.only("file error")
    assert "not a database" in visit.texts["file"]
    execute(f"sqlite:///{other}", "create table theirs (x)")
    before = other.read_bytes()
    visit = Visit(f"sqlite:///{other}")
    assert visit.code == 0
    visit.only("log warning", "tables warning")
    assert other.read_bytes() == before


def test_missing_table_of_a_file_is_found(sqlite_url):
    with Desk(sqlite_url, join=False):
        execute(sqlite_url, "drop table tenure_roles")
    visit = Visit(sqlite_url)
    visit.only("tables error")
    assert visit.texts["tables"] == "missing in this file: tenure_roles"


def test_file_that_another_process_keeps_locked_is_found_without_a_hang(sqlite_url):
    with Desk(sqlite_url, join=False):
        pass
    with connected(sqlite_url) as writer:
        writer.execute("begin immediate")
        began = time.monotonic()
        visit = Visit(sqlite_url, "--ttl", str(timing.MIN_TTL_S))
        visit.only("write error")
        assert "database is locked" in visit.texts["write"]
        assert time.monotonic() - began < 20


EXAMINE_AS = """
import os, sys
from click.testing import CliRunner
from tenure.cli import main
account, ok, *urls = sys.argv[1:]
CliRunner().invoke(main, ["doctor", "--url", ok])  # with what anybody can read in the sources
if int(account): os.setegid(int(account)); os.seteuid(int(account))
for url in urls:
    result = CliRunner().invoke(main, ["doctor", "--url", url])
    print(result.exit_code, *(line for line in result.stdout.splitlines() if line.startswith("FAIL")))
"""


def test_file_that_may_not_be_written_is_found(sqlite_url):
    """Root may write anything, so another user tries."""
    with Desk(sqlite_url, join=False):
        pass
    account = server_account()
    with contextlib.closing(Scratch("tenure-", account)) as scratch:
        urls, refused = [], []
        for kind in ("file", "directory", "sentinels"):
            path = scratch.path / kind / "tenure.db"
            path.parent.mkdir()
            with Desk(f"sqlite:///{path}"):
                refused.append({"file": path, "directory": path.parent, "sentinels": Path(f"{path}.sentinels")}[kind])
            urls.append(f"sqlite:///{path}")
            for each in [path.parent, *path.parent.rglob("*")]:
                each.chmod(0o777)
            refused[-1].chmod(0o555)
        command = [sys.executable, "-c", EXAMINE_AS, str(account.uid if account else 0), sqlite_url, *urls]
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        for line, kind, path in zip(said.stdout.splitlines(), ("file", "directory", "sentinels"), refused, strict=True):
            assert re.match(rf"2 FAIL  {kind} +this user may not write to '{path}'.*; remedy: give this user the", line)


def test_default_file_is_examined_where_no_url_is_given(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with tenure.Node() as node:
        node.election("r").wait(20)
        answer = Answer("doctor")
    assert answer.code == 0
    assert f"through the file {tmp_path}/tenure/tenure.db" in answer.err
    assert f"'{tmp_path}/tenure/tenure.db' is writable" in answer.out


# --- MariaDB ------------------------------------------------------------------------------------------------

FIT_MARIADB = FIT - {"keys"}


def test_fit_mariadb_is_fit_in_every_respect_and_nothing_is_left_behind(mariadb_server, mariadb_url):
    with Nodes(mariadb_url) as nodes:
        nodes.pair("r")
        before = mariadb_server.log_mark()
        visit = Visit(mariadb_url)
        assert visit.code == 0
        visit.only()
        assert set(visit.levels) == FIT_MARIADB
        assert visit.texts["connection"] == "direct, and user-level locks hold: a node picks mode hybrid"
        assert visit.texts["members"] == "2 living, all renewing"
        assert "wait_timeout=11" in visit.texts["keepalive"]
        assert "innodb_flush_method is nosync" in visit.texts["durability"]
        assert mariadb_server.log_lines(before) == []


def test_faults_of_mariadb_are_found(mariadb_server, mariadb_url):
    assert Visit(mariadb_url).levels["tables"] == "warning"
    with mariadb_server.configured(read_only=True):
        Visit(mariadb_url).only("primary error")
    unreachable = Visit(mariadb_url.replace("tenure@", f"tenure:{CANARY}@"))
    unreachable.only("reachable error")
    assert PIECE not in str(unreachable.findings)
    with Desk(mariadb_url, join=False):
        pass
    with mariadb_server.configured(wait_timeout=5, max_connections=10), connected(mariadb_url):
        visit = Visit(mariadb_url)
        visit.only("time-outs warning", "connections warning")
        assert visit.remedies["time-outs"] == "set global wait_timeout = 10, or more"
    execute(mariadb_url, "drop table tenure_candidates")
    assert "tenure_candidates" in Visit(mariadb_url).texts["tables"]


def test_privileges_that_lack_on_mariadb_are_named_with_the_remedy(mariadb_server, mariadb_url):
    database = mariadb_url.rpartition("/")[2]
    mariadb_server.execute("create or replace user patient@'%'")
    with Desk(mariadb_url, join=False):
        mariadb_server.execute(f"grant select on {database}.* to patient@'%'")
    visit = Visit(mariadb_server.url(database, user="patient"))
    visit.only("privileges error")
    assert "INSERT command denied" in visit.texts["privileges"]
    assert "--dialect mysql --grants 'patient@%'" in visit.remedies["privileges"]
    script = Answer("sql", "--dialect", "mysql", "--grants", "patient@%").out
    for text in script.split(";\n"):
        if text.strip():
            mariadb_server.execute(text, dbname=database)
    Visit(mariadb_server.url(database, user="patient")).only()
