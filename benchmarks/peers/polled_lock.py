"""By hand, as many have it: pg_try_advisory_lock, again every five seconds, and a flag."""

from __future__ import annotations

import time

from benchmarks.peers import WAITS, Variant, bare_lock

NAME = "pg_try_advisory_lock by hand"
SERVER = "postgres"
SURVIVES = False
VARIANTS = {"polled every 5 s": Variant({"poll_s": 5.0}, waits=WAITS)}


class Candidate(bare_lock.Candidate):
    def __init__(self, url: str, name: str, poll_s: float) -> None:
        super().__init__(url, name)
        self.poll_s = poll_s

    def wait(self) -> None:
        while not self.connection.execute("select pg_try_advisory_lock(4711)").fetchone()[0]:
            time.sleep(self.poll_s)
        self.leads = True
