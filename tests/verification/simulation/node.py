"""One node as the engine runs it: two lanes with one request each, a keeper, its own clock, and a process that can be
paused, crashed and started again. ``is_leader`` is read from outside at any instant, also while the process is stopped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tenure.core import messages, timing
from tenure.core.membership import Phase
from tenure.core.options import ProtocolOptions
from tenure.core.protocol import NodeProtocol
from tenure.core.servers import Confirmed, Server
from tenure.core.timing import NEVER
from tenure.store.session import Failed, Gone
from tests.verification.simulation.core import Clock, Core, Timer
from tests.verification.simulation.network import TO_CLIENT, TO_SERVER, Link, Stream

if TYPE_CHECKING:
    from tests.verification.simulation.oracles import Oracles
    from tests.verification.simulation.server import Connection, SimServer

EPSILON_S = 1e-6


class SimNode:
    """A process with a node in it."""

    def __init__(
        self,
        core: Core,
        server: SimServer,
        oracles: Oracles,
        settings: ProtocolOptions,
        clock: Clock,
        *,
        listens: bool = True,
    ) -> None:
        self.core = core
        self.server = server
        self.oracles = oracles
        self.settings = settings
        self.clock = clock
        self.listens = listens
        self.name = settings.name
        self.link = Link(core)
        self.paused = False
        self.host_dead = False
        self.roles: list[str] = []
        self._inbox: list[tuple[str, Callable[[], None]]] = []
        self.alive = False
        self.start()

    # The process ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin as a new process: nothing is remembered."""
        self.alive = True
        self.life = object()
        self.protocol = NodeProtocol(self.settings, self.core.chance.getrandbits(64))
        self.control: Connection | None = None
        self.watch: Connection | None = None
        self._control_ask: Any = None
        self._watch_ask: Any = None
        self._line = ""
        self._timers: dict[str, tuple[float, Timer]] = {}
        for role in self.roles:
            self.protocol.stand(role)
        self.core.note(f"{self.name}: started")
        self._settle()

    def crash(self, *, host: bool = False) -> None:
        """kill -9: the kernel closes the connections. If the ``host`` is gone, they stay open."""
        self.core.note(f"{self.name}: crashed" + (" with its host" if host else ""))
        self.alive = self.paused = False
        self.life = object()
        self._inbox.clear()
        for _, timer in self._timers.values():
            timer.cancel()
        self.oracles.died(self)
        for connection in (self.control, self.watch):
            if connection:
                if host:
                    connection.up.dead = connection.down.dead = True
                else:
                    self._close(connection)
        self.host_dead = host

    def restart(self) -> None:
        if not self.alive:
            self.host_dead = False
            self.start()

    def pause(self) -> None:
        if self.alive:
            self.core.note(f"{self.name}: paused")
            self.paused = True

    def resume(self) -> None:
        """Go on; what came in waits in the sockets, and the threads wake in any order."""
        if not self.paused:
            return
        self.core.note(f"{self.name}: goes on")
        self.paused = False
        inbox, self._inbox = self._inbox, []
        lanes = ["keeper", "control", "watch"]
        self.core.chance.shuffle(lanes)
        for lane in lanes:
            for which, action in inbox:
                if which == lane and self.alive:
                    action()
                    self._settle()
        if self.alive:
            self._settle()

    # What is read from outside -------------------------------------------------------------------------------------

    def believes(self, role: str) -> bool:
        """``is_leader`` at this very instant."""
        protocol = self.protocol
        return self.alive and role in protocol.roles.holding and self.now < protocol.trusted_until

    @property
    def now(self) -> float:
        return self.clock.local(self.core.now)

    # What the application does -------------------------------------------------------------------------------------

    def command(self, action: Callable[[NodeProtocol, float], Any]) -> None:
        if self.alive:
            self._do("keeper", self.life, lambda: action(self.protocol, self.now))

    def stand(self, *roles: str) -> None:
        self.roles = sorted({*self.roles, *roles})
        self.command(lambda protocol, _: [protocol.stand(role) for role in roles])

    def withdraw(self, role: str) -> None:
        self.core.note(f"{self.name}: withdraws from {role}")
        self.roles = [other for other in self.roles if other != role]
        self.command(lambda protocol, now: protocol.withdraw(role, now))

    def resign(self, role: str, to: str | None = None) -> None:
        self.core.note(f"{self.name}: resigns {role}" + (f" to {to}" if to else ""))
        self.command(lambda protocol, now: protocol.resign(role, now, to))

    def leave(self) -> None:
        self.core.note(f"{self.name}: leaves")
        self.command(lambda protocol, now: protocol.leave(now))

    # The threads ---------------------------------------------------------------------------------------------------

    def _do(self, lane: str, life: object, action: Callable[[], None]) -> None:
        """Something reaches a thread: now, or when the process goes on, or never."""
        if life is not self.life:
            return
        if self.paused:
            self._inbox.append((lane, action))
        else:
            action()
            # A look that found nothing wakes no other thread.
            self._settle(control=lane != "watch" or self.protocol.awaits_control(self.now))

    def _timer(self, name: str, lane: str, due: float, action: Callable[[], None] = lambda: None) -> None:
        """One timer a name, on the node's clock. What is due at the same time as before is left alone."""
        old = self._timers.get(name)
        if old:
            if old[0] == due and old[1].action:
                return
            old[1].cancel()
            del self._timers[name]
        if due != NEVER:
            life = self.life
            timer = self.core.at(self.clock.true(due) + EPSILON_S, lambda: self._do(lane, life, action))
            self._timers[name] = (due, timer)

    def _settle(self, *, control: bool = True) -> None:
        """After every event: publish what was decided, arm the keeper, give the lanes their next requests.

        ``control`` is whether the event wakes the control lane.
        """
        if not self.alive:
            self._publish()
            return
        if control:
            self._pump_control()
        self._pump_watch()
        self._publish()
        self._timer("keeper", "keeper", self.protocol.deadline(), lambda: self.protocol.expire(self.now) and None)
        if self.protocol.phase is Phase.GONE and self.alive:
            self._exit()

    def _publish(self) -> None:
        news, self.protocol.news[:] = self.protocol.news[:], []
        self.oracles.published(self, news)

    def _exit(self) -> None:
        """The membership was left: the process ends in order."""
        self.core.note(f"{self.name}: gone")
        self.alive = False
        self.life = object()
        self.oracles.died(self)
        for connection in (self.control, self.watch):
            if connection:
                self._close(connection)

    # The control lane ----------------------------------------------------------------------------------------------

    def _pump_control(self) -> None:
        if self._control_ask is not None:
            return
        request = self.protocol.control(self.now)
        if isinstance(request, float):
            if request <= self.now:
                raise AssertionError(f"control() returns {request}, which is not after {self.now}")
            self._timer("control", "control", request)
            return
        self._control_ask = request
        life = self.life
        if isinstance(request, messages.Open):
            self._connect("control", lambda connection: self._opened(request, connection))
            return
        connection = self.control
        assert connection is not None
        self.core.note("{}: asks {}", self.name, request)
        reply = lambda result: self._do("control", life, lambda: self._answered(request, connection, result))  # noqa: E731
        connection.up.send(lambda: self.server.arrive(connection, request, reply))
        self._timer("hang", "keeper", self.now + timing.trust(self.settings.ttl), lambda: self._hangs(request))

    def _opened(self, request: messages.Open, connection: Connection | None) -> None:
        if self._control_ask is not request:
            if connection:
                self._close(connection)
            return
        self._control_ask = None
        if connection is None or not connection.alive_for_client:
            self.protocol.fail(request, self.now, lost=True)
            return
        self.control = connection
        self.core.note(f"{self.name}: connected as {connection.pid} to {connection.opened.server.start}")
        if self._line not in (connection.opened.server.line, "") and self.watch:
            self._watch_lost(self.watch)
        self._line = connection.opened.server.line
        self._share_backend_pids()
        self.protocol.answer(request, connection.opened, self.now)

    def _answered(self, request: Any, connection: Connection, result: Any) -> None:
        if self._control_ask is not request or self.control is not connection:
            return
        self._control_ask = None
        self._timer("hang", "keeper", NEVER)
        if isinstance(result, Failed):
            self.protocol.fail(request, self.now, lost=False)
        else:
            self.core.note("{}: hears {}", self.name, result)
            self.protocol.answer(request, result, self.now)

    def _hangs(self, request: Any) -> None:
        """The keeper cuts a connection on which a call hangs."""
        if self._control_ask is request and self.control:
            self._lost(self.control)

    def _lost(self, connection: Connection) -> None:
        """The control connection is gone: suspended before anything is closed."""
        self.oracles.cut_heard(self)
        request, self._control_ask, self.control = self._control_ask, None, None
        self._timer("hang", "keeper", NEVER)
        if request is None:
            self.protocol.lost_control(self.now)
        else:
            self.protocol.fail(request, self.now, lost=True)
        self._publish()
        self._close(connection)

    # The watch lane ------------------------------------------------------------------------------------------------

    def _pump_watch(self) -> None:
        if self._watch_ask is not None:
            return
        request = self.protocol.watch(self.now)
        if isinstance(request, float):
            if request <= self.now:
                raise AssertionError(f"watch() returns {request}, which is not after {self.now}")
            self._timer("watch", "watch", request)
            return
        self._watch_ask = request
        if isinstance(request, messages.OpenWatch):
            self._connect("watch", lambda connection: self._watching(request, connection))
        elif isinstance(request, messages.Knock):
            self._knock(request)
        elif isinstance(request, messages.Look) and request.wait_for is None and request.seconds > 0:
            self._timer("pace", "watch", self.now + request.seconds, lambda: self._send_watch(request))
        else:
            self._send_watch(request)

    def _send_watch(self, request: Any) -> None:
        if self._watch_ask is not request:
            return
        connection, life = self.watch, self.life
        if connection is None:  # it broke while nothing was asked
            self._watch_ask = None
            self.protocol.fail_watch(request, self.now, lost=True)
            return
        reply = lambda result: self._do("watch", life, lambda: self._watch_answered(request, result))  # noqa: E731
        connection.up.send(lambda: self.server.arrive(connection, request, reply))
        self._timer(
            "watch hang", "keeper", self.now + timing.SLICE_S + self.settings.ttl, lambda: self._watch_hangs(request)
        )

    def _watching(self, request: messages.OpenWatch, connection: Connection | None) -> None:
        if self._watch_ask is not request:
            if connection:
                self._close(connection)
            return
        self._watch_ask = None
        if connection is None or not connection.alive_for_client:
            self.protocol.fail_watch(request, self.now, lost=True)
            return
        self.watch = connection
        self._share_backend_pids()
        self.protocol.answer_watch(request, messages.Watching(), self.now)

    def _watch_answered(self, request: Any, result: Any) -> None:
        if self._watch_ask is not request:
            return
        self._watch_ask = None
        self._timer("watch hang", "keeper", NEVER)
        if isinstance(result, Failed):
            self.protocol.fail_watch(request, self.now, lost=False)
        else:
            if not isinstance(result, messages.Looked) or result.vacancy:
                self.core.note("{}: watch hears {}", self.name, result)
            self.protocol.answer_watch(request, result, self.now)

    def _watch_hangs(self, request: Any) -> None:
        if self._watch_ask is request and self.watch:
            self._watch_lost(self.watch)

    def _watch_lost(self, connection: Connection) -> None:
        request, self.watch = self._watch_ask, None
        pacing = isinstance(request, messages.Look) and request.wait_for is None and "watch hang" not in self._timers
        if request is not None and not pacing and not isinstance(request, messages.Knock):
            self._watch_ask = None
            self._timer("watch hang", "keeper", NEVER)
            self.protocol.fail_watch(request, self.now, lost=True)
        self._close(connection)

    def _knock(self, request: messages.Knock) -> None:
        """A fresh connection: not behind the others, and refused where the server takes no more."""
        life, up, down = self.life, Stream(self.link, TO_SERVER), Stream(self.link, TO_CLIENT)
        reply = lambda result: self._do("watch", life, lambda: self._watch_answered(request, result))  # noqa: E731

        def arrive() -> None:
            result = messages.Knocked(self.server.knock() == request.server_start)
            down.send(lambda: reply(result))

        self.core.note(f"{self.name}: knocks")
        up.send(arrive)
        refuse = lambda: self._watch_answered(request, messages.Knocked(open=False))  # noqa: E731
        self._timer("watch hang", "keeper", self.now + self.connect_timeout_s, refuse)

    # Connections ---------------------------------------------------------------------------------------------------

    @property
    def connect_timeout_s(self) -> float:
        return min(5.0, self.settings.ttl / 2)

    def _connect(self, lane: str, done: Callable[[Connection | None], None]) -> None:
        """Connect and prepare: two round trips. It may be made after the node has stopped waiting for it."""
        life, server = self.life, self.server
        up, down = Stream(self.link, TO_SERVER), Stream(self.link, TO_CLIENT)
        waiting = [True]

        def finish(connection: Connection | None) -> None:
            if waiting[0]:
                waiting[0] = False
                self._timer(lane + " connect", "keeper", NEVER)
                done(connection)
            elif connection:
                self._close(connection)

        def arrive() -> None:
            if not waiting[0]:
                return
            if not server.open_for_business:
                down.send(lambda: self._do(lane, life, lambda: finish(None)))
                return
            connection = server.accept(self, lane)
            if lane == "control":
                try:
                    connection.opened = messages.Opened(*self._open(connection))
                except (Failed, Gone):
                    server.end(connection, "could not be prepared")
                    down.send(lambda: self._do(lane, life, lambda: finish(None)))
                    return
            connection.down.send(
                lambda: self._do(lane, life, lambda: finish(connection)), at_least=2 * self.link.delay()
            )

        up.send(arrive)
        self._timer(lane + " connect", "keeper", self.now + self.connect_timeout_s, lambda: finish(None))

    def _open(self, connection: Connection) -> tuple[Server, Confirmed]:
        """Find or create the namespace. If no operator has set its largest TTL, nodes do."""
        work, max_ttl = connection.work, self.server.max_ttl
        if max_ttl is None:
            return work.open(self.settings.ttl)
        work.open(None)
        self.server.database.administer(max_ttl, loses_nothing=self.server.loses_nothing)
        return work.open(None)

    def _share_backend_pids(self) -> None:
        """Let the row name both connections, as the engine does."""
        if self.control and self.watch:
            self.control.work.watch_backend = (self.watch.pid, self.watch.started)

    def _close(self, connection: Connection) -> None:
        """Close the client's end; the server hears of it behind everything that was sent before."""
        connection.alive_for_client = False
        connection.up.send(lambda: self.server.end(connection, "closed by the client", tell=False))

    def connection_closed(self, connection: Connection) -> None:
        """The end of a connection reaches this host."""
        connection.alive_for_client = False
        self._do(connection.lane, connection.life, lambda: self._heard_closed(connection))

    def _heard_closed(self, connection: Connection) -> None:
        if connection is self.control:
            self.core.note(f"{self.name}: hears that its control connection is gone")
            self._lost(connection)
        elif connection is self.watch:
            self._watch_lost(connection)

    def notification(self, connection: Connection, payload: str) -> None:
        def hear() -> None:
            if connection is self.control:
                self.protocol.notified(payload, self.now)

        self._do("control", connection.life, hear)
