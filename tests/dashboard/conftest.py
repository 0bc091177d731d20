"""Tests of the dashboard. Those in a real browser are marked `frameworks`."""

from __future__ import annotations

import contextlib

import pytest

import tenure
from tests.support.store_by_hand import until

OPERATOR, VIEWER = "operator-token-of-many-characters", "viewer-token-of-many-characters"


@contextlib.contextmanager
def three(url):
    """Three nodes, and a role for which all of them stand; the first leads."""
    names = ("worker-1", "worker-2", "worker-3")
    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(tenure.Node(url, name=name, ttl=30, metadata={"zone": "<b>"})) for name in names]
        nodes[0].election("scheduler").wait(20)
        for node in nodes:
            node.election("scheduler")
        until(lambda: len(nodes[0].election("scheduler").candidates()) == 3, "three candidates")
        yield nodes


@pytest.fixture
def three_nodes(store_url):
    with three(store_url) as nodes:
        yield nodes
