"""A schedule on the leader. Start it in three terminals, and `kill -9` the process that ticks: another one goes on.

python examples/three_terminals.py    # on a SQLite file of this user; TENURE_URL names a server instead
"""

import os
import threading

import tenure

schedule = tenure.Schedule()
node = tenure.Node(name=f"process {os.getpid()}")
node.leader_only("ticker", schedule)


@schedule.every("1 s")
def tick(run: tenure.Run) -> None:
    print(f"{run.due.astimezone():%H:%M:%S}  tick under token {run.term.token}, {run.missed} missed", flush=True)


@node.everywhere
def tell(stop: threading.Event) -> None:
    election, told = node.election("ticker"), ""
    while not stop.wait(0.1):
        leader = election.leader()
        if leader and leader.name != told:
            told = leader.name
            hint = f", which is this one: try `kill -9 {os.getpid()}`" if told == node.name else ""
            print(f"{told} leads{hint}", flush=True)


node.run()  # until Ctrl-C or SIGTERM
