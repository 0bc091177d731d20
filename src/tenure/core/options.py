"""The options of a node, as far as its decisions depend on them."""

from __future__ import annotations

from typing import NamedTuple

from tenure.core import timing


class ProtocolOptions(NamedTuple):
    """The options of a node. They do not change while it runs."""

    name: str
    ttl: float = timing.DEFAULT_TTL_S
    renew_every: float = timing.DEFAULT_TTL_S / 4
    takeover: str = "instant"
    sentinels: bool = True
    """Whether to hold a sentinel, or to rely on the lease alone."""
    metadata: str = "{}"
