"""The node: Tenure in your process."""

from __future__ import annotations

import abc
import contextlib
import functools
import logging
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from typing import TYPE_CHECKING, Any, Generic

import tenure
from tenure.base.tracebacks import without_locals
from tenure.campaign import Campaign, ElectionT
from tenure.databases.backend import Backend, backend_for
from tenure.election import HAND_OVER_S, Election
from tenure.engine.callbacks import CallbackThread
from tenure.engine.candidacy import Candidacy
from tenure.engine.engine import Engine
from tenure.errors import ConfigError, NodeClosed, TenureError
from tenure.events import Deposed, Event, LeaderChanged
from tenure.internals import holding_of
from tenure.services.host import BaseServiceHost
from tenure.settings import Mode, NodeSettings, Password, Start, Takeover, check_callback, check_name, node_settings
from tenure.term import BaseTerm, Term

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from tenure.settings import NodeOptions

log = logging.getLogger("tenure.node")

SIGNAL_S = 1.0
"""How long the main thread waits at a time: a signal's handler may run only when a wait has ended."""


class BaseNode(BaseServiceHost, abc.ABC, Generic[ElectionT]):
    """What :class:`Node` and :class:`AsyncNode` have in common."""

    _make_backend: Callable[[NodeSettings], Backend] = staticmethod(backend_for)

    @without_locals
    def __init__(
        self,
        url: str | None = None,
        *,
        name: str | None = None,
        namespace: str | None = None,
        ttl: float | None = None,
        renew_every: float | None = None,
        takeover: Takeover = "instant",
        mode: Mode = "auto",
        direct_url: str | None = None,
        password: Password | None = None,
        schema: str = "tenure",
        metadata: Mapping[str, Any] | None = None,
        start: Start = "raise",
    ) -> None:
        """Check the settings; do not connect yet.

        Args:
            url: ``postgresql://…``, ``mysql://…`` or ``sqlite:///file.db``; else ``TENURE_URL``; else a SQLite file
                in the user's state directory.
            name: a human-readable name for this node; else ``TENURE_NAME``; else host name and process id.
            namespace: only nodes of one namespace elect leaders together; else ``TENURE_NAMESPACE``; else ``default``.
            ttl: seconds for which the lease is good, 1 to 3600; else ``TENURE_TTL``; else 10.
            renew_every: seconds between renewals; a quarter of the TTL by default.
            takeover: ``instant`` (another node takes over milliseconds after a death) or ``strict`` (after the TTL).
            mode: ``hybrid`` (lease and sentinel), ``lease`` (only a lease), ``lock`` (only an advisory lock: creates no
                tables, has no token), or ``auto``: ``hybrid``, or ``lease`` behind a connection pooler.
            direct_url: the URL of the node's own connections, if ``url`` leads through a pooler.
            password: the password of the database, instead of one in the URL: text, or a function without arguments
                that returns it. The function is called for every new connection, on any thread, so it must be quick.
            schema: where the tables are, on PostgreSQL.
            metadata: a mapping that JSON can hold; other nodes see it in the list of candidates.
            start: what to do if the database cannot be reached at the start: ``raise`` an error, or ``wait`` for it.

        Raises:
            ConfigError: for settings that cannot work, from the constructor.
            StoreUnavailable: on starting, if the database cannot be reached.
        """
        settings = node_settings(
            url,
            direct_url=direct_url,
            password=password,
            name=name,
            namespace=namespace,
            ttl=ttl,
            renew_every=renew_every,
            takeover=takeover,
            mode=mode,
            schema=schema,
            metadata=metadata,
            start=start,
        )
        super().__init__(Engine(settings, self._happened, self._make_backend))
        self._elections: dict[str, ElectionT] = {}
        self._callbacks: list[Callable[[Event], object]] = []

    @classmethod
    @without_locals
    def from_engine(cls, engine: Any, **settings: Unpack[NodeOptions]) -> Self:
        """Create a node for the database of SQLAlchemy's ``engine`` (an Engine or AsyncEngine).

        The node uses the engine's URL and ``connect_args=`` for its own connections; it never takes a connection from
        the engine's pool. The settings are those of the constructor, except ``url`` and ``password``.

        Raises:
            ConfigError: for an engine that opens connections with ``creator=``, that has an unknown driver, or that
                has arguments which only its driver understands.
        """
        if not settings.keys().isdisjoint(("url", "password")):
            raise ConfigError("from_engine() takes url and password from the engine: leave them out")
        from tenure.databases.handover import target_of  # noqa: PLC0415 - only needed here

        target = target_of(engine)
        return cls(target.url, password=target.password, **settings)

    def __repr__(self) -> str:
        """Show the name, the namespace and the kind of database; never the URL."""
        return f"<{type(self).__name__} {self.name!r} namespace={self.namespace!r} on {self._settings.database}>"

    @property
    def _settings(self) -> NodeSettings:
        return self._engine.settings

    @property
    def name(self) -> str:
        """The human-readable name of this node."""
        return self._settings.name

    @property
    def namespace(self) -> str:
        """The namespace whose roles the node stands for."""
        return self._settings.namespace

    @property
    def database(self) -> str:
        """The kind of database: ``postgresql``, ``mysql`` (MariaDB) or ``sqlite``."""
        return self._settings.database

    @property
    def ttl(self) -> float:
        """Seconds for which the lease is good; less than configured if the largest TTL was raised only recently."""
        return self._engine.ttl

    @property
    def waits(self) -> bool:
        """Whether ``start()`` waits for a database that cannot be reached (``start="wait"``)."""
        return self._settings.start == "wait"

    @property
    def mode(self) -> str | None:
        """How the node elects: ``hybrid``, ``lease`` or ``lock``; None before the first connection."""
        return self._engine.backend.mode

    @property
    def member_id(self) -> str | None:
        """The id of the current membership; None while there is none."""
        return self._engine.member_id

    def stats(self) -> tenure.NodeStats:
        """Return what the node measured: renewals, transitions, and how long ago it saw a leader of each role.

        No I/O. ``tenure.integrations.prometheus`` shows these numbers.
        """
        from tenure.stats import stats_of  # noqa: PLC0415 - slow to import, and a node leads without it

        return stats_of(self._engine)

    def on_event(self, callback: Callable[[Event], object]) -> None:
        """Call ``callback(event)`` when a term of this node, of any role, begins, is suspended, goes on or ends.

        It is called on the thread that :meth:`BaseTerm.on_lost` names. :meth:`BaseElection.on_event` also reports other
        nodes.
        """
        check_callback(callback)
        self._callbacks.append(callback)

    def election(self, role: str, *, lock_id: int | str | None = None) -> ElectionT:
        """Stand for ``role`` without blocking; return the election, the same one each time.

        ``lock_id`` is the number of an advisory lock of PostgreSQL that the node must hold to lead the role, besides
        its lease. The node and a program that takes the same lock by hand exclude each other. In ``mode="lock"`` the
        lock is all there is, and its default is computed from the role's name.
        """
        role = check_name("role", role)
        self._engine.check_running()
        self._engine.assign_lock(role, lock_id)
        with self._engine.lock:
            self._engine.control.check_role(role)
            candidacy = self._engine.candidacy(role)
            if role not in self._elections:
                self._elections[role] = self._make_election(candidacy)
            if not candidacy.of_services:
                candidacy.stand()
        return self._elections[role]

    @abc.abstractmethod
    def _make_election(self, candidacy: Candidacy) -> ElectionT: ...

    @abc.abstractmethod
    def _call(self, action: Callable[[], object]) -> None:
        """Call a callback of the application: on the thread for callbacks, or on the event loop."""

    def _begin_campaign(self, role: str, lock_id: int | str | None) -> Campaign[ElectionT]:
        role = check_name("role", role)
        with self._engine.lock:
            if role in self._campaigns:
                raise ConfigError(
                    f"role {role!r}: this node already leads or campaigns for it: use one lead() or terms() at a "
                    "time, or a separate node for each"
                )
            candidacy = self._engine.candidacy(role)
            stood_before = candidacy.standing
            return Campaign(self.election(role, lock_id=lock_id), candidacy, self._campaigns, withdraw=not stood_before)

    def _warn_without_services(self) -> None:
        if self._supervisor is None:
            log.warning(
                "%s: run() has no services to run: add them before it, with leader_only() or everywhere()", self.name
            )

    def _leave(self) -> None:
        if self._supervisor is not None:
            self._supervisor.close()
        self._engine.close()

    def _raise_if_lost(self, term: BaseTerm) -> None:
        """Raise LeadershipLost at the end of a block whose term is over."""
        self._engine.announce_expiry()
        holding_of(term).raise_if_lost()

    def _happened(self, event: Event) -> None:
        """Log an event of this node's terms, and schedule its callbacks. Called under the engine's lock."""
        if isinstance(event, LeaderChanged):
            return
        reason = event.reason if isinstance(event, Deposed) else None
        log.info(
            "%s: %s role %s, token %d%s",
            self.name,
            type(event).__name__.lower(),
            event.role,
            event.token,
            "" if reason is None else f", {reason}",
            extra={
                "tenure_event": event,
                "tenure_node": self.name,
                "tenure_namespace": self.namespace,
                "tenure_role": event.role,
                "tenure_token": event.token,
                "tenure_reason": reason,
            },
        )
        for callback in self._callbacks:
            self._call(functools.partial(callback, event))


