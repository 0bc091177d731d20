"""The figures of the dashboard, by the browser's own clock: `python -m tests.dashboard.figures`.

Needs PostgreSQL and Chromium. It prints the load of the machine with them: they are worth little on a busy one. The
floor is what the browser takes for the same with an almost empty page, which a bare server has ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psycopg
from selenium.webdriver import Chrome

import tenure
from scripts.dashboard_screens import NODE
from tests.dashboard.browser import chromium, sign_in, ui, wait_for
from tests.support.servers import PostgresServer
from tests.support.store_by_hand import until

ROLES, MEMBERS, CANDIDATES, PAGES = 1000, 100, 10, 100
TOKEN = "a-token-that-nobody-can-guess"

LOADED = """
const [page] = performance.getEntriesByType("navigation");
const all = [page, ...performance.getEntriesByType("resource").filter((one) => one.startTime < page.loadEventEnd)];
return page.loadEventEnd && {
  answer: page.responseEnd - page.requestStart,
  loaded: page.loadEventEnd - page.startTime,
  bytes: all.reduce((sum, one) => sum + one.transferSize, 0),
  files: all.length,
};
"""
NOTE_CLICKS = "addEventListener('click', () => sessionStorage.setItem('clicked', Date.now()), true)"
PAINTED = """
const [paint] = performance.getEntriesByName("first-contentful-paint");
return paint && document.querySelector("#summary").innerText.startsWith(arguments[0])
  && performance.timeOrigin + paint.startTime - Number(sessionStorage.getItem("clicked"));
"""
NOTE_LEADER = """
const old = arguments[0];
new MutationObserver(() => {
  const now = document.querySelector("#summary").innerText;
  if (!window.seen && !now.startsWith(old) && now.includes(" leads")) window.seen = Date.now();
}).observe(document.querySelector("main"), { subtree: true, childList: true, characterData: true });
"""


class Bare(http.server.BaseHTTPRequestHandler):
    """An almost empty page, with a form that leads back to it."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    page = (
        b"<!doctype html><title>floor</title><link rel='icon' href='data:,'><p id='summary'>floor leads</p>"
        b"<form method='post'><button>Hand over to floor</button></form>"
    )

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(self.page)))
        self.end_headers()
        self.wfile.write(self.page)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(303)
        self.send_header("Location", "/?done")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextlib.contextmanager
def bare() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Bare) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def load() -> str:
    return f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"


def many(url: str) -> None:
    """Fill a namespace with roles and members, as they would be if all of them were there."""
    with tenure.Node(url, name="first", ttl=30) as node:
        node.election("seed").wait(30)
        with psycopg.connect(url, autocommit=True) as connection:
            columns = connection.execute(
                "select string_agg(quote_ident(column_name), ', ' order by ordinal_position) from "
                "information_schema.columns where table_schema = 'tenure' and table_name = 'members'"
            ).fetchone()
            assert columns is not None
            values = {"id": "'copy-' || n", "name": "'member-' || n", "ttl_ms": "3600000", "sentinel_key": "null"}
            chosen = ", ".join(values.get(name.strip('"'), name) for name in columns[0].split(", "))
            connection.execute("alter table tenure.members disable trigger all")
            connection.execute(
                f"insert into tenure.members ({columns[0]}) select {chosen} from tenure.members, "
                f"generate_series(1, {MEMBERS - 1}) as n where name = 'first'"
            )
            for table, holder in (("roles", "holder"), ("terms", "member_id")):
                names = connection.execute(
                    "select column_name from information_schema.columns "
                    "where table_schema = 'tenure' and table_name = %s",
                    (table,),
                ).fetchall()
                given = {"name": "'role-' || n", "role": "'role-' || n", holder: f"'copy-' || (n % {MEMBERS - 1} + 1)"}
                if table == "terms":
                    given["name"] = "name"
                listed = [name for (name,) in names]
                chosen = ", ".join(given.get(name, name) for name in listed)
                key = "name" if table == "roles" else "role"
                connection.execute(
                    f"insert into tenure.{table} ({', '.join(listed)}) select {chosen} from tenure.{table}, "
                    f"generate_series(1, {ROLES - 1}) as n where {key} = 'seed'"
                )
            connection.execute(
                "insert into tenure.candidates (namespace, role, member_id) select 'default', 'role-' || n, "
                f"'copy-' || ((n + m) % {MEMBERS - 1} + 1) from generate_series(1, {ROLES - 1}) as n, "
                f"generate_series(1, {CANDIDATES}) as m"
            )


def load_page(browser: Chrome, address: str) -> tuple[dict[str, float], float]:
    """Return the medians, and the best time to the answer."""
    loads = []
    for _ in range(15):
        browser.execute_cdp_cmd("Network.enable", {})
        browser.execute_cdp_cmd("Network.clearBrowserCache", {})
        browser.get(address)
        loads.append(wait_for(browser, LOADED))
    middle = {key: statistics.median(one[key] for one in loads) for key in loads[0]}
    return middle, min(one["answer"] for one in loads)


