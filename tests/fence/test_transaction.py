"""A block of ``term.transaction()`` is one fenced transaction: it commits as a whole, or leaving it raises."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import sqlite3
import threading
from datetime import datetime, timezone

import anyio
import psycopg
import pymysql
import pytest

import tenure
from tenure import NotCommitted, StoreUnavailable
from tests.conftest import fresh_database
from tests.support.store_by_hand import Desk, execute, table, until

NOON = datetime(2024, 5, 1, 12, tzinfo=timezone.utc)
DRIVERS_ERRORS = (sqlite3.Error, psycopg.Error, pymysql.err.Error)

PREPARED = {
    "postgresql": ["create procedure commits() language plpgsql as 'begin commit; end'"],
    "mysql": [
        "create procedure commits() begin commit; insert into ledger values (2); end",
        "create procedure begins() begin start transaction; insert into ledger values (2); end",
    ],
    "sqlite": [
        "create table once (number integer unique on conflict rollback)",
        "insert into once values (1)",
        "create table never (number integer)",
        "create trigger refuse before insert on never begin select raise(rollback, 'never'); end",
    ],
}

ROLLED_BACK = {
    "postgresql": {
        "a statement fails": ["select 1 / 0"],
        "a statement is wrong": ["selec"],
        "a key is there twice": ["insert into ledger values (1)"],
        "a procedure wants to commit": ["call commits()"],
        "an error after a savepoint was released": ["savepoint a", "release savepoint a", "select 1 / 0"],
        "an error before a savepoint": ["select 1 / 0", "savepoint a", "rollback to savepoint a"],
        "rollback": ["rollback"],
        "rollback and chain": ["rollback and chain"],
        "rollback and chain, after an error": ["select 1 / 0", "rollback and chain"],
        "rollback, begin": ["rollback; begin"],
        "abort": ["abort work"],
    },
    "mysql": {
        "rollback": ["rollback"],
        "rollback and chain": ["rollback and chain"],
        "rollback, and the next one chained": ["set session completion_type = 1", "rollback"],
    },
    "sqlite": {
        "a conflict that rolls back": ["insert into once values (1)"],
        "an insert or rollback": ["insert or rollback into ledger values (1)"],
        "a trigger that rolls back": ["insert into never values (1)"],
        "rollback": ["rollback"],
    },
}
"""What ends the transaction so that nothing of it is left."""

COMMITTED = {
    "postgresql": {
        "commit": ["commit"],
        "end": ["end"],
        "a commit behind a comment": ["-- not what it seems\n/* at all */ commit"],
        "commit and chain": ["commit and chain"],
        "commit, begin": ["commit; begin"],
        "commit, begin, and an error": ["commit; begin", "select 1 / 0"],
    },
    "mysql": {
        "commit": ["commit"],
        "commit and chain": ["commit and chain"],
        "commit, and the next one chained": ["set session completion_type = 1", "commit"],
        "begin": ["begin"],
        "a begin behind a comment": ["/* not what it seems */ begin"],
        "start transaction": ["start transaction"],
        "a table is created": ["create table another (number int)"],
        "a table is created that exists": ["create table ledger (number int)"],
        "a table is analyzed": ["analyze table ledger"],
        "a table is locked": ["lock tables ledger write"],
        "a grant is refused": ["grant select on ledger to nobody_at_all"],
        "a procedure commits and goes on": ["call commits()"],
        "a procedure begins another": ["call begins()"],
        "autocommit": ["set autocommit = 1"],
    },
    "sqlite": {
        "commit": ["commit"],
        "end": ["end transaction"],
        "a commit behind a comment": ["-- not what it seems\n/* at all */ commit"],
    },
}
"""What commits the transaction inside its block: what was written before was fenced, what is written after is not."""

KEPT = {
    "postgresql": {
        "an error inside a savepoint": ["savepoint a", "select 1 / 0", "rollback to savepoint a"],
        "a begin in vain": ["begin"],
        "a savepoint is released": ["savepoint a", "select 1", "release savepoint a"],
        "savepoints in savepoints": ["savepoint a", "savepoint b", "selec", "rollback to savepoint a", "savepoint a"],
    },
    "mysql": {
        "a statement fails": ["selec"],
        "a key is there twice": ["insert into ledger values (1)"],
        "an error inside a savepoint": ["savepoint a", "selec", "rollback to savepoint a"],
        "a savepoint is released": ["savepoint a", "select 1", "release savepoint a"],
        "a temporary table": ["create temporary table passing (number int)"],
        "xa in vain": ["xa start 'x'"],
    },
    "sqlite": {
        "a statement fails": ["selec"],
        "a key is there twice": ["insert into ledger values (1)"],
        "an error inside a savepoint": ["savepoint a", "selec", "rollback to a"],
        "a savepoint is released": ["savepoint a", "select 1", "release a"],
        "a begin in vain": ["begin"],
    },
}
"""What leaves the transaction as it is."""


def cases(kinds):
    return [
        pytest.param(kind, steps, id=f"{kind}: {what}")
        for kind, all_steps in kinds.items()
        for what, steps in all_steps.items()
    ]


class Leader:
    """A node that leads, and the application's own table beside it."""

    def __init__(self, url, term):
        self.url = url
        self.term = term

    @property
    def ledger(self):
        return [number for (number,) in execute(self.url, "select number from ledger order by number")]


