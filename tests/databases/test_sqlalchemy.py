"""An application's own engine: where it leads is taken over, its pool is left alone; and Alembic beside our tables."""

from __future__ import annotations

import asyncio
import logging
import re
import sqlite3
import ssl
import sys
import types
from pathlib import Path

import alembic.command
import alembic.config
import alembic.util
import pytest
import sqlalchemy as sa
from sqlalchemy.ext import asyncio as sa_asyncio

import tenure
from tenure.databases import handover
from tenure.databases.handover import target_of
from tenure.databases.mysql import connect
from tenure.databases.postgres.connect import parse_url
from tests.support.secrets import CANARY, assert_untold
from tests.support.store_by_hand import execute

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "sqlalchemy.md"
ROLE = "scheduler"


def spelled(url, driver):
    return f"{driver}:{url.partition(':')[2]}"


@pytest.mark.parametrize(
    ("store", "driver"),
    [
        ("sqlite", "sqlite"),
        ("postgres", "postgresql+psycopg"),
        ("postgres", "postgresql+psycopg2"),
        ("mariadb", "mysql+pymysql"),
    ],
)
def test_a_node_leads_where_the_engine_leads_and_leaves_its_pool_alone(store, driver, request):
    url = request.getfixturevalue(f"{store}_url")
    engine = sa.create_engine(spelled(url, driver))
    checkouts = []
    for event in ("connect", "checkout"):
        sa.event.listen(engine, event, lambda *_, event=event: checkouts.append(event))
    with tenure.Node.from_engine(engine, name="mine", ttl=20) as node:
        assert node.ttl == 20
        with node.lead(ROLE) as term:
            assert checkouts == []
            with engine.begin() as connection:
                term.fence(connection)
        with tenure.Node(url) as other:
            assert other.election(ROLE).history()[0].name == "mine"
    engine.dispose()


@pytest.mark.parametrize(("store", "driver"), [("sqlite", "sqlite+aiosqlite"), ("postgres", "postgresql+asyncpg")])
def test_an_async_node_leads_where_the_async_engine_leads(store, driver, request):
    url = request.getfixturevalue(f"{store}_url")

    async def main():
        engine = sa_asyncio.create_async_engine(spelled(url, driver))
        node = tenure.AsyncNode.from_engine(engine)
        async with node, node.lead(ROLE) as term, engine.begin() as connection:
            await term.fence(connection)
        await engine.dispose()

    asyncio.run(main())


@pytest.mark.parametrize(("driver", "database"), [("psycopg", "dbname"), ("asyncpg", "database")])
def test_connect_args_count_and_not_only_the_url(driver, database, postgres_url):
    there = parse_url(postgres_url)
    place = {"host": there["host"], "port": there["port"], "user": there["user"], database: there["dbname"]}
    make = {"psycopg": sa.create_engine, "asyncpg": sa_asyncio.create_async_engine}[driver]
    engine = make(f"postgresql+{driver}://nobody@nowhere.invalid/nothing", connect_args=place)
    with tenure.Node.from_engine(engine) as node:
        node.election(ROLE).wait(30)


def test_what_the_drivers_are_told_is_translated():
    def way(url, **arguments):
        make = sa_asyncio.create_async_engine if "asyncpg" in url else sa.create_engine
        way = target_of(make(url, **arguments))
        assert CANARY not in way.url
        return parse_url(way.url), way.password

    secret = sa.URL.create("postgresql+psycopg", "me", CANARY, "db", 5433, "app", {"sslmode": "require"})
    here = {"user": "me", "host": "db", "port": "5433", "dbname": "app"}
    assert way(secret.render_as_string(hide_password=False)) == ({**here, "sslmode": "require"}, CANARY)
    asyncpg = secret.set(drivername="postgresql+asyncpg", query={"ssl": "verify-full"}).render_as_string(False)
    arguments = {"timeout": 3, "server_settings": {"search_path": "a b"}, "statement_cache_size": 0}
    told = {"sslmode": "verify-full", "connect_timeout": "3", "options": "-c search_path=a\\ b"}
    assert way(asyncpg, connect_args=arguments) == ({**here, **told}, CANARY)
    several = "postgresql+psycopg2://me@/app?host=a:1&host=b:2&target_session_attrs=read-write"
    told = {"user": "me", "dbname": "app", "host": "a,b", "port": "1,2", "target_session_attrs": "read-write"}
    assert way(several) == (told, None)
    mysql = sa.create_engine(
        f"mysql+pymysql://a%40b:{CANARY}@db:3307/app?charset=utf8mb4", connect_args={"ssl": {"ca": "/ca.pem"}}
    )
    assert target_of(mysql).url == "mysql://a%40b@db:3307/app?ssl_ca=%2Fca.pem"
    assert target_of(mysql).password == CANARY


