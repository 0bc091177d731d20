"""The control lane: it runs membership, roles and renewals, and answers the application between two requests."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from tenure.base import clock
from tenure.core import messages, timing
from tenure.core.membership import Phase
from tenure.core.servers import Confirmed
from tenure.databases.backend import check_permitted
from tenure.engine.lane import Lane
from tenure.errors import ConfigError, NodeClosed, StoreUnavailable, TenureError
from tenure.settings import check_encoding
from tenure.store.control import ControlStore
from tenure.store.session import Failed, Gone, wait_readable

if TYPE_CHECKING:
    from tenure.engine.engine import Engine


class ControlLane(Lane):
    """The connection that holds the sentinel and makes every change, and the thread that works on it."""

    name = "control"
    harmless = (Failed, TenureError, OSError)
    store: ControlStore | None
    _waker: socket.socket
    _wakee: socket.socket

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine, engine.protocol.answer, engine.protocol.fail)
        self.outage = False
        """Whether it was logged that the database cannot be reached."""
        self.queries: deque[tuple[Callable[[ControlStore], Any], Future[Any]]] = deque()
        self._encoding = "utf-8"
        self._line = ""
        self._told_ttl = False
        self._unkept = False
        """Whether it was logged that commits do not wait for a replica although they should."""

    # From other threads

    def open_waker(self) -> None:
        """Prepare :meth:`wake`. Call this before the thread is started."""
        self._waker, self._wakee = socket.socketpair()
        self._waker.setblocking(False)
        self._wakee.setblocking(False)

    def wake(self) -> None:
        """Make the thread check for work."""
        with contextlib.suppress(OSError):
            self._waker.send(b"!")

    def close_waker(self) -> None:
        """Close what :meth:`open_waker` opened. Call this when the thread has ended."""
        self._waker.close()
        self._wakee.close()

    def check_role(self, role: str) -> None:
        """Raise ConfigError if the database cannot store the name; before the first connection, accept any name."""
        check_encoding("role", role, self._encoding)

    # The thread

    def loop(self) -> None:
        """Run requests and answer questions until the node has left."""
        engine = self._engine
        try:
            while True:
                with engine.deciding() as protocol:
                    request = protocol.control(clock.now())
                if protocol.phase is Phase.GONE:
                    break
                if not isinstance(request, float):
                    error = self.run(request)
                    if error is not None:
                        self._report_failure(request, error)
                    elif isinstance(request, (messages.Open, messages.Join)):
                        self._report(request)
                    self._answer_query()
                elif not self._answer_query():
                    self._idle(request)
        finally:
            self.drop()
            engine.backend.close()
            closed = NodeClosed(f"node {engine.settings.name!r} was closed")
            while self.queries:
                answer = self.queries.popleft()[1]
                if answer.set_running_or_notify_cancel():
                    answer.set_exception(closed)
            if not engine.opened.done():
                engine.opened.set_exception(closed)

    def _idle(self, until: float) -> None:
        """Wait for something to do: a due time, a command, a notification, or the end of the connection."""
        seconds = None if until == timing.NEVER else max(0.0, until - clock.now())
        session = self.session
        notes: list[str] = []
        try:
            if session is None:
                wait_readable([self._wakee], min(seconds if seconds is not None else 1.0, 1.0))
            else:
                notes = session.idle(self._wakee, seconds)
                with self.timed():
                    session.limit_notifications()
        except Exception as error:  # noqa: BLE001
            # Any other error comes from a handler of the application's logs, say. It must not end the thread.
            level = logging.INFO if isinstance(error, (Gone, Failed)) else logging.WARNING
            name = self._engine.settings.name
            self._engine.log.log(level, "%s: the control connection broke: %s", name, error)
            self._lose(None)
            return
        with contextlib.suppress(BlockingIOError):
            while self._wakee.recv(1024):
                pass
        with self._engine.lock:
            for note in notes:
                self._engine.protocol.notified(note, clock.now())

    def _answer_query(self) -> bool:
        """Answer one question of the application; False if none can be answered now."""
        store = self.store
        if store is None or not self.queries:
            return False
        question, answer = self.queries.popleft()
        if not answer.set_running_or_notify_cancel():
            return True
        try:
            with self.timed():
                found = question(store)
            answer.set_result(found)
        except (Gone, Failed) as error:
            answer.set_exception(StoreUnavailable(str(error)))
            if isinstance(error, Gone):
                self._lose(None)
        except Exception as error:  # noqa: BLE001 - the caller of query() gets it
            answer.set_exception(error)
        return True

    def _perform(self, request: Any) -> Any:
        reply = super()._perform(request)
        if isinstance(reply, messages.Standing) and reply.confirmed is not None:
            self._report_replication(reply.confirmed)
        if isinstance(reply, messages.Standing) and reply.clock_us is not None:
            self._engine.database_clock.heard(reply.clock_us)
            self._engine.database_clock.requests = reply.requests
        return reply

    # The connection

    def _open(self) -> messages.Opened:
        engine = self._engine
        store, session, opened = engine.backend.open_control(self._server_answered)
        try:
            check_permitted(engine.settings, opened)
        except ConfigError:
            session.close()
            raise
        with engine.lock:
            self._adopt(store, session)
            # The watch connection may still lead to the previous server, where it would read other tables.
            if self._line not in (opened.server.line, "") and engine.watch.session:
                engine.watch.session.abort()
            self._line = opened.server.line
            self._encoding = session.encoding
            self._withdraw_unencodable_roles()
        if not engine.opened.done():
            engine.opened.set_result(None)
        return opened

    def _server_answered(self, server_start: str) -> None:
        with self._engine.deciding() as protocol:
            protocol.server_answered(server_start, clock.now())

    def _withdraw_unencodable_roles(self) -> None:
        """Withdraw from roles whose names this database cannot store: one of them would make every candidacy fail."""
        protocol = self._engine.protocol
        for role in sorted(protocol.roles.standing):
            try:
                self.check_role(role)
            except ConfigError as error:
                self._engine.log.warning("%s: withdrew its candidacy: %s", self._engine.settings.name, error)
                protocol.withdraw(role, clock.now())

    def drop(self) -> None:
        """Close the connection, and give up the sentinel."""
        store = self.store
        super().drop()
        if store is not None:
            store.sentinel.abandon()

    def _lose(self, _: object) -> None:
        with self._engine.deciding() as protocol:
            protocol.lost_control(clock.now())
        self.drop()

    # What the log says

    def _report(self, request: messages.Open | messages.Join) -> None:
        """Log that the database was reached; and, once, that the node uses a shorter TTL than the configured one."""
        engine, name = self._engine, self._engine.settings.name
        if isinstance(request, messages.Open):
            if self.outage:
                engine.log.warning("%s: the database is back", name)
            else:
                engine.log.info("%s: connected", name)
            self.outage = False
        elif engine.ttl < engine.settings.ttl and not self._told_ttl:
            self._told_ttl = True
            engine.log.info(
                "%s: using ttl=%g instead of %g: the namespace's largest TTL was raised less than %g minutes ago, "
                "and nodes that join cannot use the raise yet",
                *(name, engine.ttl, engine.settings.ttl, timing.RIPENS_AFTER_S / 60),
            )

    def _report_replication(self, confirmed: Confirmed) -> None:
        """Log once per change whether what an operator said about promotions is true (R17)."""
        unkept = confirmed.loses_nothing and not confirmed.replicated
        if unkept == self._unkept:
            return
        self._unkept = unkept
        log, name = self._engine.log, self._engine.settings.name
        if unkept:
            log.warning(
                "%s: the namespace has promotion=loses-nothing, but synchronous_standby_names is empty: commits "
                "do not wait for a replica, and a promotion now could give two leaders; set it, or run "
                "`tenure init --promotion may-lose`",
                name,
            )
        elif confirmed.loses_nothing:
            log.info("%s: synchronous_standby_names is set: commits wait for a replica again", name)
        else:
            log.info("%s: the namespace no longer has promotion=loses-nothing", name)

    def _report_failure(self, request: messages.ControlRequest, error: Exception) -> None:
        """Log what failed, or let ``start()`` raise it.

        ``start()`` raises the error of the first connection if ``start="raise"``, and a ConfigError in any case.
        """
        engine, name = self._engine, self._engine.settings.name
        if not isinstance(request, messages.Open):
            engine.log.info("%s: %s failed: %s", name, type(request).__name__, error)
        elif not engine.opened.done() and (engine.settings.start == "raise" or isinstance(error, ConfigError)):
            engine.opened.set_exception(error if isinstance(error, TenureError) else StoreUnavailable(str(error)))
            engine.stopping.wait()
        elif not self.outage:
            self.outage = True
            engine.log.warning("%s: %s; trying again until it is back", name, error)
