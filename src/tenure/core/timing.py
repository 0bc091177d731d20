"""How long things last, all derived from the TTL of a membership.

Three durations hold the safety of the lease, and their order is the whole argument. Measured from the moment just
before the leader sent its last successful renewal:

    trust(ttl)            the leader stops believing in itself      0.90 · ttl on the leader's clock
    silence(ttl)          the others may end it, at the earliest    1.02 · ttl on an observer's clock
    server_patience(ttl)  the server gives up its connection        1.10 · ttl on the server's clock

With every clock's rate within DRIFT of true time the first is over before the others begin: 0.90 / (1 - 0.05) is
less than 1.02 / (1 + 0.05). A test holds that inequality.
"""

from __future__ import annotations

DRIFT = 0.05
"""Clocks may run fast or slow by this share. Their values do not matter."""

MIN_TTL_S = 1.0
MAX_TTL_S = 3600.0
DEFAULT_TTL_S = 10.0
DEFAULT_MAX_TTL_S = 60.0

SLICE_S = 1.0
"""The longest wait on the server: that long at most is the vacuum horizon held."""


def margin(ttl: float) -> float:
    """Return what the leader gives away of its lease: drift, and time to stop what it runs."""
    return ttl / 10


def trust(ttl: float) -> float:
    """Return how long a leader believes in a renewal, from just before it was sent."""
    return ttl - margin(ttl)


def silence(ttl: float) -> float:
    """Return how long a member's count of renewals must stand still before an observer ends it."""
    return ttl * 1.02


def server_patience(ttl: float) -> float:
    """Return how long the server keeps a connection (and its sentinel) that has gone quiet.

    Never less than the trust of its owner: a sentinel freed earlier would be a false proof of death.
    """
    return ttl + margin(ttl)


def renewal_interval(ttl: float) -> float:
    """Return the default time between two renewals."""
    return ttl / 4
