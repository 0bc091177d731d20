"""``python -m tests.verification.simulation``: run many seeds, or one again with its trace."""

from __future__ import annotations

import argparse
import os
import sys
import time

from tests.verification.simulation.runner import plan, run, run_many
from tests.verification.simulation.scenarios import ALL


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.verification.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="run this one again and print its trace")
    parser.add_argument("--scenario", choices=ALL, help="this scenario only")
    parser.add_argument("--sql", action="store_true", default=None, help="the real SQL instead of the model")
    parser.add_argument("--model", action="store_false", dest="sql", help="the model only")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    options = parser.parse_args()
    names = [options.scenario] if options.scenario else ALL
    if options.seed is not None:
        name, seed, sql = plan(options.seed, names, sql=options.sql)
        outcome = run(name, seed, sql=sql, trace=True)
        print(outcome.tail(len(outcome.trace)))
        print(f"{name} seed {seed}{' (sql)' if sql else ''}: {outcome.violation or 'no violation'}")
        return 1 if outcome.violation else 0
    began = time.monotonic()
    jobs = [plan(seed, names, sql=options.sql) for seed in range(options.first, options.first + options.seeds)]
    bad = run_many(jobs, options.processes)
    print(f"{len(jobs)} seeds, {len(bad)} violations, {time.monotonic() - began:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
