"""Election step by step: without a node and without a thread, by the clock of the database.

For scripts, serverless functions, and applications with their own loop.

    >>> from tenure import manual
    >>> manual.use("postgresql://localhost/app")
    >>> leader = manual.elect("worker-1", role="clean-up", expire=90)
    >>> if leader and leader.mine:
    ...     clean_up()

Each call asks the database and returns; nothing runs in between. A candidate expires when it does not call
:func:`elect` or :func:`heartbeat` for longer than its expiry, by the *database's* clock; the next candidate that calls
then leads. If that clock jumps, a term can end early or late, which cannot happen to a node. Candidates share roles and
tokens with nodes: a :class:`tenure.Node` and a step-by-step candidate exclude each other.

With ``session=``, SQLAlchemy's Session or Connection, a call runs in your own open transaction, and is committed or
rolled back with it. Without ``session=``, it runs on one connection that this process keeps.
"""

from __future__ import annotations

import atexit
import os
import random
import socket
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar
from uuid import UUID

from tenure import __version__
from tenure.base import clock
from tenure.base.tracebacks import without_locals
from tenure.core import messages
from tenure.core.evidence import Evidence
from tenure.core.messages import Verdict
from tenure.databases.backend import backend_for, prepare_tables
from tenure.databases.sqlite.connect import SqliteConnector
from tenure.errors import NotLeader, StoreUnavailable
from tenure.fence import fence
from tenure.fence.sqlalchemy_session import borrow
from tenure.manual.steps import ManualElection, RoleState, SteppedMember
from tenure.settings import Password, check_bound, check_name, check_ttl, node_settings
from tenure.store import migrations
from tenure.store.control import ControlStore, Identity
from tenure.store.records import Candidate, LeaderInfo
from tenure.store.session import Failed, Gone, Session
from tenure.store.watch import NoSentinel

__all__ = [
    "Leader",
    "close",
    "elect",
    "heartbeat",
    "is_leader",
    "leader",
    "list_candidates",
    "register_candidate",
    "set_expire",
    "unregister_candidate",
    "use",
]

DEFAULT_EXPIRE_S = 60.0
PATIENCE_S = 15.0
"""How long a call retries while other transactions hold the locks that it needs."""

CandidateId = str | UUID
Answer = TypeVar("Answer")
Observations = dict[tuple[str, str], Evidence]


@dataclass(frozen=True)
class Leader(LeaderInfo):
    """The leader, as :func:`elect` found or elected it; ``name`` is the candidate's id, or a node's name."""

    namespace: str
    schema: str
    mine: bool
    """Whether the leader is the candidate that asked."""
    expire: float
    """The leader's expiry in seconds (a node's TTL)."""
    file = ""

    def fence(self, connection: Any, bound: float | None = None) -> None:
        """Check that this term is the latest, and keep it so until the transaction of ``connection`` ends.

        Raises Fenced if the term is over; the transaction then cannot commit. Raises NotLeader if another candidate
        leads (``mine`` is False). ``connection`` may be of any kind that :meth:`tenure.Term.fence` takes; ``bound`` is
        the expiry by default.
        """
        if not self.mine:
            raise NotLeader(f"role {self.role!r}: {self.name!r} leads, so this candidate has no term", role=self.role)
        fence.fence(connection, self, self.expire if bound is None else check_bound(bound))


