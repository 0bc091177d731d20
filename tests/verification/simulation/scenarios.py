"""Every scenario: the chaos, the stories that make one rule necessary each, and the bounds on leaderless time."""

from __future__ import annotations

from tests.verification.simulation import bounds, chaos, stories
from tests.verification.simulation.registry import SCENARIOS

CHAOS = [name for name in SCENARIOS if SCENARIOS[name].tell.__module__ == chaos.__name__]
STORIES = [name for name in SCENARIOS if SCENARIOS[name].tell.__module__ == stories.__name__]
BOUNDS = [name for name in SCENARIOS if SCENARIOS[name].tell.__module__ == bounds.__name__]

ALL = CHAOS + STORIES + BOUNDS

__all__ = ["ALL", "BOUNDS", "CHAOS", "SCENARIOS", "STORIES"]