class Node(BaseNode[Election]):
    """Stands for any number of roles, on two connections.

    Use it as a context manager, or call :meth:`start` and :meth:`close`::

        with tenure.Node("postgresql://localhost/app") as node:
            with node.lead("scheduler") as term:
                run_scheduler(term)

    The settings are those of :class:`BaseNode`.
    """

    @functools.cached_property
    def _callback_thread(self) -> CallbackThread:
        return CallbackThread(self.name)

    def start(self) -> Self:
        """Connect, and start the node's threads and services. Coroutines run on an event loop in a new thread."""
        engine = self._engine
        engine.launch()
        try:
            # In slices: Windows handles a signal after a wait, and so does every system if the signal arrives in the
            # moment before the wait begins.
            while not engine.opened.done():
                futures.wait([engine.opened], SIGNAL_S)
            engine.opened.result()
            if self._supervisor is not None:
                import anyio  # noqa: PLC0415 - as in _add_services

                name = f"tenure-services-{self.name}"
                threading.Thread(target=anyio.run, args=(self._supervisor.run,), name=name, daemon=True).start()
                self._supervisor.begin()
        except BaseException as error:
            engine.close()
            if not isinstance(error, TenureError):
                raise
            # Without the calls in the node's thread: they would hide the line that matters.
            raise error.with_traceback(None) from error.__cause__
        return self

    def run(self) -> None:
        """Start, run the services until SIGINT or SIGTERM, and close. For the main thread."""
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError("run() waits for signals, which only the main thread gets: use start() and close() here")
        ended = threading.Event()

        def end(*_: object) -> None:
            ended.set()
            # If start() still waits for the database, close() ends that wait.
            if not self._engine.opened.done():
                threading.Thread(target=self.close, daemon=True).start()

        self._warn_without_services()
        before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            with self:
                # The wait is in slices, as in start().
                while not ended.wait(SIGNAL_S):
                    pass
        except NodeClosed:
            if not ended.is_set():
                raise
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def close(self) -> None:
        """Hand over every role, leave, and close everything. May be called twice; does nothing in a forked child."""
        if self._engine.inherited:
            # The parent owns everything, and one of its threads may have held the locks during the fork.
            return
        self._leave()
        self._callback_thread.close(timeout=5)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def lead(self, role: str, timeout: float | None = None, *, lock_id: int | str | None = None) -> Iterator[Term]:
        """Wait until this node leads, run the block, and hand over when the block is left.

        Raises LeadershipLost when the block is left if the term was lost meanwhile. Inside the block, ``term.ensure()``
        raises it.
        """
        with self._campaign(role, lock_id) as campaign:
            term = campaign.election.wait(timeout)
            term.on_lost(campaign.stand_down)
            yield term
            self._raise_if_lost(term)

    def terms(self, role: str, *, lock_id: int | str | None = None) -> Iterator[Term]:
        """Yield every term that this node gets, for as long as the node runs; leaving the loop hands over."""
        with self._campaign(role, lock_id) as campaign:
            while self._engine.running:
                campaign.check_over()
                self._engine.wait_for(lambda: campaign.has_next)
                if (term := campaign.take_next()) is not None:
                    yield term
            self._engine.check_own()

    @contextlib.contextmanager
    def _campaign(self, role: str, lock_id: int | str | None) -> Iterator[Campaign[Election]]:
        campaign = self._begin_campaign(role, lock_id)
        try:
            yield campaign
        finally:
            campaign.end()
            # A forked child leaves the parent's term alone.
            with contextlib.suppress(NodeClosed):
                self._engine.wait_for(lambda: campaign.candidacy.released, HAND_OVER_S)

    def _call(self, action: Callable[[], object]) -> None:
        self._callback_thread.call(action)

    def _make_election(self, candidacy: Candidacy) -> Election:
        return Election(candidacy, self._callback_thread.call)
