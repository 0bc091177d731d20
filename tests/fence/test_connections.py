"""The fence on the application's connection: every kind of connection goes through the same cases.

A kind is a row of KINDS: how to open such a connection, and how to say to it what the cases say. Drivers differ in
whether an answer is awaited, in how a transaction begins and in how it nests; the fence does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import inspect
import itertools
import os
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import aiosqlite
import asyncpg
import psycopg
import pytest
import sqlalchemy
from sqlalchemy import orm
from sqlalchemy.ext import asyncio as async_alchemy

import tenure
from tenure.errors import ConfigError, Fenced
from tenure.fence.adapter import DRIVERS, is_async
from tenure.fence.fence import fence, fence_async
from tenure.store.session import Failed
from tests.conftest import INSTALLATIONS, NO_POSTGRES, fresh_database, missing
from tests.support.mariadb import NO_MARIADB
from tests.support.store_by_hand import Desk, TermIdentity, connect, connected, execute, put_copy_in_place

BOUND_S = 30.0
FLOOR = 2**40  # the first token after the first promotion of a replica: a test with small numbers would miss much


async def settled(answer: Any) -> Any:
    return await answer if inspect.isawaitable(answer) else answer


@contextlib.asynccontextmanager
async def entered(manager: Any) -> AsyncIterator[Any]:
    """Enter a context manager of either sort."""
    if hasattr(manager, "__aenter__"):
        async with manager as thing:
            yield thing
    else:
        with manager as thing:
            yield thing


def looped(test: Callable[..., Any]) -> Callable[..., None]:
    """Run a test on its own event loop."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


# --- kinds of connections -----------------------------------------------------------------------------------


class Talk:
    """A connection and how to speak to it. This class is right for psycopg, sqlite3 and aiosqlite."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    async def begin(self) -> None:
        """Most begin by themselves, with the first statement."""

    async def run(self, sql: str) -> None:
        await settled(self.connection.execute(sql))

    async def write(self, claim: TermIdentity) -> None:
        await self.run(f"insert into ledger values ({claim.token})")

    async def fence(self, claim: TermIdentity, bound_s: float = BOUND_S) -> None:
        if is_async(self.connection):
            await fence_async(self.connection, claim, bound_s)
        else:
            fence(self.connection, claim, bound_s)

    async def commit(self) -> None:
        await settled(self.connection.commit())

    async def rollback(self) -> None:
        await settled(self.connection.rollback())

    def nested(self) -> Any:
        """A block inside the transaction that can be undone by itself."""
        return self.connection.transaction()


class AsyncpgTalk(Talk):
    async def begin(self, **options: Any) -> None:
        self.transaction = self.connection.transaction(**options)
        await self.transaction.start()

    async def commit(self) -> None:
        await self.transaction.commit()

    async def rollback(self) -> None:
        await self.transaction.rollback()


class AlchemyTalk(Talk):
    async def run(self, sql: str) -> None:
        await settled(self.connection.execute(sqlalchemy.text(sql)))

    def nested(self) -> Any:
        return self.connection.begin_nested()


Opener = Callable[[str, bool], contextlib.AbstractAsyncContextManager[Talk]]


@dataclass(frozen=True)
class Kind:
    name: str
    database: str
    open: Opener


def bare(talk: type[Talk], connect: Callable[[str, bool], Any]) -> Opener:
    """A driver's own connection."""

    @contextlib.asynccontextmanager
    async def opened(url: str, autocommit: bool) -> AsyncIterator[Talk]:
        connection = await settled(connect(url, autocommit))
        try:
            yield talk(connection)
        finally:
            await settled(connection.close())

    return opened


@contextlib.asynccontextmanager
async def pooled(url: str, autocommit: bool) -> AsyncIterator[Talk]:
    async with asyncpg.create_pool(url, min_size=1, max_size=1) as pool, pool.acquire() as connection:
        yield AsyncpgTalk(connection)


