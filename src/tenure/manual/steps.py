"""One namespace's elections, step by step: what a candidate without a thread does in each of its calls.

A step-by-step candidate is a member like any other (``takeover`` is ``manual``, it has no sentinel), so nodes and such
candidates hold the same roles under the same tokens. What differs is how its lease ends:

- **By the database's clock.** Nobody watches, so a candidate is over when its last renewal is older than its expiry, by
  the clock of the database alone: the row's ``renewed_at`` and the present time come in one answer, and the end is
  written ``where renewals = the count`` that came with them. No clock of any caller takes part. A membership that has
  expired never comes back: its candidate joins anew, and leads again under a new token only.
- **Never a node's.** A node trusts its lease by its own elapsed time, so that clock says nothing about it. A node's
  membership is ended here by the same evidence as everywhere: silence that this process watched itself, over
  several calls, on its own elapsed time; or the proof of death, where there is a connection of our own to find it on.

All calls may run inside a transaction of the caller's, among any number of others, so nobody waits here while holding
something: other members' rows and the role's are taken only if they are free (``skip locked``), and what is not free is
somebody else's business at this moment. The two exceptions are in one order: the namespace's row (only to join), then
the own member's.
"""

from __future__ import annotations

import contextlib
import random
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tenure import asks, clock, statements, timing, values
from tenure.asks import Server, Sighting, Verdict
from tenure.errors import ConfigError
from tenure.observation import Observation
from tenure.session import Failed, Step
from tenure.settings import check_encoding
from tenure.store import Store
from tenure.values import Candidate

MANUAL = "manual"
"""What stands in ``takeover`` of a step-by-step candidate."""
PATIENCE_S = 1.0
"""How long an election waits for a role whose row is locked, where the connection is our own."""
BUSY_PAUSE_S = 0.02
TIDY_SHARE = 0.1
"""How many of those who join clean up after the others."""

Proof = Callable[[str], tuple[Verdict, ...]]
"""Looks for members that died, as the member of that id; returns verdicts."""


@dataclass(frozen=True)
class Own:
    """The candidate's own membership."""

    id: str
    name: str
    ttl: float
    renewals: int
    incarnation: str
    expired: bool


@dataclass(frozen=True)
class Holding:
    """A role as the database shows it at one moment, and who holds it."""

    token: int
    reserved_for: str | None
    request_token: int | None
    request_to: str | None
    member_id: str | None
    """The living member that holds it."""
    name: str
    takeover: str
    ttl_ms: int
    renewals: int
    key: int | None
    epoch: int
    server_start: str
    incarnation: str
    began: Any
    resigned: Any
    renewed: Any
    now: Any

    @property
    def held(self) -> bool:
        """Whether somebody leads: a living member, not resigned, and not expired if that is judged here."""
        return self.member_id is not None and self.resigned is None and not (self.manual and self.stale)

    @property
    def manual(self) -> bool:
        """Whether the holder is a step-by-step candidate."""
        return self.takeover == MANUAL

    @property
    def stale(self) -> bool:
        """Whether the holder's last renewal is older than its TTL, by the database's clock."""
        return self.member_id is not None and _expired(self.ttl_ms, self.renewed, self.now)

    @property
    def since(self) -> datetime:
        """When the term began."""
        return values.time_of(self.began)

    @property
    def renewed_ago(self) -> float:
        """Seconds since the holder's last renewal, by the database's clock."""
        return values.seconds_between(self.renewed, self.now)


