"""What the simulated server stores, in two makes with one interface.

``SqlDatabase`` runs the real ``ControlStore`` and ``WatchStore`` on in-memory SQLite; ``ModelDatabase`` runs the model.
A request is executed at one virtual instant, except for a look, which reads the rows first and the sentinels a moment
later, as it does on a real server. SQLite has no row locks, so the effect of the fence's lock is put on top: a
statement that skips locked rows does not see the roles that an open fenced transaction holds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sqlite3
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from tenure.core import messages
from tenure.core.servers import Server
from tenure.databases.sqlite.schema import SqliteSchema
from tenure.settings import LOSES_NOTHING
from tenure.store import migrations, statements
from tenure.store.control import ControlStore, Identity
from tenure.store.dialects import SQLITE, listed
from tenure.store.session import NAMED_ROLES, Failed, Run, Step
from tenure.store.watch import WatchStore
from tests.verification.simulation.model import ModelStore, Tables

if TYPE_CHECKING:
    from tests.verification.simulation.server import Connection, SimServer

NAMESPACE = "default"
DIALECT = dataclasses.replace(
    SQLITE,
    words={
        **SQLITE.words,
        "incarnation": "sim_incarnation()",
        "place": "sim_place()",
        "now": "sim_now()",
        "ripe": "min(max_ttl_ms, coalesce(ripe_ttl_ms, 60000))",
    },
)
_LOCKING = (statements.LOCK_FREE, statements.LOCK_PATIENTLY, statements.LOCK_LEFT)


class Rows(NamedTuple):
    """What a statement gave."""

    rows: list[tuple[Any, ...]]
    count: int


class SimSentinel:
    """The locks of one simulated connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def hold(self, key: int) -> bool:
        return self._connection.server.lock(key, self._connection)

    def release(self, key: int) -> None:
        self._connection.server.unlock(key, self._connection)

    def wait(self, key: int, seconds: float) -> None:
        """Nothing: the server does the waiting, in virtual time, before it executes the look."""

    def standing(self, keys: Any) -> set[int]:
        return {key for key in keys if key in self._connection.server.locks}

    def sweep(self, keys: set[int]) -> None:
        pass

    def abandon(self) -> None:
        pass


class SimWatcher:
    """What the watch connection may do to others."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def slice_s(self) -> float:
        return self._connection.server.slice_s

    def evict(self, namespace: str, member_ids: tuple[str, ...]) -> None:  # noqa: ARG002
        self._connection.server.evict(member_ids)

    def unblock(self, namespace: str, control_pid: int, bound_s: float) -> None:  # noqa: ARG002
        self._connection.server.unblock(bound_s)


class SimSession:
    """The real texts on the simulated server's SQLite database."""

    dialect = DIALECT
    schema = SqliteSchema(DIALECT)

    def __init__(self, database: SqlDatabase, connection: Connection) -> None:
        self.database = database
        self.connection = connection
        self.pid = connection.pid
        self.started = connection.started
        self._server: Server | None = None
        self.recorded: list[list[Rows]] | None = None
        self.replayed: list[list[Rows]] | None = None
        self.unsent: list[Callable[[], None]] = []

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Run]:
        sqlite = self.database.sqlite
        self.connection.server.maybe_fail()
        try:
            sqlite.execute("begin immediate")
            try:
                yield self._run
            except BaseException:
                sqlite.rollback()
                raise
            sqlite.commit()
            for send in self.unsent:
                send()
        except sqlite3.Error as error:
            raise Failed(str(error)) from error
        finally:
            self.unsent.clear()

    def run(self, *steps: Step) -> list[Rows]:
        with self.transaction() as run:
            return run(*steps)

    def read(self, *steps: Step) -> list[Rows]:
        if self.replayed is not None:
            return self.replayed.pop(0)
        results = self._run(*steps)
        if self.recorded is not None:
            self.recorded.append(results)
        return results

    def _run(self, *steps: Step) -> list[Rows]:
        results = []
        for step in steps:
            cursor = self.database.sqlite.execute(DIALECT.text(step.text), step.parameters)
            rows = cursor.fetchall()
            if step.text in _LOCKING:
                rows = [row for row in rows if row[0] not in self.connection.server.locked_roles()]
            results.append(Rows(rows, cursor.rowcount))
        return results

    def notify(self, namespace: str, payload: str, where: Step | None = None) -> None:  # noqa: ARG002
        def send() -> None:
            if where is None or self._run(where)[0].rows:
                self.connection.server.tell(payload)

        self.unsent.append(send)

    def notify_successors(self, namespace: str, me: str, roles: Step) -> None:  # noqa: ARG002
        def send() -> None:
            found = self._run(roles)[0].rows
            if len(found) > NAMED_ROLES:
                self.connection.server.tell(f"vacant {me}")
            else:
                for role, heir in found:
                    self.connection.server.tell(f"vacant {me}>{heir} {role}" if heir else f"vacant {me} {role}")

        self.unsent.append(send)

    def names(self, locked: Rows) -> tuple[str, ...]:
        return tuple(name for (name,) in locked.rows)

    def locked(self, locked: Rows) -> str:
        return listed(self.names(locked))

    def listen(self, namespace: str, kind: str) -> None:
        """Every node receives every notification here."""

    def server(self) -> Server:
        if self._server is None:
            self._server = self.connection.server.identity
        return self._server

    @property
    def unreplicated(self) -> bool:
        return self.connection.server.replica_is_away

    def close(self) -> None:
        pass


