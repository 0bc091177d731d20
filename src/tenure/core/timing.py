"""How long things last, all derived from the TTL of a membership.

The safety of the lease is the order of three durations, counted from the moment just before the leader sent its last
successful renewal:

    trust(ttl)            the leader stops trusting its lease       0.90 · ttl on the leader's clock
    silence(ttl)          the others may end it, at the earliest    1.02 · ttl on an observer's clock
    server_patience(ttl)  the server gives up its connection        1.10 · ttl on the server's clock

If the rate of every clock is within DRIFT of true time, the first is over before the others begin: 0.90 / (1 - 0.05) is
less than 1.02 / (1 + 0.05). A test checks that inequality.
"""

from __future__ import annotations

NEVER = float("inf")
LONG_AGO = float("-inf")
"""A due time that never comes, and one that is always past."""
RETRY_S = 0.05
"""The first pause after a failure, and the pause between two attempts at a row that is locked."""

DRIFT = 0.05
"""The share by which a clock may run fast or slow. What time it shows does not matter."""

MIN_TTL_S = 1.0
MAX_TTL_S = 3600.0
DEFAULT_TTL_S = 10.0
DEFAULT_MAX_TTL_S = 60.0
"""The longest TTL that a node may have in a namespace whose limit no operator has set, unless it is the first node."""

RIPENS_AFTER_S = 600.0
"""How old a raise of the largest TTL must be before a membership may rely on it. A promoted replica is assumed to lack
only commits that are younger than this."""

SLICE_S = 1.0
"""The longest wait on the server. A wait holds back the vacuum horizon."""
SHORTEST_SLICE_S = 0.2
"""The shortest wait, even if the server logs each one: a wait costs a round trip."""


def margin(ttl: float) -> float:
    """Return how much of its lease the leader does not use: drift, and time to stop its work."""
    return ttl / 10


def trust(ttl: float) -> float:
    """Return how long a leader trusts a renewal, from just before it was sent."""
    return ttl - margin(ttl)


def silence(ttl: float) -> float:
    """Return how long a member's count of renewals must stand still before an observer ends it."""
    return ttl * 1.02


def server_patience(ttl: float) -> float:
    """Return how long the server keeps a connection (and its sentinel) that has gone quiet.

    It is never less than the trust of its owner: a sentinel that is freed earlier would be a false proof of death.
    """
    return ttl + margin(ttl)


def first_limit(ttl: float) -> float:
    """Return the largest TTL of a namespace whose first node has this TTL (R16)."""
    return max(ttl, DEFAULT_TTL_S)


def renewal_interval(ttl: float) -> float:
    """Return the default time between two renewals."""
    return ttl / 4
