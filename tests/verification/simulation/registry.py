"""Scenarios by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.verification.simulation.simulation import Simulation

Story = Callable[[Simulation], None]


@dataclass(frozen=True)
class Scenario:
    """A story; ``tell`` raises Violation where it does not end well."""

    name: str
    tell: Story
    max_ttl: float | None
    loses_nothing: bool


SCENARIOS: dict[str, Scenario] = {}


def scenario(max_ttl: float | None = 60.0, *, loses_nothing: bool = False) -> Callable[[Story], Story]:
    """Register a story under its function's name.

    ``max_ttl`` is the largest TTL that an operator has set; None if nodes set it. ``loses_nothing``: promotions lose no
    commit that was acknowledged without a warning, and an operator has said so.
    """

    def register(tell: Story) -> Story:
        name = tell.__name__.replace("_", "-")
        SCENARIOS[name] = Scenario(name, tell, max_ttl, loses_nothing)
        return tell

    return register
