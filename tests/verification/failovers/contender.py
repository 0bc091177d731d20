"""The program of one process: a node that writes fenced all the time, and beside it a lease as one writes it by hand.

Both write a row about every 30 ms and record what was acknowledged. The hand-written lease is a row with `expires_at`,
renewed in time and looked at before each write. Its writes are plain ones that do not wait for a disk or a standby
(`synchronous_commit = off`).
"""

from __future__ import annotations

import threading
import time
from typing import Any

import tenure
from tests.support import node_process
from tests.support.ledger_process import LEDGERS, LedgerProgram
from tests.verification.torture.contender import Client, Contender

LEASE_S = 5.0
TABLES = [
    LEDGERS["postgresql"],
    "create table probes (n bigserial primary key)",
    "create table leases (name text primary key, holder text, expires_at timestamptz)",
    "insert into leases values ('plain', '', now())",
    "create table plain (n bigserial primary key, node text, element text)",
]
TAKE = (
    "update leases set holder = %s, expires_at = clock_timestamp() + %s * interval '1 second'"
    " where name = 'plain' and (holder = %s or expires_at < clock_timestamp())"
)
SILENCE = "connect_timeout=2&tcp_user_timeout=2000&keepalives_idle=1&keepalives_interval=1&keepalives_count=2"
"""Parameters of a URL: a connection on which nothing comes back is given up after 2 s."""


def impatient(url: str, *more: str) -> str:
    return url + ("&" if "?" in url else "?") + "&".join([SILENCE, *more])


class Measured(Contender):
    """What it records beside a plain node: each fenced write with its element, and each write under the lease."""

    def start(self, at_ns: str | None = None) -> dict[str, Any]:
        reply = LedgerProgram.start(self, at_ns)
        assert self.election is not None
        client = Client()
        client.url = impatient(client.url, "options=-csynchronous_commit%3Doff")
        threading.Thread(target=self.keep, args=(self.lease, client, self.election), daemon=True).start()
        return reply

    def lease(self, client: Client, _: tenure.Election) -> None:
        until = time.monotonic() + LEASE_S
        if client(TAKE, self.name, LEASE_S, self.name).rowcount != 1:
            time.sleep(0.2)
            return
        while time.monotonic() < until - LEASE_S / 2:
            element = next(self.elements)
            client("insert into plain (node, element) values (%s, %s)", self.name, element)
            self.recorder.note("plain", element=element)
            time.sleep(0.03)


if __name__ == "__main__":
    node_process.main(Measured)
