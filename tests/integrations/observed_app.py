"""A replica with a service and a page of metrics, on the port that it is told. SIGUSR1 has it hand over."""

from __future__ import annotations

import signal
import sys
import threading

import anyio
import prometheus_client

import tenure
from tenure.integrations.prometheus import observe

node = tenure.Node()
asked = threading.Event()


@node.leader_only("r")
async def work():
    await anyio.sleep_forever()


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, lambda *_: asked.set())
    observe(node)
    prometheus_client.start_http_server(int(sys.argv[1]), "127.0.0.1")
    with node:
        while True:
            asked.wait()
            asked.clear()
            node.election("r").resign()
