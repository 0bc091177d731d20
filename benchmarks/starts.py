"""From the start of a process to its first True, beside the least that a program does which leads there.

Each program is as short as it can be, so that nothing but what is measured is in it. The clock starts before the
process is made and stops in the process, when it reads True (`tenure run`: when its command runs).
"""

from __future__ import annotations

import compileall
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import tenure

SAY = "import time; print(time.clock_gettime_ns(time.CLOCK_BOOTTIME), flush=True)"
PASS = SAY
BARE_POSTGRES = f"""
import sys, psycopg
connection = psycopg.connect(sys.argv[1], autocommit=True)
assert connection.execute("select pg_try_advisory_lock(4711)").fetchone() == (True,)
{SAY}
"""
BARE_SQLITE = f"""
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1].removeprefix("sqlite:///"))
connection.execute("create table if not exists lease (role text primary key, holder text, until real)")
connection.execute("insert or replace into lease values ('role', 'me', 0)")
connection.commit()
{SAY}
"""
NODE = f"""
import sys, tenure
with tenure.Node(sys.argv[1]) as node:
    election = node.election("role")
    election.wait()
    assert election.is_leader
    {SAY}
"""


@dataclass(frozen=True)
class Start:
    """One program, where it runs, and what it is compared with."""

    what: str
    program: str | None
    """None is `tenure run`."""
    server: str
    fresh: bool = False
    """Whether it finds an empty database, and creates the tables."""
    floor: str = ""
    at_most: float | None = None

    @property
    def name(self) -> str:
        where = {"postgres": ", PostgreSQL", "sqlite": ", SQLite"}.get(self.server, "")
        return self.what + where + (", empty database" if self.fresh else "")

    def ms(self, url: str) -> float:
        """Run it; return how long it took."""
        began, began_by_date = time.clock_gettime_ns(time.CLOCK_BOOTTIME), time.time_ns()
        if self.program is None:
            command = [Path(sys.executable).with_name("tenure"), "run", "--role", "role", "--url", url, "--"]
            return (int(_output(*command, "date", "+%s%N")) - began_by_date) / 1e6
        return (int(_output(sys.executable, "-c", self.program, url)) - began) / 1e6


def _output(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


STARTS = [
    Start("interpreter that does nothing", PASS, ""),
    *(
        start
        for fresh in (False, True)
        for start in (
            Start("bare: psycopg, connect, lock", BARE_POSTGRES, "postgres", fresh),
            Start("Node", NODE, "postgres", fresh, "bare: psycopg, connect, lock", 1.2),
            Start("bare: sqlite3, write a lease row", BARE_SQLITE, "sqlite", fresh),
            Start("Node", NODE, "sqlite", fresh, "bare: sqlite3, write a lease row", 1.5),
            Start("tenure run", None, "sqlite", fresh, "bare: sqlite3, write a lease row"),
        )
    ),
]
"""Each floor comes before those that are compared with it, on the same server and equally fresh."""


def compile_modules() -> None:
    """Write the bytecode of Tenure's modules, as an installer does: a source tree may lack it."""
    compileall.compile_dir(Path(tenure.__file__).parent, quiet=1)


def floor_of(start: Start) -> Start:
    """Return what a program is compared with."""
    return next(one for one in STARTS if (one.what, one.server, one.fresh) == (start.floor, start.server, start.fresh))
