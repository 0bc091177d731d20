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
    max_ttl: float


SCENARIOS: dict[str, Scenario] = {}


def scenario(max_ttl: float = 60.0) -> Callable[[Story], Story]:
    """Register a story under its function's name; ``max_ttl`` is the namespace's largest permitted TTL."""

    def register(tell: Story) -> Story:
        name = tell.__name__.replace("_", "-")
        SCENARIOS[name] = Scenario(name, tell, max_ttl)
        return tell

    return register
