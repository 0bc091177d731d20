"""A namespace as its tables show it, for people and programs that are no members of it.

It looks, asks a leader to resign, and keeps house: creates the tables, sets the largest TTL, forgets a namespace.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tenure import schema, statements, timing, values
from tenure.backends import LOOK_TIMEOUT_S, backend_for
from tenure.dialing import limited
from tenure.errors import ConfigError, NotLeader, StoreUnavailable, WaitTimeout
from tenure.session import Failed, Gone, Step
from tenure.settings import Password, check_limit, check_name, check_ttl, node_settings
from tenure.values import JobRecord, LeaderInfo, TermRecord

if TYPE_CHECKING:
    from typing_extensions import Self

LOOK_EVERY_S = 0.02
LOCK_NOT_AVAILABLE = "55P03"


class _Busy(StoreUnavailable):
    """Somebody holds a lock on the row."""


@dataclass(frozen=True)
class RoleInfo:
    """A role, who holds it, and how many stand for it."""

    role: str
    token: int
    leader: LeaderInfo | None
    overdue: bool
    """Whether the leader has not renewed within its TTL: it is dead, paused or cut off, and nobody has taken over."""
    candidates: int


@dataclass(frozen=True)
class MemberInfo:
    """A living member, where it runs, and what it holds."""

    member_id: str
    name: str
    host: str
    pid: int
    version: str
    mode: str
    takeover: str
    ttl: float
    joined: datetime
    renewed_ago: float
    """Seconds since its last renewal, by the database's clock. For people: nothing is decided by it."""
    overdue: bool
    """Whether that is more than its TTL."""
    leads: tuple[str, ...]


