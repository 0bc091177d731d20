"""The program of one replica with a schedule. It writes each run to the database, in the transaction of the run or not.

`python -m tests.verification.schedule.replica '{"name": "a", "interval": 1, "delivery": "at-least-once"}'`, the
database in TENURE_URL. It says `elected` and `lost` on stdout, a line each, and ends with its parent.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

import tenure
from tests.support.node_process import die_with_parent
from tests.verification.torture.turned_clock import step_wall_clock

INSERT = "insert into effects (job, due_us, at_us, token, attempt) values (%s, %s, %s, %s, %s)"


def main(options: dict[str, Any]) -> None:
    die_with_parent()
    logging.basicConfig(level=logging.WARNING)
    step_wall_clock(options.get("wall_s", 0.0))  # the schedule must not depend on it
    where = {"namespace": options.get("namespace", "default"), "start": "wait" if "wait" in options else "raise"}
    node = tenure.Node(name=options["name"], ttl=options.get("ttl", 10.0), **where)
    insert = INSERT.replace("%s", "?") if node.database == "sqlite" else INSERT
    schedule = tenure.Schedule()

    # Every due time is to be run, however long the role was without a leader.
    @schedule.every(options["interval"], delivery=options["delivery"], missed="each", within="10 min", overlap="wait")
    def tick(run: tenure.Run) -> None:
        us = round(run.due.timestamp() * 1_000_000)
        values = (run.job, us, time.clock_gettime_ns(time.CLOCK_REALTIME) // 1000, run.term.token, run.attempt)
        if "pause_s" in options:
            time.sleep(options["pause_s"])  # to be stopped or killed in the middle of a run
        with run.transaction() as transaction:
            transaction.execute(insert, values)

    node.leader_only("scheduler", schedule)
    node.on_event(lambda event: print(type(event).__name__.lower(), event.token, flush=True))
    node.run()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
