"""The engine: three threads around one pure protocol.

    keeper thread    no I/O: ends trust on time, even while a call hangs in the network
    control thread   runs the control lane's asks on the control connection, and watches its socket when idle
    watch thread     runs the watch lane's asks on the watch connection

All of them call the protocol under one lock, for microseconds, and publish what it decided before they let go of it:
first the deadline, then the news. A lease's deadline is all that a reader of ``is_leader`` looks at. Once the
terms under a lease are lost the lease is dead for good; a new one takes its place, so no reader, however long it was
paused between two instructions, can take new trust for old.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from tenure import asks, clock, timing
from tenure.backends import Backend, LaneSession, backend_for
from tenure.candidacy import LONG_AGO, NEVER
from tenure.errors import ConfigError, NodeClosed, StoreUnavailable, TenureError
from tenure.events import Event
from tenure.meter import Meter
from tenure.protocol import Phase, Settings
from tenure.protocol import Protocol as Decisions
from tenure.session import Failed, Gone
from tenure.settings import NodeSettings, check_encoding, default_name
from tenure.store import Store
from tenure.watch import Watch

log = logging.getLogger("tenure.engine")

T = TypeVar("T")
CLOSE_TIMEOUT_S = 5.0
QUERY_TIMEOUT_S = 10.0


class Lease:
    """Until when the terms under it may be believed in. Only the engine writes it; anybody reads it, without a lock."""

    __slots__ = ("deadline",)

    def __init__(self) -> None:
        """Begin without trust."""
        self.deadline = LONG_AGO


class Listener(Protocol):
    """Who is told: called under the engine's lock, so it must be quick and must not call back."""

    def happened(self, event: Event, lease: Lease) -> None:
        """Take in an event; a term that begins now lives under ``lease``."""
        ...


