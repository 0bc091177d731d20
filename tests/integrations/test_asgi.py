"""FastAPI and Starlette: the lifespan, the term of a request, the guard, and what load balancers ask."""

from __future__ import annotations

import contextlib
import itertools
import signal
import subprocess
import sys
import threading
import time

import psycopg
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.websockets import WebSocketDisconnect

import tenure
from tenure.integrations.asgi import LeaderOnly, health, tenure_lifespan, term_of
from tests.integrations.cluster import TABLE, Replicas
from tests.integrations.web import TestClient, WebSocketDenialResponse, free_port, replica, uvicorn
from tests.support.store_by_hand import until

ROLE = "scheduler"
LOOPS = ("asyncio", "trio")


@pytest.fixture
def runs_url(postgres_url):
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(TABLE)
    return postgres_url


def history(url):
    with tenure.Registry(url) as registry:
        return registry.history(ROLE)


# --- the lifespan -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("facade", ["AsyncNode", "Node"])
def test_one_line_starts_the_node_with_the_server_and_hands_over_before_it_ends(facade, runs_url, tmp_path):
    with replica(runs_url, tmp_path, 0, NODE_CLASS=facade) as server:
        answer = server.wait_for("/tenure/leader").json()
        assert answer == {"role": ROLE, "node": "replica-0", "is_leader": True, "token": 1, "leader": "replica-0"}
        assert server.ask("/jobs", "POST").json()["token"] == 1
        assert server.end() in (0, -signal.SIGTERM)
    [term] = history(runs_url)
    assert term.reason in ("resigned", "left")


def test_a_database_that_cannot_be_reached_keeps_the_server_from_starting(tmp_path):
    nowhere = f"postgresql://nobody@127.0.0.1:{free_port()}/nothing"
    with replica(nowhere, tmp_path, 0) as server:
        assert server.running.wait() not in (0, None)
        assert "StoreUnavailable" in server.running.output()


def test_a_node_that_waits_for_the_database_lets_the_server_serve(make_postgres_server, tmp_path):
    postgres = make_postgres_server()
    url = postgres.create_database()
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(TABLE)
    postgres.stop()
    with replica(url, tmp_path, 0, START="wait") as server, replica(url, tmp_path, 1, START="wait") as other:
        server.wait_for("/")
        assert server.ask("/tenure/healthz").status_code == 200
        assert server.ask("/tenure/readyz").status_code == 503
        assert server.ask("/tenure/leader").status_code == 503
        other.wait_for("/")
        assert other.end() in (0, -signal.SIGTERM), "it ends although its node still waits"
        postgres.start()
        server.wait_for("/tenure/leader")
        assert server.ask("/tenure/readyz").status_code == 200


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("kind", [tenure.AsyncNode, tenure.Node])
def test_a_lifespan_of_the_users_own_is_around_that_of_the_node(kind, loop, sqlite_url):
    """What it opens is there for the services, and closed after them."""
    seen = []
    node = kind(sqlite_url)
    node.leader_only(ROLE, Recorder(seen))

    @contextlib.asynccontextmanager
    async def lifespan(app):
        seen.append("opened")
        yield {"answer": 42}
        seen.append("closed")

    async def state(request):
        return JSONResponse({"answer": request.state.answer})

    app = Starlette(routes=[Route("/", state)], lifespan=tenure_lifespan(node, lifespan))
    with TestClient(app, backend=loop) as client:
        until(lambda: seen == ["opened", "started"])
        assert client.get("/").json() == {"answer": 42}
    assert seen == ["opened", "started", "stopped", "closed"]


class Recorder:
    """A service that says what becomes of it."""

    def __init__(self, seen):
        self.seen = seen

    def start(self):
        self.seen.append("started")

    def stop(self):
        self.seen.append("stopped")


