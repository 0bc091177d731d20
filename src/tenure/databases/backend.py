"""What a node needs from a database, and how its settings pick one. Each database has its own ``backend.py``."""

from __future__ import annotations

import abc
import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

from tenure import __version__
from tenure.core.messages import End, Opened, Verdict
from tenure.errors import ConfigError, StoreUnavailable
from tenure.events import EndReason
from tenure.settings import NodeSettings, check_encoding
from tenure.store import migrations
from tenure.store.control import ControlStore, Identity, TerminateSilentMember
from tenure.store.session import Failed, LaneSession, Sentinel, Session
from tenure.store.watch import WatchStore

LOOK_TIMEOUT_S = 10.0
OPEN_TIMEOUT_S = 30.0
"""How long it may take to find or create the tables: longer than the wait for another node that creates them."""
REHEARSAL = End("", (Verdict("", EndReason.DEATH, "", epoch=0, server_start=""),))
"""A request that ends no member. A connection runs a request faster the second time, and a real end must be fast."""


Control = tuple[ControlStore, LaneSession, Opened]
Watch = tuple[WatchStore, LaneSession]
TellStart = Callable[[str], None]
"""Called with the server's start time, as soon as that is known."""


def ignore_start(server_start: str) -> None:
    """Do nothing with the server's start time."""


class Backend(abc.ABC):
    """How one node reaches its database. Nothing is connected before the first call that opens something."""

    mode: str | None = None
    """How leaders are elected: ``hybrid``, ``lease`` or ``lock``; None before the first connection."""
    has_tokens = True
    """Whether a term has a token. In mode ``lock`` a role is a lock and nothing else."""

    joins = True
    """Whether this is for a node, whose TTL the namespace must permit."""

    def __init__(self, settings: NodeSettings) -> None:
        self._settings = settings
        self.stop = threading.Event()

    @property
    def file(self) -> str:
        """Which file the node's membership is in (SQLite); empty elsewhere, and before the node has joined."""
        return ""

    def assign_lock(self, role: str, lock_id: int | None) -> None:
        """Give a role its lock; raise ConfigError if a ``lock_id`` is given where no session can hold one."""
        if lock_id is not None:
            raise ConfigError(
                f"role {role!r}: lock_id={lock_id} is an advisory lock of PostgreSQL, and this node's database is "
                f"{self._settings.database}: leave it out"
            )

    def check_fence(self) -> None:  # noqa: B027 - every database can
        """Raise ConfigError if nothing can be fenced here."""

    @abc.abstractmethod
    def open_control(self, server_answered: TellStart = ignore_start) -> Control:
        """Connect the control lane; create the tables if need be."""

    @abc.abstractmethod
    def open_watch(self) -> Watch:
        """Connect the watch lane."""

    @abc.abstractmethod
    def open_session(self) -> LaneSession:
        """Connect to read or change tables that exist; create nothing."""

    @abc.abstractmethod
    def transaction(self) -> contextlib.AbstractContextManager[Any]:
        """Open a transaction on a new connection, for the application; yield the driver's connection.

        It is rolled back unless the block commits it.
        """

    @abc.abstractmethod
    def cut(self, connection: Any) -> None:
        """Make a call that hangs on a connection of :meth:`transaction` fail at once, from any thread."""

    def interrupt(self) -> None:
        """End every wait, and drop connections that are being opened: the node is closed."""
        self.stop.set()

    def close(self) -> None:  # noqa: B027 - most have nothing of that kind
        """Release what outlives connections: the node has left."""

    def _open_store(
        self,
        session: Session,
        sentinel: Sentinel,
        terminate_silent_member: TerminateSilentMember | None = None,
        make: Callable[..., ControlStore] = ControlStore,
    ) -> tuple[ControlStore, Opened]:
        """Prepare the tables, and return the store of the control lane on them."""
        settings = self._settings
        prepare_tables(session)
        for what, name in (("namespace", settings.namespace), ("name", settings.name)):
            check_encoding(what, name, session.encoding)
        store = make(session, sentinel, settings.namespace, this_process(), terminate_silent_member)
        return store, Opened(*store.open(settings.ttl if self.joins else None))


def backend_for(settings: NodeSettings) -> Backend:
    """Return the backend of the database that the settings name. The other backends are not loaded."""
    if settings.database == "sqlite":
        from tenure.databases.sqlite.backend import SqliteBackend  # noqa: PLC0415 - it imports this module

        return SqliteBackend(settings)
    if settings.database == "mysql":
        from tenure.databases.mysql.backend import MySqlBackend  # noqa: PLC0415 - as above

        return MySqlBackend(settings)
    if settings.mode == "lock":
        from tenure.databases.postgres.lock_mode import LockBackend  # noqa: PLC0415 - as above

        return LockBackend(settings)
    from tenure.databases.postgres.backend import PostgresBackend  # noqa: PLC0415 - as above

    return PostgresBackend(settings)


def prepare_tables(session: Session) -> None:
    """Create the tables if need be; raise StoreUnavailable if the database user may not create or use them."""
    try:
        migrations.prepare(session)
        session.schema.check_privileges(session)
        migrations.check_shape(session)
    except Failed as error:
        complaint = str(error).splitlines()[0]
        raise StoreUnavailable(f"cannot prepare the tables: {complaint}{session.schema.privileges_needed}") from None


def check_permitted(settings: NodeSettings, opened: Opened) -> None:
    """Raise ConfigError if the TTL is above the namespace's limit. For nodes that join: readers may have any TTL."""
    largest = opened.confirmed.max_ttl
    if settings.ttl > largest:
        raise ConfigError(
            f"ttl={settings.ttl:g} is above the largest permitted in namespace {settings.namespace!r}, {largest:g}: "
            "use a shorter one, or raise the limit: "
            f"tenure init --max-ttl {settings.ttl:g} --namespace {settings.namespace}"
        )


def this_process() -> Identity:
    """Return the host, the process id and the release of this node."""
    return Identity(socket.gethostname(), os.getpid(), __version__)


@contextlib.contextmanager
def closing_on_error(session: Session) -> Iterator[None]:
    """Close the session if the block raises."""
    try:
        yield
    except BaseException:
        session.close()
        raise