class SqlDatabase:
    """The real SQL."""

    def __init__(self, server: SimServer, image: sqlite3.Connection | None = None) -> None:
        self.server = server
        self.sqlite = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        (image or _template()).backup(self.sqlite)
        self.sqlite.create_function("sim_incarnation", 0, lambda: server.identity.incarnation)
        self.sqlite.create_function("sim_place", 0, lambda: server.identity.place)
        self.sqlite.create_function("sim_now", 0, server.timestamp)

    def close(self) -> None:
        self.sqlite.close()

    def replace(self, image: sqlite3.Connection) -> None:
        """Have other rows, for connections that stand."""
        image.backup(self.sqlite)

    def snapshot(self) -> sqlite3.Connection:
        image = sqlite3.connect(":memory:", check_same_thread=False)
        self.sqlite.backup(image)
        return image

    def control(self, connection: Connection) -> ControlStore:
        session, sentinel = SimSession(self, connection), SimSentinel(connection)
        identity = Identity("sim", connection.pid, "0")
        return ControlStore(
            session, sentinel, NAMESPACE, identity, terminate_silent_member=self.terminate_silent_member
        )  # type: ignore[arg-type]

    def terminate_silent_member(self, namespace: str, member_id: str, renewals: int | None) -> None:  # noqa: ARG002
        """Cut off a silent member that may lock its own row."""
        text = (
            "select control_pid, control_start, watch_pid, watch_start from tenure_members "
            "where id = ? and ended_at is null and renewals = ?"
        )
        for a, b, c, d in self.sqlite.execute(text, (member_id, renewals)).fetchall():
            self.server.terminate_named({(a, b), (c, d)})

    def watch(self, connection: Connection) -> WatchStore:
        session, server = SimSession(self, connection), connection.server
        return WatchStore(session, SimSentinel(connection), SimWatcher(connection), NAMESPACE, server.knock)  # type: ignore[arg-type]

    def begin_look(self, watch: WatchStore, request: messages.Look) -> Any:
        """Read the rows: run the real look once and keep what it read."""
        session: Any = watch.session
        session.recorded = []
        watch.look(request)
        read, session.recorded = session.recorded, None
        return read

    def finish_look(self, watch: WatchStore, request: messages.Look, read: Any) -> messages.Looked:
        """Look at the sentinels: run the real look again on the rows that were read."""
        session: Any = watch.session
        session.replayed = read
        try:
            return watch.look(request)
        finally:
            session.replayed = None

    def perform_watch(self, watch: WatchStore, request: messages.WatchRequest) -> messages.WatchReply:
        return watch.perform(request)

    def fenced(self, role: str, token: int, member_id: str) -> bool:
        text = DIALECT.text(statements.FENCE_BY_UPDATE)
        parameters = {"namespace": NAMESPACE, "role": role, "token": token, "id": member_id}
        return self.sqlite.execute(text, parameters).rowcount == 1

    def backends(self, member_ids: tuple[str, ...]) -> list[tuple[int, str]]:
        found = []
        for id_ in member_ids:
            text = (
                "select control_pid, control_start, watch_pid, watch_start from tenure_members "
                "where id = ? and ended_at is not null"
            )
            for a, b, c, d in self.sqlite.execute(text, (id_,)):
                found += [(a, b), (c, d)]
        return found

    def end_reason(self, member_id: str) -> str | None:
        row = self.sqlite.execute("select end_reason from tenure_members where id = ?", (member_id,)).fetchone()
        return row[0] if row else None

    def limit_ttl(self, seconds: float) -> None:
        """An operator sets the largest TTL."""
        limit = {"namespace": NAMESPACE, "max_ttl_ms": round(seconds * 1000)}
        self.sqlite.execute(DIALECT.text(statements.SET_MAX_TTL), limit)

    def administer(self, max_ttl: float, *, loses_nothing: bool) -> None:
        """An operator has set what there is to set, before any node joined."""
        if self.sqlite.execute("select 1 from tenure_namespaces where limit_by = 'open'").fetchone():
            self.limit_ttl(max_ttl)
            if loses_nothing:
                self.set_promotion(loses_nothing=True)

    def set_promotion(self, *, loses_nothing: bool) -> None:
        """An operator says whether a promotion loses commits."""
        word = LOSES_NOTHING if loses_nothing else "may-lose"
        parameters = {"namespace": NAMESPACE, "promotion": word}
        self.sqlite.execute(DIALECT.text(statements.SET_PROMOTION[2]), parameters)

    def request(self, role: str) -> None:
        """An operator asks the leader to resign."""
        text = "update tenure_roles set request_token = token where name = ? and holder is not null"
        self.sqlite.execute(text, (role,))


