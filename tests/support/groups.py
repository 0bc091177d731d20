"""Takes the name of its group off a test's id, in the process that all reports come to.

xdist puts it there: `tests/unit/test_x.py::test_y@computing`. A run in one process knows the test without it, so
`--last-failed` would not find the test, and would pass without it if it finds another.
"""

from __future__ import annotations

import pytest


def without_group(nodeid: str) -> str:
    """The id as it is in a run without groups. An @ before the last bracket belongs to the test's parameters."""
    name, _, group = nodeid.rpartition("@")
    return nodeid if not name or "]" in group else name


class Names:
    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        report.nodeid = without_group(report.nodeid)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # xdist itself needs the groups in its workers
        config.pluginmanager.register(Names())
