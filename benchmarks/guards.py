"""What a guard costs, against the same table without one: pairs of runs, one after the other.

The time is the processor's, spent in the server: other programs of the machine disturb it least. The writes are in a
fenced transaction, which is rolled back afterwards.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import tenure
from tests.support.store_by_hand import connected, execute

PAIRS = 31
STATEMENTS = 100
BULK_ROWS = 20_000
ROWS = 5_000
"""Where a trigger runs for each row, so many show what it costs."""
COLUMNS = "(n int primary key, note varchar(20))"
PARTITIONED = ("create table {0} (n int primary key, note varchar(20)) partition by range (n)",
               "create table {0}_low partition of {0} for values from (minvalue) to (2500)",
               "create table {0}_high partition of {0} for values from (2500) to (maxvalue)")  # fmt: skip
BULK = {
    "postgresql": "insert into {} select n, 'a note' from generate_series(1, {}) n",
    "mysql": "insert into {} select seq, 'a note' from seq_1_to_{}",
}


class Cost(NamedTuple):
    """Medians of the pairs: microseconds with the guard, and more than without it; and the ratio of the two."""

    us: float
    more_us: float
    ratio: float
    p95_more_us: float


def cpu_s(pid: int) -> float:
    """Return how long the threads of a process have run."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


def single(connection: Any, table: str) -> None:
    """Send statements one by one, as programs do that wait for each answer."""
    with contextlib.closing(connection.cursor()) as cursor:
        for number in range(STATEMENTS):
            cursor.execute(f"insert into {table} values (%s, %s)", (number, "a note"))


def pipelined(connection: Any, table: str) -> None:
    """Send statements without waiting for each answer: the server's caches stay warm."""
    with connection.cursor() as cursor:
        rows = [(number, "a note") for number in range(STATEMENTS)]
        cursor.executemany(f"insert into {table} values (%s, %s)", rows)


def bulk(connection: Any, table: str, rows: int = BULK_ROWS) -> None:
    database = "postgresql" if hasattr(connection, "pipeline") else "mysql"
    connection.execute(BULK[database].format(table, rows))


def some_rows(connection: Any, table: str) -> None:
    bulk(connection, table, ROWS)


def cost(
    connection: Any, term: tenure.Term, pid: int, write: Callable[[Any, str], None], tables: tuple[str, str], per: int
) -> Cost:
    """Write to the table without a guard and to the one with it, in turn."""
    pairs = []
    for _ in range(PAIRS):
        took = []
        for table in tables:
            term.fence(connection)
            began = cpu_s(pid)
            write(connection, table)
            took.append((cpu_s(pid) - began) / per * 1e6)
            connection.rollback()
        pairs.append(took)
    more = sorted(guarded - plain for plain, guarded in pairs)
    return Cost(
        statistics.median(guarded for _, guarded in pairs),
        statistics.median(more),
        statistics.median(guarded / plain for plain, guarded in pairs),
        more[int(len(more) * 0.95)],
    )


@contextlib.contextmanager
def led(url: str) -> Iterator[tuple[tenure.Term, Any]]:
    """A term, and a connection of the application; `plain` is a table, and `guarded` one that the role guards."""
    with tenure.Node(url, ttl=30) as node, node.lead("billing") as term, connected(url) as connection:
        for table in ("plain", "guarded"):
            execute(url, f"create table {table} {COLUMNS}")
        with tenure.Registry(url) as registry:
            registry.guard("guarded", "billing")
        yield term, connection


def on_postgres(url: str) -> dict[str, Cost]:
    with led(url) as (term, connection):
        for table in ("parts", "guarded_parts"):
            execute(url, *(statement.format(table) for statement in PARTITIONED))
        with tenure.Registry(url) as registry:
            registry.guard("guarded_parts", "billing")
        what = connection, term, connection.info.backend_pid
        return {
            "statement": cost(*what, single, ("plain", "guarded"), STATEMENTS),
            "statement in a pipeline": cost(*what, pipelined, ("plain", "guarded"), STATEMENTS),
            "bulk": cost(*what, bulk, ("plain", "guarded"), 1),
            "row of a partitioned table": cost(*what, some_rows, ("parts", "guarded_parts"), ROWS),
        }


def on_mariadb(url: str, pid: int) -> dict[str, Cost]:
    with led(url) as (term, connection):
        return {
            "statement": cost(connection, term, pid, single, ("plain", "guarded"), STATEMENTS),
            "row in bulk": cost(connection, term, pid, some_rows, ("plain", "guarded"), ROWS),
        }
