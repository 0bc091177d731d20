"""A node whose requests are answered by the test: no server, no thread, and time is a number.

    node = ScriptedNode("r")
    node.run(0.0)                               everything that is due at 0.0 is asked, and succeeds
    node.run(2.5, {Renew: Standing(alive=False)})   but for the answers that the test gives
    node.run(2.5, {Renew: LOST})                the connection breaks

``run`` returns the requests that were made, ``news()`` the events since the last call.
"""

from __future__ import annotations

from typing import Any

from tenure.core import messages
from tenure.core.messages import Held, Sighting
from tenure.core.options import ProtocolOptions
from tenure.core.protocol import NodeProtocol
from tenure.core.servers import Confirmed, Server

TTL = 10.0
EVERY = TTL / 4
TRUST = 0.9 * TTL
"""How long a renewal is trusted, from when it was sent."""
SILENCE = 1.02 * TTL
"""How long a member must be silent before another node ends it."""
SERVER = Server("start 1", "system:1")
RESTARTED = Server("start 2", "system:1")
CONFIRMED = Confirmed("system:1", 0, max_ttl=TTL, ripe_ttl=TTL)
FAILS, LOST = "fails", "lost"
"""Outcomes: the request fails; the connection is lost, and the outcome is not known."""


class ScriptedNode:
    def __init__(self, *roles: str, takeover: str = "instant", **options: Any) -> None:
        self.protocol = NodeProtocol(ProtocolOptions("node", TTL, EVERY, takeover, **options), seed=1)
        self.roles = self.protocol.roles
        self.token = 0
        for role in roles:
            self.protocol.stand(role)

    @property
    def phase(self) -> str:
        return self.protocol.phase.name

    def believes(self, now: float) -> dict[str, int]:
        """The terms in which an application believes at this moment, with their tokens."""
        return dict(self.roles.holding) if now < self.protocol.trusted_until else {}

    def news(self) -> list[object]:
        news, self.protocol.news[:] = self.protocol.news[:], []
        return news

    def run(self, now: float, outcomes: dict[type, Any] | None = None) -> list[Any]:
        """Make every request that is due; a connection that was lost, or a request that failed, ends it."""
        made = []
        while not isinstance(request := self.protocol.control(now), float):
            made.append(request)
            assert len(made) < 50, f"the answers of this test lead nowhere: {made[-3:]}"
            outcome = (outcomes or {}).get(type(request))
            outcome = self._answer(request) if outcome is None else outcome
            if outcome in (FAILS, LOST):
                self.protocol.fail(request, now, lost=outcome == LOST)
                break
            self.protocol.answer(request, outcome, now)
        return made

    def step(self, now: float, outcome: Any = None) -> Any:
        """Make one request, which is due, and return it."""
        request = self.protocol.control(now)
        assert not isinstance(request, float), f"the next request is due at {request}"
        self.protocol.answer(request, self._answer(request) if outcome is None else outcome, now)
        return request

    def kinds(self, now: float, outcomes: dict[type, Any] | None = None) -> list[type]:
        """As ``run``, but only the kinds of the requests."""
        return [type(request) for request in self.run(now, outcomes)]

    def look(self, now: float, *members: Sighting, accepts: bool = True, **seen: Any) -> list[Any]:
        """Let the watch lane look once and act on what it sees; ``accepts`` says whether the server takes a knock."""
        made: list[Any] = []
        answers = {
            messages.OpenWatch: messages.Watching(),
            messages.Look: messages.Looked(seen.pop("server", SERVER), members, **seen),
            messages.Knock: messages.Knocked(open=accepts),
        }
        while not isinstance(request := self.protocol.watch(now), float):
            if type(request) is messages.Look and any(type(before) is messages.Look for before in made):
                break
            made.append(request)
            assert len(made) < 50, f"the answers of this test lead nowhere: {made[-3:]}"
            self.protocol.answer_watch(request, answers.get(type(request), messages.Done()), now)
        return made

    def _answer(self, request: Any) -> Any:
        if isinstance(request, messages.Acquire):
            self.token += 1
            return messages.Acquired(dict.fromkeys(request.roles, self.token))
        held = tuple(Held(role, token) for role, token in self.roles.holding.items())
        answers = {
            messages.Open: messages.Opened(SERVER, CONFIRMED),
            messages.Join: messages.Joined(sentinel=True),
            messages.Renew: messages.Standing(alive=True, held=held, confirmed=CONFIRMED),
            messages.Resume: messages.Standing(alive=True, held=held, confirmed=CONFIRMED),
            messages.End: messages.Ended((), (), {}),
            messages.Vacate: messages.Vacated(done=True),
            messages.Leaders: messages.LeadersAre(()),
        }
        return answers.get(type(request), messages.Done())


def leader(*roles: str, now: float = 0.0, **options: Any) -> ScriptedNode:
    """A node that leads these roles since ``now``, each under its own token, beginning at 1."""
    node = ScriptedNode(**options)
    for role in roles:
        node.protocol.stand(role)
        node.run(now)
    assert set(node.roles.holding) == set(roles)
    node.news()
    return node


def member(id: str = "other", renewals: int = 0, **seen: Any) -> Sighting:
    """Another member with a sentinel that stands."""
    as_usual = {"ttl": TTL, "key": 7, "epoch": 0, "server_start": SERVER.start, "sentinel_stands": True}
    return Sighting(id, renewals=renewals, **(as_usual | seen))
