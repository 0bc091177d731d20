"""A term: one holding of a role, numbered by its token. A value with a deadline; every read compares with the clock."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tenure import connections
from tenure.clock import now
from tenure.engine import Lease
from tenure.errors import ConfigError, Fenced, LeadershipLost, NodeClosed, NotLeader
from tenure.settings import check_bound, check_timeout
from tenure.values import JobRecord

if TYPE_CHECKING:
    from typing_extensions import Self

    from tenure.election import BaseElection, Election


NOT_FENCEABLE = (
    "mode='lock' has no fencing token, so nothing can be fenced: a paused leader's late write is not refused. Use "
    "mode='hybrid', which needs tables"
)


def _claims() -> Any:
    """Load what few programs need: the runs of jobs."""
    from tenure import claims  # noqa: PLC0415

    return claims


class BaseTerm:
    """What a term is, whoever waits for it."""

    def __init__(self, election: BaseElection[Any], token: int, member_id: str, lease: Lease) -> None:
        """Begin under a lease; made by the election, not by you."""
        self._election = election
        self._lease = lease
        self._reason: str | None = None
        self._callbacks: list[Callable[[Self], object]] = []
        self.token = token
        """The fencing token: it only grows from term to term. 0 in mode ``lock``, where there is none."""
        self.member_id = member_id
        """The membership under which the role was acquired."""

    def __repr__(self) -> str:
        """Show role, token and state."""
        state = f"lost: {self._reason}" if self._reason else ("valid" if self.valid else "not valid")
        return f"<{type(self).__name__} role={self.role!r} token={self.token} {state}>"

    @property
    def role(self) -> str:
        """The role that is held."""
        return self._election.role

    @property
    def namespace(self) -> str:
        """The namespace of the role."""
        return self._election.namespace

    @property
    def schema(self) -> str:
        """The schema of Tenure's tables (PostgreSQL)."""
        return self._election.schema

    @property
    def valid(self) -> bool:
        """Whether this term may be acted on at this moment. False in doubt; False for good once lost."""
        return now() < self._lease.deadline and self._reason is None

    @property
    def trusted_until(self) -> float:
        """When trust ends unless it is renewed, by ``tenure.clock``; long ago while in doubt."""
        return self._lease.deadline

    @property
    def remaining(self) -> float:
        """Seconds until trust ends unless it is renewed; 0 if it has ended."""
        return max(0.0, self._lease.deadline - now()) if self._reason is None else 0.0

    @property
    def lost_reason(self) -> str | None:
        """Why the term is over; None while it is not."""
        return self._reason

    def on_lost(self, callback: Callable[[Self], object]) -> None:
        """Call ``callback(term)`` when the term is over; at once if it is over already.

        A ``Node`` calls it on a thread for callbacks, an ``AsyncNode`` on its event loop.
        """
        self._election.on_lost(self, callback)

    def lose(self, reason: str) -> list[Callable[[Self], object]]:
        """Mark the term as over and return who wants to know; called by the election."""
        self._reason = reason
        callbacks, self._callbacks = self._callbacks, []
        return callbacks

    @property
    def _settled(self) -> bool:
        return self._reason is not None or self.valid

    def _check(self) -> None:
        """Let a deadline that has passed be announced; and in a forked child nobody would ever end the doubt."""
        self._election.settle()
        if self._reason is None:
            self._election.check_running()

    def _raise_if_lost(self) -> None:
        if self._reason is not None:
            msg = f"role {self.role!r}: the term with token {self.token} is over ({self._reason})"
            raise LeadershipLost(msg, role=self.role, token=self.token)

    def _is_own_end(self, error: BaseException | None) -> bool:
        """Whether an error says no more than that this term is over: then its block has ended as it should."""
        over = isinstance(error, LeadershipLost) or (isinstance(error, Fenced) and not error.retryable)
        return over and (error.role, error.token) == (self.role, self.token)  # type: ignore[union-attr]

    def _bound(self, bound: float | None) -> float:
        if self._election.has_no_token:
            raise ConfigError(NOT_FENCEABLE)
        return self._election.ttl if bound is None else check_bound(bound)

    @contextlib.contextmanager
    def _fenced(self, bound: float | None) -> Iterator[Transaction]:
        bound_s = self._bound(bound)
        with self._election.backend.transaction() as connection:
            connections.fence(connection, self, bound_s)
            yield Transaction(connection, self, bound_s)


