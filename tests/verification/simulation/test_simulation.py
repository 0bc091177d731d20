"""Histories with faults, in virtual time. ``make simulate`` runs thousands of seeds; here are some hundred.

The ordinary run takes the first seeds of each test. The others count as long.

A failure prints the seed, the end of its trace, and the command that replays it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tenure.core import evidence, protocol, roles
from tenure.store import tidying
from tests.verification.simulation.core import Violation
from tests.verification.simulation.oracles import Oracles
from tests.verification.simulation.runner import Outcome, run
from tests.verification.simulation.scenarios import ALL, BOUNDS, CHAOS, FLEETS, STORIES
from tests.verification.simulation.simulation import Simulation

ROOT = Path(__file__).parents[3]

# `make check` runs the long ones while the torture waits.
EVERY_CHAOS = [pytest.param(one, marks=() if one == "everything" else pytest.mark.long) for one in CHAOS]
LARGE = {"fleet", "deaths-in-a-fleet"}
EVERY_FLEET = [pytest.param(one, marks=pytest.mark.long if one in LARGE else ()) for one in FLEETS]


def seeds(first: int, few: int, all_of_them: int) -> pytest.MarkDecorator:
    """Give a test so many seeds from the first on: a few, and in a long test the others."""
    middle, end = first + few, first + all_of_them
    parts = [
        pytest.param(range(first, middle), id="few"),
        pytest.param(range(middle, end), id="more", marks=pytest.mark.long),
    ]
    return pytest.mark.parametrize("seeds", parts)


def check(outcome: Outcome) -> Outcome:
    assert outcome.violation is None, f"{outcome.violation}\n\n{outcome.tail()}\n\n{outcome.replay}"
    return outcome


@pytest.mark.parametrize("scenario", EVERY_CHAOS)
@seeds(0, 10, 40)
def test_promises_hold_when_everything_goes_wrong(scenario: str, seeds: range) -> None:
    for seed in seeds:
        check(run(scenario, seed))


@pytest.mark.parametrize("scenario", EVERY_CHAOS)
@seeds(0, 2, 5)
def test_promises_hold_with_the_real_sql(scenario: str, seeds: range) -> None:
    for seed in seeds:
        check(run(scenario, seed, sql=True))


@pytest.mark.parametrize("scenario", STORIES)
@seeds(100, 2, 8)
def test_the_story_ends_well_with_any_clocks_and_delays(scenario: str, seeds: range) -> None:
    for seed in seeds:
        check(run(scenario, seed))


@pytest.mark.parametrize("scenario", EVERY_FLEET)
def test_what_a_node_does_not_read_harms_nobody(scenario: str) -> None:
    for seed in range(1 if "fleet" in scenario else 8):
        check(run(scenario, seed))


@pytest.mark.parametrize("scenario", EVERY_CHAOS)
@seeds(0, 5, 20)
def test_promises_hold_if_nodes_rarely_read_all_their_roles(
    scenario: str, seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roles, "FEW_ROLES", 0)
    monkeypatch.setattr(roles, "READ_ROLE_S", 20.0)
    for seed in seeds:
        check(run(scenario, seed, sql=seed == 0))


@pytest.mark.parametrize("scenario", EVERY_CHAOS)
@seeds(0, 5, 20)
def test_promises_hold_if_nodes_look_at_one_neighbour_only(
    scenario: str, seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence, "NEIGHBOURS", 1)
    monkeypatch.setattr(roles, "LOOKED_AT", 1)
    for seed in seeds:
        check(run(scenario, seed, sql=seed == 0))


@pytest.mark.parametrize("scenario", BOUNDS)
def test_somebody_leads_again_within_the_bound(scenario: str) -> None:
    for seed in range(6):
        check(run(scenario, seed, sql=seed == 0))


@seeds(0, 3, 8)
def test_old_rows_can_be_deleted_at_any_time(seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tidying, "KEPT_MEMBERS", 1)
    monkeypatch.setattr(tidying, "KEPT_TERMS", 1)
    monkeypatch.setattr(protocol, "TIDY_EVERY_S", 1.0)
    for seed in seeds:
        check(run("everything", seed, sql=True))


# The simulator itself ----------------------------------------------------------------------------------------------


def test_a_seed_tells_the_same_story_twice() -> None:
    first, second = run("everything", 7, trace=True), run("everything", 7, trace=True)
    assert first.trace == second.trace
    assert first.trace != run("everything", 8, trace=True).trace


@seeds(0, 2, 5)
def test_the_model_and_the_sql_tell_the_same_story(seeds: range) -> None:
    for seed in seeds:
        stories = [run("promotion", seed, sql=sql, trace=True).trace for sql in (False, True)]
        assert [line for line in stories[0] if "server:" in line[1]] == [
            line for line in stories[1] if "server:" in line[1]
        ]


@pytest.mark.long
def test_chaos_is_worth_its_name() -> None:
    outcomes = [run("everything", seed, trace=True) for seed in range(25)]
    assert sum(outcome.elections for outcome in outcomes) > 100
    assert sum(outcome.commits for outcome in outcomes) > 100
    happened = "\n".join(text for outcome in outcomes for _, text in outcome.trace)
    faults = ("fast stop", "immediate stop", "promoted", "cut, heard late", "patience", "paused", "crashed", "stalls")
    events = ("Elected", "Suspended", "Resumed", "Deposed", "silence", "death", "busy=('", "Resume(", "Confirm(")
    for word in faults + events:
        assert word in happened, f"{word}: never"


def _cut_and_heard_late(takeover: str) -> Oracles:
    """The one exception: the server's end of a living leader's connection is cut, and the leader does not hear."""
    sim = Simulation(1, "late")
    leader = sim.node("leader", "r", takeover=takeover)
    sim.elect("r", leader)
    sim.node("witness", "r", takeover=takeover)
    sim.run(5.0)
    sim.server.terminate(leader.control, late=30.0)
    sim.run(15.0)
    return sim.oracles


def test_a_cut_that_is_heard_late_is_the_only_exception_and_only_in_instant_mode() -> None:
    instant = _cut_and_heard_late("instant")
    assert instant.exceptions == 1
    first, second = instant.history["r"]
    assert 0 < first.end - second.begin <= 10.0, "the TTL bounds it"
    strict = _cut_and_heard_late("strict")
    assert strict.exceptions == 0
    first, second = strict.history["r"]
    assert first.end < second.begin


def test_the_oracle_sees_two_leaders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn the exception off, and the same story is a violation."""
    monkeypatch.setattr(Oracles, "excepted", lambda *_: False)
    with pytest.raises(Violation, match="while it leads"):
        _cut_and_heard_late("instant")


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.verification.simulation", *arguments]
    return subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("number", "scenario"),
    [(2, ["--scenario", "crash-instant"]), pytest.param(2 * len(ALL), [], marks=pytest.mark.long)],
)
def test_the_command_line_runs_seeds(number: int, scenario: list[str]) -> None:
    many = simulate("--seeds", str(number), *scenario, "--processes", "1")
    assert f"{number} seeds, 0 violations" in many.stdout, many.stdout + many.stderr
    assert many.returncode == 0


def test_the_command_line_replays_a_seed() -> None:
    one = simulate("--seed", "3", "--scenario", "crash-instant")
    assert "Elected" in one.stdout
    assert "crash-instant seed 3: no violation" in one.stdout
