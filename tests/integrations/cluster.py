"""Real replicas of an application that are killed, stopped and started again, and what their runs prove.

    def test_every_due_second_runs_at_most_once(postgres_url, tmp_path, record_property):
        command = [sys.executable, "-m", "tests.integrations.some_app"]
        with Replicas(postgres_url, tmp_path, command, role="scheduler") as replicas:
            runs = replicas.torment(record_property)
            assert runs.duplicates == []
            assert runs.stale == []

The application is started four times, from the root of the checkout (which is on PYTHONPATH, too), with TENURE_URL,
TENURE_NAME (`replica-0` to `replica-3`) and TENURE_TTL in its environment. It has a job that is due every second and
writes each run, with the moment at which it was *due*, into the table `runs` of the same database:

    connection.execute(INSERT_RUN, ("tick", due, term.token, os.environ["TENURE_NAME"], os.getpid()))

fenced or not, as the application likes. The table has no unique constraint, so nothing but the application keeps a
second run out. An application without tokens writes null.

`torment()` waits until a replica works. Then, at random moments, it kills four times (kill -9), mostly the leader and
once in four a standby, and starts that replica again; and twice it stops the leader (SIGSTOP) until its lease is over
and another leads, and continues it. The seed is printed; KILLS, PAUSES and SEED in the environment change what is done.
After each fault it waits until a replica *works*: until a run was written that was due after the fault. In the end all
replicas get SIGTERM. It fails if no replica works again, if a replica ends by itself, or if one ignores SIGTERM.
tests/integrations/runs.py describes what it returns. If the block of `with` fails, the output of all processes is
printed.

* `command` and `environment` are the same for all, or functions of the replica's number (a port for each, say).
* Tenure's tables say who leads: the member that holds `role`, by its pid, which may be a child of the replica (a worker
  of gunicorn). For anything else pass `who`, a function that returns the pid of the leader, or None, and the pids of
  the others: `replicas.who_ran` takes the writer of the last run for the leader.
* One replica that has several workers, all of them members, is `size=1`: its workers are killed and stopped, and the
  master must replace them.
* A process that is needed beside the replicas and left alone (Celery's worker) is started by `replicas.beside(…)`.
* Each step of `torment()` is a method (start, kill, pause, wait_for_work, terminate, runs), for tests
  that do something else, such as a rolling restart.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import psycopg

from tenure import Registry, TenureError
from tests.integrations.runs import Fault, Run, Runs, clock, now

if TYPE_CHECKING:
    from typing_extensions import Self

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 45.0
"""How long a test waits for what should happen: long enough for a slow machine, and too short for a hang."""
LOOK_EVERY_S = 0.1
TTL_S = 2.0
TAIL = 6000

TABLE = (
    "create table runs (job text, due timestamptz, token bigint, replica text, pid int,"
    " at timestamptz default clock_timestamp(), n bigserial)"
)
INSERT_RUN = "insert into runs (job, due, token, replica, pid) values (%s, %s, %s, %s, %s)"
SELECT_RUNS = "select job, due, token, replica, pid, at from runs order by n"

# The kernel kills a replica with the test: one that is stopped would outlive it.
DIE_WITH_PARENT = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)
os.execvp(sys.argv[1], sys.argv[1:])
"""

Who = Callable[[], tuple[int | None, list[int]]]


