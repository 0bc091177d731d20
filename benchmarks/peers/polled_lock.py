"""By hand, as many have it: pg_try_advisory_lock, again every five seconds, and a flag."""

from __future__ import annotations

import time

import psycopg

NAME = "pg_try_advisory_lock by hand"
SERVER = "postgres"
SURVIVES = False
VARIANTS = {"polled every 5 s": {"poll_s": 5.0}}


class Candidate:
    def __init__(self, url: str, _: str, poll_s: float) -> None:
        self.connection = psycopg.connect(url, autocommit=True)
        self.poll_s = poll_s
        self.leads = False

    def wait(self) -> None:
        while not self.connection.execute("select pg_try_advisory_lock(4711)").fetchone()[0]:
            time.sleep(self.poll_s)
        self.leads = True

    def believes(self) -> bool:
        return self.leads

    def check(self) -> bool:
        return self.leads

    def resign(self) -> None:
        self.leads = False
        self.connection.execute("select pg_advisory_unlock(4711)")
