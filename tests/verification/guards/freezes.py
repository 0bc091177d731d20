"""Freeze the leader of an application past its lease, again and again, and count what it writes when it wakes up.

    python -m tests.verification.guards --writes 1000 --framework django
    python -m tests.verification.guards --writes 1000 --framework sqlalchemy --no-guard
    python -m tests.verification.guards --writes 1000 --framework sqlalchemy --fenced

Three processes each write while they believe that they lead; see ``writer``. The leader is frozen by SIGSTOP at a
random moment between its look at the term and its last write. It is woken up when a successor has written. Every write
that it begins after that is a stale attempt. A write that began before the freeze and lands after it makes a stale row,
but is not counted as an attempt.

An invoice carries the token of its writer's term. An invoice that comes after one with a higher token is stale. The
order is that of the numbers that the table gives to its rows.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tenure
from tests.support.store_by_hand import execute, until
from tests.verification.guards.writer import ROLE, THINK_S

ROOT = Path(__file__).resolve().parents[3]
WRITERS = 3
TTL_S = 2.0
TABLES = {
    "postgresql": "create table invoices (id bigserial primary key, token bigint not null)",
    "mysql": "create table invoices (id bigint auto_increment primary key, token bigint not null)",
}


class Writer:
    """One process of the application."""

    def __init__(self, url: str, **options: Any) -> None:
        self.said: list[dict[str, Any]] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.verification.guards.writer", json.dumps(options)],
            env=os.environ | {"TENURE_URL": url},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.listener = threading.Thread(target=self._listen, daemon=True)
        self.listener.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        self.said.extend(map(json.loads, self.process.stdout))

    def thinks(self, token: int) -> bool:
        """Whether it thinks under this term, and has written a batch under it before."""
        said = [one["what"] for one in self.said if one["token"] == token]
        return "wrote" in said and said[-1] == "thinking"

    def is_over(self, token: int) -> bool:
        return any(one["what"] == "over" and one["token"] == token for one in self.said)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait(10)
        self.listener.join(10)
        if self.process.stdout is not None:
            self.process.stdout.close()


@dataclass
class Report:
    """What was written, and what was not."""

    guarded: bool
    fenced: bool
    freezes: int = 0
    stale: Counter[str] = field(default_factory=Counter)
    """The fates of the stale attempts, as their writers saw them."""
    leaders: Counter[str] = field(default_factory=Counter)
    """The fates of the writes of batches after which the writer still led."""
    failures: list[str] = field(default_factory=list)
    rows: int = 0
    stale_rows: int = 0
    """Invoices that come after one with a higher token."""

    @property
    def passed(self) -> bool:
        """Whether it went as it should. A control run lets stale writes land, or it proves nothing."""
        if not (self.guarded or self.fenced):
            return self.stale_rows > 0
        all_passed = set(self.leaders) == {"landed"} if self.fenced else True
        return self.stale_rows == 0 and self.stale["landed"] == 0 and all_passed

    def __str__(self) -> str:
        kind = f"{'guarded' if self.guarded else 'not guarded'}, {'fenced' if self.fenced else 'fence forgotten'}"
        return (
            f"{kind}: {self.freezes} freezes, {self.stale.total()} stale attempts, {self.stale['refused']} refused, "
            f"{self.stale['failed']} failed, {self.stale['landed']} landed; {self.stale_rows} of {self.rows} rows are "
            f"stale; the leaders' own writes: {self.leaders['landed']} of {self.leaders.total()} landed"
        )


@contextlib.contextmanager
def writers(url: str, **options: Any) -> Iterator[list[Writer]]:
    running: list[Writer] = []
    try:
        running.extend(Writer(url, name=f"w{number}", ttl=TTL_S, **options) for number in range(WRITERS))
        yield running
    finally:
        for writer in running:
            writer.close()


def freeze_leaders(
    url: str, writes: int, framework: str, *, guarded: bool, fenced: bool = False, seed: int = 16
) -> Report:
    """Freeze leaders until they have made so many stale attempts to write."""
    chance = random.Random(seed)
    report = Report(guarded, fenced)
    execute(url, TABLES[url.partition(":")[0]])
    with tenure.Node(url):  # makes Tenure's tables
        pass
    if guarded:
        with tenure.Registry(url) as registry:
            registry.guard("invoices", ROLE)
    with writers(url, framework=framework, fenced=fenced) as running:
        while report.stale.total() < writes:
            _freeze(url, _leader(url, running), chance, report)
            report.freezes += 1
    for one in (one for writer in running for one in writer.said if one["what"] == "wrote" and one["leads"]):
        _count(report.leaders, report.failures, [fate for _, fate in one["fates"]])
    _judge(url, report)
    return report


def _highest(url: str) -> int:
    return int(execute(url, "select coalesce(max(token), 0) from invoices")[0][0])


def _leader(url: str, running: list[Writer]) -> Writer:
    """Return the writer that thinks under the latest term."""

    def found() -> Writer | None:
        token = _highest(url)
        return next((one for one in running if one.thinks(token)), None)

    return until(found, "a leader that thinks", 60)


def _freeze(url: str, victim: Writer, chance: random.Random, report: Report) -> None:
    token = victim.said[-1]["token"]
    time.sleep(chance.uniform(0.0, 1.2 * THINK_S))
    victim.process.send_signal(signal.SIGSTOP)
    until(lambda: _highest(url) > token, "a write of the successor", 60)
    woken = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    victim.process.send_signal(signal.SIGCONT)
    until(lambda: victim.is_over(token), "the end of the term of a frozen leader", 60)
    fates = [fate for one in victim.said if one["token"] == token for fate in one.get("fates", [])]
    _count(report.stale, report.failures, [fate for began, fate in fates if began > woken])


def _count(counter: Counter[str], failures: list[str], fates: list[str]) -> None:
    counter.update(fate.partition(":")[0] for fate in fates)
    failures.extend(fate for fate in fates if fate.startswith("failed"))


def _judge(url: str, report: Report) -> None:
    highest = 0
    for (token,) in execute(url, "select token from invoices order by id"):
        report.rows += 1
        report.stale_rows += token < highest
        highest = max(highest, token)
