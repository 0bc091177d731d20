"""The node: Tenure in your process."""

from __future__ import annotations

import abc
import contextlib
import functools
import logging
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tenure.clock import now
from tenure.dispatch import Dispatcher
from tenure.election import BaseElection, Election
from tenure.engine import Engine, Lease
from tenure.errors import ConfigError, NodeClosed
from tenure.events import Deposed, Elected, Event, Resumed, Suspended
from tenure.meter import NodeStats, RoleStats
from tenure.settings import (
    NodeSettings,
    Password,
    check_callback,
    check_lock_id,
    check_name,
    check_stop_within,
    node_settings,
)
from tenure.term import Term

if TYPE_CHECKING:
    from typing_extensions import Self

    from tenure.crew import Crews
    from tenure.services import ServiceInfo

log = logging.getLogger("tenure.node")

ElectionT = TypeVar("ElectionT", bound=BaseElection[Any])
S = TypeVar("S")


class BaseNode(abc.ABC, Generic[ElectionT]):
    """What a node is, whoever waits for it."""

    def __init__(
        self,
        url: str | None = None,
        *,
        name: str | None = None,
        namespace: str | None = None,
        ttl: float | None = None,
        renew_every: float | None = None,
        takeover: str = "instant",
        mode: str = "auto",
        direct_url: str | None = None,
        password: Password | None = None,
        schema: str = "tenure",
        metadata: Mapping[str, Any] | None = None,
        start: str = "raise",
    ) -> None:
        """Check the settings; connect nothing yet.

        Args:
            url: ``postgresql://…``, ``mysql://…`` or ``sqlite:///file.db``; else ``TENURE_URL``; else a SQLite file
                in the user's state directory.
            name: who this is, for people; else ``TENURE_NAME``; else host name and process id.
            namespace: nodes of one namespace know each other; else ``TENURE_NAMESPACE``; else ``default``.
            ttl: seconds for which the lease is good, 1 to 3600; else ``TENURE_TTL``; else 10.
            renew_every: seconds between renewals; a quarter of the TTL by default.
            takeover: ``instant`` (a death is acted on in milliseconds) or ``strict`` (only after the TTL).
            mode: ``hybrid`` (lease and sentinel), ``lease`` (lease alone), ``lock`` (an advisory lock alone: creates
                nothing, has no token), or ``auto``: hybrid, but lease where a pooler is in the way.
            direct_url: where the node's own connections lead, if ``url`` leads through a pooler.
            password: PostgreSQL's, instead of one in the URL: text, or a function without arguments that returns it.
                The function is called for every new connection, on any thread, so let it be quick.
            schema: where the tables are, on PostgreSQL.
            metadata: anything that JSON can hold, shown to others with the candidate.
            start: ``raise`` if the database cannot be reached at the start, or ``wait`` for it.

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
        self._elections: dict[str, ElectionT] = {}
        self._held: dict[str, tuple[Elected, Lease, str]] = {}
        """How the present terms began, for elections that are asked for later."""
        self._campaigns: set[str] = set()
        self._callbacks: list[Callable[[Event], object]] = []
        self._engine = Engine(settings, self)
        self._crews: Crews | None = None

    @classmethod
    def from_engine(cls, engine: Any, **settings: Any) -> Self:
        """Make a node for the database of SQLAlchemy's ``engine`` (an Engine or AsyncEngine).

        It takes over the engine's URL and ``connect_args=`` for connections of its own; it never takes one from the
        engine's pool. The settings are those of the constructor, but for ``url`` and ``password``.

        Raises:
            ConfigError: for an engine that makes its connections by ``creator=``, of a driver that is not known, or
                with arguments that only its driver understands.
        """
        if not settings.keys().isdisjoint(("url", "password")):
            raise ConfigError("from_engine() takes url and password from the engine: leave them out")
        from tenure.engines import way_of  # noqa: PLC0415 - for those who have one

        way = way_of(engine)
        return cls(way.url, password=way.password, **settings)

    def __repr__(self) -> str:
        """Show who and where; never the URL."""
        return f"<{type(self).__name__} {self.name!r} namespace={self.namespace!r} on {self._settings.database}>"

    @property
    def _settings(self) -> NodeSettings:
        return self._engine.settings

    @property
    def name(self) -> str:
        """Who this is, for people."""
        return self._settings.name

    @property
    def namespace(self) -> str:
        """The namespace whose roles it stands for."""
        return self._settings.namespace

    @property
    def database(self) -> str:
        """Which kind of database it is: ``postgresql``, ``mysql`` (MariaDB) or ``sqlite``."""
        return self._settings.database

    @property
    def ttl(self) -> float:
        """Seconds for which the lease is good."""
        return self._settings.ttl

    @property
    def waits(self) -> bool:
        """Whether a start waits for a database that cannot be reached (``start="wait"``)."""
        return self._settings.start == "wait"

    @property
    def mode(self) -> str | None:
        """How it elects: ``hybrid``, ``lease`` or ``lock``; None until the first connection has shown what works."""
        return self._engine.backend.mode

    @property
    def member_id(self) -> str | None:
        """The id of the present membership; None while there is none."""
        return self._engine.protocol.member_id

    def sentinel_descriptors(self) -> list[int]:
        """Return duplicates of the descriptors on which the sentinel stands, to be closed by the caller.

        Whoever holds one keeps the sentinel standing, after this process has died too: for a process that must end
        something else before others may take over. They change with every new connection.
        """
        return self._engine.sentinel_descriptors()

    def stats(self) -> NodeStats:
        """Return what the node measured of itself: renewals, transitions, and how long ago it saw each role held.

        No I/O. What ``tenure.integrations.prometheus`` shows is this.
        """
        self._engine.check_own()
        meter, at = self._engine.meter, now()
        running = self._engine.running
        return NodeStats(
            node=self.name,
            namespace=self.namespace,
            ttl=self.ttl,
            trust_remaining=max(0.0, self._engine.trusted_until - at) if running else 0.0,
            renewed_ago=max(0.0, at - meter.renewed_at) if running else None,
            renewals=meter.renewals,
            renewals_failed=meter.renewals_failed,
            roles=tuple(self._role_stats(role, at) for role in meter.roles()),
        )

    def _role_stats(self, role: str, at: float) -> RoleStats:
        meter, election = self._engine.meter, self._elections.get(role) or self._make_known(role)
        term = election.term
        standing = self._engine.running and election.standing
        seen_ago = max(0.0, at - meter.seen(role)) if term is None else 0.0
        return RoleStats(
            role=role,
            standing=standing,
            is_leader=term is not None,
            token=0 if term is None else term.token,
            transitions=meter.transitions(role),
            leader_seen_ago=seen_ago if standing else None,
        )

    def on_event(self, callback: Callable[[Event], object]) -> None:
        """Call ``callback(event)`` when a term of this node, of any role, begins, is suspended, goes on or ends.

        Where, :meth:`BaseTerm.on_lost` says. Of other nodes' terms :meth:`BaseElection.on_event` tells.
        """
        check_callback(callback)
        self._callbacks.append(callback)

    def election(self, role: str, *, lock_id: int | str | None = None) -> ElectionT:
        """Stand for ``role`` without blocking; return the candidacy, the same one each time.

        ``lock_id`` is for ``mode="lock"``: the number of the advisory lock that stands for the role, so that a program
        which takes that lock by hand and this node exclude each other. Without one, it is made of the role's name.
        """
        role = check_name("role", role)
        self._engine.check_running()
        self._assign(role, lock_id)
        with self._engine.lock:
            self._engine.check_role(role)
            election = self._make_known(role)
            election.of_services = self._crews is not None and role in self._crews.roles
            if not election.of_services:
                self._engine.stand(role)
        return election

    def leader_only(
        self,
        role: str,
        *services: Any,
        name: str | None = None,
        on_failure: str = "restart",
        on_stuck: str = "log",
        start_within: float = 30.0,
        stop_within: float | None = None,
        drain_within: float = 10.0,
    ) -> Any:
        """Run services here while this node leads ``role``. Without services it is a decorator that adds one.

        A service is a coroutine function, which is cancelled to stop it; a plain function, which runs in a thread,
        takes the term and returns when ``term.wait_lost()`` says so; or an object with ``start()`` and ``stop()``.
        They are started in order when this node is elected, and stopped in reverse order when the term is over: on
        ``resign()`` and ``close()`` before the role is released. Call this before the node is started.

        Args:
            role: the role to lead.
            services: what to run.
            name: what one service is called in logs and metrics; else its own name.
            on_failure: what to do when one fails to start, raises or returns: ``restart`` it, after a pause that
                grows, or ``resign``.
            on_stuck: what to do when one has not stopped in time: ``log`` it and go on, or ``exit``, which ends the
                process.
            start_within: seconds for a ``start()``.
            stop_within: seconds for all services of the role to stop when it is lost, a quarter of the TTL by
                default: so much earlier does the node stop trusting its lease. The most that is given counts.
            drain_within: the same for ``resign()`` and ``close()``, where there is time.

        Raises:
            ConfigError: for what is no service, and for times that leave too little of the TTL.
        """
        if callable(role):
            raise ConfigError('name the role that is to be led: @node.leader_only("scheduler")')
        role = check_name("role", role)
        kept_back = check_stop_within(self.ttl / 4 if stop_within is None else stop_within, self._settings)
        settings: dict[str, Any] = {
            "leader_only": True,
            "on_failure": on_failure,
            "on_stuck": on_stuck,
            "start_within": start_within,
            "stop_within": None if stop_within is None else kept_back,
            "drain_within": drain_within,
        }
        return self._add_services(services, role, name, settings)

    def everywhere(
        self, *services: Any, name: str | None = None, start_within: float = 30.0, drain_within: float = 10.0
    ) -> Any:
        """Run services for as long as the node runs, whoever leads. Without services it is a decorator that adds one.

        They are started before those of :meth:`leader_only` and stopped after them. A plain function takes an event
        ``stop`` and returns when it is set; one that fails or returns is started again, after a pause that grows.
        """
        settings: dict[str, Any] = {
            "leader_only": False,
            "on_failure": "restart",
            "on_stuck": "log",
            "start_within": start_within,
            "stop_within": None,
            "drain_within": drain_within,
        }
        return self._add_services(services, None, name, settings)

    def services(self) -> list[ServiceInfo]:
        """Return the services of this node as they are now, in the order in which they are started."""
        return self._crews.infos() if self._crews is not None else []

    def _add_services(
        self, services: tuple[Any, ...], role: str | None, name: str | None, settings: dict[str, Any]
    ) -> Any:
        """Add services, and return the one, or, for a decorator, what adds one."""
        from tenure.crew import Crews  # noqa: PLC0415 - brings an event loop, which many nodes never need
        from tenure.services import service  # noqa: PLC0415

        if name is not None and len(services) > 1:
            raise ConfigError(f"name={name!r} is for one service, and {len(services)} are given: add them one by one")

        def add(target: S) -> S:
            if not self._engine.new:
                raise ConfigError(f"node {self.name!r} was started before: add services before it is")
            if self._crews is None:
                self._crews = Crews(self._engine)
            self._crews.add(service(target, name, settings), role)
            if role is not None:
                self._campaigns.add(role)
                self._assign(role, None)
            return target

        for target in services:
            add(target)
        return services[0] if services else add

    def _assign(self, role: str, lock_id: int | str | None) -> None:
        number = None if lock_id is None else check_lock_id(lock_id)
        book = self._engine.backend.book
        if book is not None:
            book.assign(role, number)
        elif number is not None:
            raise ConfigError(
                f"lock_id={lock_id!r} is for mode='lock', and this node's mode is {self._settings.mode!r}"
            )

    def _make_known(self, role: str) -> ElectionT:
        """Return the candidacy for ``role``, made now if nobody has asked for it before."""
        with self._engine.lock:
            election = self._elections.get(role)
            if election is None:
                election = self._elections[role] = self._make_election(role)
                if role in self._held:  # by its services, who have an election of their own
                    election.happened(*self._held[role])
            return election

    @abc.abstractmethod
    def _make_election(self, role: str) -> ElectionT: ...

    @abc.abstractmethod
    def _call(self, action: Callable[[], object]) -> None:
        """Have a callback of the application called where it belongs."""

    def _begin_campaign(self, role: str, lock_id: int | str | None) -> Campaign[ElectionT]:
        """Stand for ``role`` on behalf of one user: two would hand over under each other."""
        role = check_name("role", role)
        with self._engine.lock:
            if role in self._campaigns:
                raise ConfigError(
                    f"role {role!r}: this node leads or campaigns for it already; use one lead() or terms() at a "
                    "time, or a node for each"
                )
            stood_before = role in self._elections and self._elections[role].standing
            election = self.election(role, lock_id=lock_id)
            self._campaigns.add(role)
        return Campaign(election, self._campaigns, withdraw=not stood_before)

    def happened(self, event: Event, lease: Lease) -> None:
        """Take in an event, under the engine's lock."""
        if self._engine.backend.book is not None:
            event = replace(event, token=0)  # the number of a term here says nothing to anybody else
        if isinstance(event, (Elected, Suspended, Resumed, Deposed)):
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
        if isinstance(event, Elected):
            self._held[event.role] = (event, lease, self.member_id or "")
        elif isinstance(event, Deposed):
            self._held.pop(event.role, None)
        election = self._elections.get(event.role)
        if election is not None:
            election.happened(event, lease, self.member_id or "")
        if self._crews is not None:
            self._crews.happened(event, lease, self.member_id or "")