@pytest.fixture(scope="module")
def leaders():
    """A leader for each kind of database, for all tests here: each of them breaks one transaction only."""
    with contextlib.ExitStack() as stack:
        yield {}, stack


@pytest.fixture
def leader(kind, leaders, request, tmp_path_factory):
    made, stack = leaders
    if kind not in made:
        if kind == "sqlite":
            url = f"sqlite:///{tmp_path_factory.mktemp('leader')}/tenure.db"
        else:
            server = "postgres_server" if kind == "postgresql" else "mariadb_server"
            url = stack.enter_context(fresh_database(request.getfixturevalue(server)))
        execute(url, "create table ledger (number integer primary key)", *PREPARED[kind])
        node = stack.enter_context(tenure.Node(url, ttl=30))
        made[kind] = Leader(url, stack.enter_context(node.lead("billing")))
    execute(made[kind].url, "delete from ledger")
    return made[kind]


every_kind = pytest.mark.parametrize("kind", ["postgresql", "mysql", "sqlite"])
on_postgres = pytest.mark.parametrize("kind", ["postgresql"])


def write_around(transaction, steps):
    """Write 1, run the steps, write 2; swallow whatever the database has to say."""
    transaction.execute("insert into ledger values (1)")
    for step in (*steps, "insert into ledger values (2)"):
        with contextlib.suppress(NotCommitted, *DRIVERS_ERRORS):
            transaction.execute(step)


@pytest.mark.parametrize(("kind", "steps"), cases(ROLLED_BACK))
def test_block_that_was_rolled_back_raises(leader, steps):
    with pytest.raises(NotCommitted, match="role 'billing'"), leader.term.transaction() as transaction:
        write_around(transaction, steps)
    assert leader.ledger == []
    with leader.term.transaction() as transaction:  # nothing was said about the term
        transaction.execute("insert into ledger values (3)")
    assert leader.ledger == [3]


@pytest.mark.parametrize(("kind", "steps"), cases(COMMITTED))
def test_what_follows_a_commit_inside_the_block_is_rolled_back_and_raises(leader, steps):
    with pytest.raises(NotCommitted, match="role 'billing'"), leader.term.transaction() as transaction:
        write_around(transaction, steps)
    assert leader.ledger == [1]


@pytest.mark.parametrize(("kind", "steps"), cases(KEPT))
def test_block_commits_where_its_transaction_still_stands(leader, steps):
    with leader.term.transaction() as transaction:
        write_around(transaction, steps)
    assert leader.ledger == [1, 2]


# --- who is told what ---------------------------------------------------------------------------------------


