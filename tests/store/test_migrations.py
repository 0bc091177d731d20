"""The tables: made by whoever comes first, however many come at once; old and new releases side by side."""

from __future__ import annotations

import os
import threading
from datetime import datetime, timezone

import psycopg
import pytest
import sqlalchemy

import tenure
from tenure import ConfigError, Fenced, StoreUnavailable, manual
from tenure.databases.backend import backend_for
from tenure.databases.schema import schema_for
from tenure.settings import node_settings
from tenure.store import migrations
from tenure.store.dialects import TABLES, for_name, postgresql
from tenure.store.session import Step, identity
from tenure.store.tables import MIGRATIONS, Migration
from tests.support import starter
from tests.support.store_by_hand import QUICK, Desk, Nodes, connected, execute, table, until

PRESENT = MIGRATIONS[-1].version
NEXT = Migration(
    PRESENT + 1,
    (
        "alter table {members} add column mood text default 'fine'",
        "create table {schema}weather (day {text} primary key)",
    ),
    ("create function {schema}fence2() returns void language sql as ''",),
)


def prepare(url, known=MIGRATIONS):
    """Bring the tables up to date as a node of some release would."""
    with Desk(url, join=False) as desk:
        migrations.prepare(desk.session, known)


def made_by(url, known):
    """Make the tables as an earlier release did."""
    earlier = backend_for(node_settings(url)).open_session()
    migrations.prepare(earlier, known)
    earlier.close()


def at_once(number, action):
    """Run something on several threads that start together; return what they raised."""
    barrier, errors = threading.Barrier(number), []

    def run():
        barrier.wait()
        try:
            action()
        except Exception as error:  # noqa: BLE001 - whatever it is
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_any_number_of_threads_may_create_the_tables_at_once(store_url):
    assert at_once(8, lambda: Desk(store_url).close()) == []


def test_any_number_of_processes_may_start_on_an_empty_database(store_url, tmp_path):
    program = "import sys, tenure\nwith tenure.Node(sys.argv[1]) as node: node.election('r')"
    (tmp_path / "program.py").write_text(program)
    with (tmp_path / "errors").open("wb") as errors:
        told = {"env": os.environ, "cwd": tmp_path, "stderr": errors}
        processes = [starter.start("program", store_url, **told) for _ in range(4)]
        codes = [process.wait(60) for process in processes]
    assert (tmp_path / "errors").read_text() == ""
    assert codes == [0] * 4


def test_a_foreign_table_with_the_name_of_one_of_ours_is_named_after_a_few_tries(postgres_url, monkeypatch):
    execute(postgres_url, "create schema tenure", "create table tenure.terms (theirs integer)")
    monkeypatch.setattr(migrations, "PATIENCE_S", 3 * migrations.PAUSE_S)
    tries, migrate = [], migrations._migrate
    monkeypatch.setattr(migrations, "_migrate", lambda *told: tries.append(told) or migrate(*told))
    with pytest.raises(StoreUnavailable, match=r'relation "terms" already exists\): rename what has the name'):
        Desk(postgres_url)
    assert 1 < len(tries) <= 5, "it does not keep the server busy"
    assert execute(postgres_url, "select * from tenure.terms") == []


def test_second_preparation_changes_nothing(store_url):
    with Desk(store_url) as desk:
        desk.lead("r")
        migrations.prepare(desk.session)
        assert desk.acquire("r") == {"r": 2}


def test_release_goes_on_beside_the_tables_of_the_next(store_url):
    """A migration adds; a node that runs already, and one that starts later, know nothing of it and need not."""
    with Nodes(store_url) as nodes:
        leads = nodes("old").election("r")
        leads.wait(20)
        prepare(store_url, (*MIGRATIONS, NEXT))
        prepare(store_url, (*MIGRATIONS, NEXT))
        stands = nodes("old, started later").election("r")
        until(lambda: len(leads.candidates()) == 2, "both standing")
        leads.resign()
        term = stands.wait(20)
        with term.transaction() as transaction:
            transaction.execute("select 1")
        with Desk(store_url) as desk:
            (rows,) = desk.session.read(Step("select distinct mood from {members}", {}))
            assert list(rows.rows) == [("fine",)]
            (version,) = desk.session.read(Step("select name, value from {meta} order by name", {}))
            assert list(version.rows) == [("oldest", 1), ("version", PRESENT + 1)]


