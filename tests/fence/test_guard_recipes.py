"""The recipes of docs/how-to/guarded-tables.md, taken from the page: psql, Alembic, dumps, test suites."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import alembic.command
import alembic.config
import pytest

import tenure
from tests.conftest import missing
from tests.support.cluster import ROOT
from tests.support.servers import PostgresServer
from tests.support.store_by_hand import Desk, connected, execute

PAGE = ROOT / "docs" / "how-to" / "guarded-tables.md"
TENURE = Path(sys.executable).with_name("tenure")
REFUSED = "is guarded by role billing: call term.fence(connection) first, or use term.transaction()"


def blocks() -> dict[str, str]:
    """The files of the page, by the name in their first line."""
    return dict(re.findall(r"^```(?:py|text)\n(?:#|--) (\S+)\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE))


def guarded(url: str) -> None:
    """Make a table that role billing guards."""
    with Desk(url, join=False), tenure.Registry(url) as registry:
        execute(url, "create table invoices (number int)")
        registry.guard("invoices", "billing")


def numbers(url: str) -> list[int]:
    return [number for (number,) in execute(url, "select number from invoices order by number")]


def guards(url: str) -> list[tuple[str, str, str]]:
    with tenure.Registry(url) as registry:
        return [(one.table, one.namespace, one.role) for one in registry.guarded_tables()]


def leaks(url: str) -> list[str]:
    with tenure.Registry(url) as registry:
        return [leak for one in registry.guarded_tables() for leak in one.leaks if "superuser" not in leak]


def run(server: PostgresServer, program: str, *arguments: str, text: str | None = None) -> subprocess.CompletedProcess:
    command = [str(server.installation.bindir / program), *arguments]
    return subprocess.run(command, input=text, text=True, capture_output=True, check=False)


# --- people at a prompt -------------------------------------------------------------------------------------


def test_psql_under_tenure_run_fences_each_transaction_that_the_recipe_begins(every_postgres_server, tmp_path):
    server = every_postgres_server
    psql = server.installation.bindir / "psql"
    if not psql.exists() or server.installation.major < 15:
        missing("no psql of PostgreSQL 15 or newer found")
    url = server.create_database()
    guarded(url)
    rc = tmp_path / "billing.psqlrc"
    rc.write_text(blocks()["billing.psqlrc"])
    typed = """
        insert into invoices values (1);
        :begin
        insert into invoices values (2);
        commit;
        insert into invoices values (3);
        :begin
        insert into invoices values (4);
        rollback;
        :begin
        insert into invoices values (5);
        commit;
    """
    command = [TENURE, "run", "--role", "billing", "--url", url, "--", psql, url]
    environment = {**os.environ, "PSQLRC": str(rc)}
    done = subprocess.run(
        command, input=typed, capture_output=True, text=True, env=environment, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(f"INSERT on public.invoices {REFUSED}") == 2, done.stderr
    assert numbers(url) == [2, 5]


# --- dumps --------------------------------------------------------------------------------------------------


def test_whole_dump_is_restored_with_the_guard(postgres_server):
    url, copy = postgres_server.create_database(), postgres_server.create_database()
    execute(url, "create table invoices (number int)", "insert into invoices values (1)")
    with Desk(url, join=False), tenure.Registry(url) as registry:
        registry.guard("invoices", "billing")
    dump = run(postgres_server, "pg_dump", url).stdout
    done = run(postgres_server, "psql", "-v", "ON_ERROR_STOP=1", copy, text=dump)
    assert done.returncode == 0, done.stderr
    assert numbers(copy) == [1]
    assert guards(copy) == [("public.invoices", "default", "billing")]
    assert leaks(copy) == []
    with connected(copy) as connection, pytest.raises(tenure.Unfenced), tenure.translate_unfenced():
        connection.execute("insert into invoices values (2)")


def test_dump_of_the_data_alone_needs_disabled_triggers_and_a_new_guard(postgres_server):
    url, copy = postgres_server.create_database(), postgres_server.create_database()
    for one in (url, copy):
        guarded(one)
    with tenure.Node(url) as node, node.lead("billing") as term, term.transaction() as transaction:
        transaction.execute("insert into invoices values (1)")
    options = ("--data-only", "--table", "invoices")
    dump = run(postgres_server, "pg_dump", *options, url).stdout
    done = run(postgres_server, "psql", "-v", "ON_ERROR_STOP=1", copy, text=dump)
    assert done.returncode == 3
    assert REFUSED in done.stderr
    dump = run(postgres_server, "pg_dump", *options, "--disable-triggers", url).stdout
    done = run(postgres_server, "psql", "-v", "ON_ERROR_STOP=1", copy, text=dump)
    assert done.returncode == 0, done.stderr
    assert numbers(copy) == [1]
    (leak,) = leaks(copy)
    assert "not ENABLE ALWAYS" in leak
    with tenure.Registry(copy) as registry:
        registry.guard("invoices", "billing")
    assert leaks(copy) == []


def test_dump_without_tenures_schema_needs_its_tables_first(postgres_server):
    url, copy = postgres_server.create_database(), postgres_server.create_database()
    guarded(url)
    dump = run(postgres_server, "pg_dump", "--schema", "public", "--clean", "--if-exists", url).stdout
    done = run(postgres_server, "psql", "-v", "ON_ERROR_STOP=1", copy, text=dump)
    assert 'schema "tenure" does not exist' in done.stderr
    with Desk(copy, join=False):
        done = run(postgres_server, "psql", "-v", "ON_ERROR_STOP=1", copy, text=dump)
    assert done.returncode == 0, done.stderr
    assert guards(copy) == [("public.invoices", "default", "billing")]


# --- migrations ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "driver"), [("postgres", "postgresql+psycopg"), ("mariadb", "mysql+pymysql")])
def test_migration_of_alembic_guards_and_removes(kind, driver, request, tmp_path):
    url = request.getfixturevalue(f"{kind}_url")
    name = "migrations/versions/0002_guard.py"
    tables = re.search(
        r"^```py\n# migrations/versions/0001_tenure.py\n(.*?)^```",
        (ROOT / "docs" / "how-to" / "sqlalchemy.md").read_text(),
        re.DOTALL | re.MULTILINE,
    )
    assert tables is not None
    environment = """
