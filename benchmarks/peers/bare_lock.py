"""The floor: a bare waiter in pg_advisory_lock. Nothing that lives on PostgreSQL can be told of a death any sooner."""

from __future__ import annotations

import psycopg

from benchmarks.peers.flag import Flag

NAME = "bare pg_advisory_lock"
SERVER = "postgres"
SURVIVES = False
VARIANTS = {"": {}}


class Candidate(Flag):
    def __init__(self, url: str, _: str) -> None:
        self.connection = psycopg.connect(url, autocommit=True)

    def wait(self) -> None:
        self.connection.execute("select pg_advisory_lock(4711)")
        self.leads = True

    def resign(self) -> None:
        self.leads = False
        self.connection.execute("select pg_advisory_unlock(4711)")