def test_a_leader_that_lingers_stays_until_another_is_here_to_stay(sqlite_url):
    node = tenure.AsyncNode(sqlite_url, name="old")
    node.leader_only(ROLE, Recorder([]))
    served = threading.Event()
    over = threading.Event()

    def serve():
        with TestClient(Starlette(lifespan=tenure_lifespan(node, linger=60))):
            served.set()
            until(lambda: node.stats().roles and node.stats().roles[0].is_leader)
        over.set()

    thread = threading.Thread(target=serve)
    thread.start()
    served.wait()
    time.sleep(1)
    assert not over.is_set(), "there is no other candidate"
    with tenure.Node(sqlite_url, name="new") as other:
        assert other.election(ROLE).wait(30).token == 2
        thread.join(30)
        assert over.is_set()


# --- requests that only the leader answers ------------------------------------------------------------------


def test_a_follower_answers_503_with_the_name_of_the_leader_and_serves_the_rest(runs_url, tmp_path):
    with replica(runs_url, tmp_path, 0) as leader:
        leader.wait_for("/tenure/leader")
        with replica(runs_url, tmp_path, 1) as follower:
            follower.wait_for("/tenure/readyz")
            until(lambda: follower.ask("/tenure/leader").json()["leader"] == "replica-0")
            for answer in (follower.ask("/jobs", "POST"), follower.ask("/guarded/")):
                assert answer.status_code == 503
                assert answer.headers["retry-after"] == "1"
                assert answer.headers["content-type"] == "application/json"
                told = answer.json()["detail"]
                assert (told["role"], told["node"], told["leader"]) == (ROLE, "replica-1", "replica-0")
            answer = follower.ask("/tenure/leader")
            assert answer.status_code == 503
            told = {"role": ROLE, "node": "replica-1", "is_leader": False, "token": None, "leader": "replica-0"}
            assert answer.json() == told
            assert follower.ask("/").status_code == follower.ask("/tenure/healthz").status_code == 200
            assert leader.ask("/jobs", "POST").json() == {"token": 1, "kind": "AsyncTerm"}
            assert leader.ask("/guarded/").status_code == 200


@contextlib.contextmanager
def elsewhere_led(url):
    """Another node leads."""
    with tenure.Node(url, name="elsewhere") as node:
        node.election(ROLE).wait(20)
        yield node.election(ROLE)


async def fine(request):
    return JSONResponse({})


async def socket(websocket):
    await websocket.accept()
    await websocket.send_json({})
    await websocket.close()


@pytest.mark.parametrize("loop", LOOPS)
def test_the_guard_guards_routes_mounts_and_websockets(loop, sqlite_url):
    node = tenure.AsyncNode(sqlite_url, name="here")
    guard = [Middleware(LeaderOnly, node=node, role=ROLE)]
    routes = [
        *(Route("/open", fine), Route("/guarded", fine, middleware=guard)),
        Mount("/all", routes=[Route("/of-it", fine), WebSocketRoute("/socket", socket)], middleware=guard),
    ]
    app = Starlette(routes=routes, lifespan=tenure_lifespan(node))
    with elsewhere_led(sqlite_url) as other, TestClient(app, backend=loop) as client:
        assert client.get("/open").status_code == 200
        until(lambda: len(other.candidates()) == 2, "standing, without a request that asked for it")
        until(lambda: client.get("/guarded").json()["detail"]["leader"] == "elsewhere")
        assert client.get("/guarded").status_code == client.get("/all/of-it").status_code == 503
        with pytest.raises(WebSocketDenialResponse) as refused, client.websocket_connect("/all/socket"):
            pass
        assert refused.value.status_code == 503
        assert refused.value.json()["detail"]["leader"] == "elsewhere"
        other.resign()
        until(lambda: client.get("/guarded").status_code == 200)
        assert client.get("/all/of-it").status_code == 200
        with client.websocket_connect("/all/socket") as websocket:
            assert websocket.receive_json() == {}


def test_a_websocket_is_closed_where_the_server_cannot_refuse_it_with_an_answer(sqlite_url):
    node = tenure.AsyncNode(sqlite_url)
    app = LeaderOnly(Starlette(routes=[WebSocketRoute("/", socket)]), node, ROLE)

    async def without_extension(scope, receive, send):
        scope = {name: value for name, value in scope.items() if name != "extensions"}
        await app(scope, receive, send)

    with pytest.raises(WebSocketDisconnect) as refused, TestClient(without_extension).websocket_connect("/"):
        pass
    assert refused.value.code == 1013


