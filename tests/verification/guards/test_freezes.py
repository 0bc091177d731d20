"""An author forgot the fence, and leaders freeze: the guarded table takes no stale write; without a guard it does."""

from __future__ import annotations

import pytest

from tests.verification.guards.freezes import freeze_leaders

WRITES = 40
FRAMEWORKS = [("django", "postgres"), ("sqlalchemy", "postgres"), ("sqlalchemy", "mariadb")]


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("framework", "database"), FRAMEWORKS)
@pytest.mark.parametrize(
    ("guarded", "fenced"), [(True, False), (False, False), (True, True)], ids=["guarded", "control", "mended"]
)
def test_guarded_table_takes_no_stale_write(request, framework, database, guarded, fenced):
    """In the control run stale writes land. With the mistake mended, every write of a leader lands."""
    url = request.getfixturevalue(f"{database}_url")
    report = freeze_leaders(url, WRITES, framework, guarded=guarded, fenced=fenced)
    assert report.passed, f"{report}: {report.failures}"
    assert report.stale.total() >= WRITES
