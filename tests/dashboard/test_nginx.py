"""The dashboard behind a real nginx, with the lines of docs/how-to/dashboard.md."""

from __future__ import annotations

import contextlib
import http.cookiejar
import os
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import pytest

from tests.conftest import missing
from tests.dashboard.browser import PATIENCE_S, ui
from tests.dashboard.conftest import OPERATOR, three
from tests.integrations.web import free_port

pytestmark = pytest.mark.frameworks

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "dashboard.md").read_text()
(LOCATION,) = re.findall(r"```nginx\n(.*?)```", PAGE, re.DOTALL)
BARE = "location / { proxy_pass http://127.0.0.1:8377; }"
UNDER_A_PREFIX = LOCATION.replace("location / ", "location /ops/tenure/ ").replace(
    "127.0.0.1:8377;", "127.0.0.1:8377/;"
)

CONFIGURATION = """
daemon off; master_process off; pid {folder}/pid; error_log {folder}/errors;
events {{ worker_connections 64; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    server {{ listen 127.0.0.1:{port}; {location} }}
}}
"""


@contextlib.contextmanager
def nginx(folder, location, dashboard):
    """Start nginx before a dashboard; yield its address."""
    program = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    if program is None:
        missing("no nginx found: install nginx-light")
    port = free_port()
    leads = location.replace("127.0.0.1:8377", urllib.parse.urlsplit(dashboard).netloc)
    (folder / "nginx.conf").write_text(CONFIGURATION.format(folder=folder, port=port, location=leads))
    with subprocess.Popen([program, "-c", str(folder / "nginx.conf"), "-e", str(folder / "errors")]) as process:
        try:
            deadline = time.monotonic() + PATIENCE_S
            while True:
                with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
                    break
                assert process.poll() is None, (folder / "errors").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.02)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def status(address, **headers):
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=PATIENCE_S) as answer:
            return answer.status
    except urllib.error.HTTPError as refused:
        refused.close()
        return refused.code


@pytest.mark.parametrize("location", [LOCATION, BARE], ids=["as in the how-to", "without a header"])
def test_request_through_nginx_is_foreign_although_it_comes_from_this_machine(sqlite_url, tmp_path, location):
    with three(sqlite_url), ui(sqlite_url) as dashboard, nginx(tmp_path, location, dashboard) as front:
        assert status(dashboard) == 200
        assert status(f"{front}/") == 403


def test_request_through_nginx_is_let_in_by_its_token(sqlite_url, tmp_path):
    (tmp_path / "users").write_text(f"olga operate {OPERATOR}\n")
    told = f"--users-file={tmp_path}/users"
    with three(sqlite_url), ui(sqlite_url, told) as dashboard, nginx(tmp_path, LOCATION, dashboard) as front:
        assert status(f"{front}/") == 401
        assert status(f"{front}/", Authorization=f"Bearer {OPERATOR}") == 200


def test_dashboard_works_under_a_prefix_of_nginx(sqlite_url, tmp_path):
    """Signing in, every link and file of the pages, and a hand-over: nothing leads outside of the prefix."""
    (tmp_path / "users").write_text(f"olga operate {OPERATOR}\n")
    told = f"--users-file={tmp_path}/users"
    with three(sqlite_url), ui(sqlite_url, told) as dashboard, nginx(tmp_path, UNDER_A_PREFIX, dashboard) as front:
        home = f"{front}/ops/tenure/"
        visitor = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar()))
        visitor.addheaders = [("Origin", front)]

        def ask(address, **form):
            sent = urllib.parse.urlencode(form).encode() if form else None
            with visitor.open(address, sent, timeout=PATIENCE_S) as answer:
                assert answer.url.startswith(home)
                return answer.read().decode(errors="replace")

        with pytest.raises(urllib.error.HTTPError) as refused:
            ask(home)
        (action,) = re.findall(r'<form[^>]* action="([^"]+)"', refused.value.read().decode())
        refused.value.close()
        assert "Roles" in ask(urllib.parse.urljoin(home, action), token=OPERATOR)
        seen, left = set(), [home]
        while left:
            address = left.pop()
            seen.add(address)
            text = ask(address)
            links = re.findall(r'(?:href|src)="([^"#]+)', text) if text.lstrip().startswith("<!doctype") else []
            found = {urllib.parse.urljoin(address, link) for link in links}
            left += [one for one in found - seen if one not in left]
        assert {one.rpartition("/")[2].partition("?")[0].partition(".")[2] for one in seen} >= {"", "css", "js"}
        assert len(seen) > 6
        said = ask(f"{home}act", what="hand-over", role="scheduler", to="worker-2", token="1")
        assert "worker-2 leads, token 2" in said
