"""A run: nemeses by the plan, a line of progress, and in the end every checker over what was recorded."""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tenure.core import timing
from tests.support import history as histories
from tests.support.history import History, now_ns
from tests.verification.schedule.beside import ScheduleBeside
from tests.verification.torture import checkers, scenarios
from tests.verification.torture.arena import ARENAS, Arena
from tests.verification.torture.catalogue import catalogue
from tests.verification.torture.checkers import Fired, Harm, Recovery, SetResult, Struck
from tests.verification.torture.nemeses import Bounds, Nemesis, PauseHolder
from tests.verification.torture.plan import Step, plan
from tests.verification.torture.scenarios import Outcome
from tests.verification.torture.watcher import Watcher

ROLE = "scheduler"
MINUTES_EACH = 3
"""Every nemesis fires at least once in so many minutes."""
ALONE_S = 8
"""What a step takes, about: a run in which every nemesis can have one deals the first deck one by one."""
SCENARIO_S = 15
"""What a scenario takes, about: a run has as many as fit into a quarter of it, in the order of the seed."""


@dataclass(kw_only=True)
class Result:
    """What a run has shown."""

    seed: int
    minutes: float
    database: str
    takeover: str
    ttl: float
    version: str
    took_s: float
    least: int
    history: History
    lanes: list[str]
    steps: list[Struck]
    plans: list[str]
    nemeses: Sequence[type[Nemesis]]
    missing: dict[str, str]
    never_alone: list[str]
    sets: dict[str, SetResult]
    recoveries: list[Recovery]
    permitted: list[tuple[float, str]]
    harm: Harm
    ticks: int
    stale_ticks: int
    lost: int
    told: dict[str, Any]
    outcomes: list[Outcome]
    checks: dict[str, list[str]]

    @property
    def violations(self) -> list[str]:
        return [one for found in self.checks.values() for one in found]


