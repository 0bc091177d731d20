"""The messages between ``tenure run`` and its guard. Both sides handle a message in the method ``on_<name>``.

    to the guard   run argv environment ttl grace deadline   start the command
                   trust deadline                            a renewal: a later deadline
                   doubt                                     freeze the command until the next ``trust``
                   signal number                             pass a signal on to the command
                   end number                                the same, and kill the command after the grace
                   kill                                      kill the command: the term is over
                   continue                                  wake a command that the terminal stopped
    from the guard over status cause                         the command has ended, with all of its processes
                   failed errno                              the command could not be started
                   stopped                                   the terminal stopped the command

``run`` and ``trust`` carry duplicates of the sentinel's descriptors. The guard loads this file by its path, so this
file imports no other part of Tenure.
"""

from __future__ import annotations

import contextlib
import marshal
import socket
import struct

TYPE_CHECKING = False
# These modules are slow to import.
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

RECEIVE_FLAGS = socket.MSG_DONTWAIT | getattr(socket, "MSG_CMSG_CLOEXEC", 0)
"""The command must not inherit the descriptors that a message brings."""


class MessageChannel:
    """Messages (tuples of plain values) over one end of a socket pair, with descriptors beside them."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._received = b""
        self._descriptors: list[int] = []

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self._socket.fileno()

    def send(self, *message: Any, descriptors: Sequence[int] = ()) -> None:
        """Send a message; the other end gets duplicates of the descriptors. Do nothing if the other end is gone."""
        body = marshal.dumps(message)
        data = struct.pack("=II", len(body), len(descriptors)) + body
        packed = struct.pack(f"{len(descriptors)}i", *descriptors)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, packed)] if packed else []
        # If the other end is gone, receive() reports that.
        with contextlib.suppress(OSError):
            sent = self._socket.sendmsg([data], rights)
            self._socket.sendall(data[sent:])

    def receive(self) -> list[tuple[tuple[Any, ...], list[int]]] | None:
        """Return the messages that have arrived, each with its descriptors; None if the other end is gone."""
        while True:
            try:
                data, rights, _, _ = self._socket.recvmsg(65536, 1024, RECEIVE_FLAGS)
            except BlockingIOError:
                break
            except ConnectionError:
                return None
            if not data:
                return None
            for _, _, packed in rights:
                self._descriptors.extend(struct.unpack(f"{len(packed) // 4}i", packed))
            self._received += data
        messages = []
        while len(self._received) >= 8:
            size, count = struct.unpack("=II", self._received[:8])
            if len(self._received) < 8 + size:
                break
            body, self._received = self._received[8 : 8 + size], self._received[8 + size :]
            mine, self._descriptors = self._descriptors[:count], self._descriptors[count:]
            messages.append((marshal.loads(body), mine))  # noqa: S302 - sent by our own other half
        return messages

    def close(self) -> None:
        """Close this end; ``receive()`` at the other end then returns None."""
        self._socket.close()
