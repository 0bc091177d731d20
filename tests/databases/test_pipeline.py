"""Statements that are sent together to PostgreSQL: what one of them does to the others, and to the connection."""

from __future__ import annotations

import contextlib
import enum
import os
import signal
import threading
from datetime import datetime, timedelta, timezone

import pytest

from tenure.base import clock
from tenure.databases.postgres.connect import PostgresConnector
from tenure.databases.postgres.pipeline import MOST_PREPARED
from tenure.store.session import Failed, Gone, Step
from tests.support.store_by_hand import execute

ANSWER = Step("select cast(:number as integer) + 1", {"number": 41})
PREPARED = Step("select count(*) from pg_catalog.pg_prepared_statements", {})
FAILS = Step("select 1 / cast(:number as integer)", {"number": 0})


def read_twice(session):
    """Read a result that is an error, and read it again, although the answer is not there a second time."""
    with session.transaction() as run:
        (result,) = run(FAILS)
        with contextlib.suppress(Exception):
            result.rows.count(0)
        result.rows.count(0)


@contextlib.contextmanager
def later(seconds, action):
    timer = threading.Timer(seconds, action)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def end(session, postgres_url):
    execute(postgres_url, f"select pg_terminate_backend({session.pid}, 5000)")


@pytest.fixture
def session(postgres_url):
    with contextlib.closing(PostgresConnector(postgres_url, "tenure", 30.0, "tests").open("tests", 10.0)) as session:
        yield session


def test_values_arrive_as_they_were_sent(session):
    noon = datetime(2026, 6, 1, 12, 30, 0, 123456, tzinfo=timezone(timedelta(hours=5, minutes=30)))
    given = {"text": "a'b%(c)s\\ £ \n", "number": 2**62, "fraction": 0.1, "nothing": None, "time": noon}
    step = Step(
        "select cast(:text as text), cast(:number as bigint), cast(:fraction as double precision),"
        " cast(:nothing as text), cast(:time as timestamptz), cast(:number as bigint)",
        given,
    )
    assert session.read(step)[0].rows == [(*given.values(), 2**62)]


class Color(str, enum.Enum):
    RED = "red"


class Number(enum.IntEnum):
    SEVEN = 7


def test_member_of_an_enum_is_sent_as_its_value(session):
    """An application may keep the names of its roles in one."""
    step = Step("select cast(:text as text), cast(:number as bigint)", {"text": Color.RED, "number": Number.SEVEN})
    assert session.read(step)[0].rows == [("red", 7)]


@pytest.mark.parametrize("value", [1e16, -1e-300, float("inf"), float("-inf"), 0.1 + 0.2, -0.0])
def test_fraction_arrives_as_it_was_sent(session, value):
    assert session.read(Step("select cast(:value as double precision)", {"value": value}))[0].rows == [(value,)]


@pytest.mark.parametrize("value", [-(2**63), 2**63 - 1, -1, 0])
def test_number_arrives_as_it_was_sent(session, value):
    assert session.read(Step("select cast(:value as bigint)", {"value": value}))[0].rows == [(value,)]


@pytest.mark.parametrize(("value", "error"), [("a\0b", Failed), (["a"], TypeError), ("\udc80", UnicodeEncodeError)])
def test_value_that_cannot_be_sent_is_refused_and_the_connection_stays(session, value, error):
    """libpq would cut a text at its NUL."""
    with pytest.raises(error):
        session.run(ANSWER, Step("select cast(:value as text)", {"value": value}))
    assert session.read(ANSWER)[0].rows == [(42,)]


def test_statement_after_one_that_failed_is_skipped(session, postgres_url):
    execute(postgres_url, "create table work (n integer)")
    write = Step("insert into public.work values (:n)", {"n": 1})
    with pytest.raises(Failed, match="division by zero"):
        session.run(write, FAILS, write)
    with session.transaction() as run:
        (result,) = run(ANSWER)
        assert result.rows == [(42,)]
    with pytest.raises(Failed, match="division by zero"):
        read_twice(session)
    assert execute(postgres_url, "select * from work") == []
    session.run(write)
    assert execute(postgres_url, "select * from work") == [(1,)]


def test_each_statement_is_prepared_once_also_after_a_failure(session):
    prepared = Step("select statement, generic_plans + custom_plans from pg_catalog.pg_prepared_statements", {})
    for _ in range(3):
        session.run(ANSWER)
        with pytest.raises(Failed):
            session.run(FAILS)
        with pytest.raises(Failed, match="no_such_table"):
            session.run(Step("select * from no_such_table", {}))
    found = dict(session.read(prepared)[0].rows)
    assert found["select cast($1 as integer) + 1"] == 3
    assert not any("no_such_table" in statement for statement in found)


