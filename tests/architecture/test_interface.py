"""What users depend on changes only on purpose."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.architecture import interface

RECORDED = Path(__file__).with_name("interface.txt")


def test_interface_is_the_recorded_one():
    # In a process of its own, because the frameworks are imported there, and Django is configured.
    told = [sys.executable, "-m", interface.__name__]
    shown = subprocess.run(told, check=True, capture_output=True, text=True, timeout=60).stdout.splitlines()
    missing = tuple(line.partition(interface.MISSING)[0] + "." for line in shown if interface.MISSING in line)
    recorded = RECORDED.read_text().splitlines()
    assert [line for line in recorded if not missing or not line.startswith(missing)] == [
        line for line in shown if interface.MISSING not in line
    ]
