"""In the manner of Oban, which is written in Elixir: a row that expires by the clients' clocks, and a notification.

What Oban does was read in its source (lib/oban/peers/database.ex, mid 2026): in one transaction, every peer deletes an
expired row and upserts its own; one that does not lead does so every interval, the leader twice as often, both up to a
tenth earlier. The row expires after an interval, which is 30 s unless it is set. A leader that shuts down deletes the
row and notifies, and the others try at once. The table is unlogged.
"""

from __future__ import annotations

import datetime as dt
import random
import threading
from typing import Any

import psycopg

from benchmarks.peers.flag import Flag

NAME = "as Oban does it"
SERVER = "postgres"
SURVIVES = True
LEADER_BOOST, JITTER = 2, 0.1
VARIANTS = {"interval 1 s": {"lease_s": 1.0}, "default, interval 30 s": {"lease_s": 30.0}}

CREATE = "create unlogged table if not exists peers (name text primary key, node text, expires timestamptz)"
EXPIRE = "delete from peers where name = 'role' and expires < %(now)s"
ELECT = """
insert into peers values ('role', %(me)s, %(until)s)
on conflict (name) do update set expires = excluded.expires where peers.node = excluded.node
"""
RESIGN = "delete from peers where name = 'role' and node = %(me)s"


class Candidate(Flag):
    def __init__(self, url: str, name: str, lease_s: float) -> None:
        self.connection = psycopg.connect(url, autocommit=True)
        with self.connection.transaction():
            self.connection.execute("select pg_advisory_xact_lock(1)")
            self.connection.execute(CREATE)
        self.connection.execute("listen leader")
        self.name, self.interval_s = name, lease_s
        self.resigned = threading.Event()

    def wait(self) -> None:
        while not self._elect():
            for _ in self.connection.notifies(timeout=_jittered(self.interval_s), stop_after=1):
                pass
        threading.Thread(target=self._renew, daemon=True).start()

    def _elect(self) -> bool:
        now = dt.datetime.now(dt.timezone.utc)
        until = now + dt.timedelta(seconds=self.interval_s)
        told: dict[str, Any] = {"me": self.name, "now": now, "until": until}
        with self.connection.transaction():
            self.connection.execute(EXPIRE, told)
            self.leads = self.connection.execute(ELECT, told).rowcount == 1
        return self.leads

    def _renew(self) -> None:
        while self.leads and not self.resigned.wait(_jittered(self.interval_s / LEADER_BOOST)):
            self._elect()

    def resign(self) -> None:
        self.resigned.set()
        self.leads = False
        with self.connection.transaction():
            self.connection.execute(RESIGN, {"me": self.name})
            self.connection.execute("select pg_notify('leader', 'down')")


def _jittered(seconds: float) -> float:
    return seconds * (1 - random.uniform(0, JITTER))
