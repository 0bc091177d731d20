"""The programs beside the tests refuse what makes no sense, and never pass for nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.cluster import ROOT

pytestmark = pytest.mark.harness

TORTURE, EXPLORE, BESIDE = (
    ["-m", "tests.verification.torture"],
    ["-m", "tests.verification.exploration"],
    ["benchmarks/beside.py"],
)


@pytest.mark.parametrize(
    ("program", "arguments", "words"),
    [
        (TORTURE, ["--minutes", "nan"], "'nan' must be a number from 0 on"),
        (TORTURE, ["--ttl", "0"], "'0' must be a number from 1 on"),
        (TORTURE, ["--only", "kill", "nonsense"], "there is no 'nonsense' on postgres: choose from kill, "),
        (EXPLORE, ["--depth", "0"], "'0' must be a whole number from 1 on"),
        (EXPLORE, ["--world", "strict", "--mutation", "no doubt"], "choose one of them"),
        (BESIDE, ["--rounds", "x"], "'x' must be a whole number from 1 on"),
        (BESIDE, ["--only", "nonsense"], "nobody has 'nonsense' in its name"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_arguments_are_named_with_what_would_be_right(program, arguments, words):
    run = subprocess.run([sys.executable, *program, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert words in run.stderr.splitlines()[-1]
    assert "Traceback" not in run.stderr
