"""A real browser: the system's Chromium, without a window and with a new profile."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from tests.conftest import missing

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    *(
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
    ),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
AXE = Path(__file__).with_name("vendor") / "axe.min.js"
TENURE = str(Path(sys.executable).with_name("tenure"))
PATIENCE_S = 30.0


@contextlib.contextmanager
def chromium() -> Iterator[webdriver.Chrome]:
    """Start a browser, and end it."""
    if CHROMIUM is None or DRIVER is None:
        missing("no Chromium found: install chromium and chromium-driver")
    with tempfile.TemporaryDirectory() as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        driver = webdriver.Chrome(options, Service(DRIVER))
        try:
            yield driver
        finally:
            driver.quit()


@contextlib.contextmanager
def ui(url: str, *options: str, namespace: str = "default", log: IO[str] | None = None) -> Iterator[str]:
    """Start `tenure ui` as a user would; yield the address that it prints. Its stderr goes to a file, if given."""
    told = [TENURE, "ui", "--url", url, "--namespace", namespace, "--bind", "127.0.0.1:0", *options]
    with subprocess.Popen(told, stdout=subprocess.PIPE, stderr=log, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[0]
        finally:
            process.terminate()
            process.wait(PATIENCE_S)


def sign_in(driver: Any, address: str, token: str) -> None:
    driver.get(address)
    driver.find_element("id", "token").send_keys(token)
    driver.find_element("css selector", "main form button").click()
    wait_for(driver, "return document.querySelector('h1').innerText === 'Roles'")


def wait_for(driver: Any, condition: str, within: float = PATIENCE_S) -> Any:
    """Wait until a script returns something true."""
    deadline = time.monotonic() + within
    while not (value := driver.execute_script(condition)):
        assert time.monotonic() < deadline, condition
        time.sleep(0.02)
    return value


def look(driver: Any, *, dark: bool, narrow: bool) -> None:
    """Set the size of the window and the colours that the visitor prefers."""
    size = {"width": 390, "height": 844} if narrow else {"width": 1280, "height": 860}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {**size, "deviceScaleFactor": 1, "mobile": narrow})
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})


def violations(driver: Any) -> list[str]:
    """Return what axe finds wrong with the page that is open."""
    driver.execute_script(AXE.read_text())
    result = driver.execute_async_script(
        "const done = arguments[0]; axe.run().then(done, (e) => done({error: String(e)}))"
    )
    assert "error" not in result, result
    assert result["passes"]
    return [f"{one['id']}: {one['nodes'][0]['html']}" for one in result["violations"]]
