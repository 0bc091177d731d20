"""Requests as an ASGI server passes them on, from any address and with any headers, without a server between."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import anyio

LOCAL = ("127.0.0.1", 50000)
FOREIGN = ("192.0.2.7", 50000)


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()


def ask(
    app: Any,
    path: str = "/",
    method: str = "GET",
    *,
    query: dict[str, str] | None = None,
    form: dict[str, str] | None = None,
    client: tuple[str, int] | None = LOCAL,
    host: str = "localhost:8377",
    root_path: str = "",
    http_version: str = "1.1",
    raw_headers: list[tuple[bytes, bytes]] | None = None,
    **headers: str,
) -> Answer:
    """Send one request. Names of headers are given with underscores."""
    given = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    if host:
        given.append((b"host", host.encode()))
    body = b""
    if form is not None:
        body = urlencode(form).encode()
        given.append((b"content-type", b"application/x-www-form-urlencoded"))
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": http_version,
        "method": method,
        "scheme": "http",
        "path": root_path + path,
        "raw_path": (root_path + path).encode(),
        "root_path": root_path,
        "query_string": urlencode(query or {}).encode(),
        "headers": [*given, *(raw_headers or [])],
        "client": client,
        "server": ("127.0.0.1", 8377),
    }
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    said: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop(0)
        await anyio.sleep_forever()
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        said.append(message)

    async def run() -> None:
        await app(scope, receive, send)

    anyio.run(run)
    start = next(message for message in said if message["type"] == "http.response.start")
    parts = [message.get("body", b"") for message in said if message["type"] == "http.response.body"]
    return Answer(start["status"], {name.decode(): value.decode() for name, value in start["headers"]}, b"".join(parts))


SAME_ORIGIN = {"origin": "http://localhost:8377", "sec_fetch_site": "same-origin"}


def cookie_of(app: Any, token: str) -> str:
    """The cookie of a user who has signed in; with a wrong token, a cookie that has it."""
    user = app._users.of_token(token)
    return f"tenure_dashboard={app._users.cookie(user) if user else token}"


def act(app: Any, token: str | None, form: dict[str, str], **more: Any) -> Answer:
    """Send a form as the page of the dashboard itself does."""
    sent = {**SAME_ORIGIN, **({"cookie": cookie_of(app, token)} if token else {}), **more}
    return ask(app, "/act", "POST", form=form, **sent)