class Engine:
    """Runs one node."""

    def __init__(self, settings: NodeSettings, listener: Listener) -> None:
        """Prepare everything that needs no connection."""
        self.settings = settings
        self.backend: Backend = backend_for(settings)
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        """Notified after every change; waiters look for themselves."""
        self.protocol = Decisions(
            Settings(
                name=settings.name,
                ttl=settings.ttl,
                renew_every=settings.renew_every,
                takeover=settings.takeover,
                sentinels=settings.mode != "lease",
                metadata=settings.metadata,
            ),
            _chance(),
        )
        self.meter = Meter()
        self._made_in = os.getpid()
        self._log = self._logger()
        self._listener = listener
        self._lease = Lease()
        self._generation = self.protocol.generation
        self._threads: list[threading.Thread] = []
        self._state = "new"
        self.opened: Future[None] = Future()
        """The first connection: that it stands, or why there is none."""
        self._outage = False
        """The database cannot be reached, and that has been said."""
        self._blind_since = NEVER
        self._told_blind = False
        self._stop = threading.Event()
        self._waiters: list[tuple[Callable[[], bool], Callable[[], object]]] = []
        self._queries: deque[tuple[Callable[[Store], Any], Future[Any]]] = deque()
        self._store: Store | None = None
        self._control: LaneSession | None = None
        self._encoding = "utf-8"
        self._watch: Watch | None = None
        self._watch_session: LaneSession | None = None
        self._busy_since = {"control": NEVER, "watch": NEVER}
        self._waker: socket.socket
        self._wakee: socket.socket

    # From the facade -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Connect and start the threads; raise what keeps it from connecting, or wait for the database."""
        self.launch()
        try:
            self.opened.result()
        except BaseException:
            self.close()
            raise

    def launch(self) -> None:
        """Start the threads, and wait for nothing."""
        self.check_own()
        with self.lock:
            if self._state != "new":
                raise NodeClosed(f"node {self.settings.name!r} was started before: make a new one")
            # Now and not before: forked children that each start a node which their parent made would else have one
            # name, and draw the same ids and the same sentinel keys.
            if self.settings.name == default_name(self._made_in):
                self._rename(default_name(os.getpid()))
            self.protocol.reseed(_chance())
            self._waker, self._wakee = socket.socketpair()
            self._waker.setblocking(False)
            self._wakee.setblocking(False)
            _running.add(self)
            self._state = "running"
            self.meter.started(clock.now())
            loops = (("control", self._control_loop), ("watch", self._watch_loop), ("keeper", self._keeper_loop))
            for purpose, loop in loops:
                name = f"tenure-{purpose}-{self.settings.name}"
                thread = threading.Thread(target=loop, name=name, daemon=True)
                self._threads.append(thread)
                thread.start()

    def keep_back(self, seconds: float) -> None:
        """Lose terms so many seconds before trust runs out, for stopping what runs under them; before the start."""
        self.protocol.stop_within = seconds

    def _rename(self, name: str) -> None:
        self.settings = replace(self.settings, name=name)
        self.protocol.settings = replace(self.protocol.settings, name=name)
        if self.backend.book is None:
            self.backend = backend_for(self.settings)
        self._log = self._logger()

    def _logger(self) -> logging.LoggerAdapter[logging.Logger]:
        fields = {"tenure_node": self.settings.name, "tenure_namespace": self.settings.namespace}
        return logging.LoggerAdapter(log, fields)

    def close(self) -> None:
        """Leave: end the terms, tell the others, close everything. Takes a wait slice at most where all is well."""
        with self.lock:
            if self._state != "running":
                return
            self._state = "closed"
            self.protocol.leave(clock.now())
            self._publish()
            self.backend.interrupt()
            self._stop.set()
            self.changed.notify_all()
        self.wake()
        for thread, timeout in zip(self._threads, (CLOSE_TIMEOUT_S, timing.SLICE_S + 1, 1), strict=True):
            thread.join(timeout)
        for session in (self._control, self._watch_session):
            if session:
                session.abort()
        for thread in self._threads:
            thread.join(CLOSE_TIMEOUT_S)
        self._waker.close()
        self._wakee.close()
        _running.discard(self)

    def command(self, action: Callable[[Decisions, float], T]) -> T:
        """Tell the protocol what the application wants."""
        self.check_running()
        with self.lock:
            result = action(self.protocol, clock.now())
            self._publish()
        self.wake()
        return result

    def stand(self, role: str) -> None:
        """Stand for ``role``, unless it does."""
        self.check_running()
        with self.lock:
            if role not in self.protocol.roles.standing:
                self.meter.stood(role, clock.now())
            self.command(lambda protocol, _: protocol.stand(role))

    def attempt(self, action: Callable[[], object]) -> bool:
        """Call ``action`` under the lock, unless that may take long, or this very thread is at work under it.

        For finalisers: garbage is collected in any thread, in the midst of anything.
        """
        if self.lock._is_owned() or not self.lock.acquire(timeout=0.1):  # type: ignore[attr-defined]  # noqa: SLF001
            return False
        try:
            action()
        finally:
            self.lock.release()
        return True

    def call_when(self, condition: Callable[[], bool], wake: Callable[[], object]) -> Callable[[], None]:
        """Call ``wake`` once, from some thread, as soon as the condition holds; return what takes that back.

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

    def query(self, question: Callable[[Store], T]) -> T:
        """Ask the database something, on the control connection, between two jobs."""
        self.check_running()
        answer: Future[T] = Future()
        self._queries.append((question, answer))
        self.wake()
        try:
            return answer.result(QUERY_TIMEOUT_S)
        except (FutureTimeout, TimeoutError):
            raise StoreUnavailable(f"the database did not answer within {QUERY_TIMEOUT_S:g} s") from None

    def sentinel_descriptors(self) -> list[int]:
        """Return duplicates of the descriptors on which the node's sentinel stands; none while there is no connection.

        For a guard (``tenure run``): as long as it holds one, the others see the sentinel stand, even if this process
        is gone, so it can end this process's work first. After a connection was opened anew they are others.
        """
        with self.lock, contextlib.suppress(Exception):  # a connection that is breaking just now has none
            return self._store.sentinel.duplicates() if self._store else []
        return []

    def check_running(self) -> None:
        """Raise NodeClosed unless the node runs, here in this process."""
        self.check_own()
        if self._state != "running":
            hint = "use it inside `with` or `async with`, or call start()" if self._state == "new" else "make a new one"
            raise NodeClosed(f"node {self.settings.name!r} is not running: {hint}")

    def check_role(self, role: str) -> None:
        """Raise ConfigError if the database cannot hold the name; before the first connection anything goes."""
        check_encoding("role", role, self._encoding)

    def check_own(self) -> None:
        """Raise NodeClosed in a forked child: no thread there would ever answer, or wake who waits."""
        if self.inherited:
            raise NodeClosed(
                f"node {self.settings.name!r} belongs to the parent process: make a node of its own in the child, "
                "after the fork"
            )

    @property
    def trusted_until(self) -> float:
        """Until when the terms of this node may be believed in, as everybody can see it."""
        return self._lease.deadline

    @property
    def running(self) -> bool:
        """Whether the node runs."""
        return self._state == "running"

    @property
    def new(self) -> bool:
        """Whether it was never started."""
        return self._state == "new"

    @property
    def inherited(self) -> bool:
        """Whether this is a forked child's copy of its parent's node."""
        return self._state == "inherited"

    def wake(self) -> None:
        """Let the control thread look for work."""
        with contextlib.suppress(OSError):
            self._waker.send(b"!")

    # Under the lock ------------------------------------------------------------------------------------------------

    def _publish(self) -> None:
        """Make the protocol's decisions visible: the deadline first, then the news."""
        believed_until = self._lease.deadline
        if self._generation != self.protocol.generation:
            self._generation = self.protocol.generation
            self._lease.deadline = LONG_AGO
            self._lease = Lease()
        self._lease.deadline = self.protocol.trusted_until
        news, self.protocol.news[:] = self.protocol.news[:], []
        for event in news:
            self.meter.happened(event, clock.now(), believed_until)
            self._listener.happened(event, self._lease)
        self.changed.notify_all()
        self._wake_waiters()

    def _wake_waiters(self) -> None:
        for waiter in [waiter for waiter in self._waiters if waiter[0]()]:
            self._waiters.remove(waiter)
            waiter[1]()

    def expire(self) -> None:
        """Announce the end of trust if it has ended; the lock is held."""
        if not self.inherited and self.protocol.expire(clock.now()):
            self._publish()

    # The keeper ----------------------------------------------------------------------------------------------------

    def _keeper_loop(self) -> None:
        """Announce the end of trust on time, and cut connections on which a call hangs for too long."""
        patience = {"control": timing.trust(self.settings.ttl), "watch": timing.SLICE_S + self.settings.ttl}
        with self.lock:
            while not self._stop.is_set():
                now = clock.now()
                self.expire()
                for lane, session in (("control", self._control), ("watch", self._watch_session)):
                    if now >= self._busy_since[lane] + patience[lane] and session:
                        self._log.info(
                            "node %s: no answer on the %s connection for too long; cutting it", self.settings.name, lane
                        )
                        self._busy_since[lane] = NEVER
                        session.abort()
                due = min(self.protocol.deadline(), *(self._busy_since[lane] + patience[lane] for lane in patience))
                self.changed.wait(None if due == NEVER else max(0.0, due - now))

    # The control lane ----------------------------------------------------------------------------------------------

    def _control_loop(self) -> None:
        try:
            while True:
                with self.lock:
                    ask = self.protocol.control(clock.now())
                    self._publish()
                    if self.protocol.phase is Phase.GONE or (self._stop.is_set() and self._state != "closed"):
                        break
                if not isinstance(ask, float):
                    self._survive(ask, self._run_control, self._forsake_control)
                    self._answer_query()
                elif not self._answer_query():
                    self._idle(ask)
        finally:
            self._drop_control()
            self._refuse_queries()
            if not self.opened.done():  # closed while it waited for the database
                self.opened.set_exception(NodeClosed(f"node {self.settings.name!r} was closed"))

    def _run_control(self, ask: asks.ControlAsk) -> None:
        asked = clock.now()
        try:
            answer = self._open() if isinstance(ask, asks.Open) else self._perform(ask)
        except Exception as error:  # noqa: BLE001 - a thread that died would be a node that nobody hears of again
            lost = isinstance(error, Gone) or not self._expected(ask, error)
            if not isinstance(ask, asks.Open):
                self._log.info("node %s: %s failed: %s", self.settings.name, type(ask).__name__, error)
            with self.lock:
                self.meter.failed(ask)
                self.protocol.fail(ask, clock.now(), lost=lost)
                self._publish()  # in doubt before anything is closed
            if lost:
                self._drop_control()
            if isinstance(ask, asks.Open):
                self._could_not_open(error)
            return
        with self.lock:
            if isinstance(ask, asks.Open):
                if self._outage:
                    self._log.warning("node %s: the database is back", self.settings.name)
                else:
                    self._log.info("node %s: connected", self.settings.name)
                self._outage = False
            now = clock.now()
            self.protocol.answer(ask, answer, now)
            self.meter.answered(ask, answer, self.protocol.roles, now - asked, now)
            self._publish()

    def _perform(self, ask: asks.ControlAsk) -> asks.ControlAnswer:
        store = self._store
        assert store is not None
        with self._timed("control"):
            return store.perform(ask)

    def _open(self) -> asks.Opened:
        self._drop_control()
        store, session, opened = self.backend.open_control(self._met)
        with self.lock:
            self._store, self._control = store, session
            self._encoding = session.encoding
            self._withdraw_misfits()
            self._introduce()
        if not self.opened.done():
            self.opened.set_result(None)
        return opened

    def _met(self, server_start: str) -> None:
        with self.lock:
            self.protocol.met(server_start, clock.now())
            self._publish()

    def _withdraw_misfits(self) -> None:
        """Stop standing for roles that this database cannot hold: their names would keep the others from standing."""
        for role in sorted(self.protocol.roles.standing):
            try:
                self.check_role(role)
            except ConfigError as error:
                self._log.warning("node %s: withdrawn: %s", self.settings.name, error)
                self.protocol.withdraw(role, clock.now())

    def _could_not_open(self, error: Exception) -> None:
        """Raise a first failure where the application asked; later ones are retried."""
        if not self.opened.done() and (self.settings.start == "raise" or isinstance(error, ConfigError)):
            public = error if isinstance(error, TenureError) else StoreUnavailable(str(error))
            self.opened.set_exception(public)
            self._stop.wait()
        elif not self._outage:
            self._outage = True
            self._log.warning("node %s: %s; trying again until it is back", self.settings.name, error)

    def _idle(self, until: float) -> None:
        """Wait for something to do: a due time, a command, a notification, or the end of the connection."""
        seconds = None if until == NEVER else max(0.0, until - clock.now())
        session = self._control
        try:
            if session is None:
                self._stop.wait(min(seconds if seconds is not None else 1.0, 1.0))
                notes = []
            else:
                notes = session.idle(self._wakee, seconds)
        except (Gone, Failed) as error:
            self._log.info("node %s: the control connection broke: %s", self.settings.name, error)
            with self.lock:
                self.protocol.lost_control(clock.now())
                self._publish()  # in doubt before anything is closed
            self._drop_control()
            return
        with contextlib.suppress(BlockingIOError):
            while self._wakee.recv(1024):
                pass
        with self.lock:
            for note in notes:
                kind, sender, role = (*note.split(" ", 2), "", "")[:3]
                if sender != self.protocol.member_id:
                    self.protocol.notified(kind, role, clock.now())

    def _drop_control(self) -> None:
        with self.lock:
            store, session = self._store, self._control
            self._store = self._control = None
        if session is not None:
            session.close()
        if store is not None:
            store.sentinel.abandon()

    def _answer_query(self) -> bool:
        """Answer one query of the application; False if there is none that can be answered now."""
        store = self._store
        if store is None or not self._queries:
            return False
        question, answer = self._queries.popleft()
        try:
            answer.set_result(question(store))
        except (Gone, Failed) as error:
            answer.set_exception(StoreUnavailable(str(error)))
            if isinstance(error, Gone):
                with self.lock:
                    self.protocol.lost_control(clock.now())
                    self._publish()
                self._drop_control()
        except Exception as error:  # noqa: BLE001 - it is the asker's
            answer.set_exception(error)
        return True

    def _refuse_queries(self) -> None:
        while self._queries:
            _, answer = self._queries.popleft()
            answer.set_exception(NodeClosed(f"node {self.settings.name!r} was closed"))

    # The watch lane ------------------------------------------------------------------------------------------------

    def _watch_loop(self) -> None:
        try:
            while not self._stop.is_set():
                with self.lock:
                    if self._stop.is_set():  # again, under the lock: else close() could notify before the wait begins
                        break
                    ask = self.protocol.watch(clock.now())
                    if isinstance(ask, float):
                        self.changed.wait(None if ask == NEVER else max(0.0, ask - clock.now()))
                        continue
                if isinstance(ask, asks.Look) and ask.wait_for is None and self._stop.wait(ask.seconds):
                    break
                self._survive(ask, self._run_watch, self._forsake_watch)
        finally:
            self._drop_watch()

    def _run_watch(self, ask: asks.WatchAsk) -> None:
        try:
            answer = self._open_watch() if isinstance(ask, asks.OpenWatch) else self._look(ask)
        except Exception as error:  # noqa: BLE001 - as above
            lost = not isinstance(error, Failed)
            if self._expected(ask, error) and not self._stop.is_set():
                self._tell_watch_failure(ask, error)
            with self.lock:
                self.protocol.fail_watch(ask, clock.now(), lost=lost)
                self._publish()
            if lost:
                self._drop_watch()
            return
        self._blind_since, self._told_blind = NEVER, False
        with self.lock:
            self.protocol.answer_watch(ask, answer, clock.now())
            self._publish()
        self.wake()

    def _tell_watch_failure(self, ask: asks.WatchAsk, error: Exception) -> None:
        """Say it quietly, for it is tried again and again; but say once that nobody is watched, if that lasts."""
        self._blind_since = min(self._blind_since, clock.now())
        if clock.now() >= self._blind_since + self.settings.ttl and not (self._told_blind or self._outage):
            self._told_blind = True
            self._log.warning(
                "node %s: cannot watch the others, nor succeed a silent one: %s", self.settings.name, error
            )
        else:
            self._log.debug("node %s: %s failed: %s", self.settings.name, type(ask).__name__, error)

    def _look(self, ask: asks.WatchAsk) -> asks.WatchAnswer:
        watch = self._watch
        assert watch is not None
        with self._timed("watch"):
            return watch.perform(ask)

    def _open_watch(self) -> asks.Watching:
        self._drop_watch()
        watch, session = self.backend.open_watch()
        with self.lock:
            self._watch, self._watch_session = watch, session
            self._introduce()
        return asks.Watching()

    def _drop_watch(self) -> None:
        with self.lock:
            session, self._watch, self._watch_session = self._watch_session, None, None
        if session is not None:
            session.close()

    def _survive(self, ask: T, run: Callable[[T], None], forsake: Callable[[T], None]) -> None:
        """Run a job; if its answer is nothing to work with (somebody wrote a row by hand), begin anew.

        A thread that died would be a node that nobody hears of again.
        """
        try:
            run(ask)
        except Exception as error:  # noqa: BLE001
            self._expected(ask, error)
            forsake(ask)

    def _forsake_control(self, _: asks.ControlAsk) -> None:
        with self.lock:
            self.protocol.lost_control(clock.now())
            self._publish()
        self._drop_control()

    def _forsake_watch(self, ask: asks.WatchAsk) -> None:
        with self.lock:
            self.protocol.fail_watch(ask, clock.now(), lost=True)
            self._publish()
        self._drop_watch()

    def _expected(self, ask: object, error: Exception) -> bool:
        """Whether the error is one that databases and networks cause; any other is ours, and told in full."""
        if isinstance(error, (Gone, Failed, TenureError, OSError)):
            return True
        self._log.error(
            "node %s: %s failed, by a fault of Tenure", self.settings.name, type(ask).__name__, exc_info=error
        )
        return False

    # Shared --------------------------------------------------------------------------------------------------------

    def _introduce(self) -> None:
        """Let each lane know the other's connection: the row names both, and blockers are looked for by pid."""
        if self._store and self._watch:
            self._store.watch_backend = (self._watch.session.pid, self._watch.session.started)
            self._watch.control_pid = self._store.session.pid

    @contextlib.contextmanager
    def _timed(self, lane: str) -> Any:
        with self.lock:
            self._busy_since[lane] = clock.now()
        try:
            yield
        finally:
            with self.lock:
                self._busy_since[lane] = NEVER

    def inherit(self) -> None:
        """Become a stranger, in a forked child: never leader, and of no use. Sessions and sentinels do their part."""
        self._state = "inherited"
        self._lease.deadline = LONG_AGO
        self.lock = threading.RLock()  # a thread that is not here may hold the old one
        self.changed = threading.Condition(self.lock)
        self._waker.close()
        self._wakee.close()


def _chance() -> int:
    return int.from_bytes(os.urandom(32), "big")


_running: weakref.WeakSet[Engine] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for engine in list(_running):
        engine.inherit()
    _running.clear()


if hasattr(os, "register_at_fork"):  # once: what is registered stays registered for the life of the process
    os.register_at_fork(after_in_child=_after_fork_in_child)
