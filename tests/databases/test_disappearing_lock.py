"""The trap into which people fall, and that we do not: the page about it runs as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from tests.support.cluster import ROOT


def test_lock_on_a_pool_is_gone_and_ours_is_not(postgres_url):
    page = (ROOT / "docs" / "how-to" / "disappearing-lock.md").read_text()
    program = re.search(r"```py\n(.*?)```", page, re.DOTALL).group(1)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env={**os.environ, "DATABASE_URL": postgres_url},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "I am active: True",
        "another client is active, too: True",
        "I lead: True",
        "another node leads, too: False",
    ]
