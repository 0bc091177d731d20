"""Promise 2: no stale write, ever. The database itself judges the term, inside the application's transaction."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from datetime import datetime, timezone

import psycopg
import pymysql
import pytest
import sqlalchemy
from psycopg.rows import dict_row
from sqlalchemy.pool import NullPool

import tenure
from tenure.core import messages
from tenure.databases.postgres.connect import PostgresConnector
from tenure.databases.postgres.sentinel import AdvisoryActions, AdvisorySentinel
from tenure.errors import ConfigError, Fenced
from tenure.fence import job_runs
from tenure.internals import holding_of
from tenure.store import migrations
from tenure.store.dialects import postgresql
from tenure.store.session import Failed
from tenure.store.tables import MIGRATIONS
from tests.support.store_by_hand import Desk, TermIdentity, connect, connected, execute, table, until

BOUND_S = 30.0
NOON = datetime(2024, 5, 1, 12, tzinfo=timezone.utc)


@pytest.fixture
def ledger():
    """Makes the application's own table, and reads what was written to it."""

    class Ledger:
        def __init__(self, url):
            self.url = url
            execute(url, "create table ledger (token bigint)")

        @property
        def tokens(self):
            return [token for (token,) in execute(self.url, "select token from ledger order by token")]

    return Ledger


def write(connection, claim):
    connection.execute(f"insert into ledger values ({claim.token})")


def fence(connection, claim, bound_s=BOUND_S):
    tenure.fence.fence.fence(connection, claim, bound_s)


def is_fenced_off(url, claim):
    with connected(url) as connection:
        try:
            fence(connection, claim)
        except Fenced as refusal:
            return not refusal.retryable
        # The server may see the end of a connection later, and the role's row stays locked until then.
        connection.rollback()
        return False


# --- what a term may do, and what not -----------------------------------------------------------------------


def test_fenced_transaction_commits(store_url, ledger):
    with tenure.Node(store_url) as node, node.lead("r") as term:
        written = ledger(store_url)
        with term.transaction() as transaction:
            write(transaction, term)
        assert written.tokens == [term.token]


def test_fenced_transaction_rolls_back_on_an_error(store_url, ledger):
    with tenure.Node(store_url) as node, node.lead("r") as term:
        written = ledger(store_url)
        with pytest.raises(ZeroDivisionError), term.transaction() as transaction:
            transaction.execute(f"insert into ledger values ({term.token})").rowcount / 0
        assert written.tokens == []


def test_fence_holds_in_a_transaction_of_the_callers_own(store_url, ledger):
    with tenure.Node(store_url) as node, node.lead("r") as term, connected(store_url) as connection:
        written = ledger(store_url)
        term.fence(connection)
        write(connection, term)
        connection.commit()
        assert written.tokens == [term.token]


def test_percent_sign_needs_no_escape_where_there_are_no_parameters(store_url):
    with tenure.Node(store_url) as node, node.lead("r") as term, term.transaction() as transaction:
        assert transaction.execute("select 'x' where 'abc' like 'a%'").fetchone() == ("x",)


def test_old_term_is_refused_after_a_takeover(store_url, ledger):
    with Desk(store_url) as old, Desk(store_url) as new:
        written = ledger(store_url)
        before = old.lead("r")
        after = new.succeed(old, "r")
        assert after.token > before.token
        for claim in (before, after):
            with connected(store_url) as connection, contextlib.suppress(Fenced):
                fence(connection, claim)
                write(connection, claim)
                connection.commit()
        assert written.tokens == [after.token]


def test_same_token_of_another_member_is_refused(store_url):
    """A promoted replica without the last commits could hand out a token again; the member tells them apart."""
    with Desk(store_url) as desk:
        claim = desk.lead("r")
        assert is_fenced_off(store_url, TermIdentity("r", claim.token, "somebody-else"))
        assert not is_fenced_off(store_url, claim)


def test_ended_holder_is_refused_before_any_takeover(store_url):
    with Desk(store_url) as old, Desk(store_url) as other:
        claim = old.lead("r")
        assert other.end(old.id)
        assert is_fenced_off(store_url, claim)


