"""Every part of a table's guard is necessary: take it away, and a write passes that must not.

A mutation replaces text in the functions of PostgreSQL or in the trigger of MariaDB. Each piece must occur, so that a
refactoring cannot turn a mutation into nothing. The same writes are refused by the guard as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

import tenure
from tenure.fence.fence import fence
from tenure.store import guards
from tenure.store.dialects import postgresql
from tests.support.store_by_hand import Desk, TermIdentity, connect, connected, execute

BOUND_S = 30.0


def forged_mark(connection: Any, term: TermIdentity) -> None:
    connection.execute(f"set local tenure.fenced = ';\"default\"/billing={term.token};'")
    connection.execute("select pg_current_xact_id()")
    connection.execute("insert into invoices values (2)")


def lock_only(connection: Any, _: TermIdentity) -> None:
    connection.execute("select 1 from tenure.roles where name = 'billing' for share")
    connection.execute("insert into invoices values (2)")


def replica(connection: Any, _: TermIdentity) -> None:
    connection.execute("set local session_replication_role = replica")
    connection.execute("insert into invoices values (2)")


def truncate(connection: Any, _: TermIdentity) -> None:
    connection.execute("truncate invoices")


def partition(connection: Any, _: TermIdentity) -> None:
    connection.execute("insert into part values (2)")


def colleague(connection: Any, _: TermIdentity) -> None:
    """A user without privileges on Tenure's tables must get the guard's error, not one about privileges."""
    connection.execute("create role colleague_of_a_mutation")
    connection.execute("grant insert on invoices to colleague_of_a_mutation")
    connection.execute("set local role colleague_of_a_mutation")
    connection.execute("insert into invoices values (2)")


POSTGRES = {
    "no mark": (
        lock_only,
        "in current_setting('tenure.fenced', true)) > 0",
        "in coalesce(current_setting('tenure.fenced', true), '')) >= 0",
    ),
    "no lock": (forged_mark, "if locker <> me then", "locker := coalesce(me, locker); if locker <> me then"),
    "not always": (replica, "enable always trigger", "enable trigger"),
    "no truncate": (truncate, " or truncate on", " on"),
    "no trigger per row": (partition, "if kind.relkind = 'r' then", "if kind.relkind in ('r', 'p') then"),
    "not as the definer": (colleague, "security definer", ""),
}


def is_refused(url: str, deed: Callable[[Any, TermIdentity], None], term: TermIdentity) -> bool:
    with connected(url) as connection:
        try:
            with tenure.translate_unfenced():
                deed(connection, term)
        except tenure.Unfenced:
            return True
        except psycopg.errors.InsufficientPrivilege:
            return False
        finally:
            connection.rollback()
    return False


def set_up(url: str, functions: str, *, partitioned: bool) -> None:
    for function in functions.split("\ncreate ")[1:]:
        execute(url, postgresql("tenure").text("create or replace " + function))
    execute(url, "create table invoices (n int)" + (" partition by range (n)" if partitioned else ""))
    if partitioned:
        execute(url, "create table part partition of invoices for values from (0) to (9)")
    execute(url, *tenure.guard_sql("invoices", "billing"))


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=() if one in {"no mark", "no lock"} else pytest.mark.long) for one in POSTGRES]
)
def test_without_a_part_of_the_guard_postgres_lets_a_write_pass(postgres_url, name):
    deed, piece, instead = POSTGRES[name]
    functions = "\n".join(guards.FUNCTIONS)
    assert piece in functions
    for text, refused in ((functions, True), (functions.replace(piece, instead), False)):
        with Desk(postgres_url, namespace="default") as desk:
            set_up(postgres_url, text, partitioned=deed is partition)
            assert is_refused(postgres_url, deed, desk.lead("billing")) is refused
            desk.end(desk.id)
        execute(postgres_url, "drop table invoices")


def test_without_its_look_at_the_role_mariadb_lets_an_old_term_write(mariadb_url):
    url, look = mariadb_url, "or not exists ("
    execute(url, "create table invoices (n int)")
    for refused, instead in ((True, look), (False, "or 1 = 0 and not exists (")):
        with Desk(url) as old, Desk(url) as new, contextlib.closing(connect(url)) as connection:
            for text in tenure.guard_sql("invoices", "billing", database="mysql"):
                assert look in text or text.startswith("drop")
                execute(url, text.replace(look, instead))
            term = old.lead("billing")
            fence(connection, term, BOUND_S)
            connection.rollback()
            new.succeed(old, "billing")
            writes = pytest.raises(tenure.Unfenced) if refused else contextlib.nullcontext()
            with writes, tenure.translate_unfenced():
                connection.execute("insert into invoices values (1)")
            connection.rollback()
            new.end(new.id)