@on_postgres
def test_swallowed_error_is_named_as_the_cause_with_a_remedy(leader):
    with pytest.raises(NotCommitted) as raised, leader.term.transaction() as transaction:
        transaction.execute("insert into ledger values (1)")
        for statement in ("select 1 / 0", "select 'whatever comes next'"):
            with pytest.raises(psycopg.Error):
                transaction.execute(statement)
    assert isinstance(raised.value.__cause__, psycopg.errors.DivisionByZero)
    assert str(raised.value).startswith(f"role 'billing', token {leader.term.token}: ")
    assert (
        "nothing of it was committed: let the statement's error leave the block, or run the statement inside a save"
        in (str(raised.value))
    )
    assert not isinstance(raised.value, tenure.NotLeader)
    assert leader.term.valid


@on_postgres
def test_claim_that_was_rolled_back_raises_and_the_run_is_free_again(leader):
    with pytest.raises(NotCommitted), leader.term.transaction() as transaction:
        assert transaction.claim("report", NOON)
        with pytest.raises(psycopg.errors.DivisionByZero):
            transaction.execute("select 1 / 0")
    with leader.term.transaction() as transaction:
        assert transaction.jobs() == []
        assert transaction.claim("report", NOON)
        transaction.forget("report")


@every_kind
def test_claim_after_a_commit_inside_the_block_is_rolled_back(leader, kind):
    chain = {"postgresql": ["commit and chain"], "mysql": ["begin"], "sqlite": ["commit"]}[kind]
    with pytest.raises(NotCommitted, match="ended inside its block"), leader.term.transaction() as transaction:
        for statement in chain:
            transaction.execute(statement)
        with contextlib.suppress(NotCommitted):
            transaction.claim("late", NOON)
    with leader.term.transaction() as transaction:
        assert transaction.claim("late", NOON)
        transaction.forget("late")


ANOTHER = {"postgresql": "commit and chain", "mysql": "commit and chain", "sqlite": "commit"}
"""What ends the fenced transaction. Except on SQLite, another transaction is open then."""


@every_kind
def test_stale_claim_in_another_transaction_of_the_block_is_refused(leader, kind):
    """The fence that opened the block held for the transaction that was committed, and not for the next one."""
    with tenure.Node(leader.url, ttl=30) as node, Desk(leader.url) as successor:
        term = node.election("stale").wait(10)
        with pytest.raises(NotCommitted), term.transaction() as transaction:
            cursor = transaction.execute(ANOTHER[kind])
            if kind == "sqlite":
                cursor.execute("begin")
            assert successor.end(term.member_id)
            # The node may have joined again by now, and be quicker.
            assert successor.acquire("stale").get("stale", term.token + 1) > term.token
            with pytest.raises((tenure.Fenced, NotCommitted)):
                transaction.claim("report", NOON)
            with pytest.raises(NotCommitted):
                transaction.execute("commit")
    assert execute(leader.url, f"select job from {table(leader.url, 'jobs')} where role = 'stale'") == []


@on_postgres
def test_claim_in_a_block_is_one_message_without_a_second_fence(leader, tmp_path):
    with leader.term.transaction() as transaction, (tmp_path / "trace").open("w") as trace:
        server = transaction.execute("savepoint a").connection.pgconn
        server.trace(trace.fileno())
        assert transaction.claim("report", NOON)
        server.untrace()
        transaction.execute("rollback to savepoint a")
        assert transaction.claim("report", NOON), "in the same fenced transaction"
        transaction.forget("report")
    talk = (tmp_path / "trace").read_text()
    assert len(re.findall(r"\tF\t.*\t(?:Query|Parse)\t", talk)) == 1
    assert 'update "tenure".jobs' in talk
    assert '"tenure".fence(' not in talk


@pytest.mark.parametrize("kind", ["mysql", "sqlite"])
def test_claim_in_a_block_fences_again_where_no_mark_can_be_asked_for(leader, kind):
    with leader.term.transaction() as transaction:
        if kind == "sqlite":
            ran = []
            transaction.execute("select 1").connection.set_trace_callback(ran.append)
            assert transaction.claim("report", NOON)
            # SQLite shows the pragmas that a statement calls as comments.
            words = [text.split()[0] for text in ran]
            assert words == ["update", "select", "--", "--", "insert", "update", "insert"]
        else:
            count = "show session status like 'Questions'"
            before = int(transaction.execute(count).fetchone()[1])
            assert transaction.claim("report", NOON)
            ran = int(transaction.execute(count).fetchone()[1]) - before - 1
            assert ran == len(["bound", "lock", "no XA", "insert", "update", "insert"])
        transaction.forget("report")


