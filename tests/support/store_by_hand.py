"""A store without a node: the asks of the protocol, made one by one and by hand, on either database.

A test at a desk has no threads and no clock in it: it says when a member ends and when a role is acquired, and so holds
a moment still that a running node passes through in a millisecond.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import sqlite3
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pymysql

import tenure
from tenure.core import messages
from tenure.databases.backend import backend_for
from tenure.databases.mysql.connect import parse_url
from tenure.events import EndReason
from tenure.settings import node_settings
from tenure.store.session import Step

if TYPE_CHECKING:
    from typing_extensions import Self

_numbers = itertools.count(1)


@dataclass(frozen=True)
class TermIdentity:
    """What a term shows to the fence."""

    role: str
    token: int
    member_id: str
    namespace: str = "default"
    schema: str = "tenure"
    file: str = ""


class Desk:
    """One member's control connection. `with Desk(url) as desk:` connects, creates the tables and joins."""

    def __init__(self, url: str, *, join: bool = True, **settings: Any) -> None:
        told: dict[str, Any] = {"name": f"desk-{next(_numbers)}", "ttl": 30.0} | settings
        self.settings = node_settings(url, **told)
        self.backend = backend_for(self.settings)
        self.store, self.session, self.opened = self.backend.open_control()
        self.id = ""
        if join:
            self.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.session.close()
        self.store.sentinel.abandon()
        self.backend.close()

    def ask(self, ask: Any) -> Any:
        return self.store.perform(ask)

    def join(self, *, key: int | None = None) -> str:
        """Join as a new member, with a sentinel of its own unless the lease stands alone."""
        self.id = str(uuid.uuid4())
        number: int | None = None
        if self.settings.mode != "lease":
            number = secrets.randbits(31) if key is None else key  # hypothesis seeds `random`
        member = messages.Member(self.id, self.settings.name, self.settings.ttl, self.settings.takeover, number)
        assert self.ask(messages.Join(member, self.opened.server)).sentinel
        return self.id

    def stand(self, *roles: str) -> None:
        self.ask(messages.Stand(self.id, roles))

    def acquire(self, *roles: str, patient: bool = False, floor: int = 0) -> dict[str, int]:
        """Stand for the roles and try to take them, once; return the tokens of those taken."""
        self.stand(*roles)
        acquired = self.ask(messages.Acquire(self.id, self.settings.name, roles, floor, patient=patient))
        return dict(acquired.tokens)

    def lead(self, role: str) -> TermIdentity:
        """Take a role that must be vacant."""
        token = self.acquire(role)[role]
        return TermIdentity(role, token, self.id, self.settings.namespace, self.settings.schema, self.backend.file)

    def end(self, member_id: str) -> bool:
        """End another member, by silence: whatever its count of renewals is now, it was watched for long enough."""
        question = Step("select renewals from {members} where id = :id", {"id": member_id})
        ((renewals,),) = self.session.read(question)[0].rows
        verdict = messages.Verdict(member_id, EndReason.SILENCE, self.opened.server.incarnation, renewals=renewals)
        return member_id in self.ask(messages.End(self.id, (verdict,))).ids

    def succeed(self, other: Desk, role: str) -> TermIdentity:
        """End another member and take its role."""
        assert self.end(other.id)
        return self.lead(role)


def connect(url: str, **arguments: Any) -> Any:
    """A connection as an application would open it, in the driver's own way."""
    if url.startswith("sqlite"):
        return sqlite3.connect(url.partition(":///")[2], timeout=arguments.pop("timeout", 10), **arguments)
    if url.startswith("mysql"):
        return MariaDbConnection(**parse_url(url), **arguments)
    return psycopg.connect(url, **arguments)


class MariaDbConnection(pymysql.connections.Connection):  # type: ignore[misc]
    """As PyMySQL makes it, with the one call that the other drivers have."""

    def execute(self, sql: str, parameters: Any = None) -> Any:
        cursor = self.cursor()
        cursor.execute(sql, parameters)
        return cursor


def table(url: str, name: str) -> str:
    """What one of Tenure's tables is called."""
    return f"tenure.{name}" if url.startswith("postgres") else f"tenure_{name}"


@contextlib.contextmanager
def connected(url: str, **arguments: Any) -> Iterator[Any]:
    with contextlib.closing(connect(url, **arguments)) as connection:
        yield connection


def execute(url: str, *statements: str) -> list[tuple[Any, ...]]:
    """Run some statements and commit; return the rows of the last."""
    with connected(url) as connection:
        cursor = None
        for statement in statements:
            cursor = connection.execute(statement)
        rows = list(cursor.fetchall()) if cursor is not None and cursor.description else []
        connection.commit()
        return rows


def fork() -> int:
    """os.fork(), without the warning of newer Pythons about forks beside threads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def until(condition: Callable[[], Any], what: str = "", timeout: float = 20) -> Any:
    """Look again and again until the condition holds, and return what it gave. For what sends no signal."""
    deadline = time.monotonic() + timeout
    while True:
        looked = time.monotonic()
        if value := condition():
            return value
        assert time.monotonic() < deadline, f"not within {timeout:g} s: {what}"
        # Many looks open a connection. One after the other would take a core from what is waited for.
        time.sleep(min(0.1, max(0.01, 3 * (time.monotonic() - looked))))


def put_copy_in_place(path: Path) -> None:
    """Replace a file of SQLite's by a copy of itself, as who restores a backup does."""
    copy = path.with_name("copy.db")
    with contextlib.closing(sqlite3.connect(path)) as one, contextlib.closing(sqlite3.connect(copy)) as other:
        one.backup(other)
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    copy.rename(path)


QUICK: dict[str, Any] = {"ttl": 10, "renew_every": 0.3}
"""Many renewals in a short time, and still a lease that no busy machine lets lapse."""


def renewals(url: str) -> list[int]:
    """How often the living members have renewed, the least first."""
    members = table(url, "members")
    return [count for (count,) in execute(url, f"select renewals from {members} where ended_at is null order by 1")]


class Nodes:
    """Makes and starts nodes on one database, and closes them together: one by one, each waits out a slice."""

    def __init__(self, url: str, **settings: Any) -> None:
        self._url = url
        self._settings = settings
        self._started: list[tenure.Node] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        closing = [threading.Thread(target=node.close) for node in self._started]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()

    def __call__(self, name: str, **settings: Any) -> tenure.Node:
        node = tenure.Node(self._url, name=name, **(self._settings | settings))
        self._started.append(node)
        return node.start()

    def pair(self, role: str) -> tuple[tenure.Election, tenure.Election]:
        """A leader and a standby."""
        leads = self("leader").election(role)
        leads.wait(20)
        stands = self("standby").election(role)
        until(lambda: len(leads.candidates()) == 2, "both standing")
        return leads, stands
