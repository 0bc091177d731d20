"""Promise 8: a guarded table takes no write outside the fence of its role, whatever the program knows of Tenure."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

import asyncpg
import psycopg
import pytest
import sqlalchemy
from hypothesis import example, given
from hypothesis import strategies as st
from sqlalchemy import orm
from sqlalchemy.ext.asyncio import create_async_engine

import tenure
from tenure.errors import ConfigError, Fenced, NotLeader, Unfenced
from tenure.fence.fence import fence
from tenure.store.guards import REMEDIES
from tests.conftest import missing
from tests.support.fuzzing import fuzzed
from tests.support.mariadb import NO_MARIADB, MariaDbServer, mariadb_program
from tests.support.store_by_hand import Desk, TermIdentity, connect, connected, execute

BOUND_S = 30.0


def guard(url: str, table: str = "invoices", role: str = "billing") -> None:
    with tenure.Registry(url) as registry:
        registry.guard(table, role)


def leaks(url: str) -> list[str]:
    with tenure.Registry(url) as registry:
        found = [leak for one in registry.guarded_tables() for leak in one.leaks]
    return [leak for leak in found if "superuser" not in leak and "TRUNCATE" not in leak]


def numbers(url: str, table: str = "invoices") -> list[int]:
    return [number for (number,) in execute(url, f"select n from {table} order by n")]


def refused(connection: Any, statement: str) -> Unfenced:
    """Run a statement that a guarded table must refuse, and roll back."""
    with pytest.raises(Unfenced) as caught, tenure.translate_unfenced():
        connection.execute(statement)
    connection.rollback()
    return caught.value


@contextlib.contextmanager
def guarded_table(url: str) -> Iterator[tuple[str, TermIdentity, Any]]:
    """A guarded table, the term of its role, and a connection of the application."""
    with Desk(url) as desk:
        execute(url, "create table invoices (n int primary key)", "insert into invoices values (1)")
        guard(url)
        with connected(url) as connection:
            yield url, desk.lead("billing"), connection


@pytest.fixture
def postgres(every_postgres_url: str) -> Iterator[tuple[str, TermIdentity, Any]]:
    with guarded_table(every_postgres_url) as found:
        yield found


@pytest.fixture
def mariadb(mariadb_url: str) -> Iterator[tuple[str, TermIdentity, Any]]:
    with guarded_table(mariadb_url) as found:
        yield found


@pytest.fixture(params=["postgres", "mariadb"])
def server_url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(f"{request.param}_url"))


@pytest.fixture
def guarded(server_url: str) -> Iterator[tuple[str, TermIdentity, Any]]:
    with guarded_table(server_url) as found:
        yield found


# --- what a guard refuses, and what it lets pass ---------------------------------------------------------------


def test_fenced_write_passes_and_any_other_is_refused(guarded):
    url, term, connection = guarded
    for statement in ("insert into invoices values (2)", "update invoices set n = 3", "delete from invoices"):
        error = refused(connection, statement)
        assert isinstance(error, NotLeader)
        assert error.role == "billing"
        assert f"{statement.split()[0].upper()} on " in str(error)
        assert "invoices is guarded by role billing: call term.fence(connection) first" in str(error)
    assert numbers(url) == [1]
    for statement in ("insert into invoices values (2)", "update invoices set n = 3 where n = 2"):
        fence(connection, term, BOUND_S)
        connection.execute(statement)
        connection.commit()
    assert numbers(url) == [1, 3]


WRITES = [
    "insert into invoices values (2)",
    "insert into invoices values (1) on conflict do nothing",
    "update invoices set n = 2",
    "update invoices set n = 2 where false",
    "delete from invoices",
    "truncate invoices",
    "with gone as (delete from invoices returning n) select count(*) from gone",
    "merge into invoices using (values (2)) as new(n) on invoices.n = new.n when not matched then insert values (2)",
    "delete from customers",
    "truncate customers cascade",
    "set local session_replication_role = replica; insert into invoices values (2)",
]


@pytest.mark.parametrize("statement", WRITES)
def test_postgres_refuses_every_kind_of_write(postgres, statement):
    url, term, connection = postgres
    connection.execute("create table customers (n int primary key)")
    connection.execute("insert into customers values (1), (2)")
    connection.execute("alter table invoices add foreign key (n) references customers on delete cascade")
    connection.commit()
    refused(connection, statement)
    fence(connection, term, BOUND_S)
    connection.execute(statement)
    connection.rollback()
    assert numbers(url) == [1]


def test_postgres_refuses_copy(postgres):
    url, term, connection = postgres
    with (
        pytest.raises(Unfenced),
        tenure.translate_unfenced(),
        connection.cursor() as cursor,
        cursor.copy("copy invoices from stdin") as copy,
    ):
        copy.write("2\n")
    connection.rollback()
    fence(connection, term, BOUND_S)
    with connection.cursor() as cursor, cursor.copy("copy invoices from stdin") as copy:
        copy.write("2\n")
    connection.commit()
    assert numbers(url) == [1, 2]


def test_fence_holds_for_one_transaction(guarded):
    """On PostgreSQL the next transaction is refused; on MariaDB its writes are fenced again, by the trigger."""
    url, term, connection = guarded
    fence(connection, term, BOUND_S)
    connection.execute("insert into invoices values (2)")
    connection.commit()
    if url.startswith("postgres"):
        refused(connection, "insert into invoices values (3)")
        fence(connection, term, BOUND_S)
        connection.execute("commit and chain")
        refused(connection, "insert into invoices values (3)")
    assert numbers(url) == [1, 2]


def test_fence_in_autocommit_mode_does_not_let_the_next_statement_pass(postgres):
    url, term, connection = postgres
    connection.autocommit = True
    statement = tenure.fence_sql("billing").replace("$1", "%s").replace("$2", "%s")
    connection.execute(statement, (term.token, term.member_id))
    refused(connection, "insert into invoices values (2)")
    assert numbers(url) == [1]


def test_fence_in_a_savepoint_that_is_rolled_back_does_not_let_the_write_pass(postgres):
    url, term, connection = postgres
    connection.execute("savepoint s")
    with pytest.raises(ConfigError, match="savepoint"):
        fence(connection, term, BOUND_S)
    connection.execute("rollback to s")
    refused(connection, "insert into invoices values (2)")
    fence(connection, term, BOUND_S)
    connection.execute("savepoint s")
    fence(connection, term, BOUND_S)
    connection.execute("rollback to s")
    connection.execute("insert into invoices values (3)")
    connection.commit()
    assert numbers(url) == [1, 3]


def test_swallowed_refusal_of_the_fence_lets_no_write_pass(guarded):
    url, term, connection = guarded
    fence(connection, term, BOUND_S)
    connection.commit()
    with Desk(url) as successor:
        assert successor.end(term.member_id)
        successor.lead("billing")
        with contextlib.suppress(Fenced):
            fence(connection, term, BOUND_S)
        with contextlib.suppress(psycopg.errors.InFailedSqlTransaction, Unfenced), tenure.translate_unfenced():
            connection.execute("insert into invoices values (2)")
        connection.commit()
        connection.rollback()
        refused(connection, "insert into invoices values (2)")
    assert numbers(url) == [1]


def test_forged_mark_without_the_lock_is_refused(postgres):
    url, term, connection = postgres
    connection.execute(f"set local tenure.fenced = ';\"default\"/billing={term.token};'")
    connection.execute("select pg_current_xact_id()")
    refused(connection, "insert into invoices values (2)")
    assert numbers(url) == [1]


def test_lock_without_the_mark_is_refused(postgres):
    url, _, connection = postgres
    connection.execute("select 1 from tenure.roles where name = 'billing' for share")
    refused(connection, "insert into invoices values (2)")
    assert numbers(url) == [1]


def test_forged_variable_of_an_old_term_is_refused(mariadb):
    url, term, connection = mariadb
    with Desk(url) as successor:
        fence(connection, term, BOUND_S)
        connection.rollback()
        assert successor.end(term.member_id)
        after = successor.lead("billing")
        refused(connection, "insert into invoices values (2)")
        fence(connection, after, BOUND_S)
        connection.execute("insert into invoices values (3)")
        connection.commit()
    assert numbers(url) == [1, 3]


def test_refused_fence_forgets_the_term_that_an_earlier_fence_noted(mariadb):
    """A process may lead twice, and a straggler of its first term may use the connection of the second."""
    url, before, connection = mariadb
    with Desk(url) as again:
        assert again.end(before.member_id)
        after = again.lead("billing")
        fence(connection, after, BOUND_S)
        connection.commit()
        with contextlib.suppress(Fenced):
            fence(connection, before, BOUND_S)
        refused(connection, "insert into invoices values (2)")
    assert numbers(url) == [1]


def test_two_fenced_transactions_at_once_both_pass_and_a_third_is_refused(postgres):
    """Then several transactions share the lock on the role's row."""
    url, term, connection = postgres
    with connected(url) as second, connected(url) as third:
        for number, one in enumerate((connection, second), 2):
            fence(one, term, BOUND_S)
            one.execute(f"insert into invoices values ({number})")
        refused(third, "insert into invoices values (9)")
        connection.execute("insert into invoices values (4)")
        connection.commit()
        second.commit()
    assert numbers(url) == [1, 2, 3, 4]


