"""``python -m tests.verification.exploration``: look through the small worlds, then take the rules away one by one."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

from tests.support.arguments import at_least, run
from tests.verification.exploration.explorer import Explorer, Found
from tests.verification.exploration.mutations import NOT_SHOWN, SHOWN
from tests.verification.exploration.story import tell
from tests.verification.exploration.worlds import WORLDS, World
from tests.verification.mutations.test_mutations import MUTATIONS, Mutation, mutated

ROOT = Path(__file__).parents[3]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.verification.exploration", description=__doc__)
    parser.add_argument("--world", choices=[world.name for world in WORLDS], help="this world only")
    parser.add_argument("--faults", type=at_least(0), help="how many faults in one history, if not the world's number")
    parser.add_argument("--depth", type=at_least(1), help="go no further than this many steps")
    parser.add_argument("--mutation", choices=list(SHOWN), help="this rule taken away only")
    parser.add_argument("--processes", type=at_least(1), default=os.cpu_count(), help="each takes up to 2 GB")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        return show(options.inside)
    if options.world and options.mutation:
        parser.error("--world and --mutation: choose one of them; each rule has its own world")
    jobs: list[Callable[[], tuple[bool, str]]] = []
    for world in [world for world in WORLDS if not options.mutation and options.world in (None, world.name)]:
        budget = world.budget if options.faults is None else options.faults
        jobs.append(partial(explore, replace(world, budget=budget, deepest=options.depth or world.deepest)))
    rules = [rule for rule in MUTATIONS if not options.world and options.mutation in (None, rule.rule)]
    jobs.extend(partial(take_away, mutation) for mutation in rules)
    good = True
    with ProcessPoolExecutor(options.processes) as pool:
        for kept, text in pool.map(call, jobs):
            print(text, flush=True)
            good = good and kept
    print("explored: PASSED" if good else "explored: FAILED")
    return 0 if good else 1


def call(job: Callable[[], tuple[bool, str]]) -> tuple[bool, str]:
    """Do a job, in a process of the pool."""
    return job()


def explore(world: World) -> tuple[bool, str]:
    """Look through one world: whether it keeps the promises, and what to say about it."""
    found = Explorer(world).run()
    lines = [str(world), f"    {found}"]
    if found.exceptions:
        lines.append(
            f"    two believe at once in {found.exceptions:,} states, each of them the named case of instant mode"
        )
    if found.violation:
        lines.append(counter_example(found))
    return found.violation is None, "\n".join(lines)


def counter_example(found: Found) -> str:
    """How a promise is broken, step by step."""
    return "\n".join([f"    BROKEN: {found.violation}", *tell(found.space, found.way)])


def take_away(mutation: Mutation) -> tuple[bool, str]:
    """Take one rule away: whether the exploration shows what breaks (or is known not to), and what it says."""
    title = f"\nwithout the rule: {mutation.rule}"
    if mutation.rule in NOT_SHOWN:
        return True, f"{title}\n    not shown here: {NOT_SHOWN[mutation.rule]}"
    with tempfile.TemporaryDirectory() as directory:
        told = run_mutated(mutation, Path(directory))
    noticed = bool(re.search(f"BROKEN: .*({SHOWN[mutation.rule].breaks})", told))
    return noticed, f"{title}\n{told}    " + ("noticed, as it must be" if noticed else "NOT NOTICED")


def run_mutated(mutation: Mutation, directory: Path) -> str:
    """What the exploration says with the rule taken away, in a separate process."""
    copy = mutated(mutation, directory)
    path = os.pathsep.join([str(directory), str(ROOT)])
    result = subprocess.run(
        [sys.executable, "-m", "tests.verification.exploration", "--inside", str(copy) + os.pathsep + mutation.rule],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        cwd=directory,
    )
    return result.stdout + result.stderr


def show(inside: str) -> int:
    """In the process with the changed source: explore where that must show."""
    import tenure

    copy, rule = inside.split(os.pathsep)
    assert tenure.__path__[0] == copy, tenure.__path__
    found = Explorer(SHOWN[rule].world).run()
    print(f"    {found}")
    print(counter_example(found) if found.violation else "    nobody noticed")
    return 0


if __name__ == "__main__":
    run(main, "explore")
