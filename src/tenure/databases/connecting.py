"""How a connection is opened, and what becomes of it in a forked child; and how psycopg opens one to PostgreSQL.

The URL goes to libpq as it is, so its parameters (sslmode, service, …) work as everywhere. No message quotes it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from tenure.errors import ConfigError, StoreUnavailable
from tenure.settings import Password, check_password

if TYPE_CHECKING:
    import psycopg

Opened = TypeVar("Opened", bound="Closeable")

log = logging.getLogger("tenure.postgres")

SECRETS = ("password", "sslpassword", "oauth_client_secret")


def load() -> Any:
    """Import psycopg, or say which extra brings it."""
    try:
        import psycopg  # noqa: PLC0415
    except ImportError:
        msg = "PostgreSQL needs psycopg 3: pip install 'tenure[postgres]'"
        raise ConfigError(msg) from None
    return psycopg


class Closeable(Protocol):
    """A connection."""

    def close(self) -> object:
        """Close it."""
        ...


class HasFileno(Protocol):
    """A socket, or a connection that shows its own."""

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        ...


def shut_down(connection: HasFileno) -> None:
    """Make whatever hangs on a connection fail at once, from any thread."""
    with contextlib.suppress(Exception):
        duplicate = socket.socket(fileno=socket.dup(connection.fileno()))
        with duplicate:
            duplicate.shutdown(socket.SHUT_RDWR)


def parse_url(url: str) -> dict[str, Any]:
    """Return libpq's view of the URL. No message quotes it, nor what may be a piece of a password."""
    psycopg = load()
    parameters: dict[str, Any] | None = None
    if not STRAY_AT.match(url.partition("://")[2]):
        with contextlib.suppress(psycopg.Error, UnicodeError):  # which quote the URL, password and all
            parameters = psycopg.conninfo.conninfo_to_dict(url)
    if parameters is None:
        raise ConfigError(
            "the PostgreSQL URL is malformed, or has a parameter after the ? that libpq does not know: expected "
            "postgresql://user:password@host:port/database, special characters in user and password percent-encoded"
        )
    for port in filter(None, str(parameters.get("port", "")).split(",")):
        if not re.fullmatch(r"[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
            raise ConfigError(
                "the port in the PostgreSQL URL must be a number from 1 to 65535 (and a password stands before an @, "
                "with special characters percent-encoded)"
            )
    return parameters


STRAY_AT = re.compile(r"[^/@]*@[^/?]*@|[^?]*/[^?]*@")
"""An @ in the host or the database: a password with an @ or a / in it, which libpq would cut there."""


def without_secrets(parameters: dict[str, Any], message: str) -> str:
    """Return what the driver says, with every secret that it was given blotted out."""
    for secret in filter(None, map(parameters.get, SECRETS)):
        message = message.replace(str(secret), "***")
    return message


_connections: weakref.WeakSet[HasFileno] = weakref.WeakSet()
_attempts: set[object] = set()
_forking: set[int] = set()
"""All connections; those on their way, which have no object yet; the threads that fork at this moment."""


def _before_fork() -> None:
    _forking.add(threading.get_ident())


def _after_fork() -> None:
    _attempts.clear()
    _forking.discard(threading.get_ident())


def _after_fork_in_child() -> None:
    """Let go of every inherited connection, without a word to the server.

    Closing politely would end the parent's session; keeping the socket would keep a dead parent's sentinel. The
    descriptor is replaced, so that whatever the driver writes later goes nowhere.
    """
    for connection in list(_connections):
        with contextlib.suppress(Exception), open(os.devnull, "r+b", buffering=0) as nowhere:  # noqa: PTH123
            os.dup2(nowhere.fileno(), connection.fileno(), inheritable=False)
    _connections.clear()
    _attempts.clear()
    _forking.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)


def dial(parameters: dict[str, Any]) -> psycopg.Connection[Any]:
    """Connect by psycopg."""
    return unforked(lambda: load().connect(autocommit=True, **parameters), lambda connection: connection)


def unforked(connect: Callable[[], Opened], socket_of: Callable[[Opened], HasFileno]) -> Opened:
    """Connect, again if the process forked meanwhile: the child holds the socket, and nobody there knows of it.

    Not for ever: a process that forks all the time would never connect. Then a child may keep the sentinel of a parent
    that died, and the others wait for the TTL.
    """
    for last in (False, False, False, False, True):
        attempt = object()
        _attempts.add(attempt)
        try:
            connection = connect()
            _connections.add(socket_of(connection))
            if last or (attempt in _attempts and not _forking):
                return connection
        finally:
            _attempts.discard(attempt)
        connection.close()
    raise AssertionError


@contextlib.contextmanager
def limited(cut: Callable[[], None], seconds: float, complaint: str = "") -> Iterator[None]:
    """Cut a connection if the block takes longer, and say so after the complaint."""
    late = threading.Event()

    def end() -> None:
        late.set()
        cut()

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    except Exception:
        if late.is_set():
            raise StoreUnavailable(f"{complaint}no answer within {seconds:g} s") from None
        raise
    finally:
        timer.cancel()


class Openings:
    """Connections that are being opened, or used for the first time: each for so long at most."""

    def __init__(self, cut: Callable[[Any], None]) -> None:
        """Take how a connection is cut from another thread."""
        self._cut = cut
        self._open: set[Any] = set()

    @contextlib.contextmanager
    def limited(self, connection: Any, seconds: float, complaint: str = "") -> Iterator[None]:
        """Cut the connection if the block takes longer, or on :meth:`abort`: it may hang in a pooler's queue."""
        self._open.add(connection)
        try:
            with limited(lambda: self._cut(connection), seconds, complaint):
                yield
        finally:
            self._open.discard(connection)

    def abort(self) -> None:
        """Make whatever is being opened fail at once, from any thread."""
        for connection in list(self._open):
            self._cut(connection)


_told: set[str] = set()
_telling = threading.Lock()


def stays_here(connection: psycopg.Connection[Any]) -> bool:
    """Whether a connection does not leave this machine."""
    return is_here(connection.info.hostaddr)


def is_here(address: str | None) -> bool:
    """Whether an address is this machine's, as that of a Unix socket, which has none, is."""
    import ipaddress  # noqa: PLC0415 - nobody needs it who does not come here

    return not address or ipaddress.ip_address(address).is_loopback


def warn_of_eavesdroppers(connection: psycopg.Connection[Any]) -> None:
    """Say once for each server if what is sent there, fenced writes included, can be read and changed on its way."""
    if not (stays_here(connection) or connection.pgconn.ssl_in_use):
        server = f"{connection.info.host}:{connection.info.port}"
        tell_once(server, "add sslmode=require to the URL, or better verify-full")


def tell_once(server: str, remedy: str) -> None:
    """Warn of eavesdroppers, the first time for each server."""
    with _telling:
        if server in _told:
            return
        _told.add(server)
    log.warning("the connection to %s is not encrypted: %s", server, remedy)


def present_password(password: Password | None) -> str | None:
    """Return the password that holds now, if one was given beside the URL; a function is asked each time."""
    if password is None or isinstance(password, str):
        return password
    try:
        present = password()
    except Exception as error:  # noqa: BLE001 - the application's own
        kind = type(error).__name__
    else:
        return check_password(present)
    raise StoreUnavailable(f"the function given as password= raised {kind}: call it by itself to see why")