class _OwnConnection:
    """The connection for calls without ``session=``: one per process, for one caller at a time."""

    @without_locals
    def __init__(self, url: str | None, schema: str, password: Password | None) -> None:
        self._settings = node_settings(
            url, password=password, name="manual", takeover="strict", mode="lease", schema=schema
        )
        self._backend = backend_for(self._settings)
        self._start_over()

    def _start_over(self) -> None:
        self._owner = os.getpid()
        self._calling = threading.Lock()
        self._session: Any = None
        self._observations: Observations = {}

    def call(self, namespace: str, work: Callable[[ManualElection], Answer]) -> Answer:
        """Call ``work`` on the connection; try again if the connection was lost, or another transaction held a lock."""
        if self._owner != os.getpid():
            # This is a forked child, and the connection is the parent's. Keep a reference, so that it is not closed.
            self._inherited = self._session
            self._start_over()
        give_up_at = time.monotonic() + PATIENCE_S
        reopened = False
        with self._calling:
            while True:
                try:
                    return work(self._election(namespace))
                except Gone as error:
                    self._disconnect()
                    if reopened:
                        raise StoreUnavailable(str(error)) from None
                    reopened = True
                except Failed as error:
                    if not _lock_was_taken(error):
                        raise StoreUnavailable(str(error)) from None
                    if time.monotonic() >= give_up_at:
                        raise StoreUnavailable(
                            f"open transactions have kept Tenure's rows locked for {PATIENCE_S:g} s: end those "
                            f"transactions, then try again ({error})"
                        ) from None
                    time.sleep(0.02 * random.random())  # noqa: S311 - so that two callers do not retry in step

    def close(self) -> None:
        """Close the connection, if it is this process's own."""
        if self._owner == os.getpid():
            with self._calling:
                self._disconnect()

    def _election(self, namespace: str) -> ManualElection:
        if self._session is None:
            if self._settings.database == "sqlite":
                # Create the file if this is the first process to use it.
                SqliteConnector(self._settings.sqlite_path, self._settings.renew_every).open().close()
            self._session = self._backend.open_session()
            prepare_tables(self._session)
            # Register no connection for the candidates: a node that ends one of them must not terminate this one.
            self._session.pid, self._session.started = 0, ""
        return ManualElection(_store(self._session, namespace), self._observations, self._find_dead)

    def _disconnect(self) -> None:
        self._observations.clear()
        if self._session is not None:
            self._session.close()
            self._session = None

    def _find_dead(self, member_id: str, role: str) -> tuple[Verdict, ...]:
        """Find dead members as a node does: on a watch connection, confirmed by opening a fresh connection."""
        watch, session = self._backend.open_watch()
        try:
            observation = Evidence()
            look = messages.Look(member_id, None, 0.0, observation.reach, (role,))
            observation.look(watch.look(look), member_id, clock.now())
            if not observation.suspects:
                return ()
            knocked = watch.perform(messages.Knock(observation.server_start))
            return observation.knocked(accepted=isinstance(knocked, messages.Knocked) and knocked.open)
        finally:
            session.close()


@dataclass
class _CallersDatabase:
    """What this process knows about a database that it reaches through ``session=``."""

    schemas: set[str] = field(default_factory=set)
    """The schemas in which the tables have been found."""
    observations: Observations = field(default_factory=dict)


@dataclass
class _Settings:
    expire: float = DEFAULT_EXPIRE_S
    schema: str = "tenure"
    place: _OwnConnection | None = None


_settings = _Settings()
_setting = threading.Lock()
_elsewhere: weakref.WeakKeyDictionary[Any, _CallersDatabase] = weakref.WeakKeyDictionary()


@without_locals
def use(url: str | None = None, *, schema: str = "tenure", password: Password | None = None) -> None:
    """Set the database to use, as for a :class:`tenure.Node`; by default ``TENURE_URL``, else the user's SQLite file.

    ``schema`` also applies to ``session=``. The first call without ``session=`` creates the tables.
    """
    place = _OwnConnection(url, schema, password)
    with _setting:
        before, _settings.place = _settings.place, place
        _settings.schema = schema
    if before is not None:
        before.close()


def close() -> None:
    """Close the connection that this process keeps, if there is one; the next call opens another."""
    if _settings.place is not None:
        _settings.place.close()


def set_expire(seconds: float) -> None:
    """Set the expiry of candidates that register from now on without ``expire=``; it is 60 seconds at first."""
    _settings.expire = check_ttl("expire", seconds)


def register_candidate(
    candidate_id: CandidateId,
    ns: str | None = None,
    *,
    role: str = "leader",
    expire: float | None = None,
    session: Any = None,
) -> None:
    """Stand for ``role``, or renew the candidacy: the candidate expires ``expire`` seconds from now.

    Args:
        candidate_id: text of 1 to 255 bytes, or a UUID. The same id is the same candidate, whichever process calls.
        ns: the namespace; by default ``TENURE_NAMESPACE``, else ``default``.
        role: the role to stand for; a namespace has any number of roles, each with its own leader.
        expire: seconds, 1 to 3600; by default the candidate's previous expiry, else that of :func:`set_expire`.
        session: SQLAlchemy's Session or Connection, to register in your transaction.
    """
    name, role = _checked(candidate_id, role)
    ttl = _expire(expire)
    _call(ns, session, lambda election: election.register(name, role, ttl, _settings.expire), writes=True)


def heartbeat(
    candidate_id: CandidateId,
    ns: str | None = None,
    *,
    role: str = "leader",
    expire: float | None = None,
    session: Any = None,
) -> None:
    """Do the same as :func:`register_candidate`; a leader that calls this in time goes on leading."""
    register_candidate(candidate_id, ns, role=role, expire=expire, session=session)


