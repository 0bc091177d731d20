"""Freeze the leader of an application whose author forgot the fence; see ``freezes``.

Exits with 1 if a stale write landed in the guarded table, or if none landed in the control run.
"""

from __future__ import annotations

import argparse
import sys
import time

from tests.verification.guards.applications import FRAMEWORKS
from tests.verification.guards.freezes import freeze_leaders
from tests.verification.schedule.__main__ import database


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--writes", type=int, default=1000, help="how many stale writes are to be tried")
    parser.add_argument("--framework", choices=tuple(FRAMEWORKS), action="append", help="both, if none is named")
    parser.add_argument("--database", choices=("postgres", "mariadb"), default="postgres")
    parser.add_argument("--seed", type=int, default=16)
    parser.add_argument("--no-guard", action="store_true", help="the control: the same without a guard")
    parser.add_argument("--fenced", action="store_true", help="the same with the mistake mended: every write is fenced")
    options = parser.parse_args()
    passed = True
    for framework in options.framework or FRAMEWORKS:
        began = time.monotonic()
        told = {"guarded": not options.no_guard, "fenced": options.fenced, "seed": options.seed}
        with database(options.database) as url:
            report = freeze_leaders(url, options.writes, framework, **told)
        print(f"{framework}, {options.database}, {report}; took {time.monotonic() - began:.0f} s", flush=True)
        for failure in sorted(set(report.failures)):
            print(f"  {failure}")
        passed = passed and report.passed
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