@pytest.mark.parametrize("version", range(1, PRESENT))
def test_tables_of_earlier_releases_get_what_this_one_adds(store_url, version):
    """With what stands in them. In cluster/test_upgrade.py a leader of an earlier release runs on meanwhile."""
    with connected(store_url) as connection:
        connection.execute("create table theirs (n integer)")  # so that there is a file
        connection.commit()
    made_by(store_url, MIGRATIONS[:version])
    with connected(store_url) as connection:
        roles, there = table(store_url, "roles"), "insert into {} (namespace, name, token) values ('default', 'r', 41)"
        connection.execute(there.format(roles))
        connection.commit()
    with tenure.Registry(store_url) as registry, Nodes(store_url) as nodes:
        assert migrations.require(registry.session) == version
        term = nodes("this").election("r").wait(20)
        assert migrations.require(registry.session) == PRESENT
        with term.transaction() as transaction:
            assert transaction.claim("job", datetime.now(timezone.utc))
        assert registry.history("r")[0].token == term.token == 42


def test_tables_that_need_a_newer_release_are_refused(store_url):
    newest = Migration(PRESENT + 2, (), oldest=PRESENT + 1)
    prepare(store_url, (*MIGRATIONS, NEXT, newest))
    complaint = rf"of version {PRESENT + 2}.*at least version {PRESENT + 1}; this one knows {PRESENT}: upgrade"
    with pytest.raises(ConfigError, match=complaint):
        tenure.Node(store_url).start()


def test_failed_migration_leaves_the_tables_as_they_were(store_url):
    prepare(store_url)
    broken = Migration(PRESENT + 1, ("create table {schema}half (x text)", "this is not SQL"))
    with Desk(store_url, join=False) as desk:
        with pytest.raises(Exception, match="syntax"):
            migrations.prepare(desk.session, (*MIGRATIONS, broken))
        (version,) = desk.session.read(Step("select value from {meta} where name = 'version'", {}))
        assert list(version.rows) == [(PRESENT,)]
    prepare(store_url, (*MIGRATIONS, Migration(PRESENT + 1, ("create table {schema}half (x text)",))))


def test_tables_made_by_hand_with_something_missing_are_refused(store_url):
    with tenure.Node(store_url):
        pass
    prefix = "tenure." if store_url.startswith("postgresql") else "tenure_"
    for change in (f"drop table {prefix}jobs", f"alter table {prefix}members drop column host"):
        execute(store_url, change)
        with pytest.raises(tenure.ConfigError, match=r"not as Tenure creates them: .*(jobs|host).*`tenure sql` prints"):
            tenure.Node(store_url).start()


def test_tables_can_live_in_another_schema(postgres_url):
    with Nodes(postgres_url) as nodes:
        here, there = nodes("a", schema="here").election("r"), nodes("b", schema="there").election("r")
        assert here.wait(20).token == there.wait(20).token == 1
        with there.term.transaction() as transaction:
            transaction.execute("select 1")
        names = execute(postgres_url, "select nspname from pg_namespace where nspname in ('here', 'there', 'tenure')")
        assert sorted(names) == [("here",), ("there",)]


# --- privileges ---------------------------------------------------------------------------------------------


@pytest.fixture
def worker(postgres_server, postgres_url):
    """A database role that may do nothing, and the URL under which it connects."""
    database = postgres_url.rpartition("/")[2]
    name = f"worker_{database}"
    execute(postgres_url, f"create role {name} login")
    yield name, postgres_server.url(database, user=name)
    execute(postgres_url, f"drop owned by {name}", f"drop role {name}")


def test_role_that_may_only_use_the_tables_is_enough(postgres_url, worker):
    name, url = worker
    prepare(postgres_url)
    execute(
        postgres_url,
        f"grant usage on schema tenure to {name}",
        f"grant select, insert, update, delete on all tables in schema tenure to {name}",
        "create table ledger (token bigint)",
        f"grant insert on ledger to {name}",
    )
    with Nodes(url) as nodes:
        leads, stands = nodes.pair("r")
        with leads.term.transaction() as transaction:
            transaction.execute("insert into ledger values (%s)", [leads.term.token])
        leads.resign()
        assert stands.wait(20).token == 2
        assert stands.leader().name == "standby"


