"""A URL with several hosts, one of which is dead: only the first connection may pay for it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from tenure.databases.postgres.connect import PostgresConnector
from tests.support.cluster import LEDGER, Cluster
from tests.support.store_by_hand import execute


class FrozenHost:
    """A host that accepts connections and says nothing, as a server that is stopped does. It counts them."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.dialled = 0
        self._kept: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._kept.append(self._listener.accept()[0])
                self.dialled += 1

    def close(self) -> None:
        self._listener.close()
        for one in self._kept:
            one.close()


@pytest.fixture
def frozen_host() -> Iterator[FrozenHost]:
    with contextlib.closing(FrozenHost()) as host:
        yield host


def with_first_host(url: str, port: int) -> str:
    """The URL with one more host in front."""
    server, _, database = url.partition("@")[2].partition("/")
    return f"postgresql://postgres@127.0.0.1:{port},{server}/{database}?target_session_attrs=read-write"


def test_host_that_answered_last_is_dialled_first(postgres_url, frozen_host):
    url = with_first_host(postgres_url, frozen_host.port)
    connector = PostgresConnector(url, "tenure", 10.0, "tests")
    with contextlib.closing(connector.open("tests", 10.0)) as session:
        assert frozen_host.dialled == 1
        for _ in range(3):
            connector.connect("tests").close()
        assert connector.knocker(session)() == session.server_start
    assert frozen_host.dialled == 1


def test_knock_goes_to_the_server_of_the_session_and_to_no_other(postgres_url, frozen_host):
    connector = PostgresConnector(with_first_host(postgres_url, frozen_host.port), "tenure", 10.0, "tests")
    with contextlib.closing(connector.open("tests", 10.0)) as session:
        knock = connector.knocker(session)
        connector._answered = 0  # as if the first host had been the last to answer
        assert knock() == session.server_start
    assert frozen_host.dialled == 1


def test_every_host_is_dialled_again_when_the_last_one_is_gone(make_postgres_server):
    first, second = make_postgres_server(fsync=False), make_postgres_server(fsync=False)
    name = first.create_database().rpartition("/")[2]
    second.create_database()
    url = f"postgresql://postgres@127.0.0.1:{first.port},127.0.0.1:{second.port}/{name}"
    connector = PostgresConnector(url, "tenure", 10.0, "tests")
    answered = []

    def dial() -> None:
        with connector.connect("tests") as connection:
            answered.append(connection.info.port)

    dial()
    first.stop()
    dial()
    first.start()
    dial()  # the one that answered last still does
    second.stop()
    dial()
    assert answered == [first.port, second.port, second.port, first.port]


def test_nodes_lead_write_and_fail_over_beside_a_dead_host(postgres_url, frozen_host, tmp_path):
    url = with_first_host(postgres_url, frozen_host.port)
    execute(postgres_url, LEDGER["postgresql"])  # psycopg itself would wait for the dead host
    with Cluster(url, tmp_path, ttl=30) as cluster:
        cluster.start(2)
        leader, token = cluster.wait_for_leader()
        leader.tell("write")
        before = frozen_host.dialled
        leader.kill()
        successor, _ = cluster.wait_for_leader(above=token)
        successor.tell("write")
        assert frozen_host.dialled == before
