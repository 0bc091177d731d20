"""A candidate's process as the benchmark sees it: started, heard, killed, stopped and woken."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from benchmarks.guards import cpu_s
from benchmarks.peers import Entrant

ROOT = Path(__file__).parents[2]
NEVER_S = 120.0
"""How long anything is waited for."""


def now_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class Late(Exception):
    """Something has not happened in time."""


class Contender:
    """One process."""

    def __init__(self, entrant: Entrant, url: str, name: str) -> None:
        self.entrant, self.url, self.name = entrant, url, name
        self.started_ns = now_ns()
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **getattr(entrant.home, "ENVIRONMENT", {})}
        self.process = subprocess.Popen(
            self._command(url, name),
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._events: list[tuple[str, int, str]] = []
        self._changed = threading.Condition()
        self._helpers: list[subprocess.Popen[bytes]] = []
        threading.Thread(target=self._listen, daemon=True).start()

    @property
    def foreign(self) -> bool:
        """Whether it is no program of ours: it says something when it leads, and ends when it does no more."""
        return hasattr(self.entrant.home, "command")

    def _command(self, url: str, name: str) -> list[str]:
        if self.foreign:
            return list(self.entrant.home.command(url, name, **self.entrant.options))
        options = json.dumps(self.entrant.options)
        return [sys.executable, "-m", "benchmarks.peers.program", self.entrant.module, url, name, options]

    def _listen(self) -> None:
        assert self.process.stdout
        if self.foreign:
            self._happened("ready", now_ns())
        for number, line in enumerate(self.process.stdout):
            if not self.foreign:
                word, at, *more = line.split()
                self._happened(word, int(at), " ".join(more))
            elif number == 0:
                self._happened("lead", now_ns())
        self._happened("lost", now_ns())

    def _happened(self, word: str, at_ns: int, more: str = "") -> None:
        with self._changed:
            self._events.append((word, at_ns, more))
            self._changed.notify_all()

    def when(self, word: str, seconds: float = NEVER_S) -> int:
        """Return when it said so, as soon as it has; raise Late if it does not."""
        return self._heard(word, seconds)[1]

    def _heard(self, word: str, seconds: float) -> tuple[str, int, str]:
        with self._changed:
            found = self._changed.wait_for(lambda: next((one for one in self._events if one[0] == word), None), seconds)
        if found is None:
            raise Late(f"{self.entrant.label} did not say {word!r} within {seconds:g} s")
        return found

    def said(self, word: str) -> int | None:
        """Return when it said so; None if it has not."""
        with self._changed:
            return next((at for one, at, _ in self._events if one == word), None)

    def signal(self, number: int) -> int:
        """Return when it was sent."""
        at = now_ns()
        self.process.send_signal(number)
        return at

    def resign(self, to: str = "") -> int:
        """Return when it began to hand over, to the one who is named or to anybody."""
        if hasattr(self.entrant.home, "resign_command"):
            began = now_ns()
            self._helpers.append(
                subprocess.Popen(self.entrant.home.resign_command(self.url), stdout=subprocess.DEVNULL)
            )
            return began
        if self.foreign:
            return self.signal(signal.SIGINT)
        self._tell(f"resign {to}")
        return self.when("resigning")

    def calm(self) -> None:
        """Have it look at itself less often, for its cost at rest."""
        if not self.foreign:
            self._tell("calm")

    def check_ns(self, count: int) -> float:
        """Return how long one am-I-leader check takes."""
        self._tell(f"check {count}")
        return float(self._heard("checked", NEVER_S)[2])

    def spans(self) -> list[tuple[int, int, str, str]]:
        """Return what it recorded: from when until when, in which lane, and what."""
        self._tell("trace")
        self.when("traced")
        with self._changed:
            recorded = [(at, more.split()) for word, at, more in self._events if word == "span"]
        return [(began, int(ended), lane, what) for began, (ended, lane, what) in recorded]

    def cpu_s(self) -> float:
        return cpu_s(self.process.pid)

    def _tell(self, line: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def close(self) -> None:
        for process in (self.process, *self._helpers):
            process.kill()
            process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream:
                stream.close()


def first_to_lead(waiting: list[Contender], seconds: float = NEVER_S) -> tuple[Contender, int] | None:
    """Return who of them leads first, and since when; None if nobody does in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        led = [(at, one) for one in waiting if (at := one.said("lead")) is not None]
        if led:
            at, one = min(led, key=lambda pair: pair[0])
            return one, at
        time.sleep(0.005)
    return None
