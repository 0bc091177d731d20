"""The simulated server: connections, locks that live and die with them, waits, notifications; and how it stops.

Each way to lose a connection is its own story, because the proofs of the protocol depend on who hears of it first:

    the client closes          the server hears behind everything that was sent before
    terminate                  the client hears first, then the locks are freed (``late`` is the named exception)
    fast stop                  no new connections; then one by one, while others still work; then down
    immediate stop             all at once
    lost host (promotion)      all at once, and ``silent``: the clients hear nothing
    patience                   nothing came from the client for server_patience(ttl) on the server's clock
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tenure.core import messages, timing
from tenure.core.servers import Server
from tenure.store.session import Failed, Gone
from tests.verification.simulation.core import Clock, Core, Timer
from tests.verification.simulation.databases import ModelDatabase, SqlDatabase
from tests.verification.simulation.network import TO_CLIENT, TO_SERVER, Stream

if TYPE_CHECKING:
    from tests.verification.simulation.node import SimNode
    from tests.verification.simulation.oracles import Oracles

LOCK_TIMEOUT_S = 0.1


class Connection:
    """Both ends of one connection."""

    def __init__(self, server: SimServer, node: SimNode, lane: str) -> None:
        self.server = server
        self.node = node
        self.life = node.life
        self.lane = lane
        self.pid = server.next_pid()
        self.started = f"{server.core.now:.6f}"
        self.up = Stream(node.link, TO_SERVER)
        self.down = Stream(node.link, TO_CLIENT)
        self.alive = True
        """The server's end."""
        self.heard_at = server.core.now
        self.work: Any = None
        self.opened: Any = None
        self.alive_for_client = True

    def heard(self) -> None:
        """Something came from the client: the server's patience starts anew."""
        self.heard_at = self.server.core.now

    def watch_patience(self) -> None:
        """Keepalives: while the way is free they are answered; when it is cut, the server gives up in time."""
        if not self.alive:
            return
        seconds = timing.server_patience(self.node.settings.ttl) / self.server.clock.rate
        link = self.node.link
        every_s = self.node.settings.ttl / 4
        if not any(link.cut) and not self.node.host_dead:
            self.heard_at = max(self.heard_at, self.server.core.now - self.server.core.between(0, every_s))
        due = self.heard_at + seconds
        if self.server.core.now >= due:
            self.server.end(self, "patience")
        else:
            self.server.core.at(min(due, self.server.core.now + every_s), self.watch_patience)


class Waiter:
    """A look that waits for a sentinel, or a patient acquire that waits for a row."""

    def __init__(self, connection: Connection, go: Callable[[], None], *, key: int | None, role: str | None) -> None:
        self.connection = connection
        self.key = key
        self.role = role
        self.go = go
        self.timer: Timer | None = None


class Transaction:
    """A fenced transaction of an application: it holds the role's row until it ends."""

    def __init__(self, role: str, token: int, began: float) -> None:
        self.role = role
        self.token = token
        self.began = began
        self.open = True


