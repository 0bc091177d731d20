"""A run of a job is claimed under the fence, once, in the application's transaction."""

from __future__ import annotations

import subprocess
import sys
import threading
from datetime import datetime, timedelta, timezone

import aiosqlite
import anyio
import asyncpg
import psycopg
import pytest
import sqlalchemy
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

import tenure
from tenure import ConfigError, Fenced
from tenure.fence import job_runs
from tenure.internals import holding_of
from tests.support.marks import sync_only
from tests.support.store_by_hand import Desk, connected, execute, table

NOON = datetime(2024, 5, 1, 12, tzinfo=timezone.utc)
MINUTE = timedelta(minutes=1)
BOUND_S = 30.0


def claim(url, term, job, due):
    """Claim in the application's transaction, and commit."""
    with connected(url) as connection:
        won = job_runs.perform(connection, term, BOUND_S, job_runs.claim(term, job, due))
        connection.commit()
        return won


def rows(url):
    return execute(url, f"select role, job, claimed_us, done_us, token from {table(url, 'jobs')} order by role, job")


def microseconds(moment):
    return round(moment.timestamp() * 1_000_000)


# --- once, and in order -------------------------------------------------------------------------------------


def test_run_is_claimed_once(store_url):
    with tenure.Node(store_url) as node, node.lead("r") as term:
        for won in (True, False):
            with term.transaction() as transaction:
                assert transaction.claim("report", NOON) is won
        holding = holding_of(term)
        assert claim(store_url, holding, "report", NOON) is False
        assert claim(store_url, holding, "report", NOON + MINUTE) is True
        assert claim(store_url, holding, "another", NOON) is True


def test_earlier_run_is_refused_when_a_later_one_is_claimed(store_url):
    with Desk(store_url) as desk:
        term = desk.lead("r")
        assert claim(store_url, term, "report", NOON)
        assert not claim(store_url, term, "report", NOON - MINUTE)
        assert not claim(store_url, term, "report", NOON - timedelta(microseconds=1))
        assert claim(store_url, term, "report", NOON + timedelta(microseconds=1))


def test_moment_is_the_same_in_every_time_zone(store_url):
    with Desk(store_url) as desk:
        term = desk.lead("r")
        assert claim(store_url, term, "report", NOON)
        assert not claim(store_url, term, "report", NOON.astimezone(timezone(timedelta(hours=-7))))


def test_next_term_sees_the_claims_of_the_one_before(store_url):
    with Desk(store_url) as old, Desk(store_url) as new:
        assert claim(store_url, old.lead("r"), "report", NOON)
        term = new.succeed(old, "r")
        assert not claim(store_url, term, "report", NOON)
        assert claim(store_url, term, "report", NOON + MINUTE)
        assert rows(store_url) == [("r", "report", microseconds(NOON + MINUTE), None, term.token)]


def test_stale_terms_claim_is_refused_and_leaves_nothing(store_url):
    with Desk(store_url) as old, Desk(store_url) as new:
        stale = old.lead("r")
        term = new.succeed(old, "r")
        with pytest.raises(Fenced):
            claim(store_url, stale, "report", NOON)
        assert rows(store_url) == []
        assert claim(store_url, term, "report", NOON)


def test_claim_that_is_rolled_back_is_no_claim(store_url):
    with tenure.Node(store_url) as node, node.lead("r") as term:
        with pytest.raises(ZeroDivisionError), term.transaction() as transaction:
            assert transaction.claim("report", NOON) / 0
        assert rows(store_url) == []
        assert claim(store_url, holding_of(term), "report", NOON)


def test_roles_and_namespaces_have_jobs_of_their_own(store_url):
    with Desk(store_url) as desk, Desk(store_url, namespace="other") as other:
        for term in (desk.lead("r"), desk.lead("s"), other.lead("r")):
            assert claim(store_url, term, "report", NOON)


def test_two_transactions_of_one_term_wait_for_each_other(store_url):
    """Also where the job is new and has no row yet; on SQLite at the fence, which holds the whole file."""
    with Desk(store_url) as desk:
        term = desk.lead("r")
        for due in (NOON, NOON + MINUTE):
            won, began = [], threading.Event()

            def second(due=due, won=won, began=began):
                began.set()
                won.append(claim(store_url, term, "report", due))

            with connected(store_url) as connection:
                assert job_runs.perform(connection, term, BOUND_S, job_runs.claim(term, "report", due))
                thread = threading.Thread(target=second)
                thread.start()
                began.wait()
                thread.join(0.3)
                assert won == []
                connection.commit()
            thread.join()
            assert won == [False]


RACER = """
import sys
from datetime import datetime
from tests.support.store_by_hand import TermIdentity
from tests.fence.test_claims import claim
url, role, token, member_id, due = sys.argv[1:]
term = TermIdentity(role, int(token), member_id)
print("ready", flush=True)
for line in sys.stdin:
    print(claim(url, term, line.strip(), datetime.fromisoformat(due)), flush=True)
"""


