"""Who may look, who may operate, and which requests are refused before the dashboard asks who sent them.

Without users and without an access function, only this machine may look. A request that a proxy has passed on comes
from somewhere else, even if the proxy runs on this machine.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import inspect
import ipaddress
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from starlette.requests import HTTPConnection, Request

from tenure import ConfigError
from tenure.dashboard.threads import Threads

Right = Literal["view", "operate"]
Access = Right | tuple[Right, str] | None
"""What an access function returns: None to refuse, ``"view"`` or ``"operate"``, or one of these and the visitor's
name."""
AccessFunction = Callable[[Any], Access | Awaitable[Access]]
"""Called with Starlette's ``Request``."""

RIGHTS = ("view", "operate")
PASSED_ON = ("forwarded", "via", "x-forwarded-", "x-real-ip", "x-client-ip", "true-client-ip", "cf-connecting-ip")
"""How the names of headers begin that a proxy adds to a request."""
HOST = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")
MAX_HEADERS = 16 * 1024
SHORTEST_TOKEN = 20
COOKIE = "tenure_dashboard"
SIGNED_IN_S = 12 * 3600
"""How long a cookie is accepted."""
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
            raise ConfigError(f"user {self.name!r}: the right must be 'view' or 'operate'")
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
        # No word of the line is shown: in the wrong order, each of them may be the token.
        wrong = f"it has {len(words)} words" if len(words) != 3 else "its second word is neither `view` nor `operate`"
        try:
            name, right, token = words
            wrong = wrong if right not in RIGHTS else "its third word is not such a token"
            # The cast is safe, because `User` checks the right.
            users.append(User(name, token, cast("Right", right)))
        except (ValueError, ConfigError):
            raise ConfigError(
                f"{path}, line {number}: expected a name, `view` or `operate`, and a token of at least "
                f"{SHORTEST_TOKEN} printable ASCII characters; {wrong}"
            ) from None
    if not users:
        raise ConfigError(f"{path} has no users: add lines of a name, `view` or `operate`, and a token")
    return users


class Users:
    """Finds the user of a token, in the same time for every wrong one."""

    def __init__(self, users: Iterable[User]) -> None:
        self._users = [(_digest(user.token), user) for user in users]
        if not self._users:
            raise ConfigError("users= is empty, so no visitor could see the dashboard: give at least one user")
        names: dict[bytes, str] = {}
        for digest, user in self._users:
            if digest in names:
                raise ConfigError(f"users {names[digest]!r} and {user.name!r} have the same token: give each their own")
            names[digest] = user.name

    def of_token(self, token: str) -> User | None:
        """Return the user whose token this is. Every token is compared, as digests and to the last byte."""
        given, found = _digest(token), None
        for digest, user in self._users:
            if hmac.compare_digest(digest, given):
                found = user
        return found

    async def access(self, request: HTTPConnection) -> Access:
        """Return what the sender of a request may do: by its cookie, or by a Bearer token."""
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        bears = scheme.lower() == "bearer"
        user = self.of_token(bearer.strip()) if bears else self.of_cookie(request.cookies.get(COOKIE, ""))
        return None if user is None else (user.right, user.name)

    def cookie(self, user: User) -> str:
        """Return what the browser of a user keeps: not the token, but a proof of it that expires.

        Every process with the same users accepts it. It ends early if the user's token is changed.
        """
        name = base64.urlsafe_b64encode(user.name.encode()).decode().rstrip("=")
        said = f"{name}.{int(time.time()) + SIGNED_IN_S}"
        return f"{said}.{_proof(user, said)}"

    def of_cookie(self, cookie: str) -> User | None:
        """Return the user whose cookie this is, unless it has expired. Every user's proof is compared."""
        said, _, proof = cookie.rpartition(".")
        found = None
        for _digest, user in self._users:
            if hmac.compare_digest(_proof(user, said).encode(), proof.encode("utf-8", "surrogateescape")):
                found = user
        # Only what a user's token has signed is read: it is a number then.
        return found if found is not None and int(said.rpartition(".")[2]) > time.time() else None


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def _proof(user: User, said: str) -> str:
    message = f"tenure dashboard\n{user.name}\n{said}".encode("utf-8", "surrogateescape")
    return hmac.new(user.token.encode(), message, hashlib.sha256).hexdigest()


async def only_this_machine(request: HTTPConnection) -> Access:
    """Let requests of this machine look, and permit no actions."""
    return ("view", "this machine") if is_local(request) else None


def is_local(request: HTTPConnection) -> bool:
    """Whether a request comes from this machine, was sent to it by a local name, and was not passed on by a proxy.

    The name matters: a website can have its own name resolved to 127.0.0.1. So does the version: no browser speaks
    HTTP/1.0, but proxies do that add no header.
    """
    if request.client is None or any(name.startswith(PASSED_ON) for name in request.headers):
        return False
    host = re.sub(r":[0-9]+$", "", request.headers.get("host", "")).lower()
    named = host == "localhost" or _is_loopback(host.strip("[]"))
    return named and _is_loopback(request.client.host) and request.scope["http_version"] != "1.0"


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def path_below(scope: Mapping[str, Any]) -> str:
    """Return the path of a request, below where the dashboard is mounted."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


def address_of(request: HTTPConnection) -> str:
    """Return the address of the sender."""
    return request.client.host if request.client is not None else "unknown address"


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


async def visitor(access: AccessFunction, request: Request, threads: Threads) -> Visitor | None:
    """Return who sent a request, or None if it may not see anything. An access function may block."""
    asked = access(request) if inspect.iscoroutinefunction(access) else await threads.run(lambda: access(request))
    answer = cast("Access", await asked if inspect.isawaitable(asked) else asked)
    if answer is None:
        return None
    right, name = (answer, "") if isinstance(answer, str) else answer
    if right not in RIGHTS:
        raise ConfigError(f"access() must return None, 'view', 'operate', or one of these and a name, not {answer!r}")
    return Visitor(str(name) or address_of(request), right == "operate")
