"""The torture itself fails where something is broken in Tenure. (That it passes elsewhere, `make torture` shows.)"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import missing
from tests.support.cluster import ROOT
from tests.support.servers import postgres_installations
from tests.verification.torture import neighbour_nemeses
from tests.verification.torture.victims import STRANGER

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

MUTATIONS = {
    "the fence lets everything pass": (
        "fence/fence.py", "    if changed.count != 1:\n        raise refused(term)\n", "", "- no stale write: "
    ),
    "a leader trusts its lease for too long": (
        "core/timing.py", "    return ttl - margin(ttl)\n", "    return 3 * ttl\n", "- one leader: "
    ),
}  # fmt: skip


def torture(tmp_path: Path, *arguments: str, source: Path = ROOT / "src") -> subprocess.CompletedProcess[str]:
    run = subprocess.run(
        [sys.executable, "-m", "tests.verification.torture", *arguments, "--seed", "1", "--out", str(tmp_path)],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(source)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    print(run.stdout, run.stderr)
    return run


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_torture_of_a_broken_tenure_fails(tmp_path, mutation):
    name, text, replacement, said = MUTATIONS[mutation]
    source = tmp_path / "src"
    shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
    module = source / "tenure" / name
    assert module.read_text().count(text) == 1
    module.write_text(module.read_text().replace(text, replacement))
    what = ["--minutes", "0.3", "--database", "sqlite", "--takeover", "strict", "--only", "pause-long", "pause-holder"]
    run = torture(tmp_path, *what, source=source)
    assert said in run.stdout
    assert run.returncode == 1
    assert (tmp_path / "sqlite-strict" / "report.md").exists()


def test_torture_with_clocks_further_apart_than_permitted_fails(tmp_path):
    if not postgres_installations():
        missing("no PostgreSQL here")
    run = torture(tmp_path, "--minutes", "0.4", "--takeover", "strict", "--only", "node-clocks-apart", "--drift", "0.3")
    assert "- one leader: " in run.stdout
    assert run.returncode == 1


def test_stranger_who_comes_while_the_server_is_down_begins_when_it_is_up(make_postgres_server):
    """The nemesis that stopped the server starts it in the same thread, and after this."""
    server = make_postgres_server(fsync=False)
    server.execute(f"create role {STRANGER} login")
    server.stop()
    stranger = neighbour_nemeses.come(SimpleNamespace(server=server, dbname="postgres"), "flood", "vacant=anything")
    try:
        assert not stranger.has_begun()
        server.start()
        assert stranger.has_begun(60)
    finally:
        stranger.stop()
