"""The node: Tenure in your process."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tenure.dispatch import Dispatcher
from tenure.election import Election
from tenure.engine import Engine, Lease
from tenure.errors import ConfigError, NodeClosed, NotLeader
from tenure.events import Deposed, Elected, Event, Resumed, Suspended
from tenure.settings import check_name, node_settings
from tenure.term import Term

if TYPE_CHECKING:
    from typing_extensions import Self

log = logging.getLogger("tenure.node")


class Node:
    """Stands for any number of roles, on two connections of its own.

    Use it as a context manager, or call :meth:`start` and :meth:`close`::

        with tenure.Node("postgresql://localhost/app") as node:
            with node.lead("scheduler") as term:
                run_scheduler(term)

    Args:
        url: ``postgresql://…`` or ``sqlite:///file.db``; else ``TENURE_URL``; else a SQLite file in the user's state
            directory.
        name: who this is, for people; else ``TENURE_NAME``; else host name and process id.
        namespace: nodes of one namespace know each other; else ``TENURE_NAMESPACE``; else ``default``.
        ttl: seconds for which the lease is good, 1 to 3600; else ``TENURE_TTL``; else 10.
        renew_every: seconds between renewals; a quarter of the TTL by default.
        takeover: ``instant`` (a death is acted on in milliseconds) or ``strict`` (only after the TTL).
        mode: ``hybrid`` (lease and sentinel), ``lease`` (lease alone), or ``auto``.
        schema: where the tables are, on PostgreSQL.
        metadata: anything that JSON can hold, shown to others with the candidate.
        start: ``raise`` if the database cannot be reached at the start, or ``wait`` for it.

    Raises:
        ConfigError: for settings that cannot work, from the constructor.
        StoreUnavailable: on starting, if the database cannot be reached.
    """

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
        schema: str = "tenure",
        metadata: Mapping[str, Any] | None = None,
        start: str = "raise",
    ) -> None:
        """Check the settings; connect nothing yet."""
        self._settings = node_settings(
            url,
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
        self._elections: dict[str, Election] = {}
        self._campaigns: set[str] = set()
        self._dispatcher = Dispatcher(self._settings.name)
        self._engine = Engine(self._settings, self)

    def __repr__(self) -> str:
        """Show who and where; never the URL."""
        return f"<Node {self.name!r} namespace={self.namespace!r} on {self._settings.database}>"

    @property
    def name(self) -> str:
        """Who this is, for people."""
        return self._settings.name

    @property
    def namespace(self) -> str:
        """The namespace whose roles it stands for."""
        return self._settings.namespace

    @property
    def ttl(self) -> float:
        """Seconds for which the lease is good."""
        return self._settings.ttl

    @property
    def member_id(self) -> str | None:
        """The id of the present membership; None while there is none."""
        return self._engine.protocol.member_id

    def start(self) -> Self:
        """Connect and start the node's threads."""
        self._engine.start()
        return self

    def close(self) -> None:
        """Hand over every role, leave, and close everything. May be called twice."""
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

    def election(self, role: str) -> Election:
        """Stand for ``role`` without blocking; return the candidacy, the same one each time."""
        role = check_name("role", role)
        self._engine.check_running()
        with self._engine.lock:
            election = self._elections.get(role)
            if election is None:
                election = self._elections[role] = Election(self._engine, self._dispatcher, role)
        self._engine.command(lambda protocol, _: protocol.stand(role))
        return election

    @contextlib.contextmanager
    def lead(self, role: str, timeout: float | None = None) -> Iterator[Term]:
        """Wait until this node leads, run the block, and hand over on leaving it.

        Raises LeadershipLost on leaving the block if the term was lost meanwhile; inside it, ``term.ensure()`` does.
        """
        with self._campaign(role) as election:
            term = election.wait(timeout)
            yield term
            election.settle()
            if term.lost_reason is not None:
                term.ensure()

    def terms(self, role: str) -> Iterator[Term]:
        """Yield every term that this node gets, for as long as it runs; leaving the loop hands over."""
        token = 0
        with self._campaign(role) as election:
            while self._engine.running:
                term = election.next_term(after=token)
                if term is not None:
                    token = term.token
                    yield term

    @contextlib.contextmanager
    def _campaign(self, role: str) -> Iterator[Election]:
        """Stand for ``role`` during the block, on behalf of one user: two would hand over under each other."""
        role = check_name("role", role)
        if role in self._campaigns:
            raise ConfigError(
                f"role {role!r}: this node leads or campaigns for it already; use one lead() or terms() at a "
                "time, or a node for each"
            )
        self._campaigns.add(role)
        stood_before = role in self._elections and self._elections[role].standing
        try:
            election = self.election(role)
            try:
                yield election
            finally:
                with contextlib.suppress(NodeClosed, NotLeader):
                    election.resign() if stood_before else election.withdraw()
        finally:
            self._campaigns.discard(role)

    def happened(self, event: Event, lease: Lease) -> None:
        """Take in an event, under the engine's lock."""
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