def test_fenced_transaction_passes_that_holds_a_weaker_lock_as_well(postgres):
    """A foreign key takes such a lock. Then the transaction is twice among those that share the lock."""
    url, term, connection = postgres
    weaker = "select 1 from tenure.roles where name = 'billing' for key share"
    with connected(url) as other:
        other.execute(weaker)
        connection.execute(weaker)
        fence(connection, term, BOUND_S)
        connection.execute("insert into invoices values (2)")
        connection.commit()
    assert numbers(url) == [1, 2]


@pytest.mark.parametrize("level", ["read committed", "repeatable read", "serializable"])
def test_guard_holds_at_every_isolation_level(guarded, level):
    url, term, connection = guarded
    execute(url, "create table notes (n int)")
    begin = f"set session characteristics as transaction isolation level {level}"
    if not url.startswith("postgres"):
        begin = f"set session transaction isolation level {level}"
    connection.execute(begin)
    connection.commit()
    refused(connection, "insert into invoices values (2)")
    # The snapshot is older than the fence.
    connection.execute("select count(*) from notes")
    fence(connection, term, BOUND_S)
    connection.execute("insert into invoices values (2)")
    connection.commit()
    with Desk(url) as successor:
        assert successor.end(term.member_id)
        connection.execute("select count(*) from notes")
        assert successor.acquire("billing")["billing"] > term.token
        with contextlib.suppress(Fenced):
            fence(connection, term, BOUND_S)
        connection.rollback()
        refused(connection, "insert into invoices values (3)")
    assert numbers(url) == [1, 2]


