"""The crew of a role: its services, started when this node is elected and stopped before anybody else may be.

    stand by ──elected──> start, in order ──> look after them ──lost──> stop, in reverse order ──> stand by

**Who stops them, and by when.** A term that is lost because trust runs out is lost early, by the seconds that the crew
has to stop (``stop_within``): when they are over, the lease is still the node's. A term that is given up (resigned, or
the node is closed) keeps its role from the others until the crew has stopped, for ``drain_within`` at most; and if
meanwhile trust runs out, for ``stop_within`` from then.

**What will not stop.** A coroutine can swallow its cancellation, a thread can hang, an event loop can be blocked. The
lease waits for nobody, so another node leads then while the service still runs here. ``on_stuck="log"`` says so and
goes on: the fence refuses the service's writes, and the node does not stand for the role again before the service has
ended. ``on_stuck="exit"`` ends the process, from a thread that no event loop can block.

**What dies.** ``on_failure="restart"`` starts it again under the same term, after a pause that grows; ``"resign"``
hands over, and stands again after that pause. What cannot be started again, because something of it still runs, always
resigns: a node does not lead a role that it cannot serve.
"""

from __future__ import annotations

import abc
import contextlib
import contextvars
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import anyio

from tenure.async_election import AsyncElection
from tenure.async_term import AsyncTerm
from tenure.candidacy import LONG_AGO, NEVER
from tenure.clock import now
from tenure.dispatch import Dispatcher
from tenure.election import Election
from tenure.engine import Engine, Lease
from tenure.errors import ConfigError, NodeClosed
from tenure.events import Deposed, Event, LeaderChanged
from tenure.jobs import Job
from tenure.loops import Loop, done
from tenure.services import Arguments, Post, Service, ServiceInfo
from tenure.term import Term

log = logging.getLogger("tenure.services")

EXIT_CODE = 70
"""With which a process ends whose service would not stop: EX_SOFTWARE."""
WATCHDOG_S = 0.05
GRACE_S = 0.2
"""What services get where their time was over before they could be told: the process was paused."""
INSIDE: contextvars.ContextVar[object] = contextvars.ContextVar("tenure_services", default=None)
"""The crews by which the present code was called, if it is a service."""
LAST_WORDS_S = 0.2
"""How long a process that ends itself tries to say why."""


class Deadline:
    """By when a crew must have stopped; read by its event loop, and by a watchdog that no loop can block."""

    def __init__(self, lease: Lease | None, lost_at: float | None, *, stop_within: float, drain_within: float) -> None:
        """Begin: the term was lost at that time, or (None) given up now, under a lease that still counts."""
        self._lease = lease
        self._stop_within = stop_within
        self._lapsed = lost_at is not None
        self._at = now() + drain_within if lost_at is None else max(lost_at + stop_within, now() + GRACE_S)

    def left(self) -> float:
        """Return how many seconds are left: a crew that may take its time may not, once trust has run out."""
        if not self._lapsed and self._lease is not None and now() >= self._lease.deadline:
            self._lapsed = True
            self._at = min(self._at, now() + self._stop_within)
        return self._at - now()


