"""The steps of an election without a thread: what a candidate does in each of its calls.

A step-by-step candidate is a member like any other (``takeover`` is ``manual``, and it has no sentinel), so nodes and
such candidates hold the same roles under the same tokens. They differ in how a lease ends:

- **A candidate's lease ends by the database's clock.** No process watches the candidate. It has expired when its last
  renewal is older than its expiry, by the clock of the database alone: the row's ``renewed_at`` and the current time
  come in one answer, and the end is written ``where renewals =`` the count in that answer. No caller's clock is used.
  An expired membership never comes back: its candidate joins anew, and leads again only under a new token.
- **A node's lease does not.** A node measures its lease by its own elapsed time, so the database's clock cannot tell
  when it ends. Its membership is ended here on the same evidence as elsewhere: this process has seen no renewal in
  several calls, for long enough by its own elapsed time; or a proof of death, on this process's own connection.

Every call may run inside the application's transaction, beside any number of other calls. So a call does not wait while
it holds a lock: it locks other members' rows and the role's row only if they are free (``skip locked``), and leaves a
locked row to the transaction that holds the lock. The two exceptions are always locked in the same order: the
namespace's row (only to join), then the candidate's own row.
"""

from __future__ import annotations

import contextlib
import random
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tenure.base import clock
from tenure.base.moments import seconds_between, time_of
from tenure.core import messages, timing
from tenure.core.evidence import Evidence
from tenure.core.messages import MANUAL, Sighting, Verdict
from tenure.core.servers import Confirmed, Server
from tenure.errors import ConfigError
from tenure.settings import check_encoding
from tenure.store import manual_statements, records, statements
from tenure.store.control import ControlStore
from tenure.store.records import Candidate, LeaderInfo
from tenure.store.session import Failed, Step

PATIENCE_S = 1.0
"""How long an election waits for a role whose row is locked, on this process's own connection."""
BUSY_PAUSE_S = 0.02
TIDY_SHARE = 0.1
"""The share of joining candidates that clean up the tables."""

Proof = Callable[[str, str], tuple[Verdict, ...]]
"""Finds dead members on behalf of the member with this id, the role's holder among them; returns the verdicts."""


@dataclass(frozen=True)
class SteppedMember:
    """The candidate's own membership."""

    id: str
    name: str
    ttl: float
    renewals: int
    here: bool
    """Whether the candidate joined on this line of data, and in these tables."""
    expired: bool


@dataclass(frozen=True)
class RoleState:
    """A role and its holder, as the database shows them at one moment."""

    token: int
    reserved_for: str | None
    request_token: int | None
    request_to: str | None
    member_id: str | None
    """The living member that holds the role."""
    name: str
    takeover: str
    ttl_ms: int
    renewals: int
    key: int | None
    epoch: int
    server_start: str
    here: int
    began: Any
    resigned: Any
    renewed: Any
    now: Any

    @property
    def held(self) -> bool:
        """Whether the role has a leader: a living member that has not resigned and, if manual, has not expired."""
        return self.member_id is not None and self.resigned is None and not (self.manual and self.stale)

    @property
    def manual(self) -> bool:
        """Whether the holder is a step-by-step candidate."""
        return self.takeover == MANUAL

    @property
    def stale(self) -> bool:
        """Whether the holder's last renewal is older than its TTL, by the database's clock."""
        return self.member_id is not None and _expired(self.ttl_ms, self.renewed, self.now)

    def leader(self, role: str) -> LeaderInfo:
        """Return the holder, as the leader of the role."""
        assert self.member_id is not None
        since, renewed_ago = time_of(self.began), seconds_between(self.renewed, self.now)
        return LeaderInfo(role, self.token, self.member_id, self.name, since, renewed_ago)