def test_two_roles_fenced_in_one_transaction_pass_for_their_tables(server_url):
    with Desk(server_url) as desk, connected(server_url) as connection:
        execute(server_url, "create table invoices (n int)", "create table reports (n int)")
        guard(server_url)
        guard(server_url, "reports", 'of "all"; a/b=1')
        billing, reporting = desk.lead("billing"), desk.lead('of "all"; a/b=1')
        fence(connection, billing, BOUND_S)
        refused(connection, "insert into reports values (1)")
        fence(connection, billing, BOUND_S)
        fence(connection, reporting, BOUND_S)
        connection.execute("insert into invoices values (1)")
        connection.execute("insert into reports values (1)")
        connection.commit()
    assert numbers(server_url) == numbers(server_url, "reports") == [1]


def test_prepared_transaction_keeps_the_successor_out(make_postgres_server):
    server = make_postgres_server(fsync=False, settings={"max_prepared_transactions": 5})
    url = server.create_database()
    with Desk(url) as old, Desk(url) as new, connected(url) as connection:
        execute(url, "create table invoices (n int)")
        guard(url)
        term = old.lead("billing")
        fence(connection, term, BOUND_S)
        connection.execute("insert into invoices values (2)")
        connection.execute("prepare transaction 'two'")
        connection.rollback()
        assert new.end(old.id)
        assert new.acquire("billing") == {}
        connection.autocommit = True
        connection.execute("commit prepared 'two'")
        assert new.acquire("billing")["billing"] > term.token
    assert numbers(url) == [2]


def test_guard_of_a_promoted_replica_refuses_the_terms_of_the_old_primary(replica):
    """The replica has the guard and the term, but lacks the end of the term."""
    url = replica.primary.create_database()
    name = url.rpartition("/")[2]
    with Desk(url) as old:
        execute(url, "create table invoices (n int)")
        guard(url)
        term = old.lead("billing")
        replica.catch_up()
        replica.primary.stop()
    replica.promote()
    with connected(replica.url(name)) as connection:
        refused(connection, "insert into invoices values (1)")
        with pytest.raises(Fenced):
            fence(connection, term, BOUND_S)
        connection.rollback()
        refused(connection, "insert into invoices values (1)")
    assert numbers(replica.url(name)) == []


def test_successor_waits_for_an_open_write_to_a_guarded_table(guarded):
    url, term, connection = guarded
    fence(connection, term, BOUND_S)
    connection.execute("insert into invoices values (2)")
    with Desk(url) as successor:
        assert successor.end(term.member_id)
        assert successor.acquire("billing") == {}
        connection.commit()
        assert successor.acquire("billing")["billing"] > term.token


def test_trigger_of_mariadb_is_the_fence(mariadb):
    """A write without a fence in its own transaction, on a connection that fenced before, keeps the successor out."""
    url, term, connection = mariadb
    fence(connection, term, BOUND_S)
    connection.rollback()
    connection.execute("insert into invoices values (2)")
    with Desk(url) as successor:
        assert successor.end(term.member_id)
        assert successor.acquire("billing") == {}
        connection.commit()
        assert successor.acquire("billing")["billing"] > term.token
        refused(connection, "insert into invoices values (3)")


