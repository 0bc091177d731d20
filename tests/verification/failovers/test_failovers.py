"""One switchover of a real Patroni cluster under three nodes, as `make failovers` measures it; and that it can fail."""

from __future__ import annotations

import pytest

from tests.conftest import missing
from tests.support import patroni
from tests.support.history import History
from tests.verification.failovers.measure import CALM_NS, Measured, Plan, Row, judge, measure
from tests.verification.torture.checkers import NOISE_S
from tests.verification.torture.nemeses import Bounds

SECOND = 10**9
TTL_S = 5.0
PLAN = Plan("switchover", 1, "synchronous", "haproxy", TTL_S, ("--max-ttl", f"{TTL_S:g}"))


@pytest.mark.long
@pytest.mark.timeout(300)
def test_switchover_costs_the_wait_and_loses_nothing(tmp_path):
    if reason := patroni.why_unavailable():
        missing(reason)
    measured = measure(PLAN, tmp_path)
    (row,) = measured.rows
    print(measured.table())
    assert measured.broken == []
    assert (row.overlaps, row.lost) == (0, 0)
    assert row.acknowledged > 0
    assert row.plain > 0
    assert row.token_after > row.token_before
    assert row.beyond_s > TTL_S / 2  # the wait; in part the leader still led when the database was gone
    assert 0 < row.gap_s < row.nobody_s < Bounds(TTL_S, "instant").promotion(row.gap_s) + NOISE_S


# --- the judgement, with planted faults ---------------------------------------------------------------------


def line(kind: str, node: str, at_s: float, **more: object) -> dict[str, object]:
    at = round(at_s * SECOND) + CALM_NS
    return {"kind": kind, "node": node, "pid": 1, "at_before": at, "at": at} | more


def read(node: str, at_s: float, token: int | None) -> dict[str, object]:
    return line("read", node, at_s, role="r", leader=token is not None, token=token)


def write(node: str, at_s: float, token: int, element: str) -> dict[str, object]:
    return line("write", node, at_s, role="r", token=token, ok=True, element=element)


def judged(*lines: dict[str, object], ledger: list[tuple], plain: tuple[str, ...] = ()) -> Measured:
    measured = Measured(PLAN, "", [Row(CALM_NS, CALM_NS + 10 * SECOND)])
    judge(measured, History(lines), ledger, set(plain))
    return measured


WELL = (
    read("a", -1, 1), read("a", 2, 1), read("a", 2.1, None), read("b", 7, 2), read("b", 12, 2),
    line("probe", "prober", 0.5), line("probe", "prober", 3.5), line("probe", "prober", 3.6),
    write("a", 0, 1, "a.1"), write("b", 8, 2, "b.1"), line("plain", "c", 0, element="c.1"),
)  # fmt: skip


def test_row_has_the_gap_the_time_without_a_leader_and_the_writes():
    measured = judged(*WELL, ledger=[(1, 1, "a.1"), (2, 2, "b.1")])
    (row,) = measured.rows
    assert (row.gap_s, row.nobody_s, row.beyond_s) == (3.0, 5.0, 2.0)
    assert (row.token_before, row.token_after, row.overlaps) == (1, 2, 0)
    assert (row.acknowledged, row.lost, row.plain, row.plain_lost) == (2, 0, 1, 1)
    assert measured.broken == []
    assert "| 1 | 3.00 | 5.00 | +2.00 | 0 |" in measured.table()


def test_lost_write_is_found():
    assert judged(*WELL, ledger=[(2, 2, "b.1")]).broken == [
        "1 acknowledged fenced writes are lost, though replication is synchronous"
    ]


def test_two_leaders_and_a_token_that_falls_are_found():
    two = judged(*WELL, read("c", 8, 1), read("c", 9, 1), ledger=[(1, 2, "b.1"), (2, 1, "a.1")])
    assert two.rows[0].overlaps == 1
    text = "\n".join(two.broken)
    assert "both led" in text
    assert "token 1 was used by" in text
    assert "row 2 has token 1, after row 1 with token 2" in text