def first_page(browser: Chrome, address: str) -> None:
    middle, best = load_page(browser, address)
    with bare() as static:
        floor, _ = load_page(browser, static)
    print(
        f"first page, {ROLES} roles and {MEMBERS} members, nothing cached, median of 15: the answer after "
        f"{middle['answer']:.1f} ms (best {best:.1f}), everything loaded after {middle['loaded']:.0f} ms, "
        f"{middle['bytes'] / 1000:.1f} kB in {middle['files']:.0f} files; floor: {floor['answer']:.1f} ms, "
        f"loaded after {floor['loaded']:.0f} ms; {load()}"
    )


def open_pages(server: PostgresServer, address: str, seconds: float = 20.0) -> None:
    """Ask as the script of a page does, from many pages at once; count what the server sees."""

    async def page(client: httpx.AsyncClient, until_: float) -> int:
        etag, asked = "", 0
        while time.monotonic() < until_:
            answer = await client.get(address, headers={"if-none-match": etag})
            assert answer.status_code in (200, 304), answer.status_code
            asked, etag = asked + 1, answer.headers["etag"]
            await asyncio.sleep((max(int(answer.headers["tenure-next"]), 50) + 25) / 1000)
        return asked

    async def everyone() -> int:
        limits = httpx.Limits(max_connections=PAGES)
        async with httpx.AsyncClient(limits=limits, timeout=30) as client:
            return sum(await asyncio.gather(*(page(client, time.monotonic() + seconds) for _ in range(PAGES))))

    with server.configured(log_statement="all"):
        mark, begin = server.log_mark(), time.monotonic()
        asked = asyncio.run(everyone())
        lasted = time.monotonic() - begin
        sent = sum(" execute " in line for line in server.log_lines(mark))
    print(
        f"{PAGES} open pages for {lasted:.0f} s: {asked / lasted:.0f} requests a second, and {sent / lasted:.2f} "
        f"statements a second on the database, three to a round trip; {load()}"
    )


def click(browser: Chrome, address: str) -> float:
    """Hand over by a click; return after how many milliseconds the page that says so is painted."""
    browser.get(address)
    button = browser.find_element("xpath", "//button[contains(., 'Hand over to')]")
    successor = button.text.rpartition(" ")[2]
    browser.execute_script(NOTE_CLICKS)
    button.click()
    took: float = wait_for(browser, PAINTED.replace("arguments[0]", repr(successor + " leads")))
    return took


def hand_over_and_kill(browser: Chrome, url: str, users: Path) -> None:
    clicks, floor, kills = [], [], []
    workers = {}
    tenure.Registry(url).create()

    def start(name: str) -> None:
        workers[name] = subprocess.Popen([sys.executable, "-c", NODE, url, name, "leader"])

    def two_stand() -> bool:
        return any(role.role == "leader" and role.leader and role.candidates == 2 for role in registry.roles())

    with tenure.Registry(url) as registry, ui(url, "--users-file", str(users)) as address, bare() as static:
        try:
            for name in ("worker-1", "worker-2"):
                start(name)
            until(lambda: len(registry.members()) == 2, "members", 60)
            sign_in(browser, address, TOKEN)
            for _ in range(10):
                until(two_stand, "two candidates", 90)
                clicks.append(click(browser, address + "role?name=leader"))
                floor.append(click(browser, static))
            print(
                f"click on `Hand over` until `… leads` is painted, 10 times: {figures(clicks)}; "
                f"floor: {figures(floor)}; {load()}",
                flush=True,
            )
            for _ in range(10):
                until(two_stand, "two candidates", 90)
                browser.get(address + "role?name=leader")
                leader = browser.find_element("css selector", "#summary b").text
                time.sleep(1.5)
                browser.execute_script(NOTE_LEADER, leader)
                killed = time.time()
                workers[leader].kill()
                workers[leader].wait()
                kills.append(wait_for(browser, "return window.seen") - killed * 1000)
                start(leader)
        finally:
            for process in workers.values():
                process.kill()
                process.wait()
    print(f"kill -9 of the leader until the next is on the screen, 10 times: {figures(kills)}; {load()}")


def figures(found: list[float]) -> str:
    return f"median {statistics.median(found):.0f} ms, best {min(found):.0f}, worst {max(found):.0f}"


def main() -> None:
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(PostgresServer())
        users = directory / "users"
        users.write_text(f"olga operate {TOKEN}\n")
        browser = stack.enter_context(chromium())
        hand_over_and_kill(browser, server.create_database(), users)
        full = server.create_database()
        many(full)
        with ui(full) as address:
            first_page(browser, address)
            open_pages(server, address)


if __name__ == "__main__":
    main()
