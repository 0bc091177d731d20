"""Step-by-step election beside what it replaces: eight cases, run against both, and a table of what happened.

    python benchmarks/side_by_side.py            eight processes, 200 elections each, ten rounds of creating tables
    python benchmarks/side_by_side.py --quick    the same cases, shortened

`gemstone_utils.election` 0.4.1 is what `tenure.manual` was asked to cover. Each case runs real processes on a real
database; what a case does is written once, in terms of the few calls that both have (`PEERS`).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psycopg
import sqlalchemy.orm  # noqa: F401 - for the children

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.servers import PostgresServer  # noqa: E402

PEERS = {
    "gemstone_utils 0.4.1": """
from uuid import UUID, uuid5, NAMESPACE_DNS
from gemstone_utils import election
from gemstone_utils.db import get_session, init_db
def open_database(url):
    init_db(url.replace("postgresql://", "postgresql+psycopg://"))
def id_of(name):
    return uuid5(NAMESPACE_DNS, name)
def elect(name, **more):
    return election.elect(id_of(name), **more)
def leads(answer, name):
    return answer == id_of(name)
def is_leader(name, **more):
    return election.is_leader(id_of(name), **more)
def register(name):
    election.register_candidate(id_of(name))
def unregister(name):
    election.unregister_candidate(id_of(name))
def expire(seconds):
    election.set_expire(seconds)
def candidates():
    return election.list_candidates()
def fence(answer, session):
    pass  # there is none
def load(session):
    return session.get(election.ElectionLeader, "default")
""",
    "tenure": """
from sqlalchemy import create_engine
from sqlalchemy.orm import Session
from tenure import manual
def open_database(url):
    global engine
    engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    manual.use(url)
    manual.leader()
def get_session():
    return Session(engine, expire_on_commit=False)
def elect(name, **more):
    return manual.elect(name, **more)
def leads(answer, name):
    return answer is not None and answer.name == name
def is_leader(name, **more):
    return manual.is_leader(name, **more)
def register(name):
    manual.register_candidate(name)
def unregister(name):
    manual.unregister_candidate(name)
def expire(seconds):
    manual.set_expire(seconds)
def candidates():
    return manual.list_candidates()
def fence(answer, session):
    answer.fence(session)
def load(session):
    return manual.leader(session=session)
""",
}

COMMON = """
import os, signal, sys, threading, time
url, me = sys.argv[1], sys.argv[2]
def say(word):
    print(word, flush=True)
"""

SHIFTED = """
import datetime, time
real, genuine = time.time, datetime.datetime
time.time = lambda: real() + 11
class Kind(type):
    def __instancecheck__(cls, thing):
        return isinstance(thing, genuine)
class Shifted(datetime.datetime, metaclass=Kind):
    @classmethod
    def now(cls, zone=None):
        return genuine.fromtimestamp(time.time(), zone)
datetime.datetime = Shifted
"""


@dataclass(frozen=True)
class Size:
    """How much of everything."""

    processes: int = 8
    elections: int = 200
    rounds: int = 10
    expire: int = 3


FULL, QUICK = Size(), Size(processes=3, elections=10, rounds=1, expire=1)
PATIENCE_S = 60


class Child:
    """A program in a process of its own: forked, so that it need not load SQLAlchemy and psycopg again."""

    def __init__(self, program: str, *arguments: str) -> None:
        theirs_in, ours_in = os.pipe()
        ours_out, theirs_out = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.dup2(theirs_in, 0)
            os.dup2(theirs_out, 1)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            os.closerange(3, 100)
            os._exit(_execute(program, arguments))
        os.close(theirs_in)
        os.close(theirs_out)
        self.stdin = os.fdopen(ours_in, "w")
        self.stdout = os.fdopen(ours_out)

    def go_on(self) -> None:
        self.stdin.write("\n")
        self.stdin.flush()

    def finish(self) -> list[str]:
        """Wait for the end; return what it said, and the word `crashed` if it did."""
        said = self.stdout.read().split("\n")[:-1]
        return said + (["crashed"] if self._wait() else [])

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self._wait()

    def _wait(self) -> int:
        _, status = os.waitpid(self.pid, 0)
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        self.stdout.close()
        return status


def _execute(program: str, arguments: tuple[str, ...]) -> int:
    sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
    sys.argv = ["", *arguments]
    warnings.simplefilter("ignore")
    signal.alarm(PATIENCE_S)
    try:
        exec(compile(program, "program", "exec"), {})
    except BaseException:  # noqa: BLE001 - the parent sees that it crashed
        return 1
    sys.stdout.flush()
    return 0


class Peer:
    """One of the two."""

    def __init__(self, name: str) -> None:
        self.name = name

    def start(self, program: str, url: str, me: str = "one", before: str = "") -> Child:
        return Child(COMMON + before + PEERS[self.name] + program, url, me)

    def run(self, program: str, url: str, me: str = "one", before: str = "") -> list[str]:
        return self.start(program, url, me, before).finish()

    def crowd(self, program: str, url: str, size: int) -> list[list[str]]:
        """Run several at once: each says `ready` and goes on with the others."""
        crowd = [self.start(program, url, f"worker-{number}") for number in range(size)]
        for one in crowd:
            one.stdout.readline()
        for one in crowd:
            one.go_on()
        return [one.finish() for one in crowd]


Urls = Callable[[], str]
Outcome = tuple[bool, str]

MANY = """
open_database(url)
say("ready")
sys.stdin.readline()
for _ in range({elections}):
    try:
        answer = elect(me)
        say("leads" if leads(answer, me) else "follows")
    except Exception as error:
        say(type(error).__name__)
