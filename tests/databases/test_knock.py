"""The fresh connection that proves that a PostgreSQL server is not shutting down."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tenure.base import clock
from tenure.databases.postgres.connect import PostgresConnector, parse_url
from tenure.databases.postgres.knock import Knock
from tests.support.hosts import FrozenHost
from tests.support.store_by_hand import execute

ONE = "select 1"


def test_server_that_accepts_the_connection_answers_and_the_connection_ends(postgres_url):
    parameters = parse_url(postgres_url) | {"application_name": "tenure knock that ends"}
    assert Knock.dialler(parameters)().ask(ONE, 20) == "1"
    gone = "select count(*) from pg_stat_activity where application_name = 'tenure knock that ends'"
    until = clock.now() + 20
    while execute(postgres_url, gone) != [(0,)]:
        assert clock.now() < until


def test_user_that_the_server_does_not_know_is_no_proof(postgres_url):
    assert Knock.dialler(parse_url(postgres_url) | {"user": "nobody_of_that_name"})().ask(ONE, 20) is None


def test_question_that_fails_is_no_proof(postgres_url):
    assert Knock.dialler(parse_url(postgres_url))().ask("select 1 / 0", 20) is None


@pytest.fixture
def silence() -> Iterator[dict[str, Any]]:
    """The parameters of a host that accepts connections and never answers."""
    with contextlib.closing(FrozenHost()) as host:
        yield {"hostaddr": "127.0.0.1", "port": host.port, "user": "u"}


def test_host_that_does_not_answer_is_no_proof_and_is_given_up_in_time(silence):
    began = clock.now()
    assert Knock.dialler(silence)().ask(ONE, 0.3) is None
    assert clock.now() - began < 20


def test_parameters_that_libpq_refuses_are_no_proof():
    assert Knock.dialler({"host": "localhost", "no_such_parameter": "secret"})() is None


def test_knock_that_hangs_is_given_up_when_the_node_ends(silence, postgres_url):
    """The connector then shuts down every socket that is waited for."""
    connector = PostgresConnector(postgres_url, "tenure", 10.0, "tests")
    hanging = Knock.dialler(silence)()
    connector._pending.add(hanging)
    timer = threading.Timer(0.2, connector.abort)
    timer.start()
    began = clock.now()
    assert hanging.ask(ONE, 60) is None
    assert clock.now() - began < 30
    timer.join()