def alchemy(driver: str, of_engine: Callable[[Any], Any]) -> Opener:
    """A connection or session of SQLAlchemy over some driver."""
    make = async_alchemy.create_async_engine if "async" in of_engine.__name__ else sqlalchemy.create_engine

    @contextlib.asynccontextmanager
    async def opened(url: str, autocommit: bool) -> AsyncIterator[Talk]:
        url = f"{url.partition(':')[0]}+{driver}:{url.partition(':')[2]}"
        engine = make(url, **({"isolation_level": "AUTOCOMMIT"} if autocommit else {}))
        connection = of_engine(engine)
        try:
            if not hasattr(connection, "registry"):
                connection = await settled(connection)
            yield AlchemyTalk(connection)
        finally:
            await settled(connection.close())
            await settled(engine.dispose())

    return opened


def connection_of(engine: Any) -> Any:
    return engine.connect()


def session_of(engine: Any) -> Any:
    return orm.Session(engine)


def scoped_session_of(engine: Any) -> Any:
    return orm.scoped_session(orm.sessionmaker(engine))


def async_connection_of(engine: Any) -> Any:
    return engine.connect()


def async_session_of(engine: Any) -> Any:
    return async_alchemy.AsyncSession(engine)


def async_scoped_session_of(engine: Any) -> Any:
    return async_alchemy.async_scoped_session(async_alchemy.async_sessionmaker(engine), asyncio.current_task)


def sqlite_arguments(url: str, autocommit: bool) -> dict[str, Any]:
    return {"database": url.partition(":///")[2]} | ({"isolation_level": None} if autocommit else {})


POSTGRES_KINDS = [
    Kind("psycopg", "postgresql", bare(Talk, lambda url, auto: psycopg.connect(url, autocommit=auto))),
    Kind(
        "psycopg-async",
        "postgresql",
        bare(Talk, lambda url, auto: psycopg.AsyncConnection.connect(url, autocommit=auto)),
    ),
    Kind("asyncpg", "postgresql", bare(AsyncpgTalk, lambda url, _: asyncpg.connect(url))),
    Kind("alchemy", "postgresql", alchemy("psycopg", connection_of)),
    Kind("alchemy-session", "postgresql", alchemy("psycopg", session_of)),
    Kind("alchemy-async", "postgresql", alchemy("asyncpg", async_connection_of)),
    Kind("alchemy-async-session", "postgresql", alchemy("psycopg", async_session_of)),
]
SQLITE_KINDS = [
    Kind("sqlite3", "sqlite", bare(Talk, lambda url, auto: sqlite3.connect(**sqlite_arguments(url, auto)))),
    Kind("aiosqlite", "sqlite", bare(Talk, lambda url, auto: aiosqlite.connect(**sqlite_arguments(url, auto)))),
    Kind("alchemy-sqlite", "sqlite", alchemy("pysqlite", connection_of)),
    Kind("alchemy-sqlite-session", "sqlite", alchemy("pysqlite", session_of)),
    Kind("alchemy-aiosqlite-session", "sqlite", alchemy("aiosqlite", async_session_of)),
]
MYSQL_KINDS = [
    Kind("pymysql", "mysql", bare(Talk, lambda url, auto: connect(url, autocommit=auto))),
    Kind("alchemy-pymysql", "mysql", alchemy("pymysql", connection_of)),
    Kind("alchemy-pymysql-session", "mysql", alchemy("pymysql", session_of)),
]
LOCKING_KINDS = POSTGRES_KINDS + MYSQL_KINDS  # they lock a row; SQLite locks the file
KINDS = LOCKING_KINDS + SQLITE_KINDS
VARIANTS = [  # led to one of the kinds above by a line or two: the first cases show that
    Kind("asyncpg-pool", "postgresql", pooled),
    Kind("alchemy-scoped", "postgresql", alchemy("psycopg", scoped_session_of)),
    Kind("alchemy-async-scoped", "postgresql", alchemy("asyncpg", async_scoped_session_of)),
    Kind("alchemy-aiosqlite", "sqlite", alchemy("aiosqlite", async_connection_of)),
]
NESTING_KINDS = [kind for kind in KINDS if kind.name not in ("sqlite3", "aiosqlite", "pymysql")]  # no word for it


# --- databases that the tests share -------------------------------------------------------------------------


