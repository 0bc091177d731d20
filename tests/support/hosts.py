"""Hosts that are dead in one way or another."""

from __future__ import annotations

import contextlib
import socket
import threading


class FrozenHost:
    """A host that accepts connections and says nothing, as a server that is stopped does. It counts them."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.dialled = 0
        self._kept: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._kept.append(self._listener.accept()[0])
                self.dialled += 1

    def close(self) -> None:
        self._listener.close()
        for one in self._kept:
            one.close()