def test_refused_write_locks_nothing_and_waits_for_nothing(guarded):
    url, term, connection = guarded
    with pytest.raises(Unfenced), tenure.translate_unfenced():
        connection.execute("insert into invoices values (2)")
    with Desk(url) as successor:
        assert successor.end(term.member_id)
        assert successor.acquire("billing")["billing"] > term.token  # `connection` is still in its transaction
    connection.rollback()
    roles = "tenure.roles" if url.startswith("postgres") else "tenure_roles"
    with connected(url) as other:
        other.execute(f"select 1 from {roles} where name = 'billing' for update")
        refused(connection, "insert into invoices values (2)")


# --- partitions, and other tables that cannot be guarded as they are ----------------------------------------------


def test_partitions_are_guarded_also_those_attached_later(every_postgres_url):
    url = every_postgres_url
    execute(
        url,
        "create table invoices (n int) partition by range (n)",
        "create table low partition of invoices for values from (0) to (10)",
        "create table high (n int)",
    )
    with Desk(url) as desk, connected(url) as connection:
        term = desk.lead("billing")
        guard(url)
        assert leaks(url) == []
        execute(url, "alter table invoices attach partition high for values from (10) to (20)")
        (leak,) = leaks(url)
        assert "public.high" in leak
        assert "guard the table again" in leak
        for statement in (
            "insert into invoices values (1)",
            "insert into low values (1)",
            "insert into high values (11)",
            "truncate invoices",
            "truncate low",
            "set local session_replication_role = replica; insert into high values (11)",
        ):
            refused(connection, statement)
        guard(url)
        assert leaks(url) == []
        refused(connection, "truncate high")
        fence(connection, term, BOUND_S)
        for statement in (
            "insert into invoices values (1), (11)",
            "update invoices set n = 12 where n = 1",
            "delete from high",
        ):
            connection.execute(statement)
        connection.execute("truncate high")
        connection.commit()
        with tenure.Registry(url) as registry:
            registry.unguard("invoices")
        assert execute(url, "select 1 from pg_trigger where tgname like 'tenure%'") == []


def test_leaks_are_found(every_postgres_url):
    url = every_postgres_url
    with Desk(url):
        execute(url, "create table invoices (n int)", "create table heir () inherits (invoices)")
        guard(url)
        assert leaks(url) == ["public.heir, a part of it, has no guard: guard it, too"]
        guard(url, "heir")
        assert leaks(url) == []
        execute(url, "alter table only invoices disable trigger tenure_guard")
        (leak,) = leaks(url)
        assert "is disabled" in leak
        execute(url, "alter table only invoices enable trigger tenure_guard")
        (leak,) = leaks(url)
        assert "not ENABLE ALWAYS" in leak
        guard(url)
        assert leaks(url) == []


def test_table_that_is_attached_to_one_without_a_guard_leaks(every_postgres_url):
    url = every_postgres_url
    with Desk(url):
        execute(url, "create table invoices (n int)", "create table bills (n int) partition by range (n)")
        guard(url)
        execute(url, "alter table bills attach partition invoices for values from (0) to (10)")
        execute(url, "insert into bills values (1)")  # so it is
        (leak,) = leaks(url)
        assert "a write to public.bills, which public.invoices is a part of" in leak
        guard(url, "bills")
        assert not any("is a part of, fires" in leak for leak in leaks(url))


def test_guard_is_found_by_its_function_whatever_its_trigger_is_called(postgres):
    url, _, _ = postgres
    execute(url, "alter trigger tenure_guard on invoices rename to other")
    with tenure.Registry(url) as registry:
        assert [one.role for one in registry.guarded_tables()] == ["billing"]
        with pytest.raises(ConfigError, match="guarded by another role"):
            registry.guard("invoices", "reports")
        registry.unguard("invoices")
        assert registry.guarded_tables() == []


def test_user_who_may_become_the_owner_is_a_leak(postgres):
    url, _, connection = postgres
    name = f"app_{url.rpartition('/')[2]}"
    try:
        execute(url, f"create role {name}_owner", f"create role {name} login noinherit in role {name}_owner")
        execute(url, f"alter table invoices owner to {name}_owner", f"grant usage on schema tenure to {name}")
        execute(url, f"grant select on all tables in schema tenure to {name}")
        with tenure.Registry(url.replace("postgres@", f"{name}@", 1)) as registry:
            ((leak,),) = [one.leaks for one in registry.guarded_tables()]
        assert leak.startswith(f"user '{name}' is the owner, or may SET ROLE to it, and can disable its trigger")
    finally:
        connection.rollback()
        execute(
            url, "alter table invoices owner to postgres", f"drop owned by {name}", f"drop role {name}, {name}_owner"
        )


