"""gemstone_utils.election: a leader's row and step-by-step calls; elect() now and then, as its documentation has it."""

from __future__ import annotations

import time
from uuid import NAMESPACE_DNS, uuid5

NAME = "gemstone_utils"
PACKAGE = "gemstone-utils"
SERVER = "postgres"
SURVIVES = True
VARIANTS = {"expire 2 s": {"lease_s": 2, "poll_s": 0.5}, "default, expire 60 s": {"lease_s": 60, "poll_s": 20.0}}


class Candidate:
    renews_when_asked = True

    def __init__(self, url: str, name: str, lease_s: int, poll_s: float) -> None:
        import psycopg
        from gemstone_utils import election
        from gemstone_utils.db import init_db

        with psycopg.connect(url) as connection:  # two that create the tables at once collide, and one of them fails
            connection.execute("select pg_advisory_xact_lock(1)")
            init_db(url.replace("postgresql://", "postgresql+psycopg://"))
        election.set_expire(lease_s)
        self.election = election
        self.id = uuid5(NAMESPACE_DNS, name)
        self.poll_s = poll_s
        self.next = 0.0
        self.leads = False

    def wait(self) -> None:
        while not self._elect():
            time.sleep(self.poll_s)

    def _elect(self) -> bool:
        self.next = time.monotonic() + self.poll_s
        self.leads = self.election.elect(self.id) == self.id
        return self.leads

    def believes(self) -> bool:
        if time.monotonic() >= self.next:  # the main loop is what renews
            self._elect()
        return self.leads

    def check(self) -> bool:
        return bool(self.election.is_leader(self.id))

    def resign(self) -> None:
        self.election.unregister_candidate(self.id)