@every_kind
def test_commit_by_the_drivers_own_call_is_noticed(leader):
    with pytest.raises(NotCommitted, match="ended inside its block"), leader.term.transaction() as transaction:
        connection = transaction.execute("select 1").connection
        transaction.execute("insert into ledger values (1)")
        connection.commit()
        connection.cursor().execute("insert into ledger values (2)" if not is_sqlite(connection) else "begin")
    assert leader.ledger == [1]


def is_sqlite(connection):
    return isinstance(connection, sqlite3.Connection)


@pytest.mark.parametrize("kind", ["sqlite"])
def test_transaction_that_was_begun_anew_is_noticed_on_sqlite(leader):
    with pytest.raises(NotCommitted, match="ended inside its block"), leader.term.transaction() as transaction:
        cursor = transaction.execute("insert into ledger values (1)")
        cursor.connection.commit()
        cursor.execute("begin")
        transaction.execute("insert into ledger values (2)")
    assert leader.ledger == [1]


PLANTED = (
    "create schema planted",
    "create function planted.pg_current_xact_id_if_assigned() returns xid8 language sql as $$select '1'::xid8$$",
    "create function planted.yes(a xid8, b xid8) returns boolean language sql as 'select true'",
    "create operator planted.= (leftarg = xid8, rightarg = xid8, function = planted.yes)",
)


@on_postgres
def test_planted_functions_and_operators_hide_nothing(leader):
    execute(leader.url, *PLANTED)
    for steps, written in ((["commit and chain"], [1]), ([], [1, 2])):
        execute(leader.url, "delete from ledger")
        expected = pytest.raises(NotCommitted) if steps else contextlib.nullcontext()
        with expected, leader.term.transaction() as transaction:
            transaction.execute("set search_path = planted, pg_catalog, public")
            write_around(transaction, steps)
        assert leader.ledger == written


@on_postgres
@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_block_commits_at_every_isolation_level(leader, level):
    execute(leader.url, f"alter role current_user set default_transaction_isolation = '{level}'")
    try:
        with leader.term.transaction() as transaction:
            assert transaction.execute("show transaction_isolation").fetchone() == (level,)
            transaction.execute("insert into ledger values (3)")
        with pytest.raises(NotCommitted), leader.term.transaction() as transaction:
            write_around(transaction, ["commit and chain"])
    finally:
        execute(leader.url, "alter role current_user reset default_transaction_isolation")
    assert leader.ledger == [1, 3]


@on_postgres
def test_error_of_the_commit_itself_is_the_drivers(leader):
    execute(leader.url, "create table if not exists later (number integer unique deferrable initially deferred)")
    with pytest.raises(psycopg.errors.UniqueViolation), leader.term.transaction() as transaction:
        transaction.execute("insert into ledger values (1)")
        transaction.execute("insert into later values (1), (1)")
    assert leader.ledger == []


@on_postgres
def test_refusal_leaves_nothing_in_the_drivers_log(leader, caplog):
    with tenure.Node(leader.url) as node:
        term = node.election("another").wait(10)
        node.election("another").resign()
        with pytest.raises(tenure.Fenced), term.transaction():
            pytest.fail("refused")
    assert [record for record in caplog.records if record.name.startswith("psycopg")] == []


# --- cancellation, and connections that are lost ------------------------------------------------------------


ENDLESS = "with recursive n(i) as (select 100 union all select i + 1 from n limit 200000000) "
SLOW_WRITE = {
    "postgresql": "insert into ledger select 100 from pg_sleep(60)",
    "mysql": "insert into ledger select 100 + sleep(60)",
    "sqlite": "insert into ledger " + ENDLESS + "select i from n",
}


