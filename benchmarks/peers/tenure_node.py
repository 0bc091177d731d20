"""Tenure, as the README has it."""

from __future__ import annotations

NAME = "tenure"
SERVER = "postgres"
SURVIVES = True
VARIANTS = {"TTL 10 s": {"lease_s": 10.0}, "strict, TTL 10 s": {"lease_s": 10.0, "takeover": "strict"}}


class Candidate:
    def __init__(self, url: str, name: str, lease_s: float, takeover: str = "instant", roles: int = 1) -> None:
        import tenure

        self.node = tenure.Node(url, name=name, ttl=lease_s, takeover=takeover).start()
        self.elections = [self.node.election(f"role-{number}") for number in range(roles)]
        self.last = self.elections[-1]

    def wait(self) -> None:
        for election in self.elections:
            election.wait()

    def believes(self) -> bool:
        return self.last.is_leader

    def check(self) -> bool:
        return self.last.is_leader

    def resign(self) -> None:
        self.last.resign()
