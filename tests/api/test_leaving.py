"""Leaving while the connection is being opened again: the others are told, and nothing hangs."""

from __future__ import annotations

import threading

import pytest

import tenure
from tenure.databases.postgres.backend import PostgresBackend
from tests.support.store_by_hand import Nodes, execute, until

FAR_BELOW_THE_TTL_S = 10
LONG_TTL = 60


class Gate:
    """Keeps nodes from opening their control connections until it is opened."""

    def __init__(self, monkeypatch):
        self._open = threading.Event()
        self._open.set()
        self.knocked = threading.Event()
        open_control = PostgresBackend.open_control

        def open_when_permitted(backend, *arguments):
            if not self._open.is_set():
                self.knocked.set()
                raise tenure.StoreUnavailable("not yet")
            return open_control(backend, *arguments)

        monkeypatch.setattr(PostgresBackend, "open_control", open_when_permitted)

    def close(self):
        self._open.clear()

    def open(self):
        self._open.set()


def closing(node):
    thread = threading.Thread(target=node.close)
    thread.start()
    return thread


@pytest.mark.parametrize("mode", ["cut", "restart"])
def test_leaving_while_the_connection_is_opened_again_tells_the_others(make_postgres_server, monkeypatch, mode):
    """A strict leader's cut proves nothing to the others, and neither does a restart: they would wait for the TTL."""
    server = make_postgres_server(fsync=False)
    url = server.create_database()
    with Nodes(url, ttl=LONG_TTL, takeover="strict" if mode == "cut" else "instant") as nodes:
        leader = nodes("leader")
        term = leader.election("r").wait(20)
        stands = nodes("standby").election("r")
        until(lambda: len(leader.election("r").candidates()) == 2, "both standing")
        gate = Gate(monkeypatch)
        if mode == "cut":
            ((pid,),) = execute(url, "select control_pid from tenure.members where name = 'leader'")
            gate.close()
            execute(url, f"select pg_terminate_backend({pid})")
        else:
            gate.close()
            server.restart()
        assert gate.knocked.wait(20)
        leaving = closing(leader)
        assert term.wait_lost(20)
        gate.open()
        leaving.join()
        assert stands.wait(FAR_BELOW_THE_TTL_S).token == term.token + 1
        ((reason,),) = execute(url, "select end_reason from tenure.members where name = 'leader'")
        assert reason == "left"


def test_leaving_does_not_hang_where_the_database_is_gone(make_postgres_server):
    server = make_postgres_server(fsync=False)
    node = tenure.Node(server.create_database(), name="leader", ttl=LONG_TTL).start()
    node.election("r").wait(20)
    server.stop("immediate")
    leaving = closing(node)
    leaving.join(20)
    assert not leaving.is_alive()
