"""The program of one process under torture: a node as in tests/support/node_process.py, with work to do and more to
suffer.

    starve KIND S    hold the GIL for about S seconds, by a regular expression or by big integers
    fork S           fork a child that lives on for S seconds and does nothing
    clock RATE       let Tenure's clock run at this rate from now on
    wall SECONDS     step the wall clock of this process, as Python's `time` tells it, to so far from the true one
    prepare GID URL  write fenced in a two-phase transaction, on a connection to URL, and leave it prepared

How often its node has asked the database is recorded twice a second.

Its work, all of it recorded:

* fenced writes under each term, into the `ledger`, until the database refuses;
* ticks: unfenced writes for as long as `is_leader` says so, into `ticks`;
* the set workload, three times side by side: read a set, think, write it back with one more element. What differs is
  who may write: the holder of a hand-written lease; the holder of the same lease that looks at its own clock first; a
  leader whose write is fenced. A process that is stopped between reading and writing, or whose write is on the way for
  long, writes back an old set, and the elements that others have added meanwhile are lost, acknowledged or not.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import random
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import tenure
from tenure.core.protocol import NodeProtocol
from tests.support import history, node_process
from tests.support import store_by_hand as desk
from tests.support.ledger_process import LEDGERS, LedgerProgram
from tests.verification.torture import turned_clock

COUNT_EVERY_S = 0.5
LEASE_S = 2.0
THINK_S = 0.8
EPOCH_S = 60
"""Every so long the workloads begin new sets, under new leases: no set grows too large to be copied."""

NOW = {
    "sqlite": "((julianday('now') - 2440587.5) * 86400.0)",
    "postgresql": "extract(epoch from clock_timestamp())",
    "mysql": "unix_timestamp(now(6))",
}
IGNORE = {
    "sqlite": "insert or ignore into {}",
    "postgresql": "insert into {} on conflict do nothing",
    "mysql": "insert ignore into {}",
}
TABLES = {  # of the workloads
    "sqlite": [
        LEDGERS["sqlite"],
        "create table ticks (n integer primary key autoincrement, token integer, node text)",
        "create table sets (name text primary key, value text)",
        "create table leases (name text primary key, holder text, until real)",
    ],
    "postgresql": [
        LEDGERS["postgresql"],
        "create table ticks (n bigserial primary key, token bigint, node text)",
        "create table sets (name text primary key, value text)",
        "create table leases (name text primary key, holder text, until double precision)",
    ],
    "mysql": [
        LEDGERS["mysql"],
        "create table ticks (n bigint auto_increment primary key, token bigint, node text)",
        "create table sets (name varchar(64) primary key, value longtext)",
        "create table leases (name varchar(64) primary key, holder text, until double)",
    ],
}


TWO_PHASE = {  # around what is prepared
    "postgresql": ((), ("prepare transaction '{}'",)),
    "mysql": (("xa start '{}'",), ("xa end '{}'", "xa prepare '{}'")),
}


class Client:
    """A connection of the application's, opened when it is needed and again after each error."""

    def __init__(self) -> None:
        self.url = os.environ["TENURE_URL"]
        self.database = self.url.partition(":")[0]
        self._connection: Any = None
        self._inode = 0

    def __call__(self, sql: str, *parameters: Any) -> Any:
        """Run a statement that commits by itself, and return the cursor."""
        sql = sql.replace("{now}", NOW[self.database])
        try:
            self.follow_file()
            if self._connection is None:
                arguments: dict[str, Any] = {"isolation_level": None, "timeout": 5, "check_same_thread": False}
                if self.database != "sqlite":
                    arguments = {"autocommit": True, "connect_timeout": 3}
                if self.database == "postgresql":
                    arguments["prepare_threshold"] = None  # there may be a pooler on the way
                self._connection = desk.connect(self.url, **arguments)
            return self._connection.execute(sql.replace("%s", "?") if self.database == "sqlite" else sql, parameters)
        except Exception:
            connection, self._connection = self._connection, None
            if connection is not None:
                with contextlib.suppress(Exception):
                    connection.close()
            raise

    def follow_file(self) -> None:
        """Open SQLite's file anew where somebody has replaced it: what is read in the old one is of no use.

        An idle connection to the old file would also keep every descriptor for it that other connections have closed.
        """
        if self.database == "sqlite":
            inode = os.stat(self.url.partition(":///")[2]).st_ino  # noqa: PTH116
            if self._connection is not None and inode != self._inode:
                self._connection.close()
                self._connection = None
            self._inode = inode

    def insert_once(self, what: str, *parameters: Any) -> None:
        """Insert a row that may be there."""
        table, _, values = what.partition(" values ")
        text = IGNORE[self.database]
        self(text.format(f"{table} values {values}"), *parameters)


