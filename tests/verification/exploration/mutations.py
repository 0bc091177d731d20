"""Rules taken away, and the small world in which that shows.

The list of rules is that of ``tests/test_mutations.py``, with the same edits. A rule that lives in the SQL is taken out
of the model of the tables as well, since the SQL is not run here.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from tenure import asks
from tests.exploration.worlds import INSTANT, STRICT, World
from tests.simulation.model import ModelStore, RoleRow, Tables


class EndWithoutTheCount(ModelStore):
    def _guarded(self, verdict: asks.Verdict) -> bool:
        return verdict.reason == "silence" or super()._guarded(verdict)


class EndWithoutTheEpoch(ModelStore):
    def _guarded(self, verdict: asks.Verdict) -> bool:
        return verdict.reason == "death" or super()._guarded(verdict)


class RenewalOfTheEnded(ModelStore):
    def _renew(self, ask: asks.Renew) -> asks.Standing:
        if ask.member_id not in self.tables.members:
            return asks.Standing(alive=False)
        self.tables.members[ask.member_id].renewals += 1
        return self._standing(ask.member_id, ask.alone_in)


class NoAcquireOfMyOwn(ModelStore):
    def _takeable(self, role: RoleRow, name: str, ask: asks.Acquire) -> bool:
        return role.holder != ask.member_id and super()._takeable(role, name, ask)


class ResumeAnywhere(ModelStore):
    def _resume(self, ask: asks.Resume) -> asks.Standing:
        row = self.tables.members.get(ask.member.id)
        server = dataclasses.replace(ask.server, incarnation=row.incarnation) if row else ask.server
        return super()._resume(dataclasses.replace(ask, server=server))


class TokenFromTheRow(ModelStore):
    def _next_token(self, old: int, floor: int) -> int:  # noqa: ARG002
        return old + 1


class FenceAnywhere(Tables):
    def fenced(self, role: str, token: int, member_id: str, incarnation: str) -> bool:  # noqa: ARG002
        return super().fenced(role, token, member_id, self.members[member_id].incarnation)


@dataclass(frozen=True)
class Showing:
    """Where the missing rule shows, and how it must end."""

    breaks: str
    world: World


def _in(takeovers: tuple[str, ...], *faults: str, budget: int = 1, **rest: Any) -> World:
    return World("mutation", takeovers, faults, budget, **rest)


ALONE = ("strict",)
LEADERS = "two leaders|though its membership was ended"

SHOWN = {
    "trust anchored at the answer": Showing(LEADERS, _in(STRICT, "slow control down a", "isolate a", budget=2)),
    "silence counted from the question": Showing(LEADERS, _in(STRICT, "slow watch up b", "isolate a", budget=2)),
    "end without the count": Showing(
        LEADERS, _in(STRICT, "slow control up b", "isolate a", budget=2, store=EndWithoutTheCount)
    ),
    "renewal of an ended member": Showing(
        f"{LEADERS}|nobody can ever lead", _in(STRICT, "isolate a", "host b", budget=2, store=RenewalOfTheEnded)
    ),
    "no acquire of my own lapsed role": Showing("nobody can ever lead", _in(STRICT, "stop", store=NoAcquireOfMyOwn)),
    "observation kept across a broken connection": Showing("silent for too long", _in(STRICT, "stop")),
    "acquire on an unconfirmed server": Showing(LEADERS, _in(INSTANT, "promotion", settled=False)),
    "a new server confirmed at once": Showing(LEADERS, _in(INSTANT, "promotion", settled=False)),
    "resume across incarnations": Showing(LEADERS, _in(INSTANT, "cut a", "promotion", budget=2, store=ResumeAnywhere)),
    "end without the sentinel's epoch and the server's start time": Showing(
        LEADERS, _in(INSTANT, "cut a", "stop", budget=2, store=EndWithoutTheEpoch)
    ),
    "proof of death on another server": Showing("only the server had stopped", _in(INSTANT, "stop")),
    "proof of death without the fresh connection": Showing("only the server had stopped", _in(INSTANT, "fast stop")),
    "strict members take a sentinel as well": Showing(LEADERS, _in(STRICT, "cut")),
    "no doubt": Showing(LEADERS, _in(INSTANT, "cut")),
    "server's keepalive shorter than the TTL": Showing(LEADERS, _in(INSTANT, "isolate")),
    "silence shorter than trust": Showing(LEADERS, _in(STRICT, "isolate", ttl=5.0)),
    "no margin between trust and silence": Showing(LEADERS, _in(STRICT, "isolate")),
    "token from the old row": Showing("was given", _in(STRICT, "promotion", settled=False, store=TokenFromTheRow)),
    "reused member id": Showing("was used again", _in(INSTANT, "cut")),
    "fence that ignores the incarnation": Showing(
        "the fence lets", _in(INSTANT, "cut a", "promotion", budget=2, tables=FenceAnywhere)
    ),
    "adoption of a dropped token": Showing("again|after", _in(STRICT, "isolate")),
    "an answer after the deadline revives a term": Showing("after it had lapsed", _in(STRICT, "slow control down")),
    "elected although trust has lapsed": Showing("without trust in it", _in(ALONE, "slow control down", settled=False)),
    "an adopted term is acquired again": Showing("although its term was", _in(ALONE, "cut", settled=False)),
    "a term is resumed that was never suspended": Showing(
        "although its term was", _in(("instant",), "stop", settled=False)
    ),
}

NOT_SHOWN = {
    "fence that ignores ended holders": "what breaks is a bound in time, under a stream of overlapping transactions",
    "verdicts forgotten that came in while others were carried out": (
        "what breaks is a bound in time: the next look, a tick later, finds the second death again"
    ),
    "a reservation outlives its member": "nobody reserves a role for anybody in the small world",
}
