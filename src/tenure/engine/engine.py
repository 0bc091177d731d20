"""The engine of one node: it starts and stops threads, passes commands to the protocol, and publishes its decisions.

The package's docstring describes the threads, and the order in which decisions are published.
"""

from __future__ import annotations

import contextlib
import enum
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace
from functools import partial
from typing import TypeVar

from tenure.base import clock, fork
from tenure.base.safe_log import SafeLog
from tenure.core import timing
from tenure.core.options import ProtocolOptions
from tenure.core.protocol import NodeProtocol
from tenure.databases.backend import Backend, backend_for
from tenure.engine.candidacy import Candidacy, Lease
from tenure.engine.control_lane import ControlLane
from tenure.engine.database_clock import DatabaseClock
from tenure.engine.recorder import StatsRecorder
from tenure.engine.watch_lane import WatchLane
from tenure.errors import ConfigError, NodeClosed, StoreUnavailable, TenureError
from tenure.events import Event
from tenure.settings import NodeSettings, check_lock_id, default_name
from tenure.store.control import ControlStore
from tenure.store.session import Failed, Gone

T = TypeVar("T")
CLOSE_TIMEOUT_S = 5.0
QUERY_TIMEOUT_S = 10.0


class State(enum.Enum):
    """Where an engine is in its life."""

    NEW = enum.auto()
    RUNNING = enum.auto()
    CLOSED = enum.auto()
    INHERITED = enum.auto()
    """It belongs to the parent process: this one was forked while it ran."""