class Booth:
    """The steps, on one session."""

    def __init__(
        self, store: Store, observations: dict[tuple[str, str], Observation], proof: Proof | None = None
    ) -> None:
        """Work on a store's session.

        ``observations`` are what this process saw of nodes before, by namespace and role; ``proof`` is there only where
        the session is our own.
        """
        self.store = store
        self._session = store.session
        self._observations = observations
        self._proof = proof

    # Being a candidate -----------------------------------------------------------------------------------------

    def register(self, name: str, role: str, expire: float | None, default_expire: float) -> Own:
        """Renew the candidate's membership, or join; stand for the role."""
        for what, text in (("candidate_id", name), ("role", role), ("ns", self.store.namespace)):
            check_encoding(what, text, self._session.encoding)
        own, stands = self._renewed(name, role, expire) or (self._joined(name, expire, default_expire), False)
        if not stands:
            self.store.perform(asks.Stand(own.id, (role,), ()))
        return own

    def unregister(self, name: str) -> bool:
        """End the candidate's membership, and with it every term that it holds; False if there was none."""
        own = self._own(name)
        if own is not None:
            self.store.perform(asks.Leave(own.id))
        return own is not None and not own.expired

    def candidates(self, role: str) -> list[Candidate]:
        """Return who stands for the role: living nodes, and step-by-step candidates that have not expired."""
        everybody = values.candidates(self.store, role)
        return [one for one in everybody if one.takeover != MANUAL or one.renewed_ago < one.ttl]

    def _own(self, name: str) -> Own | None:
        rows = self._read(statements.MANUAL_MEMBER, name=name)
        return next((_own(row) for row in rows), None)

    def _renewed(self, name: str, role: str, expire: float | None) -> tuple[Own, bool] | None:
        """Renew the membership, and say whether it stands for the role; None if there is none that goes on."""
        own = self._own(name)
        if own is None or own.expired or own.incarnation != self._session.server().incarnation:
            return None
        steps = [self._renewal(own.id), self._step(statements.STANDS, role=role, id=own.id)]
        if expire is not None and expire != own.ttl:
            self._check_largest(expire)
            steps.append(self._step(statements.SET_TTL, id=own.id, ttl_ms=round(expire * 1000)))
        renewed, stands, *_ = self._session.run(*steps)
        return (own, bool(stands.rows)) if renewed.count else None

    def _joined(self, name: str, expire: float | None, default_expire: float) -> Own:
        """Join as a new member, unless another call of this name was quicker; end who has expired, while at it."""
        ttl = self._last_ttl(name) or default_expire if expire is None else expire
        server = self._check_largest(ttl)
        with self._session.transaction() as run:
            run(self._step(statements.LOCK_NAMESPACE))
            while rows := run(self._step(statements.MANUAL_MEMBER, name=name))[0].rows:
                member = _own(rows[0])
                if not member.expired and member.incarnation == server.incarnation:
                    run(self._renewal(member.id))
                    return member
                # Waits for another call of this name that renews it at this moment; then look again.
                run(self._step(statements.END_SILENT, id=member.id, renewals=member.renewals))
            for row in run(self._step(statements.MANUAL_MEMBERS))[0].rows:
                other = _own(row)
                if other.expired:
                    self._end(run, other.id, other.renewals)
            own = Own(str(uuid.uuid4()), name, ttl, 0, server.incarnation, expired=False)
            run(self.store.entry(asks.Member(own.id, name, ttl, MANUAL, key=None), server))
        self._tidy()
        return own

    def _last_ttl(self, name: str) -> float | None:
        """Return the expiry with which the candidate last registered."""
        rows = self._read(statements.LAST_TTL, name=name)
        return next((ttl_ms / 1000 for (ttl_ms,) in rows), None)

    def _tidy(self) -> None:
        """Keep the tables small, where that is no part of the caller's transaction and in nobody's way."""
        if self._proof is not None and random.random() < TIDY_SHARE:  # noqa: S311 - nobody has to guess it
            with contextlib.suppress(Failed):
                self.store.perform(asks.Tidy())

    def _check_largest(self, ttl: float) -> Server:
        server, confirmed = self.store.open(max(ttl, timing.DEFAULT_MAX_TTL_S))
        if ttl > confirmed.max_ttl:
            raise ConfigError(
                f"expire={ttl:g} is above the largest permitted in namespace {self.store.namespace!r}, "
                f"{confirmed.max_ttl:g}: use a shorter one, or raise it with `tenure init --max-ttl {ttl:g}`"
            )
        return server

    def _renewal(self, member_id: str) -> Step:
        nobody = {"control_pid": 0, "control_start": "", "watch_pid": 0, "watch_start": ""}
        return self._step(statements.RENEW, id=member_id, **nobody)

    # Leading ---------------------------------------------------------------------------------------------------

    def holding(self, role: str) -> Holding | None:
        """Return the role as it is now; None if nobody ever stood for it."""
        rows = self._read(statements.HOLDER, role=role)
        return next((Holding(*row) for row in rows), None)

    def leads(self, name: str, role: str) -> bool:
        """Whether the candidate leads at this moment, by everything that the fence would ask, and by its expiry."""
        holding = self.holding(role)
        return (
            holding is not None
            and holding.held
            and holding.manual
            and holding.name == name
            and holding.incarnation == self._session.server().incarnation
        )

    def elect(self, own: Own, role: str) -> Holding | None:
        """Renew or take the role; return who holds it then, None if nobody does."""
        holding = self.holding(role)
        assert holding is not None  # it stands
        if holding.member_id == own.id:
            return self._kept(own, role, holding)
        if holding.member_id is not None and not self._over(own, role, holding):
            return holding if holding.held else None
        floor = self._floor()
        if floor is not None:
            self._acquire(own, role, holding, floor)
            holding = self.holding(role)
        return holding if holding is not None and holding.held else None

    def _kept(self, own: Own, role: str, holding: Holding) -> Holding | None:
        """Stay the holder, unless somebody has asked for the role or it was being given up."""
        if holding.resigned is None and holding.request_token != holding.token:
            return holding
        self.store.perform(asks.Vacate(own.id, role, holding.token, holding.request_to))
        return None

    def _over(self, own: Own, role: str, holding: Holding) -> bool:
        """End the holder if the evidence allows it; whether it is over."""
        if holding.manual:
            return holding.stale and self._ended(holding)
        if self._silent(role, holding):
            return self._ended(holding)
        if self._proof is None or holding.key is None or not holding.stale:
            return False
        verdicts = tuple(verdict for verdict in self._proof(own.id) if verdict.member_id == holding.member_id)
        return holding.member_id in self.store.perform(asks.End(own.id, verdicts)).ids  # type: ignore[union-attr]

    def _silent(self, role: str, node: Holding) -> bool:
        """Whether this process has seen the node's count of renewals stand still for too long, by its own clock."""
        assert node.member_id is not None
        sighting = Sighting(
            node.member_id, node.ttl_ms / 1000, node.renewals, node.key, node.epoch, node.server_start, True
        )
        observation = self._observations.setdefault((self.store.namespace, role), Observation())
        looked = asks.Looked(self._session.server(), (sighting,), vacancy=False, slice_s=timing.SLICE_S)
        return bool(observation.look(looked, "", clock.now()))

    def _ended(self, holding: Holding) -> bool:
        with self._session.transaction() as run:
            return self._end(run, holding.member_id, holding.renewals)

    def _end(self, run: Any, member_id: str | None, renewals: int) -> bool:
        """End a member of that count of renewals, if its row is free: who holds it may be renewing."""
        count = {"id": member_id, "renewals": renewals}
        if not run(self._step(statements.LOCK_SILENT, **count))[0].rows:
            return False
        run(self._step(statements.END_SILENT, **count))
        return True

    def _floor(self) -> int | None:
        """Return the least token that may be issued on this server; None while its tables are not confirmed (R4b).

        They are after the largest TTL, by the database's clock, since somebody joined here for the first time.
        """
        server, confirmed = self.store.open(timing.DEFAULT_MAX_TTL_S)
        if confirmed.incarnation != server.incarnation:
            ((first, now),) = self._read(statements.FIRST_JOINED, incarnation=server.incarnation)
            if values.seconds_between(first, now) < timing.silence(confirmed.max_ttl):
                return None
            self.store.perform(asks.Confirm(confirmed.incarnation, server))
            server, confirmed = self.store.open(timing.DEFAULT_MAX_TTL_S)
        return confirmed.base + (server.timeline - 1) * 2**40

    def _acquire(self, own: Own, role: str, holding: Holding, floor: int) -> None:
        """Take the role if it is vacant and its row is free; wait a moment for it where nobody waits for us."""
        unreserved = (role,) if _long_resigned(holding, own.ttl) else ()
        give_up_at = time.monotonic() + (PATIENCE_S if self._proof else 0)
        patient = False
        while True:
            ask = asks.Acquire(own.id, own.name, (role,), floor, unreserved, patient=patient)
            acquired = self.store.perform(ask)
            assert isinstance(acquired, asks.Acquired)
            if not acquired.busy or time.monotonic() >= give_up_at:
                return
            patient = True
            time.sleep(BUSY_PAUSE_S)

    def _step(self, text: str, **parameters: object) -> Step:
        return Step(text, {"namespace": self.store.namespace, **parameters})

    def _read(self, text: str, **parameters: object) -> Any:
        return self._session.read(self._step(text, **parameters))[0].rows


def _own(row: tuple[Any, ...]) -> Own:
    id_, name, ttl_ms, renewals, incarnation, renewed, now = row
    return Own(id_, name, ttl_ms / 1000, renewals, incarnation, _expired(ttl_ms, renewed, now))


def _expired(ttl_ms: int, renewed: Any, now: Any) -> bool:
    return values.seconds_between(renewed, now) >= ttl_ms / 1000


def _long_resigned(holding: Holding, ttl: float) -> bool:
    """Whether the role was vacated a TTL ago: so long at most is it kept for the one that it was reserved for."""
    return holding.resigned is not None and values.seconds_between(holding.resigned, holding.now) >= ttl