# --- what load balancers and orchestrators ask --------------------------------------------------------------


def test_load_balancer_finds_the_new_leader_after_a_kill_and_never_two(runs_url, tmp_path):
    """Polled as fast as it goes, all three at once; and in the order of the moments of reading no token goes back."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(replica(runs_url, tmp_path, number)) for number in range(3)]
        for server in servers:
            server.wait_for("/tenure/readyz")
        over = threading.Event()
        reads = []

        def poll(server):
            while not over.is_set():
                answer = server.try_ask("/instant")
                if answer is not None and answer.json()["token"] is not None:
                    reads.append(answer.json())

        pollers = [threading.Thread(target=poll, args=(server,)) for server in servers]
        for thread in pollers:
            thread.start()
        try:
            for _ in range(2):
                [leader] = until(lambda: leading(servers), "one 200")
                token = leader.ask("/tenure/leader").json()["token"]
                leader.running.process.kill()
                leader.running.wait()
                [after] = until(lambda leader=leader: leading(server for server in servers if server is not leader))
                assert after.ask("/tenure/leader").json()["token"] == token + 1
                leader.running.start()
                leader.wait_for("/tenure/readyz")
                assert leading(servers) == [after]
        finally:
            over.set()
            for thread in pollers:
                thread.join()
    reads.sort(key=lambda read: read["from"])
    assert {read["token"] for read in reads} == {1, 2, 3}
    assert not [pair for pair in itertools.pairwise(reads) if pair[0]["token"] > pair[1]["token"]]


def leading(servers):
    """Which of them answer 200."""
    answers = [(server, server.try_ask("/tenure/leader")) for server in servers]
    return [server for server, answer in answers if answer is not None and answer.status_code == 200]


def test_health_answers_at_once_and_tells_nothing_while_the_database_is_gone(make_postgres_server, tmp_path):
    postgres = make_postgres_server()
    url = postgres.create_database().replace("@", ":canary@", 1)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(TABLE)
    with replica(url, tmp_path, 0, ttl=2) as server:
        before = server.wait_for("/tenure/leader")
        postgres.stop()
        answers = [before, server.wait_for("/tenure/readyz", 503)]
        for _ in range(20):
            began = time.monotonic()
            answers += [server.ask(path) for path in ("/tenure/healthz", "/tenure/leader", "/guarded/")]
            assert time.monotonic() - began < 5
        assert [answer.status_code for answer in answers[-3:]] == [200, 503, 503]
        assert answers[-2].json()["leader"] is None, "it led itself, and knows of no leader since"
        assert "the lease was last renewed" in server.ask("/tenure/readyz").json()["problems"][0]
        assert server.ask("/").status_code == 200
        assert not [answer.text for answer in answers if "canary" in answer.text or "postgres" in answer.text]
        postgres.start()
        server.wait_for("/tenure/readyz")
        server.wait_for("/tenure/leader")


def test_asking_for_a_role_does_not_make_the_node_stand_for_it(sqlite_url):
    node = tenure.AsyncNode(sqlite_url)
    app = Starlette(routes=[Mount("/", health(node, "one", "two"))], lifespan=tenure_lifespan(node))
    with TestClient(app) as client:
        until(lambda: client.get("/leader?role=two").status_code == 200)
        assert client.get("/leader?role=strange").status_code == 404
        which = client.get("/leader")
        assert which.status_code == 400
        assert which.json()["roles"] == ["one", "two"]
        assert client.head("/leader?role=two").status_code == 200
        assert client.get("/leader?role=two").headers["cache-control"] == "no-store"
        with tenure.Registry(sqlite_url) as registry:
            assert [info.role for info in registry.roles()] == ["one", "two"]


def test_a_replica_is_ready_when_the_services_that_belong_everywhere_run(sqlite_url):
    node = tenure.AsyncNode(sqlite_url)
    ready = threading.Event()

    class Slow:
        def start(self):
            ready.wait()

        def stop(self): ...

    node.everywhere(Slow(), name="cache")
    app = Starlette(routes=[Mount("/", health(node))], lifespan=tenure_lifespan(node))
    assert TestClient(app).get("/readyz").status_code == 503, "not started"
    assert TestClient(app).get("/healthz").status_code == 200
    with TestClient(app) as client:
        until(lambda: client.get("/readyz").json()["problems"] == ["service cache: starting"])
        assert client.get("/healthz").status_code == 200
        ready.set()
        until(lambda: client.get("/readyz").status_code == 200)
        assert client.get("/leader").status_code == 400, "there is no role"
    assert TestClient(app).get("/healthz").json()["problems"] == ["the node was closed"]
    assert TestClient(app).get("/readyz").status_code == 503


def test_a_service_that_will_not_stop_is_a_reason_to_restart_the_process(sqlite_url):
    node = tenure.Node(sqlite_url, ttl=2)
    let_go = threading.Event()

    def stubborn(term):
        let_go.wait()

    node.leader_only(ROLE, stubborn, drain_within=0.2)
    app = Starlette(routes=[Mount("/", health(node))], lifespan=tenure_lifespan(node))
    with TestClient(app) as client:
        until(lambda: client.get("/leader").status_code == 200)
        assert client.get("/healthz").status_code == 200
        node.election(ROLE).resign()
        until(lambda: client.get("/healthz").json()["problems"] == ["service stubborn does not stop"])
        let_go.set()
        until(lambda: client.get("/healthz").status_code == 200)


# --- and the rest -------------------------------------------------------------------------------------------


def test_a_missing_extra_says_how_to_install_it():
    program = """