class Engine:
    """Runs one node."""

    def __init__(
        self,
        settings: NodeSettings,
        listener: Callable[[Event], object],
        make_backend: Callable[[NodeSettings], Backend] = backend_for,
    ) -> None:
        """Prepare everything that needs no connection.

        ``listener`` is called with every event, under the lock, so it must be quick and must not call back.
        """
        self.settings = settings
        self._make_backend = make_backend
        self.backend: Backend = make_backend(settings)
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        """Notified after every change; each waiter then checks its own condition."""
        self._sooner = threading.Condition(self.lock)
        """Notified when the keeper may have to act before ``_keeper_due``."""
        self._keeper_due = timing.NEVER
        self.protocol = NodeProtocol(
            ProtocolOptions(
                name=settings.name,
                ttl=settings.ttl,
                renew_every=settings.renew_every,
                takeover=settings.takeover,
                sentinels=settings.mode != "lease",
                metadata=settings.metadata,
            ),
            _random_seed(),
        )
        self.recorder = StatsRecorder()
        self.database_clock = DatabaseClock()
        self.log = self._logger()
        self.lease = Lease()
        """The current lease; a lease whose terms were lost is replaced."""
        self.opened: Future[None] = Future()
        """Completed when the first connection is open, or with the error that prevented it."""
        self.stopping = threading.Event()
        self.control = ControlLane(self)
        self.watch = WatchLane(self)
        self._listener = listener
        self._candidacies: dict[str, Candidacy] = {}
        self._locks: dict[str, int] = {}
        self._waiters: list[tuple[Callable[[], bool], Callable[[], object]]] = []
        self._generation = self.protocol.generation
        self._made_in = os.getpid()
        self._threads: list[threading.Thread] = []
        self._state = State.NEW

    # Life --------------------------------------------------------------------------------------------------------

    def launch(self) -> None:
        """Start the threads, without waiting for a connection."""
        self.check_own()
        try:
            with self.lock:
                self._launch()
        except RuntimeError:
            # The system could not start one more thread. Those that run must not stay behind.
            self.close()
            raise

    def _launch(self) -> None:
        if self.launched:
            raise NodeClosed(f"node {self.settings.name!r} was already started once: make a new one")
        # Only now: forked children that start a node of their parent would otherwise share one name, and draw the same
        # ids and the same sentinel keys.
        if self.settings.name == default_name(self._made_in):
            self._rename(default_name(os.getpid()))
        self.protocol.reseed(_random_seed())
        self.control.open_waker()
        _running.add(self)
        self._state = State.RUNNING
        self.recorder.started(clock.now())
        for purpose, loop in (("control", self.control.loop), ("watch", self.watch.loop), ("keeper", self._keep)):
            thread = threading.Thread(target=loop, name=f"tenure-{purpose}-{self.settings.name}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _rename(self, name: str) -> None:
        self.settings = replace(self.settings, name=name)
        self.protocol.settings = self.protocol.settings._replace(name=name)
        if self.has_tokens:
            self.backend = self._make_backend(self.settings)
            for role, number in self._locks.items():
                self.backend.assign_lock(role, number)
        self.log = self._logger()

    def _logger(self) -> SafeLog:
        fields = {"tenure_node": self.settings.name, "tenure_namespace": self.settings.namespace}
        return SafeLog("tenure.engine", fields)

    def close(self) -> None:
        """Leave: end the terms, notify the other nodes, close everything. Takes at most one wait slice, if all is well.

        If the control connection is lost, the control thread tries for ``LEAVE_WITHIN_S`` (see ``protocol``) to open
        it again and to leave.
        """
        with self.lock:
            if not self.running:
                return
            self._state = State.CLOSED
            with self.deciding() as protocol:
                protocol.leave(clock.now())
            self.backend.interrupt()
            self.stopping.set()
            self.changed.notify_all()
            self._sooner.notify()
        self.control.wake()
        for thread, timeout in zip(self._threads, (CLOSE_TIMEOUT_S, timing.SLICE_S + 1, 1), strict=False):
            thread.join(timeout)
        for lane in (self.control, self.watch):
            if session := lane.session:
                session.abort()
        for thread in self._threads:
            thread.join(CLOSE_TIMEOUT_S)
        self.control.close_waker()
        _running.discard(self)
        for candidacy in self._candidacies.copy().values():
            candidacy.pass_on(None)

    @property
    def launched(self) -> bool:
        """Whether the node was started, even if it is closed by now."""
        return self._state is not State.NEW

    @property
    def running(self) -> bool:
        """Whether the node was started in this process, and not closed since."""
        return self._state is State.RUNNING

    @property
    def inherited(self) -> bool:
        """Whether the node runs in the parent of this process, which was forked."""
        return self._state is State.INHERITED

    def check_running(self) -> None:
        """Raise NodeClosed unless the node is running in this process."""
        self.check_own()
        if not self.running:
            hint = "make a new one" if self.launched else "use it inside `with` or `async with`, or call start()"
            raise NodeClosed(f"node {self.settings.name!r} is not running: {hint}")

    def check_own(self) -> None:
        """Raise NodeClosed in a forked child, where no thread would ever answer a call or end a wait."""
        if self.inherited:
            raise NodeClosed(
                f"node {self.settings.name!r} belongs to the parent process: create a new node in the child, "
                "after the fork"
            )

    def disown_after_fork(self) -> None:
        """Disable this engine in a forked child: it never leads, and every call raises NodeClosed.

        Sessions and sentinels have their own hooks.
        """
        self._state = State.INHERITED
        self.lease.deadline = timing.LONG_AGO
        # A thread of the parent may have held the old lock during the fork.
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self._sooner = threading.Condition(self.lock)
        self.control.close_waker()

    # What the node knows ---------------------------------------------------------------------------------------------

    @property
    def ttl(self) -> float:
        """The current membership's TTL; before the node has joined, the configured TTL."""
        return self.protocol.ttl

    @property
    def member_id(self) -> str | None:
        """The id of the current membership; None while there is none."""
        return self.protocol.member_id

    @property
    def has_tokens(self) -> bool:
        """Whether terms have fencing tokens, and records in tables; not in mode ``lock``."""
        return self.backend.has_tokens

    @property
    def election_decided(self) -> bool:
        """Whether the elections are decided for now: suspects were checked, and vacant roles tried for."""
        return self.protocol.election_decided

    @property
    def longest_stop(self) -> float:
        """The most seconds that ``reserve_stop_time`` can reserve: with more, one lost renewal would end the terms."""
        return self.protocol.most_kept_back

    def candidacy(self, role: str) -> Candidacy:
        """Return the candidacy for ``role``, the same one each time. This alone does not make the node a candidate."""
        return self._candidacies.setdefault(role, Candidacy(self, role))

    def sentinel_descriptors(self) -> list[int]:
        """Return duplicates of the descriptors that hold the node's sentinel, to be closed by the caller.

        A process that has one of them keeps the sentinel held, even after this process has died. ``tenure run`` gives
        them to its guard, so that no other node takes over before the guard has ended the command. Each new
        connection has other descriptors; without a connection there are none.
        """
        # A connection that is breaking just now has no descriptors.
        with self.lock, contextlib.suppress(Exception):
            return self.control.store.sentinel.duplicates() if self.control.store else []
        return []

    # What the application wants ----------------------------------------------------------------------------------

    def reserve_stop_time(self, seconds: float) -> None:
        """End terms ``seconds`` before trust runs out, so that services can stop in time. Call it before the start."""
        self.protocol.stop_within = seconds

    def assign_lock(self, role: str, lock_id: int | str | None) -> None:
        """Set the number of the advisory lock of ``role``; raise ConfigError where no session can hold it."""
        number = None if lock_id is None else check_lock_id(lock_id)
        with self.lock:
            roles = self.protocol.roles
            if number is not None and self.has_tokens and role in roles.standing.difference(roles.bound):
                raise ConfigError(
                    f"role {role!r}: this node already stands for it without lock_id={number}: give the lock_id where "
                    "the node first uses the role"
                )
            self.backend.assign_lock(role, number)
            if number is not None:
                roles.bound.add(role)
                self._locks[role] = number

    def command(self, action: Callable[[NodeProtocol, float], object]) -> None:
        """Pass a command of the application to the protocol. Only the engine's own modules call this."""
        self.check_running()
        with self.deciding() as protocol:
            action(protocol, clock.now())
        self.control.wake()

    def attempt(self, action: Callable[[], object]) -> bool:
        """Call ``action`` under the lock, unless this thread already holds it or cannot get it soon.

        Return whether it was called. This is for finalisers, which may run on any thread at any moment.
        """
        if self.lock._is_owned() or not self.lock.acquire(timeout=0.1):  # type: ignore[attr-defined]  # noqa: SLF001
            return False
        try:
            action()
        finally:
            self.lock.release()
        return True

    def query(self, question: Callable[[ControlStore], T]) -> T:
        """Ask the database something, on the control connection, between two requests."""
        if not self.has_tokens:
            raise ConfigError(
                "mode='lock' keeps no record of leaders and candidates: read pg_locks, or use mode='hybrid'"
            )
        self.check_running()
        answer: Future[T] = Future()
        self.control.queries.append((question, answer))
        self.control.wake()
        try:
            return answer.result(QUERY_TIMEOUT_S)
        except (FutureTimeout, TimeoutError):
            # The answer would delay the questions that come after it.
            answer.cancel()
            raise StoreUnavailable(f"the database did not answer within {QUERY_TIMEOUT_S:g} s") from None

    # Waiting and listening ---------------------------------------------------------------------------------------

    def wait_for(self, condition: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until the condition holds; False if ``timeout`` seconds pass first."""
        self.check_own()
        with self.changed:
            return self.changed.wait_for(condition, timeout)

    def call_when(self, condition: Callable[[], bool], wake: Callable[[], object]) -> Callable[[], None]:
        """Call ``wake`` once, from any thread, as soon as the condition holds; return a function that cancels it.

        Both are called under the lock, so they must be quick.
        """
        self.check_own()
        waiter = (condition, wake)
        with self.lock:
            self._waiters.append(waiter)
            self._wake_waiters()

        def forget() -> None:
            with self.lock, contextlib.suppress(ValueError):
                self._waiters.remove(waiter)

        return forget

    # For the threads, under the lock -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def deciding(self) -> Iterator[NodeProtocol]:
        """Lend the protocol to the block, under the lock, and publish what it decided."""
        with self.lock:
            yield self.protocol
            self._publish()

    def _publish(self) -> None:
        """Make the protocol's decisions visible: the deadline first, then each event."""
        trusted_before = self.lease.deadline
        if self._generation != self.protocol.generation:
            self._generation = self.protocol.generation
            self.lease.deadline = timing.LONG_AGO
            self.lease = Lease()
        self.lease.deadline = self.protocol.trusted_until
        news, self.protocol.news[:] = self.protocol.news[:], []
        if not self.has_tokens:
            # Without tokens, the number of a term means nothing to another node.
            news = [replace(event, token=0) for event in news]
        for event in news:
            candidacy = self.candidacy(event.role)
            candidacy.happened(event)
            self.call_safely(partial(self.recorder.happened, event, clock.now(), trusted_before))
            self.call_safely(partial(self._listener, event))
            candidacy.pass_on(event)
        self.changed.notify_all()
        # Not for a later deadline, such as every renewal sets: the keeper wakes at the old one, and waits again. A call
        # that begins now may hang for longer than the terms are trusted, so it is soon enough for that as well.
        if not self._keeper_due <= self.protocol.deadline() < timing.NEVER:
            self._sooner.notify()
        self._wake_waiters()

    def _wake_waiters(self) -> None:
        for waiter in [waiter for waiter in self._waiters if waiter[0]()]:
            self._waiters.remove(waiter)
            self.call_safely(waiter[1])

    def call_safely(self, action: Callable[[], object]) -> None:
        """Call an action that hears of an event; log its error, which must not keep the event from the others.

        Nor may it end the engine's thread. Python raises an error if the system cannot start one more thread, and
        handlers and filters of the application's logs may raise any error.
        """
        try:
            action()
        except Exception:
            self.log.exception("%s: an event could not be passed on", self.settings.name)

    def announce_expiry(self) -> None:
        """Announce the end of trust if its deadline has passed and the keeper has not done so yet."""
        with self.lock:
            if not self.inherited and self.protocol.expire(clock.now()):
                self._publish()

    def _keep(self) -> None:
        """Announce the end of trust on time, even while a call hangs in the network; cut a connection that hangs.

        The keeper thread runs this until the node is closed. It does no I/O.
        """
        with self.lock:
            while not self.stopping.is_set():
                now = clock.now()
                self.announce_expiry()
                self._keeper_due = due = min(
                    self.protocol.deadline(),
                    self.control.cut_if_hung(now, timing.trust(self.ttl)),
                    self.watch.cut_if_hung(now, timing.SLICE_S + self.ttl),
                )
                self._sooner.wait(None if due == timing.NEVER else max(0.0, due - now))

    def share_backend_pids(self) -> None:
        """Give each lane the other's pid: the member's row names both connections, and blockers are found by pid."""
        control, watch = self.control.store, self.watch.store
        if control and watch:
            control.watch_backend = (watch.session.pid, watch.session.started)
            watch.control_pid = control.session.pid

    def is_expected(self, request: object, error: Exception) -> bool:
        """Whether databases and networks cause such errors. Any other error is a bug; log it with its traceback."""
        if isinstance(error, (Gone, Failed, TenureError, OSError)):
            return True
        self.log.error(
            "%s: %s failed because of a bug in Tenure", self.settings.name, type(request).__name__, exc_info=error
        )
        return False


def _random_seed() -> int:
    return int.from_bytes(os.urandom(32), "big")


_running: weakref.WeakSet[Engine] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for engine in list(_running):
        engine.disown_after_fork()
    _running.clear()


fork.register(fork.Place.ENGINE, in_child=_after_fork_in_child)
