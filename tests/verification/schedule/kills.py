"""Kill or freeze the leader of a schedule around a due time, again and again, and account for every due time.

    python -m tests.verification.schedule --kills 200 --database postgres
    python -m tests.verification.schedule --kills 20 --freeze

Three replicas run a schedule with a job that is due every second and writes its due time in the transaction of its run.
The leader is killed up to half a second before a due time. In the end no due time may be missing or there twice, in the
effects and in the record of runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tenure
from tests.support.schedules import unaccounted
from tests.support.store_by_hand import execute, until

ROOT = Path(__file__).resolve().parents[3]
TABLE = "create table effects (job varchar(50), due_us bigint, at_us bigint, token bigint, attempt integer)"
REPLICAS = 3


class Replica:
    """One process with a schedule."""

    def __init__(self, url: str, **options: Any) -> None:
        self.name = options["name"]
        self.leads = False
        self.process = subprocess.Popen(
            self.command(url, options),
            env=os.environ | {"TENURE_URL": url},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.errors: list[str] = []
        threading.Thread(target=self._listen, daemon=True).start()
        threading.Thread(target=self._hear_errors, daemon=True).start()

    def command(self, url: str, options: dict[str, Any]) -> list[str]:  # noqa: ARG002 - the URL is in the environment
        return [sys.executable, "-m", "tests.verification.schedule.replica", json.dumps(options)]

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.leads = line.startswith(("elected", "resumed"))

    def _hear_errors(self) -> None:
        assert self.process.stderr is not None
        self.errors.extend(self.process.stderr)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)
        self.leads = False

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait(10)
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


@dataclass
class Report:
    """What the kills did."""

    kills: int
    lost: list[int] = field(default_factory=list)
    """Due times without an effect."""
    twice: list[int] = field(default_factory=list)
    early: int = 0
    unaccounted: list[str] = field(default_factory=list)
    starts_ms: list[float] = field(default_factory=list)
    """How long after its due time each run began."""
    after_kills_ms: list[float] = field(default_factory=list)
    """The same, for the first due time after each kill."""

    @property
    def passed(self) -> bool:
        return not (self.lost or self.twice or self.early or self.unaccounted)

    def __str__(self) -> str:
        median = statistics.median(self.starts_ms) if self.starts_ms else float("nan")
        killed = statistics.median(self.after_kills_ms) if self.after_kills_ms else float("nan")
        most = max(self.after_kills_ms, default=float("nan"))
        return (
            f"{self.kills} kills, {len(self.starts_ms)} runs, {len(self.lost)} lost, {len(self.twice)} twice, "
            f"{self.early} early, {len(self.unaccounted)} unaccounted; start after the due time: median {median:.1f} "
            f"ms, after a kill median {killed:.1f} ms and at most {most:.0f} ms"
        )


@contextlib.contextmanager
def replicas(url: str, kind: type[Replica] = Replica, count: int = REPLICAS, **options: Any) -> Iterator[list[Replica]]:
    """Some replicas, started one after the other; those that are killed are replaced by the caller."""
    execute(url, TABLE)
    running = [kind(url, name=f"n{number}", **options) for number in range(count)]
    try:
        yield running
    finally:
        for replica in running:
            replica.close()


def leader(running: list[Replica]) -> Replica:
    return until(lambda: next((one for one in running if one.leads), None), "a leader", 30)


def kill_around_due_times(
    url: str,
    kills: int,
    seed: int = 15,
    *,
    freeze_s: float = 0.0,
    kind: type[Replica] = Replica,
    count: int = REPLICAS,
    **options: Any,
) -> Report:
    """Kill (or freeze) the leader before a due time, ``kills`` times; return what became of every due time."""
    chance = random.Random(seed)
    told = {"interval": 1, "delivery": "at-least-once", **options}
    report, killed_before, number = Report(kills), [], count
    with replicas(url, kind, count, **told) as running:
        leader(running)
        until(lambda: execute(url, "select count(*) from effects")[0][0] > 0, "a first run", 30)
        for _ in range(kills):
            victim = leader(running)
            ahead_s = chance.uniform(0.0, 0.5)
            due = int(time.time()) + 2
            time.sleep(max(0.0, due - ahead_s - time.time()))
            killed_before.append(due * 1_000_000)
            if freeze_s:
                victim.process.send_signal(signal.SIGSTOP)
                victim.leads = False
                time.sleep(freeze_s)
                victim.process.send_signal(signal.SIGCONT)
            else:
                victim.kill()
                victim.close()
                running.remove(victim)
                number += 1
                running.append(kind(url, name=f"n{number}", **told))
        last = max(killed_before)
        until(lambda: (execute(url, "select max(due_us) from effects")[0][0] or 0) > last, "a run after the last", 60)
    _judge(url, report, killed_before)
    return report


def _judge(url: str, report: Report, killed_before: list[int]) -> None:
    effects = sorted(execute(url, "select due_us, at_us from effects"))
    dues = [due for due, _ in effects]
    report.twice = sorted({due for due in dues if dues.count(due) > 1})
    report.early = sum(at < due for due, at in effects)
    report.starts_ms = [(at - due) / 1000 for due, at in effects]
    first = dict(reversed(effects))
    report.after_kills_ms = [(first[due] - due) / 1000 for due in killed_before if due in first]
    report.lost = [due for due in range(dues[0], dues[-1], 1_000_000) if due not in first]
    with contextlib.suppress(tenure.ConfigError):  # a peer has no tables
        report.unaccounted = unaccounted(url)
