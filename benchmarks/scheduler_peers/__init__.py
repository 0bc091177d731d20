"""Schedulers that people use instead of Tenure's: each a small module with one interface, so that all are killed alike.

A module says, at its top,

    NAME        as the table shows it
    PACKAGES    whose releases are compared
    VARIANTS    how it is set, by the words that the table shows: the options given to its `run`
    REPLICAS    how many processes run, by variant, if not three
    SERVER      "redis", if it needs one beside PostgreSQL; `run` gets its URL and a directory then

and has a function `run(url, **options)`, which one process (`program`) calls. For each run it calls `write`,
and says `elected`, so that a process is killed that works.
"""

from __future__ import annotations

import time
from typing import Any

INSERT = "insert into effects (job, due_us, at_us, token, attempt) values ('tick', %s, %s, 0, 1)"
MODULES = ("apscheduler_lock", "celery_beat", "procrastinate_worker")


def write(connection: Any, due_s: int) -> None:
    """Record a run, over a psycopg connection that commits by itself."""
    connection.execute(INSERT, [due_s * 1_000_000, time.time_ns() // 1000])
