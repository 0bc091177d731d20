"""gunicorn and uvicorn with four workers: one of them leads, whatever is restarted."""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
from pathlib import Path

import pytest

from tenure import Registry
from tests.integrations.cluster import PATIENCE_S, ROOT, Replicas
from tests.integrations.web import Client, free_port, gunicorn, uvicorn

HOW_TO = "docs/how-to/workers.md"
APP = "tests.integrations.asgi_app:app"
UVICORN_WORKER = "uvicorn.workers.UvicornWorker"
"""The package uvicorn-worker has the same class."""
EVERY_S = 0.1

FOUR = ("--workers", "4")

SERVERS = {
    "uvicorn": lambda port: uvicorn(APP, port, *FOUR, "--timeout-worker-healthcheck", "60"),
    "gunicorn, preloaded": lambda port: gunicorn(APP, port, *FOUR, "--worker-class", "asgi", "--preload"),
    "gunicorn with uvicorn": lambda port: gunicorn(APP, port, *FOUR, "--worker-class", UVICORN_WORKER),
}


class Workers(Replicas):
    """One master with four workers, or four servers; their scheduler runs ten times a second."""

    def __init__(self, url, directory, command, *, linger=0, **settings):
        environment = {"EVERY": str(EVERY_S), "LINGER": str(linger), "TENURE_NAME": "worker"}
        super().__init__(url, directory, command, ttl=10, every=EVERY_S, environment=environment, **settings)

    def wait_for_four(self, *, without=frozenset()):
        """Wait until there are four members, none of them one of these; return their pids."""
        found = set()

        def four():
            leader, others = self.who_leads()
            found.clear()
            found.update({leader, *others} - {None})
            return len(found) == 4 and not found & without

        self.wait_until(four, "four members, all of them new")
        return found

    def kill_leader(self):
        """Kill -9 the leader; return how long it took until another worked."""
        leader = self.wait_for_leader()
        terms = len(self.hand_overs())
        os.kill(leader, signal.SIGKILL)
        deadline = time.monotonic() + PATIENCE_S
        while len(self.hand_overs()) == terms:
            assert time.monotonic() < deadline, "no worker worked after the kill"
            time.sleep(EVERY_S)
        return self.hand_overs()[-1]

    def hand_overs(self):
        """Seconds from the last run of each term to the first of the next."""
        pairs = itertools.pairwise(self.runs().rows)
        return [(one.at - two.at).total_seconds() for two, one in pairs if one.token != two.token]

    def assert_stood_by(self):
        """Assert that the leader had joined when the one before it went: the role was never without a candidate."""
        with Registry(self.url) as registry:
            present, before, *_ = registry.history(self.role)
            [leader] = [member for member in registry.members() if member.member_id == present.member_id]
        assert leader.joined < before.ended

    def check(self, plain, hand_overs, record_property):
        """No double run, and no gap longer than a plain failover in the same run."""
        runs = self.runs()
        shown = ", ".join(f"{seconds:.2f} s" for seconds in hand_overs)
        words = f"kill -9: {plain:.2f} s; hand-overs: {shown}; {runs.statement}"
        print(words)
        record_property("gaps", words)
        assert runs.duplicates == []
        assert runs.stale == []
        assert max(hand_overs, default=0) < 5 * plain + 1, words


def ready(client):
    answer = client.try_ask("/tenure/readyz")
    return answer is not None and answer.status_code == 200


def ask_all(client):
    """Ask a few times, so that each worker answers now and then."""
    return [client.try_ask("/") for _ in range(8)]


def instants(server, pids):
    """Ask until each worker has answered; return which of them led when they did."""
    seen = {}
    while seen.keys() < pids:
        answer = server.try_ask("/instant")
        if answer is not None:
            seen[answer.json()["pid"]] = answer.json()["token"]
    return [pid for pid, token in seen.items() if token is not None]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("kind", SERVERS)
def test_one_of_four_workers_leads_and_hands_over_on_sighup(kind, postgres_url, tmp_path, record_property):
    port = free_port()
    linger = 20 if kind.startswith("gunicorn") else 0
    with Workers(postgres_url, tmp_path, SERVERS[kind](port), size=1, linger=linger) as workers, Client(port) as client:
        workers.start()
        [master] = workers.replicas
        pids = workers.wait_for_four()
        assert instants(client, pids) == [workers.wait_for_leader()]

        plain = workers.kill_leader()
        before = workers.wait_for_four()
        terms = len(workers.hand_overs())
        os.kill(master.process.pid, signal.SIGHUP)
        after = workers.wait_for_four(without=before)
        workers.wait_until(lambda: workers.wait_for_leader() in after, "one of the new to lead")
        workers.wait_until(lambda: workers.runs().rows[-1].pid in after, "one of the new to work")
        assert instants(client, after) == [workers.wait_for_leader()]
        workers.assert_stood_by()
        workers.check(plain, workers.hand_overs()[terms:], record_property)