def test_resigned_term_is_refused_at_once(store_url):
    with tenure.Node(store_url) as node:
        term = node.election("r").wait(10)
        blocker = connect(store_url)
        with contextlib.closing(blocker):
            if not store_url.startswith("sqlite"):
                term.fence(blocker)  # keeps the role from being vacated, and so from being taken by anybody
            term.resign()
            until(lambda: is_fenced_off(store_url, holding_of(term)), "refusal of the resigned term")
            assert not term.valid


def test_refused_transaction_is_gone_although_the_caller_swallows_the_refusal(store_url, ledger):
    with Desk(store_url) as old, Desk(store_url) as new:
        written = ledger(store_url)
        claim = old.lead("r")
        new.succeed(old, "r")
        with connected(store_url) as connection:
            write(connection, claim)
            with contextlib.suppress(Fenced):
                fence(connection, claim)
            connection.commit()
        assert written.tokens == []


def test_write_after_a_swallowed_refusal_cannot_commit(every_postgres_url, ledger):
    url = every_postgres_url
    with Desk(url) as old, Desk(url) as new:
        written = ledger(url)
        claim = old.lead("r")
        new.succeed(old, "r")
        with connected(url) as connection:
            with contextlib.suppress(Fenced):
                fence(connection, claim)
            with pytest.raises(psycopg.errors.InFailedSqlTransaction):
                write(connection, claim)
            connection.commit()  # the server answers ROLLBACK
        assert written.tokens == []


# --- which connections can be fenced ------------------------------------------------------------------------


def test_autocommit_is_refused_with_a_remedy(store_url):
    arguments = {"isolation_level": None} if store_url.startswith("sqlite") else {"autocommit": True}
    with Desk(store_url) as desk, connected(store_url, **arguments) as connection:
        claim = desk.lead("r")
        with pytest.raises(ConfigError, match=r"begin one first, or use term\.transaction\(\)"):
            fence(connection, claim)
        connection.execute("begin")
        fence(connection, claim)
        connection.execute("commit")


def test_connection_of_an_unknown_kind_is_refused_by_name(sqlite_url):
    with Desk(sqlite_url) as desk, pytest.raises(ConfigError, match=r"cannot fence builtins\.object"):
        fence(object(), desk.lead("r"))


def test_wrong_database_is_not_taken_for_a_lost_term(store_url, tmp_path, postgres_server):
    elsewhere = f"sqlite:///{tmp_path}/else.db" if store_url.startswith("sqlite") else postgres_server.url()
    if store_url.startswith("mysql"):
        elsewhere = store_url.rpartition("/")[0] + "/information_schema"
    with Desk(store_url) as desk, connected(elsewhere) as connection:
        claim = desk.lead("r")
        with pytest.raises(ConfigError, match="does not have Tenure's tables"):
            fence(connection, claim)


def test_fence_does_not_depend_on_the_callers_cursors_and_rows(postgres_url):
    class OwnConnection(psycopg.Connection):
        pass

    with Desk(postgres_url) as desk, OwnConnection.connect(postgres_url, row_factory=dict_row) as connection:
        connection.cursor_factory = psycopg.RawCursor  # $1 instead of %s
        claim = desk.lead("r")
        fence(connection, claim)
        with pytest.raises(Fenced):
            fence(connection, TermIdentity("r", claim.token - 1, desk.id))


def test_fence_is_judged_at_once_in_a_pipeline(postgres_url):
    with Desk(postgres_url) as desk, connected(postgres_url) as connection, connection.pipeline():
        claim = desk.lead("r")
        fence(connection, claim)
        with pytest.raises(Fenced):
            fence(connection, TermIdentity("r", claim.token - 1, desk.id))


# --- savepoints ---------------------------------------------------------------------------------------------


def savepoint_by_hand(connection):
    connection.execute("begin")
    connection.execute("savepoint inner_one")


def savepoint_by_nesting(connection):
    stack = contextlib.ExitStack()
    stack.enter_context(connection.transaction())
    stack.enter_context(connection.transaction())
    connection.stack = stack.pop_all()  # open as long as the connection


@pytest.mark.parametrize("savepoint", [savepoint_by_hand, savepoint_by_nesting])
def test_fence_inside_a_savepoint_is_refused(every_postgres_url, savepoint):
    """A rollback to it would drop the lock and leave the transaction standing."""
    with Desk(every_postgres_url) as desk, connected(every_postgres_url, autocommit=True) as connection:
        claim = desk.lead("r")
        savepoint(connection)
        with pytest.raises(ConfigError, match="before any savepoint"):
            fence(connection, claim)


