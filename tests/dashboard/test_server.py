"""`tenure ui` as a process: slow clients, large headers, and what it prints."""

from __future__ import annotations

import socket
import time
import urllib.error
import urllib.request

import pytest

from tenure.dashboard.server import HEADERS_WITHIN_S
from tests.dashboard.browser import ui
from tests.dashboard.conftest import three

pytestmark = pytest.mark.frameworks


def test_slow_clients_are_given_up_and_others_answered(sqlite_url):
    with three(sqlite_url), ui(sqlite_url) as address:
        port = int(address.rpartition(":")[2].strip("/"))
        slow = [socket.create_connection(("127.0.0.1", port)) for _ in range(50)]
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


def test_header_that_is_too_large_is_refused_by_the_server(sqlite_url):
    with three(sqlite_url), ui(sqlite_url) as address:
        for size, status in ((20_000, 431), (200_000, 400)):
            request = urllib.request.Request(address, headers={"X-Large": "x" * size})
            with pytest.raises((urllib.error.HTTPError, ConnectionError, urllib.error.URLError)) as refused:
                urllib.request.urlopen(request, timeout=30)
            if isinstance(refused.value, urllib.error.HTTPError):
                assert refused.value.code == status
                refused.value.close()
