"""PostgreSQL by psycopg: a session for the node, on a direct connection or through a pooler."""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import json
import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tenure.base import clock
from tenure.core.timing import LONG_AGO
from tenure.databases.connecting import load, shut_down_socket
from tenure.databases.postgres.pipeline import Pipeline, Reply
from tenure.databases.postgres.schema import PostgresSchema
from tenure.store.dialects import Dialect, durably, listed
from tenure.store.session import NAMED_ROLES, Failed, Gone, LaneSession, Result, Run, Step, wait_readable
from tenure.store.tables import ANOTHER_SERVER

if TYPE_CHECKING:
    import psycopg

log = logging.getLogger("tenure.postgres")

FLOOD_PER_S = 500
DEAF_S = 60.0
"""Any database user can send notifications: after FLOOD_PER_S in a second, a session does not listen for DEAF_S."""

# The commit need not wait for the disk or for a replica: after a crash, nodes check anyway.
_NOTIFY = "select pg_catalog.pg_notify(:channel, :payload), pg_catalog.set_config('synchronous_commit', 'off', true)"

_NOTIFY_SUCCESSORS = """
select pg_catalog.pg_notify(:channel, 'vacant ' || case
    when pg_catalog.count(*) over () > {most} then cast(:me as text)
    else cast(:me as text) || coalesce('>' || s.heir, '') || ' ' || s.role end),
    pg_catalog.set_config('synchronous_commit', 'off', true)
from ({successors}) as s (role, heir)
"""


class ServerProcess(NamedTuple):
    """The server's process behind a connection, and the server, as a new connection finds them."""

    pid: int
    started: str
    server_start: str
    in_recovery: bool