@pytest.mark.parametrize("savepoint", [savepoint_by_hand, savepoint_by_nesting])
def test_fence_of_a_stale_term_inside_a_savepoint_is_refused_as_one_of_a_present_term(every_postgres_url, savepoint):
    """`Fenced` says that the transaction cannot commit, and after a rollback to the savepoint it can."""
    url = every_postgres_url
    with Desk(url) as old, Desk(url) as new, connected(url, autocommit=True) as connection:
        claim = old.lead("r")
        new.succeed(old, "r")
        savepoint(connection)
        with pytest.raises(ConfigError, match="before any savepoint"):
            fence(connection, claim)
    with connected(url) as connection, pytest.raises(Fenced):
        fence(connection, claim)


def test_fence_inside_a_savepoint_is_allowed_where_the_transaction_is_fenced_already(every_postgres_url):
    with Desk(every_postgres_url) as desk, connected(every_postgres_url) as connection:
        claim = desk.lead("r")
        fence(connection, claim)
        with connection.transaction():
            fence(connection, claim)
        assert desk.acquire("other") == {"other": 1}
        with connection.transaction(), pytest.raises(ConfigError, match="savepoint"), connection.transaction():
            fence(connection, TermIdentity("other", 1, desk.id))  # fenced for one role is not fenced for all


def test_savepoints_are_told_apart_among_many_fenced_transactions(every_postgres_url):
    """With several lockers the row names a list of them (a multixact), and a list may come and go."""
    url = every_postgres_url
    with Desk(url) as desk, contextlib.ExitStack() as stack:
        claim = desk.lead("r")
        crowd = [stack.enter_context(connected(url)) for _ in range(4)]
        for connection in crowd:
            fence(connection, claim)
        outside, inside = crowd[2], stack.enter_context(connected(url))
        for _ in range(2):
            with outside.transaction():
                fence(outside, claim)
            with inside.transaction(), pytest.raises(ConfigError, match="savepoint"), inside.transaction():
                fence(inside, claim)
            late = stack.enter_context(connected(url))
            fence(late, claim)
            for connection in (*crowd[:2], crowd[3]):
                connection.commit()  # the list has dead members now


def test_rollback_to_a_savepoint_keeps_the_write_lock_of_sqlite(sqlite_url):
    """So savepoints need not be refused there; not even one that is the transaction's beginning."""
    for begin in ("begin", "savepoint outermost"):
        with Desk(sqlite_url, renew_every=0.2) as desk, connected(sqlite_url, isolation_level=None) as connection:
            claim = desk.lead(begin)
            connection.execute(begin)
            connection.execute("savepoint inner_one")
            fence(connection, claim)
            connection.execute(f"rollback to {'inner_one' if begin == 'begin' else 'outermost'}")
            with pytest.raises(Failed, match="locked"):
                desk.stand("another")
            connection.execute("commit")
            desk.stand("another")


# --- isolation, bounds, hostile surroundings ----------------------------------------------------------------


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_term_that_was_succeeded_since_the_snapshot_is_refused(every_postgres_url, level):
    """A snapshot still shows the old term as the latest; the lock finds out, and a new transaction knows for sure."""
    url = every_postgres_url
    with Desk(url) as old, Desk(url) as new, connected(url) as connection:
        claim = old.lead("r")
        connection.execute(f"set transaction isolation level {level}")
        connection.execute("select 1 from tenure.roles")
        new.succeed(old, "r")
        with pytest.raises(Fenced) as refusal:
            fence(connection, claim)
        assert refusal.value.retryable
        connection.rollback()
        connection.execute(f"set transaction isolation level {level}")
        with pytest.raises(Fenced) as refusal:
            fence(connection, claim)
        assert not refusal.value.retryable


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_term_that_began_after_the_snapshot_is_retryable(every_postgres_url, level):
    """The snapshot shows the term before it, and the term is not over."""
    url = every_postgres_url
    with Desk(url) as old, Desk(url) as new, connected(url) as connection:
        old.lead("r")
        connection.execute(f"set transaction isolation level {level}")
        connection.execute("select 1 from tenure.roles")
        claim = new.succeed(old, "r")
        with pytest.raises(Fenced) as refusal:
            fence(connection, claim)
        assert refusal.value.retryable
        connection.rollback()
        fence(connection, claim)


