"""Starts the processes of ``contender.py``, kills them, and times who leads next."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

PROGRAM = Path(__file__).with_name("contender.py")


class Contender:
    """One child process that waits to lead."""

    def __init__(self, url: str, *arguments: str, within: Sequence[str] = ()) -> None:
        """``within`` is the command that runs it, in another network say."""
        self.process = subprocess.Popen(
            [*within, sys.executable, str(PROGRAM), *arguments],
            env={**os.environ, "TENURE_URL": url},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.led_at_ns = 0

    def ready(self) -> None:
        self._expect("ready")

    def lead(self) -> int:
        self.led_at_ns = self._expect("lead")
        return self.led_at_ns

    def wrote(self) -> int:
        return self._expect("wrote")

    def took_ms(self) -> float:
        return self._expect("took") / 1e6

    def kill(self) -> int:
        at = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        self.process.send_signal(signal.SIGKILL)
        return at

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream:
                stream.close()

    def _expect(self, word: str) -> int:
        assert self.process.stdout
        line = self.process.stdout.readline().split()
        if not line or line[0] != word:
            raise RuntimeError(f"a contender said {line} instead of {word!r}")
        return int(line[1])


@contextlib.contextmanager
def contenders(url: str, count: int, *arguments: str, within: Sequence[str] = ()) -> Iterator[list[Contender]]:
    """Start contenders; the first of the list leads."""
    started = [Contender(url, *arguments, within=within)]
    try:
        started[0].ready()
        started[0].lead()
        started.extend(Contender(url, *arguments, within=within) for _ in range(count - 1))
        for contender in started[1:]:
            contender.ready()
        time.sleep(1.2)  # a wait slice: every member has looked at the ring as it is now
        yield started
    finally:
        for contender in started:
            contender.close()


def first_to_lead(waiting: list[Contender]) -> Contender:
    """Return the first of them that led. Whoever it is, only one says so."""
    readable, _, _ = select.select([c.process.stdout for c in waiting], [], [], 60)
    first = next(c for c in waiting if c.process.stdout in readable)
    first.lead()
    return first


def failover_ms(url: str, nodes: int, roles: int = 1, within: Sequence[str] = ()) -> float:
    with contenders(url, nodes, "tenure", str(roles), within=within) as cluster:
        killed_at = cluster[0].kill()
        return (first_to_lead(cluster[1:]).led_at_ns - killed_at) / 1e6


def floor_ms(url: str) -> float:
    with contenders(url, 2, "floor") as pair:
        killed_at = pair[0].kill()
        return (pair[1].lead() - killed_at) / 1e6
