"""Marks that tests in several folders have."""

from __future__ import annotations

import pytest

from tests.support.facades import FACADE

sync_only = pytest.mark.skipif(FACADE == "async", reason="about threads; see test_async_*.py")
