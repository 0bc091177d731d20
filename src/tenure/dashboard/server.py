"""The web server of ``tenure ui``: uvicorn, without its trust in proxies and with limits for strangers."""

from __future__ import annotations

import asyncio
import gc
import socket
from typing import Any

from tenure.dashboard.access import MAX_HEADERS
from tenure.dashboard.application import Dashboard
from tenure.integrations import extra

with extra("dashboard"):
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

HEADERS_WITHIN_S = 10.0
"""How long a client may take to send the headers of a request."""
CONNECTIONS = 500


class Impatient(H11Protocol):
    """Closes a connection on which a request does not come to its end: uvicorn itself would wait for ever."""

    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Begin to wait, and let no part of an answer wait for the client's word that it has the part before.

        asyncio does this for the sockets that it creates, and not for one that it is given: each answer in two parts
        then takes 40 ms longer.
        """
        super().connection_made(transport)
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Wait from the first byte of a request until its headers are complete: more bytes gain no more time."""
        super().data_received(data)
        if self._is_answering:
            self._stop_waiting()
        elif self._waiting is None:
            self._wait()

    @property
    def _is_answering(self) -> bool:
        # The cycle is None before the first request, although its type does not say so.
        cycle: Any = self.cycle
        return cycle is not None and not cycle.response_complete

    def _wait(self) -> None:
        self._waiting = asyncio.get_running_loop().call_later(HEADERS_WITHIN_S, self._give_up)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _give_up(self) -> None:
        self._waiting = None
        if not self._is_answering:
            self.transport.abort()


def serve(application: Dashboard, listener: socket.socket) -> None:
    """Serve until Ctrl-C or SIGTERM."""
    config = uvicorn.Config(
        application,
        http=Impatient,
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        # With these headers, a client could claim to be this machine.
        proxy_headers=False,
        h11_max_incomplete_event_size=2 * MAX_HEADERS,
        limit_concurrency=CONNECTIONS,
        timeout_keep_alive=10,
        timeout_graceful_shutdown=2,
    )
    # The modules stay to the end. To look through them for garbage would hold up an answer for 60 ms every few minutes.
    gc.freeze()
    uvicorn.Server(config).run(sockets=[listener])