"""


def many_elections(peer: Peer, size: Size, sqlite: Urls, postgres: Urls) -> Outcome:
    """SQLite: everybody elects at once; one leads, nobody fails."""
    url = sqlite()
    peer.run("open_database(url)", url)
    answers = peer.crowd(MANY.format(elections=size.elections), url, size.processes)
    said = [word for answer in answers for word in answer]
    failed = [word for word in said if word not in ("leads", "follows")]
    leaders = sum("leads" in answer for answer in answers)
    wanted = size.processes * size.elections
    if len(said) == wanted and not failed and leaders == 1:
        return True, f"{wanted} calls, 1 leader"
    lost = wanted - len(said) + len(failed)
    return False, f"{lost} of {wanted} calls failed ({', '.join(sorted(set(failed))) or 'crashed'}), {leaders} led"


def leader_asks(peer: Peer, size: Size, sqlite: Urls, postgres: Urls) -> Outcome:
    """SQLite: `is_leader` on the leader."""
    program = """
open_database(url)
elect(me)
try:
    say(str(is_leader(me)))
except Exception as error:
    say(type(error).__name__)
"""
    (said,) = peer.run(program, sqlite())
    return said == "True", said


LEADER = """
open_database(url)
expire({expire})
elect(me)
say("ready")
sys.stdin.readline()
"""
SUCCESSOR = """
open_database(url)
expire({expire})
begun, trouble = time.monotonic(), "nobody"
while time.monotonic() < begun + {expire} + 10:
    try:
        if leads(elect(me), me):
            trouble = ""
            break
    except Exception as error:
        trouble = type(error).__name__
        if time.monotonic() > begun + {expire} + 0.5:
            break  # by now it should be possible
    time.sleep(0.1)
say(trouble or f"{{time.monotonic() - begun:.1f}} s")
"""


def killed(peer: Peer, size: Size, sqlite: Urls, postgres: Urls) -> Outcome:
    """SQLite: the leader is killed; another leads after the expiry."""
    url = sqlite()
    leader = peer.start(LEADER.format(expire=size.expire), url, "first")
    leader.stdout.readline()
    leader.kill()
    (said,) = peer.run(SUCCESSOR.format(expire=size.expire), url, "second")
    done = said.endswith(" s")
    return done, f"succeeded after {said} (expiry {size.expire} s)" if done else f"never succeeded: {said}"


def created_at_once(peer: Peer, size: Size, sqlite: Urls, postgres: Urls) -> Outcome:
    """SQLite: several processes create the tables at once, several times."""
    program = """
say("ready")
sys.stdin.readline()
open_database(url)
say("done")
"""
    answers = [answer for _ in range(size.rounds) for answer in peer.crowd(program, sqlite(), size.processes)]
    crashed = sum("done" not in answer for answer in answers)
    return not crashed, f"{crashed} of {len(answers)} crashed"


def clock_ahead(peer: Peer, size: Size, sqlite: Urls, postgres: Urls) -> Outcome:
    """PostgreSQL: a caller whose clock is 11 s ahead meets a living leader with an expiry of 10 s."""
    url = postgres()
    leader = peer.start(LEADER.format(expire=10), url, "first")
    leader.stdout.readline()
    program = """