def test_current_term_under_repeatable_read_is_retryable_when_its_row_was_touched(every_postgres_url):
    url = every_postgres_url
    with Desk(url) as desk, connected(url) as connection:
        claim = desk.lead("r")
        connection.execute("set transaction isolation level repeatable read")
        connection.execute("select 1 from tenure.roles")
        execute(url, "update tenure.roles set request_to = null")
        with pytest.raises(Fenced) as refusal:
            fence(connection, claim)
        assert refusal.value.retryable
        connection.rollback()
        fence(connection, claim)


def timeouts(connection):
    names = ["idle_in_transaction_session_timeout"]
    if connection.info.server_version >= 170000:
        names.append("transaction_timeout")
    return [connection.execute(f"show {name}").fetchone()[0] for name in names]


@pytest.mark.parametrize(("present", "during"), [("0", "7s"), ("1h", "7s"), ("100ms", "100ms"), ("2s", "2s")])
def test_fence_bounds_the_transaction_and_never_loosens_a_bound(every_postgres_url, present, during):
    with Desk(every_postgres_url) as desk, connected(every_postgres_url, autocommit=True) as connection:
        claim = desk.lead("r")
        connection.execute(f"set idle_in_transaction_session_timeout = '{present}'")
        if connection.info.server_version >= 170000:
            connection.execute(f"set transaction_timeout = '{present}'")
        before = timeouts(connection)
        with connection.transaction():
            fence(connection, claim, bound_s=7)
            assert set(timeouts(connection)) == {during}
        assert timeouts(connection) == before


def test_abandoned_fenced_transaction_is_ended_by_the_server(every_postgres_url):
    with Desk(every_postgres_url) as old, Desk(every_postgres_url) as new, connected(every_postgres_url) as connection:
        claim = old.lead("r")
        fence(connection, claim, bound_s=0.3)
        assert new.end(old.id)
        assert new.acquire("r") == {}
        until(lambda: new.acquire("r") == {"r": 2}, "takeover after the bound")
        with pytest.raises(psycopg.Error, match="terminating connection"):
            connection.execute("select 1")


PLANTED = """
create schema planted;
create function planted.yes(a text, b text) returns boolean language sql as 'select true';
create function planted.yes(a bigint, b bigint) returns boolean language sql as 'select true';
create operator planted.= (leftarg = text, rightarg = text, function = planted.yes);
create operator planted.= (leftarg = bigint, rightarg = bigint, function = planted.yes);
create function planted.pg_current_xact_id() returns xid8 language sql as $$select '1'::xid8$$;
create function planted.current_setting(a text, b boolean) returns text language sql as $$select '1ms'$$;
create function planted.set_config(a text, b text, c boolean) returns text language sql as $$select 'x'$$;
create function planted.format(a text, variadic b text[]) returns text language sql as $$select 'x'$$;
create table planted.roles (namespace text, name text, token bigint, holder text);
create table planted.members (id text, ended_at timestamptz, incarnation text)
"""


def test_planted_functions_and_operators_change_nothing(every_postgres_url):
    url = every_postgres_url
    with Desk(url) as old, Desk(url) as new:
        before = old.lead("r")
        after = new.succeed(old, "r")
        execute(url, *PLANTED.split(";"), "alter role current_user set search_path = planted, pg_catalog")
        try:
            assert is_fenced_off(url, before)
            with connected(url) as connection:
                assert connection.execute("show search_path").fetchone() == ("planted, pg_catalog",)
                assert connection.execute("select 'a'::text = 'b'::text").fetchone() == (True,)
                fence(connection, after, bound_s=7)
                assert timeouts(connection)[0] == "7s"
            with Desk(url) as third:
                assert third.acquire("r") == {}
                assert third.succeed(new, "r").token == after.token + 1
        finally:
            execute(url, "alter role current_user reset search_path")


# --- the pause between check and write ----------------------------------------------------------------------


def paused_leader(url, ledger, **settings):
    """A leader pauses between its fence and its write, is succeeded meanwhile, and goes on. Return who wrote what."""
    with Desk(url, **settings) as old, Desk(url, **settings) as new, connected(url) as connection:
        written = ledger(url)
        claim = old.lead("r")
        fence(connection, claim)
        assert new.end(old.id)
        tokens = new.acquire("r", patient=True)
        write(connection, claim)
        at_commit = dict(tokens)
        connection.commit()
        tokens = tokens or new.acquire("r", patient=True)
        return at_commit, tokens, written.tokens


