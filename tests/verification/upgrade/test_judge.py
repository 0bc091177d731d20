"""The checks of the upgrade can fail: each finds the violation that is planted in a history, and its phase fails."""

from __future__ import annotations

import pytest

from tests.support.history import History
from tests.verification.torture.test_checkers import MS, S, reads, write
from tests.verification.upgrade import judge
from tests.verification.upgrade.judge import Deed, Verdict

HAND_OVER = [*reads("old-1", 1, 0, 3 * S), write("old-1", 1, S, "a"), *reads("new-2", 2, 4 * S, 6 * S)]
"""An old node leads, then a new one; a second lies between them."""
WRITTEN = [(1, 1, "a")]


def test_leader_after_leader_is_found_without_fault():
    assert judge.broken(History(HAND_OVER), WRITTEN) == []


@pytest.mark.parametrize(
    ("more", "ledger", "words"),
    [
        pytest.param(reads("old-3", 3, 5 * S, 7 * S), WRITTEN, "both led for 990", id="two leaders"),
        pytest.param(reads("old-3", 2, 7 * S, 8 * S), WRITTEN, "token 2 was used by", id="a token twice"),
        pytest.param(reads("old-1", 1, 7 * S, 8 * S), WRITTEN, "began to lead with token 1", id="a token that falls"),
        pytest.param([write("old-1", 1, 5 * S, "b")], [*WRITTEN, (2, 1, "b")], "though token 2", id="a stale write"),
        pytest.param([], [*WRITTEN, (2, 2, "b"), (3, 1, "c")], "row 3 has token 1", id="a stale row"),
        pytest.param([], [], "is not in the ledger", id="an acknowledged write that is gone"),
    ],
)
def test_planted_violation_is_found(more, ledger, words):
    (found, *_) = judge.broken(History([*HAND_OVER, *more]), ledger)
    assert words in found


def test_verdict_says_how_long_nobody_led_and_who_did():
    history = History([*HAND_OVER, write("old-1", 1, 5 * S, "b", ok=False) | {"error": "Fenced"}])
    told = {"since": 0, "database": "sqlite", "phase": "1 old, 1 new", "tables": 6}
    passed = judge.verdict(history, [Deed("kill", 2 * S, 5 * S)], found=[], **told)
    assert (passed.terms["old"], passed.terms["new"]) == (1, 1)
    assert passed.gaps["kill"] == [pytest.approx(1.0, abs=0.02)]
    assert passed.passed
    assert passed.cells()[-2:] == ["1, 1, 0", "PASSED"]
    failed = judge.verdict(history, [], found=["two leaders"], **told)
    assert not failed.passed
    assert failed.cells()[-1] == "FAILED"
    later = judge.verdict(history, [], found=[], **(told | {"since": 4 * S + MS}))
    assert (later.terms["old"], later.writes[""]) == (0, 0)


def test_table_has_a_line_for_each_phase():
    lines = judge.table([Verdict("sqlite", "3 old"), Verdict("mariadb", "3 new", found=("x",))])
    heads, first, second = lines.splitlines()
    assert heads.split()[:2] == ["database", "phase"]
    assert first.endswith("PASSED")
    assert second.endswith("FAILED")
