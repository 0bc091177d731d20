"""The benchmark of schedulers starts each of them, kills it, and sees it go on."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import INSTALLATIONS, NO_POSTGRES, missing

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "schedulers.py"


@pytest.mark.long
@pytest.mark.parametrize("name", ["APScheduler", "file kept", "RedBeat", "procrastinate"])
def test_every_scheduler_goes_on_after_a_kill(name):
    if not INSTALLATIONS:
        missing(NO_POSTGRES)
    if name in {"file kept", "RedBeat"} and shutil.which("redis-server") is None:
        pytest.skip("only the benchmarks need redis-server; make bench PEERS=1 installs it")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--kills", "1", "--only", name],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    row = next((line for line in done.stdout.splitlines() if name in line), "")
    assert row.split(" | ")[1:2] == ["1"], done.stderr