def test_takeover_waits_for_an_open_fenced_transaction(every_postgres_url, ledger):
    at_commit, tokens, written = paused_leader(every_postgres_url, ledger)
    assert at_commit == {}, "the old term was still writing"
    assert tokens == {"r": 2}
    assert written == [1]


def test_without_its_lock_the_fence_would_let_a_stale_write_land(every_postgres_url, ledger):
    """The mutation that shows what the lock is for: everything else is as it is."""

    def without_lock(text: str) -> str:
        if "{schema}fence(" not in text:
            return text
        # Nothing is locked, so nothing shows who locked it: the look for savepoints would refuse everything.
        assert text.count("for share of r") == text.count("if locker <> top then") == 1
        return text.replace("for share of r", "").replace("if locker <> top then", "if false then")

    mutated = tuple(one._replace(functions=tuple(map(without_lock, one.functions))) for one in MIGRATIONS)
    changed = [one.version for one, other in zip(MIGRATIONS, mutated, strict=True) if one != other]
    assert changed == [1, 5], "the first creates the fence, and the other replaces it"
    connector = PostgresConnector(every_postgres_url, "mutated", 30.0, "tests")
    with contextlib.closing(connector.open("tests", 10.0)) as session:
        migrations.prepare(session, mutated)
    at_commit, _, written = paused_leader(every_postgres_url, ledger, schema="mutated")
    assert at_commit == {"r": 2}, "the new term had begun"
    assert written == [1], "and the old one wrote after that"


def test_takeover_waits_for_an_open_fenced_transaction_on_sqlite(sqlite_url, ledger):
    with Desk(sqlite_url, renew_every=0.2) as old, Desk(sqlite_url, renew_every=0.2) as new:
        written = ledger(sqlite_url)
        claim = old.lead("r")
        with connected(sqlite_url) as connection:
            fence(connection, claim)
            with pytest.raises(Failed, match="locked"):
                new.end(old.id)
            write(connection, claim)
            connection.commit()
        assert new.succeed(old, "r").token == 2
        assert written.tokens == [1]
        assert is_fenced_off(sqlite_url, claim)


def test_stream_of_fenced_transactions_does_not_starve_the_takeover(postgres_url):
    """Share locks overtake a waiting takeover: only because new ones are refused once the holder ended does it come."""
    stop = threading.Event()
    refused = []

    def stream(claim):
        with connected(postgres_url) as connection:
            while not stop.is_set():
                try:
                    fence(connection, claim)
                except Fenced:
                    refused.append(claim)
                    return
                stop.wait(0.2)
                connection.rollback()

    with Desk(postgres_url) as old, Desk(postgres_url) as new:
        claim = old.lead("r")
        threads = [threading.Thread(target=stream, args=[claim]) for _ in range(4)]
        for thread in threads:
            thread.start()
            time.sleep(0.05)  # so that they overlap, and there is no moment without one
        try:
            with connected(postgres_url) as connection:
                until(
                    lambda: connection.execute("select 1 from tenure.roles for update skip locked").fetchone() is None
                )
                connection.rollback()
            began = time.monotonic()
            assert new.end(old.id)
            assert until(lambda: new.acquire("r", patient=True), "takeover") == {"r": 2}
            assert time.monotonic() - began < 5
            until(lambda: refused == [claim] * 4, "every stream refused")
        finally:
            stop.set()
            for thread in threads:
                thread.join()


# --- abandoned transactions in the way ----------------------------------------------------------------------


@contextlib.contextmanager
def waiter_for_the_role(url):
    """A connection that waits for the role's row, as the control connection does for a moment at a time."""
    with connected(url, autocommit=True) as connection:
        pid = connection.info.backend_pid
        waiting = threading.Thread(target=lambda: connection.execute("select 1 from tenure.roles for update"))
        waiting.start()
        try:
            until(lambda: execute(url, f"select 1 where pg_blocking_pids({pid}) <> '{{}}'"), "waiting for the row")
            yield pid, waiting
        finally:
            with contextlib.suppress(psycopg.Error):
                execute(url, f"select pg_terminate_backend({pid}) where pg_blocking_pids({pid}) <> '{{}}'")
            waiting.join(10)


