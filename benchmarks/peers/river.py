"""In the manner of River, which is written in Go: a row that expires, and a notification when its leader resigns.

What River does was read in its source (internal/leadership/elector.go, mid 2026): every client tries to insert the row
every 5 to 6 s, after deleting an expired one; the leader renews it every 5 s; it expires 15 s after the last renewal,
and the leader trusts it for a second less. A leader that resigns deletes the row and notifies, and the others try after
up to 50 ms. The table is unlogged. The intervals are no settings of its clients, so this is the shortest lease.
"""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import psycopg

from benchmarks.peers import Variant
from benchmarks.peers.flag import Flag

NAME = "as River does it"
SERVER = "postgres"
SURVIVES = True
PADDING_S, MARGIN_S, LONGEST_JITTER_S, LONGEST_PAUSE_S = 10.0, 1.0, 1.0, 0.05
VARIANTS = {"lease 15 s (fixed)": Variant({"lease_s": 15.0, "poll_s": 5.0}, waits=("crash",))}

CREATE = """
create unlogged table if not exists leader (
    only_one boolean primary key default true check (only_one), client text, elected timestamptz, expires timestamptz
)
"""
EXPIRE = "delete from leader where expires < now()"
ELECT = """
insert into leader (client, elected, expires) values (%(me)s, now(), now() + make_interval(secs => %(lease)s))
on conflict do nothing returning elected
"""
RENEW = """
update leader set expires = now() + make_interval(secs => %(lease)s)
where client = %(me)s and elected = %(elected)s and expires >= now()
"""
RESIGN = """
with gone as (delete from leader where client = %(me)s and elected = %(elected)s returning client)
select pg_notify('leadership', client) from gone
"""


class Candidate(Flag):
    def __init__(self, url: str, name: str, lease_s: float, poll_s: float) -> None:
        assert lease_s == poll_s + PADDING_S
        self.connection = psycopg.connect(url, autocommit=True)
        with self.connection.transaction():
            self.connection.execute("select pg_advisory_xact_lock(1)")
            self.connection.execute(CREATE)
        self.connection.execute("listen leadership")
        self.told: dict[str, Any] = {"me": name, "lease": lease_s}
        self.poll_s = poll_s
        self.trusted_until = 0.0

    def wait(self) -> None:
        while not self._elect():
            seconds = self.poll_s + random.uniform(0, LONGEST_JITTER_S)
            for _ in self.connection.notifies(timeout=seconds, stop_after=1):
                time.sleep(random.uniform(0, LONGEST_PAUSE_S))
        self.leads = True
        threading.Thread(target=self._renew, daemon=True).start()

    def _elect(self) -> bool:
        began = time.monotonic()
        with self.connection.transaction():
            self.connection.execute(EXPIRE)
            elected = self.connection.execute(ELECT, self.told).fetchone()
        if elected is None:
            return False
        self.told["elected"] = elected[0]
        self._trust_from(began)
        return True

    def _trust_from(self, began: float) -> None:
        self.trusted_until = began + self.told["lease"] - MARGIN_S

    def _renew(self) -> None:
        while self.leads:
            time.sleep(self.poll_s)
            began = time.monotonic()
            if self.leads and began < self.trusted_until and self.connection.execute(RENEW, self.told).rowcount == 1:
                self._trust_from(began)
            else:
                self.leads = False

    def resign(self) -> None:
        self.leads = False
        self.connection.execute(RESIGN, self.told)