class Office:
    """A database with two members that hold and take roles as a test says.

    Neither renews. MariaDB ends a connection that is idle for longer than the TTL, and tests of other databases, or on
    a busy machine, may come between two uses of a member. So the TTL is an hour.
    """

    _roles = itertools.count(1)

    def __init__(self, url: str) -> None:
        self.url = url
        self.old, self.new = (Desk(url, ttl=3600, renew_every=0.2) for _ in range(2))
        execute(url, "create table ledger (token bigint)")

    def close(self) -> None:
        self.old.close()
        self.new.close()

    def lead(self, role: str | None = None) -> TermIdentity:
        """Let the old member lead a role; a new one, if none is named."""
        role = role or f"role {next(self._roles)}"
        return TermIdentity(role, self.old.acquire(role, floor=FLOOR)[role], self.old.id, file=self.old.backend.file)

    def succeed(self, claim: TermIdentity) -> TermIdentity:
        """Let the new member end the old one and take its role; the old one comes back under another id."""
        after = self.new.succeed(self.old, claim.role)
        self.old.join()
        return after

    @property
    def written(self) -> list[int]:
        return [token for (token,) in execute(self.url, "select token from ledger order by token")]


@pytest.fixture(scope="module")
def offices(
    shared_server: Any, shared_mariadb: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Office]]:
    """One office a database for all tests of this file; a role is used by one test only."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def office(database: str) -> Office:
            if database == "sqlite":
                url = f"sqlite:///{tmp_path_factory.mktemp('office')}/tenure.db"
            elif database == "mysql":
                if shared_mariadb is None:
                    missing(NO_MARIADB)
                url = stack.enter_context(fresh_database(shared_mariadb))
            elif INSTALLATIONS:
                url = stack.enter_context(fresh_database(shared_server(INSTALLATIONS[0])))
            else:
                missing(NO_POSTGRES)
            return stack.enter_context(contextlib.closing(Office(url)))

        yield office


@pytest.fixture
def office(kind: Kind, offices: Callable[[str], Office]) -> Office:
    office = offices(kind.database)
    execute(office.url, "delete from ledger")
    return office


def each(kinds: list[Kind]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("kind", kinds, ids=lambda kind: kind.name)


# --- the same cases for every kind --------------------------------------------------------------------------


@each(KINDS + VARIANTS)
@looped
async def test_latest_term_passes_and_its_write_commits(kind, office):
    claim = office.lead()
    async with kind.open(office.url, False) as talk:
        await talk.begin()
        await talk.fence(claim)
        await talk.write(claim)
        await talk.commit()
    assert office.written == [claim.token]


@each(KINDS + VARIANTS)
@looped
async def test_old_term_is_refused_and_nothing_commits_although_the_refusal_is_swallowed(kind, office):
    before = office.lead()
    after = office.succeed(before)
    async with kind.open(office.url, False) as talk:
        await talk.begin()
        await talk.write(before)
        with pytest.raises(Fenced, match=f"token {before.token} is over") as refusal:
            await talk.fence(before)
        assert not refusal.value.retryable
        if kind.database == "postgresql":
            with pytest.raises(Exception, match="current transaction is aborted"):
                await talk.write(before)
        await talk.commit()
        assert office.written == []
        await talk.begin()
        await talk.fence(after)
        await talk.write(after)
        await talk.commit()
    assert office.written == [after.token]


@each(KINDS)
@looped
async def test_autocommit_is_refused_with_a_remedy(kind, office):
    claim = office.lead()
    async with kind.open(office.url, True) as talk:
        with pytest.raises(ConfigError, match=r"begin one first, or use term\.transaction\(\)"):
            await talk.fence(claim)


@each(NESTING_KINDS)
@looped
async def test_fence_inside_a_savepoint_is_allowed_where_the_transaction_is_fenced(kind, office):
    claim = office.lead()
    async with kind.open(office.url, False) as talk:
        await talk.begin()
        await talk.fence(claim)
        async with entered(talk.nested()):
            await talk.fence(claim)
            await talk.write(claim)
        await talk.commit()
    assert office.written == [claim.token]


@each(NESTING_KINDS)
@looped
async def test_fence_inside_a_savepoint_is_refused_where_the_transaction_is_not_fenced(kind, office):
    claim = office.lead()
    async with kind.open(office.url, False) as talk:
        await talk.begin()
        await talk.run("select 1")
        with pytest.raises(ConfigError, match="in the outermost transaction, before any savepoint"):
            async with entered(talk.nested()):
                await talk.fence(claim)
        await talk.rollback()


@each(LOCKING_KINDS)
@looped
async def test_successor_waits_until_the_fenced_transaction_ends(kind, office):
    claim = office.lead()
    async with kind.open(office.url, False) as talk:
        await talk.begin()
        await talk.fence(claim)
        assert office.new.end(office.old.id)
        assert office.new.acquire(claim.role) == {}
        await talk.write(claim)
        await talk.commit()
    assert office.new.acquire(claim.role) == {claim.role: claim.token + 1}
    assert office.written == [claim.token]
    office.old.join()


@each(SQLITE_KINDS)
@looped
async def test_successor_waits_until_the_fenced_transaction_ends_on_sqlite(kind, office):
    claim = office.lead()
    async with kind.open(office.url, False) as talk:
        await talk.fence(claim)
        with pytest.raises(Failed, match="locked"):
            office.new.end(office.old.id)
        await talk.write(claim)
        await talk.commit()
    assert office.succeed(claim).token == claim.token + 1
    assert office.written == [claim.token]


@each(SQLITE_KINDS)
@looped
async def test_copy_of_the_file_in_its_place_is_refused_although_the_term_stands_in_it(kind, tmp_path):
    path = tmp_path / "tenure.db"
    with contextlib.closing(Office(f"sqlite:///{path}")) as office:
        claim = office.lead()
        put_copy_in_place(path)
        async with kind.open(office.url, False) as talk:
            await talk.begin()
            await talk.write(claim)
            with pytest.raises(Fenced, match=f"token {claim.token} is over"):
                await talk.fence(claim)
            await talk.commit()
        assert office.written == []


def test_copy_is_refused_although_the_file_itself_is_attached(tmp_path):
    """A statement that names no file uses the table of the copy, and the stale write would go to the file itself."""
    live, copy = tmp_path / "live.db", tmp_path / "copy.db"
    with contextlib.closing(Office(f"sqlite:///{live}")) as office:
        claim = office.lead()
        with contextlib.closing(sqlite3.connect(live)) as original, contextlib.closing(sqlite3.connect(copy)) as other:
            original.backup(other)
        with contextlib.closing(sqlite3.connect(copy)) as connection:
            connection.execute(f"attach '{live}' as live")
            connection.execute("begin immediate")
            with pytest.raises(Fenced, match=f"token {claim.token} is over"):
                fence(connection, claim, 30.0)
        with contextlib.closing(sqlite3.connect(tmp_path / "own.db")) as connection:
            connection.execute(f"attach '{live}' as live")
            connection.execute("begin immediate")
            fence(connection, claim, 30.0)
            connection.rollback()


@each(KINDS)
@looped
async def test_wrong_database_is_not_taken_for_a_lost_term(kind, office, tmp_path):
    empty = {"postgresql": "postgres", "mysql": "information_schema"}
    elsewhere = (
        f"sqlite:///{tmp_path}/else.db"
        if kind.database == "sqlite"
        else f"{office.url.rpartition('/')[0]}/{empty[kind.database]}"
    )
    async with kind.open(elsewhere, False) as talk:
        await talk.begin()
        with pytest.raises(ConfigError, match="does not have Tenure's tables"):
            await talk.fence(TermIdentity("r", 1, office.old.id))
        await talk.rollback()


@each(POSTGRES_KINDS)
@looped
async def test_term_that_was_succeeded_since_the_snapshot_may_be_tried_again(kind, office):
    claim = office.lead()
    async with kind.open(office.url, False) as talk:
        await talk.begin()
        await talk.run("set transaction isolation level repeatable read")
        await talk.run("select 1 from tenure.roles")
        office.succeed(claim)
        with pytest.raises(Fenced) as refusal:
            await talk.fence(claim)
        assert refusal.value.retryable
        await talk.rollback()


@each(SQLITE_KINDS)
@looped
async def test_busy_database_may_be_tried_again(kind, office):
    claim = office.lead()
    async with kind.open(office.url, False) as talk:
        with connected(office.url, isolation_level=None) as other:
            await talk.run("pragma busy_timeout = 0")
            other.execute("begin immediate")
            with pytest.raises(Fenced) as refusal:
                await talk.fence(claim)
        assert refusal.value.retryable
        await talk.fence(claim)
        await talk.rollback()


@each([kind for kind in KINDS if "async" in kind.name or kind.name == "aiosqlite"])
@looped
async def test_synchronous_fence_sends_an_asynchronous_connection_to_the_async_node(kind, office):
    async with kind.open(office.url, False) as talk:
        assert is_async(talk.connection)
        with pytest.raises(ConfigError, match=r"use an AsyncNode and `await term\.fence\(connection\)`"):
            fence(talk.connection, TermIdentity("r", 1, "m"), BOUND_S)


# --- what one kind only can get wrong -----------------------------------------------------------------------


@pytest.fixture
def postgres(offices: Callable[[str], Office]) -> Office:
    office = offices("postgresql")
    execute(office.url, "delete from ledger")
    return office


@pytest.fixture
def engine(postgres: Office) -> Iterator[sqlalchemy.Engine]:
    engine = sqlalchemy.create_engine(postgres.url.replace("postgresql:", "postgresql+psycopg:"))
    yield engine
    engine.dispose()


def test_autocommit_of_sqlalchemy_is_refused_wherever_it_was_set(postgres, engine):
    claim = postgres.lead()
    automatic = {"isolation_level": "AUTOCOMMIT"}
    with engine.execution_options(**automatic).connect() as connection, pytest.raises(ConfigError, match="autocommit"):
        fence(connection, claim, BOUND_S)
    with engine.connect().execution_options(**automatic) as connection, pytest.raises(ConfigError, match="autocommit"):
        fence(connection, claim, BOUND_S)
    with orm.Session(engine) as session:
        session.connection(execution_options=automatic)
        with pytest.raises(ConfigError, match="autocommit"):
            fence(session, claim, BOUND_S)


def test_subclass_of_a_known_connection_is_known(postgres, engine):
    class OwnSession(orm.Session):
        pass

    with OwnSession(engine) as session:
        fence(session, postgres.lead(), BOUND_S)


@pytest.mark.parametrize("begun", [False, True])
def test_pipeline_in_autocommit_mode_needs_a_transaction_too(postgres, begun):
    """In a pipeline the driver cannot tell before a sync whether a transaction was begun."""
    claim = postgres.lead()
    with connected(postgres.url, autocommit=True) as connection, connection.pipeline():
        connection.execute("begin" if begun else "select 1")
        if begun:
            fence(connection, claim, BOUND_S)
            connection.execute("commit")
        else:
            with pytest.raises(ConfigError, match="autocommit"):
                fence(connection, claim, BOUND_S)


@pytest.mark.parametrize("begun", [False, True])
@looped
async def test_async_pipeline_in_autocommit_mode_needs_a_transaction_too(postgres, begun):
    claim = postgres.lead()
    connection = await psycopg.AsyncConnection.connect(postgres.url, autocommit=True)
    async with connection, connection.pipeline():
        await connection.execute("begin" if begun else "select 1")
        if begun:
            await fence_async(connection, claim, BOUND_S)
            await connection.execute("commit")
        else:
            with pytest.raises(ConfigError, match="autocommit"):
                await fence_async(connection, claim, BOUND_S)


@looped
async def test_fence_passes_through_a_pooler_that_changes_servers_with_every_transaction(
    postgres, postgres_server, make_pgbouncer
):
    """More often than a driver needs to make a prepared statement of what it sees again and again."""
    url = make_pgbouncer(postgres_server).through(postgres.url)
    claim = postgres.lead()
    theirs = await asyncpg.connect(url, statement_cache_size=0)
    servers = set()
    with connected(url) as ours, connected(url) as other:
        for turn in range(8):
            if turn % 2:
                other.execute("select 1")  # takes the server that we had in the last turn
            fence(ours, claim, BOUND_S)
            servers |= set(ours.execute("select pg_backend_pid()").fetchall())
            async with theirs.transaction():
                await fence_async(theirs, claim, BOUND_S)
            ours.commit()
            other.commit()
            assert other.execute("show idle_in_transaction_session_timeout").fetchone() == ("0",)
            other.commit()
    await theirs.close()
    assert len(servers) > 1


@pytest.mark.parametrize("opened", [sqlalchemy.Engine.begin, lambda engine: orm.Session(engine).begin()])
def test_block_of_sqlalchemy_is_over_after_a_swallowed_refusal_on_sqlite(offices, opened):
    office = offices("sqlite")
    execute(office.url, "delete from ledger")
    before = office.lead()
    office.succeed(before)
    engine = sqlalchemy.create_engine(office.url)
    write = sqlalchemy.text(f"insert into ledger values ({before.token})")
    with opened(engine) as block:
        connection = getattr(block, "session", block)
        connection.execute(write)
        with contextlib.suppress(Fenced):
            fence(connection, before, BOUND_S)
        with pytest.raises(sqlalchemy.exc.InvalidRequestError, match="closed transaction"):
            connection.execute(write)
    engine.dispose()
    assert office.written == []


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sqlite3 has no autocommit attribute")
@pytest.mark.parametrize("autocommit", [False, True])
def test_refusal_rolls_back_in_every_transaction_mode_of_sqlite3(offices, autocommit):
    """With autocommit=True the driver's rollback() does nothing, with False a transaction is open at all times."""
    office = offices("sqlite")
    execute(office.url, "delete from ledger")
    before = office.lead()
    after = office.succeed(before)
    with connected(office.url, autocommit=autocommit) as connection:
        for claim in (before, after):
            if autocommit:
                connection.execute("begin")
            connection.execute(f"insert into ledger values ({claim.token})")
            with contextlib.suppress(Fenced):
                fence(connection, claim, BOUND_S)
            if autocommit and connection.in_transaction:
                connection.execute("commit")
            connection.commit()
    assert office.written == [after.token]


