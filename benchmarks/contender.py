"""A process that stands for roles and says when it leads: what the benchmarks kill and time.

contender.py tenure ROLES     a Tenure node; prints "ready", then "lead NANOSECONDS" when it leads every role
contender.py writer           a Tenure node that writes fenced while it leads; also prints "wrote NANOSECONDS", once
contender.py transactions     a Tenure node that leads and then times fenced transactions; prints "took NANOSECONDS"
contender.py floor            a bare waiter in pg_advisory_lock or GET_LOCK: the least that any crash failover can take
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def say(word: str) -> None:
    print(word, time.clock_gettime_ns(time.CLOCK_BOOTTIME), flush=True)


def tenure_node(roles: int) -> None:
    import tenure

    with tenure.Node(os.environ["TENURE_URL"], ttl=30) as node:
        elections = [node.election(f"role-{number}") for number in range(roles)]
        while not node.member_id:
            time.sleep(0.001)
        time.sleep(0.3)  # its candidacies are written and its watcher has looked
        say("ready")
        for election in elections:
            election.wait()
        assert all(election.is_leader for election in elections)
        say("lead")
        sys.stdin.read()


def writer() -> None:
    import tenure
    from tests.support.store_by_hand import connected

    url = os.environ["TENURE_URL"]
    with tenure.Node(url, ttl=30) as node, connected(url) as connection:
        election = node.election("billing")
        while not node.member_id:
            time.sleep(0.001)
        time.sleep(0.3)
        say("ready")
        term = election.wait()
        assert election.is_leader
        say("lead")
        for number in itertools.count():
            term.fence(connection)
            connection.execute("insert into invoices values (%s)", (number,))
            connection.commit()
            if number == 0:
                say("wrote")


def transactions() -> None:
    import tenure

    with tenure.Node(os.environ["TENURE_URL"], ttl=30) as node, node.lead("role", timeout=60) as term:
        say("ready")
        say("lead")
        taken = []
        for _ in range(20):
            before = time.perf_counter_ns()
            with term.transaction() as transaction:
                transaction.execute("select 1")
            taken.append(time.perf_counter_ns() - before)
        print("took", round(statistics.median(taken)), flush=True)
        sys.stdin.read()


def floor() -> None:
    url = os.environ["TENURE_URL"]
    if url.startswith("mysql"):
        floor_of_mariadb(url)
        return
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        say("ready")
        connection.execute("select pg_advisory_lock(4711)")
        say("lead")
        sys.stdin.read()


def floor_of_mariadb(url: str) -> None:
    import pymysql

    from tenure.databases.mysql.connect import parse_url

    with pymysql.connect(**parse_url(url)) as connection, connection.cursor() as cursor:
        say("ready")
        cursor.execute("select get_lock('4711', 1000)")
        say("lead")
        sys.stdin.read()


if __name__ == "__main__":
    if sys.argv[1] == "floor":
        floor()
    elif sys.argv[1] == "writer":
        writer()
    elif sys.argv[1] == "transactions":
        transactions()
    else:
        tenure_node(int(sys.argv[2]))