@contextlib.contextmanager
def watcher_on(url):
    with contextlib.closing(PostgresConnector(url, "tenure", 30.0, "tests").open("watch", 10.0)) as session:
        yield AdvisoryActions(session, AdvisorySentinel(session))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the waiter that was ended
class TestUnblock:
    def alive(self, connection):
        try:
            connection.execute("select 1")
        except psycopg.OperationalError:
            return False
        return True

    def test_abandoned_transaction_is_ended_after_its_bound(self, every_postgres_url):
        url = every_postgres_url
        with Desk(url) as desk, connected(url) as abandoned, watcher_on(url) as watcher:
            desk.lead("r")
            abandoned.execute("select 1 from tenure.roles for update")
            with waiter_for_the_role(url) as (pid, waiting):
                watcher.unblock("default", pid, bound_s=3600.0)
                assert self.alive(abandoned), "its bound is not over"
                watcher.unblock("default", pid, bound_s=0.0)
                waiting.join(10)
                assert not waiting.is_alive()
                assert not self.alive(abandoned)

    def test_transaction_of_another_database_role_is_left_alone(self, postgres_server, postgres_url):
        database = postgres_url.rpartition("/")[2]
        with Desk(postgres_url) as desk, watcher_on(postgres_url) as watcher:
            desk.lead("r")
            role = f"stranger_{database}"
            execute(
                postgres_url,
                f"create role {role} login",
                f"grant usage on schema tenure to {role}",
                f"grant select, update on tenure.roles to {role}",
            )
            try:
                with connected(postgres_server.url(database, user=role)) as foreign_lock_holders:
                    foreign_lock_holders.execute("select 1 from tenure.roles for update")
                    with waiter_for_the_role(postgres_url) as (pid, waiting):
                        watcher.unblock("default", pid, bound_s=0.0)
                        assert waiting.is_alive()
                        assert self.alive(foreign_lock_holders)
            finally:
                execute(postgres_url, f"drop owned by {role}", f"drop role {role}")

    def test_registered_connection_of_a_member_is_left_alone(self, postgres_url):
        with Desk(postgres_url) as desk, watcher_on(postgres_url) as watcher:
            desk.lead("r")
            with desk.session.connection.transaction():
                desk.session.connection.execute("select 1 from tenure.roles for update")
                with waiter_for_the_role(postgres_url) as (pid, _):
                    watcher.unblock("default", pid, bound_s=0.0)
                    assert self.alive(desk.session.connection)

    def test_prepared_transaction_is_reported_once(self, make_postgres_server, caplog):
        url = make_postgres_server(fsync=False, settings={"max_prepared_transactions": 2}).create_database()
        with Desk(url) as desk, watcher_on(url) as watcher:
            desk.lead("r")
            with connected(url) as connection:
                connection.tpc_begin("left behind")
                connection.execute("select 1 from tenure.roles for update")
                connection.tpc_prepare()
            with waiter_for_the_role(url) as (pid, _), caplog.at_level(logging.WARNING, logger="tenure"):
                watcher.unblock("default", pid, bound_s=0.0)
                watcher.unblock("default", pid, bound_s=0.0)
            assert [record.message for record in caplog.records if "prepared transaction" in record.message] == [
                "a prepared transaction keeps a role from being acquired: commit it or roll it back"
            ]

    def test_node_gets_a_role_that_an_abandoned_transaction_keeps_locked(self, postgres_url):
        with Desk(postgres_url) as old, connected(postgres_url) as abandoned:
            old.lead("r")
            abandoned.execute("select 1 from tenure.roles for update")
            with tenure.Node(postgres_url, ttl=1) as node:
                election = node.election("r")
                old.ask(messages.Leave(old.id))
                assert election.wait(20).token >= 2
                assert not self.alive(abandoned)


# --- the least privileges -----------------------------------------------------------------------------------

DEPOSING = [
    *(f"update {{roles}} set {change}" for change in ("token = token + 1", "holder = null", "name = 'gone'")),
    *(f"update {{roles}} set {change}" for change in ("namespace = 'gone'", "reserved_for = 'me'")),
    "update {roles} set request_token = token",
    "delete from {roles}",
    "update {members} set ended_at = null",
    "delete from {members}",
    "update {terms} set resigned_at = null",
]


