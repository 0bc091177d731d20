"""One node of the small world: its protocol, its two lanes, its connections, and all that is on its way in them.

It does what the engine does, and what ``tests.verification.simulation.node`` does: one request at a time per lane, the
next as soon as the answer is in, doubt before a connection is closed, and a keeper that ends trust and cuts calls that
hang.
Every method whose name begins with ``do_`` is one step, and leads to one state.
"""

from __future__ import annotations

from typing import Any

from tenure.core import messages, timing
from tenure.core.membership import Phase
from tenure.core.options import ProtocolOptions
from tenure.core.protocol import NodeProtocol
from tenure.core.timing import LONG_AGO
from tenure.events import Elected
from tests.verification.exploration.forms import form
from tests.verification.exploration.lines import CLOSE, CLOSED, FAILED, Line
from tests.verification.exploration.names import NAMES, OLDEST, Chance, called, shifted
from tests.verification.exploration.record import Record

ROLE = "r"
TICK_S = 1.0
FAST = 1 + timing.DRIFT
"""The server's clock is as fast as permitted: it loses its patience as early as it may."""
KNOWN = 6
"""Ticks. A connection that old has seen enough for any judgement."""


class Place:
    """A node and everything between it and the server."""

    def __init__(self, number: int, settings: ProtocolOptions, rate: float) -> None:
        self.number = number
        self.settings = settings
        self.step = rate * TICK_S
        self.now = 0.0
        self.chance = Chance(number)
        self.protocol: NodeProtocol | None = None
        self.asked: dict[str, Any] = {"control": None, "watch": None}
        self.age = {"control": 0, "watch": 0}
        self.lines: list[Line] = []
        self.paused = False
        self.isolated: int | None = None
        """For how many ticks nothing has come through."""
        self.unheard: int | None = None
        """For how many ticks an instant node has not heard that the server has cut its control connection."""
        self.fallen: set[str] = set()
        """Memberships whose sentinel fell for another reason than the end of the server."""
        self.record = Record()
        self.elected: list[int] = []
        self.broken: list[str] = []
        self.do_start()

    @property
    def name(self) -> str:
        return NAMES[self.number]

    def form(self) -> Any:
        """What it is, for comparison; moments relative to now."""
        if self.protocol:
            self._forget()
        lines = tuple([form(line, 0.0, 1.0) for line in self.lines])
        flags = (self.paused, self.isolated, self.unheard, self.chance.drawn, self.chance.keys, self.number)
        asked = tuple([(form(self.asked[lane], 0.0, 1.0), self.age[lane]) for lane in ("control", "watch")])
        record = form(self.record, self.now, self.step)
        return form(self.protocol, self.now, self.step), lines, flags, asked, tuple(sorted(self.fallen)), record

    def _forget(self) -> None:
        """Drop what is remembered and decides nothing more."""
        assert self.protocol
        watch, roles = self.protocol._watch, self.protocol.roles
        # Whatever is due has been so for equally long.
        if self.now >= watch._sweep_at:
            watch._sweep_at = LONG_AGO
        for role in [role for role, (_, until) in roles._stand_back.items() if self.now >= until]:
            del roles._stand_back[role]

    # What is read from outside -------------------------------------------------------------------------------------

    @property
    def believes(self) -> int:
        """The token under which this node leads at this very instant, or 0."""
        if self.protocol and self.now < self.protocol.trusted_until:
            return self.protocol.roles.holding.get(ROLE, 0)
        return 0

    @property
    def excepted(self) -> bool:
        """The named exception of promise 1: cut at the server's end, and it has not heard; for a TTL at most."""
        return self.unheard is not None and self.unheard * TICK_S <= self.settings.ttl / (1 - timing.DRIFT)

    @property
    def hears(self) -> bool:
        return self.protocol is not None and not self.paused and self.isolated is None

    def line(self, lane: str) -> Line | None:
        return next((line for line in self.lines if line.lane == lane and line.used), None)

    def hangs(self, lane: str) -> bool:
        """Whether the keeper gives up the call on this lane."""
        request, ttl = self.asked[lane], self.settings.ttl
        if request is None or not self.protocol or self.paused:
            return False
        if isinstance(request, (messages.Open, messages.OpenWatch, messages.Knock)):
            patience = min(5.0, ttl / 2)
        else:
            patience = timing.trust(ttl) if lane == "control" else timing.SLICE_S + ttl
        return self.age[lane] * self.step >= patience

    # Time and the process ------------------------------------------------------------------------------------------

    def do_tick(self) -> None:
        self.now += self.step
        for lane in self.age:
            self.age[lane] = min(9, self.age[lane] + 1) if self.asked[lane] is not None else 0
        for line in self.lines:
            line.age = min(KNOWN, line.age + 1) if line.lane == "watch" else 0
        if self.unheard is not None:
            self.unheard = min(9, self.unheard + 1)
        if self.isolated is not None:
            self.isolated = min(9, self.isolated + 1)
            if self.isolated * FAST * TICK_S >= timing.server_patience(self.settings.ttl):
                for line in list(self.lines):
                    self._end(line)
        self._settle()

    def do_start(self) -> None:
        self.isolated = None
        self.protocol = NodeProtocol(self.settings, 0)
        self.protocol._chance = self.chance
        for backoff in (self.protocol._connection.reopen, self.protocol._retry, self.protocol._watch._retry):
            backoff.chance = self.chance
        self.protocol._tidy_at = float("inf")
        self.protocol.stand(ROLE)
        self._settle()

    def do_die(self) -> None:
        """kill -9: what was sent still arrives, and the kernel closes the connections behind it."""
        self.protocol, self.paused, self.unheard = None, False, None
        self.record = Record()
        self.asked, self.age = dict.fromkeys(self.asked), dict.fromkeys(self.age, 0)
        for line in [line for line in self.lines if line.used]:
            self._close(line)

    def do_host(self) -> None:
        """The whole host is gone: nothing closes its connections, and the server has to lose its patience."""
        self.do_die()
        self.isolated = 0
        for line in self.lines:
            line.up.clear()

    def do_pause(self) -> None:
        self.paused = True

    def do_wake(self) -> None:
        self.paused = False
        self._settle()

    def do_isolate(self) -> None:
        self.isolated = 0

    def do_heal(self) -> None:
        self.isolated = None

    def do_keeper(self) -> None:
        assert self.protocol
        self.protocol.expire(self.now)
        self._settle()

    def do_leave(self) -> None:
        assert self.protocol
        self.protocol.leave(self.now)
        self._settle()

    def do_resign(self) -> None:
        assert self.protocol
        self.protocol.resign(ROLE, self.now)
        self._settle()

    # What the lanes do ---------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """After every step: give the lanes their next requests, publish what was decided."""
        if self.protocol is None:
            return
        if not self.paused:
            self._pump("control")
            while self._pump("watch"):
                pass
        self._publish()
        if self.protocol.phase is Phase.GONE:
            self.do_die()

    def _publish(self) -> None:
        """Read what was announced, and what an application would read."""
        assert self.protocol
        news, self.protocol.news[:] = self.protocol.news[:], []
        for event in news:
            self._break(*self.record.announced(event))
            if isinstance(event, Elected):
                self.elected.append(event.token)
                if self.protocol.roles.holding.get(ROLE) == event.token != self.believes:
                    self._break(f"it announces {ROLE} {event.token} without trust in it")
        self._break(*self.record.believes(self.believes, self.protocol.trusted_until, self.now))

    def _break(self, *promises: str) -> None:
        self.broken.extend(f"{self.name}: {promise}" for promise in promises)

    def _pump(self, lane: str) -> bool:
        """Send the next request; True if that failed at once."""
        assert self.protocol
        if self.asked[lane] is not None:
            return False
        request = self.protocol.control(self.now) if lane == "control" else self.protocol.watch(self.now)
        if isinstance(request, float):
            assert request > self.now, f"{lane} is to be asked again at {request}, which is not after {self.now}"
            return False
        if isinstance(request, messages.Look) and request.seconds:
            request = request._replace(seconds=1.0)  # a slice is a tick
        self.asked[lane], self.age[lane] = request, 0
        if isinstance(request, (messages.Open, messages.OpenWatch, messages.Knock)):
            self.lines.append(Line("knock" if isinstance(request, messages.Knock) else lane, up=[request]))
            return False
        line = self.line(lane)
        if line is None:  # it broke while nothing was asked
            assert lane == "watch"
            self.asked[lane] = None
            self.protocol.fail_watch(request, self.now, lost=True)
            return True
        if line.open:
            line.up.append(request)
        return False

    def do_hear(self, index: int) -> None:
        """Something comes in from the server."""
        assert self.protocol
        line = self.lines[index]
        message = line.down.pop(0)
        if line.lane == "control":
            self._hear_control(line, message)
        else:
            self._hear_watch(line, message)
        self._settle()

    def _hear_control(self, line: Line, message: Any) -> None:
        assert self.protocol
        if message == CLOSED:
            self._lose_control(line)
            return
        request, self.asked["control"] = self.asked["control"], None
        if message == FAILED:
            self.protocol.fail(request, self.now, lost=False)
            return
        if isinstance(message, messages.Opened):
            self.protocol.server_answered(message.server.start, self.now)
        self.protocol.answer(request, message, self.now)

    def _lose_control(self, line: Line) -> None:
        """The control connection is gone: in doubt before anything is closed."""
        assert self.protocol
        self.unheard = None
        request, self.asked["control"] = self.asked["control"], None
        if request is None:
            self.protocol.lost_control(self.now)
        else:
            self.protocol.fail(request, self.now, lost=True)
        self._close(line)

    def _hear_watch(self, line: Line, message: Any) -> None:
        assert self.protocol
        if message == CLOSED:
            self._lose_watch(line)
            return
        request, self.asked["watch"] = self.asked["watch"], None
        if line.lane == "knock":
            self.lines.remove(line)
        if message == FAILED:
            self.protocol.fail_watch(request, self.now, lost=False)
        else:
            before = dict(self.protocol._watch.verdicts)
            self.protocol.answer_watch(request, message, self.now)
            for member, verdict in self.protocol._watch.verdicts.items():
                if member not in before and verdict.reason == "silence":
                    self._watched_long_enough(next(seen for seen in message.members if seen.id == member), line)

    def _watched_long_enough(self, sighting: messages.Sighting, line: Line) -> None:
        """A silence was watched from its beginning to its end on one connection: an outage of the server is none."""
        member = sighting.id
        if line.age < KNOWN and line.age * self.step < timing.silence(sighting.ttl):
            since = f"its connection is {line.age} ticks old"
            self._break(f"it judges that {called(member)} was silent for too long, and {since}")

    def _lose_watch(self, line: Line) -> None:
        assert self.protocol
        request = self.asked["watch"]
        if request is not None and (line.lane == "knock" or not isinstance(request, messages.Knock)):
            self.asked["watch"] = None
            if line.lane == "knock":
                self.protocol.answer_watch(request, messages.Knocked(open=False), self.now)
            else:
                self.protocol.fail_watch(request, self.now, lost=True)
        self._close(line)

    def do_hang(self, lane: str) -> None:
        """The keeper cuts a connection on which a call hangs."""
        line = self.line("knock" if isinstance(self.asked[lane], messages.Knock) else lane)
        assert line
        if lane == "control":
            self._lose_control(line)
        else:
            self._lose_watch(line)
        self._settle()

    def _close(self, line: Line) -> None:
        """Close the client's end; the server hears of it behind everything that was sent before."""
        line.used = False
        line.down.clear()
        if line.open:
            line.up.append(CLOSE)
        else:
            self.lines.remove(line)

    # What the server does to it ------------------------------------------------------------------------------------

    def do_forget(self, member_id: str) -> None:
        """This membership has ended: it does not matter any more how its sentinel fell."""
        self.fallen.discard(member_id)

    def do_execute(self, index: int, answer: Any) -> None:
        """The server has executed what came in; the answer is on its way."""
        line = self.lines[index]
        request = line.up.pop(0)
        if request == CLOSE:
            self._end(line)
            return
        if isinstance(answer, (messages.Opened, messages.Watching)):
            line.open = True
        elif isinstance(request, messages.Join) or (isinstance(request, messages.Resume) and answer.alive):
            line.key, line.member = request.member.key, request.member.id
        elif isinstance(request, messages.Leave):
            line.key = None
        elif isinstance(request, (messages.Renew, messages.Look)):
            line.member = request.member_id
        if line.used:
            line.down.append(answer)

    def do_fail(self, index: int) -> None:
        """What came in fails, and is rolled back."""
        self.lines[index].up.pop(0)
        self.lines[index].down.append(FAILED)

    def do_stop(self, told: bool) -> None:
        """The server is gone with the answers that were on their way. If its host is gone, the nodes do not notice."""
        for line in list(self.lines):
            if line.open:
                line.down.clear()
                self._end(line, fell=False)
                if not told:
                    line.down.clear()
                    line.mute = True

    def do_end(self, index: int) -> None:
        """A server that is stopping ends this connection."""
        self._end(self.lines[index], fell=False)

    def do_cut(self, index: int) -> None:
        """The server ends this connection, and says so first; who cannot hear that is the named exception."""
        self._cut(self.lines[index])
        self._settle()

    def _cut(self, line: Line) -> None:
        heard = self.hears and line.used and not line.slow_down and not line.mute
        if not heard and self.protocol and line is self.line("control") and self.settings.takeover == "instant":
            self.unheard = 0
        self._end(line)
        if heard and line.lane == "control":
            self._lose_control(line)
        elif heard:
            self._lose_watch(line)

    def do_cut_late(self, index: int) -> None:
        """The server's end is cut and the news is late: the named exception, of an instant node."""
        self.unheard = 0 if self.settings.takeover == "instant" else None
        self.lines[index].slow_down = True
        self._end(self.lines[index])

    def do_evict(self, member_ids: tuple[str, ...]) -> None:
        for line in list(self.lines):
            if line.open and line.member in member_ids:
                self._cut(line)
        self._settle()

    def do_slow_up(self, index: int) -> None:
        self.lines[index].slow_up = True

    def do_slow_down(self, index: int) -> None:
        self.lines[index].slow_down = True

    def do_quick_up(self, index: int) -> None:
        self.lines[index].slow_up = False

    def do_quick_down(self, index: int) -> None:
        self.lines[index].slow_down = False

    def _end(self, line: Line, *, fell: bool = True) -> None:
        """The server's end goes, and the sentinel with it."""
        if not line.open:
            return
        line.open = False
        if line.key is not None and line.member and fell:
            self.fallen.add(line.member)
        line.key = None
        line.up.clear()
        if line.used:
            line.down.append(CLOSED)
        else:
            self.lines.remove(line)

    # Counts of renewals, counted back from the row's ---------------------------------------------------------------

    def do_shift(self, member_id: str, by: int) -> None:
        """The row of a member counts one renewal more: what was seen of it before is one further back."""
        if self.protocol:
            observation = self.protocol._watch._evidence
            seen = observation._since
            if member_id in seen:
                seen[member_id] = (max(OLDEST, seen[member_id][0] + by), seen[member_id][1])
            verdicts = self.protocol._watch.verdicts
            if member_id in verdicts:
                verdicts[member_id] = shifted(verdicts[member_id], member_id, by)
            observation.suspects = shifted(observation.suspects, member_id, by)
            observation.due = shifted(observation.due, member_id, by)
        self.asked = {lane: shifted(request, member_id, by) for lane, request in self.asked.items()}
        for line in self.lines:
            line.up = [shifted(message, member_id, by) for message in line.up]
            line.down = [shifted(message, member_id, by) for message in line.down]
