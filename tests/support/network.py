"""A network of two machines that a test can cut: two network namespaces joined by one cable.

Both ends of the cable (a veth pair) are made inside the namespaces, with addresses reserved for
documentation, so the host's own network never sees any of it.

A cut loses packets without a word, as a pulled cable or a broken switch does: no reset, no ICMP,
established connections stay open on both sides. That is the fault in which a server holds a dead client's
locks. A firewall rule would do it, but iptables and netem are missing in many kernels that tests run in.
Here the sender's (permanent) neighbour entry is given a hardware address that nobody has: the frames still
leave, and the receiver's kernel drops them as somebody else's. Each direction has its own entry, so a cut
can be one-way.

What was sent during a cut is sent again by TCP after heal(), with its usual back-off: about as late again as
the cut was long.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tests.support.servers import Guard

if TYPE_CHECKING:
    from typing_extensions import Self

Side = Literal["client", "server"]

CLIENT_ADDRESS = "192.0.2.1"
SERVER_ADDRESS = "192.0.2.2"
DEVICE = "cable"
CLIENT_MAC = "02:00:00:00:00:01"
SERVER_MAC = "02:00:00:00:00:02"
NOBODYS_MAC = "02:00:00:00:00:ff"

_numbers = itertools.count(1)


@functools.cache
def why_unavailable() -> str | None:
    """Why namespaces cannot be made here, or None. Tried out, since a container's root may lack the right."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None or shutil.which("setpriv") is None:
        return "network namespaces need `ip` (iproute2) and `setpriv` (util-linux)"
    try:
        Network().close()
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made: {error.stderr.strip()}"
    return None


def available() -> bool:
    return why_unavailable() is None


class Network:
    """Two namespaces, `client` and `server` (their names), and the cable between them.

    >>> with Network() as network:
    ...     process = network.run(network.server, ["python3", "-m", "http.server"])
    ...     network.cut()
    """

    client_address = CLIENT_ADDRESS
    server_address = SERVER_ADDRESS

    def __init__(self) -> None:
        name = f"tenure-{os.getpid()}-{next(_numbers)}"  # the pid keeps parallel test processes apart
        self.client, self.server = f"{name}-client", f"{name}-server"
        self._processes: list[subprocess.Popen[Any]] = []
        # If we are killed, somebody has to take the names away.
        self._guard = Guard('read _; ip netns del "$1"; ip netns del "$2"', self.client, self.server)
        atexit.register(self.close)
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill what run() started and remove the namespaces. May be called twice."""
        if self._guard.is_inherited:
            return
        atexit.unregister(self.close)
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait(10)
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        self._processes.clear()
        self._guard.close()

    def run(self, namespace: str, argv: Sequence[str | Path], **popen: Any) -> subprocess.Popen[Any]:
        """Start a program in a namespace. The pid is the program's own; close() kills it if it still runs."""
        process = subprocess.Popen(["ip", "netns", "exec", namespace, *argv], **popen)
        self._processes.append(process)
        return process

    def cut(self) -> None:
        """Lose everything, both ways."""
        self.cut_one_way("server")
        self.cut_one_way("client")

    def cut_one_way(self, from_: Side) -> None:
        """Lose what `from_` sends; what the other side sends still arrives."""
        self._point(from_, NOBODYS_MAC)

    def heal(self) -> None:
        self._point("server", CLIENT_MAC)
        self._point("client", SERVER_MAC)

    def _point(self, side: Side, mac: str) -> None:
        """Have `side` send its packets for the other one to the hardware address `mac`."""
        here, there = (self.server, CLIENT_ADDRESS) if side == "server" else (self.client, SERVER_ADDRESS)
        _ip("-n", here, "neigh", "replace", there, "lladdr", mac, "dev", DEVICE, "nud", "permanent")

    def _build(self) -> None:
        for namespace in (self.client, self.server):
            _ip("netns", "add", namespace)
            _ip("-n", namespace, "link", "set", "lo", "up")
        one_end = ["name", DEVICE, "address", CLIENT_MAC, "netns", self.client]
        other_end = ["name", DEVICE, "address", SERVER_MAC, "netns", self.server]
        _ip("link", "add", *one_end, "type", "veth", "peer", *other_end)
        for namespace, address in ((self.client, CLIENT_ADDRESS), (self.server, SERVER_ADDRESS)):
            # Only what the tests send: no IPv6, whose packets would pass a cut.
            _ip("-n", namespace, "link", "set", DEVICE, "addrgenmode", "none", "up")
            _ip("-n", namespace, "address", "add", f"{address}/24", "dev", DEVICE)
        self.heal()


def _ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL)