@every_kind
def test_cancelled_write_that_cost_the_transaction_raises(leader, kind):
    """SQLite and PostgreSQL roll everything back then, MariaDB only the statement."""

    async def main():
        async with (
            tenure.AsyncNode(leader.url, ttl=30) as node,
            node.lead("async") as term,
            term.transaction() as transaction,
        ):
            await transaction.execute("insert into ledger values (1)")
            with anyio.move_on_after(0.2):
                await transaction.execute(SLOW_WRITE[kind])

    if kind == "mysql":
        anyio.run(main)
        assert leader.ledger == [1]
    else:
        with pytest.raises(NotCommitted, match="nothing of it was committed"):
            anyio.run(main)
        assert leader.ledger == []


@every_kind
def test_tasks_that_share_a_transaction_get_their_own_rows(leader, kind):
    """PyMySQL gave one task the rows of another, and the block committed."""

    async def main():
        async with (
            tenure.AsyncNode(leader.url, ttl=30) as node,
            node.lead("shared") as term,
            term.transaction() as transaction,
            anyio.create_task_group() as tasks,
        ):

            async def ask(number):
                for _ in range(30):
                    rows = (await transaction.execute(f"select {number}")).fetchall()
                    assert [tuple(row) for row in rows] == [(number,)]

            for number in range(3):
                tasks.start_soon(ask, number)

    anyio.run(main)


class Cable:
    """Leads to a server until a fenced transaction is committed: then the connection is cut, before or after it."""

    def __init__(self, url, *, when):
        self._when = when
        head, _, rest = url.partition("@")
        address, _, database = rest.partition("/")
        host, _, port = address.rpartition(":")
        self._server = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"{head}@127.0.0.1:{self._listener.getsockname()[1]}/{database}"
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._server)
                committed = threading.Event()
                for carry in (self._ask, self._answer):
                    threading.Thread(target=carry, args=[client, server, committed], daemon=True).start()

    def _ask(self, client, server, committed):
        marked = False
        with contextlib.suppress(OSError), client, server:
            while data := client.recv(65536):
                marked = marked or b"tenure_fence" in data
                if marked and b"commit" in data.lower():
                    if self._when == "before":
                        break
                    committed.set()
                server.sendall(data)
            for end in (client, server):
                end.shutdown(socket.SHUT_RDWR)

    def _answer(self, client, server, committed):
        with contextlib.suppress(OSError):
            while data := server.recv(65536):
                if committed.is_set():
                    break
                client.sendall(data)
            client.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", ["postgresql", "mysql"])
def test_connection_that_is_lost_during_the_commit_leaves_the_outcome_unknown(leader, when):
    with Cable(leader.url, when=when) as cable, tenure.Node(cable.url, ttl=30) as node, node.lead("far") as term:
        with pytest.raises(StoreUnavailable, match=r"role 'far'.*unknown whether"), term.transaction() as transaction:
            transaction.execute("insert into ledger values (1)")
        assert leader.ledger == ([] if when == "before" else [1])


@on_postgres
def test_block_that_does_nothing_at_all_is_ended_by_its_bound(leader):
    """From its first moment on: a process may be paused before its first statement, and would keep the role."""
    ours = "datname = current_database() and application_name like 'tenure transaction%'"
    with pytest.raises(NotCommitted), leader.term.transaction(bound=0.5):
        until(lambda: not execute(leader.url, f"select 1 from pg_stat_activity where {ours}"), "the bound")


@on_postgres
def test_transaction_that_outlasted_its_bound_was_not_committed(leader):
    bound = leader.term.transaction(bound=0.2)
    with pytest.raises(NotCommitted, match="so what was open then was rolled back"), bound as transaction:
        transaction.execute("insert into ledger values (1)")
        pid = transaction.execute("select pg_backend_pid()").fetchone()[0]
        until(lambda: not execute(leader.url, f"select 1 from pg_stat_activity where pid = {pid}"), "the bound")
    assert leader.ledger == []


@pytest.mark.parametrize("kind", ["postgresql", "mysql"])
def test_connection_that_was_lost_inside_the_block_was_not_committed(leader, kind):
    who, kill = {
        "postgresql": ("select pg_backend_pid()", "select pg_terminate_backend({}, 10000)"),
        "mysql": ("select connection_id()", "kill {}"),
    }[kind]
    with (
        pytest.raises(NotCommitted, match="so what was open then was rolled back"),
        leader.term.transaction() as transaction,
    ):
        transaction.execute("insert into ledger values (1)")
        execute(leader.url, kill.format(transaction.execute(who).fetchone()[0]))
        with pytest.raises(DRIVERS_ERRORS):
            until(lambda: not transaction.execute("select 1"), "the connection's end")
    assert leader.ledger == []


