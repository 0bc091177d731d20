"""What somebody does who may CONNECT to the server and nothing else; each in a process of its own, until it is killed.

    flood URL CHANNEL...   NOTIFY on the nodes' channels, thousands a second
    squat URL              queue for every key of Tenure's, and keep what comes free

It says `begun` on stdout when its effect is there. It needs no right in the nodes' database: anybody may notify, read
`pg_locks` and take advisory locks.
"""

from __future__ import annotations

import itertools
import select
import subprocess
import sys
import threading
import time
from pathlib import Path

import psycopg

from tenure.databases.postgres.sentinel import CLASS_ID
from tests.support.node_process import die_with_parent

ROOT = Path(__file__).resolve().parents[3]
BATCH, PAUSE_S = 100, 0.02
"""Five thousand notifications a second at most: a flood, and not yet the end of a machine of two cores."""
RETRY_S = 0.02
UNCLAIMED = f"""
select cast(objid as bigint) from pg_locks
where locktype = 'advisory' and classid = {CLASS_ID} and objsubid = 2
  and database = (select oid from pg_database where datname = current_database())
group by objid having not bool_or(mode = 'ExclusiveLock' and (not granted or pid = any(%s)))
"""


class Stranger:
    """The process, from outside. Connections of it that wait for a lock outlive stop(): the server does not look."""

    def __init__(self, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.verification.torture.stranger", *arguments],
            stdout=subprocess.PIPE,
            cwd=ROOT,
            text=True,
        )
        self._has_begun = False

    def has_begun(self, timeout_s: float = 0.0) -> bool:
        """Whether its effect is there, or comes within this time."""
        assert self._process.stdout is not None
        if not self._has_begun and select.select([self._process.stdout], [], [], timeout_s)[0]:
            self._has_begun = self._process.stdout.readline() == "begun\n"
        return self._has_begun

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()


def begun() -> None:
    print("begun", flush=True)


def flood(url: str, *channels: str) -> None:
    """Notify in batches. Equal notifications of one transaction are sent once, so each is numbered."""
    tell = (
        "select pg_notify(channel, kind || ' stranger-' || (%s + n) || ' scheduler')"
        f" from unnest(%s::text[], %s::text[]) as t(channel, kind), generate_series(1, {BATCH // len(channels)}) as n"
    )
    kinds = [one.partition("=")[0] for one in channels]
    names = [one.partition("=")[2] for one in channels]
    numbers, is_begun = itertools.count(0, BATCH), False
    while True:
        try:
            with psycopg.connect(url, autocommit=True, connect_timeout=3) as connection:
                for number in numbers:
                    connection.execute(tell, [number, names, kinds])
                    if not is_begun:  # the first of them may meet a server that is down
                        begun()
                        is_begun = True
                    time.sleep(PAUSE_S)
        except psycopg.Error:  # the server comes and goes; the stranger stays
            time.sleep(RETRY_S)


def squat(url: str) -> None:
    """Queue for each key that shows, and say so when there is none left that nobody queues for."""
    squatters: dict[int, Squatter] = {}
    has_begun = False
    while True:
        try:
            with psycopg.connect(url, autocommit=True, connect_timeout=3) as connection:
                while True:
                    mine = [one.backend for one in squatters.values()]
                    unclaimed = {key for (key,) in connection.execute(UNCLAIMED, [mine])}
                    for key in unclaimed - set(squatters):
                        squatters[key] = Squatter(url, key)
                        squatters[key].start()
                    if squatters and not unclaimed and not has_begun:
                        begun()
                        has_begun = True
                    time.sleep(RETRY_S)
        except psycopg.Error:
            time.sleep(RETRY_S)


class Squatter(threading.Thread):
    """Queues for one key and keeps it, and does so again whenever its connection breaks: after a restart, too."""

    def __init__(self, url: str, key: int) -> None:
        super().__init__(daemon=True)
        self.url, self.key = url, key
        self.backend = 0

    def run(self) -> None:
        while True:
            try:
                with psycopg.connect(self.url, autocommit=True, connect_timeout=3) as connection:
                    self.backend = connection.info.backend_pid
                    connection.execute("select pg_advisory_lock(%s, %s)", [CLASS_ID, self.key])
                    while True:
                        connection.execute("select 1")
                        time.sleep(0.1)
            except psycopg.Error:
                time.sleep(RETRY_S)


if __name__ == "__main__":
    die_with_parent()
    {"flood": flood, "squat": squat}[sys.argv[1]](*sys.argv[2:])
