"""The services of one role: started when this node is elected, stopped before another node may be.

The package's docstring explains how long they may take to stop, and what happens if they take longer.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading

from tenure.aio.bridge import Loop
from tenure.aio.call import Call
from tenure.aio.election import AsyncElection
from tenure.aio.term import AsyncTerm
from tenure.base.clock import now
from tenure.core.backoff import Backoff
from tenure.core.timing import LONG_AGO, NEVER
from tenure.election import Election
from tenure.engine.callbacks import CallbackThread
from tenure.engine.candidacy import Candidacy, Holding
from tenure.errors import NodeClosed
from tenure.events import Deposed, EndReason, Event, LeaderChanged
from tenure.services.group import STILL_RUNS, Deadline, ServiceGroup
from tenure.services.runner import ServiceRunner
from tenure.services.service import Arguments
from tenure.term import Term

EXIT_CODE = 70
"""The exit status of a process that ends because a service did not stop: EX_SOFTWARE."""
WATCHDOG_S = 0.05
SHORT_TERM_S = 1.0
"""The node pauses after a term that was given up within this time."""
LAST_WORDS_S = 0.2
"""How long a process that ends itself tries to log why."""


class LeaderServices(ServiceGroup):
    """The services of one role, which run here while this node leads it."""

    role: str

    def __init__(self, candidacy: Candidacy) -> None:
        super().__init__(candidacy.engine)
        self.role = candidacy.role
        self._candidacy = candidacy
        self._deadline: Deadline | None = None
        self._stand_again = Backoff()
        """When to stand for the role again after a short term."""
        self._leader: str | None = None
        candidacy.of_services = True

    @property
    def stop_within(self) -> float:
        """Seconds for stopping all services when the role is lost: the largest ``stop_within`` of any of them."""
        given = [runner.service.stop_within for runner in self.runners if runner.service.stop_within is not None]
        return min(max(given, default=self._engine.settings.ttl / 4), self._engine.longest_stop)

    def close(self) -> None:
        """Give the role up, and make ``run()`` stop everything and end."""
        super().close()
        self._give_up()

    async def run(self) -> None:
        """Stand for the role, and run the services while this node leads it, until the group is closed."""
        self._loop = Loop()
        callback_thread = CallbackThread(self._engine.settings.name)
        async_election = AsyncElection(self._candidacy, self._loop)
        election = Election(self._candidacy, callback_thread.call)
        self._candidacy.listen(self._happened)
        self._candidacy.stand()
        try:
            while not self._closing:
                term = await self._stand_by()
                if term is not None:
                    views = Arguments((AsyncTerm(async_election, term),), (Term(election, term),))
                    await self._lead(term, views)
        finally:
            self._give_up()
            callback_thread.close(timeout=0)

    # What the engine's threads call

    def _happened(self, event: Event | None) -> None:
        """Receive an event of the role, under the engine's lock."""
        busy: list[tuple[ServiceRunner, Call]] = []
        if isinstance(event, LeaderChanged):
            self._leader = event.name if event.member_id != self._engine.member_id else None
        elif isinstance(event, Deposed) and self._candidacy.latest is not None:
            lease, lost_at = self._candidacy.latest.lease, self._lost_at(event.reason)
            self._deadline = Deadline(lease, lost_at, stop_within=self.stop_within, drain_within=self.drain_within)
            busy = [(runner, runner.run) for runner in self.runners if runner.run is not None and not runner.run.over]
        # First of all: the services must stop even if the system cannot start one more thread.
        self.wake()
        if busy:
            threading.Thread(target=self._watchdog, args=(busy, self._deadline), daemon=True).start()

    def _lost_at(self, reason: str) -> float | None:
        """Return when the term was lost: long ago if this process was paused, None if the term was given up."""
        if reason == EndReason.RESIGNED:
            return None
        trusted_until = self._engine.lease.deadline
        return min(now(), trusted_until) if reason == EndReason.LAPSED and trusted_until > LONG_AGO else now()

    def _watchdog(self, busy: list[tuple[ServiceRunner, Call]], deadline: Deadline) -> None:
        """Wait until the services have stopped, even if the event loop is blocked. Act if they miss the deadline."""
        pause = threading.Event()
        while stuck := [runner for runner, run in busy if not run.over]:
            if deadline.left() <= 0:
                strict = [runner for runner in stuck if runner.service.on_stuck == "exit"]
                if strict:
                    self._exit(strict[0])
                self._end_work()
                return
            pause.wait(WATCHDOG_S)

    def _exit(self, runner: ServiceRunner) -> None:
        text = f"service {runner.service.name} did not stop in time: ending this process (on_stuck='exit')"
        words = threading.Thread(target=self.log, args=(logging.CRITICAL, text, runner), daemon=True)
        words.start()
        words.join(LAST_WORDS_S)
        os._exit(EXIT_CODE)

    # What runs on the event loop

    async def _stand_by(self) -> Holding | None:
        """Wait for a term. Log once that the services are not started here: when a leader is known, or after a TTL."""
        while not self._candidacy.standing and not self._closing:
            again_at = max(self._stand_again.at, *(runner.due for runner in self.runners))
            free = [runner.reap() for runner in self.runners]
            if all(free) and now() >= again_at:
                self._candidacy.stand()
            else:
                await self._rest(again_at if now() < again_at else NEVER)
        if self._candidacy.holding is None:
            for runner in self.runners:
                runner.warm()
        say_at = now() + self._engine.settings.ttl
        while (term := self._candidacy.holding) is None and not self._closing:
            if say_at != NEVER and (self._leader is not None or now() >= say_at):
                reason = f"{self._leader} leads" if self._leader else "no node leads"
                self.log(logging.INFO, f"Not leader, {self.names} not started: {reason}", reason=reason)
                say_at = NEVER
            await self._rest(say_at)
        return term

    async def _lead(self, term: Holding, views: Arguments) -> None:
        """Run the services under a term. When it is over, stop them before another node may hold the role."""
        began = now()
        self._candidacy.begin_work()
        try:
            if term.reason is None:
                self.log(logging.INFO, f"Acquired leadership, starting {self.names}", token=term.token)
                await self._keep_running(views, lambda: term.reason is not None)
                lasted = now() - began
                await self._stop_after(term)
                # Withdraw before the role is vacant: this node would acquire it again at once.
                self._stand_aside(term, lasted)
        finally:
            self._deadline = None
            self._end_work()

    async def _stop_after(self, term: Holding) -> None:
        # The term ends a moment before _happened() sets the deadline. Both are done under the lock.
        with self._engine.lock:
            deadline = self._deadline
        assert deadline is not None
        reason = term.reason
        level, verb = (logging.INFO, "Gave up") if reason == EndReason.RESIGNED else (logging.WARNING, "Lost")
        self.log(level, f"{verb} leadership ({reason}), stopping {self.names}", token=term.token, reason=reason)
        if await self._stop(deadline):
            self._give_up()
            if not self._closing:
                self.log(logging.WARNING, "not standing again until its services end", token=term.token, reason=reason)
        else:
            self.log(logging.INFO, f"Stopped {self.names}", token=term.token, reason=reason)

    def _stand_aside(self, term: Holding, lasted: float) -> None:
        """Leave the role to other nodes for a while after a short term, unless this node no longer stands for it."""
        if term.reason != EndReason.RESIGNED or lasted >= SHORT_TERM_S:
            self._stand_again.worked()
        elif self._candidacy.standing and not self._closing:
            began = now()
            pause = f"standing again in {self._stand_again.failed(began) - began:.1f} s"
            text = f"role {self.role!r} was given up within a second of being acquired; {pause}"
            self.log(logging.WARNING, text, token=term.token, reason=term.reason)
            self._give_up()

    def _ended(self, runner: ServiceRunner, reason: str) -> None:
        if runner.remedy == "resign":
            self._log_end(runner, reason, "resigning")
            self._give_up()
        elif runner.remedy == "done":
            self._log_end(runner, reason, "it is done until the next term")
        else:
            super()._ended(runner, reason)

    def _cannot_restart(self, runner: ServiceRunner) -> None:
        self._log_end(runner, STILL_RUNS, "resigning")
        self._give_up()

    def _give_up(self) -> None:
        """Stop standing for the role, and resign if this node leads."""
        with contextlib.suppress(NodeClosed):
            self._candidacy.withdraw()

    def _end_work(self) -> None:
        """Leave the role to other nodes if it was given up."""
        with contextlib.suppress(NodeClosed):
            self._candidacy.end_work()
