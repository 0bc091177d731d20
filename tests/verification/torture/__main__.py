"""``make torture``: break a real cluster by a plan, and check what it did."""

from __future__ import annotations

import argparse
import os
import random
import shutil
from pathlib import Path

from tenure.core import timing
from tests.support import patroni
from tests.support.arguments import at_least, run
from tests.verification.torture.arena import ARENAS
from tests.verification.torture.catalogue import CATALOGUES
from tests.verification.torture.report import SHOWN, report, verdict
from tests.verification.torture.scenarios import SCENARIOS
from tests.verification.torture.timeline import timeline
from tests.verification.torture.torture import Torture


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.verification.torture", description=__doc__)
    parser.add_argument("--minutes", type=at_least(0, float), default=3, help="how long at least")
    parser.add_argument("--seed", type=int, default=None, help="the plan of an earlier run")
    parser.add_argument("--database", choices=ARENAS, default="postgres")
    parser.add_argument("--takeover", choices=["strict", "instant"], default="instant")
    parser.add_argument("--ttl", type=at_least(1, float), default=4.0)
    parser.add_argument(
        "--drift", type=at_least(0, float), default=timing.DRIFT, help="how fast and slow node clocks are turned"
    )
    parser.add_argument("--only", nargs="+", default=[], help="these nemeses and no others")
    parser.add_argument("--schedule", action="store_true", help="run a schedule beside, and account for its due times")
    parser.add_argument(
        "--replication", choices=["synchronous", "asynchronous"], default="synchronous", help="on patroni"
    )
    parser.add_argument("--route", choices=["hosts", "haproxy"], default="hosts", help="on patroni")
    parser.add_argument("--init", default="", help="on patroni: more options for `tenure init`, in one argument")
    parser.add_argument("--out", type=Path, default=Path("build/torture"))
    options = parser.parse_args()
    known = [*(one.name for one in CATALOGUES[options.database]), *SCENARIOS[options.database]]
    for name in options.only:
        if name not in known:
            parser.error(f"--only: there is no {name!r} on {options.database}: choose from {', '.join(known)}")
    for name in [name for name in os.environ if name.startswith(("PG", "TENURE_"))]:
        del os.environ[name]
    seed = random.randrange(2**32) if options.seed is None else options.seed
    arena = {}
    if options.database == "patroni":
        if reason := patroni.why_unavailable():
            print(f"torture: NOT RUN: {reason}", flush=True)
            return 1 if os.environ.get("CI") else 0
        arena = {"replication": options.replication, "route": options.route, "init": options.init}
    where = [options.replication, options.route] if arena else []
    out = options.out.resolve() / "-".join([options.database, options.takeover, *where])
    shutil.rmtree(out, ignore_errors=True)
    (out / "records").mkdir(parents=True)
    print(f"torture: {options.database}, {options.takeover}, {options.minutes:g} minutes, seed {seed}", flush=True)
    result = Torture(
        out / "records",
        minutes=options.minutes,
        seed=seed,
        database=options.database,
        takeover=options.takeover,
        ttl=options.ttl,
        drift=options.drift,
        only=options.only,
        schedule=options.schedule,
        arena=arena,
    ).run()
    (out / "report.md").write_text(report(result))
    (out / "timeline.svg").write_text(timeline(result.history, result.steps, result.lanes, verdict(result)))
    print()
    for name, found in result.checks.items():
        for text in found[:SHOWN]:
            print(f"- {name}: {text}")
    print(f"report: {out / 'report.md'}\n{verdict(result)}", flush=True)
    return 1 if result.violations else 0


if __name__ == "__main__":
    run(main, "torture")
