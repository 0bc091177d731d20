"""A line to a server that counts what is asked: the same measure for every protocol.

A request is what a client sends before the server says something again: what travels together (a pipeline, a batch) is
one, in however many pieces it comes.
"""

from __future__ import annotations

import selectors
import socket
import threading


class CountingLine:
    """Listens on a port of its own and passes everything on."""

    def __init__(self, port: int) -> None:
        self.requests = 0
        self.connections = 0
        self._target = port
        self._asking: set[socket.socket] = set()
        """Clients that have sent something, and not heard anything since."""
        self._selector = selectors.DefaultSelector()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed = True
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()
        self._selector.close()

    def _run(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select(0.1):
                if key.data is None:
                    self._accept()
                else:
                    self._pass_on(key.fileobj, *key.data)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        server = socket.create_connection(("127.0.0.1", self._target))
        for one in (client, server):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._selector.register(client, selectors.EVENT_READ, (server, True))
        self._selector.register(server, selectors.EVENT_READ, (client, False))
        self.connections += 1

    def _pass_on(self, source: socket.socket, target: socket.socket, from_client: bool) -> None:
        if source.fileno() < 0:
            return  # its other end was closed just now
        try:
            piece = source.recv(65536)
            if piece:
                self._count(source if from_client else target, from_client)
                target.sendall(piece)
                return
        except OSError:
            pass
        for one in (source, target):
            self._asking.discard(one)
            self._selector.unregister(one)
            one.close()
        self.connections -= 1

    def _count(self, client: socket.socket, from_client: bool) -> None:
        if not from_client:
            self._asking.discard(client)
        elif client not in self._asking:
            self._asking.add(client)
            self.requests += 1
