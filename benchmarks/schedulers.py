"""Lost and doubled due times over the same kills: Tenure's schedule beside what people use instead.

    python benchmarks/schedulers.py [--kills 50] [--rounds 5] [--only NAME] [--write]

Three replicas on one PostgreSQL; a job is due every second. The leader is killed up to half a second before a due time,
at the same moments for each contender, and another process is started at once. A due time is lost if no run was made
for it and no record says why. How late a run started after a kill is known only where it was not lost: `of` counts
those. Every round visits everybody, so that a machine that is busy now and then is so for all; `load` is that of the
machine, in the mean of the rounds. `scheduler_peers` has the others, and says for each what its runs are.

Celery's beats need `redis-server`; they are left out where there is none. Not here: supercronic, which is not to be had
as a package of Debian, PyPI or npm.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import scheduler_peers  # noqa: E402
from benchmarks.peers import report, servers  # noqa: E402
from tests.support.arguments import at_least, run  # noqa: E402
from tests.support.servers import PostgresServer, postgres_installations  # noqa: E402
from tests.verification.schedule import kills  # noqa: E402

RESULTS = Path(__file__).with_name("RESULTS.md")
HEAD = """
| scheduler | kills | runs | lost | twice | start after a kill: median | longest | of | load |
|---|---|---|---|---|---|---|---|---|
""".strip()

NOTES = """
*lost*: due times without a run.
*start after a kill*: how late the run began that was due next, where it was not lost; *of* counts those.
*load*: of the machine, in the mean of the rounds.
Where it is far above the number of cores, a process takes seconds to start, and a scheduler that waits loses more.
""".strip()


class PeerReplica(kills.Replica):
    """A process of a peer's."""

    def command(self, url: str, options: dict[str, Any]) -> list[str]:
        program = [sys.executable, "-m", "benchmarks.scheduler_peers.program"]
        return [*program, options["module"], url, json.dumps(options["settings"])]


@dataclass(frozen=True)
class Contender:
    """A scheduler, set in one way."""

    name: str
    kind: type[kills.Replica] = kills.Replica
    count: int = kills.REPLICAS
    server: str | None = None
    packages: tuple[str, ...] = ("tenure",)
    module: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def measure(self, url: str, number: int, seed: int) -> tuple[kills.Report, float]:
        """Kill its leader so many times; return what became of the due times, and the load of the machine."""
        with self._surroundings() as options:
            made = kills.kill_around_due_times(url, number, seed, kind=self.kind, count=self.count, **options)
        return made, os.getloadavg()[0]

    def row(self, measured: list[tuple[kills.Report, float]]) -> str:
        """Return its line of the table."""
        reports = [one for one, _ in measured]
        after = sorted(ms for one in reports for ms in one.after_kills_ms)
        figures = (
            sum(one.kills for one in reports),
            sum(len(one.starts_ms) for one in reports),
            sum(len(one.lost) for one in reports),
            sum(len(one.twice) for one in reports),
            f"{statistics.median(after):.0f} ms" if after else "-",
            f"{after[-1]:.0f} ms" if after else "-",
            len(after),
            f"{statistics.mean(load for _, load in measured):.1f}",
        )
        return f"| {self.name} | {' | '.join(map(str, figures))} |"

    @contextlib.contextmanager
    def _surroundings(self) -> Iterator[dict[str, Any]]:
        if self.module is None:
            yield {}
        elif self.server is None:
            yield {"module": self.module, "settings": self.settings}
        else:
            with contextlib.ExitStack() as stack:
                started = servers.Servers(stack)[self.server]
                place = {"redis_url": f"redis://127.0.0.1:{started.port}/0", "directory": str(started.directory)}
                yield {"module": self.module, "settings": {**self.settings, **place}}


def contenders() -> Iterator[Contender]:
    yield Contender("tenure.Schedule")
    for module in scheduler_peers.MODULES:
        home = importlib.import_module(f"benchmarks.scheduler_peers.{module}")
        for variant, settings in home.VARIANTS.items():
            yield Contender(
                ", ".join(filter(None, (home.NAME, variant))),
                PeerReplica,
                getattr(home, "REPLICAS", {}).get(variant, kills.REPLICAS),
                getattr(home, "SERVER", None),
                home.PACKAGES,
                module,
                settings,
            )


def commit() -> str:
    described = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(described, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def section(found: list[Contender], rows: list[str], command: str, at: str) -> str:
    """Return what RESULTS.md says."""
    packages = dict.fromkeys(package for one in found for package in one.packages)
    kinds = dict.fromkeys(["postgres", *(one.server for one in found if one.server)])
    releases = [f"Python {platform.python_version()}", *map(servers.version, kinds)]
    releases += [f"{package} {importlib.metadata.version(package)}" for package in packages]
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    facts = (
        f"when: {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC, at commit {at}",
        f"machine: {os.cpu_count()} cores, {system}",
        f"releases: {', '.join(releases)}",
        f"command: `{command}`",
    )
    listed = "\n".join(f"- {fact}" for fact in facts)
    table = "\n".join([HEAD, *rows])
    return f"{report.SCHEDULERS}\n\n{listed}\n\n{table}\n\n{NOTES}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=at_least(1), default=50)
    parser.add_argument("--rounds", type=at_least(1), default=5, help="over which the kills are spread")
    parser.add_argument("--only", default="", help="those whose name has this in it")
    parser.add_argument("--write", action="store_true", help=f"put the table into {RESULTS.name}, too")
    told = parser.parse_args()
    told.rounds = min(told.rounds, told.kills)
    if told.write and told.only:
        parser.error(f"--write: {RESULTS.name} is of everybody")
    asked = [one for one in contenders() if told.only in one.name]
    if not asked:
        parser.error(f"--only: nobody has {told.only!r} in its name")
    for server in {one.server for one in asked if one.server}:
        if shutil.which(f"{server}-server") is None:
            asked = [one for one in asked if one.server != server]
            print(f"left out: whoever needs {server}, which is not installed", file=sys.stderr)
    at = commit() if told.write else ""
    command = f"python benchmarks/schedulers.py --kills {told.kills} --rounds {told.rounds}"
    measured: dict[str, list[tuple[kills.Report, float]]] = {one.name: [] for one in asked}
    with PostgresServer(postgres_installations()[0]) as server:
        for number in range(told.rounds):
            few = told.kills // told.rounds + (number < told.kills % told.rounds)
            for one in asked:
                measured[one.name].append(one.measure(server.create_database(), few, 15 + number))
            rows = [one.row(measured[one.name]) for one in asked]
            print("\n".join([f"After {number + 1} of {told.rounds} rounds:", "", HEAD, *rows, ""]), flush=True)
            if told.write:
                made = section(asked, rows, f"{command} --write", at)
                RESULTS.write_text(report.without_schedulers(RESULTS) + made)
    return 0


if __name__ == "__main__":
    run(main, "schedulers")