def elect(
    candidate_id: CandidateId,
    ns: str | None = None,
    *,
    role: str = "leader",
    expire: float | None = None,
    session: Any = None,
) -> Leader | None:
    """Renew the candidate and its term, or take the role if it is vacant; return the leader.

    ``leader.mine`` says whether this candidate leads, ``leader.token`` is the term's token, and ``leader.fence(…)``
    checks the term inside a transaction. None means that there is no leader: this candidate was asked to resign, the
    role is reserved for another candidate or its row is locked, or the server has just been replaced.

    The arguments are those of :func:`register_candidate`.
    """
    name, role = _checked(candidate_id, role)
    ttl = _expire(expire)

    def work(election: ManualElection) -> tuple[SteppedMember, RoleState | None]:
        own = election.register(name, role, ttl, _settings.expire)
        return own, election.elect(own, role)

    own, holding = _call(ns, session, work, writes=True)
    if holding is None or holding.member_id is None:
        return None
    mine, expires_after = holding.member_id == own.id, holding.ttl_ms / 1000
    return Leader(
        **vars(holding.leader(role)), namespace=_namespace(ns), schema=_settings.schema, mine=mine, expire=expires_after
    )


def is_leader(candidate_id: CandidateId, ns: str | None = None, *, role: str = "leader", session: Any = None) -> bool:
    """Ask the database whether the candidate leads at this moment; False for an unknown candidate."""
    name, role = _checked(candidate_id, role)
    return _call(ns, session, lambda election: election.leads(name, role))


def leader(ns: str | None = None, *, role: str = "leader", session: Any = None) -> LeaderInfo | None:
    """Return the leader, or None. A node counts as the leader for as long as its membership lasts."""
    role = check_name("role", role)
    holding = _call(ns, session, lambda election: election.holding(role))
    return holding.leader(role) if holding is not None and holding.held else None


def list_candidates(ns: str | None = None, *, role: str = "leader", session: Any = None) -> list[Candidate]:
    """Return the candidates for the role, in the order of joining; ``name`` is the candidate's id, or a node's name."""
    role = check_name("role", role)
    return _call(ns, session, lambda election: election.candidates(role))


def unregister_candidate(candidate_id: CandidateId, ns: str | None = None, *, session: Any = None) -> bool:
    """Withdraw the candidate from the namespace; its roles are vacant at once. False if it was unknown or expired."""
    name, _ = _checked(candidate_id, "leader")
    return _call(ns, session, lambda election: election.unregister(name), writes=True)


def _call(ns: str | None, session: Any, work: Callable[[ManualElection], Answer], *, writes: bool = False) -> Answer:
    namespace = _namespace(ns)
    if session is not None:
        return work(_borrowed_election(namespace, session, writes=writes))
    with _setting:
        if _settings.place is None:
            _settings.place = _OwnConnection(None, _settings.schema, None)
        place = _settings.place
    return place.call(namespace, work)


def _borrowed_election(namespace: str, session: Any, *, writes: bool) -> ManualElection:
    borrowed = borrow(session, _settings.schema)
    if writes:
        borrowed.write()
    known = _elsewhere.setdefault(borrowed.engine, _CallersDatabase())
    if _settings.schema not in known.schemas:
        migrations.require_newest(borrowed)
        known.schemas.add(_settings.schema)
    return ManualElection(_store(borrowed, namespace), known.observations)


def _store(session: Session, namespace: str) -> ControlStore:
    identity = Identity(socket.gethostname(), os.getpid(), __version__)
    return ControlStore(session, NoSentinel(threading.Event()), namespace, identity)


def _namespace(ns: str | None) -> str:
    if ns is not None:
        return check_name("ns", ns)
    given = os.environ.get("TENURE_NAMESPACE")
    return check_name("TENURE_NAMESPACE", given) if given else "default"


def _checked(candidate_id: CandidateId, role: str) -> tuple[str, str]:
    name = str(candidate_id) if isinstance(candidate_id, UUID) else candidate_id
    return check_name("candidate_id", name), check_name("role", role)


def _expire(expire: float | None) -> float | None:
    return None if expire is None else check_ttl("expire", expire)


def _lock_was_taken(error: Failed) -> bool:
    """Whether a statement failed only because another transaction held a lock (timeout, deadlock, busy file)."""
    sqlstate = getattr(error.__cause__, "sqlstate", None)
    return sqlstate in ("40001", "40P01", "55P03") or "lock" in str(error).lower()


atexit.register(close)