@pytest.mark.timeout(180)
def test_a_rolling_restart_hands_over_without_a_gap(postgres_url, tmp_path, record_property):
    """Four servers, each restarted when the one before it is ready again: as a deployment does it."""
    ports = [free_port() for _ in range(4)]
    with Workers(postgres_url, tmp_path, lambda number: uvicorn(APP, ports[number])) as servers:
        servers.start()
        servers.wait_for_four()
        leader = servers.wait_for_leader()
        plain = servers.kill_leader()
        killed = next(replica for replica in servers.replicas if replica.process.pid == leader)
        killed.wait()
        killed.start()
        servers.wait_for_four()
        terms = len(servers.hand_overs())
        for server, port in zip(servers.replicas, ports, strict=True):
            servers.terminate(server)
            server.start()
            with Client(port) as client:
                servers.wait_until(lambda client=client: ready(client), "the new one to be ready")
        servers.wait_for_four()
        servers.terminate()
        servers.check(plain, servers.hand_overs()[terms:], record_property)


def test_the_reloader_hands_over_to_the_new_code(postgres_url, tmp_path):
    """The old process ends before the new one is there: a gap, but no double run and no wait for the lease."""
    watched = tmp_path / "watched"
    watched.mkdir()
    code = watched / "code.py"
    code.touch()
    command = uvicorn(APP, free_port(), "--reload", "--reload-dir", str(watched))
    with Workers(postgres_url, tmp_path, command, size=1) as workers:
        workers.start()
        before = workers.wait_for_leader()
        code.write_text("changed = True\n")
        workers.wait_for_leader(other_than=before)
        workers.wait_until(lambda: workers.runs().rows[-1].token == 2, "work under the next term")
        workers.terminate()
        assert workers.runs().duplicates == workers.runs().stale == []
        with Registry(postgres_url) as registry:
            assert registry.history(workers.role)[-1].reason in ("resigned", "left")


WSGI_APP = """
import os, time
from datetime import datetime, timezone
from tests.integrations.cluster import INSERT_RUN

EVERY_S = float(os.environ["EVERY"])

def scheduler(term):
    while True:
        due = (time.time() // EVERY_S + 1) * EVERY_S
        if term.wait_lost(due - time.time()):
            return
        with term.transaction() as transaction:
            moment = datetime.fromtimestamp(due, timezone.utc)
            transaction.execute(INSERT_RUN, ("tick", moment, term.token, "worker", os.getpid()))

def application(environ, start_response):
    start_response("200 OK", [])
    return [str(os.getpid()).encode()]
"""


@pytest.mark.timeout(180)
def test_one_of_four_wsgi_workers_leads_by_the_hooks_of_the_how_to(postgres_url, tmp_path, record_property):
    """On SIGHUP the role is vacant until a new worker is there; and by --max-requests workers come and go."""
    [configuration] = re.findall(r"^```py\n(.*?)^```", Path(ROOT, HOW_TO).read_text(), flags=re.DOTALL | re.MULTILINE)
    (tmp_path / "gunicorn.conf.py").write_text(configuration)
    (tmp_path / "app.py").write_text(WSGI_APP)
    port = free_port()
    place = ("--config", str(tmp_path / "gunicorn.conf.py"), "--chdir", str(tmp_path))
    command = gunicorn("app:application", port, *place, "--max-requests", "20", "--max-requests-jitter", "40")
    with Workers(postgres_url, tmp_path, command, size=1) as workers, Client(port) as client:
        workers.start()
        workers.wait_for_four()
        plain = workers.kill_leader()
        before = workers.wait_for_four()
        os.kill(workers.replicas[0].process.pid, signal.SIGHUP)
        after = workers.wait_for_four(without=before)
        workers.wait_until(lambda: workers.runs().rows[-1].pid in after, "one of the new to work")

        leader = workers.wait_for_leader()
        workers.wait_until(
            lambda: ask_all(client) and workers.who_leads()[0] not in (None, leader), "max_requests of the leader"
        )
        workers.wait_for_four()
        workers.terminate()
        workers.check(plain, [], record_property)
