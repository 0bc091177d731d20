"""The program of one process with an APScheduler that works while its node leads; see `summer_time` in scenarios.py.

Its zone is `Test/Change`, from PYTHONTZPATH. Two jobs are due each second, and write the due time and the present one
(seconds since 1970) in the transactions of their runs.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from typing import Any
from zoneinfo import ZoneInfo

from apscheduler.schedulers.background import BackgroundScheduler

import tenure
from tenure.integrations.apscheduler import current_run, leader_only
from tests.support.node_process import Program, die_with_parent


class Scheduled(Program):
    commands = ("start",)

    def start(self, at_ns: str | None = None) -> dict[str, Any]:
        assert at_ns is None
        self.node = tenure.Node(name=self.name, **self.settings)
        scheduler = BackgroundScheduler(timezone=ZoneInfo("Test/Change"))
        scheduler.add_job(self.work, "interval", seconds=1, id="interval")
        scheduler.add_job(self.work, "cron", second="*", id="cron")
        leader_only(scheduler, self.node, delivery="at-least-once")
        self.node.start()
        self.election = self.node.election("scheduler")
        self.election.on_event(self.heard)
        return {"pid": os.getpid()}

    def work(self) -> None:
        run = current_run()
        with run.transaction() as transaction:
            values = (run.job, round(run.due.timestamp()), time.time())
            transaction.execute("insert into runs (job, due, at) values (?, ?, ?)", values)


def main() -> None:
    die_with_parent()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s.%(msecs)03d %(name)s: %(message)s", datefmt="%H:%M:%S")
    Scheduled(json.loads(sys.argv[1])).run()
    os._exit(0)


if __name__ == "__main__":
    main()
