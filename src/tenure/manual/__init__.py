"""Leader election step by step, without a thread: for scripts, serverless functions, and loops of your own.

    >>> from tenure import manual
    >>> manual.use("postgresql://localhost/app")
    >>> leader = manual.elect("worker-1", role="clean-up", expire=90)
    >>> if leader and leader.mine:
    ...     clean_up()

Each call asks the database and returns; nothing runs in between. A candidate that does not call :func:`elect` or
:func:`heartbeat` for longer than its expiry, by the *database's* clock, is over, and the next to call leads. Candidates
share roles and tokens with nodes: a :class:`tenure.Node` and a step-by-step candidate exclude each other.

With ``session=``, SQLAlchemy's Session or Connection, everything is done in your own open transaction, and is committed
or rolled back with it. Without, on one connection that this process keeps.
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

from tenure import asks, clock, connections, schema
from tenure.asks import Verdict
from tenure.backends import backend_for, prepare_tables
from tenure.booth import Booth, Holding, Own
from tenure.borrowed import borrow
from tenure.errors import NotLeader, StoreUnavailable
from tenure.observation import Observation
from tenure.session import Failed, Gone, Session
from tenure.settings import Password, check_bound, check_name, check_ttl, node_settings
from tenure.sqlite import SqliteConnector
from tenure.store import Identity, Store
from tenure.values import Candidate, LeaderInfo
from tenure.version import __version__
from tenure.watch import NoSentinel

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
"""How long a call tries again while others hold what it needs."""

CandidateId = str | UUID
Answer = TypeVar("Answer")
Observations = dict[tuple[str, str], Observation]


@dataclass(frozen=True)
class Leader(LeaderInfo):
    """Who leads, as :func:`elect` found or made it; ``name`` is the candidate's id, or a node's name."""

    namespace: str
    schema: str
    mine: bool
    """Whether it is the candidate that asked."""
    expire: float
    """The leader's expiry in seconds (a node's TTL)."""

    def fence(self, connection: Any, bound: float | None = None) -> None:
        """Check, inside the transaction of ``connection``, that this term is the latest; keep it so until it ends.

        Raises Fenced if it is not, and the transaction then cannot commit; NotLeader if it is not ``mine``. The
        connection is of any kind that :meth:`tenure.Term.fence` takes; ``bound`` is the expiry by default.
        """
        if not self.mine:
            raise NotLeader(f"role {self.role!r}: {self.name!r} leads, so there is no term to fence", role=self.role)
        connections.fence(connection, self, self.expire if bound is None else check_bound(bound))


class _Place:
    """Where to elect without ``session=``: one connection of this process, for one caller at a time."""

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

    def call(self, namespace: str, work: Callable[[Booth], Answer]) -> Answer:
        """Do the work on the connection; again where it was gone, or somebody was in the way."""
        if self._owner != os.getpid():  # forked: what is here is the parent's
            self._inherited = self._session
            self._start_over()
        give_up_at = time.monotonic() + PATIENCE_S
        reopened = False
        with self._calling:
            while True:
                try:
                    return work(self._booth(namespace))
                except Gone as error:
                    self._disconnect()
                    if reopened:
                        raise StoreUnavailable(str(error)) from None
                    reopened = True
                except Failed as error:
                    if not _in_the_way(error):
                        raise StoreUnavailable(str(error)) from None
                    if time.monotonic() >= give_up_at:
                        raise StoreUnavailable(
                            f"open transactions have kept Tenure's rows locked for {PATIENCE_S:g} s: end those that "
                            f"stay open, then try again ({error})"
                        ) from None
                    time.sleep(0.02 * random.random())  # noqa: S311 - so that two do not march in step

    def close(self) -> None:
        """Close the connection, if it is this process's own."""
        if self._owner == os.getpid():
            with self._calling:
                self._disconnect()

    def _booth(self, namespace: str) -> Booth:
        if self._session is None:
            if self._settings.database == "sqlite":  # whose file is created by whoever comes first
                SqliteConnector(self._settings.sqlite_path, self._settings.renew_every).open().close()
            self._session = self._backend.open_session()
            prepare_tables(self._session, self._settings)
            # Nobody's registered connection: a node that ends one of its candidates must not cut it off.
            self._session.pid, self._session.started = 0, ""
        return Booth(_store(self._session, namespace), self._observations, self._find_dead)

    def _disconnect(self) -> None:
        self._observations.clear()
        if self._session is not None:
            self._session.close()
            self._session = None

    def _find_dead(self, member_id: str) -> tuple[Verdict, ...]:
        """Look for the dead as a node does: on a connection for looking, and with a fresh one to make sure."""
        watch, session = self._backend.open_watch()
        try:
            observation = Observation()
            observation.look(watch.look(member_id), member_id, clock.now())
            if not observation.suspects:
                return ()
            knocked = watch.perform(asks.Knock(observation.server_start))
            return observation.knocked(accepted=isinstance(knocked, asks.Knocked) and knocked.open)
        finally:
            session.close()


@dataclass
class _Elsewhere:
    """What this process knows of a database that it reaches by ``session=``."""

    schemas: set[str] = field(default_factory=set)
    """Where the tables have been found."""
    observations: Observations = field(default_factory=dict)


@dataclass
class _Settings:
    expire: float = DEFAULT_EXPIRE_S
    schema: str = "tenure"
    place: _Place | None = None


_settings = _Settings()
_setting = threading.Lock()
_elsewhere: weakref.WeakKeyDictionary[Any, _Elsewhere] = weakref.WeakKeyDictionary()