class ModelDatabase:
    """The model."""

    def __init__(self, server: SimServer, image: Tables | None = None) -> None:
        self.server = server
        self.tables = image or Tables()

    def close(self) -> None:
        pass

    def replace(self, image: Tables) -> None:
        self.tables = image

    def snapshot(self) -> Tables:
        return self.tables.copy()

    def control(self, connection: Connection) -> ModelStore:
        server = connection.server
        return ModelStore(
            lambda: self.tables,
            SimSentinel(connection),
            tell=server.tell,
            now=server.timestamp,
            server=lambda: server.identity,
            locked=server.locked_roles,
            backend=(connection.pid, connection.started),
            unreplicated=lambda: server.replica_is_away,
        )

    watch = control

    def begin_look(self, watch: ModelStore, request: messages.Look) -> Any:
        return watch.roster(request)

    def finish_look(self, watch: ModelStore, request: messages.Look, read: Any) -> messages.Looked:  # noqa: ARG002
        rows, vacancy = read
        return messages.Looked(self.server.identity, watch.sightings(rows), vacancy, self.server.slice_s)

    def perform_watch(self, watch: ModelStore, request: messages.WatchRequest) -> messages.WatchReply:  # noqa: ARG002
        if isinstance(request, messages.Knock):
            return messages.Knocked(self.server.knock() == request.server_start)
        if isinstance(request, messages.Evict):
            self.server.evict(request.member_ids)
        elif isinstance(request, messages.Unblock):
            self.server.unblock(request.bound_s)
        return messages.Done()

    def fenced(self, role: str, token: int, member_id: str) -> bool:
        return self.tables.fenced(role, token, member_id, self.server.identity.line)

    def backends(self, member_ids: tuple[str, ...]) -> list[tuple[int, str]]:
        rows = [self.tables.members.get(id_) for id_ in member_ids]
        return [backend for row in rows if row and row.ended_at for backend in (row.control, row.watch)]

    def end_reason(self, member_id: str) -> str | None:
        row = self.tables.members.get(member_id)
        return row.end_reason if row else None

    def limit_ttl(self, seconds: float) -> None:
        self.tables.limit_ttl(seconds)

    def administer(self, max_ttl: float, *, loses_nothing: bool) -> None:
        if self.tables.limit_by == "open":
            self.limit_ttl(max_ttl)
            if loses_nothing:
                self.set_promotion(loses_nothing=True)

    def set_promotion(self, *, loses_nothing: bool) -> None:
        self.tables.set_promotion(self.server.identity, loses_nothing=loses_nothing)

    def request(self, role: str) -> None:
        row = self.tables.roles.get(role)
        if row and row.holder:
            row.request_token = row.token


_prepared: list[sqlite3.Connection] = []


def _template() -> sqlite3.Connection:
    """The empty tables, made once."""
    if not _prepared:
        connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        migrations.prepare(_Plain(connection))  # type: ignore[arg-type]
        _prepared.append(connection)
    return _prepared[0]


class _Plain:
    """Just enough of a session to create the tables."""

    dialect = SQLITE
    schema = SqliteSchema(SQLITE)

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Run]:
        yield self.read

    def read(self, *steps: Step) -> list[Rows]:
        return [
            Rows(cursor.fetchall(), cursor.rowcount)
            for step in steps
            for cursor in [self.connection.execute(SQLITE.text(step.text), step.parameters)]
        ]
