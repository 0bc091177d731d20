"""Run one seed, or many on all cores."""

from __future__ import annotations

import gc
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

from tests.verification.simulation.core import Violation
from tests.verification.simulation.scenarios import SCENARIOS
from tests.verification.simulation.simulation import Simulation


@dataclass
class Outcome:
    """What one seed of one scenario gave."""

    scenario: str
    seed: int
    sql: bool
    violation: str | None = None
    events: int = 0
    simulated_s: float = 0.0
    elections: int = 0
    commits: int = 0
    exceptions: int = 0
    trace: list[tuple[float, str]] = field(default_factory=list)

    @property
    def replay(self) -> str:
        return f"python -m tests.verification.simulation --seed {self.seed} --scenario {self.scenario}" + (
            " --sql" if self.sql else ""
        )

    def tail(self, lines: int = 40) -> str:
        return "\n".join(f"{at:12.6f}  {text}" for at, text in self.trace[-lines:])


def run(scenario: str, seed: int, *, sql: bool = False, trace: bool = False) -> Outcome:
    """Run one seed of one scenario. An exception in the code under test is a violation as well."""
    story = SCENARIOS[scenario]
    simulation = Simulation(seed, scenario, sql=sql, max_ttl=story.max_ttl, loses_nothing=story.loses_nothing)
    outcome = Outcome(scenario, seed, sql)
    try:
        story.tell(simulation)
    except Violation as violation:
        outcome.violation = str(violation)
    except Exception:  # noqa: BLE001
        outcome.violation = traceback.format_exc()
    simulation.server.database.close()
    core, oracles = simulation.core, simulation.oracles
    outcome.events, outcome.simulated_s = core.events, core.now
    outcome.elections, outcome.commits, outcome.exceptions = oracles.elections, oracles.commits, oracles.exceptions
    if outcome.violation or trace:
        outcome.trace = core.trace()
    return outcome


def plan(seed: int, names: list[str], *, sql: bool | None) -> tuple[str, int, bool]:
    """Which scenario a seed runs, and on which store: every third is everything at once, every eighth is real SQL."""
    name = names[0] if seed % 3 == 0 else names[(seed - seed // 3) % len(names)]
    return name, seed, seed % 8 == 0 if sql is None else sql


def _one(job: tuple[str, int, bool]) -> Outcome:
    gc.collect()
    return run(job[0], job[1], sql=job[2])


def _without_pauses() -> None:
    """A seed is short and its garbage few: collecting between two of them is quicker."""
    gc.disable()
    gc.freeze()


def run_many(jobs: list[tuple[str, int, bool]], processes: int, *, progress: bool = True) -> list[Outcome]:
    """Run many; return those with violations."""
    began, done, bad, elections = time.monotonic(), 0, [], 0
    with ProcessPoolExecutor(processes, initializer=_without_pauses) as pool:
        for outcome in pool.map(_one, jobs, chunksize=8):
            done += 1
            elections += outcome.elections
            if outcome.violation:
                bad.append(outcome)
                print(
                    f"\nVIOLATION {outcome.scenario} seed {outcome.seed}: {outcome.violation}\n  {outcome.replay}",
                    flush=True,
                )
            if progress and (done % 50 == 0 or done == len(jobs)):
                rate = done / (time.monotonic() - began)
                print(
                    f"\r{done}/{len(jobs)} seeds, {len(bad)} violations, {elections} elections, {rate:.0f} seeds/s",
                    end="",
                    file=sys.stderr,
                )
    if progress:
        print(file=sys.stderr)
    return bad
