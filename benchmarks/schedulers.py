"""Lost and doubled due times over the same kills: Tenure's schedule beside what people write by hand.

    python benchmarks/schedulers.py [--kills 50]

Three replicas on one PostgreSQL; a job is due every second. The leader is killed up to half a second before a due time,
at the same moments for each contender. A due time is lost if no run was made for it and no record says why.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.support.servers import PostgresServer, postgres_installations  # noqa: E402
from tests.verification.schedule import kills  # noqa: E402

PEER = Path(__file__).with_name("scheduler_peer.py")


class PeerReplica(kills.Replica):
    """A process of the peer's."""

    def command(self, url: str, options: dict[str, object]) -> list[str]:  # noqa: ARG002
        return [sys.executable, str(PEER), url]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    told = parser.parse_args()
    contenders = {"tenure.Schedule": kills.Replica, "APScheduler, its job store, an advisory lock by hand": PeerReplica}
    print("| scheduler | kills | runs | lost | twice | start after a kill: median | longest |")
    print("|---|---|---|---|---|---|---|")
    for name, kind in contenders.items():
        with PostgresServer(postgres_installations()[0]) as server:
            report = kills.kill_around_due_times(server.create_database(), told.kills, kind=kind)
        after = sorted(report.after_kills_ms)
        median, longest = (f"{after[len(after) // 2]:.0f} ms", f"{after[-1]:.0f} ms") if after else ("-", "-")
        figures = report.kills, len(report.starts_ms), len(report.lost), len(report.twice), median, longest
        print(f"| {name} | {' | '.join(map(str, figures))} |", flush=True)


if __name__ == "__main__":
    try:
        main()
    except subprocess.SubprocessError as error:
        sys.exit(f"schedulers: {error}")
