"""Procrastinate: every worker defers the periodic task, and a unique constraint lets one of them do it for a due time.

A run is the task itself, on any of the workers. There is no leader, so the oldest worker that has run the task is
killed. Workers defer a task half a second after it is due, on purpose.
"""

from __future__ import annotations

import psycopg

from benchmarks.scheduler_peers import write

NAME = "procrastinate, three workers"
PACKAGES = ("procrastinate",)
VARIANTS = {"": {}}

LOCK = 15


def run(url: str) -> None:
    import procrastinate

    app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=url))
    with psycopg.connect(url, autocommit=True) as work:

        @app.periodic(cron="* * * * * *")  # the sixth field is for seconds
        @app.task(name="tick")
        def tick(timestamp: int) -> None:
            write(work, timestamp)
            print("elected", flush=True)

        # The workers start at the same time, and one of them makes the tables.
        with work.transaction():
            work.execute("select pg_advisory_xact_lock(%s)", [LOCK])
            if work.execute("select to_regclass('procrastinate_jobs')").fetchall() == [(None,)]:
                work.execute(app.schema_manager.get_schema())
        app.run_worker()
