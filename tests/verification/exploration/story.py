"""The way to a state, as a numbered list that a person can read."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from tenure.core import messages
from tests.verification.exploration.lines import CLOSE, CLOSED, FAILED
from tests.verification.exploration.moves import Space, State
from tests.verification.exploration.names import NAMES, called
from tests.verification.exploration.node import ROLE, Place
from tests.verification.exploration.options import Move
from tests.verification.exploration.server import Base

SERVER = {
    "tick": "a tick passes",
    "up": "the server is up again",
    "down": "the server is down",
    "stop": "the server stops at once; everybody's connection ends",
    "stopping": "the server begins to stop: no new connections, the old ones end one by one",
    "snapshot": "the replica has everything up to here, and nothing of what follows",
    "begin": "a fenced transaction begins",
    "commit": "it commits",
}
NODE = {
    "keeper": "its keeper sees that trust has run out",
    "start": "its process starts",
    "die": "its process is killed",
    "host": "its host is gone, and nobody closes its connections",
    "pause": "its process is stopped (SIGSTOP)",
    "wake": "its process goes on",
    "isolate": "is cut off: nothing comes through, either way",
    "heal": "is reachable again",
    "leave": "leaves",
    "resign": "resigns",
    "cut": "its {lane} connection is ended by the server",
    "cut_late": "its {lane} connection is ended by the server, and it does not hear of that",
    "end": "its {lane} connection is ended by the stopping server",
    "slow_up": "what it sends on its {lane} connection is late",
    "slow_down": "what it is sent on its {lane} connection is late",
    "quick_up": "what it sent on its {lane} connection comes through",
    "quick_down": "what it was sent on its {lane} connection comes through",
    "fail": "{message} fails and is rolled back",
    "hang": "its keeper gives up a call that hangs, and closes the connection",
}


def tell(space: Space, way: list[Move]) -> list[str]:
    """One line a step; who leads is written behind it where that changes."""
    state, lines = space.first(), []
    before = _leaders(space, state)
    lines.append(f"  0. {_beginning(before)}")
    for number, move in enumerate(way, 1):
        after = next(after for _, other, after, _ in space.successors(state) if other == move)
        leaders = _leaders(space, after)
        change = "" if leaders == before else f"   [{_who(leaders)}]"
        lines.append(f"{number:3}. {_step(space, state, after, move)}{change}")
        state, before = after, leaders
    return lines


def _place(space: Space, state: State, number: int) -> Place:
    place: Place = pickle.loads(space.places.kept[state[1 + number]].pickled)
    return place


def _leaders(space: Space, state: State) -> list[str]:
    seen = [space.places.kept[place] for place in state[1:-1]]
    return [f"{NAMES[number]} leads {ROLE} {one.believes}" for number, one in enumerate(seen) if one.believes]


def _who(leaders: list[str]) -> str:
    return " and ".join(leaders) or "nobody leads"


def _beginning(leaders: list[str]) -> str:
    return f"Everybody knows everybody. [{_who(leaders)}]" if leaders else "Everybody is about to connect."


def _step(space: Space, state: State, after: State, move: Move) -> str:
    if not isinstance(move[0], int):
        if move[0] == "promote":
            return f"the server's host is lost and the replica promoted{'' if move[1] else '; nobody is told'}"
        text = SERVER[move[0]]
        if move[0] == "up":
            server: Base = pickle.loads(space.bases.kept[after[0]].pickled)
            text += f" ({server.identity.start}, {server.identity.incarnation})"
        return text
    number, what, *rest = move
    name, place = NAMES[number], _place(space, state, number)
    if what == "hear":
        line = place.lines[rest[0]]
        return f"{name} hears on its {line.lane} connection: {said(line.down[0])}"
    if what == "execute":
        line = place.lines[rest[0]]
        answers = _place(space, after, number).lines
        answer = answers[rest[0]].down[-1:] if rest[0] < len(answers) and line.used else []
        reply = f": {said(answer[0])}" if answer else ""
        return f"server executes {name}'s {said(line.up[0])}{reply}"
    lane = place.lines[rest[0]].lane if rest and isinstance(rest[0], int) else ""
    message = said(place.lines[rest[0]].up[0]) if what == "fail" else ""
    return f"{name}: {NODE[what].format(lane=lane, message=message)}"


def said(value: Any) -> str:
    """A request or an answer in a few words."""
    if isinstance(value, str):
        return {CLOSE: "closing of the connection", CLOSED: "the connection is gone", FAILED: "it failed"}[value]
    words = WORDS.get(type(value), lambda _: type(value).__name__)
    return words(value)


def _standing(standing: messages.Standing) -> str:
    if not standing.alive:
        return "the membership has ended"
    held = [f"{mine.role} {mine.token} is yours" for mine in standing.held]
    vacant = [f"{vacancy.role} is vacant" for vacancy in standing.vacant]
    return "; ".join(["renewed", *held, *vacant])


def _sighting(one: messages.Sighting) -> str:
    if one.key is None:
        return called(one.id)
    return f"{called(one.id)} ({'its sentinel stands' if one.sentinel_stands else 'no sentinel'})"


WORDS: dict[type, Callable[[Any], str]] = {
    messages.Join: lambda request: f"Join as {called(request.member.id)}",
    messages.Renew: lambda request: f"Renew of {called(request.member_id)}",
    messages.Acquire: lambda request: f"Acquire of {called(request.member_id)}",
    messages.Leave: lambda request: f"Leave of {called(request.member_id)}",
    messages.Resume: lambda request: f"Resume of {called(request.member.id)}",
    messages.Vacate: lambda request: f"Vacate of {request.role} {request.token}",
    messages.End: lambda request: (
        "End of " + ", ".join(f"{called(verdict.member_id)} ({verdict.reason})" for verdict in request.verdicts)
    ),
    messages.Standing: _standing,
    messages.Acquired: lambda got: (
        ", ".join(f"{role} {token} is yours" for role, token in got.tokens.items()) or "not vacant"
    ),
    messages.Ended: lambda ended: "ended: " + (", ".join(map(called, ended.ids)) or "nobody, it had moved on"),
    messages.Looked: lambda looked: "seen: " + ", ".join(map(_sighting, looked.members)),
    messages.Knocked: lambda knocked: "the server is open" if knocked.open else "the server is closed",
    messages.Opened: lambda opened: f"connected to {opened.server.start}, {opened.server.incarnation}",
    messages.Watching: lambda _: "connected",
    messages.Done: lambda _: "done",
}
