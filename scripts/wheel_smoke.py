"""What a user does first, with the wheel that was just installed and no extra. Run by scripts/wheel-check."""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.resources
import subprocess
import sys
from pathlib import Path

import tenure

URL = f"sqlite:///{sys.argv[1]}/tenure.db"
PROGRAM = Path(sys.executable).with_name("tenure")


def run(*arguments: str) -> str:
    return subprocess.run([PROGRAM, *arguments], check=True, capture_output=True, text=True, timeout=60).stdout


async def lead_async() -> int:
    async with tenure.AsyncNode(URL, name="async") as node, node.lead("smoke") as term:
        return term.token


def check() -> None:
    assert "site-packages" in tenure.__file__, tenure.__file__
    assert importlib.metadata.version("tenure") == tenure.__version__
    assert importlib.resources.files("tenure").joinpath("py.typed").is_file()
    assert tenure.__version__ in run("--version")
    with tenure.Node(URL, name="sync") as node, node.lead("smoke") as term:
        assert "sync" in run("status", "--url", URL)
        first = term.token
    assert asyncio.run(lead_async()) == first + 1
    assert "elected" in run("run", "--url", URL, "--role", "smoke", "--", "echo", "elected")
    missing = ""
    try:
        tenure.Node("postgresql://localhost/nothing").start()
    except tenure.ConfigError as error:
        missing = str(error)
    assert "tenure[postgres]" in missing, missing  # psycopg is an extra
    print(f"the wheel of tenure {tenure.__version__} works in an empty environment")


if __name__ == "__main__":
    check()