class SimServer:
    """The one database server (or what a promotion has made of it)."""

    slice_s = timing.SLICE_S

    def __init__(
        self,
        core: Core,
        oracles: Oracles,
        clock: Clock,
        *,
        sql: bool,
        max_ttl: float | None,
        loses_nothing: bool = False,
    ) -> None:
        self.core = core
        self.oracles = oracles
        self.clock = clock
        self.sql = sql
        self.max_ttl = max_ttl
        self.loses_nothing = loses_nothing
        """Whether promotions lose nothing that was acknowledged, and an operator has said so."""
        self.replica_is_away = False
        """Whether commits are acknowledged with a warning, because their wait for the replica was cancelled."""
        self.up = True
        self.accepting = True
        self.full = False
        """No connection slots left."""
        self.failing = 0.0
        """How likely a transaction fails and is rolled back."""
        self.clock_step = 0.0
        self.timeline = 1
        self.place = "place-1"
        self.starts = 0
        self.connections: list[Connection] = []
        self.locks: dict[int, Connection] = {}
        self.waiters: list[Waiter] = []
        self.transactions: list[Transaction] = []
        self.split_looks = True
        self.looks_last_s = (0.0, 0.002)
        """How long it takes, after the rows were read, until the sentinels are."""
        self.knocks_early = 0.9
        """How likely a look knocks when the awaited sentinel falls: MariaDB's looks do not, and a knock may fail."""
        self.hides_identity = False
        """A hosted server that does not say which line of data it continues: every start counts as a new one."""
        self._pid = 0
        self._new_start()
        self.database: Any = self._make(None)

    def _make(self, image: Any) -> Any:
        return (SqlDatabase if self.sql else ModelDatabase)(self, image)

    def _new_start(self) -> None:
        self.starts += 1
        start = f"start-{self.starts}"
        if self.hides_identity:
            self.identity = Server(start, f"{start}:1", 1, self.place, promoted=True)
        else:
            incarnation, promoted = f"system:{self.timeline}", self.timeline > 1
            self.identity = Server(start, incarnation, self.timeline, self.place, promoted)

    def next_pid(self) -> int:
        self._pid += 1
        return self._pid

    def timestamp(self) -> str:
        """For people to read; it may jump, and nothing may depend on it."""
        return f"{1e6 + self.core.now + self.clock_step:018.6f}"

    def maybe_fail(self) -> None:
        """A transaction fails and is rolled back; or its connection goes, between two transactions of one request."""
        if self.failing and self.core.chosen(self.failing):
            raise (Gone if self.core.chosen(0.1) else Failed)("the simulator's whim")

    # Connections ---------------------------------------------------------------------------------------------------

    @property
    def open_for_business(self) -> bool:
        return self.up and self.accepting and not self.full

    def knock(self) -> str | None:
        return self.identity.start if self.open_for_business else None

    def accept(self, node: SimNode, lane: str) -> Connection:
        connection = Connection(self, node, lane)
        work = self.database.control if lane == "control" else self.database.watch
        connection.work = work(connection)
        self.connections.append(connection)
        connection.watch_patience()
        return connection

    def end(self, connection: Connection, reason: str, *, tell: bool = True) -> None:
        """The server's end goes, and with it every lock; the client hears as soon as the way is free."""
        if not connection.alive:
            return
        self.core.note(f"server: {connection.lane} connection {connection.pid} of {connection.node.name}: {reason}")
        connection.alive = False
        self.connections.remove(connection)
        if tell:
            connection.down.send(lambda: connection.node.connection_closed(connection))
        self.waiters = [waiter for waiter in self.waiters if waiter.connection is not connection]
        for key in [key for key, holder in self.locks.items() if holder is connection]:
            self._free(key)

    def terminate(self, connection: Connection, *, late: float = 0.0) -> None:
        """pg_terminate_backend: the client hears, and then the lock is free; or the other way round if ``late``."""
        if not connection.alive:
            return
        node = connection.node
        if late:
            self._unheard(connection)
            connection.down.stalled_until = self.core.now + late
            self.end(connection, "cut, heard late")
        elif node.paused or any(node.link.cut) or connection.down.stalled_until > self.core.now:
            self._unheard(connection)
            self.end(connection, "cut, heard late")
        else:
            node.connection_closed(connection)
            self.end(connection, "cut", tell=False)

    def _unheard(self, connection: Connection) -> None:
        if connection is connection.node.control:
            self.oracles.cut_unheard(connection.node)

    # Requests ------------------------------------------------------------------------------------------------------

    def arrive(self, connection: Connection, request: Any, reply: Callable[[Any], None]) -> None:
        """A request has arrived on a connection: execute it now, or when its wait is over."""
        if not connection.alive:
            connection.down.send(lambda: connection.node.connection_closed(connection))
            return
        connection.heard()

        def answer(execute: Callable[[], Any]) -> None:
            if not connection.alive:
                return
            result: Any = None
            try:
                result = execute()
            except Failed as error:
                result = error
            except Gone:
                self.terminate(connection)
            if connection.alive:
                connection.down.send(lambda: reply(result))

        if isinstance(request, messages.Look):
            self._look(connection, request, answer)
        elif connection.lane == "watch":
            answer(lambda: self.database.perform_watch(connection.work, request))
        elif isinstance(request, messages.Acquire) and request.patient and request.roles[0] in self.locked_roles():
            self._wait(
                connection,
                lambda: answer(lambda: self._control(connection, request)),
                LOCK_TIMEOUT_S,
                role=request.roles[0],
            )
        else:
            answer(lambda: self._control(connection, request))

    def _control(self, connection: Connection, request: Any) -> Any:
        if not self.sql:
            self.maybe_fail()
        result = connection.work.perform(request)
        self.oracles.executed(connection.node, request, result)
        return result

    def _look(self, connection: Connection, request: messages.Look, answer: Callable[..., None]) -> None:
        def begin() -> None:
            # The fresh connection is accepted as early as it can be: before the rows and the sentinels are read.
            fallen = request.wait_for is not None and request.wait_for not in self.locks
            knocked = fallen and self.open_for_business and self.core.chosen(self.knocks_early)
            read = self.database.begin_look(connection.work, request)
            pause = self.core.between(*self.looks_last_s) if self.split_looks else 0.0
            finish = lambda: answer(lambda: look(read, knocked=knocked))  # noqa: E731
            self.core.after(pause, finish)

        def look(read: Any, *, knocked: bool) -> messages.Looked:
            looked = self.database.finish_look(connection.work, request, read)
            return looked._replace(knocked=knocked)

        if request.wait_for is not None and request.wait_for in self.locks:
            self._wait(connection, begin, request.seconds, key=request.wait_for)
        else:
            begin()

    def _wait(
        self,
        connection: Connection,
        go: Callable[[], None],
        seconds: float,
        *,
        key: int | None = None,
        role: str | None = None,
    ) -> None:
        waiter = Waiter(connection, go, key=key, role=role)
        self.waiters.append(waiter)
        waiter.timer = self.core.after(seconds / self.clock.rate, lambda: self._wake(waiter))

    def _wake(self, waiter: Waiter) -> None:
        if waiter in self.waiters:
            self.waiters.remove(waiter)
            waiter.go()

    # Locks and notifications ---------------------------------------------------------------------------------------

    def lock(self, key: int, connection: Connection) -> bool:
        return self.locks.setdefault(key, connection) is connection

    def unlock(self, key: int, connection: Connection) -> None:
        if self.locks.get(key) is connection:
            self._free(key)

    def _free(self, key: int) -> None:
        del self.locks[key]
        for waiter in [waiter for waiter in self.waiters if waiter.key == key]:
            self.core.after(self.core.between(0, 0.0005), lambda waiter=waiter: self._wake(waiter))

    def tell(self, payload: str) -> None:
        for connection in list(self.connections):
            if connection.lane == "control" and connection.node.listens:
                connection.down.send(lambda connection=connection: connection.node.notification(connection, payload))

    def evict(self, member_ids: tuple[str, ...]) -> None:
        """End the connections that the ended members' rows name."""
        self.terminate_named(set(self.database.backends(member_ids)))

    def terminate_named(self, named: set[tuple[int, str]]) -> None:
        for connection in list(self.connections):
            if (connection.pid, connection.started) in named:
                self.terminate(connection)

    # Fenced transactions -------------------------------------------------------------------------------------------

    def locked_roles(self) -> set[str]:
        return {transaction.role for transaction in self.transactions}

    def begin(self, role: str, token: int, member_id: str, bound_s: float, lasts_s: float) -> Transaction | None:
        """Begin a fenced transaction; it commits after a while unless its bound or the server ends it first."""
        if not self.open_for_business or not self.database.fenced(role, token, member_id):
            return None
        transaction = Transaction(role, token, self.core.now)
        self.transactions.append(transaction)
        if lasts_s < bound_s:
            self.core.after(lasts_s, lambda: self._commit(transaction))
        else:
            self.core.after(bound_s, lambda: self._close(transaction))
        return transaction

    def _commit(self, transaction: Transaction) -> None:
        if transaction.open:
            self.oracles.committed(transaction.role, transaction.token)
            self._close(transaction)

    def _close(self, transaction: Transaction) -> None:
        if transaction.open:
            transaction.open = False
            self.transactions.remove(transaction)
            for waiter in [waiter for waiter in self.waiters if waiter.role == transaction.role]:
                if transaction.role not in self.locked_roles():
                    self._wake(waiter)

    def unblock(self, bound_s: float) -> None:
        for transaction in list(self.transactions):
            if self.core.now - transaction.began > bound_s:
                self._close(transaction)

    # How it stops --------------------------------------------------------------------------------------------------

    def fast_stop(self, lasts_s: float, down_s: float, last: tuple[SimNode, ...] = ()) -> None:
        """Refuse new connections, end the old ones one by one (those of ``last`` at the end), come back."""
        if not self.up or not self.accepting:
            return
        self.core.note("server: fast stop")
        self.accepting = False
        for transaction in list(self.transactions):
            self._close(transaction)
        for connection in list(self.connections):
            share = 1.0 if connection.node in last else self.core.between(0, 0.6 if last else 1.0)
            self.core.after(share * lasts_s, lambda connection=connection: self.end(connection, "fast stop"))
        self.core.after(lasts_s + 0.001, lambda: self._down(down_s))

    def immediate_stop(self, down_s: float) -> None:
        if not self.up or not self.accepting:
            return
        self.core.note("server: immediate stop")
        self._down(down_s)

    def _down(self, down_s: float, *, tell: bool = True) -> None:
        self.accepting = self.up = False
        for transaction in list(self.transactions):
            self._close(transaction)
        for connection in list(self.connections):
            connection.up.dead = True
            if not tell:
                connection.down.dead = True
            self.end(connection, "server down", tell=tell)
        self.core.after(down_s, self._start)

    def _start(self) -> None:
        self._new_start()
        self.up = self.accepting = True
        self.core.note(f"server: up as {self.identity.start} {self.identity.incarnation}")

    def promotion(self, lag_s: float, down_s: float, *, silent: bool) -> None:
        """Lose the host; a replica that lacks the last ``lag_s`` takes over. ``silent``: the nodes do not notice."""
        if self.loses_nothing and self.replica_is_away:
            return
        image, self.replica_is_away = self.database.snapshot(), True
        self.core.note(f"replica: has everything up to here, {lag_s:.3f} s before the host is lost")
        self.core.after(lag_s, lambda: self._promote(image, down_s, silent=silent))

    def restore(self, image: Any) -> None:
        """An operator drops the tables and restores them from a dump, while connections are open."""
        self.core.note("server: the tables are restored from a dump")
        for transaction in list(self.transactions):
            self._close(transaction)
        self.place += "+"
        self.identity = self.identity._replace(place=self.place)
        self.database.replace(image)

    def _promote(self, image: Any, down_s: float, *, silent: bool) -> None:
        self.replica_is_away = False
        if not self.up or not self.accepting:
            return
        self.core.note("server: host lost, replica promoted" + (", nobody hears of it" if silent else ""))
        self.timeline += 1
        self._down(down_s, tell=not silent)
        self.database.close()
        self.database = self._make(image)
        self.oracles.promoted(self.core.now)
