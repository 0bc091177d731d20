"""PALs: an advisory lock by SQLAlchemy, which waits for 30 s at a time."""

from __future__ import annotations

from benchmarks.peers.flag import Flag

NAME = "pals"
PACKAGE = "pals"
SERVER = "postgres"
SURVIVES = False
VARIANTS = {"": {}}


class Candidate(Flag):
    def __init__(self, url: str, _: str) -> None:
        import pals

        self.lock = pals.Locker("bench", url.replace("postgresql://", "postgresql+psycopg://")).lock("role")

    def wait(self) -> None:
        while not self.lock.acquire():
            pass
        self.leads = True

    def resign(self) -> None:
        self.leads = False
        self.lock.release()