class Crew(abc.ABC):
    """Services that are started and stopped together."""

    role: str | None = None

    def __init__(self, engine: Engine) -> None:
        """Begin with nobody."""
        self.posts: list[Post] = []
        self._engine = engine
        self._loop: Loop | None = None
        self._bell: anyio.Event | None = None
        self._closing = False

    @property
    def drain_within(self) -> float:
        """Seconds for stopping all of them where there is time: the most that any of them was given."""
        return max(post.service.drain_within for post in self.posts)

    @abc.abstractmethod
    async def run(self) -> None:
        """Run the services whenever they should run, until the crew is closed."""

    def close(self) -> None:
        """Have ``run()`` stop everything and end; from any thread."""
        self._closing = True
        self.ring()

    def ring(self) -> None:
        """Have whoever waits look around; from any thread."""
        if self._loop is not None:
            self._loop.call(self._ring_here)

    def _ring_here(self) -> None:
        if self._bell is not None:
            self._bell.set()

    async def _rest(self, until: float = NEVER) -> None:
        """Wait until something rings. Whatever rang before this task last let go has been seen by it."""
        self._bell = anyio.Event()
        with anyio.move_on_after(None if until == NEVER else max(0.0, until - now())):
            await self._bell.wait()

    async def _look_after(self, arguments: Arguments, over: Callable[[], bool]) -> None:
        """Start the services, each when those before it run, and keep them running until it is over."""
        for post in self.posts:
            post.summon()
        while not over():
            for post in self.posts:
                reason = post.check()
                if reason is not None:
                    self._failed(post, reason)
            held_up = False
            look_at = NEVER
            for post in self.posts:
                if post.state in ("standby", "failed") and not held_up and now() >= post.due:
                    if post.idle:
                        post.start(arguments)
                    else:
                        self._unable(post)
                if post.state != "failed" or not held_up:  # else it waits for the one that holds it up
                    look_at = min(look_at, post.look_at)
                held_up = held_up or post.state != "running"
            await self._rest(look_at)

    @abc.abstractmethod
    def _failed(self, post: Post, reason: str) -> None:
        """Say it, and decide what becomes of the others."""

    @abc.abstractmethod
    def _unable(self, post: Post) -> None:
        """A service is to be started again, and something of it still runs."""

    async def _stop(self, deadline: Deadline) -> list[Post]:
        """Stop all, in reverse order, each with its share of the time; return those that are stuck."""
        for index, post in reversed(list(enumerate(self.posts))):
            until = now() + deadline.left() / (index + 1)
            await post.stop(lambda until=until: min(deadline.left(), until - now()))  # type: ignore[misc]
        for post in self.posts:
            if not post.idle:
                await post.stop(deadline.left)
        stuck = [post for post in self.posts if not post.idle]
        for post in stuck:
            self.log(logging.ERROR, f"service {post.service.name} did not stop in time and still runs", post)
        return stuck

    def log(self, level: int, text: str, post: Post | None = None, **fields: Any) -> None:
        """Say something about the crew, or one of its services."""
        extra = {
            "tenure_node": self._engine.settings.name,
            "tenure_namespace": self._engine.settings.namespace,
            "tenure_role": self.role,
            "tenure_service": post.service.name if post else None,
            "tenure_token": fields.get("token"),
            "tenure_reason": fields.get("reason"),
        }
        log.log(level, "%s: %s", self._engine.settings.name, text, extra=extra, exc_info=fields.get("exc_info"))

    @property
    def names(self) -> str:
        """What its services are called."""
        return ", ".join(post.service.name for post in self.posts)


class Everywhere(Crew):
    """The services that run on every replica, from the start of its node to its end."""

    async def run(self) -> None:
        """Run them until the crew is closed."""
        self._loop = Loop()
        stop = threading.Event()
        await self._look_after(Arguments((), (stop,)), lambda: self._closing)
        stop.set()
        within = self.drain_within
        await self._stop(Deadline(None, None, stop_within=within, drain_within=within))

    def _failed(self, post: Post, reason: str) -> None:
        pause = max(0.0, post.due - now())
        text = f"service {post.service.name} {reason}; starting it again in {pause:.1f} s"
        self.log(logging.ERROR, text, post, reason=reason, exc_info=post.cause)

    def _unable(self, post: Post) -> None:
        self._failed(post, post.fail("is to be started again, and something of it still runs"))


