"""Tenure, as the README has it; and on other databases, behind a pooler, and with TLS."""

from __future__ import annotations

from typing import Any

from benchmarks.peers import WAITS, Variant

NAME = "tenure"
SERVER = "postgres"
SURVIVES = True
TTL = {"lease_s": 10.0}
PLAIN = ("start", "crash", "hand-over", "rest")
VARIANTS = {
    "TTL 10 s": TTL,
    "to a named node": Variant(TTL, figures=("hand-over",), every=2, names_successor=True),
    "strict, TTL 10 s": Variant({**TTL, "takeover": "strict"}, waits=("crash",)),
    "TLS and SCRAM": Variant(TTL, "postgres-tls", PLAIN, every=2),
    "behind PgBouncer, with direct_url": Variant(TTL, "pgbouncer-direct", PLAIN, every=2),
    # Without a sentinel a death is silence, and without notifications a vacancy is seen by the next look.
    "behind PgBouncer, without direct_url": Variant(TTL, "pgbouncer", PLAIN, WAITS, every=2),
    "on MariaDB": Variant(TTL, "mariadb", PLAIN, every=2),
    "on SQLite": Variant(TTL, "sqlite", PLAIN, every=2),
}


class Candidate:
    def __init__(self, address: str, name: str, lease_s: float, takeover: str = "instant", roles: int = 1) -> None:
        import tenure

        url, *direct = address.split()
        more: dict[str, Any] = {"direct_url": direct[0]} if direct else {}
        self.node = tenure.Node(url, name=name, ttl=lease_s, takeover=takeover, **more).start()
        self.elections = [self.node.election(f"role-{number}") for number in range(roles)]
        self.last = self.elections[-1]

    def wait(self) -> None:
        for election in self.elections:
            election.wait()

    def believes(self) -> bool:
        return self.last.is_leader

    def check(self) -> bool:
        return self.last.is_leader

    def resign(self, to: str | None = None) -> None:
        self.last.resign(to)
