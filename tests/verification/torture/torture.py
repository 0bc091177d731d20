"""A run: nemeses by the plan, a line of progress, and in the end every checker over what was recorded."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests import history as histories
from tests.faults import checkers, promotion
from tests.faults.arena import ARENAS, Arena
from tests.faults.catalogue import catalogue
from tests.faults.checkers import Fired, Harm, Recovery, SetResult, Struck
from tests.faults.nemeses import Bounds, Nemesis
from tests.faults.plan import Step, plan
from tests.faults.promotion import Promotion, promote
from tests.faults.watcher import Watcher
from tests.history import History, now_ns

ROLE = "scheduler"
MINUTES_EACH = 3
"""Every nemesis fires at least once in so many minutes."""
MINUTES_PROMOTION = 10
"""A promotion takes servers of its own: once in a run, and once more for every so many minutes."""


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
    sets: dict[str, SetResult]
    recoveries: list[Recovery]
    permitted: list[tuple[float, str]]
    harm: Harm
    ticks: int
    stale_ticks: int
    promotions: list[Promotion]
    checks: dict[str, list[str]]

    @property
    def violations(self) -> list[str]:
        return [one for found in self.checks.values() for one in found]


class Torture:
    """One run on one database in one mode. `run()` takes its time and returns the result."""

    def __init__(
        self, directory: Path, *, minutes: float, seed: int, database: str, takeover: str, ttl: float, only: list[str]
    ) -> None:
        self.directory, self.minutes, self.seed = directory, minutes, seed
        self.database, self.takeover, self.ttl, self.only = database, takeover, ttl, only
        self.least = max(1, int(minutes // MINUTES_EACH))
        self.steps: list[Struck] = []
        self.plans: list[str] = []
        self.problems: list[str] = []

    def run(self) -> Result:
        began = time.monotonic()
        with ARENAS[self.database](self.directory, ttl=self.ttl, takeover=self.takeover) as arena:
            self.arena: Arena = arena
            chosen = catalogue(self.database, arena.missing)
            self.nemeses = [one for one in chosen if not self.only or one.name in self.only]
            self.version = arena.version
            self.watcher = Watcher(arena)
            deadline, limit = began + self.minutes * 60, began + 2 * self.minutes * 60 + 120
            for step in plan(self.seed, self.nemeses, self.ttl):
                now = time.monotonic()
                if now > limit or (now > deadline and not self.seldom()):
                    break
                self.plans.append(str(step))
                self.strike(step, deadline - now)
            self.progress("a rest at the end", 0.0)
            harm = self.watcher.finish(2 * self.ttl, 2 * self.ttl)
            arena.stop_nodes()  # what is acknowledged from now on would be missing in the tables
            ledger = arena.final("select n, token, element from ledger order by n")
            ticks = arena.final("select n, token from ticks where token is not null order by n")
            sets = arena.final("select name, value from sets")
            recorded = arena.cluster.history
        promotions = list(self.promotions())
        return self.judge(recorded, harm, ledger, ticks, sets, promotions, time.monotonic() - began)

    def promotions(self) -> Iterator[Promotion]:
        if self.database == "postgres" and (not self.only or promotion.NAME in self.only):
            for number in range(1 + int(self.minutes // MINUTES_PROMOTION)):
                self.progress(promotion.NAME, 0.0)
                yield promote(self.directory / f"promotion-{number}", ttl=self.ttl, takeover=self.takeover)

    def seldom(self) -> list[str]:
        return checkers.seldom_fired(self.steps, [one.name for one in self.nemeses], self.least)

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
            if deed == "end" and one in began:
                struck.fired.append(Fired(one.name, one.target, began[one], now_ns(), one.bound(), one.cuts))
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
        promotions: list[Promotion],
        took_s: float,
    ) -> Result:
        bounds = Bounds(self.ttl, self.takeover)
        overlaps, permitted = checkers.judged_overlaps(recorded, self.steps, takeover=self.takeover, ttl=self.ttl)
        recoveries = checkers.recoveries(recorded, self.steps, bounds.in_company)
        results = checkers.set_results(recorded, sets)
        harm.xmin_bound_s += self.longest_stall_s()
        if any(nemesis.field == "clock" for nemesis in self.nemeses):
            harm.xmin_bound_s += self.ttl  # a step may take the server's time-outs away: then the node ends its wait
        checks = {
            "one leader": overlaps,
            "tokens only grow": histories.token_regressions(recorded),
            "no stale write": histories.stale_writes(recorded)
            + histories.ledger_regressions((n, token) for n, token, _ in ledger),
            "no acknowledged write is lost": checkers.lost_writes(recorded, (row[2] for row in ledger)),
            "the set workload": checkers.lost_updates(results),
            "someone leads again": checkers.late_recoveries(recoveries),
            "no harm": checkers.harm_done(harm),
            "every nemesis fired": self.seldom() + checkers.left_out(self.arena.missing),
            "the harness itself": self.problems,
        }
        if promotions:
            checks["promotion of a replica"] = [text for one in promotions for text in one.violations]
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
            sets=results,
            recoveries=recoveries,
            permitted=permitted,
            harm=harm,
            ticks=len(ticks),
            stale_ticks=checkers.unfenced_stale(ticks),
            promotions=promotions,
            checks=checks,
        )

    def longest_stall_s(self) -> float:
        return max(itertools.chain([0.0], (step.stalled_s for step in self.steps)))
