"""What `make check` runs at once: nothing is mixed up, and a failure is the last word."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.cluster import ROOT

pytestmark = pytest.mark.harness


def at_once(*commands):
    program = [sys.executable, ROOT / "scripts/at_once.py", *commands]
    return subprocess.run(program, capture_output=True, text=True, check=False, timeout=60)


def test_failure_of_one_fails_all_and_is_named_in_the_last_line(tmp_path):
    over = tmp_path / "over"
    fails, waits = f"echo a; touch {over}; exit 3", f"echo b; while ! [ -e {over} ]; do sleep 0.01; done; echo c"
    done = at_once(waits, fails)
    assert done.returncode == 1
    assert "b\nc\n" in done.stdout
    assert f"=== {fails}: FAILED, status 3\na\n" in done.stdout
    assert done.stdout.splitlines()[-1] == f"=== FAILED: {fails}"


def test_success_of_all_is_success():
    done = at_once("echo a", "echo b")
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == ["=== echo a: done", "=== echo b: done", "a", "b"]