class Contender(LedgerProgram):
    commands = (*LedgerProgram.commands, "starve", "fork", "clock", "wall", "prepare")

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        self.turned = turned_clock.install()
        self.asked = Asked()
        self.update = f"update sets set value = {self.mark} where name = {self.mark}"

    def start(self, at_ns: str | None = None) -> dict[str, Any]:
        reply = super().start(at_ns)
        assert self.election is not None
        threading.Thread(target=self.count, daemon=True).start()
        for work in (self.tick, self.naive, self.dated, self.fenced):
            threading.Thread(target=self.keep, args=(work, Client(), self.election), daemon=True).start()
        return reply

    # -- what it suffers --

    def starve(self, kind: str, seconds: str) -> dict[str, Any]:
        """Find out how much of it takes so long, then do it in one go: nothing else runs in this process."""
        grow = {"regex": _regex, "integers": _integers}[kind]
        size, took_s = 1, 0.0
        while took_s < 0.02:
            size += 1
            began = time.perf_counter()
            grow(size)
            took_s = time.perf_counter() - began
        size += max(0, math.floor(math.log2(float(seconds) / took_s)))
        at = history.now_ns()
        grow(size)
        return {"starved_s": (history.now_ns() - at) / 1e9}

    def fork(self, seconds: str) -> dict[str, Any]:
        pid = desk.fork()
        if pid == 0:
            time.sleep(float(seconds))
            os._exit(0)
        return {"child": pid}

    def clock(self, rate: str) -> None:
        self.turned.turn(float(rate))

    def wall(self, seconds: str) -> None:
        turned_clock.step_wall_clock(float(seconds))

    def prepare(self, gid: str, url: str) -> dict[str, Any]:
        """The element of the ledger is the name of the transaction."""
        before, after = TWO_PHASE[url.partition(":")[0]]
        term = self.last_term()
        with desk.connected(url) as connection:
            for sql in before:
                connection.execute(sql.format(gid))
            term.fence(connection)
            connection.execute(self.insert, (self.role, term.token, self.name, gid))
            for sql in after:
                connection.execute(sql.format(gid))
        return {"token": term.token}

    # -- what it does --

    def count(self) -> None:
        while True:
            self.recorder.note("asks", count=self.asked.count)
            time.sleep(COUNT_EVERY_S)

    def keep(self, work: Callable[[Client, tenure.Election], None], client: Client, election: tenure.Election) -> None:
        """Do some work again and again, whatever happens."""
        while True:
            try:
                client.follow_file()
                work(client, election)
            except Exception as error:  # noqa: BLE001 - the database comes and goes
                logging.getLogger("work").debug("%s: %r", work.__name__, error)
                time.sleep(0.2)

    def tick(self, client: Client, election: tenure.Election) -> None:
        term = election.term
        if term is not None and election.is_leader:
            client("insert into ticks (token, node) values (%s, %s)", term.token, self.name)
        time.sleep(0.1)

    def naive(self, client: Client, _: tenure.Election) -> None:
        """A lease as one writes it by hand: who has it when it begins, writes."""
        self.add_to_set(client, "naive", lambda _: True)

    def dated(self, client: Client, _: tenure.Election) -> None:
        """The same, with a look at the own clock just before the write."""
        self.add_to_set(client, "dated", lambda until: time.monotonic() < until)

    def add_to_set(self, client: Client, kind: str, may_write: Callable[[float], bool]) -> None:
        name = self.set_name(kind)
        until = time.monotonic() + LEASE_S
        if not self.take_lease(client, name):
            time.sleep(random.uniform(0.1, 0.3))
            return
        value = self.read_set(client, name)
        time.sleep(THINK_S)
        element = next(self.elements)
        if may_write(until):
            client("update sets set value = %s where name = %s", f"{value} {element}", name)
            self.recorder.note("add", workload=kind, set=name, element=element)

    def take_lease(self, client: Client, name: str) -> bool:
        client.insert_once("leases (name, holder, until) values (%s, '', 0)", name)
        cursor = client(
            f"update leases set holder = %s, until = {{now}} + {LEASE_S}"
            " where name = %s and (holder = %s or until < {now})",
            self.name, name, self.name,
        )  # fmt: skip
        return bool(cursor.rowcount == 1)

    def fenced(self, client: Client, election: tenure.Election) -> None:
        """The same steps under Tenure: the write, and nothing else, is fenced."""
        term = election.term
        if term is None:
            time.sleep(0.1)
            return
        name = self.set_name("fenced")
        value = self.read_set(client, name)
        time.sleep(THINK_S)
        element = next(self.elements)
        with term.transaction() as transaction:
            transaction.execute(self.update, (f"{value} {element}", name))
        self.recorder.note("add", workload="fenced", set=name, element=element)

    def read_set(self, client: Client, name: str) -> str:
        client.insert_once("sets (name, value) values (%s, '')", name)
        return str(client("select value from sets where name = %s", name).fetchone()[0])

    def set_name(self, kind: str) -> str:
        return f"{kind}-{history.now_ns() // (EPOCH_S * 10**9)}"


class Asked:
    """Counts what the nodes of this process ask of the database, by what their protocol hears of it."""

    def __init__(self) -> None:
        self.count = 0
        for name in ("answer", "fail", "answer_watch", "fail_watch"):
            setattr(NodeProtocol, name, self._counting(getattr(NodeProtocol, name)))

    def _counting(self, hear: Callable[..., None]) -> Callable[..., None]:
        def heard(*arguments: Any, **more: Any) -> None:
            self.count += 1  # under the engine's lock
            hear(*arguments, **more)

        return heard


def _regex(size: int) -> None:
    """Take twice as long for each step of the size."""
    re.match(r"(a+)+$", "a" * size + "b")


def _integers(size: int) -> None:
    """Multiply two large numbers: three times as long for twice the digits, so twice as long for each step here."""
    number = 3 ** round(1000 * 2 ** (size / 1.585))
    _ = number * number


if __name__ == "__main__":
    node_process.main(Contender)
