"""Where the servers and files of the tests are."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

MEMORY = Path("/dev/shm")
ENOUGH_MEMORY = 4 * 2**30


def work_in_memory() -> None:
    """Have the servers and the files of the tests in memory, where the machine has enough and nobody chose a TMPDIR.

    A new PostgreSQL database is three hundred files. On a disk that takes ten times as long, and most of it is CPU.
    """
    if "TMPDIR" not in os.environ and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > ENOUGH_MEMORY:
        os.environ["TMPDIR"] = str(MEMORY)
        tempfile.tempdir = None  # it may have been asked for already