open_database(url)
expire(10)
say("robbed" if leads(elect(me), me) else "held")
"""
    (said,) = peer.run(program, url, "second", SHIFTED)
    leader.go_on()
    leader.finish()
    return said == "held", "the living leader was robbed" if said == "robbed" else "the leader goes on"


PAUSED = """
from sqlalchemy import text
open_database(url)
expire({expire})
answer = elect(me)
assert is_leader(me)
say("inside")
os.kill(os.getpid(), signal.SIGSTOP)
try:
    with get_session() as session, session.begin():
        fence(answer, session)
        session.execute(text("insert into work values (:name)"), {{"name": me}})
    say("written")
except Exception as error:
    say(type(error).__name__)
"""


def stale_write(peer: Peer, size: Size, sqlite: Urls, postgres: Urls) -> Outcome:
    """PostgreSQL: the leader is stopped between its check and its write, succeeded, and goes on."""
    url = postgres()
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("create table work (name text)")
    paused = peer.start(PAUSED.format(expire=size.expire), url, "old")
    paused.stdout.readline()
    _wait_until_stopped(paused.pid)
    (said,) = peer.run(SUCCESSOR.format(expire=size.expire), url, "new")
    os.kill(paused.pid, signal.SIGCONT)
    (answer,) = paused.finish()
    if not said.endswith(" s"):
        return False, f"never succeeded: {said}"
    return answer == "Fenced", "the stale write was committed" if answer == "written" else f"refused: {answer}"


def _wait_until_stopped(pid: int) -> None:
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)


def shared_session(peer: Peer, size: Size, sqlite: Urls, postgres: Urls) -> Outcome:
    """PostgreSQL: `session=` inside an open transaction, and again while the application holds what was read."""
    program = """
from sqlalchemy import text
open_database(url)
with get_session() as session:
    session.execute(text("select 1"))
    try:
        elect(me, session=session)
        session.rollback()
        say("kept" if is_leader(me) else "works, rolls back")
    except Exception as error:
        say(type(error).__name__)
elect(me)
with get_session() as session:
    held = load(session)
    assert is_leader(me, session=session)
    session.commit()
    unregister(me)
    elect("another")
    say("stale answer" if is_leader(me, session=session) else "fresh answer")
"""
    said = peer.run(program, postgres())
    return said == ["works, rolls back", "fresh answer"], "; ".join(said)


def same_id(peer: Peer, size: Size, sqlite: Urls, postgres: Urls) -> Outcome:
    """PostgreSQL: the same id is registered from eight threads at once, five times."""
    program = """
open_database(url)
failures = []
def run(begin, name):
    begin.wait()
    try:
        register(name)
    except Exception as error:
        failures.append(type(error).__name__)
for number in range(5):
    begin = threading.Barrier(8)
    threads = [threading.Thread(target=run, args=(begin, f"{me}-{number}")) for _ in range(8)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
say(f"{len(failures)} of 40 failed" + (f" ({', '.join(sorted(set(failures)))})" if failures else "")
    + f", {len(candidates())} candidates")
"""
    (said,) = peer.run(program, postgres())
    return said == "0 of 40 failed, 5 candidates", said


CASES = (many_elections, leader_asks, killed, created_at_once, clock_ahead, stale_write, shared_session, same_id)


def compare(size: Size) -> dict[str, list[Outcome]]:
    """Run every case against both; return what happened, in the order of the cases."""
    with tempfile.TemporaryDirectory() as directory, PostgresServer(fsync=False) as server:
        numbers = iter(range(1000))

        def sqlite() -> str:
            return f"sqlite:///{directory}/{next(numbers)}.db"

        return {name: [case(Peer(name), size, sqlite, server.create_database) for case in CASES] for name in PEERS}


def table(outcomes: dict[str, list[Outcome]]) -> str:
    lines = ["| case | " + " | ".join(outcomes) + " |", "|---|" + "---|" * len(outcomes)]
    for number, case in enumerate(CASES):
        cells = [
            f"{'yes' if passed else 'NO'}: {said}" for passed, said in (column[number] for column in outcomes.values())
        ]
        lines.append(f"| {number + 1}. {(case.__doc__ or '').strip().rstrip('.')} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the same cases, shortened")
    outcomes = compare(QUICK if parser.parse_args().quick else FULL)
    print(table(outcomes))
    sys.exit(not all(passed for passed, _ in outcomes["tenure"]))


if __name__ == "__main__":
    main()
