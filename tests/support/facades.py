"""Which facade the tests run over: `Node` itself, or with FACADE=async `AsyncNode` (tests/support/async_as_sync.py)."""

from __future__ import annotations

import os

import tenure

FACADE = os.environ.get("FACADE") or "sync"


def install() -> None:
    """Let `tenure.Node` be the facade that the environment asks for."""
    if FACADE == "async":
        from tests.support import async_as_sync  # not above: importing it takes longer than all the rest of a node

        tenure.Node = async_as_sync.Node  # type: ignore[misc,assignment]
