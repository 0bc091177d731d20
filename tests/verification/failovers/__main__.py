"""``make failovers``: the same fault of a Patroni cluster again and again, measured.

For each fault: how long the database took no writes by the route (a prober commits a bare insert every 25 ms), how long
nobody led, how many fenced writes were acknowledged, and how many of these are lost; beside it the same for writes
under a lease as one writes it by hand.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from pathlib import Path

from tests.support.arguments import at_least, run
from tests.support.memory import work_in_memory
from tests.support.patroni import FAULTS, why_unavailable
from tests.verification.failovers.measure import Plan, measure


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.verification.failovers", description=__doc__)
    parser.add_argument("--fault", choices=FAULTS, default="switchover")
    parser.add_argument("--count", type=at_least(1, int), default=20, help="how often")
    parser.add_argument("--replication", choices=["synchronous", "asynchronous"], default="synchronous")
    parser.add_argument("--route", choices=["hosts", "haproxy"], default="hosts", help="how nodes reach the primary")
    parser.add_argument("--ttl", type=at_least(1, float), default=10.0)
    parser.add_argument("--init", default="--max-ttl 10", help="options for `tenure init`, in one argument")
    parser.add_argument(
        "--beyond", type=at_least(0, float), default=None, help="fail if nobody leads for so much longer than the gap"
    )
    parser.add_argument("--out", type=Path, default=Path("build/failovers"))
    options = parser.parse_args()
    if reason := why_unavailable():
        print(f"failovers: NOT RUN: {reason}", file=sys.stderr)
        return 1 if os.environ.get("CI") else 0
    for name in [name for name in os.environ if name.startswith(("PG", "TENURE_"))]:
        del os.environ[name]
    work_in_memory()
    out = (options.out / f"{options.fault}-{options.replication}-{options.route}").resolve()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    init = tuple(shlex.split(options.init))
    plan = Plan(options.fault, options.count, options.replication, options.route, options.ttl, init)
    print(f"failovers: {plan}", flush=True)
    measured = measure(plan, out)
    if options.beyond is not None:
        measured.broken += [
            f"fault {number}: nobody led for {row.nobody_s:.2f} s, and the database was gone for {row.gap_s:.2f} s"
            for number, row in enumerate(measured.rows, 1)
            if row.beyond_s > options.beyond
        ]
    text = f"{measured.version}; {plan}\n\n{measured.table()}\n"
    (out / "table.md").write_text(text)
    print(f"\n{text}")
    for one in measured.broken:
        print(f"- {one}")
    print(f"failovers: {'FAILED' if measured.broken else 'PASSED'}: {len(measured.rows)} faults, {out / 'table.md'}")
    return 1 if measured.broken else 0


if __name__ == "__main__":
    run(main, "failovers")