def test_error_names_the_namespace_if_it_is_not_the_default(server_url):
    with Desk(server_url, namespace="blue"), tenure.Registry(server_url, namespace="blue") as registry:
        execute(server_url, "create table invoices (n int)")
        registry.guard("invoices", "billing")
        with connected(server_url) as connection:
            error = refused(connection, "insert into invoices values (1)")
    assert "is guarded by role billing of namespace blue: call term.fence" in str(error)
    assert error.role == "billing"


LONG_NAMES = [
    ("billing_invoice_line_item", "billing-worker"),
    ("customer_invoice_line_item_history", "invoicing-service"),
    ("accounting_general_ledger_entry_archive_2026", "x"),
    ("invoices", "a\\b 'quoted' and \"quoted\""),
    ("t" * 64, "r" * 40),
    ("t" * 64, "r" * 200),
    ("€" * 48, "€" * 66),
]


@pytest.mark.parametrize("namespace", ["default", "blue", "n" * 200], ids=len)
@pytest.mark.parametrize(("table", "role"), LONG_NAMES, ids=len)
def test_error_of_mariadb_names_the_whole_role(mariadb_url, table, role, namespace):
    with Desk(mariadb_url, namespace=namespace), tenure.Registry(mariadb_url, namespace=namespace) as registry:
        execute(mariadb_url, f"create table {table} (n int)")
        registry.guard(table, role)
        with connected(mariadb_url) as connection:
            error = refused(connection, f"insert into {table} values (1)")
    assert error.role == role
    shown = table if len(table) < 48 and len(namespace) < 200 else table[:11]
    assert str(error).startswith(f"INSERT on {shown}")
    assert f" is guarded by role {role}" in str(error)
    assert ": call term.fence(" in str(error)


@pytest.mark.parametrize("table_length", range(1, 65))
def test_message_that_fits_on_mysql_has_the_whole_role(table_length):
    """A message of 128 characters is left to the triggers of old, which cut the role to get it."""
    *_, text = tenure.guard_sql("t" * table_length, "billing-worker", database="mysql")
    message = bytes.fromhex(text.rpartition("message_text = _utf8mb4 x'")[2].partition("'")[0]).decode()
    assert len(message) < 128
    assert " is guarded by role billing-worker: call term.fence(" in message


@pytest.mark.parametrize(
    ("table", "known", "role"),
    [("invoices", "billing", "billing"), ("billing_invoice_line_item", None, "billing-worker")],
)
def test_cut_text_of_an_older_guard_is_understood_and_renewed(mariadb_url, table, known, role):
    """Its triggers had 128 characters at most, and the role may lack its end."""
    execute(mariadb_url, f"create table {table} (n int)")
    with Desk(mariadb_url), connected(mariadb_url) as connection:
        for text in tenure.guard_sql(table, role, database="mysql"):
            begin, found, _ = text.partition("message_text = ")
            message = f"INSERT on {table} is guarded by role {role}"[: 128 - len(REMEDIES[0])] + REMEDIES[0]
            execute(mariadb_url, f'{begin}{found}"{message}"; end if' if found else text)
        error = refused(connection, f"insert into {table} values (1)")
        assert error.role == known
        assert "is guarded by role billing" in str(error)
        guard(mariadb_url, table, role)
        assert refused(connection, f"insert into {table} values (1)").role == role


def test_guard_of_a_renamed_table_is_renewed_without_its_old_triggers(mariadb):
    url, _, _ = mariadb
    execute(url, "alter table invoices rename to bills")
    guard(url, "bills")
    assert execute(url, "select count(*) from information_schema.triggers where trigger_schema = database()") == [(3,)]


def test_tables_whose_names_differ_in_case_have_a_guard_each(mariadb):
    """Where the server heeds case. Its schema of information compares without case and accents."""
    url, _, connection = mariadb
    others = ("Invoices", "invoicés")
    with tenure.Registry(url) as registry:
        for number, name in enumerate(others):
            with pytest.raises(ConfigError, match="there is none"):
                registry.guard(name, "other")
            execute(url, f"create table {name} (n int)")
            registry.guard(name, f"other-{number}")
        registry.guard("invoices", "billing")
        assert {one.table: one.role for one in registry.guarded_tables()} == {
            "invoices": "billing",
            "Invoices": "other-0",
            "invoicés": "other-1",
        }
        for name in others:
            registry.unguard(name)
        assert [one.table for one in registry.guarded_tables()] == ["invoices"]
    refused(connection, "insert into invoices values (2)")


