"""The torture itself fails where something is broken in Tenure. (That it passes elsewhere, `make torture` shows.)"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from tests.cluster import ROOT

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

MUTATIONS = {
    "the fence lets everything pass": (
        "connections.py", "\n    how(connection, claim, bound_s)\n", "\n", "- no stale write: "
    ),
    "a leader trusts its lease for too long": (
        "timing.py", "    return ttl - margin(ttl)\n", "    return 3 * ttl\n", "- one leader: "
    ),
}  # fmt: skip


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_torture_of_a_broken_tenure_fails(tmp_path, mutation):
    name, text, replacement, said = MUTATIONS[mutation]
    source = tmp_path / "src"
    shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
    module = source / "tenure" / name
    assert module.read_text().count(text) == 1
    module.write_text(module.read_text().replace(text, replacement))
    what = ["--minutes", "0.3", "--database", "sqlite", "--takeover", "strict", "--only", "pause-long", "pause-holder"]
    run = subprocess.run(
        [sys.executable, "-m", "tests.faults", *what, "--seed", "1", "--out", str(tmp_path)],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(source)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    print(run.stdout, run.stderr)
    assert said in run.stdout
    assert run.returncode == 1
    assert (tmp_path / "sqlite-strict" / "report.md").exists()