class PostgresSession(LaneSession):
    """One connection of the node."""

    pooled = False
    """Whether the connection leads through a pooler, so that the server's process behind it may change."""

    def __init__(self, connection: psycopg.Connection[Any], dialect: Dialect, backend: ServerProcess) -> None:
        """Use an open connection in autocommit mode."""
        self.connection = connection
        self.dialect = dialect
        self.schema = PostgresSchema(dialect)
        self._fatal = False
        self.was_cut = False
        """Whether the node cut the connection because the server did not answer."""
        self._unsent: list[Step] = []
        self._notes: list[str] = []
        self._channels: set[str] = set()
        self._counted_from, self._counted = LONG_AGO, 0
        self._deaf_until = LONG_AGO
        connection.add_notice_handler(self._noticed)
        self._pipeline = Pipeline(connection, self._hear, self._server_ends)
        self.pid, self.started = backend.pid, backend.started
        self.server_start = backend.server_start
        server_encoding = connection.info.parameter_status("server_encoding") or "UTF8"
        self.encoding = _codec(server_encoding)
        self._utf8 = server_encoding == "UTF8"

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Run]:
        """Run steps in one transaction. Steps that are given together are sent together, with BEGIN and COMMIT.

        psycopg's transaction() is not used: it waits for the server after BEGIN and before COMMIT, and a node that is
        cut off in between leaves its transaction open on the server.

        Notifications follow the commit in a separate transaction: any database user can fill the server's queue of
        notifications, and then a transaction that notifies cannot commit.
        """
        commit: Reply | None = None
        try:
            with self._translated():
                try:
                    with self._pipelined():
                        self._begin()
                        # An open transaction has locked nothing yet, in case this process is stopped right here.
                        self._pipeline.wake_server()
                        yield self._run
                        commit = self._pipeline.send("commit")
                        self._send_notifications()
                except Exception:
                    self._roll_back()
                    raise
        except Failed as error:
            if commit is None or commit.status != b"COMMIT":
                raise
            log.info("a notification was not sent, so the other nodes find out at their next check: %s", error)
        finally:
            self._unsent.clear()

    def _begin(self) -> None:
        self.unreplicated = False
        self._send_begin()

    def _send_begin(self) -> None:
        self._pipeline.send("begin")

    def _roll_back(self) -> None:
        """End the transaction, if one is open. psycopg would drop all prepared statements, too."""
        if self.connection.info.transaction_status != load().pq.TransactionStatus.IDLE:
            with contextlib.suppress(load().Error), self._pipelined():
                self._pipeline.send("rollback")

    def read(self, *steps: Step) -> Sequence[Result]:
        """Run some queries in order, in one round trip."""
        with self._translated(), self._pipelined():
            return self._run(*steps)

    def read_early(
        self, first: Sequence[Step], then: Callable[[Result], None], rest: Sequence[Step]
    ) -> Sequence[Result]:
        """As ``read``, but call ``then`` with the last result of ``first`` while the server runs the ``rest``."""
        with self._translated(), self._pipelined():
            early = self._run(*first)
            self._pipeline.ask_early()
            results = self._run(*rest)
            self._pipeline.receive_early(early[-1])
            then(early[-1])
            return results

    @contextlib.contextmanager
    def _pipelined(self) -> Iterator[None]:
        """Send without waiting for replies. If the block is interrupted, as by Ctrl-C, the connection is closed."""
        self._pipeline.enter()
        try:
            try:
                yield
            except Exception:
                with contextlib.suppress(load().Error):
                    self._pipeline.leave()
                raise
            self._pipeline.leave()
        except Exception:
            raise
        except BaseException:
            self.close()
            raise

    def _run(self, *steps: Step) -> list[Reply]:
        return [self._pipeline.send(self.dialect.text(step.text), step.parameters) for step in steps]

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """Turn the driver's errors into ``Gone`` and ``Failed``."""
        psycopg = load()
        try:
            yield
        except (psycopg.Error, OSError, ValueError) as error:
            if isinstance(error, ValueError) and not self.connection.closed:
                raise
            another_server = isinstance(error, psycopg.Error) and error.sqlstate == ANOTHER_SERVER
            if another_server or self._fatal or self.connection.closed or self.connection.broken:
                raise Gone(str(error)) from error
            raise Failed(str(error)) from error
        if self._fatal:
            raise Gone("the server ended the connection")

    def notify(self, namespace: str, payload: str, where: Step | None = None) -> None:
        self._unsent.append(self.notification(namespace, payload, where))

    def notification(self, namespace: str, payload: str, where: Step | None) -> Step:
        """Return the step that sends a notification, if ``where`` finds a row."""
        parameters = {"channel": channel(self.dialect, namespace, payload.partition(" ")[0]), "payload": payload}
        if where is None:
            return Step(_NOTIFY, parameters)
        return Step(f"{_NOTIFY} where exists ({where.text})", parameters | where.parameters)

    def notify_successors(self, namespace: str, me: str, roles: Step) -> None:
        self._unsent.append(self.notification_of_successors(namespace, me, roles))

    def notification_of_successors(self, namespace: str, me: str, roles: Step) -> Step:
        """Return the step that notifies the successors that ``roles`` finds."""
        text = _NOTIFY_SUCCESSORS.format(most=NAMED_ROLES, successors=roles.text)
        return Step(text, {"channel": channel(self.dialect, namespace, "vacant"), "me": me, **roles.parameters})

    def names(self, locked: Result) -> tuple[str, ...]:
        return tuple(json.loads(locked.rows[0][0]))

    def locked(self, locked: Result) -> str:
        """Return nothing: the server has kept the names, so nothing waits for them."""
        return listed(())

    def follow(self, *steps: Step) -> None:
        """Run steps right after the next transaction, if it commits, and before the notifications that follow."""
        self._unsent.extend(steps)

    def _send_notifications(self) -> None:
        """Send the notifications, in a transaction that the server skips if the one before it failed."""
        if self._unsent:
            self._send_begin()
            self._run(*self._unsent)
            self._pipeline.send("commit")

    def listen(self, namespace: str, kind: str) -> None:
        """Receive notifications of this kind. Each kind has a channel, so a node is not woken by kinds it does not use.

        Only in a database in UTF-8: elsewhere the server may be unable to convert a payload for the client, and it ends
        a connection to which it cannot send a notification.
        """
        name = channel(self.dialect, namespace, kind)
        if name not in self._channels and self._utf8:
            self._channels.add(name)
            if self._deaf_until == LONG_AGO:
                self._listen(name)

    def _listen(self, *names: str) -> None:
        """Listen to channels. If that fails, poll for a while instead: a server with a full queue may take too long."""
        try:
            self.read(*(Step(f'listen "{name}"', {}) for name in names))
        except Failed as error:
            self.be_deaf(f"cannot listen to notifications ({error})")

    def _hear(self, payload: str) -> None:
        """Count a notification, and keep it unless there are too many."""
        now = clock.now()
        if now >= self._counted_from + 1:
            self._counted_from, self._counted = now, 0
        self._counted += 1
        if self._counted <= FLOOD_PER_S:
            self._notes.append(payload)

    def limit_notifications(self) -> None:
        """Stop listening while there are too many notifications: reading them would leave no time for renewals."""
        if self._deaf_until != LONG_AGO and clock.now() >= self._deaf_until:
            self._deaf_until = LONG_AGO
            self._listen(*sorted(self._channels))
        elif self._deaf_until == LONG_AGO and self._counted > FLOOD_PER_S:
            self._counted = 0
            self.read(Step("unlisten *", {}))
            self.be_deaf(f"too many notifications, more than {FLOOD_PER_S} in a second")

    def be_deaf(self, why: str) -> None:
        """Do not listen for a while, and poll once a second instead."""
        self._deaf_until = clock.now() + DEAF_S
        whose = self.connection.info.parameter_status("application_name")
        log.warning("%s: %s; polling once a second instead, for %g s", whose, why, DEAF_S)

    def idle(self, waker: socket.socket, seconds: float | None) -> list[str]:
        """Wait for the waker, a notification or the end of the connection; return the notifications.

        The socket is watched all the time. A server that ends the connection reports that before it frees the sentinel,
        so this node knows before other nodes can act on it.
        """
        with self._translated():
            # Its message may have arrived together with the last answer.
            self._pipeline.hear()
            if not self._notes:
                wait_readable([self.connection.fileno(), waker], seconds)
            self.connection.pgconn.consume_input()
            self._pipeline.hear()
        notes, self._notes = self._notes, []
        return notes

    def _noticed(self, diagnostic: Any) -> None:
        """Notice that the server ends the connection between two calls, or that a commit did not wait for a replica."""
        # Only the name of the server's function is the same in every language.
        if diagnostic.source_function == "SyncRepWaitForLSN":
            self.unreplicated = True
        if diagnostic.severity_nonlocalized in ("FATAL", "PANIC"):
            self._server_ends()

    def _server_ends(self) -> None:
        """Cut calls under way: they would wait for the connection's end, and the sentinel is freed before that."""
        self._fatal = True
        self.abort()

    def fileno(self) -> int:
        """Return the descriptor of the connection's socket."""
        return self.connection.fileno()

    def abort(self) -> None:
        self.was_cut = not self._fatal
        shut_down_socket(self.connection)

    def close(self) -> None:
        with contextlib.suppress(Exception):
            # Another thread that waits for the server would not notice that the descriptor was closed.
            if self.connection.info.transaction_status == load().pq.TransactionStatus.ACTIVE:
                shut_down_socket(self.connection)
            self.connection.close()


