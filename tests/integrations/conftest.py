"""Tests of the integrations: `make test ARGS="-m frameworks"` runs these and no others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.frameworks)


@pytest.fixture
def _fresh_runs() -> Iterator[None]:
    """Forget the runs of APScheduler's jobs that earlier tests have recorded."""
    from tests.integrations.apscheduler_jobs import runs

    runs.__init__()
    yield
    runs.hold.set()
    for store in runs.stores:  # a job that ended after its scheduler may have opened a connection anew
        store.engine.dispose()
