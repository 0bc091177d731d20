"""The async facade, on asyncio and trio: transactions and fences, and what a task that is cancelled leaves open."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sqlite3
import threading

import anyio
import anyio.to_thread
import asyncpg
import psycopg
import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from tenure import ConfigError, Fenced, NotCommitted
from tenure.aio.bridge import run_in_thread
from tenure.node import Node
from tests.api.loops import eventually, looped, native, node, raises
from tests.support.store_by_hand import execute

pytestmark = pytest.mark.usefixtures("_no_thread_is_left", "_nothing_is_left_to_the_garbage_collector")


# --- transactions -------------------------------------------------------------------------------------------


@looped
async def test_transaction_commits_or_rolls_back_and_an_old_term_is_refused(one_url):
    execute(one_url, "create table ledger (token bigint)")
    insert = f"insert into ledger values ({'?' if one_url.startswith('sqlite') else '%s'})"
    async with node(one_url) as leader:
        async with leader.lead("r") as term:
            async with term.transaction() as transaction:
                await transaction.execute(insert, (term.token,))
                assert (await transaction.execute("select count(*) from ledger")).fetchone() == (1,)
            async with raises(ZeroDivisionError), term.transaction() as transaction:
                await transaction.execute(insert, (term.token,))
                1 / 0  # noqa: B018
            async with raises(NotCommitted, match="ended inside its block"), term.transaction() as transaction:
                await transaction.execute("commit")
                await transaction.execute("select 1")
        async with raises(Fenced), term.transaction():
            pytest.fail("fenced")
    assert execute(one_url, "select * from ledger") == [(1,)]


ENDLESS = {
    "sqlite": "with recursive n(i) as (select 1 union all select i + 1 from n limit 200000000) select count(*) from n",
    "postgresql": "select pg_sleep(60)",
}


async def write_endlessly(url, term, begun):
    async with term.transaction() as transaction:
        await transaction.execute("insert into ledger values (1)")
        begun.set()
        await transaction.execute(ENDLESS[url.partition(":")[0]])


async def assert_nothing_is_written_or_locked(url, term):
    assert execute(url, "select * from ledger") == []
    if url.startswith("postgres"):
        execute(url, "select * from tenure.roles for update nowait")
    async with term.transaction() as transaction:
        await transaction.execute("insert into ledger values (2)")
    assert execute(url, "select * from ledger") == [(2,)]


@pytest.mark.parametrize("after_s", [0, 0.1])
@looped
async def test_cancellation_cuts_a_statement_short_and_nothing_commits(one_url, after_s):
    execute(one_url, "create table ledger (token bigint)")
    async with node(one_url, ttl=30) as leader, leader.lead("r") as term:
        begun = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(write_endlessly, one_url, term, begun)
            await begun.wait()
            await anyio.sleep(after_s)
            tasks.cancel_scope.cancel()
        await assert_nothing_is_written_or_locked(one_url, term)


@native
async def test_asyncios_own_cancellation_cuts_a_statement_short_and_nothing_commits(one_url):
    execute(one_url, "create table ledger (token bigint)")
    async with node(one_url, ttl=30) as leader, leader.lead("r") as term:
        begun = anyio.Event()
        task = asyncio.create_task(write_endlessly(one_url, term, begun))
        await begun.wait()
        for _ in range(3):
            await asyncio.sleep(0.03)
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await assert_nothing_is_written_or_locked(one_url, term)


@native
async def test_statement_is_cut_short_although_its_server_does_not_hear(postgres_url, postgres_server):
    execute(postgres_url, "create table ledger (token bigint)")
    async with node(postgres_url, ttl=30) as leader, leader.lead("r") as term:
        begun = anyio.Event()
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(write_endlessly, postgres_url, term, begun)
                await begun.wait()
                os.kill(postgres_server.pid, signal.SIGSTOP)  # who takes requests to cancel
                tasks.cancel_scope.cancel()
        finally:
            os.kill(postgres_server.pid, signal.SIGCONT)
        assert execute(postgres_url, "select * from ledger") == []


@looped
async def test_transactions_that_wait_for_each_other_do_not_run_out_of_threads(sqlite_url):
    """Each writer on SQLite waits for the one before it: who holds the file must be able to commit."""
    execute(sqlite_url, "create table ledger (n integer)")
    async with node(sqlite_url, ttl=10) as leader, leader.lead("r") as term:

        async def write(number):
            async with term.transaction() as transaction:
                await transaction.execute("insert into ledger values (?)", (number,))

        async with anyio.create_task_group() as tasks:
            for number in range(16):
                tasks.start_soon(write, number)
        await term.ensure()
    assert sorted(execute(sqlite_url, "select n from ledger")) == [(number,) for number in range(16)]


@native
async def test_call_that_must_end_is_waited_for_whoever_cancels():
    """A commit that was sent, a connection that is being opened: asyncio's own cancel() knows no shield."""
    go, ended = threading.Event(), threading.Event()

    def call():
        go.wait(20)
        ended.set()

    task = asyncio.create_task(run_in_thread(call))
    for _ in range(3):
        await asyncio.sleep(0.01)
        task.cancel()
    assert not task.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