@pytest.mark.long
def test_of_processes_that_race_for_a_run_exactly_one_gets_it(store_url):
    with Desk(store_url) as desk:
        term = desk.lead("r")
        command = [sys.executable, "-c", RACER, store_url, "r", str(term.token), desk.id, NOON.isoformat()]
        racers = [subprocess.Popen(command, stdin=-1, stdout=-1, text=True, bufsize=1) for _ in range(3)]
        try:
            assert [racer.stdout.readline() for racer in racers] == ["ready\n"] * 3
            for number in range(10):
                for racer in racers:
                    racer.stdin.write(f"job-{number % 5}-{number // 5}\n")
                won = sorted(racer.stdout.readline() for racer in racers)
                assert won == ["False\n", "False\n", "True\n"]
        finally:
            for racer in racers:
                racer.communicate(timeout=30)


# --- done, anchors, records ---------------------------------------------------------------------------------


def test_run_is_marked_as_done_once(store_url):
    with tenure.Node(store_url) as node, node.lead("r") as term:
        with term.transaction() as transaction:
            assert transaction.claim("report", NOON)
            assert transaction.finish("report", NOON)
        with term.transaction() as transaction:
            assert not transaction.finish("report", NOON)
            assert not transaction.finish("report", NOON - MINUTE)
            assert transaction.finish("report", NOON + MINUTE)
        (record,) = node.election("r").jobs()
        assert (record.claimed, record.done) == (NOON, NOON + MINUTE)


def test_anchor_is_set_where_there_is_none(store_url):
    with Desk(store_url) as desk, connected(store_url) as connection:
        term = desk.lead("r")
        for at in (NOON, NOON + MINUTE):
            assert job_runs.perform(connection, term, BOUND_S, job_runs.anchor(term, "report", at)) == NOON
            connection.commit()


def test_records_are_read_by_the_election_and_by_the_registry(store_url):
    with tenure.Node(store_url) as node, node.lead("r") as term:
        with term.transaction() as transaction:
            assert transaction.anchor("b", NOON - MINUTE) == NOON - MINUTE
            transaction.claim("b", NOON)
            transaction.finish("a", NOON)
        expected = [
            tenure.JobRecord("a", None, None, NOON, term.token, "r"),
            tenure.JobRecord("b", NOON - MINUTE, NOON, None, term.token, "r"),
        ]
        with term.transaction() as transaction:
            assert transaction.jobs() == expected
        assert node.election("r").jobs() == expected
        with tenure.Registry(store_url) as registry:
            assert registry.jobs("r") == expected
            assert registry.jobs("nothing") == []


def test_job_that_is_forgotten_can_be_claimed_anew(store_url):
    with tenure.Node(store_url) as node, node.lead("r") as term:
        with term.transaction() as transaction:
            assert transaction.claim("report", NOON)
            assert transaction.forget("report")
            assert not transaction.forget("report")
            assert transaction.claim("report", NOON)
            transaction.claim("other", NOON)
        assert [record.job for record in node.election("r").jobs()] == ["other", "report"]


def test_forgotten_namespace_has_no_jobs(store_url):
    with tenure.Node(store_url) as node, node.lead("r") as term, term.transaction() as transaction:
        transaction.claim("report", NOON)
    with tenure.Registry(store_url) as registry:
        registry.forget()
    assert rows(store_url) == []


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])
def test_name_of_a_job_may_hold_anything_in_a_database_of_any_encoding(postgres_server, encoding):
    job = "täglich: 100 % of :x, 'quoted' \\ {all}"
    name = f"claims_{encoding.lower()}"
    postgres_server.execute(
        f"create database {name} encoding '{encoding}' template template0 lc_ctype 'C' lc_collate 'C'"
    )
    try:
        with tenure.Node(postgres_server.url(name)) as node, node.lead("rôle", timeout=20) as term:
            with term.transaction() as transaction:
                assert transaction.claim(job, NOON)
                assert transaction.anchor(job, NOON) == NOON
            assert [record.job for record in node.election("rôle").jobs()] == [job]
    finally:
        postgres_server.drop_database(name)


# --- connections of every kind ------------------------------------------------------------------------------


def sqlalchemy_url(url, asynchronous=False):
    scheme, _, rest = url.partition("://")
    drivers = {"sqlite": ("pysqlite", "aiosqlite"), "postgresql": ("psycopg", "asyncpg"), "mysql": ("pymysql", None)}
    return f"{scheme}+{drivers[scheme][asynchronous]}://{rest}"


@pytest.mark.parametrize("kind", [sqlalchemy.Connection, Session])
def test_sqlalchemys_connections_can_claim(store_url, kind):
    engine = sqlalchemy.create_engine(sqlalchemy_url(store_url))
    with Desk(store_url) as desk:
        term = desk.lead("r")
        for ask, answer in (
            (job_runs.claim(term, "report", NOON), True),
            (job_runs.claim(term, "report", NOON), False),
            (job_runs.anchor(term, "report", NOON), NOON),
            (job_runs.finish(term, "report", NOON), True),
            (job_runs.forget(term, "report"), True),
        ):
            with engine.connect() if kind is sqlalchemy.Connection else Session(engine) as connection:
                assert job_runs.perform(connection, term, BOUND_S, ask) == answer
                connection.commit()
    engine.dispose()


