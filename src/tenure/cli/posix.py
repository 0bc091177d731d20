"""Refuses, on systems such as Windows, the commands that guard, freeze and kill processes."""

from __future__ import annotations

import os
import select
import signal

from tenure.cli import exit_codes
from tenure.cli.output import Ended

NEEDED = ((os, "fork"), (os, "killpg"), (os, "posix_spawn"), (select, "poll"), (signal, "SIGKILL"), (signal, "SIGSTOP"))
"""What these commands use, beyond what every system has."""


def require_posix(command: str, instead: str) -> None:
    """End the command with one line if the system lacks what it needs. ``instead`` says what works everywhere."""
    missing = [f"{module.__name__}.{name}" for module, name in NEEDED if not hasattr(module, name)]
    if missing:
        raise Ended(
            exit_codes.USAGE,
            f"`{command}` does not run on this system, which lacks {' and '.join(missing[:2])}: {instead}, or start it "
            "in a Linux container or under WSL",
        )
