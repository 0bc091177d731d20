"""The floor of a hand-over: a durable commit, a notification, and another process's durable commit. It elects nobody.

The one who resigns writes a row and notifies, in one transaction; the one who waits writes a row when the notification
arrives. Both transactions are in one round trip each, and prepared. Whatever is durable and told by the database needs
these two commits.
"""

from __future__ import annotations

import psycopg

from benchmarks.peers import Variant
from benchmarks.peers.flag import Flag

NAME = "two commits and a notification"
SERVER = "postgres"
SURVIVES = False
VARIANTS = {"": Variant(figures=("hand-over",), nodes=2)}
LISTENS_S = 60.0

CREATE = """
create table if not exists floor (name text primary key, n int);
insert into floor values ('resigns', 0), ('takes', 0) on conflict do nothing;
"""
WRITE = "update floor set n = n + 1 where name = %s"
TELL = f"with written as ({WRITE} returning n) select pg_notify('floor', 'resigned') from written"


class Candidate(Flag):
    def __init__(self, url: str, _: str) -> None:
        self.connection = psycopg.connect(url, autocommit=True, prepare_threshold=0)
        with self.connection.transaction():
            self.connection.execute("select pg_advisory_xact_lock(1)")
            self.connection.execute(CREATE, prepare=False)
        self.connection.execute("listen floor")
        self.connection.execute(WRITE, ["takes"])  # it is prepared now

    def wait(self) -> None:
        (first,) = self.connection.execute("select pg_try_advisory_lock(4711)").fetchone()
        if first:
            self.connection.execute("unlisten floor")
            self.connection.execute(TELL, ["resigns"])  # nobody listens yet
        else:
            list(self.connection.notifies(timeout=LISTENS_S, stop_after=1))
            self.connection.execute(WRITE, ["takes"])
        self.leads = True

    def resign(self) -> None:
        self.leads = False
        self.connection.execute(TELL, ["resigns"])