def test_writer_needs_little_to_be_fenced(postgres_url, worker):
    """The role that writes under a term need not be the one under which the node runs."""
    name, url = worker
    with Desk(postgres_url) as desk:
        claim = desk.lead("r")
        execute(
            postgres_url,
            f"grant usage on schema tenure to {name}",
            f"grant select on all tables in schema tenure to {name}",
            f"grant update (request_to) on tenure.roles to {name}",
        )
        with connected(url) as connection:
            from tenure.fence import fence as connections

            connections.fence(connection, claim, 10)
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute("update tenure.roles set token = 7")


def test_user_who_may_not_change_the_tables_is_told_who_must_and_how(postgres_url, worker):
    name, url = worker
    made_by(postgres_url, MIGRATIONS[:2])
    execute(
        postgres_url,
        f"grant usage on schema tenure to {name}",
        f"grant select, insert, update, delete on all tables in schema tenure to {name}",
    )
    told = f"version 2, this release needs version {PRESENT}, and this database user may not change them"
    with pytest.raises(ConfigError, match=f"{told}.*: run `tenure init` of this release as their owner, then run what"):
        tenure.Node(url).start()
    tenure.Registry(postgres_url).create()
    execute(postgres_url, *schema_for(postgresql("tenure")).grants(name))
    with tenure.Node(url) as node:
        assert node.election("r").wait(20).token == 1


def test_missing_privileges_are_named_at_the_start(postgres_url, worker):
    name, url = worker
    remedy = r"\(the database user needs CREATE on the database or, .* USAGE on schema 'tenure' and SELECT, "

    def refused(complaint):
        with pytest.raises(StoreUnavailable, match=f"cannot prepare the tables: {complaint} {remedy}"):
            tenure.Node(url).start()

    refused("permission denied for database .*")
    prepare(postgres_url)
    refused("permission denied for schema tenure")
    execute(
        postgres_url,
        f"grant usage on schema tenure to {name}",
        f"grant select on all tables in schema tenure to {name}",
        f"grant insert, update, delete on tenure.namespaces, tenure.candidates, tenure.terms, tenure.jobs to {name}",
        f"grant insert, delete on tenure.members to {name}",
    )
    lacking = "DELETE on roles, INSERT on roles, UPDATE on roles, DELETE on runs, INSERT on runs, UPDATE on runs"
    refused(f"this database user lacks UPDATE on members, {lacking}")
    execute(postgres_url, f"grant insert, update, delete on all tables in schema tenure to {name}")
    with tenure.Node(url) as node:
        assert node.election("r").wait(20)


def test_hidden_system_functions_make_every_restart_a_new_server(make_postgres_server):
    """Hosted servers hide the system identifier; then the start time stands for it, and nothing fails."""
    server = make_postgres_server(fsync=False)
    url = server.create_database()
    prepare(url)
    execute(
        url,
        "create role hosted login",
        "grant usage on schema tenure to hosted",
        "grant select, insert, update, delete on all tables in schema tenure to hosted",
        "revoke execute on function pg_control_system() from public",
    )
    hosted = server.url(url.rpartition("/")[2], user="hosted")
    with Desk(hosted, join=False) as desk:
        before = desk.opened.server
        assert before.timeline == 1
    server.restart()
    with Desk(hosted, join=False) as desk:
        assert desk.opened.server.incarnation != before.incarnation
        assert desk.opened.confirmed.incarnation != desk.opened.server.incarnation, "not trusted yet"