def test_table_has_one_guard_where_the_server_ignores_case():
    if mariadb_program() is None:
        missing(NO_MARIADB)
    with MariaDbServer(settings={"lower_case_table_names": 1}) as server:
        url = server.create_database()
        with Desk(url) as desk, tenure.Registry(url) as registry, connected(url) as connection:
            execute(url, "create table Invoices (n int primary key)")
            registry.guard("Invoices", "billing")
            with pytest.raises(ConfigError, match="table 'invoices' is guarded by another role"):
                registry.guard("INVOICES", "other")
            registry.guard("INVOICES", "billing")
            assert [(one.table, one.role) for one in registry.guarded_tables()] == [("invoices", "billing")]
            with pytest.raises(ConfigError, match="is a table of Tenure"):
                registry.guard("Tenure_Roles", "billing")
            term = desk.lead("billing")
            fence(connection, term, BOUND_S)
            connection.execute("insert into iNvoices values (1)")
            connection.commit()
            registry.unguard("INVOICES")
            assert registry.guarded_tables() == []


def test_table_that_lost_its_transactions_leaks(mariadb):
    url, _, _ = mariadb
    execute(url, "alter table invoices engine = Aria")
    assert leaks(url) == ["the table has no transactions in Aria: alter it to InnoDB"]


def test_table_of_mariadb_with_a_database_in_its_name_is_refused():
    with pytest.raises(ConfigError, match="bare name"):
        tenure.guard_sql("billing.invoices", "billing", database="mysql")


def test_leaks_are_found_on_mariadb(mariadb):
    url, _, connection = mariadb
    assert leaks(url) == []
    connection.execute("create table customers (n int primary key)")
    connection.execute("insert into customers values (1)")
    connection.execute("alter table invoices add foreign key (n) references customers (n) on delete cascade")
    (leak,) = leaks(url)
    assert "cascade" in leak
    ((name,),) = execute(
        url, "select trigger_name from information_schema.triggers where event_manipulation = 'DELETE'"
    )
    execute(url, f"drop trigger {name}")
    assert any("the trigger for delete is missing" in leak for leak in leaks(url))
    with pytest.raises(ConfigError, match="cascade"):
        guard(url)


@pytest.mark.parametrize(
    ("server", "make", "table", "why"),
    [
        ("postgres", "create view invoices as select 1 as n", "invoices", "is not a permanent table"),
        ("postgres", "create materialized view invoices as select 1 as n", "invoices", "is not a permanent table"),
        ("postgres", "select 1", "tenure.roles", "is a table of Tenure"),
        ("postgres", "select 1", "invoices", "does not exist"),
        (
            "postgres",
            "create table p (n int) partition by list (n); create table c partition of p default",
            "c",
            "is a partition",
        ),
        ("mariadb", "create table invoices (n int) engine = MyISAM", "invoices", "not in InnoDB"),
        ("mariadb", "do 0", "tenure_roles", "is a table of Tenure"),
        ("mariadb", "do 0", "invoices", "there is none in the database"),
    ],
)
def test_what_cannot_be_guarded_is_refused(request, server, make, table, why):
    url = request.getfixturevalue(f"{server}_url")
    with Desk(url):
        execute(url, make)
        with pytest.raises(ConfigError, match=why):
            guard(url, table)


def test_guard_is_refused_while_members_of_an_older_release_live(mariadb_url):
    with Desk(mariadb_url):
        execute(mariadb_url, "create table invoices (n int)", "update tenure_members set version = '0.1.0'")
        with pytest.raises(ConfigError, match=r"older release.*upgrade them first \('desk-\d+' \(0.1.0\)\)"):
            guard(mariadb_url)


def test_sqlite_refuses_to_guard(sqlite_url):
    with Desk(sqlite_url), tenure.Registry(sqlite_url) as registry:
        with pytest.raises(ConfigError, match="SQLite cannot guard a table"):
            registry.guard("invoices", "billing")
        assert registry.guarded_tables() == []
    with pytest.raises(ConfigError, match="SQLite cannot guard a table"):
        tenure.guard_sql("invoices", "billing", database="sqlite")


def test_table_in_use_is_a_clear_error(server_url, monkeypatch):
    short = {"postgresql": ("set local search_path to default",), "mysql": ("set session lock_wait_timeout = 1",)}
    monkeypatch.setattr("tenure.databases.guards._BEFORE", short)  # a node's connection waits for 100 ms
    with Desk(server_url), connected(server_url) as connection:
        execute(server_url, "create table invoices (n int)")
        connection.execute("insert into invoices values (1)")
        with pytest.raises(ConfigError, match="table 'invoices' is in use"):
            guard(server_url)


def test_table_that_another_role_guards_is_refused(guarded):
    url, _, _ = guarded
    with pytest.raises(ConfigError, match="guarded by another role: remove that guard first"):
        guard(url, role="reports")
    guard(url)


def test_guard_of_another_schema_of_tenure_is_left_alone(postgres):
    url, _, connection = postgres
    with Desk(url, schema="other"), tenure.Registry(url, schema="other") as registry:
        assert registry.guarded_tables() == []
        with pytest.raises(ConfigError, match="not guarded"):
            registry.unguard("invoices")
        with pytest.raises(ConfigError, match="guarded by another role"):
            registry.guard("invoices", "billing")
    refused(connection, "insert into invoices values (2)")


