"""The state machine of a membership is a table. The documentation shows that very table."""

from __future__ import annotations

from pathlib import Path

import pytest

from tenure.core.membership import TABLE, Membership, Phase, PhaseEvent

DESIGN = Path(__file__).parents[3] / "docs" / "design.md"


def table() -> str:
    """Return the table as the documentation shows it."""
    rows = ["| phase | what happened | next phase |", "|---|---|---|"]
    for before, steps in TABLE.items():
        for event, after in steps.items():
            rows.append(f"| {before.name} | {event.name.lower().replace('_', ' ')} | {after.name} |")
    return "\n".join(rows)


def test_the_documented_state_machine_is_the_one_that_runs():
    assert table() in DESIGN.read_text()


def test_every_phase_can_be_reached_and_left_but_the_last():
    assert {Phase.NONE, *(after for steps in TABLE.values() for after in steps.values())} == set(Phase)
    assert [phase for phase in Phase if not TABLE[phase]] == [Phase.GONE]


def test_a_node_can_leave_from_every_phase():
    ways_out = {PhaseEvent.LEAVE, PhaseEvent.LEFT}
    assert [phase for phase in Phase if not ways_out & TABLE[phase].keys()] == [Phase.GONE]


def test_every_event_moves_some_phase():
    assert {event for steps in TABLE.values() for event in steps} == set(PhaseEvent)


@pytest.mark.parametrize("event", ["joined", "JOINED", None, Phase.LIVE])
def test_event_that_does_not_exist_is_an_error(event):
    membership = Membership(10.0, 2.5)
    with pytest.raises(ValueError, match="is not a valid PhaseEvent"):
        membership.step(event)
    assert membership.phase is Phase.NONE


def test_event_that_a_phase_does_not_list_changes_nothing():
    membership = Membership(10.0, 2.5)
    assert not membership.step(PhaseEvent.RESUMED)
    assert membership.phase is Phase.NONE
    assert membership.step(PhaseEvent.JOIN)
    assert membership.phase is Phase.JOINING


if __name__ == "__main__":
    print(table())
