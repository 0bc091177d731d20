"""Web servers as users start them, and HTTP as their clients speak it."""

from __future__ import annotations

import socket
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from tests.integrations.cluster import PATIENCE_S, Process
from tests.support.store_by_hand import until

if TYPE_CHECKING:
    from typing_extensions import Self

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it would rather have httpx2
    from starlette.testclient import TestClient, WebSocketDenialResponse

__all__ = ["Client", "Server", "TestClient", "WebSocketDenialResponse", "free_port", "gunicorn", "replica", "uvicorn"]

BIN = Path(sys.executable).parent
ASK_WITHIN_S = 10.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def uvicorn(app: str, port: int, *options: str) -> list[str]:
    return [str(BIN / "uvicorn"), app, "--port", str(port), "--no-access-log", *options]


def gunicorn(app: str, port: int, *options: str) -> list[str]:
    return [str(BIN / "gunicorn"), app, "--no-control-socket", "--bind", f"127.0.0.1:{port}", *options]


class Client:
    """Asks a server, on a connection for each request, so that any of its workers may answer."""

    def __init__(self, port: int) -> None:
        limits = httpx.Limits(max_keepalive_connections=0)
        self._client = httpx.Client(
            base_url=f"http://127.0.0.1:{port}", timeout=ASK_WITHIN_S, limits=limits, verify=False, trust_env=False
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def ask(self, path: str, method: str = "GET") -> httpx.Response:
        return self._client.request(method, path)

    def try_ask(self, path: str) -> httpx.Response | None:
        """The answer; None if there is no server."""
        try:
            return self.ask(path)
        except httpx.TransportError:
            return None


class Server(Client):
    """One process that listens on a port, and how to ask it; killed on leaving the block."""

    def __init__(
        self, name: str, port: int, command: Sequence[str], environment: Mapping[str, str], directory: Path
    ) -> None:
        super().__init__(port)
        self.running = Process(name, command, environment, directory)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.running.close()
        super().__exit__()
        if kind is not None:
            print(self.running.output())

    def wait_for(self, path: str, status: int = 200) -> httpx.Response:
        """Wait until the path is answered with this status."""

        def answered() -> httpx.Response | None:
            code, output = self.running.process.poll(), self.running.output
            assert code is None, f"{self.running.name} ended with {code}\n{output()}"
            answer = self.try_ask(path)
            return answer if answer is not None and answer.status_code == status else None

        return until(answered, f"{status} of {path} at {self.running.name}", PATIENCE_S)

    def end(self) -> int | None:
        """Ask it to end, and wait for that; return its exit code."""
        self.running.process.terminate()
        return self.running.wait()


def replica(url: str, directory: Path, number: int, *, ttl: float = 10, **environment: str) -> Server:
    """One uvicorn with the application of the tests, a replica of several."""
    port = free_port()
    name = f"replica-{number}"
    told = {"TENURE_URL": url, "TENURE_NAME": name, "TENURE_TTL": f"{ttl:g}", **environment}
    return Server(name, port, uvicorn("tests.integrations.fastapi_app:app", port), told, directory)
