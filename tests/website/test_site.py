"""The built website in a real browser. `make check` has built it before; at a desk, a missing one is built first."""

from __future__ import annotations

import functools
import http.server
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.dashboard.browser import chromium, look, violations

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(400), pytest.mark.xdist_group("website")]

ROOT = Path(__file__).parents[2]
PAGES = ["index.html", "tutorial.html", "explanation/comparison.html", "proof.html", "api/tenure-node.html"]


class Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        """Say nothing: stderr is the test's."""


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    built = ROOT / "build" / "site"
    if not built.exists():
        into = tmp_path_factory.mktemp("website")
        subprocess.run([sys.executable, "-m", "scripts.website", "--into", str(into)], cwd=ROOT, check=True)
        built = into / "site"
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=built)) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        serving.join()


@pytest.fixture(scope="module")
def driver():
    with chromium() as browser:
        yield browser


def test_picture_of_a_failover_plays_once_and_not_for_those_who_prefer_less_motion(driver, address):
    def frames(preference):
        feature = {"name": "prefers-reduced-motion", "value": preference}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        driver.get(address + "_images/failover.svg")
        shown = driver.execute_script("return getComputedStyle(document.querySelector('.curtain')).display") != "none"
        timings = "return document.getAnimations().map((one) => one.effect.getComputedTiming().endTime)"
        return shown, driver.execute_script(timings)

    assert frames("no-preference") == (True, [6500])
    left = """
        const animation = document.getAnimations()[0], curtain = document.querySelector('.curtain');
        animation.pause();
        return arguments[0].map((at) => { animation.currentTime = at; return curtain.getBoundingClientRect().left; });
    """
    first, begun, last = driver.execute_script(left, [0, 1500, 6500])
    assert first == last > begun, "the whole picture first and in the end"
    assert frames("reduce") == (False, [])
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert driver.execute_script("return document.querySelectorAll('.term').length") == 4
    assert driver.execute_script("return document.querySelectorAll('script').length") == 0


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("narrow", [False, True], ids=["wide", "narrow"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_page_is_accessible_fits_and_asks_no_other_host(driver, address, page, narrow, dark):
    look(driver, dark=dark, narrow=narrow)
    driver.get(address + page)
    assert violations(driver) == []
    assert driver.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
    asked = driver.execute_script("return performance.getEntriesByType('resource').map((one) => one.name)")
    assert len(asked) > 3
    assert {one for one in asked if not one.startswith(address)} == set()