def test_a_listener_that_gives_the_password_is_asked_for_each_connection(postgres_url):
    engine = sa.create_engine(spelled(postgres_url, "postgresql+psycopg"))
    asked = []

    @sa.event.listens_for(engine, "do_connect")
    def token(dialect, record, arguments, parameters):
        asked.append(parameters)
        parameters["password"] = f"token-{len(asked)}"

    with tenure.Node.from_engine(engine) as node:
        node.election(ROLE).wait(30)
    assert len(asked) >= 3  # when it was made, and for each of its two connections
    assert engine.pool.checkedout() == engine.pool.checkedin() == 0


def another_database():
    return sa.create_engine("mssql+pymssql://me@db/app", module=types.SimpleNamespace(paramstyle="pyformat"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sa.create_engine("sqlite://"), "in memory or a file: URI"),
        (lambda: sa.create_engine("sqlite:///:memory:"), "in memory or a file: URI"),
        (lambda: sa.create_engine("sqlite:///file:app.db?mode=ro&uri=true"), "file: URI"),
        (lambda: sa.create_engine("sqlite://", creator=lambda: sqlite3.connect("x.db")), "creator="),
        (another_database, r"cannot use an engine of mssql\+pymssql"),
        (lambda: sa.create_engine("postgresql+psycopg://db/app", connect_args={"service_x": 1}), "'service_x'"),
        (lambda: sa.create_engine("mysql+pymysql://db/app", connect_args={"passwd": CANARY}), "'passwd'"),
        (lambda: sa.create_engine("mysql+pymysql://db/app", connect_args={"ssl": {"cipher": "x"}}), "about TLS"),
        (lambda: sa.create_engine("mysql+pymysql://db/app", connect_args={"host": 5}), "of a type that cannot"),
        (
            lambda: sa_asyncio.create_async_engine(
                f"postgresql+asyncpg://me:{CANARY}@db/app", connect_args={"ssl": ssl.create_default_context()}
            ),
            "SSLContext",
        ),
        (lambda: "sqlite:///app.db", "not str"),
    ],
)
def test_what_cannot_be_taken_over_is_named(make, message, caplog):
    caplog.set_level(logging.DEBUG)
    with pytest.raises(tenure.ConfigError, match=message) as caught:
        tenure.Node.from_engine(make())
    assert_untold(caught.value, records=caplog.records)


def test_a_listener_that_connects_by_itself_is_refused(sqlite_url):
    engine = sa.create_engine(sqlite_url)
    sa.event.listen(engine, "do_connect", lambda *_: object())
    with pytest.raises(tenure.ConfigError, match="do_connect"):
        tenure.Node.from_engine(engine)


def test_an_argument_that_a_listener_adds_is_not_left_out():
    """It could lead elsewhere."""
    engine = sa.create_engine("postgresql+psycopg2://db/app")
    sa.event.listen(engine, "do_connect", lambda _, __, arguments, ___: arguments.append(f"host=x password={CANARY}"))
    with pytest.raises(tenure.ConfigError, match="a positional argument") as caught:
        tenure.Node.from_engine(engine)
    assert_untold(caught.value)
    assert target_of(sa.create_engine("postgresql+psycopg2://")).url == "postgresql:///?"


def test_url_and_password_come_from_the_engine(sqlite_url):
    with pytest.raises(tenure.ConfigError, match="leave them out"):
        tenure.Node.from_engine(sa.create_engine(sqlite_url), url=sqlite_url)


def test_the_password_of_an_engine_shows_nowhere(postgres_server, caplog):
    caplog.set_level(logging.DEBUG)
    secret = spelled(postgres_server.create_database(), "postgresql+psycopg").replace("@", f":{CANARY}@", 1)
    engine = sa.create_engine(sa.make_url(secret).set(port=1))
    node = tenure.Node.from_engine(engine)
    with pytest.raises(tenure.StoreUnavailable) as caught:
        node.start()
    assert_untold(caught.value, records=caplog.records, things=[node, target_of(engine)])


def test_an_engine_that_leads_to_a_standby_is_refused(replica):
    engine = sa.create_engine(spelled(replica.url(), "postgresql+psycopg"))
    with pytest.raises(tenure.StoreUnavailable, match="hot standby"):
        tenure.Node.from_engine(engine).start()


