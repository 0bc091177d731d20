"""What the connectors of servers have in common: limits of time, forks, passwords that are shown nowhere, warnings."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

from tenure.base import fork
from tenure.databases.hosts import Hosts
from tenure.databases.refusals import Cause, remedy
from tenure.errors import ConfigError, StoreUnavailable, TenureError
from tenure.settings import Password, check_password

Connection = TypeVar("Connection", bound="Closeable")
Answer = TypeVar("Answer")

log = logging.getLogger("tenure.postgres")

CONNECT_TIMEOUT_S = 5
SECRETS = ("password", "sslpassword", "oauth_client_secret")


def load() -> Any:
    """Import psycopg, or raise an error that names the extra to install."""
    try:
        import psycopg  # noqa: PLC0415
    except ImportError:
        msg = "PostgreSQL needs psycopg 3: pip install 'tenure[postgres]'"
        raise ConfigError(msg) from None
    return psycopg


class Closeable(Protocol):
    """A connection of any driver."""

    def close(self) -> object:
        """Close the connection and its socket."""
        ...


class HasFileno(Protocol):
    """A socket, or a connection that has one."""

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        ...


def shut_down_socket(connection: HasFileno) -> None:
    """Make a call that hangs on a connection fail at once, from any thread."""
    with contextlib.suppress(Exception):
        duplicate = socket.socket(fileno=socket.dup(connection.fileno()))
        with duplicate:
            duplicate.shutdown(socket.SHUT_RDWR)


STRAY_AT = re.compile(r"[^/@]*@[^/?]*@|[^?]*/[^?]*@")
"""An @ in the host or the database: the password has an @ or a / in it, and libpq would cut it there."""


def without_secrets(parameters: dict[str, Any], message: str) -> str:
    """Return a message of the driver, with ``***`` for every secret in the parameters."""
    for secret in filter(None, map(parameters.get, SECRETS)):
        message = message.replace(str(secret), "***")
    return message


_connections: weakref.WeakSet[HasFileno] = weakref.WeakSet()
_attempts: set[object] = set()
"""The connections that are being opened, which have no object yet."""
_forking: set[int] = set()
"""The threads that fork at this moment."""


def _before_fork() -> None:
    _forking.add(threading.get_ident())


def _after_fork() -> None:
    _attempts.clear()
    _forking.discard(threading.get_ident())


def _after_fork_in_child() -> None:
    """Drop every inherited connection without a message to the server.

    A regular close would end the parent's session. An open socket would keep a dead parent's sentinel. So the
    descriptor is replaced, and what the driver writes later goes nowhere.
    """
    for connection in list(_connections):
        with contextlib.suppress(Exception), open(os.devnull, "r+b", buffering=0) as nowhere:  # noqa: PTH123
            os.dup2(nowhere.fileno(), connection.fileno(), inheritable=False)
    _connections.clear()
    _attempts.clear()
    _forking.clear()


fork.register(fork.Place.CONNECTIONS, before=_before_fork, in_parent=_after_fork, in_child=_after_fork_in_child)


def connect_outside_fork(connect: Callable[[], Connection], socket_of: Callable[[Connection], HasFileno]) -> Connection:
    """Connect, and connect again if the process forked meanwhile: the child has the socket, and no hook would close it.

    The number of attempts is limited, or a process that forks all the time would never connect. After the last one a
    child may keep the sentinel of a parent that died, and the other nodes wait for the TTL.
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
def time_limit(cut: Callable[[], None], seconds: float, complaint: str = "", hint: str = "") -> Iterator[None]:
    """Cut a connection if the block takes longer than ``seconds``, and raise StoreUnavailable.

    ``complaint`` is the beginning of the error's message, and ``hint`` its end.
    """
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
            raise StoreUnavailable(f"{complaint}no answer within {seconds:g} s{hint}") from None
        raise
    finally:
        timer.cancel()


class Connector:
    """Opens connections to one URL. Its ``repr`` names the server, without the password."""

    kind: str
    """``postgresql`` or ``mysql``."""

    def __init__(
        self,
        parameters: dict[str, Any],
        hosts: Hosts,
        ttl: float,
        label: str,
        password: Password | None,
        cut: Callable[[Any], None],
    ) -> None:
        """``cut`` is the function that cuts a connection from another thread."""
        if password is not None and "password" in parameters:
            raise ConfigError("the URL has a password, and password= gives another: leave one of them out")
        self._parameters = parameters
        self.hosts = hosts
        self._ttl = ttl
        self._label = label
        self._password = password
        self._cut = cut
        self._pending: set[Any] = set()
        self.cause: Cause | None = None
        """Why the last connection was refused."""

    def remedy(self) -> str:
        """Return what to do about the last connection that was refused. Several hosts may have several causes."""
        database = self._parameters.get("dbname") or self._parameters.get("database")
        cause = self.cause if len(self.hosts) == 1 else None
        return remedy(cause, self._parameters.get("user"), database, postgres=self.kind == "postgresql")

    @contextlib.contextmanager
    def time_limit(self, connection: Any, seconds: float, complaint: str | None = None) -> Iterator[None]:
        """Cut the connection if the block takes longer than ``seconds``, or on :meth:`abort`.

        The block may hang in a pooler's queue.
        """
        complaint = f"cannot use {self!r}: " if complaint is None else complaint
        self._pending.add(connection)
        try:
            with time_limit(lambda: self._cut(connection), seconds, complaint):
                yield
        finally:
            self._pending.discard(connection)

    def abort(self) -> None:
        """Make every connection that is being opened fail at once, from any thread."""
        self.hosts.abort()
        for connection in list(self._pending):
            self._cut(connection)

    def _first_use(
        self, connection: Any, use: Callable[[Any], Answer], error_text: Callable[[BaseException], str] = str
    ) -> Answer:
        """Use a new connection within the time limit; close it if that fails.

        The driver's error is not raised on: its context and its variables may hold the password.
        """
        try:
            with self.time_limit(connection, CONNECT_TIMEOUT_S):
                return use(connection)
        except TenureError:
            connection.close()
            raise
        except Exception as error:  # noqa: BLE001 - see above
            complaint = error_text(error)
        with contextlib.suppress(Exception):
            connection.close()
        raise StoreUnavailable(f"cannot use {self!r}: {complaint}")


_warned: set[str] = set()
_warn_lock = threading.Lock()


def is_here(address: str | None) -> bool:
    """Whether an address is on this machine. A Unix socket has no address, and is always on this machine."""
    import ipaddress  # noqa: PLC0415 - only needed here

    return not address or ipaddress.ip_address(address).is_loopback


def warn_once(server: str, remedy: str) -> None:
    """Warn that a connection is not encrypted, the first time for each server."""
    with _warn_lock:
        if server in _warned:
            return
        _warned.add(server)
    log.warning("the connection to %s is not encrypted: %s", server, remedy)


def present_password(password: Password | None) -> str | None:
    """Return the current password, if ``password=`` gives one beside the URL. A function is called each time."""
    if password is None or isinstance(password, str):
        return password
    try:
        present = password()
    except Exception as error:  # noqa: BLE001 - the function is the application's
        kind = type(error).__name__
    else:
        return check_password(present)
    raise StoreUnavailable(f"the function given as password= raised {kind}: call it by itself to see why")