def test_statement_that_outlasts_its_term_ends_with_the_bound(postgres_url):
    with tenure.Node(postgres_url) as node:
        term = node.election("r").wait(20)
        with pytest.raises(psycopg.errors.QueryCanceled), term.transaction(bound=1) as transaction:
            term.resign()
            transaction.execute("select pg_sleep(100)")


@pytest.mark.parametrize("last", ["a statement", "the commit"])
def test_call_to_a_frozen_server_ends_with_the_bound_after_its_term(postgres_url, last):
    with tenure.Node(postgres_url) as node, contextlib.ExitStack() as stack:
        term = node.election("r").wait(20)

        def block() -> None:
            with term.transaction(bound=1) as transaction:
                ((pid,),) = transaction.execute("select pg_backend_pid()").fetchall()
                stack.callback(os.kill, pid, signal.SIGCONT)
                os.kill(pid, signal.SIGSTOP)
                term.resign()
                if last == "a statement":
                    transaction.execute("select 1")

        with pytest.raises((psycopg.OperationalError, tenure.StoreUnavailable)):
            block()


def test_commit_that_waits_for_a_replica_is_not_reported_as_done_when_its_term_is_over(postgres_server, postgres_url):
    """PostgreSQL reports a commit whose wait is cancelled as successful, although it is on no replica."""
    with tenure.Node(postgres_url, ttl=1) as node, contextlib.ExitStack() as stack:
        term = node.election("r").wait(20)
        with (
            pytest.raises(StoreUnavailable, match="it is unknown whether this fenced transaction was committed"),
            term.transaction(bound=0.5) as transaction,
        ):
            transaction.execute("create table work (n integer)")
            stack.enter_context(postgres_server.configured(synchronous_standby_names="a_replica_that_is_gone"))


ONE_SLOW_WRITE = {
    "postgresql": "insert into ledger select 2 from pg_sleep(0.5)",
    "mysql": "insert into ledger select 2 + sleep(0.5)",
}


@pytest.mark.parametrize("kind", ["postgresql", "mysql"])
def test_commit_waits_for_the_statement_of_another_thread(leader, kind):
    """PyMySQL mixed up their answers, and psycopg's state was read in the middle of the statement."""
    begun = threading.Event()

    def write(transaction):
        begun.set()
        transaction.execute(ONE_SLOW_WRITE[kind])

    with leader.term.transaction() as transaction:
        transaction.execute("insert into ledger values (1)")
        writer = threading.Thread(target=write, args=(transaction,))
        writer.start()
        begun.wait()
        # The statement is under way now.
        threading.Event().wait(0.1)
    writer.join()
    assert leader.ledger == [1, 2]


def test_cancel_request_that_is_under_way_does_not_reach_the_commit(postgres_server, postgres_url, monkeypatch):
    """It would end the commit's wait for a replica, and PostgreSQL would report the commit as successful."""
    cancel, asked = psycopg.Connection.cancel_safe, threading.Event()

    def slow(connection, **options):
        asked.set()
        # A network to the server that takes this long.
        threading.Event().wait(0.5)
        cancel(connection, **options)

    monkeypatch.setattr(psycopg.Connection, "cancel_safe", slow)
    with tenure.Node(postgres_url, ttl=2) as node, contextlib.ExitStack() as stack:
        term = node.election("r").wait(20)
        with pytest.raises(StoreUnavailable, match="it is unknown whether"), term.transaction() as transaction:
            transaction.execute("create table work (n integer)")
            stack.enter_context(postgres_server.configured(synchronous_standby_names="a_replica_that_is_gone"))
            threading.Thread(target=transaction._own.cut).start()
            asked.wait()
            cutter = threading.Timer(2, transaction._own.cut)
            stack.callback(cutter.cancel)
            cutter.start()