def test_texts_that_differ_each_time_do_not_fill_the_server(session):
    for number in range(MOST_PREPARED + 20):
        assert session.read(Step(f"select {number}", {}))[0].rows == [(number,)]
    assert session.read(PREPARED)[0].rows == [(MOST_PREPARED,)]


def test_statements_are_prepared_again_when_their_columns_have_changed(session, postgres_url):
    """The server refuses to run what was prepared before; the connection would fail for good."""
    execute(postgres_url, "create table changing (n integer)")
    reads = [Step(f"select * from public.changing{more}", {}) for more in ("", " limit 1", " limit 2")]
    for column in range(3):
        assert session.run(*reads, ANSWER)[-1].rows == [(42,)]
        execute(postgres_url, f"alter table changing add column m{column} integer")
        with pytest.raises(Failed, match="cached plan"):
            session.run(*reads)
    assert session.run(*reads, ANSWER)[-1].rows == [(42,)]
    assert session.read(PREPARED)[0].rows[0][0] <= 10


def test_statements_are_prepared_again_after_somebody_dropped_them(session):
    session.listen("tests", "one")
    session.run(ANSWER)
    session.connection.execute("discard all")
    with pytest.raises(Failed):
        session.run(ANSWER)
    assert session.run(ANSWER)[0].rows == [(42,)]
    session.listen("tests", "two")
    assert len(session.read(Step("select pg_catalog.pg_listening_channels()", {}))[0].rows) == 1


def test_statement_that_is_never_supported_does_not_fill_the_server(session):
    unsupported = Step("do $$ begin raise feature_not_supported; end $$", {})
    for _ in range(10):
        with pytest.raises(Failed):
            session.read(unsupported)
    assert session.read(PREPARED)[0].rows[0][0] <= 2


def test_error_after_the_last_statement_is_reported_and_the_connection_stays(session, postgres_url):
    """A read is a transaction, too, which the server commits after its last statement."""
    execute(postgres_url, "create table once (n integer unique deferrable initially deferred)")
    write = Step("insert into public.once values (:n)", {"n": 1})
    for _ in range(2):
        with pytest.raises(Failed, match="once_n_key"):
            session.read(write, write)
        assert session.read(ANSWER)[0].rows == [(42,)]
    assert execute(postgres_url, "select * from once") == []


def test_server_that_ends_the_connection_before_a_read_without_statements(session, postgres_url):
    end(session, postgres_url)
    with pytest.raises(Gone, match="administrator"):
        session.read()


def test_error_of_the_block_is_raised_when_the_server_has_ended_the_connection(session, postgres_url):
    def fail():
        with session.transaction() as run:
            run(ANSWER)[0].rows.count(0)
            end(session, postgres_url)
            raise KeyError("the application's")

    with pytest.raises(KeyError, match="the application's"):
        fail()
    with pytest.raises(Gone):
        session.read(ANSWER)


def test_connection_is_closed_if_its_replies_cannot_all_be_received(session, monkeypatch):
    """What comes later would be taken for the answer to the next request."""
    with monkeypatch.context() as patch:
        patch.setattr(session._pipeline, "_receive", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            session.read(ANSWER)
    with pytest.raises(Gone):
        session.read(ANSWER)


def test_interrupted_wait_closes_the_connection(session):
    """The replies that are still to come would be taken for those of the next request."""

    main = threading.get_ident()
    with pytest.raises(KeyboardInterrupt), later(0.2, lambda: signal.pthread_kill(main, signal.SIGINT)):
        session.read(Step("select pg_catalog.pg_sleep(5)", {}))
    with pytest.raises(Gone):
        session.read(ANSWER)


def test_wait_ends_when_another_thread_closes_the_connection(session):
    began = clock.now()
    with later(0.2, session.close), pytest.raises(Gone):
        session.read(Step("select pg_catalog.pg_sleep(5)", {}))
    assert clock.now() - began < 3


@pytest.mark.timeout(20)
def test_connection_whose_socket_cannot_be_read_is_gone(session):
    """As in a forked child, where the descriptor leads nowhere: libpq does not take that for the connection's end."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, session.fileno(), inheritable=False)
    os.close(nowhere)
    for _ in range(2):
        with pytest.raises(Gone):
            session.read(ANSWER)


def test_more_than_a_socket_holds_is_sent_and_received(session):
    large = "x" * 8_000_000
    steps = [Step("select cast(:text as text)", {"text": large})] * 3
    assert [result.rows for result in session.read(*steps)] == [[(large,)]] * 3
