"""What the simulated server stores, in two makes with one interface.

``SqlDatabase`` runs the real ``Store`` and ``Watch`` on in-memory SQLite; ``ModelDatabase`` runs the model. An ask is
executed at one virtual instant, except for a look, which reads the rows first and the sentinels a moment later, as it
does on a real server. SQLite has no row locks, so the effect of the fence's lock is put on top: a statement that skips
locked rows does not see the roles that an open fenced transaction holds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sqlite3
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from tenure import asks, schema, statements
from tenure.asks import Server
from tenure.dialects import SQLITE
from tenure.session import Failed, Run, Step
from tenure.store import Identity, Store
from tenure.watch import Watch
from tests.simulation.model import ModelStore, Tables

if TYPE_CHECKING:
    from tests.simulation.server import Connection, SimServer

NAMESPACE = "default"
DIALECT = dataclasses.replace(SQLITE, words={**SQLITE.words, "incarnation": "sim_incarnation()", "now": "sim_now()"})
_LOCKING = (statements.LOCK_FREE, statements.LOCK_PATIENTLY)


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

    def retake(self, key: int) -> bool:
        """An older connection of ours that still has the lock is terminated first."""
        server = self._connection.server
        holder = server.locks.get(key)
        if holder is not None and holder.pid < self._connection.pid:
            server.terminate(holder)
        return self.hold(key)

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

    def __init__(self, database: SqlDatabase, connection: Connection) -> None:
        self.database = database
        self.connection = connection
        self.pid = connection.pid
        self.started = connection.started
        self.recorded: list[list[Rows]] | None = None
        self.replayed: list[list[Rows]] | None = None

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
        except sqlite3.Error as error:
            raise Failed(str(error)) from error
        finally:
            told, self.database.told = self.database.told, []
        for payload in told:
            self.connection.server.tell(payload)

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

    def notify(self, namespace: str, payload: str) -> Step:  # noqa: ARG002
        return Step("select sim_notify(:payload)", {"payload": payload})

    def listen(self, namespace: str, kind: str) -> None:
        """Everybody hears everything here."""

    def server(self) -> Server:
        return self.connection.server.identity

    def close(self) -> None:
        pass


class SqlDatabase:
    """The real SQL."""

    def __init__(self, server: SimServer, image: sqlite3.Connection | None = None) -> None:
        self.server = server
        self.told: list[str] = []
        self.sqlite = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        (image or _template()).backup(self.sqlite)
        self.sqlite.create_function("sim_incarnation", 0, lambda: server.identity.incarnation)
        self.sqlite.create_function("sim_now", 0, server.timestamp)
        self.sqlite.create_function("sim_notify", 1, self.told_later)

    def told_later(self, payload: str) -> None:
        self.told.append(payload)

    def close(self) -> None:
        self.sqlite.close()

    def snapshot(self) -> sqlite3.Connection:
        image = sqlite3.connect(":memory:", check_same_thread=False)
        self.sqlite.backup(image)
        return image

    def control(self, connection: Connection) -> Store:
        session, sentinel = SimSession(self, connection), SimSentinel(connection)
        identity = Identity("sim", connection.pid, "0")
        return Store(session, sentinel, NAMESPACE, identity, oust=self.oust)  # type: ignore[arg-type]

    def oust(self, namespace: str, member_id: str, renewals: int | None) -> None:  # noqa: ARG002
        """Cut off a silent member that may lock its own row."""
        text = (
            "select control_pid, control_start, watch_pid, watch_start from tenure_members "
            "where id = ? and ended_at is null and renewals = ?"
        )
        for a, b, c, d in self.sqlite.execute(text, (member_id, renewals)).fetchall():
            self.server.terminate_named({(a, b), (c, d)})

    def watch(self, connection: Connection) -> Watch:
        session, server = SimSession(self, connection), connection.server
        return Watch(session, SimSentinel(connection), SimWatcher(connection), NAMESPACE, server.knock)  # type: ignore[arg-type]

    def begin_look(self, watch: Watch, ask: asks.Look) -> Any:
        """Read the rows: run the real look once and keep what it read."""
        session: Any = watch.session
        session.recorded = []
        watch.look(ask.member_id)
        read, session.recorded = session.recorded, None
        return read

    def finish_look(self, watch: Watch, ask: asks.Look, read: Any) -> asks.Looked:
        """Look at the sentinels: run the real look again on the rows that were read."""
        session: Any = watch.session
        session.replayed = read
        try:
            return watch.look(ask.member_id)
        finally:
            session.replayed = None

    def perform_watch(self, watch: Watch, ask: asks.WatchAsk) -> asks.WatchAnswer:
        return watch.perform(ask)

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

    def request(self, role: str) -> None:
        """Somebody elsewhere asks the leader to resign."""
        text = "update tenure_roles set request_token = token where name = ? and holder is not null"
        self.sqlite.execute(text, (role,))


class ModelDatabase:
    """The model."""

    def __init__(self, server: SimServer, image: Tables | None = None) -> None:
        self.server = server
        self.tables = image or Tables()

    def close(self) -> None:
        pass

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
        )

    watch = control

    def begin_look(self, watch: ModelStore, ask: asks.Look) -> Any:
        return watch.roster(ask.member_id)

    def finish_look(self, watch: ModelStore, ask: asks.Look, read: Any) -> asks.Looked:  # noqa: ARG002
        rows, vacancy = read
        return asks.Looked(self.server.identity, watch.sightings(rows), vacancy, self.server.slice_s)

    def perform_watch(self, watch: ModelStore, ask: asks.WatchAsk) -> asks.WatchAnswer:  # noqa: ARG002
        if isinstance(ask, asks.Knock):
            return asks.Knocked(self.server.knock() == ask.server_start)
        if isinstance(ask, asks.Evict):
            self.server.evict(ask.member_ids)
        elif isinstance(ask, asks.Unblock):
            self.server.unblock(ask.bound_s)
        return asks.Done()

    def fenced(self, role: str, token: int, member_id: str) -> bool:
        return self.tables.fenced(role, token, member_id, self.server.identity.incarnation)

    def backends(self, member_ids: tuple[str, ...]) -> list[tuple[int, str]]:
        rows = [self.tables.members.get(id_) for id_ in member_ids]
        return [backend for row in rows if row and row.ended_at for backend in (row.control, row.watch)]

    def end_reason(self, member_id: str) -> str | None:
        row = self.tables.members.get(member_id)
        return row.end_reason if row else None

    def request(self, role: str) -> None:
        row = self.tables.roles.get(role)
        if row and row.holder:
            row.request_token = row.token


_prepared: list[sqlite3.Connection] = []


def _template() -> sqlite3.Connection:
    """The empty tables, made once."""
    if not _prepared:
        connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        schema.prepare(_Plain(connection))  # type: ignore[arg-type]
        _prepared.append(connection)
    return _prepared[0]


class _Plain:
    """Just enough of a session to create the tables."""

    dialect = DIALECT

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Run]:
        yield self._run

    def _run(self, *steps: Step) -> list[Rows]:
        return [
            Rows(cursor.fetchall(), cursor.rowcount)
            for step in steps
            for cursor in [self.connection.execute(DIALECT.text(step.text), step.parameters)]
        ]
