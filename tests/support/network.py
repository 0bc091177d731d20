"""Networks that a test can cut: two network namespaces joined by one cable, or several on one switch (`Machines`).

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

import abc
import atexit
import ctypes
import functools
import itertools
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from tests.support.servers import Guard

if TYPE_CHECKING:
    from typing_extensions import Self

Side = Literal["client", "server"]
T = TypeVar("T")

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


class _Namespaces(abc.ABC):
    """Namespaces that are built at once, and that leave nothing behind."""

    @abc.abstractmethod
    def _build(self) -> None: ...

    @abc.abstractmethod
    def close(self) -> None: ...

    def _begin(self) -> None:
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


class Network(_Namespaces):
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
        self._begin()

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


class Machines(_Namespaces):
    """Some machines on one switch: a namespace each, and one more, `hub`, for whoever talks to them.

    cut() unplugs a machine: what it sends and what is sent to it is lost without a word, as in a Network. Everything
    that runs in the namespaces is killed by close(), or if we are killed.
    """

    HUB_ADDRESS = "192.0.2.1"
    GUARD = """
        read _
        for name in "$@"; do
            for pid in $(ip netns pids "$name"); do kill -KILL "$pid"; done
            ip netns del "$name"
        done
    """

    def __init__(self, count: int) -> None:
        name = f"tenure-{os.getpid()}-{next(_numbers)}"
        self.hub = f"{name}-hub"
        self.names = [f"{name}-m{number}" for number in range(count)]
        self.addresses = [f"192.0.2.{11 + number}" for number in range(count)]
        self._guard = Guard(self.GUARD, *self.names, self.hub)
        self._begin()

    def close(self) -> None:
        """Kill what runs in the namespaces and remove them. May be called twice."""
        if self._guard.is_inherited:
            return
        atexit.unregister(self.close)
        self._guard.close()

    def cut(self, number: int) -> None:
        """Unplug a machine."""
        _ip("-n", self.hub, "link", "set", f"port{number}", "nomaster")

    def heal(self, number: int) -> None:
        _ip("-n", self.hub, "link", "set", f"port{number}", "master", "switch")

    def _build(self) -> None:
        for namespace in (self.hub, *self.names):
            _ip("netns", "add", namespace)
            _ip("-n", namespace, "link", "set", "lo", "up")
        everybody = {self.HUB_ADDRESS: _mac(1)}
        _ip("-n", self.hub, "link", "add", "name", "switch", "address", _mac(1), "type", "bridge")
        _ip("-n", self.hub, "link", "set", "switch", "addrgenmode", "none", "up")
        for number, (namespace, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            everybody[address] = _mac(11 + number)
            one_end = ["name", DEVICE, "address", everybody[address], "netns", namespace]
            _ip("link", "add", *one_end, "type", "veth", "peer", "name", f"port{number}", "netns", self.hub)
            _ip("-n", self.hub, "link", "set", f"port{number}", "master", "switch", "addrgenmode", "none", "up")
            _ip("-n", namespace, "link", "set", DEVICE, "addrgenmode", "none", "up")
            _ip("-n", namespace, "address", "add", f"{address}/24", "dev", DEVICE)
        _ip("-n", self.hub, "address", "add", f"{self.HUB_ADDRESS}/24", "dev", "switch")
        # Permanent, so that a machine that is unplugged is silent: nobody finds out by a missing answer to ARP.
        for namespace, device in [(self.hub, "switch"), *((name, DEVICE) for name in self.names)]:
            for address, mac in everybody.items():
                _ip("-n", namespace, "neigh", "replace", address, "lladdr", mac, "dev", device, "nud", "permanent")


def _mac(number: int) -> str:
    return f"02:00:00:00:01:{number:02x}"


def pids(namespace: str) -> list[int]:
    """Everything that runs in a namespace."""
    listed = subprocess.run(["ip", "netns", "pids", namespace], check=True, capture_output=True, text=True)
    return [int(pid) for pid in listed.stdout.split()]


CLONE_NEWNET = 0x40000000


def _enter(namespace: str) -> None:
    """Move this thread, and nothing else of the process, into a namespace."""
    with Path("/run/netns", namespace).open("rb") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {namespace}")


def inside(namespace: str, call: Callable[[], T]) -> T:
    """Make a call in a namespace: sockets that it opens are there. (In a thread, which is all that moves there.)"""
    result: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            _enter(namespace)
            result.append(call())
        except BaseException as error:  # noqa: BLE001 - raised again where it was asked for
            failed.append(error)

    thread = threading.Thread(target=run, name=f"inside {namespace}")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return result[0]


def _ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL)