class ManualElection:
    """The steps, on one session."""

    def __init__(
        self, store: ControlStore, observations: dict[tuple[str, str], Evidence], proof: Proof | None = None
    ) -> None:
        """Work on a store's session.

        ``observations`` is what this process has seen of nodes in earlier calls, by namespace and role. ``proof`` is
        given only on this process's own connection.
        """
        self.store = store
        self._session = store.session
        self._observations = observations
        self._proof = proof

    # Being a candidate -----------------------------------------------------------------------------------------

    def register(self, name: str, role: str, expire: float | None, default_expire: float) -> SteppedMember:
        """Renew the candidate's membership, or join; stand for the role."""
        for what, text in (("candidate_id", name), ("role", role), ("ns", self.store.namespace)):
            check_encoding(what, text, self._session.encoding)
        own, stands = self._renewed(name, role, expire) or (self._joined(name, expire, default_expire), False)
        if not stands:
            self.store.perform(messages.Stand(own.id, (role,), ()))
        return own

    def unregister(self, name: str) -> bool:
        """End the candidate's membership, and with it every term that it holds; False if there was none."""
        own = self._own(name)
        if own is not None:
            self.store.perform(messages.Leave(own.id))
        return own is not None and not own.expired

    def candidates(self, role: str) -> list[Candidate]:
        """Return the candidates for the role: living nodes, and step-by-step candidates that have not expired."""
        candidates = records.candidates(self.store, role)
        return [found for found in candidates if found.takeover != MANUAL or found.renewed_ago < found.ttl]

    def _own(self, name: str) -> SteppedMember | None:
        rows = self._read(manual_statements.MANUAL_MEMBER, name=name)
        return next((_own(row) for row in rows), None)

    def _renewed(self, name: str, role: str, expire: float | None) -> tuple[SteppedMember, bool] | None:
        """Renew the membership; return it, and whether it stands for the role; None if it is unknown or expired."""
        own = self._own(name)
        if own is None or own.expired or not own.here:
            return None
        steps = [self._renewal(own.id), self._step(manual_statements.STANDS, role=role, id=own.id)]
        if expire is not None and expire != own.ttl:
            _, permitted = self._permitted(expire)
            steps.append(self._step(manual_statements.SET_TTL, id=own.id, ttl_ms=round(permitted * 1000)))
        renewed, stands, *_ = self._session.run(*steps)
        return (own, bool(stands.rows)) if renewed.count else None

    def _joined(self, name: str, expire: float | None, default_expire: float) -> SteppedMember:
        """Join as a new member, unless another call for this name was quicker; also end expired candidates."""
        server, ttl = self._permitted(self._last_ttl(name) or default_expire if expire is None else expire)
        with self._session.transaction() as run:
            run(self._step(manual_statements.LOCK_NAMESPACE))
            while rows := run(self._step(manual_statements.MANUAL_MEMBER, name=name))[0].rows:
                member = _own(rows[0])
                if not member.expired and member.here:
                    run(self._renewal(member.id))
                    return member
                # This waits for another call that renews the same candidate at this moment. Then read its row again.
                run(self._step(statements.END_SILENT, id=member.id, renewals=member.renewals))
            for row in run(self._step(manual_statements.MANUAL_MEMBERS))[0].rows:
                other = _own(row)
                if other.expired:
                    self._end(run, other.id, other.renewals)
            own = SteppedMember(str(uuid.uuid4()), name, ttl, 0, here=True, expired=False)
            run(self.store.entry(messages.Member(own.id, name, ttl, MANUAL, key=None), server))
        self._tidy()
        return own

    def _last_ttl(self, name: str) -> float | None:
        """Return the expiry with which the candidate last registered."""
        rows = self._read(manual_statements.LAST_TTL, name=name)
        return next((ttl_ms / 1000 for (ttl_ms,) in rows), None)

    def _tidy(self) -> None:
        """Delete old rows once in a while, on this process's own connection only."""
        if self._proof is not None and random.random() < TIDY_SHARE:  # noqa: S311 - not a secret
            with contextlib.suppress(Failed):
                self.store.perform(messages.Tidy())

    def _permitted(self, ttl: float) -> tuple[Server, float]:
        """Return the server and the permitted expiry: a shorter one while a raise of the largest TTL ripens (R14)."""
        server, confirmed = self.store.open(ttl)
        self._refuse_word(confirmed)
        if ttl > confirmed.max_ttl:
            raise ConfigError(
                f"expire={ttl:g} is above the largest permitted in namespace {self.store.namespace!r}, "
                f"{confirmed.max_ttl:g}: use a shorter expiry, or raise the limit with `tenure init --max-ttl {ttl:g}`"
            )
        if ttl > confirmed.ripe_ttl:
            ((since, now),) = self._read(manual_statements.LIMIT_SET)
            # The database's clock decides this for the candidate only. For nodes, a node lets the raise ripen (R13).
            if since is None or seconds_between(since, now) < timing.RIPENS_AFTER_S:
                ttl = confirmed.ripe_ttl
        return server, ttl

    def _refuse_word(self, confirmed: Confirmed) -> None:
        """Refuse a namespace whose promotions lose nothing (R17): a candidate cannot see a commit that did not wait."""
        if confirmed.loses_nothing:
            raise ConfigError(
                f"namespace {self.store.namespace!r} has promotion=loses-nothing, which step-by-step candidates do not "
                "support: use another namespace"
            )

    def _renewal(self, member_id: str) -> Step:
        no_connections = {"control_pid": 0, "control_start": "", "watch_pid": 0, "watch_start": ""}
        return self._step(statements.RENEW, id=member_id, **no_connections)

    # Leading ---------------------------------------------------------------------------------------------------

    def holding(self, role: str) -> RoleState | None:
        """Return the role as it is now; None if it never had a candidate."""
        rows = self._read(manual_statements.HOLDER, role=role)
        return next((RoleState(*row) for row in rows), None)

    def leads(self, name: str, role: str) -> bool:
        """Whether the candidate leads at this moment: by everything that the fence checks, and by its expiry."""
        holding = self.holding(role)
        return holding is not None and holding.held and holding.manual and holding.name == name and bool(holding.here)

    def elect(self, own: SteppedMember, role: str) -> RoleState | None:
        """Renew or take the role; return its state after that, or None if it has no leader."""
        holding = self.holding(role)
        # The candidate stands for the role, so the role exists.
        assert holding is not None
        if holding.member_id == own.id:
            return self._kept(own, role, holding)
        if holding.member_id is not None and not self._over(own, role, holding):
            return holding if holding.held else None
        floor = self._floor()
        if floor is not None:
            self._acquire(own, role, holding, floor)
            holding = self.holding(role)
        return holding if holding is not None and holding.held else None

    def _kept(self, own: SteppedMember, role: str, holding: RoleState) -> RoleState | None:
        """Keep the role, unless a hand-over was requested or the term has been resigned."""
        if holding.resigned is None and holding.request_token != holding.token:
            return holding
        self.store.perform(messages.Vacate(own.id, role, holding.token, holding.request_to))
        return None

    def _over(self, own: SteppedMember, role: str, holding: RoleState) -> bool:
        """End the holder if the evidence allows it; return whether it has ended."""
        if holding.manual:
            return holding.stale and self._ended(holding)
        if self._silent(role, holding):
            return self._ended(holding)
        if self._proof is None or holding.key is None or not holding.stale:
            return False
        verdicts = tuple(verdict for verdict in self._proof(own.id, role) if verdict.member_id == holding.member_id)
        return holding.member_id in self.store.perform(messages.End(own.id, verdicts)).ids  # type: ignore[union-attr]

    def _silent(self, role: str, node: RoleState) -> bool:
        """Whether this process has seen the node's count of renewals unchanged for too long, by its own clock."""
        assert node.member_id is not None
        sighting = Sighting(
            node.member_id, node.ttl_ms / 1000, node.renewals, node.key, node.epoch, node.server_start, True
        )
        observation = self._observations.setdefault((self.store.namespace, role), Evidence())
        looked = messages.Looked(self._session.server(), (sighting,), vacancy=False, slice_s=timing.SLICE_S)
        return bool(observation.look(looked, "", clock.now()))

    def _ended(self, holding: RoleState) -> bool:
        with self._session.transaction() as run:
            return self._end(run, holding.member_id, holding.renewals)

    def _end(self, run: Any, member_id: str | None, renewals: int) -> bool:
        """End a member that has not renewed since, unless its row is locked: the lock's holder may be renewing it."""
        count = {"id": member_id, "renewals": renewals}
        if not run(self._step(manual_statements.LOCK_SILENT, **count))[0].rows:
            return False
        run(self._step(statements.END_SILENT, **count))
        return True

    def _floor(self) -> int | None:
        """Return the least token that may be issued on this server; None while its tables are not confirmed (R4b).

        They are confirmed when the largest TTL has passed since the first member joined here, by the database's clock.
        """
        server, confirmed = self.store.open(None)
        self._refuse_word(confirmed)
        if confirmed.line != server.line:
            ((first, now),) = self._read(manual_statements.FIRST_JOINED)
            if seconds_between(first, now) < timing.silence(confirmed.longest_lease):
                return None
            self.store.perform(messages.Confirm(confirmed, server))
            server, confirmed = self.store.open(None)
        return confirmed.base + server.floor

    def _acquire(self, own: SteppedMember, role: str, holding: RoleState, floor: int) -> None:
        """Take the role if it is vacant and its row not locked; on this process's own connection, wait for the lock."""
        unreserved = (role,) if _long_resigned(holding, own.ttl) else ()
        give_up_at = time.monotonic() + (PATIENCE_S if self._proof else 0)
        patient = False
        while True:
            request = messages.Acquire(own.id, own.name, (role,), floor, unreserved, patient=patient)
            acquired = self.store.perform(request)
            assert isinstance(acquired, messages.Acquired)
            if not acquired.busy or time.monotonic() >= give_up_at:
                return
            patient = True
            time.sleep(BUSY_PAUSE_S)

    def _step(self, text: str, **parameters: object) -> Step:
        return Step(text, {"namespace": self.store.namespace, **parameters})

    def _read(self, text: str, **parameters: object) -> Any:
        return self._session.read(self._step(text, **parameters))[0].rows


def _own(row: tuple[Any, ...]) -> SteppedMember:
    id_, name, ttl_ms, renewals, here, renewed, now = row
    return SteppedMember(id_, name, ttl_ms / 1000, renewals, bool(here), _expired(ttl_ms, renewed, now))


def _expired(ttl_ms: int, renewed: Any, now: Any) -> bool:
    return seconds_between(renewed, now) >= ttl_ms / 1000


def _long_resigned(holding: RoleState, ttl: float) -> bool:
    """Whether the role was resigned at least a TTL ago: a reservation lasts no longer."""
    return holding.resigned is not None and seconds_between(holding.resigned, holding.now) >= ttl