def test_another_schema_is_the_nodes_and_the_fences(postgres_url):
    engine = sa.create_engine(spelled(postgres_url, "postgresql+psycopg"))
    with tenure.Node.from_engine(engine, schema="elections") as node, node.lead(ROLE) as term:
        with engine.begin() as connection:
            term.fence(connection)
        with term.transaction() as transaction:
            transaction.execute("select 1")
        with tenure.Registry(postgres_url, schema="elections") as registry:
            assert [info.role for info in registry.roles()] == [ROLE]
            assert registry.history(ROLE)[0].token == term.token
    engine.dispose()
    assert execute(postgres_url, "select count(*) from pg_namespace where nspname = 'tenure'") == [(0,)]


def test_what_mariadb_is_told_is_no_weaker_for_the_node():
    def parameters(**connect_args):
        url = target_of(sa.create_engine("mysql+pymysql://u@h/db", connect_args=connect_args)).url
        return connect.parse_url(url)

    for given in ({"ssl": {"ca": "ca.pem"}}, {"ssl_ca": "ca.pem"}):
        told = parameters(**given)
        assert (told["ssl_ca"], told["ssl_verify_cert"], told["ssl_verify_identity"]) == ("ca.pem", True, True)
    told = parameters(ssl={"ca": "ca.pem", "check_hostname": False})
    assert (told["ssl_verify_cert"], told["ssl_verify_identity"]) == (True, False)
    assert "unix_socket" not in parameters(unix_socket=None, ssl_ca=None)


def test_no_other_option_makes_a_mode_of_mysqlclient_weaker():
    options = {"database": "db", "ssl": {"ca": "ca.pem", "check_hostname": False}, "ssl_verify_cert": False}
    source = handover.Source("these", "", "")
    told = connect.parse_url(handover.mysql_url(source, options | {"ssl_mode": "VERIFY_IDENTITY"}))
    assert (told["ssl_verify_cert"], told["ssl_verify_identity"]) == (True, True)


def test_password_that_is_a_function_is_called_beside_a_listener():
    engine = sa.create_engine("postgresql+psycopg://u@h/db", connect_args={"password": lambda: "secret"})
    sa.event.listen(engine, "do_connect", lambda *_: None)
    assert target_of(engine).password() == "secret"


# --- Alembic ------------------------------------------------------------------------------------------------


def test_the_migration_and_the_filter_of_the_page_work(one_url, tmp_path, monkeypatch):
    """Exactly what the page says: upgrade, autogenerate with a model of one's own, a node on the tables, downgrade."""
    driver = {"sqlite": "sqlite", "postgresql": "postgresql+psycopg", "mysql": "mysql+pymysql"}
    files = dict(re.findall(r"^```py\n# (migrations/\S+)\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE))
    assert sorted(files) == ["migrations/env.py", "migrations/versions/0001_tenure.py"]
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    models = types.ModuleType("models")
    models.metadata = sa.MetaData()
    sa.Table("invoices", models.metadata, sa.Column("number", sa.Integer, primary_key=True))
    monkeypatch.setitem(sys.modules, "models", models)
    config = alembic.config.Config()
    config.set_main_option("script_location", str(tmp_path / "migrations"))
    config.set_main_option("sqlalchemy.url", spelled(one_url, driver[one_url.partition(":")[0]]))

    alembic.command.upgrade(config, "head")
    if one_url.startswith("postgresql"):  # MariaDB has other databases on the server, which look the same to Alembic
        execute(one_url, "create schema others", "create table others.precious (id integer)")
    with tenure.Node(one_url) as node, node.lead(ROLE):
        with pytest.raises(alembic.util.AutogenerateDiffsDetected) as caught:
            alembic.command.check(config)
        ((operation, table),) = caught.value.diffs  # the application's model, and none of our tables
        assert (operation, table.name) == ("add_table", "invoices")
    alembic.command.downgrade(config, "base")
    with pytest.raises(tenure.ConfigError, match="no tables"), tenure.Registry(one_url):
        pass


def test_the_statements_of_the_tables_can_go_through_sqlalchemys_text():
    """A colon before a word would be taken for a parameter."""
    for database in ("postgresql", "sqlite", "mysql"):
        for statement in tenure.tables_sql(database):
            assert not sa.text(statement).compile().params
    with pytest.raises(tenure.ConfigError, match="database='oracle'"):
        tenure.tables_sql("oracle")
