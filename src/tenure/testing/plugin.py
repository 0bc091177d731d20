"""A plugin of pytest: ``pytest_plugins = ["tenure.testing.plugin"]`` in your ``conftest.py`` loads it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tenure.testing import LocalNode


@pytest.fixture
def leading_node() -> Iterator[LocalNode]:
    """Return a node that leads every role that it stands for, without a database; see :class:`LocalNode`."""
    with LocalNode() as node:
        yield node