class Term(BaseTerm):
    """One holding of one role by this node. Once lost, it stays lost.

    As a context manager it ends with its block: leaving the block resigns the term if it still stands, and a
    LeadershipLost or Fenced that says that this term is over is swallowed, so that a loop over ``node.terms(role)``
    campaigns again.
    """

    _election: Election

    def ensure(self) -> None:
        """Return if the term is valid; raise LeadershipLost if it is over.

        In doubt (the database restarts) it waits until the doubt is over, which takes no longer than the trust lasts.
        """
        if self.valid:
            return
        self._check()
        self._election.wait_for(lambda: self._settled, None)
        self._raise_if_lost()

    def wait_lost(self, timeout: float | None = None) -> bool:
        """Wait until the term is over; False if ``timeout`` seconds pass first."""
        self._election.wait_for(lambda: self._reason is not None, check_timeout(timeout))
        self._election.settle()  # who was paused may be here before the keeper has said so
        return self._reason is not None

    def fence(self, connection: Any, *, bound: float | None = None) -> None:
        """Check inside the transaction of ``connection`` that this term is the latest, and keep it so until it ends.

        Raises Fenced if it is not: on PostgreSQL the transaction then cannot commit, elsewhere it has been rolled
        back. The database judges; no local clock is asked. The server ends the transaction after ``bound`` seconds
        (the TTL by default), so that a paused leader holds up its successor no longer.
        """
        connections.fence(connection, self, self._bound(bound))

    def claim(self, connection: Any, job: str, due: datetime, *, bound: float | None = None) -> bool:
        """Fence the transaction of ``connection``, and claim in it the run of ``job`` that is due at ``due``.

        True if neither that run nor a later one was claimed before, by whichever term of the role. The claim stands
        when the transaction commits, and what is written beside it happens as often as the claim: at most once. Raises
        Fenced as :meth:`fence` does.
        """
        return bool(_claims().perform(connection, self, self._bound(bound), _claims().claim(self, job, due)))

    def finish(self, connection: Any, job: str, due: datetime, *, bound: float | None = None) -> bool:
        """Fence the transaction of ``connection``, and mark in it the run of ``job`` that was due at ``due`` as done.

        True if neither that run nor a later one was marked before. What a run that may be repeated writes beside
        this happens once, if it is left out (rolled back) where this says False.
        """
        return bool(_claims().perform(connection, self, self._bound(bound), _claims().finish(self, job, due)))

    def transaction(self, *, bound: float | None = None) -> contextlib.AbstractContextManager[Transaction]:
        """Open a fenced transaction on a connection of its own; it commits only if this term is still the latest."""
        return self._fenced(bound)

    def resign(self, to: str | None = None) -> None:
        """Hand over now; see :meth:`Election.resign`."""
        if self._reason is None:
            self._election.resign(to)

    def __enter__(self) -> Self:
        """Begin the block of this term."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Resign if the term still stands; swallow its own LeadershipLost."""
        with contextlib.suppress(NodeClosed, NotLeader):  # a forked child leaves the parent's term alone; lost just now
            self.resign()
        return self._is_own_end(error)


class Transaction:
    """A fenced transaction: run statements on it, nothing else. It commits when its block is left."""

    def __init__(self, connection: Any, term: BaseTerm, bound_s: float) -> None:
        """Wrap the driver's connection."""
        self._connection = connection
        self._term = term
        self._bound_s = bound_s

    def execute(self, sql: str, parameters: Any = ()) -> Any:
        """Run a statement and return the cursor; parameters are in the driver's style (sqlite3 ``?``, else ``%s``)."""
        self._check_open()
        return connections.execute(self._connection, sql, parameters)

    def claim(self, job: str, due: datetime) -> bool:
        """Claim the run of ``job`` that is due at ``due``; see :meth:`Term.claim`."""
        return bool(self._ask(_claims().claim(self._term, job, due)))

    def finish(self, job: str, due: datetime) -> bool:
        """Mark the run of ``job`` that was due at ``due`` as done; see :meth:`Term.finish`."""
        return bool(self._ask(_claims().finish(self._term, job, due)))

    def anchor(self, job: str, at: datetime) -> datetime:
        """Set the moment from which the interval of ``job`` is counted, if it has none; return the one that stands."""
        anchor: datetime = self._ask(_claims().anchor(self._term, job, at))
        return anchor

    def jobs(self) -> list[JobRecord]:
        """Return the jobs of the role, by name, as this transaction sees them."""
        records: list[JobRecord] = self._ask(_claims().jobs(self._term))
        return records

    def forget(self, job: str) -> bool:
        """Forget everything about ``job``, its claims included; False if there was nothing. For jobs that are gone."""
        return bool(self._ask(_claims().forget(self._term, job)))

    def _ask(self, ask: Any) -> Any:
        self._check_open()
        return _claims().perform(self._connection, self._term, self._bound_s, ask)

    def _check_open(self) -> None:
        if not connections.in_transaction(self._connection):
            raise ConfigError("this fenced transaction was ended by a statement of its own: leave that to its block")

    def cut(self) -> None:
        """Make a statement that is under way in another thread fail, within a second."""
        connections.cut(self._connection)
