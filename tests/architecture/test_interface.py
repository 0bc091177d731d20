"""What users depend on changes only on purpose."""

from __future__ import annotations

from pathlib import Path

from tests.architecture import interface

RECORDED = Path(__file__).with_name("interface.txt")


def test_interface_is_the_recorded_one():
    assert RECORDED.read_text().splitlines() == "\n".join(interface.lines()).splitlines()
