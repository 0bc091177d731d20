"""Connections of living nodes cut by the server, at any moment: by an administrator, a time-out, a crash nearby.

A strict leader does not care. In instant mode the cut frees the sentinel of a leader that lives: it hears of it from
its socket, and stops believing, before its successor can have its proof. If it hears later than that (a machine
under load), both read True for a moment; docs/guarantees.md names this one case, and here it is measured.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Iterator

import psycopg
import pytest

from tenure.databases.postgres.connect import PostgresConnector
from tenure.store.session import Gone, Step
from tests.support import history
from tests.support.cluster import Cluster
from tests.support.servers import PostgresServer

TTL_S = 10.0
CUT = "select pg_terminate_backend(pid) from pg_stat_activity where application_name = %s"


@contextlib.contextmanager
def relayed(server: PostgresServer, held: threading.Event | None = None) -> Iterator[str]:
    """A URL to the server that passes everything on except the end of a connection. Good for one connection.

    While `held` is set, the server's bytes are collected, and then passed on in one piece.
    """

    def pass_on(source: socket.socket, target: socket.socket, held: threading.Event | None) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                while held is not None and held.is_set():
                    source.settimeout(0.05)
                    with contextlib.suppress(TimeoutError):
                        data += source.recv(65536)
                source.settimeout(None)
                target.sendall(data)

    def serve() -> None:
        client = open_sockets.enter_context(listener.accept()[0])
        upstream = open_sockets.enter_context(socket.create_connection((server.listen, server.port)))
        for source, target, held_back in ((client, upstream, None), (upstream, client, held)):
            threading.Thread(target=pass_on, args=(source, target, held_back), daemon=True).start()

    with contextlib.ExitStack() as open_sockets:
        listener = open_sockets.enter_context(socket.create_server(("127.0.0.1", 0)))
        serving = threading.Thread(target=serve, daemon=True)
        serving.start()
        yield f"postgresql://postgres@127.0.0.1:{listener.getsockname()[1]}/postgres"
        serving.join()


@pytest.mark.parametrize("call", ["read", "run", "idle"])
def test_the_servers_good_bye_is_heard_before_the_connection_ends(postgres_server, call):
    """Between the two the sentinel falls. Here the connection's end never comes."""
    one, slow = Step("select 1", {}), Step("select pg_catalog.pg_sleep(5)", {})
    waker, wakee = socket.socketpair()
    with relayed(postgres_server) as url, waker, wakee:
        session = PostgresConnector(url, "tenure", TTL_S, "test").open("control", TTL_S)
        calls = {
            "read": lambda: session.read(one, slow, one),
            "run": lambda: session.run(one, slow, one),
            "idle": lambda: session.idle(wakee, None),
        }
        end = threading.Timer(0.2, postgres_server.execute, ["select pg_terminate_backend(%s)", [session.pid]])
        end.start()
        with pytest.raises(Gone):
            calls[call]()
        end.join()
        session.close()


def test_the_servers_good_bye_is_heard_that_arrives_together_with_an_answer(postgres_server):
    """Nothing arrives after it: the connection's end never comes."""
    waker, wakee = socket.socketpair()
    held = threading.Event()
    with relayed(postgres_server, held) as url, waker, wakee:
        session = PostgresConnector(url, "tenure", TTL_S, "test").open("control", TTL_S)
        held.set()
        terminate = f"select pg_terminate_backend({session.pid}, 5000)"
        ends = [threading.Timer(0.2, postgres_server.execute, [terminate]), threading.Timer(1.0, held.clear)]
        for end in ends:
            end.start()
        session.read(Step("select 1", {}))
        asked_again = threading.Event()
        late = threading.Timer(5, lambda: (asked_again.set(), waker.send(b"!")))
        late.start()
        with pytest.raises(Gone):
            session.idle(wakee, None)
        late.cancel()
        assert not asked_again.is_set()
        for end in ends:
            end.join()
        session.close()


class Cutter:
    """Ends one of the nodes' connections after the other, at random moments."""

    def __init__(self, server: PostgresServer, cluster: Cluster) -> None:
        self.cluster = cluster
        self.seed = random.randrange(2**32)
        self.chance = random.Random(self.seed)
        self.connection: psycopg.Connection[tuple[object, ...]] = server.connect()

    def cut(self, name: str, purpose: str) -> bool:
        """End a connection of the node's; False if it has none of this kind at the moment."""
        time.sleep(self.chance.uniform(0, 0.03))  # a moment that nobody chose
        self.cluster.fault(f"cut {purpose}", name)
        return bool(self.connection.execute(CUT, [f"tenure {purpose} default/{name}"]).fetchall())


@pytest.mark.long
def test_cut_connections_leave_one_leader(postgres_server, postgres_url, tmp_path):
    """Within what instant mode promises; the figure is printed."""
    with Cluster(postgres_url, tmp_path, ttl=TTL_S, sample_every_s=0.0003, strictly=False) as cluster:
        cluster.make_ledger()
        for node in cluster.start(3):
            node.tell("writes")
        leader, token = cluster.wait_for_leader()
        cutter = Cutter(postgres_server, cluster)
        cuts = 0
        with cutter.connection:
            while cuts < 200:
                victim, purpose = leader, "control"
                if cutter.chance.random() < 0.5:
                    victim = cutter.chance.choice(cluster.nodes)
                    purpose = cutter.chance.choice(["control", "watch"])
                if not cutter.cut(victim.name, purpose):
                    continue
                cuts += 1
                if victim is leader and purpose == "control":
                    leader, token = cluster.wait_for_leader(token)
        spans = history.overlap_spans(cluster.history)
        lengths_ms = sorted((span.until - span.since) / 1e6 for span in spans)
        print(
            f"seed {cutter.seed}: {cuts} cuts, {token} terms, {len(spans)} overlaps,"
            f" {sum(lengths_ms):.2f} ms in total, the longest {max(lengths_ms, default=0):.2f} ms"
        )
        assert max(lengths_ms, default=0) < TTL_S * 1000
        assert len(spans) < cuts / 10


@pytest.mark.long
def test_a_strict_leader_goes_on_whatever_is_cut(postgres_server, postgres_url, tmp_path):
    with Cluster(postgres_url, tmp_path, ttl=TTL_S, takeover="strict") as cluster:
        cluster.make_ledger()
        for node in cluster.start(3):
            node.tell("writes")
        leader, token = cluster.wait_for_leader()
        cutter = Cutter(postgres_server, cluster)
        cuts = 0
        with cutter.connection:
            while cuts < 40:
                victim = leader if cutter.chance.random() < 0.5 else cutter.chance.choice(cluster.nodes)
                cuts += cutter.cut(victim.name, cutter.chance.choice(["control", "watch"]))
        assert leader.tell("status")["leader"]
        leader.tell("write")
        assert {belief.token for belief in cluster.history.beliefs()} == {token}
