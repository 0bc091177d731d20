"""Rules taken away, and the small world in which that shows.

The list of rules is that of ``tests/verification/mutations/test_mutations.py``, with the same edits. A rule that lives
in the SQL is taken out of the model of the tables as well, since the SQL is not run here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tenure.core import messages
from tenure.core.servers import Confirmed, Server
from tests.verification.exploration.worlds import INSTANT, STRICT, World
from tests.verification.simulation.model import MemberRow, ModelStore, RoleRow, Tables


class EndWithoutTheCount(ModelStore):
    def _guarded(self, verdict: messages.Verdict) -> bool:
        return verdict.reason == "silence" or super()._guarded(verdict)


class EndWithoutTheEpoch(ModelStore):
    def _guarded(self, verdict: messages.Verdict) -> bool:
        return verdict.reason == "death" or super()._guarded(verdict)


class RenewalOfTheEnded(ModelStore):
    def _renew(self, request: messages.Renew) -> messages.Standing:
        if request.member_id not in self.tables.members:
            return messages.Standing(alive=False)
        self.tables.members[request.member_id].renewals += 1
        return self._standing(request.member_id, request.alone_in)


class NoAcquireOfMyOwn(ModelStore):
    def _takeable(self, role: RoleRow, name: str, request: messages.Acquire) -> bool:
        return role.holder != request.member_id and super()._takeable(role, name, request)


class SuccessionInSpiteOfLocks(ModelStore):
    def _succeed(self, request: messages.End, succession: messages.Succession) -> dict[str, int]:
        self.locked = tuple
        return super()._succeed(request, succession)


class ResumeAnywhere(ModelStore):
    def _resume(self, request: messages.Resume) -> messages.Standing:
        row = self.tables.members.get(request.member.id)
        server = request.server._replace(incarnation=row.line.split()[0]) if row else request.server
        return super()._resume(request._replace(server=server))


class ResumeWhenever(ModelStore):
    def _resumable(self, row: MemberRow, request: messages.Resume) -> bool:
        return row.line == request.server.line


class TokenFromTheRow(ModelStore):
    def _next_token(self, old: int, floor: int) -> int:  # noqa: ARG002
        return old + 1


class FenceAnywhere(Tables):
    def fenced(self, role: str, token: int, member_id: str, line: str) -> bool:  # noqa: ARG002
        return super().fenced(role, token, member_id, self.members[member_id].line)


class RipeAtOnce(Tables):
    def limit_ttl(self, seconds: float) -> None:
        super().limit_ttl(seconds)
        if self.confirmed:
            self.confirmed = self.confirmed._replace(ripe_ttl=seconds)


class ConfirmedAtOnce(ModelStore):
    def open(self, ttl: float | None) -> tuple[Server, Confirmed]:
        server, confirmed = super().open(ttl)
        if confirmed.made_on_a_promoted_server:
            confirmed = self.tables.confirmed = confirmed._replace(incarnation=server.incarnation)
        return server, confirmed


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
    "confirmed at once on a line that may lack commits": Showing(LEADERS, _in(INSTANT, "promotion", settled=False)),
    "a raise of the largest TTL is ripe at once": Showing(
        LEADERS, _in(STRICT, budget=0, ttl=2.0, ttls=(4.0, 2.0), settled=False, tables=RipeAtOnce)
    ),
    "a missing namespace is confirmed at once": Showing(
        LEADERS, _in(STRICT, "promotion", settled=False, store=ConfirmedAtOnce)
    ),
    "resume across incarnations": Showing(LEADERS, _in(INSTANT, "cut a", "promotion", budget=2, store=ResumeAnywhere)),
    "end without the sentinel's epoch and the server's start time": Showing(
        LEADERS, _in(INSTANT, "cut a", "stop", budget=2, store=EndWithoutTheEpoch)
    ),
    "a delayed resume replaces the one that came instead": Showing(
        LEADERS, _in(INSTANT, "slow control up a", "stop", budget=2, store=ResumeWhenever)
    ),
    "proof of death on another server": Showing("only the server had stopped", _in(INSTANT, "stop")),
    "proof of death without the fresh connection": Showing("only the server had stopped", _in(INSTANT, "fast stop")),
    "strict members take a sentinel as well": Showing(LEADERS, _in(STRICT, "cut")),
    "no doubt": Showing(LEADERS, _in(INSTANT, "cut")),
    "server's keepalive shorter than the TTL": Showing(LEADERS, _in(INSTANT, "isolate")),
    "silence shorter than trust": Showing(LEADERS, _in(STRICT, "isolate", ttl=5.0)),
    "no margin between trust and silence": Showing(LEADERS, _in(STRICT, "isolate")),
    "token from the old row": Showing("was given", _in(STRICT, "promotion", settled=False, store=TokenFromTheRow)),
    "a takeover that ignores open transactions": Showing(
        "can commit after", _in(INSTANT, "write", "die a", budget=2, store=SuccessionInSpiteOfLocks)
    ),
    "reused member id": Showing("was used again", _in(INSTANT, "cut")),
    "fence that ignores the incarnation": Showing(
        "the fence lets", _in(INSTANT, "cut a", "promotion", budget=2, tables=FenceAnywhere)
    ),
    "a leader in doubt claims its role": Showing(LEADERS, _in(INSTANT, "cut a", "promotion", budget=2)),
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
    "a raise ripens before a replica must have it": "how long it takes is the explorer's own number of ticks",
    "a limit that was changed and changed back goes on ripening": "the small world has one raise",
    "a missing namespace waits for its own limit only": "every limit is the world's one TTL",
    "a restored copy is taken for the original": "nobody restores a dump in the small world",
    "a role is taken by a member of another place": "nobody restores a dump in the small world",
    "tokens of a restored copy follow those in the dump": "nobody restores a dump in the small world",
    "a node's own raise of the largest TTL is ripe at once": "an operator sets the limit of the small world",
    "a commit counts although its wait for the replica was cancelled": "promotions lose commits in the small world",
    "the word that promotions lose nothing counts for an earlier promotion": "nobody says so in the small world",
    "a term that is resumed on a promoted server keeps its old incarnation": "promotions lose commits there",
    "a reservation outlives its member": "nobody reserves a role for anybody in the small world",
    "a holder that is not a neighbour is not watched": "every member of the small world is a neighbour",
    "a node never looks farther back than its neighbours": "every member of the small world is a neighbour",
    "a neighbour that was never seen to renew counts as well": "every member of the small world is a neighbour",
    "a node that finds no neighbour well waits before it looks on": "every member of the small world is a neighbour",
    "a renewal after a lost answer reads only what changed": "the small world has one role",
    "a renewal that reads what changed reads no requests": "the small world has one role, and no operator",
    "a renewal that reads what changed misses the roles of ended members": "the small world has one role",
    "a leader that meets a promoted server waits as the others do": "what breaks is a bound in time",
    "a claim respects the holder that a promoted server shows": "what breaks is a bound in time",
    "a leader claims its role although its trust is over": "the search takes minutes; the simulator shows it at once",
    "a late claim takes a role from its new leader": "the small world has no request that outlasts the largest TTL",
    "a claim outlives the server that it was for": "the small world has one promotion",
    "every node that sees a death acts at once": "what breaks is a number of requests, in a fleet",
    "every candidate acts on a resignation": "what breaks is a number of requests",
    "only the named successor takes a role": "what breaks is a bound in time; no node is notified in the small world",
    "only the next member on the ring acts on a death": "what breaks is a bound in time",
    "a look wakes the control lane for nothing that it has found": "lanes are woken by the explorer",
    "a knock proves the death of members whose sentinel fell after it": "a look takes no time in the small world",
    "a member that held nothing is not ended": "what breaks is a bound in time: silence ends it",
    "nodes that a notification made renew together go on doing so": "what breaks is a load, in a fleet",
}