class Process:
    """One process of a cluster, with its output in a file; the same one when it was killed and started again."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], directory: Path) -> None:
        self.name, self.log = name, directory / f"{name}.log"
        self._command = [sys.executable, "-ISc", DIE_WITH_PARENT, *map(str, command)]
        self._environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **environment}
        self.start()

    def start(self) -> None:
        self.told_to_end = False
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=ROOT, env=self._environment,
                start_new_session=True,
            )  # fmt: skip

    @property
    def pids(self) -> list[int]:
        """Its own and those of its descendants."""
        try:
            parent = psutil.Process(self.process.pid)
            return [parent.pid, *(child.pid for child in parent.children(recursive=True))]
        except psutil.NoSuchProcess:
            return [self.process.pid]

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def wait(self, timeout: float = PATIENCE_S) -> int | None:
        """Its exit code; None if it has not ended in time."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def output(self) -> str:
        return f"--- {self.name}\n{self.log.read_text(errors='replace')[-TAIL:]}"

    def close(self) -> None:
        """Kill it and its session, running, stopped or without its parent."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(PATIENCE_S)


class Replicas:
    """Some replicas of an application on one PostgreSQL. See the top of the file."""

    def __init__(
        self,
        url: str,
        directory: Path,
        command: Sequence[str] | Callable[[int], Sequence[str]],
        *,
        role: str = "scheduler",
        namespace: str | None = None,
        size: int = 4,
        environment: Mapping[str, str] | Callable[[int], Mapping[str, str]] | None = None,
        ttl: float = TTL_S,
        every: float | Mapping[str, float] = 1.0,
        who: Who | None = None,
    ) -> None:
        self.url, self.directory, self.role, self.namespace = url, directory, role, namespace
        self.size, self.ttl, self.every = size, ttl, every
        self.replicas: list[Process] = []
        self.faults: list[Fault] = []
        self.who = who or self.who_leads
        self._command, self._environment = command, environment or {}
        self._beside: list[Process] = []
        self.execute(TABLE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for process in self._all_processes:
            process.close()
        if kind is not None:
            self.explain()

    def torment(
        self,
        record_property: Callable[[str, object], None] | None = None,
        *,
        kills: int = 4,
        pauses: int = 2,
        seed: int | None = None,
    ) -> Runs:
        """Start all replicas, do them harm, end them; return their runs. KILLS, PAUSES and SEED take precedence."""
        kills, pauses = int(os.environ.get("KILLS", kills)), int(os.environ.get("PAUSES", pauses))
        seed = int(os.environ.get("SEED", random.randrange(2**32) if seed is None else seed))
        print(f"seed {seed}: {kills} kills, {pauses} pauses")
        chance = random.Random(seed)
        standbys = kills // 4
        faults = ["kill a standby"] * standbys + ["kill the leader"] * (kills - standbys) + ["pause"] * pauses
        chance.shuffle(faults)
        self.start()
        for fault in faults:
            time.sleep(chance.uniform(0.5, 2.5))
            if fault == "pause":
                self.pause(chance.uniform(0.2, 1.5))
            else:
                self.kill(chance, standby=fault == "kill a standby")
        time.sleep(chance.uniform(0.5, 2.5))
        self.terminate()
        runs = self.runs()
        print(runs.statement)
        if record_property is not None:
            record_property("gaps", runs.statement)
        return runs

    # -- the steps --

    def start(self) -> None:
        """Start all of them, and wait until one works."""
        self.replicas = [Process(f"replica-{n}", *self._how(n), self.directory) for n in range(self.size)]
        self.wait_for_work(datetime.fromtimestamp(0, timezone.utc))

    def beside(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> Process:
        """Start a process that is left alone, and killed on leaving the block unless the test has ended it."""
        process = Process(name, command, environment or {}, self.directory)
        self._beside.append(process)
        return process

    def kill(self, chance: random.Random, *, standby: bool = False) -> None:
        """Kill -9 the leader, or another replica; start it again, and wait until another works."""
        leader = self.wait_for_leader()
        others = [pid for pid in self.who()[1] if pid != leader] or [
            replica.process.pid for replica in self.replicas if leader not in replica.pids
        ]
        standby = standby and bool(others)
        victim = chance.choice(others) if standby else leader
        replica = self._signal(victim, signal.SIGKILL, "a standby" if standby else "the leader")
        at = now()
        if victim == replica.process.pid:
            replica.wait()
            replica.start()
        if not standby:
            self.wait_for_leader(other_than=victim)
        self.wait_for_work(at)

    def pause(self, longer: float = 0.5) -> None:
        """Stop the leader until another leads, for its lease and `longer` at least; then let it go on."""
        leader = self.wait_for_leader()
        stopped = time.monotonic()
        self._signal(leader, signal.SIGSTOP, "the leader")
        try:
            self.wait_for_leader(other_than=leader)
            time.sleep(max(0.0, stopped + self.ttl + longer - time.monotonic()))
        finally:
            at = now()
            self._signal(leader, signal.SIGCONT, "the leader that was")
        self.wait_for_work(at)

    def wait_for_leader(self, other_than: int | None = None) -> int:
        """Wait until a living process leads; return its pid."""
        found: list[int] = []

        def leads() -> bool:
            pid, _ = self.who()
            found[:] = [pid] if pid is not None and pid != other_than and psutil.pid_exists(pid) else []
            return bool(found)

        self.wait_until(leads, "a leader" if other_than is None else f"a successor of pid {other_than}")
        return found[0]

    def wait_for_work(self, since: datetime) -> None:
        """Wait for a run that was due and written after this moment."""
        query = "select exists (select from runs where at > %s and due > %s)"
        self.wait_until(lambda: self.execute(query, (since, since))[0][0], f"a run after {clock(since)}")

    def wait_until(self, condition: Callable[[], object], what: str, timeout: float = PATIENCE_S) -> None:
        """Wait until it holds; fail if it does not in time, or if a replica ends meanwhile."""
        deadline = time.monotonic() + timeout
        while not condition():
            self.check_running(*self._all_processes)
            assert time.monotonic() < deadline, f"waited {timeout:g} s for {what}"
            time.sleep(LOOK_EVERY_S)

    def check_running(self, *processes: Process) -> None:
        """Fail if one of them has ended without having been told to."""
        for process in processes:
            by_itself = process.ended and not process.told_to_end
            assert not by_itself, f"{process.name} ended by itself with {process.process.returncode}"

    def terminate(self, *replicas: Process, within: float = PATIENCE_S) -> None:
        """Send SIGTERM to these replicas, or to all, and see that they end as they should."""
        going = replicas or tuple(self.replicas)
        self.check_running(*going)
        for replica in going:
            replica.told_to_end = True
            replica.process.send_signal(signal.SIGTERM)
        codes = {replica.name: replica.wait(within) for replica in going}
        wrong = {name: code for name, code in codes.items() if code not in (0, -signal.SIGTERM, 128 + signal.SIGTERM)}
        assert not wrong, f"after SIGTERM these ended with another code, or not at all (None): {wrong}"

    def runs(self) -> Runs:
        """What they have done so far."""
        return Runs([Run(*row) for row in self.execute(SELECT_RUNS)], self.every, self.faults)

    # -- who leads --

    def who_leads(self) -> tuple[int | None, list[int]]:
        """The pid of the role's leader, and those of the other members, as the tables of Tenure know them."""
        try:
            with Registry(self.url, namespace=self.namespace) as registry:
                members = registry.members()
        except TenureError:  # the tables are not there yet
            return None, []
        leaders = [member.pid for member in members if self.role in member.leads]
        return (leaders[0] if leaders else None), [member.pid for member in members if member.pid not in leaders]

    def who_ran(self) -> tuple[int | None, list[int]]:
        """The pid of the one that wrote the last run."""
        rows = self.execute("select pid from runs order by n desc limit 1")
        return (rows[0][0] if rows else None), []

    # -- insides --

    @property
    def _all_processes(self) -> list[Process]:
        return [*self.replicas, *self._beside]

    def _how(self, number: int) -> tuple[Sequence[str], Mapping[str, str]]:
        command = self._command(number) if callable(self._command) else self._command
        environment = self._environment(number) if callable(self._environment) else self._environment
        own = {"TENURE_URL": self.url, "TENURE_NAME": f"replica-{number}", "TENURE_TTL": f"{self.ttl:g}"}
        return command, {**own, **environment}

    def _signal(self, pid: int, number: signal.Signals, whom: str) -> Process:
        """Send a signal to a process of these replicas, and to no other; return its replica."""
        owners = [replica for replica in self.replicas if pid in replica.pids]
        assert owners, f"pid {pid} is not a process of these replicas"
        print(f"{clock(now())} {number.name} to {whom}: {owners[0].name}, pid {pid}")
        if number != signal.SIGCONT:
            self.faults.append(Fault(f"{number.name} of {whom}", now()))
        os.kill(pid, number)
        return owners[0]

    def execute(self, text: str, parameters: Sequence[Any] = ()) -> list[Any]:
        """Run a statement on a new connection."""
        with psycopg.connect(self.url, autocommit=True, application_name="tests") as connection:
            cursor = connection.execute(text, parameters)
            return cursor.fetchall() if cursor.description else []

    def explain(self) -> None:
        """Print their output: pytest shows it beside the failure."""
        for process in self._all_processes:
            print(process.output())
