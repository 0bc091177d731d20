"""python-redis-lock: a key with an expiry, renewed by a thread; a waiter is told of a release by a list."""

from __future__ import annotations

NAME = "python-redis-lock"
PACKAGE = "python-redis-lock"
SERVER = "redis"
SURVIVES = True
VARIANTS = {"expire 1 s": {"lease_s": 1}, "default, expire 60 s": {"lease_s": 60}}


class Candidate:
    def __init__(self, url: str, name: str, lease_s: int) -> None:
        import redis
        import redis_lock

        # A waiter waits for as long as the lease, and redis-py would give up after 5 s.
        client = redis.Redis.from_url(url, socket_timeout=None)
        self.lock = redis_lock.Lock(client, "role", expire=lease_s, auto_renewal=True, id=name)
        self.leads = False

    def wait(self) -> None:
        self.lock.acquire()
        self.leads = True

    def believes(self) -> bool:
        return self.leads  # the block under the lock is told nothing

    def check(self) -> bool:
        return bool(self.lock.get_owner_id() == self.lock.id)

    def resign(self) -> None:
        self.leads = False
        self.lock.release()