class Campaign(Generic[ElectionT]):
    """A candidacy for as long as somebody in the application wants it."""

    def __init__(self, election: ElectionT, campaigns: set[str], *, withdraw: bool) -> None:
        """Begin; ``campaigns`` are the roles taken by one, ``withdraw`` if the node is to stop standing at the end."""
        self.election = election
        self._campaigns = campaigns
        self._withdraw = withdraw

    def stand_down(self, _: object = None) -> None:
        """Leave the role to others: the term is lost, and its block may take its time to end."""
        if self._withdraw and self.election.role in self._campaigns:
            with contextlib.suppress(NodeClosed):
                self.election.give_up(withdraw=True)

    def end(self) -> None:
        """Hand over, without waiting for the database. May be called twice."""
        if self.election.role in self._campaigns:
            self._campaigns.discard(self.election.role)
            with contextlib.suppress(NodeClosed):
                self.election.give_up(withdraw=self._withdraw)


class Node(BaseNode[Election]):
    """Stands for any number of roles, on two connections of its own.

    Use it as a context manager, or call :meth:`start` and :meth:`close`::

        with tenure.Node("postgresql://localhost/app") as node:
            with node.lead("scheduler") as term:
                run_scheduler(term)

    The settings are those of :class:`BaseNode`.
    """

    @functools.cached_property
    def _dispatcher(self) -> Dispatcher:
        return Dispatcher(self.name)

    def start(self) -> Self:
        """Connect, and start the node's threads and services. Services that are coroutines get an event loop."""
        if self._crews is not None:
            self._engine.keep_back(self._crews.stop_within)
        self._engine.start()
        if self._crews is not None:
            import anyio  # noqa: PLC0415 - as in _add_services

            self._crews.begin()
            name = f"tenure-services-{self.name}"
            threading.Thread(target=anyio.run, args=(self._crews.run,), name=name, daemon=True).start()
        return self

    def run(self) -> None:
        """Start, run the services until SIGINT or SIGTERM, and close. For the main thread."""
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError("run() waits for signals, which only the main thread gets: use start() and close() here")
        ended = threading.Event()

        def end(*_: object) -> None:
            ended.set()
            if not self._engine.opened.done():  # it waits for the database, and for nothing else
                threading.Thread(target=self.close, daemon=True).start()

        before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            with self:
                ended.wait()
        except NodeClosed:
            if not ended.is_set():
                raise
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def close(self) -> None:
        """Hand over every role, leave, and close everything. May be called twice; does nothing in a forked child."""
        if self._engine.inherited:
            return  # nothing here is its own, and a thread that is not here may hold the locks
        if self._crews is not None:
            self._crews.close()
        self._engine.close()
        for election in list(self._elections.values()):
            election.close()
        self._dispatcher.close(timeout=5)

    def __enter__(self) -> Self:
        """Start."""
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    @contextlib.contextmanager
    def lead(self, role: str, timeout: float | None = None, *, lock_id: int | str | None = None) -> Iterator[Term]:
        """Wait until this node leads, run the block, and hand over on leaving it.

        Raises LeadershipLost on leaving the block if the term was lost meanwhile; inside it, ``term.ensure()`` does.
        """
        with self._campaign(role, lock_id) as campaign:
            term = campaign.election.wait(timeout)
            term.on_lost(campaign.stand_down)
            yield term
            campaign.election.settle()
            if term.lost_reason is not None:
                term.ensure()

    def terms(self, role: str, *, lock_id: int | str | None = None) -> Iterator[Term]:
        """Yield every term that this node gets, for as long as it runs; leaving the loop hands over."""
        term: Term | None = None
        with self._campaign(role, lock_id) as campaign:
            while self._engine.running:
                term = campaign.election.next_term(after=term)
                if term is not None:
                    yield term
            self._engine.check_own()

    @contextlib.contextmanager
    def _campaign(self, role: str, lock_id: int | str | None) -> Iterator[Campaign[Election]]:
        campaign = self._begin_campaign(role, lock_id)
        try:
            yield campaign
        finally:
            campaign.end()
            with contextlib.suppress(NodeClosed):  # a forked child leaves the parent's term alone
                campaign.election.wait_told()

    def _call(self, action: Callable[[], object]) -> None:
        self._dispatcher.call(action)

    def _make_election(self, role: str) -> Election:
        return Election(self._engine, role, self._dispatcher.call)
