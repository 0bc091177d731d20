"""`tenure ui` as a process: slow clients, large headers, and what it prints."""

from __future__ import annotations

import asyncio
import re
import socket
import time
import urllib.error
import urllib.parse
import urllib.request

import pytest
import uvicorn
from uvicorn.server import ServerState

from tenure.dashboard.server import HEADERS_WITHIN_S, Impatient
from tests.dashboard.browser import ui
from tests.dashboard.conftest import OPERATOR, three

pytestmark = pytest.mark.frameworks


@pytest.mark.parametrize("sent_before", [0, 1], ids=["first request", "second request"])
def test_slow_clients_are_given_up_and_others_answered(sqlite_url, sent_before):
    with three(sqlite_url), ui(sqlite_url) as address:
        port = int(address.rpartition(":")[2].strip("/"))
        slow = [socket.create_connection(("127.0.0.1", port)) for _ in range(50)]
        for connection in slow * sent_before:
            connection.sendall(b"HEAD /static/icon.svg HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert connection.recv(100_000).startswith(b"HTTP/1.1 200")
        begin = time.monotonic()
        for connection in slow:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: 127")
        with urllib.request.urlopen(address, timeout=HEADERS_WITHIN_S) as answer:
            assert b"scheduler" in answer.read()
        assert time.monotonic() - begin < HEADERS_WITHIN_S, "the others were still waiting"
        for connection in slow:
            connection.settimeout(3 * HEADERS_WITHIN_S)
            assert connection.recv(1) == b"", "the server closes it"
            connection.close()


def test_no_part_of_an_answer_waits_for_the_client():
    """A page comes in two parts. Nagle's algorithm would keep the second until the client acknowledges the first."""

    async def without_delay():
        config = uvicorn.Config(lambda *_: None, log_config=None)
        config.load()
        accepted = asyncio.get_running_loop().create_future()

        class Accepting(Impatient):
            def connection_made(self, transport):
                super().connection_made(transport)
                accepted.set_result(transport.get_extra_info("socket"))

        def protocol():
            return Accepting(config, ServerState(), {})

        listener = socket.create_server(("127.0.0.1", 0))
        server = await asyncio.get_running_loop().create_server(protocol, sock=listener)
        with socket.create_connection(listener.getsockname()):
            one = await asyncio.wait_for(accepted, 20)
            try:
                return one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            finally:
                server.close()

    assert asyncio.run(without_delay())


def test_actions_are_logged_on_stderr(sqlite_url, tmp_path):
    (tmp_path / "users").write_text(f"olga operate {OPERATOR}\n")
    told = tmp_path / "stderr"
    form = urllib.parse.urlencode({"what": "hand-over", "role": "scheduler", "to": "worker-2", "token": "1"}).encode()
    with three(sqlite_url), told.open("w") as log, ui(sqlite_url, f"--users-file={tmp_path}/users", log=log) as address:
        headers = {"Authorization": f"Bearer {OPERATOR}", "Origin": address.strip("/")}
        with urllib.request.urlopen(urllib.request.Request(f"{address}act", form, headers), timeout=30) as answer:
            assert b"worker-2 leads, token 2" in answer.read()
    asked, ended = told.read_text().splitlines()
    stamp = r"[0-9-]{10} [0-9:]{8},[0-9]{3} INFO "
    assert re.fullmatch(stamp + "'olga' asks through the dashboard: hand over role 'scheduler' to 'worker-2'", asked)
    assert re.fullmatch(stamp + ".* worker-2 leads, token 2", ended)


def test_header_that_is_too_large_is_refused_by_the_server(sqlite_url):
    with three(sqlite_url), ui(sqlite_url) as address:
        for size, status in ((20_000, 431), (200_000, 400)):
            request = urllib.request.Request(address, headers={"X-Large": "x" * size})
            with pytest.raises((urllib.error.HTTPError, ConnectionError, urllib.error.URLError)) as refused:
                urllib.request.urlopen(request, timeout=30)
            if isinstance(refused.value, urllib.error.HTTPError):
                assert refused.value.code == status
                refused.value.close()
