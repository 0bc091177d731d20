"""A schedule on the leader: each tick runs once, whoever leads. Start it in three terminals, and kill one.

TENURE_URL=postgresql://localhost/app python examples/schedule.py
"""

import tenure

schedule = tenure.Schedule(zone="Europe/Paris")


@schedule.every("1 s")
def tick(run: tenure.Run) -> None:
    print(f"{run.due.astimezone():%H:%M:%S} under token {run.term.token}, {run.missed} missed", flush=True)


@schedule.cron("30 2 * * *", delivery="at-least-once", within="6 h")
def invoices(run: tenure.Run) -> None:
    with run.transaction() as transaction:  # committed together with the mark that the run is done
        transaction.execute("select 1")


node = tenure.Node()  # the database of TENURE_URL
node.leader_only("scheduler", schedule)
node.run()  # until SIGINT or SIGTERM