class RoleCrew(Crew):
    """The services of one role, which run here while this node leads it."""

    role: str

    def __init__(self, engine: Engine, role: str) -> None:
        """Begin with nobody."""
        super().__init__(engine)
        self.role = role
        self._election: AsyncElection | None = None
        self._twin: Election | None = None
        """The same candidacy for services in threads: theirs is another facade, with other waits."""
        self._dispatcher = Dispatcher(engine.settings.name)
        self._deadline: Deadline | None = None
        self._leader: str | None = None

    @property
    def stop_within(self) -> float:
        """Seconds for stopping all of them when the role is lost: the most that any of them was given."""
        given = [post.service.stop_within for post in self.posts if post.service.stop_within is not None]
        return max(given, default=self._engine.settings.ttl / 4)

    def close(self) -> None:
        """Give the role up, and have ``run()`` stop everything and end."""
        super().close()
        self._give_up()

    def happened(self, event: Event, lease: Lease, member_id: str) -> None:
        """Take in an event of the role, under the engine's lock."""
        if self._election is None or self._twin is None:
            return
        if isinstance(event, LeaderChanged):
            self._leader = event.name if event.member_id != member_id else None
        elif isinstance(event, Deposed):
            self._deadline = Deadline(
                lease, self._lost_at(event.reason), stop_within=self.stop_within, drain_within=self.drain_within
            )
            busy = [post for post in self.posts if not post.idle]
            if busy:
                threading.Thread(target=self._watchdog, args=(busy, self._deadline), daemon=True).start()
        self._election.happened(event, lease, member_id)
        self._twin.happened(event, lease, member_id)
        self.ring()

    def _lost_at(self, reason: str) -> float | None:
        """Return when the term was lost, which may be long ago where this process was paused; None if given up."""
        if reason == "resigned":
            return None
        trusted_until = self._engine.protocol.trusted_until
        return min(now(), trusted_until) if reason == "lapsed" and trusted_until > LONG_AGO else now()

    async def run(self) -> None:
        """Stand for the role, and run the services while this node leads it, until the crew is closed."""
        self._loop = Loop()
        self._election = AsyncElection(self._engine, self.role, self._loop)
        self._twin = Election(self._engine, self.role, self._dispatcher.call)
        self._engine.command(lambda protocol, _: protocol.observe(self.role))
        self._engine.stand(self.role)
        try:
            while not self._closing:
                terms = await self._stand_by()
                if terms is not None:
                    await self._lead(*terms)
        finally:
            self._give_up()
            self._dispatcher.close(timeout=0)

    async def _stand_by(self) -> tuple[AsyncTerm, Term] | None:
        """Wait for a term. Say that nothing runs here, once it is known who leads, or nobody has for a TTL."""
        assert self._election is not None
        while not self._election.standing and not self._closing:
            again_at = max(post.due for post in self.posts)
            free = [post.let_go() for post in self.posts]
            if all(free) and now() >= again_at:
                self._engine.stand(self.role)
            else:
                await self._rest(again_at if now() < again_at else NEVER)
        if self._terms() is None:
            for post in self.posts:
                post.warm()
        say_at = now() + self._engine.settings.ttl
        while (terms := self._terms()) is None and not self._closing:
            if say_at != NEVER and (self._leader is not None or now() >= say_at):
                reason = f"{self._leader} leads" if self._leader else "nobody leads"
                self.log(logging.INFO, f"Not leader, {self.names} not started: {reason}", reason=reason)
                say_at = NEVER
            await self._rest(say_at)
        return terms

    def _terms(self) -> tuple[AsyncTerm, Term] | None:
        """Return the present term, for either facade."""
        assert self._election is not None
        assert self._twin is not None
        with self._engine.lock:
            term, twin = self._election.term, self._twin.term
            return (term, twin) if term is not None and twin is not None else None

    async def _lead(self, term: AsyncTerm, twin: Term) -> None:
        """Run the services under a term; when it is over, stop them before the role may be anybody else's."""
        self._work(goes_on=True)
        try:
            if term.lost_reason is None:  # if it is lost from here on, the role waits for us
                self.log(logging.INFO, f"Acquired leadership, starting {self.names}", token=term.token)
                await self._look_after(Arguments((term,), (twin,)), lambda: term.lost_reason is not None)
                await self._stop_after(term)
        finally:
            self._deadline = None
            self._work(goes_on=False)

    async def _stop_after(self, term: AsyncTerm) -> None:
        deadline = self._deadline
        assert deadline is not None
        reason = term.lost_reason
        level = logging.INFO if reason == "resigned" else logging.WARNING
        self.log(level, f"Lost leadership ({reason}), stopping {self.names}", token=term.token, reason=reason)
        if await self._stop(deadline):
            self._give_up()
            if not self._closing:
                self.log(logging.WARNING, "not standing again before it has ended", token=term.token, reason=reason)
        else:
            self.log(logging.INFO, f"Stopped {self.names}", token=term.token, reason=reason)

    def _failed(self, post: Post, reason: str) -> None:
        pause = max(0.0, post.due - now())
        resigns = post.service.on_failure == "resign"
        what = "resigning" if resigns else f"starting it again in {pause:.1f} s"
        text = f"service {post.service.name} {reason}; {what}"
        self.log(logging.ERROR, text, post, reason=reason, exc_info=post.cause)
        if resigns:
            self._give_up()

    def _unable(self, post: Post) -> None:
        reason = "cannot be started again, since something of it still runs"
        self.log(logging.ERROR, f"service {post.service.name} {reason}; resigning", post, reason=reason)
        self._give_up()

    def _give_up(self) -> None:
        """Stop standing, and resign if this node leads."""
        if self._election is not None:
            with contextlib.suppress(NodeClosed):
                self._election.give_up(withdraw=True)

    def _work(self, *, goes_on: bool) -> None:
        if self._election is not None:
            with contextlib.suppress(NodeClosed):
                self._election.work(goes_on=goes_on)

    def _watchdog(self, posts: list[Post], deadline: Deadline) -> None:
        """Act where services outlast their time, whatever became of the event loop: end the process, or go on."""
        runs = [(post, post.run) for post in posts]
        pause = threading.Event()
        while stuck := [post for post, run in runs if run is not None and not run.over]:
            if deadline.left() <= 0:
                strict = [post for post in stuck if post.service.on_stuck == "exit"]
                if strict:
                    self._exit(strict[0])
                self._work(goes_on=False)  # nobody waits for it any longer
                return
            pause.wait(WATCHDOG_S)

    def _exit(self, post: Post) -> None:
        text = f"service {post.service.name} did not stop in time: ending this process (on_stuck='exit')"
        words = threading.Thread(target=self.log, args=(logging.CRITICAL, text, post), daemon=True)
        words.start()
        words.join(LAST_WORDS_S)
        os._exit(EXIT_CODE)


