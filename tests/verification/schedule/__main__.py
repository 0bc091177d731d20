"""Kill the leader of a schedule around due times; see ``kills``. Exits with 1 if a due time was lost or made twice."""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Iterator

from tests.support.mariadb import MariaDbServer
from tests.support.servers import PostgresServer, postgres_installations
from tests.verification.schedule.kills import kill_around_due_times

GOAL_MS = 100.0
"""The median start after a due time."""


@contextlib.contextmanager
def database(kind: str) -> Iterator[str]:
    """Yield the URL of an empty database."""
    if kind == "sqlite":
        with tempfile.TemporaryDirectory() as directory:
            yield f"sqlite:///{directory}/kills.db"
    elif kind == "mariadb":
        with MariaDbServer() as server:
            yield server.create_database()
    else:
        with PostgresServer(postgres_installations()[0]) as server:
            yield server.create_database()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--database", choices=("postgres", "mariadb", "sqlite"), default="postgres")
    parser.add_argument("--seed", type=int, default=15)
    parser.add_argument("--freeze", action="store_true", help="freeze the leader past its lease instead of killing it")
    options = parser.parse_args()
    frozen = {"freeze_s": 4.0, "ttl": 2.0, "pause_s": 0.3} if options.freeze else {}
    with database(options.database) as url:
        report = kill_around_due_times(url, options.kills, options.seed, **frozen)
    print(f"{options.database}: {report}")
    for what in (*report.unaccounted, *map(str, report.lost), *map(str, report.twice)):
        print(f"  {what}")
    slow = not frozen and sorted(report.starts_ms)[len(report.starts_ms) // 2] > GOAL_MS
    return 0 if report.passed and not slow else 1


if __name__ == "__main__":
    sys.exit(main())
