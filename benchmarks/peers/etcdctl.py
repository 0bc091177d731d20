"""etcd, by its own program: `etcdctl lock` with the TTL that it takes, and `etcdctl elect`, whose 60 s are fixed.

The program leads from its first line on until it ends, and hands over on SIGINT.
"""

from __future__ import annotations

NAME = "etcdctl"
SERVER = "etcd"
SURVIVES = True
VARIANTS = {"lock, TTL 2 s": {"lease_s": 2}, "default elect, TTL 60 s": {"lease_s": 60, "elect": True}}
ENVIRONMENT = {"ETCDCTL_API": "3"}


def command(url: str, name: str, lease_s: int, *, elect: bool = False) -> list[str]:
    """Return the program and its arguments."""
    endpoint, _, role = url.partition("/")
    what = ["elect", role, name] if elect else ["lock", f"--ttl={lease_s}", role]
    return ["etcdctl", f"--endpoints={endpoint}", *what]
