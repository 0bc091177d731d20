"""Step by step beside what it replaces: the eight cases, shortened. `benchmarks/side_by_side.py` has them in full."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import INSTALLATIONS, NO_POSTGRES, missing

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "side_by_side.py"


@pytest.mark.long
def test_every_case_works_step_by_step():
    if importlib.util.find_spec("gemstone_utils") is None:
        missing("no gemstone-utils found: install the dependency group peers")
    if not INSTALLATIONS:
        missing(NO_POSTGRES)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick"], capture_output=True, text=True, check=False, timeout=110
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr  # where it is not, some case of ours says NO
    assert done.stdout.count("| yes: ") >= 8
