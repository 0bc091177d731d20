"""What must never happen. Each check runs at the instants at which its breach could begin.

A belief can begin only in an event of its node, and between events it can only run out; so it is enough to look at
everybody when one node begins to believe. Nothing here reads the protocol's intentions: only what an application could
read (``is_leader``), what was announced, and what was executed on the server.

One exception is allowed, the one that the promise names: an instant leader whose connection was cut on the server's
side and who has not heard of it yet. For as long as that lasts, and for a TTL at most, it may believe beside its
successor.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tenure.core import messages, timing
from tenure.events import Deposed, Elected, Resumed, Suspended
from tests.verification.simulation.core import Core, Violation

if TYPE_CHECKING:
    from tests.verification.simulation.node import SimNode


@dataclass
class Belief:
    """A stretch of time during which a node read True, so far."""

    node: SimNode
    token: int
    begin: float
    end: float


@dataclass
class Oracles:
    """Sees everything; raises Violation."""

    core: Core
    nodes: list[SimNode] = field(default_factory=list)
    history: dict[str, list[Belief]] = field(default_factory=dict)
    """Per role, every belief that ever was, in order of their beginnings."""
    ends: list[tuple[float, str, str]] = field(default_factory=list)
    """(when, member, reason) of every membership that another node ended."""
    asked: Counter[str] = field(default_factory=Counter)
    """How often each request of the control lane was executed."""
    commits: int = 0
    elections: int = 0
    exceptions: int = 0
    last_promotion: float | None = None
    _open: dict[SimNode, dict[str, Belief]] = field(default_factory=dict)
    _lapsed: set[tuple[SimNode, str, int]] = field(default_factory=set)
    _terms: dict[tuple[SimNode, str], tuple[int, bool]] = field(default_factory=dict)
    _issued: dict[str, int] = field(default_factory=dict)
    _announced: dict[str, int] = field(default_factory=dict)
    _cuts: dict[SimNode, float] = field(default_factory=dict)

    # What happens ------------------------------------------------------------------------------------------------

    def published(self, node: SimNode, news: list[Any]) -> None:
        """A node has published its state: read it as an application would."""
        for event in news:
            if isinstance(event, (Elected, Suspended, Resumed, Deposed)):
                self.core.note("{}: {}", node.name, event)
                self._in_order(node, event)
            if isinstance(event, Elected):
                self._elected(node, event)
        held, believed = node.protocol.roles.holding, self._open.setdefault(node, {})
        if held or believed:
            for role in {*held, *believed}:
                self._read(node, role)

    def died(self, node: SimNode) -> None:
        for role in list(self._open.get(node, ())):
            self._close(node, role)
        self._terms = {key: term for key, term in self._terms.items() if key[0] is not node}
        self._lapsed = {lapsed for lapsed in self._lapsed if lapsed[0] is not node}
        self._cuts.pop(node, None)

    def cut_unheard(self, node: SimNode) -> None:
        self._cuts[node] = self.core.now

    def cut_heard(self, node: SimNode) -> None:
        self._cuts.pop(node, None)

    def promoted(self, now: float) -> None:
        self.last_promotion = now

    # The promises ------------------------------------------------------------------------------------------------

    def _read(self, node: SimNode, role: str) -> None:
        """One leader: a node that begins to read True must be the only one."""
        token = node.protocol.roles.holding.get(role)
        belief = self._open[node].get(role)
        reads = node.believes(role)
        if belief and belief.end <= self.core.now:
            self._lapsed.add((node, role, belief.token))
        if belief and (not reads or belief.end <= self.core.now or belief.token != token):
            self._close(node, role)
            belief = None
        if not reads:
            return
        assert token is not None
        end = node.clock.true(node.protocol.trusted_until)
        if belief:
            belief.end = end
            return
        if (node, role, token) in self._lapsed:
            raise Violation(f"{node.name} takes up {role} {token} again, after it had lapsed")
        for other in self.nodes:
            if other is not node and other.believes(role):
                self._overlap(role, other, node)
        belief = self._open[node][role] = Belief(node, token, self.core.now, end)
        self.history.setdefault(role, []).append(belief)

    def _overlap(self, role: str, first: SimNode, second: SimNode) -> None:
        if self.excepted(first):
            self.exceptions += 1
            return
        raise Violation(f"two leaders of {role}: {first.name} and {second.name}")

    def excepted(self, node: SimNode) -> bool:
        """The named exception of promise 1."""
        at = self._cuts.get(node)
        bound = node.settings.ttl / (1 - timing.DRIFT)
        instant = node.settings.takeover == "instant" and node.settings.sentinels
        return instant and at is not None and self.core.now <= at + bound

    def _close(self, node: SimNode, role: str) -> None:
        belief = self._open[node].pop(role)
        belief.end = min(belief.end, self.core.now)

    def _in_order(self, node: SimNode, event: Any) -> None:
        """Events tell a story that makes sense: a term begins, is suspended and resumed, and ends, once."""
        key, term = (node, event.role), self._terms.get((node, event.role))
        if isinstance(event, Elected):
            fits, after = term is None, (event.token, False)
        elif isinstance(event, Suspended):
            fits, after = term == (event.token, False), (event.token, True)
        elif isinstance(event, Resumed):
            fits, after = term == (event.token, True), (event.token, False)
        else:
            fits, after = term is not None and term[0] == event.token, None
        if not fits:
            raise Violation(f"{node.name}: {event} although its term of {event.role} was {term}")
        if after is None:
            del self._terms[key]
        else:
            self._terms[key] = after

    def _elected(self, node: SimNode, event: Elected) -> None:
        """Tokens only grow, and what is announced is believed."""
        self.elections += 1
        before = self._announced.get(event.role, 0)
        if event.token <= before and not self.excepted(node):
            raise Violation(f"{node.name} announces {event.role} {event.token} after {before}")
        self._announced[event.role] = max(before, event.token)
        if node.protocol.roles.holding.get(event.role) == event.token and not node.believes(event.role):
            raise Violation(f"{node.name} announces {event.role} {event.token} without trust in it")

    def executed(self, node: SimNode, request: Any, answer: Any) -> None:
        """The server has executed a request."""
        self.asked[type(request).__name__] += 1
        if isinstance(request, messages.End):
            reasons = {verdict.member_id: verdict.reason for verdict in request.verdicts}
            for member_id in answer.ids:
                self._ended(member_id, reasons[member_id], node)
        if isinstance(request, (messages.Acquire, messages.End)):
            for role, token in answer.tokens.items():
                if token <= self._issued.get(role, 0):
                    raise Violation(f"{node.name} was given {role} {token} after {self._issued[role]}")
                self._issued[role] = token
                self.core.note(f"server: {role} {token} to {node.name}")

    def _ended(self, member_id: str, reason: str, by: SimNode) -> None:
        """No member that others have ended believes in itself."""
        self.core.note(f"server: {member_id[:8]} ended by {by.name}: {reason}")
        self.ends.append((self.core.now, member_id, reason))
        for node in self.nodes:
            if node.alive and node.protocol.member_id == member_id and not self.excepted(node):
                for role in node.protocol.roles.holding:
                    if node.believes(role):
                        raise Violation(f"{by.name} ended {node.name} by {reason} while it leads {role}")

    def committed(self, role: str, token: int) -> None:
        """No stale write: once a later term was begun, nothing fenced with an earlier one commits."""
        self.commits += 1
        if token < self._issued.get(role, 0):
            raise Violation(f"a write fenced with {role} {token} commits after {self._issued[role]} was begun")

    # What scenarios ask ------------------------------------------------------------------------------------------

    def leader(self, role: str) -> SimNode | None:
        return next((node for node in self.nodes if node.believes(role)), None)

    def next_term_after(self, role: str, moment: float) -> float | None:
        """How long after a moment a node begins to lead; None if none has."""
        return next((b.begin - moment for b in self.history.get(role, []) if b.begin >= moment), None)
