"""Make the pictures of the dashboard, in a real browser and from a real run: `make screens`.

build/screens/            every page, wide and narrow, light and dark
docs/screens/*.png        the few that the documents show
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tenure
from tests.dashboard.browser import chromium, look, sign_in, ui
from tests.support.store_by_hand import until

REPOSITORY = Path(__file__).parents[1]
MADE = REPOSITORY / "build" / "screens"
SHOWN = ("roles-light-wide", "role-light-wide", "role-dark-narrow", "jobs-dark-wide")
PAGES = {
    "roles": "",
    "role": "role?name=scheduler",
    "members": "members",
    "jobs": "jobs",
    "waits": "waits",
    "doctor": "doctor",
    "actions": "actions",
}
TOKEN = "a-token-that-nobody-can-guess"
NODE = """
import sys, threading, tenure
url, name, *roles = sys.argv[1:]
schedule = tenure.Schedule()
schedule.every("5 s", name="heartbeat")(lambda run: None)
schedule.cron("30 2 * * *", name="invoices")(lambda run: None)
node = tenure.Node(url, name=name, ttl=10, metadata={"zone": "eu-" + name[-1]})
if "scheduler" in roles:
    node.leader_only("scheduler", schedule)
with node:
    for role in roles:
        node.election(role)
    threading.Event().wait()
"""


class Scene:
    """Three workers that lead, hand over, die and come back."""

    def __init__(self, url: str, stack: contextlib.ExitStack) -> None:
        self.url, self.stack = url, stack
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        self.registry = tenure.Registry(url)

    def start(self, name: str, *roles: str) -> None:
        process = subprocess.Popen([sys.executable, "-c", NODE, self.url, name, *roles])
        self.workers[name] = process
        self.stack.callback(process.wait)
        self.stack.callback(process.kill)

    def leader(self, role: str = "scheduler") -> str | None:
        with self.registry as registry:
            found = [info.leader.name for info in registry.roles() if info.role == role and info.leader]
        return found[0] if found else None

    def play(self) -> None:
        self.start("worker-1", "billing", "clean-up", "scheduler")
        until(lambda: Path(self.url.removeprefix("sqlite:///")).exists(), "a file", 30)
        time.sleep(2)
        until(lambda: self.leader() == "worker-1", "a leader", 30)
        for name in ("worker-2", "worker-3"):
            self.start(name, "clean-up", "scheduler")
        time.sleep(4)
        with self.registry as registry:
            registry.resign("scheduler", to="worker-2")
        time.sleep(4)
        self.workers["worker-2"].kill()
        until(lambda: self.leader() in ("worker-1", "worker-3"), "a successor", 30)
        time.sleep(4)
        self.start("worker-2", "clean-up", "scheduler")
        time.sleep(3)
        with self.registry as registry:
            registry.resign("scheduler", to="worker-2")
            registry.pause("invoices", "the bank is down")
        with tenure.Node(self.url, name="worker-4") as node:
            node.election("reports").wait(20)


def main() -> None:
    shutil.rmtree(MADE, ignore_errors=True)
    MADE.mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        scene = Scene(f"sqlite:///{directory}/app.db", stack)
        scene.play()
        users = directory / "users"
        users.write_text(f"olga operate {TOKEN}\n")
        address = stack.enter_context(ui(scene.url, "--users-file", str(users)))
        browser = stack.enter_context(chromium())
        sign_in(browser, address, TOKEN)
        browser.get(address + "role?name=scheduler")
        browser.find_element("xpath", "//button[contains(., 'Hand over to worker-1')]").click()
        until(lambda: "<b>worker-1</b> leads" in browser.page_source, "the hand-over", 30)
        for name, page in PAGES.items():
            for dark in (False, True):
                for narrow in (False, True):
                    look(browser, dark=dark, narrow=narrow)
                    browser.get(address + page)
                    kind = f"{'dark' if dark else 'light'}-{'narrow' if narrow else 'wide'}"
                    browser.save_screenshot(str(MADE / f"{name}-{kind}.png"))
    for name in SHOWN:
        shutil.copy(MADE / f"{name}.png", REPOSITORY / "docs" / "screens" / f"dashboard-{name}.png")


if __name__ == "__main__":
    main()
