"""kazoo: ZooKeeper's election, an ephemeral node that goes with its session; its connection's state is local."""

from __future__ import annotations

import logging

NAME = "kazoo"
PACKAGE = "kazoo"
SERVER = "zookeeper"
SURVIVES = True
VARIANTS = {"session 1 s": {"lease_s": 1.0}, "default, session 10 s": {"lease_s": 10.0}}


class Candidate:
    def __init__(self, url: str, name: str, lease_s: float) -> None:
        from kazoo.client import KazooClient

        logging.getLogger("kazoo").setLevel(logging.CRITICAL)
        self.client = KazooClient(hosts=url, timeout=lease_s)
        self.client.start()
        self.lock = self.client.Lock("/role", name)  # what its Election is made of

    def wait(self) -> None:
        self.lock.acquire()

    def believes(self) -> bool:
        return bool(self.lock.is_acquired and self.client.connected)

    def check(self) -> bool:
        return self.believes()

    def resign(self) -> None:
        self.lock.release()
