"""Only the leader runs the scheduler; every replica answers. Start it several times, and end one with Ctrl-C.

TENURE_URL=postgresql://localhost/app python examples/plain_threads.py
"""

import threading

import tenure

node = tenure.Node()  # the database of TENURE_URL


@node.leader_only("scheduler")
def scheduler(term: tenure.Term) -> None:  # in a thread of its own; returns when this replica leads no more
    while not term.wait_lost(1):
        term.ensure()  # waits while the database is restarted; LeadershipLost if the term is over
        with term.transaction() as transaction:  # refused by the database if another has taken over
            transaction.execute("select 1")
        print(f"{node.name}: scheduled, under token {term.token}", flush=True)


@node.everywhere
def answers(stop: threading.Event) -> None:
    while not stop.wait(1):
        print(f"{node.name}: answering", flush=True)


node.run()  # until SIGINT or SIGTERM