import sys
sys.modules["starlette"] = None
import tenure
try:
    import tenure.integrations.asgi
except tenure.ConfigError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "pip install 'tenure[asgi]'" in done.stdout


def test_values_that_make_no_sense_are_refused():
    with pytest.raises(tenure.ConfigError, match=r"must be a tenure\.AsyncNode or a tenure\.Node, not str"):
        health("sqlite:///x.db", ROLE)
    with pytest.raises(tenure.ConfigError, match="role"):
        health(tenure.AsyncNode("sqlite:///x.db"), "")
    with pytest.raises(tenure.ConfigError, match="linger=-1 must be"):
        tenure_lifespan(tenure.Node("sqlite:///x.db"), linger=-1)


@pytest.mark.timeout(300)
def test_four_replicas_under_uvicorn_run_every_due_second_at_most_once(postgres_url, tmp_path, record_property):
    ports = [free_port() for _ in range(4)]
    command = lambda number: uvicorn("tests.integrations.fastapi_app:app", ports[number])  # noqa: E731
    with Replicas(postgres_url, tmp_path, command, role=ROLE) as replicas:
        runs = replicas.torment(record_property)
        assert runs.duplicates == []
        assert runs.stale == []


def test_a_role_can_need_a_lock_that_a_program_has_by_hand(postgres_url):
    node = tenure.AsyncNode(postgres_url)
    app = Starlette(lifespan=tenure_lifespan(node), routes=[Mount("/tenure", health(node, ROLE))])
    guarded = LeaderOnly(app, node, ROLE, lock_id=42)
    with pytest.raises(tenure.ConfigError, match="already has lock_id=42 here: give that, not 43"):
        term_of(node, ROLE, lock_id=43)
    with psycopg.connect(postgres_url, autocommit=True) as by_hand:
        by_hand.execute("select pg_advisory_lock(42)")
        with TestClient(guarded) as client:
            assert client.get("/tenure/leader").status_code == 503
            by_hand.execute("select pg_advisory_unlock(42)")
            until(lambda: client.get("/tenure/leader").status_code == 200, "leads with the lock")
            assert by_hand.execute("select pg_try_advisory_lock(42)").fetchone() == (False,)