def test_guard_of_a_table_that_was_renamed_can_be_removed(guarded):
    url, _, connection = guarded
    execute(url, "alter table invoices rename to bills")
    with tenure.Registry(url) as registry:
        assert [one.table.rpartition(".")[2] for one in registry.guarded_tables()] == ["bills"]
        registry.unguard("bills")
        assert registry.guarded_tables() == []
    connection.execute("insert into bills values (2)")
    connection.rollback()


# --- who may, and what happens around it ---------------------------------------------------------------------


def test_writer_without_privileges_on_tenures_tables_gets_the_same_error(postgres):
    _, _, connection = postgres
    connection.execute("drop role if exists colleague")
    connection.execute("create role colleague")
    connection.execute("grant all on invoices to colleague")
    connection.execute("set local role colleague")
    refused(connection, "insert into invoices values (2)")


def test_namespace_whose_roles_guard_tables_cannot_be_forgotten(guarded):
    url, _, _ = guarded
    with Desk(url, namespace="other"), tenure.Registry(url) as registry:
        with pytest.raises(ConfigError, match=r"remove the guards first .*invoices"):
            registry.forget()
        registry.unguard("invoices")
        with pytest.raises(ConfigError, match="not guarded"):
            registry.unguard("invoices")
        with pytest.raises(ConfigError, match="living members"):
            registry.forget()


def test_statements_for_migrations_guard_and_remove(server_url):
    database = "postgresql" if server_url.startswith("postgres") else "mysql"
    with Desk(server_url), connected(server_url) as connection:
        execute(server_url, "create table invoices (n int)")
        for _ in range(2):
            execute(server_url, *tenure.guard_sql("invoices", "billing", database=database))
        refused(connection, "insert into invoices values (2)")
        execute(server_url, *tenure.guard_sql("invoices", "billing", database=database, remove=True))
        connection.execute("insert into invoices values (2)")
        connection.commit()
    assert numbers(server_url) == [2]


def test_claims_and_transactions_of_a_term_pass(server_url):
    with tenure.Node(server_url) as node, node.lead("billing") as term, connected(server_url) as connection:
        execute(server_url, "create table invoices (n int)")
        guard(server_url)
        with term.transaction() as transaction:
            transaction.execute("insert into invoices values (1)")
            assert transaction.claim("monthly", datetime(2024, 1, 1, tzinfo=timezone.utc))
            transaction.execute("insert into invoices values (2)")
        assert term.claim(connection, "monthly", datetime(2024, 2, 1, tzinfo=timezone.utc))
        connection.execute("insert into invoices values (3)")
        connection.commit()
        execute(server_url, "create table reports (n int)")
        guard(server_url, "reports", "reporting")
        with pytest.raises(Unfenced, match="guarded by role reporting"), term.transaction() as transaction:
            transaction.execute("insert into reports values (1)")
    assert numbers(server_url) == [1, 2, 3]


# --- the same error from every driver ----------------------------------------------------------------------------


@pytest.fixture(params=["psycopg", "asyncpg", "pymysql"])
def engine_url(request: pytest.FixtureRequest) -> tuple[str, str]:
    """The URL of a database with a guarded table, for SQLAlchemy, and its driver."""
    mysql = request.param == "pymysql"
    url = str(request.getfixturevalue("mariadb_url" if mysql else "postgres_url"))
    with Desk(url):
        execute(url, "create table invoices (n int primary key)")
        guard(url)
    return f"{'mysql' if mysql else 'postgresql'}+{request.param}:{url.partition(':')[2]}", request.param


class Base(orm.DeclarativeBase):
    pass


class Invoice(Base):
    __tablename__ = "invoices"
    n: orm.Mapped[int] = orm.mapped_column(primary_key=True)


def test_session_of_sqlalchemy_whose_author_forgot_the_fence_raises_unfenced(engine_url):
    url, driver = engine_url

    def blocking() -> None:
        engine = sqlalchemy.create_engine(url)
        with orm.Session(engine) as session:
            session.add(Invoice(n=1))
            with pytest.raises(Unfenced, match=r"INSERT on .*invoices is guarded"), tenure.translate_unfenced():
                session.commit()
        engine.dispose()

    async def in_a_loop() -> None:
        engine = create_async_engine(url)
        async with engine.connect() as connection:
            with pytest.raises(Unfenced, match=r"INSERT on .*invoices is guarded"), tenure.translate_unfenced():
                await connection.execute(sqlalchemy.insert(Invoice).values(n=1))
        await engine.dispose()

    if driver != "asyncpg":
        blocking()
    if driver != "pymysql":
        asyncio.run(in_a_loop())