@contextlib.contextmanager
def user_who_only_fences(server, url):
    """The URL of a user with the privileges that docs/how-to/fence.md names, and no others."""
    database, name = url.rpartition("/")[2], f"fencer_{url.rpartition('/')[2]}"
    if url.startswith("mysql"):
        server.execute(f"create user {name}@'%'")
        grants = [
            f"grant select on {database}.{table(url, granted)} to {name}@'%'"
            for granted in ("roles", "members", "terms")
        ]
        grants += [
            f"grant select, insert, update on {database}.{table(url, granted)} to {name}@'%'"
            for granted in ("jobs", "runs")
        ]
        gone = [f"drop user {name}@'%'"]
    else:
        server.execute(f"create role {name} login")
        grants = [
            f"grant usage on schema tenure to {name}",
            f"grant select on all tables in schema tenure to {name}",
            f"grant update (request_to) on tenure.roles to {name}",
            f"grant insert, update on tenure.jobs, tenure.runs to {name}",
        ]
        gone = [f"drop owned by {name}", f"drop role {name}"]
    for grant in grants:
        server.execute(grant, dbname=database)
    try:
        yield server.url(database, user=name)
    finally:
        for statement in gone:
            server.execute(statement, dbname=database)


@pytest.mark.parametrize("kind", ["postgres", "mariadb"])
def test_user_with_the_narrow_grant_fences_and_claims_and_deposes_nobody(kind, request, ledger):
    url, server = request.getfixturevalue(f"{kind}_url"), request.getfixturevalue(f"{kind}_server")
    with Desk(url) as desk, Desk(url) as other, user_who_only_fences(server, url) as narrow:
        term = desk.lead("r")
        with connected(narrow) as connection:
            fence(connection, term)
            assert job_runs.perform(connection, term, BOUND_S, job_runs.claim(term, "job", NOON))
            assert other.acquire("r") == {}
            connection.commit()
        for statement in DEPOSING:
            text = statement.format(**{name: table(url, name) for name in ("roles", "members", "terms")})
            with (
                connected(narrow) as connection,
                pytest.raises((psycopg.errors.InsufficientPrivilege, pymysql.err.OperationalError), match="denied"),
            ):
                connection.execute(text)
        if kind == "postgres":
            execute(narrow, "update tenure.roles set request_to = 'somebody'")
            assert desk.ask(messages.Renew(desk.id)).alive
        assert not is_fenced_off(url, term)
        other.succeed(desk, "r")
        assert is_fenced_off(narrow, term)


# --- two-phase commit ---------------------------------------------------------------------------------------


def psycopg_two_phase(url):
    """A transaction in two phases: its connection, how to prepare it, how to commit it."""
    connection = connect(url)
    connection.tpc_begin("app")
    return connection, connection.tpc_prepare, connection.tpc_commit


def sqlalchemy_two_phase(url):
    connection = sqlalchemy.create_engine(url.replace(":", "+psycopg:", 1), poolclass=NullPool).connect()
    transaction = connection.begin_twophase()
    return connection, transaction.prepare, transaction.commit


def test_prepared_transaction_keeps_its_fence_until_it_is_committed(make_postgres_server, ledger):
    """On PostgreSQL row locks outlive PREPARE TRANSACTION; on MariaDB they do not, and the fence is refused there."""
    server = make_postgres_server(fsync=False, settings={"max_prepared_transactions": 2})
    for begin in (psycopg_two_phase, sqlalchemy_two_phase):
        url = server.create_database()
        with Desk(url) as old, Desk(url) as new:
            written = ledger(url)
            connection, prepare, commit = begin(url)
            with contextlib.closing(connection):
                fence(connection, old.lead("r"), bound_s=0.1)
                insert = "insert into ledger values (1)"
                connection.execute(insert if begin is psycopg_two_phase else sqlalchemy.text(insert))
                prepare()
                assert new.end(old.id)
                assert execute(url, "select pg_sleep(0.3)"), "longer than the bound, which ends no prepared one"
                assert new.acquire("r", patient=True) == {}, "the old term is not over"
                commit()
            assert written.tokens == [1]
            assert until(lambda: new.acquire("r", patient=True), "takeover") == {"r": 2}


def test_schema_of_the_tables_is_quoted_in_the_fence(postgres_url):
    name = "Ténure_2"
    with Desk(postgres_url, schema=name) as desk, connected(postgres_url) as connection:
        claim = desk.lead("r")
        assert postgresql(name).prefix == f'"{name}".'
        fence(connection, claim)
