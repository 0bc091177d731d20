"""A test of a group that failed beside others is found again by `--last-failed` in one process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.cluster import ROOT

pytestmark = pytest.mark.harness

TESTS = """
import os, pytest
BAD = "BAD" in os.environ

def test_alone():
    assert not BAD

@pytest.mark.xdist_group("group")
@pytest.mark.parametrize("who", ["us@here", "them@there"])
def test_together(who):
    assert not BAD or who == "them@there"
"""


def run(directory, *arguments, **environment):
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.groups", "-v", "--rootdir", directory, *arguments]
    told = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    return subprocess.run(command, cwd=directory, env=told, capture_output=True, text=True, check=False).stdout


def test_failure_in_a_group_is_run_again_in_one_process(tmp_path):
    (tmp_path / "test_some.py").write_text(TESTS)
    assert "2 failed, 1 passed" in run(tmp_path, "-n", "2", "--dist", "loadgroup", BAD="1")
    again = run(tmp_path, "-n", "0", "--last-failed", "--last-failed-no-failures", "none")
    assert "2 passed" in again
    assert "test_together[us@here] PASSED" in again