def use(url: str | None = None, *, schema: str = "tenure", password: Password | None = None) -> None:
    """Say which database to use: as for a :class:`tenure.Node`; without a word, ``TENURE_URL`` or the user's own file.

    ``schema`` holds for ``session=`` too. The tables are created with the first call that is made without ``session=``.
    """
    place = _Place(url, schema, password)
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
    """Set the expiry of candidates that register from now on without one of their own; it is 60 seconds at first."""
    _settings.expire = check_ttl("expire", seconds)


def register_candidate(
    candidate_id: CandidateId,
    ns: str | None = None,
    *,
    role: str = "leader",
    expire: float | None = None,
    session: Any = None,
) -> None:
    """Stand for ``role``, or go on standing: the candidate is good for another ``expire`` seconds.

    Args:
        candidate_id: text of 1 to 255 bytes, or a UUID. The same id is the same candidate, whichever process calls.
        ns: the namespace; else ``TENURE_NAMESPACE``, else ``default``.
        role: the office; a namespace has as many as you like, each with a leader of its own.
        expire: seconds, 1 to 3600; else what the candidate registered with before, else that of :func:`set_expire`.
        session: SQLAlchemy's Session or Connection, to do it in your transaction.
    """
    _register(candidate_id, ns, role, expire, session)


def heartbeat(
    candidate_id: CandidateId,
    ns: str | None = None,
    *,
    role: str = "leader",
    expire: float | None = None,
    session: Any = None,
) -> None:
    """Do as :func:`register_candidate`; a leader that calls it in time goes on leading."""
    _register(candidate_id, ns, role, expire, session)


def elect(
    candidate_id: CandidateId,
    ns: str | None = None,
    *,
    role: str = "leader",
    expire: float | None = None,
    session: Any = None,
) -> Leader | None:
    """Renew the candidate and its term, or take the role if nobody leads; return who leads then.

    ``leader.mine`` says whether it is this candidate, ``leader.token`` under which number, and ``leader.fence(…)``
    holds that inside a transaction. None means that nobody leads: somebody asked this candidate to resign, the role is
    kept for another or its row is locked, or the server has just been replaced.

    The arguments are those of :func:`register_candidate`.
    """
    name, role = _checked(candidate_id, role)
    ttl = _expire(expire)

    def work(booth: Booth) -> tuple[Own, Holding | None]:
        own = booth.register(name, role, ttl, _settings.expire)
        return own, booth.elect(own, role)

    own, holding = _call(ns, session, work, writes=True)
    if holding is None or holding.member_id is None:
        return None
    return Leader(
        role,
        holding.token,
        holding.member_id,
        holding.name,
        holding.since,
        holding.renewed_ago,
        _namespace(ns),
        _settings.schema,
        mine=holding.member_id == own.id,
        expire=holding.ttl_ms / 1000,
    )


def is_leader(candidate_id: CandidateId, ns: str | None = None, *, role: str = "leader", session: Any = None) -> bool:
    """Whether the candidate leads, as the database answers at this moment; False for one that nobody knows."""
    name, role = _checked(candidate_id, role)
    return _call(ns, session, lambda booth: booth.leads(name, role))


def leader(ns: str | None = None, *, role: str = "leader", session: Any = None) -> LeaderInfo | None:
    """Return who leads, or None. A node is shown for as long as its membership stands."""
    role = check_name("role", role)
    holding = _call(ns, session, lambda booth: booth.holding(role))
    if holding is None or not holding.held or holding.member_id is None:
        return None
    return LeaderInfo(role, holding.token, holding.member_id, holding.name, holding.since, holding.renewed_ago)


def list_candidates(ns: str | None = None, *, role: str = "leader", session: Any = None) -> list[Candidate]:
    """Return who stands for the role, in the order in which they joined; ``name`` is a candidate's id, or a node's."""
    role = check_name("role", role)
    return _call(ns, session, lambda booth: booth.candidates(role))


def unregister_candidate(candidate_id: CandidateId, ns: str | None = None, *, session: Any = None) -> bool:
    """Stop standing in this namespace; what the candidate led is vacant at once. False if it was over already."""
    name, _ = _checked(candidate_id, "leader")
    return _call(ns, session, lambda booth: booth.unregister(name), writes=True)


def _register(candidate_id: CandidateId, ns: str | None, role: str, expire: float | None, session: Any) -> None:
    name, role = _checked(candidate_id, role)
    ttl = _expire(expire)
    _call(ns, session, lambda booth: booth.register(name, role, ttl, _settings.expire), writes=True)


def _call(ns: str | None, session: Any, work: Callable[[Booth], Answer], *, writes: bool = False) -> Answer:
    namespace = _namespace(ns)
    if session is not None:
        return work(_borrowed_booth(namespace, session, writes=writes))
    with _setting:
        if _settings.place is None:
            _settings.place = _Place(None, _settings.schema, None)
        place = _settings.place
    return place.call(namespace, work)


def _borrowed_booth(namespace: str, session: Any, *, writes: bool) -> Booth:
    borrowed = borrow(session, _settings.schema)
    if writes:
        borrowed.write()
    known = _elsewhere.setdefault(borrowed.engine, _Elsewhere())
    if _settings.schema not in known.schemas:
        schema.require(borrowed)
        known.schemas.add(_settings.schema)
    return Booth(_store(borrowed, namespace), known.observations)


def _store(session: Session, namespace: str) -> Store:
    identity = Identity(socket.gethostname(), os.getpid(), __version__)
    return Store(session, NoSentinel(threading.Event()), namespace, identity)


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


def _in_the_way(error: Failed) -> bool:
    """Whether a statement failed only because others held what it needs (time-outs, deadlocks, a busy file)."""
    sqlstate = getattr(error.__cause__, "sqlstate", None)
    return sqlstate in ("40001", "40P01", "55P03") or "lock" in str(error).lower()


atexit.register(close)
