"""Every scenario: the chaos, the stories that make one rule necessary each, fleets, and bounds on leaderless time."""

from __future__ import annotations

from tests.verification.simulation import bounds, chaos, fleets, stories
from tests.verification.simulation.registry import SCENARIOS

CHAOS = [name for name in SCENARIOS if SCENARIOS[name].tell.__module__ == chaos.__name__]
STORIES = [name for name in SCENARIOS if SCENARIOS[name].tell.__module__ == stories.__name__]
FLEETS = [name for name in SCENARIOS if SCENARIOS[name].tell.__module__ == fleets.__name__]
BOUNDS = [name for name in SCENARIOS if SCENARIOS[name].tell.__module__ == bounds.__name__]

ALL = CHAOS + STORIES + [name for name in FLEETS if name != "fleet"] + BOUNDS
"""What `make simulate` runs. A seed of `fleet` takes as long as a hundred of the others."""

__all__ = ["ALL", "BOUNDS", "CHAOS", "FLEETS", "SCENARIOS", "STORIES"]
