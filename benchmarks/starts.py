"""Measures the start: from the start of a process until it leads, beside a bare program that does the least.

A first start is one in an empty database, where the node creates its tables. Every later one finds them. Tenure's
modules are compiled first, as an installer compiles those of the driver.
"""

from __future__ import annotations

import compileall
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tenure
from tests.support.servers import PostgresServer, postgres_installations

Pairs = list[tuple[float, float]]
"""Milliseconds until the bare program led, and until a node led."""

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


def pair(floor: str, node: str, number: int) -> tuple[float, float]:
    """Measure both programs, in the other order every second time."""
    if number % 2:
        node_ms = led_after_ms(node)
        return led_after_ms(floor), node_ms
    return led_after_ms(floor), led_after_ms(node)


def on_postgres(rounds: int) -> dict[str, Pairs]:
    with PostgresServer(postgres_installations()[0]) as server:
        url = server.create_database("again")
        floor, node = POSTGRES_FLOOR.format(url=url), NODE.format(url=url)
        pair(floor, node, 0)  # makes the tables
        again = [pair(floor, node, number) for number in range(rounds)]
        first = []
        for number in range(rounds):
            url = server.create_database()
            first.append(pair(POSTGRES_FLOOR.format(url=url), NODE.format(url=url), number))
    return {"PostgreSQL": again, "PostgreSQL, an empty database": first}


def on_sqlite(rounds: int) -> dict[str, Pairs]:
    with tempfile.TemporaryDirectory() as directory:

        def programs(name: str) -> tuple[str, str]:
            return SQLITE_FLOOR.format(path=f"{directory}/{name}-floor.db"), NODE.format(
                url=f"sqlite:///{directory}/{name}.db"
            )

        pair(*programs("again"), 0)  # makes the tables
        again = [pair(*programs("again"), number) for number in range(rounds)]
        first = [pair(*programs(f"first-{number}"), number) for number in range(rounds)]
    return {"SQLite": again, "SQLite, a new file": first}
