"""Processes of ``tenure run`` for the tests, and a command that looks for survivors of the one before it.

The command is a plain shell script, so that it begins to look a millisecond after it was started. It writes a line when
it has begun, and one for every process of an earlier run that still lives; then it leaves a family behind that ignores
SIGTERM: a child, one in a session of its own, and one whose parent is gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tenure.registry import Registry
from tests.support import starter

TENURE = [sys.executable, "-m", "tenure"]
PATIENCE_S = 60.0

FAMILY = """
trap "" TERM
cd "$1"
for pid in $(cat pids 2>/dev/null); do
    if read -r _ _ state _ 2>/dev/null </proc/$pid/stat && [ $state != Z ] && [ $state != X ]; then
        echo alive $pid $state >>log
    fi
done
echo $$ >>pids
sleep 1000 & echo $! >>pids
setsid sleep 1000 & echo $! >>pids
(sleep 1000 & echo $! >>pids)
echo begin $2 $TENURE_TOKEN >>log
wait
"""


class Runner:
    """One process of ``tenure run``, by a fork: what the start itself can get wrong is tested with TENURE."""

    def __init__(
        self, *arguments: str | Path, url: str = "", environment: dict[str, str] | None = None, **options: Any
    ) -> None:
        settings = {**({"TENURE_URL": url} if url else {}), **(environment or {})}
        self.process = starter.start("tenure", "run", *map(str, arguments), env={**os.environ, **settings}, **options)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        return self.process.wait(PATIENCE_S)

    def close(self) -> None:
        """End it, and by its guard whatever it runs."""
        for number in (signal.SIGKILL, signal.SIGCONT):
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream:
                stream.close()


def eventually(condition: Callable[[], object], what: str) -> None:
    """Wait until the condition holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {PATIENCE_S:g} s for {what}"
        time.sleep(0.005)


class Contest:
    """Some runners that compete for the same role, each with the family as its command."""

    def __init__(self, directory: Path, url: str, size: int, *options: str) -> None:
        directory.mkdir()
        self.directory, self.url, self.role = directory, url, directory.name
        self._errors = (directory / "errors").open("wb")
        self.runners: dict[str, Runner] = {}
        for number in range(size):
            name = f"{self.role}-{number}"
            script = ["sh", "-c", FAMILY, "family", str(directory), name]
            mine = ["--role", self.role, "--name", name, *options]
            self.runners[name] = Runner(*mine, "--", *script, url=url, stderr=self._errors)

    @property
    def begun(self) -> list[str]:
        """Who began, in order."""
        return [line.split()[1] for line in self._log() if line.startswith("begin")]

    @property
    def survivors(self) -> list[str]:
        """Who lived on when the next began."""
        return [line for line in self._log() if line.startswith("alive")]

    @property
    def errors(self) -> str:
        """What they complained of, but for losses, and on SQLite for one that is stopped inside a write."""
        said = (self.directory / "errors").read_text().splitlines()
        known = ["leadership lost"]
        if self.url.startswith("sqlite"):
            known.append("database is locked; waiting for the database")
        return "\n".join(line for line in said if not any(words in line for words in known))

    def living(self) -> list[int]:
        """The processes of every command so far that still live."""
        pids = map(int, (self.directory / "pids").read_text().split())
        return [pid for pid in pids if Path(f"/proc/{pid}").exists()]

    def _log(self) -> list[str]:
        log = self.directory / "log"
        return log.read_text().splitlines() if log.exists() else []

    def close(self) -> None:
        for runner in self.runners.values():
            runner.close()
        self._errors.close()


def contested(registry: Registry, contest: Contest) -> bool:
    """Whether somebody stands for the role who could succeed its leader."""
    return any(info.role == contest.role and info.candidates > 1 for info in registry.roles())
