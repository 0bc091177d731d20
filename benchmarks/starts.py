"""Measures the start: from the start of a process until it leads, beside a bare program that does the least.

A first start is one in an empty database, where the node creates its tables. Every later one finds them. Tenure's
modules are compiled first, as an installer compiles those of the driver.
"""

from __future__ import annotations

import compileall
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import tenure

NODE = """
import time, tenure
with tenure.Node({url!r}) as node:
    election = node.election("role")
    election.wait()
    assert election.is_leader
    print(time.clock_gettime_ns(time.CLOCK_BOOTTIME), flush=True)
"""
POSTGRES_FLOOR = """
import time, psycopg
with psycopg.connect({url!r}, autocommit=True) as connection:
    connection.execute("select pg_advisory_lock(4711)")
    print(time.clock_gettime_ns(time.CLOCK_BOOTTIME), flush=True)
"""
SQLITE_FLOOR = """
import time, sqlite3
connection = sqlite3.connect({path!r})
connection.execute("create table if not exists leases (role text primary key, holder text, expires_at real)")
connection.execute("insert or replace into leases values ('role', 'me', ?)", (time.time() + 10,))
connection.commit()
print(time.clock_gettime_ns(time.CLOCK_BOOTTIME), flush=True)
"""


def compile_modules() -> None:
    """Write the bytecode of Tenure's modules, which an installer does, and a source tree may lack."""
    compileall.compile_dir(Path(tenure.__file__).parent, quiet=1)


def led_after_ms(program: str) -> float:
    """Run a program that prints when it led; return how long after its start that was."""
    began_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    done = subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE)
    return (int(done.stdout) - began_ns) / 1e6
