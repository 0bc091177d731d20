"""A network that misbehaves: TCP doors between nodes and their server, each with faults of its own.

Every node connects through a door; behind all doors is the one server. A door delays, holds back or swallows what
passes, one way or both, and cuts connections politely or by reset. All doors are in one process of their own, so that
what the harness does never slows the wire down. It is told what to do by JSON lines on its stdin.

A direction that is *held* keeps the bytes and delivers them when it is healed, as TCP does after a lost network: late
writes arrive late. A *swallowed* byte is gone for ever, so connections that lost some are cut when the door is healed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from typing_extensions import Self

ROOT = Path(__file__).resolve().parents[3]
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER with no time to linger: closing the socket sends a RST."""

Way = Literal["up", "down"]


class Door:
    """One listening port, what is done to its traffic, and the connections through it."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self.port = 0
        self.delay_s = 0.0
        self.jitter_s = 0.0
        self.swallow: set[Way] = set()
        self.open: dict[Way, asyncio.Event] = {"up": asyncio.Event(), "down": asyncio.Event()}
        self.lines: set[Wire] = set()
        self.heal()

    async def listen(self) -> None:
        server = await asyncio.start_server(self.enter, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]

    async def enter(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire = Wire(self, reader, writer)
        self.lines.add(wire)
        try:
            await wire.run()
        finally:
            self.lines.discard(wire)

    def fault(self, *, delay_s: float = 0, jitter_s: float = 0, hold: list[Way] = (), swallow: list[Way] = ()) -> None:  # type: ignore[assignment]
        self.delay_s, self.jitter_s, self.swallow = delay_s, jitter_s, set(swallow)
        for way, event in self.open.items():
            if way in hold:
                event.clear()
            else:
                event.set()

    def heal(self) -> None:
        self.fault()
        for wire in list(self.lines):
            if wire.has_lost_bytes:
                wire.cut("reset")

    def cut(self, how: Literal["close", "reset", "server"]) -> int:
        """End every connection; return how many. `server`: at the server's end only, and the client hears nothing."""
        wires = list(self.lines)
        for wire in wires:
            wire.cut(how)
        return len(wires)


class Wire:
    """One connection through a door."""

    def __init__(self, door: Door, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.door = door
        self.client = (reader, writer)
        self.upstream: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self.has_lost_bytes = False
        self.is_silent = False

    async def run(self) -> None:
        await self.door.open["up"].wait()  # a lost network answers nobody
        try:
            self.upstream = await asyncio.open_connection(*self.door.target)
        except OSError:
            self.client[1].transport.abort()
            return
        up = asyncio.ensure_future(self.pump("up", self.client[0], self.upstream[1]))
        down = asyncio.ensure_future(self.pump("down", self.upstream[0], self.client[1]))
        await asyncio.wait([up, down], return_when=asyncio.FIRST_COMPLETED)
        while self.is_silent and not up.done():
            self.has_lost_bytes = True
            await asyncio.sleep(0.05)
        for task in (up, down):
            task.cancel()
        for end in (self.client, self.upstream):
            end[1].close()

    async def pump(self, way: Way, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        door = self.door
        with contextlib.suppress(OSError):
            while True:
                data = await reader.read(65536)
                if door.delay_s or door.jitter_s:
                    await asyncio.sleep(door.delay_s + random.uniform(0, door.jitter_s))
                await door.open[way].wait()
                if not data:
                    return
                if way in door.swallow or (self.is_silent and way == "up"):
                    self.has_lost_bytes = True
                    continue
                writer.write(data)
                await writer.drain()

    def cut(self, how: str) -> None:
        if how == "server" and self.upstream is not None:
            self.is_silent = True
            self.upstream[1].transport.abort()
            return
        for end in (self.client, self.upstream):
            if end is not None:
                if how == "reset":
                    with contextlib.suppress(OSError):
                        end[1].get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                end[1].transport.abort()


async def serve() -> None:
    """Do what the lines on stdin say, and answer each."""
    doors: dict[str, Door] = {}
    loop = asyncio.get_running_loop()
    while text := await loop.run_in_executor(None, sys.stdin.readline):
        told: dict[str, Any] = json.loads(text)
        name, deed = told.pop("door"), told.pop("do")
        answer: Any = None
        if deed == "open":
            doors[name] = door = Door((told["host"], told["port"]))
            await door.listen()
            answer = door.port
        elif deed == "lead":
            doors[name].target = (told["host"], told["port"])
        elif deed == "cut":
            answer = doors[name].cut(told["how"])
        elif deed == "heal":
            doors[name].heal()
        else:
            doors[name].fault(**told)
        print(json.dumps(answer), flush=True)


class Doors:
    """The process with the doors, and a way to talk to it. `with Doors() as doors:`."""

    def __init__(self, netns: str | None = None) -> None:
        command = ["ip", "netns", "exec", netns] if netns is not None else []
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [*command, sys.executable, "-m", "tests.verification.torture.proxy"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, start_new_session=True, text=True,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def open(self, door: str, host: str, port: int) -> int:
        """Open a door to a server and return its port."""
        return self._tell(door, "open", host=host, port=port)

    def lead(self, door: str, host: str, port: int) -> None:
        """Have whoever comes from now on led to another server, as an address that moves does."""
        self._tell(door, "lead", host=host, port=port)

    def fault(self, door: str, **what: Any) -> None:
        """Until it is healed: delay_s, jitter_s, hold=["up", "down"], swallow=[…]."""
        self._tell(door, "fault", **what)

    def cut(self, door: str, how: Literal["close", "reset", "server"]) -> int:
        return self._tell(door, "cut", how=how)

    def heal(self, door: str) -> None:
        self._tell(door, "heal")

    def _tell(self, door: str, deed: str, **more: Any) -> Any:
        with self._lock:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(json.dumps({"door": door, "do": deed, **more}) + "\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())


if __name__ == "__main__":
    asyncio.run(serve())
