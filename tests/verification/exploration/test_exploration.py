"""The protocol on a small world, looked through to the end: the quick part of ``make explore``."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from tests.verification.exploration.__main__ import run_mutated
from tests.verification.exploration.explorer import Explorer, Found
from tests.verification.exploration.forms import Numbers
from tests.verification.exploration.mutations import NOT_SHOWN, SHOWN, NoAcquireOfMyOwn
from tests.verification.exploration.story import tell
from tests.verification.exploration.worlds import INSTANT, STRICT, World
from tests.verification.mutations.test_mutations import MUTATIONS

CALM = World("calm", STRICT, (), 0)
QUICK = [World("strict", STRICT, ("cut", "write"), 1), World("instant", INSTANT, ("cut a",), 1)]


def explored(world: World) -> Found:
    found = Explorer(world).run()
    story = "\n".join(tell(found.space, found.way))
    assert found.violation is None, f"{found.violation}\n{story}"
    return found


@pytest.mark.parametrize("world", QUICK, ids=lambda world: world.name)
def test_no_state_that_a_fault_can_lead_to_breaks_a_promise(world: World) -> None:
    found = explored(world)
    assert found.closed
    assert found.states > 5_000
    assert not found.exceptions


def test_two_believe_at_once_in_the_named_case_and_the_fence_holds() -> None:
    found = explored(World("late", INSTANT, ("cut late a",), 1, deepest=17))
    assert found.exceptions
    assert not found.closed


@pytest.mark.parametrize(
    "rule",
    [
        "no doubt",
        pytest.param("adoption of a dropped token", marks=pytest.mark.long),
        pytest.param("an adopted term is acquired again", marks=pytest.mark.long),
        pytest.param("proof of death without the fresh connection", marks=pytest.mark.long),
    ],
)
def test_without_the_rule_a_way_to_a_broken_promise_is_found_and_told(rule: str, tmp_path: Path) -> None:
    mutation = next(mutation for mutation in MUTATIONS if mutation.rule == rule)
    told = run_mutated(mutation, tmp_path)
    assert re.search(f"BROKEN: .*({SHOWN[rule].breaks})", told), told
    assert "\n  1. " in told


def test_every_mutation_is_shown_or_has_a_reason_why_not() -> None:
    assert {mutation.rule for mutation in MUTATIONS} == {*SHOWN, *NOT_SHOWN}
    assert not SHOWN.keys() & NOT_SHOWN.keys()


@pytest.mark.long
def test_a_role_that_nobody_can_ever_lead_again_is_found() -> None:
    found = Explorer(World("mutation", STRICT, ("slow control down a",), 1, store=NoAcquireOfMyOwn)).run()
    assert found.violation
    assert "nobody can ever lead again" in found.violation


class Newest(Numbers):
    """Keeps of all states of one form the one that was seen last, instead of the first."""

    def number(self, shape: Any, thing: Any) -> int:
        number = super().number(shape, thing)
        self.kept[number] = self._look(thing)
        return number


class Forgetful(dict[Any, Any]):
    def __setitem__(self, key: Any, value: Any) -> None:
        pass


@pytest.mark.long
def test_what_is_equal_in_form_behaves_alike() -> None:
    """Follow others of the same form, and take each step anew: the same states come up."""
    world = dataclasses.replace(CALM, takeovers=INSTANT)
    usual, other = Explorer(world), Explorer(world)
    other.space.places, other.space.bases = Newest(other.space.places._look), Newest(other.space._stand)
    other.space._steps, other.space._executed, other.space._based = Forgetful(), Forgetful(), Forgetful()
    first, second = usual.run(), other.run()
    assert (first.states, first.transitions, first.depth) == (second.states, second.transitions, second.depth)


def test_fewer_orders_are_fewer_states_and_the_calm_is_finite() -> None:
    eager, every = explored(CALM), explored(dataclasses.replace(CALM, eager=False))
    assert eager.states < every.states < 5_000