def test_async_drivers_raise_unfenced(postgres):
    url, _, _ = postgres

    async def write() -> None:
        plain = await asyncpg.connect(url)
        with pytest.raises(Unfenced) as caught, tenure.translate_unfenced():
            await plain.execute("insert into invoices values (2)")
        assert caught.value.role == "billing"
        await plain.close()
        async with await psycopg.AsyncConnection.connect(url) as connection:
            with pytest.raises(Unfenced), tenure.translate_unfenced():
                await connection.execute("insert into invoices values (2)")

    asyncio.run(write())


def test_other_errors_are_left_alone(guarded):
    _, _, connection = guarded
    with pytest.raises((psycopg.Error, connection.Error)), tenure.translate_unfenced():
        connection.execute("insert into nowhere values (1)")
    with pytest.raises(ZeroDivisionError), tenure.translate_unfenced():
        1 / 0  # noqa: B018


# --- random programs -------------------------------------------------------------------------------------------

STEPS = ("succeed", "fence", "write", "commit", "roll back", "savepoint", "undo", "autocommit", "crash")
ACTIONS = st.tuples(st.sampled_from([*STEPS, "write, commit", "fence, write, commit"]), st.integers(0, 2))
PROGRAMS = st.lists(ACTIONS, min_size=4, max_size=16)
_roles = itertools.count(1)


class Processes:
    """Processes that lead one after the other. Each has a connection, and writes its token with or without a fence."""

    def __init__(self, url: str, *, guarded: bool) -> None:
        self.url, self.guarded = url, guarded
        self.desks = [Desk(url)]
        self.observer = connect(url)
        self.errors = (psycopg.Error, self.observer.Error, tenure.TenureError)

    def close(self) -> None:
        for one in (*self.desks, self.observer):
            one.close()

    def history(self, program: list[tuple[str, int]]) -> list[int]:
        """Run a program, and return the tokens in the order in which they were committed."""
        self.table = self.role = f"r{next(_roles)}"
        column = "bigserial" if self.url.startswith("postgres") else "bigint auto_increment"
        execute(self.url, f"create table {self.table} (n {column} primary key, token bigint)")
        if self.guarded:
            guard(self.url, self.table, self.role)
        self.terms: list[TermIdentity] = []
        self.connections: list[Any] = []
        committed: dict[int, int] = {}
        for action, number in [("succeed", 0), ("succeed", 0), *program]:
            for step in action.split(", "):
                with contextlib.suppress(*self.errors):
                    self.succeed() if step == "succeed" else self.do(step, number % len(self.terms))
            committed |= dict(self.observer.execute(f"select n, token from {self.table} order by n").fetchall())
            self.observer.rollback()
        for one in (*self.connections, *self.desks[:-1]):
            one.close()
        del self.desks[:-1]
        return list(committed.values())

    def succeed(self) -> None:
        """Let another process lead, unless a fenced transaction is in its way."""
        leader, successor = self.desks[-1], Desk(self.url)
        self.desks.append(successor)
        assert successor.end(leader.id)
        if token := successor.acquire(self.role).get(self.role):
            self.terms.append(TermIdentity(self.role, token, successor.id))
            self.connections.append(connect(self.url))

    def do(self, action: str, which: int) -> None:
        connection, term = self.connections[which], self.terms[which]
        if action == "fence":
            fence(connection, term, BOUND_S)
        elif action == "write":
            connection.execute(f"insert into {self.table} (token) values ({term.token})")
        elif action == "autocommit" and self.url.startswith("postgres"):
            connection.autocommit = not connection.autocommit
        elif action == "autocommit":
            connection.autocommit(not connection.get_autocommit())
        elif action == "crash":
            connection.close()
            self.connections[which] = connect(self.url)
        elif action in ("commit", "roll back"):
            connection.commit() if action == "commit" else connection.rollback()
        else:
            connection.execute({"savepoint": "savepoint s", "undo": "rollback to savepoint s"}[action])


@pytest.mark.parametrize(
    ("guarded", "programs"),
    [
        pytest.param(True, 6, id="guarded"),
        pytest.param(True, 25, id="guarded, more programs", marks=pytest.mark.long),
        pytest.param(False, 1, id="as it is without a guard"),  # the example below is enough to show that it breaks
    ],
)
def test_history_of_a_guarded_table_is_one_leader_after_another(server_url, guarded, programs):
    broken = []

    @fuzzed(programs)
    @given(PROGRAMS)
    @example([("write, commit", 1), ("write, commit", 0)])
    def run(program: list[tuple[str, int]]) -> None:
        history = processes.history(program)
        assert not guarded or history == sorted(history)
        if history != sorted(history):
            broken.append(history)

    with contextlib.closing(Processes(server_url, guarded=guarded)) as processes:
        run()
    assert bool(broken) is not guarded