# --- what cannot be fenced ----------------------------------------------------------------------------------


@pytest.mark.parametrize("thing", [object(), None, "postgresql://localhost/app", sqlalchemy.create_engine("sqlite://")])
def test_what_is_no_connection_is_refused_by_name(thing):
    name = f"{type(thing).__module__}.{type(thing).__qualname__}"
    with pytest.raises(ConfigError, match=f"cannot fence {name}: pass a connection of psycopg"):
        fence(thing, TermIdentity("r", 1, "m"), BOUND_S)
    with pytest.raises(ConfigError, match=f"cannot fence {name}: pass a connection of psycopg"):
        asyncio.run(fence_async(thing, TermIdentity("r", 1, "m"), BOUND_S))
    assert not is_async(thing)


def test_fence_imports_no_driver_that_the_caller_has_not_imported():
    program = """
import sqlite3, sys
from tenure.fence import fence
class Term:
    role, token, member_id, namespace = "r", 1, "m", "n"
try:
    fence.fence(sqlite3.connect(":memory:"), Term, 1)
except fence.ConfigError:
    print(*{"psycopg", "asyncpg", "aiosqlite", "sqlalchemy", "asyncio"} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout == "\n"


@pytest.mark.parametrize("package", DRIVERS)
def test_every_driver_in_the_table_has_a_module_that_lists_its_connections(package):
    module = importlib.import_module(f"tenure.fence.drivers.{DRIVERS[package]}")
    assert [name for name in module.KINDS if name.startswith(f"{package}.")]


# --- the statement for other languages ----------------------------------------------------------------------

AWKWARD = [
    "it's",
    "back\\slash",
    "\\' or true) --",
    "'); select pg_sleep(9) --",
    "50 % of $1, $2, ?1, ?, :role, :token, %s, {}",
    "größer 日本 😀",
    "$$ $1$ E'",
]


@pytest.mark.parametrize("conforming", ["on", "off"])
def test_statement_for_other_languages_takes_any_name(postgres, conforming):
    namespace, schema = f"it's \\ {conforming}", "Ténure_3"
    with connected(postgres.url) as connection, Desk(postgres.url, namespace=namespace, schema=schema) as desk:
        connection.cursor_factory = psycopg.RawCursor  # $1, as other languages write it
        connection.execute(f"set standard_conforming_strings = {conforming}")
        connection.commit()
        for role in AWKWARD:
            claim = desk.lead(role)
            text = tenure.fence_sql(role, namespace=namespace, schema=schema)
            connection.execute(text, (claim.token, claim.member_id))
            with pytest.raises(psycopg.Error) as refusal:
                connection.execute(text, (claim.token - 1, claim.member_id))
            assert refusal.value.sqlstate == "TN001"
            connection.rollback()


def test_statement_for_other_languages_holds_off_a_successor_and_bounds_the_transaction(postgres):
    claim = postgres.lead()
    with connected(postgres.url) as connection:
        connection.cursor_factory = psycopg.RawCursor
        connection.execute(tenure.fence_sql(claim.role, bound=7), (claim.token, claim.member_id))
        assert connection.execute("show idle_in_transaction_session_timeout").fetchone() == ("7s",)
        assert postgres.new.end(postgres.old.id)
        assert postgres.new.acquire(claim.role) == {}
        connection.commit()
    assert postgres.new.acquire(claim.role) == {claim.role: claim.token + 1}
    postgres.old.join()


@pytest.mark.parametrize(("offset", "outcome"), [(0, "COMMIT"), (1, "ROLLBACK")])
def test_statement_for_other_languages_runs_in_psql(postgres, postgres_server, offset, outcome):
    claim = postgres.lead(f"the shell's {outcome}")
    script = f"""
        begin;
        prepare fence as {tenure.fence_sql(claim.role)};
        execute fence({claim.token - offset}, '{claim.member_id}');
        commit;
    """
    psql = [postgres_server.installation.bindir / "psql", "-X", "-d", postgres.url]
    done = subprocess.run(psql, input=script, capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout.splitlines()[-1] == outcome
    assert ("is not the latest" in done.stderr) == (outcome == "ROLLBACK")


@pytest.mark.parametrize("mode", ["", "NO_BACKSLASH_ESCAPES,ANSI_QUOTES"])
def test_statement_for_other_languages_returns_one_row_on_mariadb_or_none(offices, mode):
    office = offices("mysql")
    with connected(office.url, charset="latin1", sql_mode=mode) as connection:
        for role in AWKWARD:
            claim = office.lead(role)
            connection.execute(f"prepare fence from {connection.escape(tenure.fence_sql(role, database='mysql'))}")
            for offset in (0, 1):
                connection.execute(f"set @token = {claim.token - offset}, @member = '{claim.member_id}'")
                assert len(connection.execute("execute fence using @token, @member").fetchall()) == 1 - offset
            assert office.new.end(office.old.id)
            assert office.new.acquire(role) == {}, "held off until the transaction ends"
            connection.rollback()
            office.old.join()


def test_statements_for_other_languages_know_mariadb_by_both_of_its_names():
    assert tenure.fence_sql("r", database="mariadb") == tenure.fence_sql("r", database="mysql")
    assert tenure.tables_sql("mariadb") == tenure.tables_sql("mysql")
    assert tenure.guard_sql("t", "r", database="mariadb") == tenure.guard_sql("t", "r", database="mysql")


def test_statement_for_other_languages_changes_one_row_on_sqlite_or_none(offices):
    office = offices("sqlite")
    with connected(office.url) as connection:
        for role in AWKWARD:
            claim = office.lead(role)
            text = tenure.fence_sql(role, database="sqlite")
            assert connection.execute(text, {"1": claim.token, "2": claim.member_id}).rowcount == 1
            assert connection.in_transaction
            assert connection.execute(text, {"1": claim.token - 1, "2": claim.member_id}).rowcount == 0
            connection.rollback()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"role": ""}, "role='' is 0 bytes"),
        ({"role": "a\0b"}, "control characters"),
        ({"role": "r", "namespace": "\ud800"}, "lone surrogates"),
        ({"role": "r", "schema": 'a"; drop'}, "must be an identifier"),
        ({"role": "r", "bound": float("nan")}, "bound=nan must be a finite number"),
        (
            {"role": "r", "database": "oracle"},
            "database='oracle' must be one of 'postgresql', 'sqlite', 'mysql', 'mariadb'",
        ),
    ],
)
def test_statement_for_other_languages_is_not_made_from_bad_input(arguments, message):
    with pytest.raises(ConfigError, match=message):
        tenure.fence_sql(**arguments)
