"""By hand, the other way: a row with who and until when, by the database's clock, and a thread that renews it."""

from __future__ import annotations

import threading
import time

import psycopg

from benchmarks.peers.flag import Flag

NAME = "lease row by hand"
SERVER = "postgres"
SURVIVES = True
VARIANTS = {"lease 2 s": {"lease_s": 2.0, "poll_s": 0.5}, "default, lease 10 s": {"lease_s": 10.0, "poll_s": 3.0}}

CREATE = """
create table if not exists lease (role text primary key, holder text, until timestamptz);
insert into lease values ('role', null, '-infinity') on conflict do nothing;
"""
TAKE = """
update lease set holder = %(me)s, until = clock_timestamp() + make_interval(secs => %(lease)s)
where role = 'role' and (holder = %(me)s or until < clock_timestamp())
"""


class Candidate(Flag):
    def __init__(self, url: str, name: str, lease_s: float, poll_s: float) -> None:
        self.connection = psycopg.connect(url, autocommit=True)
        with self.connection.transaction():
            self.connection.execute(
                "select pg_advisory_xact_lock(1)"
            )  # two that create one table at once would collide
            self.connection.execute(CREATE)
        self.told = {"me": name, "lease": lease_s}
        self.poll_s = poll_s

    def wait(self) -> None:
        while not self._take():
            time.sleep(self.poll_s)
        threading.Thread(target=self._renew, daemon=True).start()

    def _take(self) -> bool:
        self.leads = self.connection.execute(TAKE, self.told).rowcount == 1
        return self.leads

    def _renew(self) -> None:
        while self.leads:
            time.sleep(self.poll_s)
            if self.leads:
                self._take()

    def resign(self) -> None:
        self.leads = False
        self.connection.execute("update lease set until = '-infinity' where holder = %(me)s", self.told)
