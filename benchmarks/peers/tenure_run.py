"""`tenure run`: the leader's command is what starts, and `tenure resign` moves it.

The hand-over takes from the start of the program `tenure resign` to the first output of the command elsewhere, so the
start of an interpreter is part of it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.peers import Variant

NAME = "tenure run"
SERVER = "postgres"
SURVIVES = True
VARIANTS = {"moved by tenure resign": Variant(figures=("start", "crash", "hand-over"), every=2)}
SETTLE_S = 1.0
"""It does not say when it stands."""

TENURE = str(Path(sys.executable).with_name("tenure"))


def command(url: str, name: str) -> list[str]:
    """Return the program and its arguments."""
    run = [TENURE, "run", "--role", "role", "--url", url, "--name", name]
    return [*run, "--", "sh", "-c", "echo lead; exec sleep 1000"]


def resign_command(url: str) -> list[str]:
    """Return the program that has the leader hand over."""
    return [TENURE, "resign", "role", "--url", url]
