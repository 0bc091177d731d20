"""A schedule beside the nodes of a torture run, in a namespace of its own, whose due times are accounted for."""

from __future__ import annotations

import random
import signal
import time
from typing import TYPE_CHECKING

from tests.support.schedules import unaccounted
from tests.support.store_by_hand import execute
from tests.verification.schedule.kills import TABLE, Replica

if TYPE_CHECKING:
    from typing_extensions import Self

NAMESPACE = "schedule"
REPLICAS = 2
TRIES = 20


class ScheduleBeside:
    """Two replicas with a schedule. One of them is killed, or frozen for a while, at every other step of the run."""

    def __init__(self, url: str, ttl: float) -> None:
        self._url = url
        self._told = {"interval": 1, "delivery": "at-least-once", "ttl": ttl, "namespace": NAMESPACE, "wait": True}
        self._running: list[Replica] = []
        self._chance = random.Random(15)
        self._started = 0

    def __enter__(self) -> Self:
        execute(self._url, TABLE)
        for _ in range(REPLICAS):
            self._start()
        return self

    def __exit__(self, *_: object) -> None:
        for replica in self._running:
            replica.close()

    def _start(self) -> None:
        self._started += 1
        self._running.append(Replica(self._url, name=f"schedule-{self._started}", **self._told))

    def disturb(self, number: int) -> None:
        """Do something to the replica that leads, now and then."""
        victim = next((one for one in self._running if one.leads), None)
        if victim is None or number % 2:
            return
        if self._chance.random() < 0.5:
            victim.kill()
            victim.close()
            self._running.remove(victim)
            self._start()
        else:
            victim.process.send_signal(signal.SIGSTOP)
            time.sleep(0.5)
            victim.process.send_signal(signal.SIGCONT)

    def judge(self) -> list[str]:
        """Return which due times are in no row or in two, and which took effect twice."""
        for replica in self._running:
            replica.close()
        found = _tried(lambda: unaccounted(self._url, NAMESPACE))
        twice = "select due_us from effects group by due_us having count(*) > 1"
        found += [f"the run due {due} took effect twice" for (due,) in _tried(lambda: execute(self._url, twice))]
        if not _tried(lambda: execute(self._url, "select 1 from effects")):
            found.append("the schedule did nothing at all")
        return found


def _tried(question):
    """Ask a server that has just been tortured."""
    for left in reversed(range(TRIES)):
        try:
            return question()
        except Exception:
            if not left:
                raise
            time.sleep(0.5)
    return []