class Crews:
    """All services of one node."""

    def __init__(self, engine: Engine) -> None:
        """Begin with none."""
        self._engine = engine
        self._everywhere = Everywhere(engine)
        self.roles: dict[str, RoleCrew] = {}
        self._to_close: Future[None] = Future()
        self._closed: Future[None] = Future()
        self._begun = False

    def add(self, service: Service, role: str | None) -> None:
        """Add a service, to be started after those of its role before it."""
        crew: Crew = self._everywhere
        if role is not None:
            crew = self.roles.setdefault(role, RoleCrew(self._engine, role))
        if any(post.service.name == service.name for post in crew.posts):
            raise ConfigError(f"service {service.name!r} is there already: give another one a name of its own (name=…)")
        crew.posts.append(Post(service, crew.ring, crew.log))

    @property
    def stop_within(self) -> float:
        """The seconds of trust that the node keeps back for stopping services."""
        return max((crew.stop_within for crew in self.roles.values()), default=0.0)

    def infos(self) -> list[ServiceInfo]:
        """Return every service as it is now, in the order in which they are started."""
        return [
            ServiceInfo(post.service.name, crew.role, post.state, post.failures, post.error)
            for crew in self._present
            for post in crew.posts
        ]

    @property
    def _present(self) -> list[Crew]:
        return [*([self._everywhere] if self._everywhere.posts else []), *self.roles.values()]

    def happened(self, event: Event, lease: Lease, member_id: str) -> None:
        """Take in an event, under the engine's lock."""
        crew = self.roles.get(event.role)
        if crew is not None:
            crew.happened(event, lease, member_id)

    def begin(self) -> None:
        """From now on ``run()`` is awaited by somebody, or soon will be."""
        self._begun = True

    async def run(self) -> None:
        """Run everything until ``close()``; what runs everywhere starts first and stops last."""
        if self._to_close.done():
            self._closed.set_result(None)
            return
        INSIDE.set(self)
        at_work = [(crew, Job(self._careful(crew))) for crew in self._present]
        await done(self._to_close)
        for crew, _ in at_work:
            if crew.role is not None:
                crew.close()
        for crew, job in reversed(at_work):
            crew.close()
            await job.wait()
        self._closed.set_result(None)

    def close(self) -> None:
        """Stop everything and wait for that; not on the event loop that runs it.

        Raises:
            ConfigError: if a service calls it: it would wait for itself.
        """
        if not self._begun:
            return
        if INSIDE.get() is self:
            raise ConfigError(
                "a service closes the node that runs it, and would wait for itself: let it return, or term.resign()"
            )
        if not self._to_close.done():
            self._to_close.set_result(None)
        bound = sum(sorted((crew.drain_within for crew in self._present), reverse=True)[:2]) + 1.0
        try:
            self._closed.result(bound)
        except (FutureTimeout, TimeoutError):
            self._everywhere.log(logging.ERROR, f"the services did not stop within {bound:g} s")

    @staticmethod
    def _careful(crew: Crew) -> Callable[[], Any]:
        async def run() -> None:
            try:
                await crew.run()
            except NodeClosed:
                pass
            except Exception:  # noqa: BLE001 - whatever it was, it is said
                crew.log(
                    logging.ERROR, f"services {crew.names} failed by a fault of Tenure and run no more", exc_info=True
                )

        return run
