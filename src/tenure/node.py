"""The node: Tenure in your process."""

from __future__ import annotations

import abc
import contextlib
import functools
import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tenure.dispatch import Dispatcher
from tenure.election import BaseElection, Election
from tenure.engine import Engine, Lease
from tenure.engines import way_of
from tenure.errors import ConfigError, NodeClosed
from tenure.events import Deposed, Elected, Event, Resumed, Suspended
from tenure.settings import Password, check_lock_id, check_name, node_settings
from tenure.term import Term

if TYPE_CHECKING:
    from typing_extensions import Self

log = logging.getLogger("tenure.node")

ElectionT = TypeVar("ElectionT", bound=BaseElection[Any])


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
        self._settings = node_settings(
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
        self._campaigns: set[str] = set()
        self._engine = Engine(self._settings, self)

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
        way = way_of(engine)
        return cls(way.url, password=way.password, **settings)

    def __repr__(self) -> str:
        """Show who and where; never the URL."""
        return f"<{type(self).__name__} {self.name!r} namespace={self.namespace!r} on {self._settings.database}>"

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
            election = self._elections.get(role)
            if election is None:
                election = self._elections[role] = self._make_election(role)
            self._engine.command(lambda protocol, _: protocol.stand(role))
        return election

    def _assign(self, role: str, lock_id: int | str | None) -> None:
        number = None if lock_id is None else check_lock_id(lock_id)
        book = self._engine.backend.book
        if book is not None:
            book.assign(role, number)
        elif number is not None:
            raise ConfigError(
                f"lock_id={lock_id!r} is for mode='lock', and this node's mode is {self._settings.mode!r}"
            )

    @abc.abstractmethod
    def _make_election(self, role: str) -> ElectionT: ...

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
            reason = f", {event.reason}" if isinstance(event, Deposed) else ""
            log.info(
                "%s: %s role %s, token %d%s",
                self.name,
                type(event).__name__.lower(),
                event.role,
                event.token,
                reason,
                extra={"tenure_event": event, "tenure_node": self.name, "tenure_namespace": self.namespace},
            )
        election = self._elections.get(event.role)
        if election is not None:
            election.happened(event, lease, self.member_id or "")


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
        """Connect and start the node's threads."""
        self._engine.start()
        return self

    def close(self) -> None:
        """Hand over every role, leave, and close everything. May be called twice; does nothing in a forked child."""
        if self._engine.inherited:
            return  # nothing here is its own, and a thread that is not here may hold the locks
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

    def _make_election(self, role: str) -> Election:
        return Election(self._engine, role, self._dispatcher.call)
