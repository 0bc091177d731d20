"""The protocol's state machine is a table; the documentation shows that very table."""

from __future__ import annotations

from pathlib import Path

from tenure.asks import Acquired, Held
from tenure.candidacy import Candidacy
from tenure.events import Elected
from tenure.protocol import TABLE, Phase

DESIGN = Path(__file__).parent.parent / "docs" / "design.md"


def table() -> str:
    """Return the table as the documentation shows it."""
    rows = ["| phase | what happened | next phase |", "|---|---|---|"]
    rows += [f"| {before.name} | {event} | {after.name} |" for (before, event), after in TABLE.items()]
    return "\n".join(rows)


def test_the_documented_state_machine_is_the_one_that_runs():
    assert table() in DESIGN.read_text()


def test_every_phase_can_be_reached_and_left_but_the_last():
    reached = {Phase.NONE, *TABLE.values()}
    left = {before for before, _ in TABLE}
    assert reached == set(Phase)
    assert left == set(Phase) - {Phase.GONE}


def test_a_node_can_leave_from_every_phase():
    assert {before for before, event in TABLE if event in ("leave", "left")} == set(Phase) - {Phase.GONE}


def test_standing_again_does_not_acquire_what_was_adopted_meanwhile():
    news = []
    roles = Candidacy(10.0, news)
    roles.stand("r")
    ask = roles.stand_ask("me")
    roles.reconcile((Held("r", 1),), now=1.0, trusted=True)  # the reply to an earlier acquire was lost
    roles.stood(ask, now=2.0)
    assert not roles.wanted
    assert news == [Elected("r", 1)]


def test_role_said_to_be_vacant_is_tried_for_unless_it_was_resigned_here_lately():
    roles = Candidacy(10.0, [])
    roles.stand("r")
    roles.stand("mine")
    roles.stood(roles.stand_ask("me"), now=0.0)
    roles.acquired(roles.acquire_ask("me", "name", 0), Acquired({"mine": 1}), now=0.0, trusted=True)
    assert not roles.wanted
    for heard in ("r", "mine", "a role that nobody stands for"):
        assert roles.hear_vacant(heard, now=1.0)
    assert roles.wanted == {"r"}
    roles.resign("mine", now=1.0)
    roles.vacated(roles.vacate_ask("me"), now=1.0, done=True)
    assert not roles.hear_vacant("mine", now=10.9)
    assert roles.wanted == {"r"}
    assert roles.hear_vacant("mine", now=11.1)
    assert roles.wanted == {"r", "mine"}


if __name__ == "__main__":
    print(table())