import sqlalchemy
from alembic import context

engine = sqlalchemy.create_engine(context.config.get_main_option("sqlalchemy.url"))
with engine.connect() as connection:
    context.configure(connection=connection)
    with context.begin_transaction():
        context.run_migrations()
engine.dispose()
"""
    files = {name: blocks()[name], "migrations/versions/0001_tenure.py": tables[1], "migrations/env.py": environment}
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    config = alembic.config.Config()
    config.set_main_option("script_location", str(tmp_path / "migrations"))
    config.set_main_option("sqlalchemy.url", f"{driver}:{url.partition(':')[2]}")
    execute(url, "create table invoices (number int)")

    alembic.command.upgrade(config, "head")
    assert [(namespace, role) for _, namespace, role in guards(url)] == [("default", "billing")]
    with connected(url) as connection, pytest.raises(tenure.Unfenced), tenure.translate_unfenced():
        connection.execute("insert into invoices values (1)")
    alembic.command.downgrade(config, "0001")
    assert guards(url) == []
    alembic.command.downgrade(config, "base")
    with pytest.raises(tenure.ConfigError, match="no tables"), tenure.Registry(url):
        pass


@pytest.mark.parametrize("kind", ["postgres", "mariadb"])
def test_fixture_of_a_test_suite_removes_every_guard(kind, request):
    url = request.getfixturevalue(f"{kind}_url")
    guarded(url)
    with tenure.Registry(url) as registry:
        for one in registry.guarded_tables():
            registry.unguard(one.table)
    execute(url, "insert into invoices values (1)")
    assert numbers(url) == [1]


# --- uninstalling -------------------------------------------------------------------------------------------


def test_dropped_schema_takes_the_guards_with_it(postgres_url):
    guarded(postgres_url)
    execute(postgres_url, "drop schema tenure cascade", "insert into invoices values (1)")
    assert numbers(postgres_url) == [1]


def test_orphaned_triggers_of_mariadb_refuse_every_write_until_they_are_dropped(mariadb_url):
    guarded(mariadb_url)
    names = execute(mariadb_url, "select table_name from information_schema.tables where table_name like 'tenure\\_%'")
    execute(mariadb_url, f"drop table {', '.join(name for (name,) in names)}")
    with connected(mariadb_url) as connection, pytest.raises(Exception, match="doesn't exist"):
        connection.execute("insert into invoices values (1)")
    execute(mariadb_url, *tenure.guard_sql("invoices", "billing", database="mysql", remove=True))
    execute(mariadb_url, "insert into invoices values (1)")
    assert numbers(mariadb_url) == [1]