def test_settings_of_the_server_and_the_role_do_not_reach_the_node(every_postgres_server, every_postgres_url):
    """Somebody's defaults for everybody: read-only, impatient, cut off when idle."""
    database = every_postgres_url.rpartition("/")[2]
    settings = [
        "default_transaction_read_only = on",
        "default_transaction_isolation = 'serializable'",
        "lock_timeout = '1ms'",
        "idle_in_transaction_session_timeout = '1ms'",
        "idle_session_timeout = '500ms'",
        "search_path = nowhere",
        "synchronous_commit = off",
    ]
    if every_postgres_server.installation.major >= 17:
        settings.append("transaction_timeout = '500ms'")  # ends the connection in the midst of a wait

    def count(store):
        return store.session.read(Step("select renewals from {members}", {}))[0].rows

    def watchers():
        return {row.pid for row in every_postgres_server.backends(database) if "tenure watch" in row.application_name}

    execute(every_postgres_url, *(f"alter database {database} set {setting}" for setting in settings))
    with Nodes(every_postgres_url, **QUICK) as nodes:
        leads, stands = nodes.pair("r")
        until(lambda: len(watchers()) == 2, "both watchers")
        watching = watchers()
        until(lambda: min(leads._engine.query(count)) >= (4,), "renewals")
        assert leads.term.valid
        assert watchers() == watching
        question = Step("select pg_catalog.current_setting('synchronous_commit')", {})
        assert leads._engine.query(lambda store: store.session.read(question)[0].rows) == [("local",)]
        leads.resign()
        assert stands.wait(20).token == 2


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])
def test_encoding_of_the_database_does_not_matter(postgres_server, encoding):
    name = f"in_{encoding.lower()}"
    postgres_server.execute(
        f"create database {name} encoding '{encoding}' template template0 lc_ctype 'C' lc_collate 'C'"
    )
    try:
        with tenure.Node(postgres_server.url(name), name="Zoë", metadata={"größe": 1}) as node:
            with node.lead("rôle", timeout=20) as term, term.transaction() as transaction:
                transaction.execute("select 1")
                (candidate,) = node.election("rôle").candidates()
                assert (candidate.name, candidate.metadata) == ("Zoë", {"größe": 1})
            assert node.election("rôle").history()[0].name == "Zoë"
    finally:
        postgres_server.drop_database(name)


def test_database_that_has_no_tables_is_refused_with_those_that_have():
    with pytest.raises(ConfigError, match="'oracle' must be one of 'postgresql', 'sqlite', 'mysql', 'mariadb'"):
        tenure.tables_sql("oracle")
    with pytest.raises(ConfigError, match="not support the database 'oracle': use PostgreSQL, MariaDB or SQLite"):
        for_name("oracle", "tenure")


@pytest.mark.parametrize(
    ("incarnation", "promoted"),
    [
        ("7301234567890123456:1", False),
        ("7301234567890123456:2", True),
        ("1700000000.123456:1", True),
        ("1@db.example.com/3306:1", False),
        ("sqlite", False),
    ],
)
def test_server_that_hides_its_identity_counts_as_promoted(incarnation, promoted):
    assert identity("", (incarnation, "", 0)).promoted is promoted


def test_backends_are_made_without_connecting():
    settings = tenure.Node("postgresql://nowhere.invalid/app")._settings
    assert "nowhere.invalid" in repr(backend_for(settings)._connector)


DROPS = {
    "postgresql": ["drop schema tenure cascade"],
    "mysql": [f"drop table tenure_{name}" for name in TABLES],
    "sqlite": [f"drop table tenure_{name}" for name in TABLES],
}


@pytest.mark.parametrize("takeover", ["strict", "instant"])
@pytest.mark.parametrize("store_url", ["sqlite", "postgres", "mariadb"], indirect=True)
@pytest.mark.twin("strict")
def test_tables_that_were_dropped_under_running_nodes_are_made_again(store_url, takeover):
    with Nodes(store_url, ttl=10, renew_every=0.2, takeover=takeover) as nodes:
        leads, stands = nodes.pair("r")
        term = leads.term
        execute(store_url, *DROPS[store_url.partition(":")[0]])
        assert term.wait_lost(20), "its membership is gone"
        until(lambda: leads.is_leader or stands.is_leader, "a leader")
        until(lambda: len(leads.candidates()) == 2, "both standing")
        with pytest.raises(Fenced), term.transaction():
            pass


def test_candidate_in_a_transaction_of_ones_own_is_told_of_tables_that_are_too_old(postgres_url):
    made_by(postgres_url, MIGRATIONS[:2])
    engine = sqlalchemy.create_engine(postgres_url.replace("postgresql:", "postgresql+psycopg:"))
    told = f"of version 2, and this release needs version {PRESENT}: start a node of this release, or run"
    with engine.begin() as connection, pytest.raises(ConfigError, match=told):
        manual.elect("me", session=connection)
    engine.dispose()
