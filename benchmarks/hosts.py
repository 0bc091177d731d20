"""What a dead host in front of the primary costs, in a URL with several hosts, beside the same URL with a living one.

    python benchmarks/hosts.py [--rounds N]

The first host is a replica. It is up; or its server is frozen, so that the system accepts connections and nobody
answers; or packets to it are dropped, in a network namespace (as root, else that row is left out). The crash failover
is that of ``run``. A fenced transaction is the median of 20 of ``term.transaction()``, in a process that has just
started.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.contenders import contenders, failover_ms
from tests.support import network as networks
from tests.support.mariadb import MariaDbServer
from tests.support.servers import PostgresServer, Replica, postgres_installations

UP, FROZEN, DROPPED = "all hosts up", "first host frozen", "packets to the first host dropped"


@dataclass
class Found:
    """The samples of one kind of first host."""

    failovers_ms: list[float] = field(default_factory=list)
    transactions_ms: list[float] = field(default_factory=list)

    def sample(self, url: str, within: Sequence[str] = ()) -> None:
        self.failovers_ms.append(failover_ms(url, 3, within=within))
        with contenders(url, 1, "transactions", within=within) as (leader,):
            self.transactions_ms.append(leader.took_ms())


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def turned(kinds: Iterable[str], number: int) -> list[str]:
    """Return the kinds in another order each round: a new database keeps the server busy for a while."""
    order = list(kinds)
    return order[number % len(order) :] + order[: number % len(order)]


def with_first(url: str, host: str) -> str:
    login, _, rest = url.partition("@")
    return f"{login}@{host},{rest}"


def on_postgres(rounds: int) -> dict[str, Found]:
    """Measure each kind in turn, on one primary. In a namespace, if there may be one: the cable to a host is cut."""
    found = {UP: Found(), FROZEN: Found()}
    with contextlib.ExitStack() as stack:
        within: Sequence[str] = ()
        netns = None
        if networks.available():
            network = stack.enter_context(networks.Network())
            network.cut()
            netns = network.client
            within = ("ip", "netns", "exec", netns)
            found[DROPPED] = Found()
        primary = stack.enter_context(PostgresServer(postgres_installations()[0], netns=netns))
        replica = stack.enter_context(Replica(primary))
        for number in range(rounds):
            url = primary.create_database(f"hosts{number}")
            replica.catch_up()
            for what in turned(found, number):
                address = networks.SERVER_ADDRESS if what == DROPPED else replica.listen
                with frozen(replica.pid) if what == FROZEN else contextlib.nullcontext():
                    found[what].sample(with_first(url, f"{address}:{replica.port}"), within)
    return found


def on_mariadb(rounds: int) -> dict[str, Found]:
    """Measure each kind in turn, on one primary."""
    found = {UP: Found(), FROZEN: Found()}
    with contextlib.ExitStack() as stack:
        settings = {"innodb_flush_method": "O_DIRECT", "log_bin": "log"}
        primary, replica = (
            stack.enter_context(MariaDbServer(settings={**settings, "server_id": number})) for number in (1, 2)
        )
        replica.replicate_from(primary)
        primary.execute("grant slave monitor on *.* to tenure@'%'")
        for number in range(rounds):
            url = with_first(primary.create_database(), f"127.0.0.1:{replica.port}")
            replica.catch_up(primary)
            for what in turned(found, number):
                with frozen(replica.pid) if what == FROZEN else contextlib.nullcontext():
                    found[what].sample(url)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="how often each figure is measured")
    rounds = parser.parse_args().rounds
    on: dict[str, Callable[[int], dict[str, Found]]] = {"PostgreSQL": on_postgres, "MariaDB": on_mariadb}
    for where, measure in on.items():
        for what, one in measure(rounds).items():
            for figure, samples in (("crash failover", one.failovers_ms), ("transaction", one.transactions_ms)):
                print(f"{where}, {what}: {figure} {statistics.median(samples):.1f} ms, longest {max(samples):.1f} ms")


if __name__ == "__main__":
    main()
