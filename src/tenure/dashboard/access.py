"""Who may look, who may operate, and which requests are refused before anyone asks who sent them.

Without users and without an access function, only this machine may look. A request that a proxy has passed on comes
from somewhere else, even if the proxy runs on this machine.
"""

from __future__ import annotations

import hashlib
import hmac
import inspect
import ipaddress
import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from starlette.requests import HTTPConnection, Request

from tenure import ConfigError
from tenure.aio.bridge import run

Right = Literal["view", "operate"]
Answer = Right | tuple[Right, str] | None
AccessFunction = Callable[[Any], Answer | Awaitable[Answer]]
"""Called with Starlette's ``Request``. Returns None to refuse, a right, or a right and the visitor's name."""

RIGHTS = ("view", "operate")
PASSED_ON = ("forwarded", "via", "x-forwarded-", "x-real-ip", "x-client-ip", "true-client-ip", "cf-connecting-ip")
"""How the names of headers begin that a proxy adds to a request."""
HOST = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")
LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")
MAX_HEADERS = 16 * 1024
SHORTEST_TOKEN = 20
COOKIE = "tenure_dashboard"
ONLY_THIS_MACHINE = (
    "this dashboard answers only requests of its own machine, because it was given neither users nor an access "
    "function; a request that a proxy passes on does not count as one of this machine"
)


@dataclass(frozen=True)
class Visitor:
    """The sender of a request, and what it may do."""

    name: str
    operates: bool


@dataclass(frozen=True)
class Refused:
    """Why a request is refused."""

    status: int
    reason: str


@dataclass(frozen=True)
class User:
    """Someone who may use the dashboard: a name, a secret token, and ``view`` or ``operate``."""

    name: str
    token: str = field(repr=False)
    right: Right = "view"

    def __post_init__(self) -> None:
        """Check the right, and that the token cannot be guessed."""
        if self.right not in RIGHTS:
            raise ConfigError(f"user {self.name!r}: the right must be 'view' or 'operate', not {self.right!r}")
        if len(self.token) < SHORTEST_TOKEN or not self.token.isascii() or not self.token.isprintable():
            raise ConfigError(
                f"user {self.name!r}: a token must have at least {SHORTEST_TOKEN} printable ASCII characters; make one "
                'with python -c "import secrets; print(secrets.token_urlsafe(32))"'
            )


def users_from_file(path: str | Path) -> list[User]:
    """Read users from a file with one user in a line: name, ``view`` or ``operate``, and token."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the file of users cannot be read: {error}") from None
    users = []
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 3:
            raise ConfigError(f"{path}, line {number}: expected a name, `view` or `operate`, and a token")
        users.append(User(words[0], words[2], cast("Right", words[1])))  # which User checks
    if not users:
        raise ConfigError(f"{path} has no users: add lines of a name, `view` or `operate`, and a token")
    return users


class Users:
    """Finds the user of a token, in the same time for every wrong one."""

    def __init__(self, users: Iterable[User]) -> None:
        self._users = [(_digest(user.token), user) for user in users]
        if not self._users:
            raise ConfigError("users= is empty: nobody could see the dashboard")

    def of_token(self, token: str) -> User | None:
        """Return the user whose token this is. Every token is compared, as digests and to the last byte."""
        given, found = _digest(token), None
        for digest, user in self._users:
            if hmac.compare_digest(digest, given):
                found = user
        return found

    async def access(self, request: HTTPConnection) -> Answer:
        """Return what the sender of a request may do: by its cookie, or by a Bearer token."""
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        token = bearer.strip() if scheme.lower() == "bearer" else request.cookies.get(COOKIE, "")
        user = self.of_token(token)
        return None if user is None else (user.right, user.name)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


async def only_this_machine(request: HTTPConnection) -> Answer:
    """Let this machine look, and nobody operate."""
    return ("view", "this machine") if is_local(request) else None


def is_local(request: HTTPConnection) -> bool:
    """Whether a request comes from this machine, was sent to it by a local name, and was not passed on by a proxy.

    The name matters: a website can have its own name resolved to 127.0.0.1.
    """
    if request.client is None or any(name.startswith(PASSED_ON) for name in request.headers):
        return False
    try:
        address = ipaddress.ip_address(request.client.host)
    except ValueError:
        return False
    host = re.sub(r":[0-9]+$", "", request.headers.get("host", "")).lower()
    return address.is_loopback and host in LOCAL_NAMES


def malformed(request: Request) -> Refused | None:
    """Refuse a request whose headers no browser sends."""
    if sum(len(name) + len(value) for name, value in request.scope["headers"]) > MAX_HEADERS:
        return Refused(431, f"the headers are larger than {MAX_HEADERS // 1024} kB")
    hosts = request.headers.getlist("host")
    if len(hosts) != 1 or HOST.fullmatch(hosts[0]) is None:
        return Refused(400, "the Host header must be one name or address")
    return None


def foreign(request: Request) -> Refused | None:
    """Refuse what another website made the visitor's browser send. Only a link that leads to a page is accepted."""
    site = request.headers.get("sec-fetch-site", "none")
    if request.method in ("GET", "HEAD"):
        arrives = (
            request.headers.get("sec-fetch-mode") == "navigate" and request.headers.get("sec-fetch-dest") == "document"
        )
        return None if site in ("none", "same-origin") or arrives else Refused(403, "another website sent this request")
    if site not in ("none", "same-origin"):
        return Refused(403, "another website sent this request")
    origin, host = request.headers.get("origin", "").lower(), request.headers["host"].lower()
    if origin not in (f"http://{host}", f"https://{host}"):
        reason = "the Origin header must name this host: a proxy in front must pass on the Host header as it came"
        return Refused(403, reason)
    return None


async def visitor(access: AccessFunction, request: Request) -> Visitor | None:
    """Return who sent a request, or None if it may not see anything. An access function may block."""
    if inspect.iscoroutinefunction(access):
        answer = await access(request)
    else:
        answer = await run(lambda: access(request), abandon=True)
    if answer is None:
        return None
    right, name = (answer, "") if isinstance(answer, str) else answer
    if right not in RIGHTS:
        raise ConfigError(f"access() must return None, 'view', 'operate', or one of these and a name, not {answer!r}")
    address = request.client.host if request.client is not None else "unknown address"
    return Visitor(str(name) or address, right == "operate")