class PooledSession(PostgresSession):
    """A connection that leads through a pooler, which may run any transaction on another connection to the server.

    So nothing may outlive a transaction: every transaction makes its own settings, nothing is prepared, and the session
    does not listen. The pooler may also be switched to another server: each transaction checks, on the server, that it
    is still the same server; if not, the session is gone.
    """

    pooled = True

    def __init__(
        self, connection: psycopg.Connection[Any], dialect: Dialect, backend: ServerProcess, settings: dict[str, str]
    ) -> None:
        """Use an open connection in autocommit mode; ``settings`` hold in every transaction."""
        super().__init__(connection, dialect, backend._replace(pid=0, started=""))
        made = ", ".join(f"pg_catalog.set_config('{name}', '{value}', true)" for name, value in settings.items())
        self._settings = f"select {made}, {durably('true')}"

    def _begin(self) -> None:
        super()._begin()
        if self._server is not None:
            self._run(Step("select {schema}same_server(:line)", {"line": self._server.line}))

    def _send_begin(self) -> None:
        self._pipeline.send("begin isolation level read committed, read write")
        self._pipeline.send(self._settings)

    def read(self, *steps: Step) -> Sequence[Result]:
        """Run some queries in a transaction, which brings the settings and the check of the server."""
        return self.run(*steps)

    def listen(self, namespace: str, kind: str) -> None:
        """Do nothing: the pooler's connection would listen, and its next client would get the notifications."""


def channel(dialect: Dialect, namespace: str, kind: str) -> str:
    """Return a channel's name. Its length is fixed: LISTEN truncates long names, and NOTIFY refuses them."""
    digest = hashlib.sha256(f"{dialect.prefix}{kind} {namespace}".encode()).hexdigest()
    return f"tenure_{digest[:32]}"


def _codec(server_encoding: str) -> str:
    """Return Python's name for a server's encoding. SQL_ASCII takes any bytes, so it holds UTF-8."""
    if server_encoding in ("UTF8", "SQL_ASCII"):
        return "utf-8"
    name = server_encoding.replace("WIN", "cp").replace("KOI8", "koi8_")
    try:
        return codecs.lookup(name).name
    except LookupError:
        # Every encoding includes ASCII.
        return "ascii"