class Registry:
    """What a namespace's tables say. Use it as a context manager.

    The settings are those of a node. Nothing is created but by :meth:`create`.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        namespace: str | None = None,
        schema: str = "tenure",
        password: Password | None = None,
    ) -> None:
        """Check the settings; connect nothing yet."""
        self._settings = node_settings(url, password=password, name="registry", namespace=namespace, schema=schema)
        self._backend = backend_for(self._settings)
        self._session: Any = None

    @property
    def namespace(self) -> str:
        """The namespace that it shows."""
        return self._settings.namespace

    def __enter__(self) -> Self:
        """Connect."""
        self.connect()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Disconnect."""
        self.close()

    def connect(self) -> None:
        """Connect to tables that are there already; anew, if the connection was lost."""
        self.close()
        self._session = self._backend.open_session()
        try:
            with self._asking():
                schema.require(self._session)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Disconnect."""
        if self._session is not None:
            self._session.close()

    def create(self, max_ttl: float | None = None) -> int:
        """Create the tables, or bring them up to date; set the namespace's largest TTL. Return the tables' version."""
        largest = None if max_ttl is None else check_ttl("max_ttl", max_ttl)
        store, self._session, _ = self._backend.open_control()
        try:
            if largest is not None:
                self._limit_ttl(largest)
            with self._asking():
                store.release()
                return schema.require(self._session)
        finally:
            self.close()

    def _limit_ttl(self, largest: float) -> None:
        longer = [f"{member.name!r} ({member.ttl:g})" for member in self.members() if member.ttl > largest]
        if longer:
            raise ConfigError(
                f"max_ttl={largest:g} is below the TTL of living members, who rely on it: stop them first "
                f"({', '.join(longer)})"
            )
        limit = {"namespace": self.namespace, "max_ttl_ms": round(largest * 1000)}
        with self._asking():
            self._session.run(Step(statements.SET_MAX_TTL, limit))

    def namespaces(self) -> list[str]:
        """Return the names of all namespaces that these tables hold."""
        return [name for (name,) in self._read(statements.NAMESPACES)]

    @values.legible()
    def roles(self) -> list[RoleInfo]:
        """Return every role of the namespace, by name."""
        found = []
        for role, token, id_, name, began, renewed, ttl_ms, now, candidates in self._read(statements.ROLES):
            leader, overdue = None, False
            if id_ is not None:
                ago = values.seconds_between(renewed, now)
                leader, overdue = LeaderInfo(role, token, id_, name, values.time_of(began), ago), ago > ttl_ms / 1000
            found.append(RoleInfo(role, token, leader, overdue, candidates))
        return found

    @values.legible()
    def members(self) -> list[MemberInfo]:
        """Return the living members, in the order in which they joined."""
        leads: dict[str, list[str]] = {}
        for info in self.roles():
            if info.leader is not None:
                leads.setdefault(info.leader.member_id, []).append(info.role)
        found = []
        for id_, name, host, pid, version, key, takeover, ttl_ms, joined, renewed, now in self._read(
            statements.MEMBERS
        ):
            ago = values.seconds_between(renewed, now)
            found.append(
                MemberInfo(
                    member_id=id_,
                    name=name,
                    host=host,
                    pid=pid,
                    version=version,
                    mode="lease" if key is None else "hybrid",
                    takeover=takeover,
                    ttl=ttl_ms / 1000,
                    joined=values.time_of(joined),
                    renewed_ago=ago,
                    overdue=ago > ttl_ms / 1000,
                    leads=tuple(leads.get(id_, ())),
                )
            )
        return found

    def history(self, role: str, limit: int = 20) -> list[TermRecord]:
        """Return the last terms of a role, newest first."""
        with self._asking():
            return values.history(self, check_name("role", role), check_limit(limit))

    def jobs(self, role: str) -> list[JobRecord]:
        """Return the jobs of a role whose runs were claimed, by name."""
        with self._asking():
            return values.jobs(self, check_name("role", role))

    def resign(self, role: str, to: str | None = None, timeout: float = 2 * timing.DEFAULT_TTL_S) -> LeaderInfo | None:
        """Ask the leader of ``role`` to hand over, to the candidate ``to`` if one is named; wait until it has.

        Return who leads then; None if nobody else stands for it. Raises NotLeader if nobody leads, ConfigError if
        ``to`` is not a candidate, and WaitTimeout if the leader does not answer, or a transaction under its term keeps
        the request from being written.
        """
        role = check_name("role", role)
        deadline = time.monotonic() + timeout
        before = self._leader(role)
        if before is None:
            raise NotLeader(f"role {role!r}: nobody leads, so nobody can resign")
        with self._asking():
            others = [one for one in values.candidates(self, role) if one.member_id != before.member_id]
        member_id = None if to is None else values.candidate_id(role, check_name("to", to), others)
        self._request(role, before, member_id, deadline)
        while (after := self._leader(role)) is not None and after.token == before.token:
            if time.monotonic() >= deadline:
                raise WaitTimeout(
                    f"role {role!r}: {before.name!r} was asked to resign and has not within {timeout:g} s; the request "
                    "stands, and it may be paused: then its lease runs out"
                )
            time.sleep(LOOK_EVERY_S)
        while after is None and others and time.monotonic() < deadline:
            time.sleep(LOOK_EVERY_S)
            after = self._leader(role)
        return after

    def _leader(self, role: str) -> LeaderInfo | None:
        with self._asking():
            return values.leader(self, role)

    def _request(self, role: str, before: LeaderInfo, member_id: str | None, deadline: float) -> None:
        """Write the request down; again, while a fenced transaction has the role's row."""
        request = {"namespace": self.namespace, "role": role, "token": before.token, "to": member_id}
        telling = self._session.notify(self.namespace, "vacant registry")
        while True:
            try:
                with self._asking():
                    self._session.run(Step(statements.REQUEST, request), *([telling] if telling else []))
            except _Busy:
                if time.monotonic() >= deadline:
                    raise WaitTimeout(
                        f"role {role!r}: {before.name!r} could not be asked to resign: a transaction under its term "
                        "keeps the role locked, and goes on; try again, or with a longer --timeout"
                    ) from None
            else:
                return

    def forget(self) -> None:
        """Delete everything about the namespace. Its tokens begin anew: do it only when nothing uses them any more."""
        known = self.namespaces()
        if self.namespace not in known:
            names = ", ".join(map(repr, known)) or "none"
            raise ConfigError(f"there is no namespace {self.namespace!r}; there are: {names}")
        living = self.members()
        if living:
            names = ", ".join(repr(member.name) for member in living)
            raise ConfigError(f"namespace {self.namespace!r} has living members: stop them first ({names})")
        with self._asking():
            self._session.run(*(Step(text, {"namespace": self.namespace}) for text in statements.FORGET))

    # What ``values`` needs of it -------------------------------------------------------------------------------

    @property
    def session(self) -> Any:
        """The connection."""
        return self._session

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """Bound a call, for a server may freeze; tell of a database that was lost in the word that everybody knows."""
        try:
            with limited(self._session.abort, LOOK_TIMEOUT_S, "the database: "):
                yield
        except Gone as error:
            raise StoreUnavailable(str(error)) from None
        except Failed as error:
            if getattr(error.__cause__, "sqlstate", None) == LOCK_NOT_AVAILABLE:
                raise _Busy("a transaction of somebody else's keeps the rows locked: try again") from None
            raise StoreUnavailable(f"{str(error).splitlines()[0]} (`tenure doctor` may say what to do)") from None

    def _read(self, text: str) -> Any:
        with self._asking():
            return self._session.read(Step(text, {"namespace": self.namespace}))[0].rows