def test_claim_does_not_depend_on_the_callers_rows_and_pipelines(postgres_url):
    with Desk(postgres_url) as desk, connected(postgres_url, row_factory=psycopg.rows.dict_row) as connection:
        term = desk.lead("r")
        with connection.pipeline():
            assert job_runs.perform(connection, term, BOUND_S, job_runs.claim(term, "report", NOON))
            assert not job_runs.perform(connection, term, BOUND_S, job_runs.claim(term, "report", NOON))
            assert job_runs.perform(connection, term, BOUND_S, job_runs.anchor(term, "report", NOON)) == NOON


async def asyncpg_connection(url):
    connection = await asyncpg.connect(url)
    await connection.execute("begin")
    return connection


async def psycopg_connection(url):
    return await psycopg.AsyncConnection.connect(url)


async def aiosqlite_connection(url):
    return await aiosqlite.connect(url.partition(":///")[2])


async def async_session(url):
    return AsyncSession(create_async_engine(sqlalchemy_url(url, asynchronous=True)))


@pytest.mark.parametrize(
    ("store", "connect"),
    [
        ("postgres_url", asyncpg_connection),
        ("postgres_url", psycopg_connection),
        ("postgres_url", async_session),
        ("sqlite_url", aiosqlite_connection),
        ("sqlite_url", async_session),
    ],
)
def test_async_connections_can_claim(store, connect, request):
    url = request.getfixturevalue(store)

    async def main():
        async with tenure.AsyncNode(url) as node, node.lead("r") as term:
            connection = await connect(url)
            assert await term.claim(connection, "report", NOON)
            assert not await term.claim(connection, "report", NOON)
            assert await term.finish(connection, "report", NOON)
            anchor = job_runs.anchor(holding_of(term), "report", NOON)
            assert await job_runs.perform_async(connection, holding_of(term), BOUND_S, anchor) == NOON
            await (connection.execute("commit") if connect is asyncpg_connection else connection.commit())
            await connection.close()
            if connect is async_session:
                await connection.bind.dispose()
            (record,) = await node.election("r").jobs()
            assert (record.claimed, record.done, record.anchor) == (NOON, NOON, NOON)

    anyio.run(main)


def test_async_term_claims_in_its_own_transactions_and_on_plain_connections(store_url):
    async def main():
        async with tenure.AsyncNode(store_url) as node, node.lead("r") as term:
            async with term.transaction() as transaction:
                assert await transaction.claim("report", NOON)
                assert await transaction.finish("report", NOON)
                assert await transaction.anchor("report", NOON) == NOON
                assert await transaction.jobs() == [tenure.JobRecord("report", NOON, NOON, NOON, term.token, "r")]
            with connected(store_url) as connection:
                assert not await term.claim(connection, "report", NOON)
                assert await term.finish(connection, "report", NOON + MINUTE)
                connection.commit()
            async with term.transaction() as transaction:
                assert await transaction.forget("report")

    anyio.run(main)


# --- what cannot work ---------------------------------------------------------------------------------------


@sync_only
def test_claims_that_cannot_be_are_refused_with_a_remedy(sqlite_url):
    with tenure.Node(sqlite_url) as node, node.lead("r") as term, connected(sqlite_url) as connection:
        for due, complaint in (
            (datetime(2024, 5, 1, 12), r"due=.* has no time zone, .* as in datetime\.now\(timezone\.utc\)"),  # noqa: DTZ001
            (NOON.timestamp(), "must be a datetime with a time zone"),
            (datetime.min.replace(tzinfo=timezone(timedelta(hours=14))), "not within the years 1 to 9999 in UTC"),
        ):
            for ask in (term.claim, term.finish):
                with pytest.raises(ConfigError, match=complaint):
                    ask(connection, "report", due)
        with pytest.raises(ConfigError, match="job='' is 0 bytes"):
            term.claim(connection, "", NOON)
        with pytest.raises(ConfigError, match=r"cannot fence builtins\.object"):
            term.claim(object(), "report", NOON)
    assert rows(sqlite_url) == []


@sync_only
def test_claim_needs_a_transaction(postgres_url):
    with (
        tenure.Node(postgres_url) as node,
        node.lead("r") as term,
        connected(postgres_url, autocommit=True) as connection,
        pytest.raises(ConfigError, match="begin one"),
    ):
        term.claim(connection, "report", NOON)


def test_mode_lock_has_nothing_to_claim_under(postgres_url):
    with tenure.Node(postgres_url, mode="lock") as node, node.lead("r") as term:
        with connected(postgres_url) as connection, pytest.raises(ConfigError, match="'lock' has no fencing token"):
            term.claim(connection, "report", NOON)
        with pytest.raises(ConfigError, match="mode='lock' keeps no record"):
            node.election("r").jobs()
