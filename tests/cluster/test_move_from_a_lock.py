"""From a lock that is taken by hand to Tenure, one replica at a time, under load: docs/how-to/move-from-a-lock.md.

The replicas are processes. The old ones are killed; the leader is the one that goes, whenever it is an old one.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tests.integrations.cluster import Process
from tests.support.store_by_hand import connected, execute, until

LOCK_ID = 4848481620187694162
REPLICAS = 3
LONGEST_GAP_S = 1.5
"""Coarse: a look takes a second. The machine is loaded, and the kernel must find time for the new leader."""
STANDING = "select 1 from tenure.candidates c join tenure.members m on m.id = c.member_id and m.ended_at is null"

pytestmark = pytest.mark.long


class Replica(Process):
    def __init__(self, kind: str, url: str, directory: Path, name: str, lock_id: int | None) -> None:
        self.record = directory / f"{name}.record"
        command = [sys.executable, "-m", "tests.cluster.lock_replica", kind, url, str(directory), name]
        super().__init__(name, command + ([] if lock_id is None else [str(lock_id)]), {}, directory)

    def lines(self, kind: str) -> list[float]:
        lines = self.record.read_text().splitlines() if self.record.exists() else []
        # A process that was killed may have written half a line.
        words = [line.split() for line in lines if line.startswith(kind) and line.count(".") == 1]
        return [float(at) for _, at in words]

    def end(self, number: signal.Signals) -> None:
        self.process.send_signal(number)
        assert self.wait() is not None, self.output()


@contextlib.contextmanager
def load(url: str) -> Iterator[None]:
    """Other clients of the same database, which write all the time."""
    stop = threading.Event()
    execute(url, "create table load (n bigint)")

    def write() -> None:
        with psycopg.connect(url, autocommit=True) as connection:
            while not stop.is_set():
                connection.execute("insert into load select generate_series(1, 100)")
                connection.execute("select sum(n) from load")
                time.sleep(0.002)

    writers = [threading.Thread(target=write) for _ in range(3)]
    for writer in writers:
        writer.start()
    try:
        yield
    finally:
        stop.set()
        for writer in writers:
            writer.join()


def at_work(replicas: list[Replica]) -> Replica | None:
    """The replica whose last beat is the latest, if that is recent."""
    latest = max(replicas, key=lambda replica: max(replica.lines("beat"), default=0.0))
    return latest if time.monotonic() - max(latest.lines("beat"), default=0.0) < 0.5 else None


def end_one(replicas: list[Replica], running: list[Replica], number: signal.Signals) -> None:
    """End one of these replicas: the one at work, if it is among them; then wait until one is at work."""
    leader = until(lambda: at_work(running), "a replica is at work")
    victim = leader if leader in replicas else replicas[0]
    replicas.remove(victim)
    running.remove(victim)
    victim.end(number)
    until(lambda: at_work(running), f"a replica is at work after {victim.name}")


@pytest.mark.parametrize("kind", ["service", pytest.param("fastapi", marks=pytest.mark.frameworks)])
def test_replicas_move_from_a_lock_to_a_lease_one_at_a_time(postgres_url, tmp_path, kind):
    url = postgres_url
    with contextlib.ExitStack() as stack, load(url):

        def start(kind: str, name: str, lock_id: int | None) -> Replica:
            replica = Replica(kind, url, tmp_path, name, lock_id)
            stack.callback(replica.close)
            everyone.append(replica)
            running.append(replica)
            return replica

        def standing(number: int) -> None:
            until(lambda: len(execute(url, STANDING)) == number, f"{number} nodes stand")

        everyone: list[Replica] = []
        running: list[Replica] = []
        old = [start("hand", f"hand-{number}", LOCK_ID) for number in range(REPLICAS)]
        until(lambda: at_work(running), "an old replica is at work")
        began = time.monotonic()

        # Release 1, and then 2: nodes with the lock and a lease, beside programs with the lock.
        with_lock = []
        for number in range(REPLICAS):
            with_lock.append(start(kind, f"both-{number}", LOCK_ID))
            if number == 0:
                until(lambda: execute(url, "select 1 where to_regclass('tenure.candidates') is not null"), "tables")
            standing(number + 1)
            end_one(old, running, signal.SIGKILL)

        # Release 3: nodes with a lease alone, beside nodes with both.
        for number in range(REPLICAS):
            start(kind, f"lease-{number}", None)
            standing(REPLICAS + 1)
            end_one(with_lock, running, signal.SIGTERM)
            standing(REPLICAS)

        finished = time.monotonic()
        overlaps = {replica.name: replica.lines("overlap") for replica in everyone if replica.lines("overlap")}
        beats = sorted(at for replica in everyone for at in replica.lines("beat") if began <= at <= finished)
        gap = max(later - earlier for earlier, later in itertools.pairwise(beats))
        print(f"{kind}: {len(everyone)} replicas in {finished - began:.1f} s, longest gap {gap * 1000:.0f} ms")
        assert overlaps == {}
        assert gap < LONGEST_GAP_S
        with connected(url) as by_hand:
            assert by_hand.execute("select pg_try_advisory_lock(%s)", [LOCK_ID]).fetchone() == (True,)