class Torture:
    """One run on one database in one mode. `run()` takes its time and returns the result."""

    def __init__(
        self,
        directory: Path,
        *,
        minutes: float,
        seed: int,
        database: str,
        takeover: str,
        ttl: float,
        drift: float,
        only: list[str],
        schedule: bool = False,
        arena: Mapping[str, Any] | None = None,
    ) -> None:
        self.directory, self.minutes, self.seed, self.drift = directory, minutes, seed, drift
        self.database, self.takeover, self.ttl, self.only = database, takeover, ttl, only
        self.schedule = schedule
        self.told = arena or {}
        """What only this kind of arena is told."""
        self.least = max(1, int(minutes // MINUTES_EACH))
        self.steps: list[Struck] = []
        self.plans: list[str] = []
        self.problems: list[str] = []

    def run(self) -> Result:
        began = time.monotonic()
        outcomes = list(self.scenarios())
        told = {"ttl": self.ttl, "takeover": self.takeover, "drift": self.drift, **self.told}
        with ARENAS[self.database](self.directory, **told) as arena, contextlib.ExitStack() as stack:
            self.arena: Arena = arena
            chosen = catalogue(self.database, arena.missing)
            self.nemeses = [one for one in chosen if not self.only or one.name in self.only]
            self.version = arena.version
            self.watcher = Watcher(arena)
            self.alone_first = self.minutes * 60 >= ALONE_S * len(self.nemeses)
            due_times = stack.enter_context(ScheduleBeside(arena.cluster.url, self.ttl)) if self.schedule else None
            deadline, limit = began + self.minutes * 60, began + 2 * self.minutes * 60 + 120
            for step in plan(self.seed, self.nemeses, self.ttl, alone_first=self.alone_first):
                now = time.monotonic()
                if now > limit or (now > deadline and not self.seldom()):
                    break
                self.plans.append(str(step))
                self.strike(step, deadline - now)
                if due_times is not None:
                    due_times.disturb(step.number)
            self.progress("a rest at the end", 0.0)
            # First: this ends the schedule's processes, which no checker of the nodes knows.
            self.due_times = due_times.judge() if due_times is not None else None
            harm = self.watcher.finish(2 * self.ttl, 2 * self.ttl)
            arena.stop_nodes()  # what is acknowledged from now on would be missing in the tables
            ledger = arena.final("select n, token, element from ledger order by n")
            ticks = arena.final("select n, token from ticks where token is not null order by n")
            sets = arena.final("select name, value from sets")
            recorded = arena.cluster.history
        return self.judge(recorded, harm, ledger, ticks, sets, outcomes, time.monotonic() - began)

    def scenarios(self) -> Iterator[Outcome]:
        names = sorted(scenarios.SCENARIOS[self.database])
        random.Random(self.seed).shuffle(names)
        fit = max(1, int(self.minutes * 60 / 4 / SCENARIO_S))
        for name in names[:fit] if not self.only else [name for name in names if name in self.only]:
            self.progress(name, self.minutes * 60)
            told = {"ttl": self.ttl, "takeover": self.takeover}
            yield scenarios.play(self.database, name, self.directory / name, **told)

    def seldom(self) -> list[str]:
        """What the run still owes: how often each nemesis fires, and that it strikes alone where there is time."""
        owed = checkers.seldom_fired(self.steps, [one.name for one in self.nemeses], self.least)
        return owed + [f"{name} never struck alone" for name in self.never_alone() if self.alone_first]

    def never_alone(self) -> list[str]:
        return checkers.never_alone(self.steps, [one.name for one in self.nemeses])

    # -- a step --

    def strike(self, step: Step, left_s: float) -> None:
        """Do what a step says, then wait until all is well again."""
        by_name = {one.name: one for one in self.nemeses}
        doing = [by_name[planned.nemesis](self.arena, planned) for planned in step.planned]
        for one in doing:
            one.prepare()
        struck = Struck(step.number, now_ns())
        self.steps.append(struck)
        self.progress(" + ".join(one.name for one in doing), left_s)
        deeds = [(one.planned.at_s, 0, "begin", one) for one in doing]
        deeds += [(one.planned.at_s + one.planned.lasts_s, 1, "end", one) for one in doing]
        began: dict[Nemesis, int] = {}
        start = time.monotonic()
        for at_s, _, deed, one in sorted(deeds, key=lambda deed: deed[:2]):
            time.sleep(max(0.0, start + at_s - time.monotonic()))
            at = now_ns()
            try:
                if deed == "begin":
                    one.begin()
                    began[one] = at
                elif one in began:
                    one.end()
            except Exception as error:  # noqa: BLE001 - a harness that breaks says so and goes on
                self.problems.append(f"step {step.number}: {one.name} could not {deed}: {error!r}")
                began.pop(one, None)
            self.arena.cluster.recorder.fault(f"{one.name} {deed}", one.target, at_before=at)
            if deed == "end" and one in began and one.had_effect:
                struck.fired.append(Fired(one.name, one.target, began[one], now_ns(), one.bound(), tuple(one.cuts)))
        struck.healed = now_ns()
        struck.amiss = self.arena.settle()
        struck.settled = now_ns()
        struck.stalled_s = self.watcher.metronome.late_s(struck.since, struck.settled)
        self.arena.suffering.clear()
        self.watcher.rest()
        time.sleep(step.rest_s)

    def progress(self, what: str, left_s: float) -> None:
        fired = sum(len(step.fired) for step in self.steps)
        amiss = sum(step.amiss is not None for step in self.steps) + len(self.problems)
        line = f"{max(0.0, left_s):4.0f} s left | step {len(self.steps)} | {fired} faults | {amiss} amiss | {what}"
        if sys.stdout.isatty():
            print(f"\r{line[:118]:<118}", end="", flush=True)
        else:
            print(line, flush=True)

    # -- the judgement --

    def judge(
        self,
        recorded: History,
        harm: Harm,
        ledger: list[tuple],
        ticks: list[tuple],
        sets: list[tuple],
        outcomes: list[Outcome],
        took_s: float,
    ) -> Result:
        bounds = Bounds(self.ttl, self.takeover)
        overlaps, permitted = checkers.judged_overlaps(recorded, self.steps, takeover=self.takeover, ttl=self.ttl)
        recoveries = checkers.recoveries(recorded, self.steps, bounds.in_company)
        results = checkers.set_results(recorded, sets)
        harm.xmin_bound_s += self.longest_stall_s()
        harm.asks_per_s = checkers.busiest(recorded, self.steps)
        lost, may_lose = checkers.lost_writes(recorded, (row[2] for row in ledger)), self.arena.may_lose
        fields = {nemesis.field for nemesis in self.nemeses}
        if "clock" in fields:
            harm.xmin_bound_s += self.ttl  # a step may take the server's time-outs away: then the node ends its wait
            if "wire" in fields:  # and a node that is cut off by then cannot: the others do, when they have ended it
                harm.xmin_bound_s += timing.silence(self.ttl) + timing.SLICE_S
        checks = {
            "one leader": overlaps,
            "tokens only grow": histories.token_regressions(recorded),
            "no stale write": histories.stale_writes(recorded)
            + histories.ledger_regressions((n, token) for n, token, _ in ledger),
            "no acknowledged write is lost": [] if may_lose else lost,
            "the set workload": checkers.lost_updates(
                results, must_lose=PauseHolder in self.nemeses, may_lose=may_lose
            ),
            "someone leads again": checkers.late_recoveries(recoveries),
            "no harm": checkers.harm_done(harm),
            "every nemesis fired": self.seldom() + checkers.left_out(self.arena.missing),
            "the harness itself": self.problems,
        }
        if self.due_times is not None:
            checks["every due time is accounted for"] = self.due_times
        if outcomes:
            checks["scenarios"] = [f"{one.name}: {text}" for one in outcomes for text in one.violations]
        return Result(
            seed=self.seed,
            minutes=self.minutes,
            database=self.database,
            takeover=self.takeover,
            ttl=self.ttl,
            version=self.version,
            took_s=took_s,
            least=self.least,
            history=recorded,
            lanes=[slot.name for slot in self.arena.slots],
            steps=self.steps,
            plans=self.plans,
            nemeses=self.nemeses,
            missing=self.arena.missing,
            never_alone=self.never_alone(),
            sets=results,
            recoveries=recoveries,
            permitted=permitted,
            harm=harm,
            ticks=len(ticks),
            stale_ticks=checkers.unfenced_stale(ticks),
            lost=len(lost),
            told=dict(self.told),
            outcomes=outcomes,
            checks=checks,
        )

    def longest_stall_s(self) -> float:
        return max(itertools.chain([0.0], (step.stalled_s for step in self.steps)))