OPEN_TRANSACTIONS = "select count(*) from pg_stat_activity where application_name ~ '^tenure transaction'"


@native
async def test_transaction_that_was_opened_for_a_cancelled_task_is_closed(postgres_url):
    async with node(postgres_url) as leader, leader.lead("r") as term:

        async def write():
            async with term.transaction():
                await anyio.sleep_forever()

        for _ in range(3):
            task = asyncio.create_task(write())
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await eventually(lambda: execute(postgres_url, OPEN_TRANSACTIONS) == [(0,)])


# --- fences -------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def psycopg_connection(url):
    async with await psycopg.AsyncConnection.connect(url) as connection:
        yield connection


@contextlib.asynccontextmanager
async def asyncpg_connection(url):
    connection = await asyncpg.connect(url)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(connection.close)
        await stack.enter_async_context(connection.transaction())
        yield connection


@contextlib.asynccontextmanager
async def sqlalchemy_connection(url):
    engine = create_async_engine(url.replace("postgresql:", "postgresql+asyncpg:"))
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(engine.dispose)
        yield await stack.enter_async_context(engine.begin())


@native
async def test_fence_is_awaited_on_connections_of_async_drivers(postgres_url):
    async with node(postgres_url) as leader:
        async with leader.lead("r") as term:
            for connect in (psycopg_connection, asyncpg_connection, sqlalchemy_connection):
                async with connect(postgres_url) as connection:
                    await term.fence(connection)
            async with sqlalchemy_connection(postgres_url) as connection:
                await connection.run_sync(term.fence)
        for connect in (psycopg_connection, asyncpg_connection, sqlalchemy_connection):
            async with raises(Fenced), connect(postgres_url) as connection:
                await term.fence(connection)
        async with raises(Fenced), sqlalchemy_connection(postgres_url) as connection:
            await connection.run_sync(term.fence)


@looped
async def test_fence_of_a_connection_that_is_not_async_holds_before_it_is_awaited(sqlite_url):
    async with node(sqlite_url) as leader, leader.lead("r") as term:
        with contextlib.closing(sqlite3.connect(sqlite_url.partition(":///")[2])) as connection:
            fenced = term.fence(connection)
            assert connection.in_transaction
            await fenced
            connection.rollback()
        with pytest.raises(ConfigError, match=r"cannot fence builtins\.object"):
            term.fence(object())


@native
async def test_sync_term_refuses_an_async_connection_with_a_remedy(postgres_url):
    def lead():
        with Node(postgres_url) as leader:
            return leader.election("r").wait(20)

    term = await anyio.to_thread.run_sync(lead)
    async with psycopg_connection(postgres_url) as connection:
        with pytest.raises(ConfigError, match=r"use an AsyncNode and `await term\.fence\(connection\)`"):
            term.fence(connection)
