"""``tenure run``: the command runs only while this process leads, and dies before its successor's begins."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psycopg
import pytest

import tenure
from tenure.cli.run.guard_process import GUARD
from tenure.cli.run.processes import PR_SET_CHILD_SUBREAPER
from tenure.election import HAND_OVER_S
from tenure.internals import engine_of
from tenure.registry import Registry
from tests.conftest import missing
from tests.support import starter
from tests.support.run_processes import PATIENCE_S, TENURE, Contest, Runner, contested, eventually
from tests.support.store_by_hand import connected

ROUNDS = int(os.environ.get("RUN_ROUNDS", "10"))
"""How often each order of death is tried; `RUN_ROUNDS=50 make test ARGS=…` for more."""


def run(*arguments, url, **options):
    """Run to the end, by a fork; return the finished process, with bytes for output."""
    environment = {**os.environ, "TENURE_URL": url}
    return starter.run("tenure", "run", *map(str, arguments), env=environment, timeout=PATIENCE_S, **options)


@pytest.fixture
def start(request):
    """Start runners; they, and whatever they run, end with the test."""
    with contextlib.ExitStack() as stack:

        def start(*arguments, url, **options):
            runner = Runner("--role", "work", *arguments, url=url, **options)
            stack.callback(runner.close)
            return runner

        yield start


def writes(path, text="begun"):
    """The beginning of a shell script that says that it runs."""
    return f"echo {text} >{path}; "


# --- the order of death ---------------------------------------------------------------------------------------


def kill(contest, name):
    """Kill the process alone."""
    contest.runners[name].signal(signal.SIGKILL)


def stop(contest, name):
    """Stop the process alone, without its guard and its command, until another process leads."""
    contest.runners[name].signal(signal.SIGSTOP)


def cut(contest, name):
    """Have the server end the connection on which the sentinel stands."""
    terminate(contest.url, name)


def terminate(url, name):
    text = "select pg_terminate_backend(control_pid) from tenure.members where name = %s and ended_at is null"
    with psycopg.connect(url, autocommit=True) as connection:
        assert connection.execute(text, (name,)).fetchall() == [(True,)]


def check_no_overlap(directory, url, fault, *, ttl, contests, size, rounds):
    """Go through terms of several roles side by side; each fault ends one, as soon as there is a successor."""
    with contextlib.ExitStack() as stack:
        all_ = [Contest(directory / f"role-{n}", url, size, "--ttl", ttl, "--restart") for n in range(contests)]
        for contest in all_:
            stack.callback(contest.close)
        eventually(lambda: all(contest.begun for contest in all_), "the first terms")
        registry = stack.enter_context(Registry(url))
        faults = dict.fromkeys(all_, (0, 0.0))
        deadline = time.monotonic() + 1.5 * PATIENCE_S + 5 * rounds
        while any(len(contest.begun) <= rounds for contest in all_):
            assert time.monotonic() < deadline, [(len(contest.begun), contest.errors) for contest in all_]
            for contest in all_:
                # Again after a while: a process that is stopped inside a write to SQLite keeps all others from leading.
                term, again_at = faults[contest]
                if len(contest.begun) > rounds or (term == len(contest.begun) and time.monotonic() < again_at):
                    continue
                for runner in contest.runners.values():
                    runner.signal(signal.SIGCONT)
                if contested(registry, contest):
                    faults[contest] = (len(contest.begun), time.monotonic() + 2.5 * float(ttl) + 1)
                    fault(contest, contest.begun[-1])
            time.sleep(0.05)
    assert [[*contest.survivors, contest.errors] for contest in all_] == [[""]] * contests
    eventually(lambda: not any(contest.living() for contest in all_), "all processes to be dead after the last runner")


@pytest.mark.long
def test_everything_that_the_command_started_is_dead_before_its_successor_begins_after_kill_9(tmp_path, one_url):
    rounds = ROUNDS // 2
    check_no_overlap(tmp_path, one_url, kill, ttl="10", contests=2, size=rounds + 1, rounds=rounds)


@pytest.mark.parametrize(
    ("url", "counts"), [("sqlite:///t.db", False), ("postgresql:///t", True), ("mysql:///t", True)]
)
def test_a_locked_database_is_an_error_of_a_contest_on_a_server(tmp_path, url, counts):
    contest = Contest(tmp_path / "role", url, 0)
    with contextlib.closing(contest):
        (contest.directory / "errors").write_text("tenure: role 'role': database is locked; waiting for the database\n")
        assert bool(contest.errors) is counts


@pytest.mark.long
def test_the_same_holds_if_the_process_alone_is_stopped_past_its_ttl(tmp_path, one_url):
    check_no_overlap(tmp_path, one_url, stop, ttl="1", contests=5, size=2, rounds=ROUNDS // 5)


@pytest.mark.long
def test_the_same_holds_if_the_server_cuts_the_connection(tmp_path, postgres_url):
    check_no_overlap(tmp_path, postgres_url, cut, ttl="5", contests=5, size=2, rounds=ROUNDS // 5)


def test_a_command_that_is_lost_with_the_database_is_ended_before_trust_ends(
    tmp_path, postgres_server, postgres_url, start
):
    begun, ended = tmp_path / "begun", tmp_path / "ended"
    script = f"trap 'echo >{ended}' TERM; {writes(begun)} while :; do sleep 0.01; done"
    runner = start("--ttl", "2", "--", "sh", "-c", script, url=postgres_url, stderr=subprocess.PIPE)
    eventually(begun.exists, "the command")
    postgres_server.stop("immediate")
    assert runner.wait() == 76
    said = runner.process.stderr.read()
    assert said.startswith(b"tenure: role 'work': leadership lost (")
    assert b"resigned" not in said


def test_a_restart_of_the_database_freezes_the_command_and_does_not_end_it(
    tmp_path, postgres_server, postgres_url, start
):
    log = tmp_path / "log"
    script = f"while :; do echo $$ $TENURE_TOKEN >>{log}; sleep 0.02; done"
    start("--ttl", "20", "--", "sh", "-c", script, url=postgres_url)
    eventually(lambda: log.exists() and log.read_text(), "the command")
    pid = int(log.read_text().split()[0])
    postgres_server.stop("fast")
    eventually(lambda: state(pid) == "T", "the command to be frozen")
    postgres_server.start()
    before = log.read_text()
    eventually(lambda: len(log.read_text()) > len(before), "the command to go on")
    assert set(log.read_text().splitlines()) == {before.splitlines()[0]}


def children(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def state(pid):
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return None


@pytest.fixture
def adopting():
    """Be the parent of orphans: else the kernel wakes a stopped guard, as it loses its parent."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    yield
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@pytest.mark.twin("postgres")
def test_the_sentinel_stands_until_the_guard_has_done_its_work(tmp_path, one_url, adopting):
    """The guard is stopped for a moment, so that it is late. No other process leads meanwhile."""
    contest = Contest(tmp_path / "role", one_url, 2, "--ttl", "30")
    with contextlib.closing(contest):
        eventually(lambda: contest.begun, "a leader")
        with Registry(one_url) as registry:
            eventually(lambda: contested(registry, contest), "another candidate")
        runner = contest.runners[contest.begun[0]]
        (guard,) = map(int, children(runner.process.pid))
        os.kill(guard, signal.SIGSTOP)
        try:
            runner.signal(signal.SIGKILL)
            time.sleep(1)
            assert len(contest.begun) == 1
        finally:
            os.kill(guard, signal.SIGCONT)
        eventually(lambda: len(contest.begun) == 2, "the successor")
        assert contest.survivors == []
        os.waitpid(guard, 0)


def test_a_node_whose_work_goes_on_does_not_end_its_old_membership(postgres_url):
    with tenure.Node(postgres_url, name="cut") as node, Registry(postgres_url) as registry:
        election = node.election("work")
        term = election.wait(PATIENCE_S)
        candidacy = engine_of(node).candidacy("work")
        candidacy.begin_work()
        terminate(postgres_url, "cut")
        assert term.wait_lost(PATIENCE_S)
        time.sleep(0.5)
        assert [member.member_id for member in registry.members()] == [term.member_id]
        candidacy.end_work()
        assert election.wait(PATIENCE_S).token == 2


def test_the_command_waits_for_a_lock_that_a_program_has_by_hand(tmp_path, postgres_url, start):
    with psycopg.connect(postgres_url, autocommit=True) as by_hand:
        by_hand.execute("select pg_advisory_lock(42)")
        runner = start("--lock-id", "0x2A", "--", "touch", str(tmp_path / "led"), url=postgres_url)
        waiting = "select 1 from pg_locks where objid = 42 and not granted"
        eventually(lambda: by_hand.execute(waiting).fetchone(), "it waits for the lock on the server")
        assert not (tmp_path / "led").exists()
        by_hand.execute("select pg_advisory_unlock(42)")
        assert runner.wait() == 0
    assert (tmp_path / "led").exists()


def test_a_lock_id_that_cannot_work_is_an_error_in_one_line(postgres_url, sqlite_url):
    for url, lock_id, said in ((postgres_url, "seven", "lock_id='seven' must be"), (sqlite_url, "7", "of PostgreSQL")):
        done = run("--role", "r", "--lock-id", lock_id, "--", "true", url=url)
        assert done.returncode == 2
        assert said in done.stderr.decode()
        assert b"Traceback" not in done.stderr


def test_a_guard_that_is_killed_takes_everything_with_it(tmp_path, sqlite_url, start):
    pids = tmp_path / "pids"
    script = f"exec 3>{pids}; echo $PPID $$ >&3; sleep 1000 & echo $! >&3; setsid sleep 1000 & echo $! . >&3; wait"
    runner = start("--", "sh", "-c", script, url=sqlite_url)
    eventually(lambda: pids.exists() and pids.read_text().endswith(".\n"), "the family")
    guard, *family = map(int, pids.read_text().split()[:-1])
    os.kill(guard, signal.SIGKILL)
    assert runner.wait() == 137
    assert [state(pid) for pid in family] == [None] * 3


def test_what_the_command_leaves_running_ends_before_the_role_is_handed_over(tmp_path, sqlite_url):
    log = tmp_path / "log"
    run(
        "--role",
        "work",
        "--grace",
        "0.2",
        "--",
        "sh",
        "-c",
        f"(trap '' TERM; sleep 1000) & echo $! >{log}",
        url=sqlite_url,
    )
    assert state(int(log.read_text())) is None


@pytest.mark.twin("postgres")
def test_a_leader_that_is_asked_to_resign_ends_its_command_first(tmp_path, one_url):
    contest = Contest(tmp_path / "role", one_url, 2, "--restart", "--grace", "0.5")
    with contextlib.closing(contest):
        eventually(lambda: contest.begun, "a leader")
        with Registry(one_url) as registry:
            eventually(lambda: contested(registry, contest), "another candidate")
        assert starter.run("tenure", "resign", "role", env={**os.environ, "TENURE_URL": one_url}).returncode == 0
        eventually(lambda: len(contest.begun) == 2, "the successor")
        assert contest.begun[0] != contest.begun[1]
        assert (contest.survivors, contest.errors) == ([], "")


def test_a_command_that_was_ended_in_time_is_not_started_again_under_the_same_token(tmp_path, postgres_url, start):
    log = tmp_path / "log"
    runner = start(
        "--ttl", "2", "--restart", "--", "sh", "-c", f"echo $TENURE_TOKEN >>{log}; exec sleep 1000",
        url=postgres_url, stderr=subprocess.PIPE,
    )  # fmt: skip
    eventually(log.exists, "the command")
    with psycopg.connect(postgres_url) as connection:
        connection.execute("lock table tenure.members")
        assert b"leadership lost" in runner.process.stderr.readline()
    eventually(lambda: len(log.read_text().split()) == 2, "the next term")
    assert log.read_text().split()[0] == "1"
    assert int(log.read_text().split()[1]) > 1


@pytest.mark.twin("postgres")
def test_one_that_leaves_takes_no_further_term(tmp_path, one_url, start):
    begun = tmp_path / "begun"
    runner = start("--ttl", "5", "--", "sh", "-c", writes(begun) + "exec sleep 1000", url=one_url)
    eventually(begun.exists, "the command")
    with Registry(one_url) as registry:
        registry.resign("work")
        assert runner.wait() == 76
        assert [term.reason for term in registry.history("work")] == ["resigned"]


def test_one_that_leaves_does_not_wait_for_itself_before_it_hands_over(tmp_path, postgres_url, start):
    first, second = tmp_path / "first", tmp_path / "second"
    start("--", "sh", "-c", writes(first) + "exec sleep 1000", url=postgres_url)
    eventually(first.exists, "the command")
    start("--", "sh", "-c", writes(second) + "exec sleep 1000", url=postgres_url)
    with Registry(postgres_url) as registry:
        eventually(lambda: len(registry.candidates("work")) == 2, "another candidate")
        asked = time.monotonic()
        registry.resign("work")
        assert time.monotonic() - asked < HAND_OVER_S
    eventually(second.exists, "the successor's command")


@pytest.mark.twin("postgres")
def test_a_guard_that_was_stopped_is_woken_by_a_message(tmp_path, one_url, start):
    begun = tmp_path / "begun"
    runner = start("--", "sh", "-c", writes(begun) + "exec sleep 1000", url=one_url)
    eventually(begun.exists, "the command")
    (guard,) = children(runner.process.pid)
    os.kill(int(guard), signal.SIGSTOP)
    runner.signal(signal.SIGTERM)
    assert runner.wait() == 143


@pytest.mark.twin("postgres")
def test_a_runner_whose_guard_was_killed_while_it_waits_gets_another(tmp_path, one_url, start):
    begun, over = tmp_path / "begun", tmp_path / "over"
    start("--", "sh", "-c", writes(begun) + f"while ! [ -e {over} ]; do sleep 0.02; done", url=one_url)
    eventually(begun.exists, "the command")
    with Registry(one_url) as registry:
        second = start("--", "sh", "-c", "exit 5", url=one_url)
        eventually(lambda: registry.roles()[0].candidates == 2, "a second candidate")
    (guard,) = children(second.process.pid)
    os.kill(int(guard), signal.SIGKILL)
    over.touch()
    assert second.wait() == 5


# --- where processes cannot be seen ---------------------------------------------------------------------------

BLIND = {
    "no-proc": ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh"],
    "proc-of-the-host": ["unshare", "--pid", "--fork", "--kill-child"],
    "proc-of-a-dead-namespace": [
        *("unshare", "--mount", "sh", "-c"),
        'unshare --pid --fork mount -t proc proc /proc && exec "$@"',
        "sh",
    ],
}
"""Systems on which the processes that a command has started cannot be found."""
SEEING = {
    "pid-namespace": ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"],
    "hidepid": [
        *("unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c"),
        'mount -t proc -o hidepid=2 proc /proc && exec setpriv --reuid=65534 --regid=65534 --clear-groups "$@"',
        *("sh", "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"),  # the sources may be root's own
    ],
}
"""Systems on which they can be found, though /proc shows only some processes."""

# Leaves two processes behind: an orphan in its own session, and one in the command's process group.
DAEMON = """
cd "$1"
(setsid sh -c 'trap "" TERM; while [ -e go ]; do echo >>beats; sleep 0.02; done' &)
(trap "" TERM; while [ -e go ]; do echo >>group-beats; sleep 0.02; done) &
while ! [ -s beats ] || ! [ -s group-beats ]; do sleep 0.01; done
echo >begun
"""

# Runs the rest and writes down how it ended. It goes on: all processes of a PID namespace die with the first one.
KEEPER = """
directory=$1; ends=$2; shift 2
"$@" & pid=$!
if [ $ends ]; then
    while ! [ -e $directory/begun ]; do sleep 0.01; done
    kill -$ends $pid
fi
wait $pid
echo $? >$directory/code
while [ -e $directory/go ]; do sleep 0.02; done
"""


class World:
    """A shell in its own namespaces, in which ``tenure run`` runs a command that leaves daemons behind."""

    def __init__(self, directory, world, *options, ends="", script=DAEMON):
        self.directory = directory
        job = [*options, "--grace", "0.1", "--role", "work", "--url", f"sqlite:///{directory}/t.db"]
        command = ["--", "sh", "-c", script, "sh", directory]
        keeper = ["sh", "-c", KEEPER, "sh", directory, ends]
        self.process = subprocess.Popen([*world, *keeper, *TENURE, "run", *job, *command], stderr=subprocess.PIPE)

    @property
    def code(self):
        """How ``tenure run`` ended."""
        file = self.directory / "code"
        eventually(lambda: file.exists() and file.read_text(), "the end")
        return int(file.read_text())

    def silent(self, beats):
        """Whether a daemon writes no more."""
        size = (self.directory / beats).stat().st_size
        time.sleep(0.3)
        return (self.directory / beats).stat().st_size == size


@pytest.fixture
def world():
    """Make worlds in a directory that every user can write to; their daemons end with the test."""
    tried = subprocess.run(["unshare", "--mount", "--pid", "--fork", "true"], capture_output=True, check=False)
    if tried.returncode:
        missing(f"PID namespaces cannot be made here: {tried.stderr.decode().strip()}")
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as name, contextlib.ExitStack() as stack:
        directory = Path(name)
        directory.chmod(0o777)
        (directory / "go").touch()

        def make(*arguments, **options):
            one = World(directory, *arguments, **options)
            stack.enter_context(one.process)
            stack.callback((directory / "go").unlink)
            return one

        yield make


@pytest.mark.parametrize("kind", BLIND.values(), ids=BLIND)
def test_a_command_whose_processes_cannot_be_seen_is_not_started(world, kind):
    here = world(kind)
    assert here.code == 2
    assert [file.name for file in here.directory.iterdir() if "begun" in file.name] == []
    said = here.process.stderr.readline()
    assert said.startswith(b"tenure: the command cannot be guarded here: ")
    assert b"--group-only" in said


@pytest.mark.parametrize("kind", SEEING.values(), ids=SEEING)
def test_a_command_is_guarded_in_a_pid_namespace_and_beside_hidden_processes(world, kind):
    here = world(kind, ends="KILL", script=DAEMON + "wait")
    assert here.code == 137
    eventually(lambda: here.silent("beats") and here.silent("group-beats"), "the end of the daemons")


@pytest.mark.parametrize("kind", BLIND.values(), ids=BLIND)
@pytest.mark.parametrize(("ends", "code"), [("", 0), ("TERM", 143), ("KILL", 137)])
@pytest.mark.twin("0-proc", "143-no-proc", "143-proc-of-the-host", "137-no-proc", "137-proc-of-a-dead")
def test_who_is_content_with_the_process_group_gets_that(world, kind, ends, code):
    here = world(kind, "--group-only", ends=ends, script=DAEMON + ("wait" if ends else ""))
    assert here.code == code
    eventually(lambda: here.silent("group-beats"), "the end of the group")
    assert not here.silent("beats")  # or the test would show nothing


# --- what the command sees ------------------------------------------------------------------------------------


def test_the_command_finds_its_term_in_the_environment_and_no_url_in_any_argument(tmp_path, one_url):
    script = "env; tr '\\0' ' ' </proc/$PPID/cmdline"
    url_file = tmp_path / "url"
    url_file.write_text(one_url + "\n")
    for token in ("1", "2"):
        done = run(
            "--role", "work", "--namespace", "blue", "--url-file", url_file, "--", "sh", "-c", script, url="nonsense://"
        )
        assert done.returncode == 0, done.stderr
        lines = done.stdout.decode().splitlines()
        ours = dict(line.split("=", 1) for line in lines if line.startswith("TENURE_"))
        assert re.fullmatch("[0-9a-f-]{36}", ours.pop("TENURE_MEMBER"))
        assert ours == {"TENURE_ROLE": "work", "TENURE_TOKEN": token, "TENURE_NAMESPACE": "blue", "TENURE_URL": one_url}
        assert one_url not in lines[-1]


def test_a_relative_url_leads_the_command_to_the_same_file(tmp_path):
    url = ("--url", "sqlite:///some.db")
    done = run("--role", "work", *url, "--", "sh", "-c", "echo $TENURE_URL", url="nonsense://", cwd=tmp_path)
    assert done.stdout.decode() == f"sqlite:///{tmp_path}/some.db\n"


def test_input_and_output_pass_untouched_and_nothing_else_is_open(sqlite_url):
    everything = bytes(range(256)) * 1000
    command = ["--role", "work", "--url", sqlite_url, "--", "sh", "-c", "cat; echo oops >&2; ls /proc/self/fd >&2"]
    done = subprocess.run([*TENURE, "run", *command], input=everything, capture_output=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, everything)
    assert done.stderr.decode().split() == ["oops", "0", "1", "2", "3"]  # 3 is the directory that ls reads


def test_verbose_speaks_on_stderr_only(sqlite_url):
    done = run("--role", "work", "-v", "--", "true", url=sqlite_url)
    assert done.stdout == b""
    assert done.stderr.splitlines() == [
        b"tenure: role 'work': leads, with token 1",
        b"tenure: role 'work': the command has ended, with exit code 0",
    ]


# --- exit codes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        (["sh", "-c", "exit 3"], 3, b""),
        (["sh", "-c", "kill -USR1 $$"], 128 + signal.SIGUSR1, b""),
        (["no-such-command"], 127, b"tenure: no-such-command: command not found\n"),
        (["/etc/passwd"], 126, b"tenure: /etc/passwd: Permission denied\n"),
    ],
)
def test_the_exit_code_is_that_of_the_command(sqlite_url, command, code, words):
    done = run("--role", "work", "--", *command, url=sqlite_url)
    assert (done.returncode, done.stderr) == (code, words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--role", "work"], b"COMMAND"),
        (["--", "true"], b"--role"),
        (["--role", "work", "--ttl", "0", "--", "true"], b"ttl=0"),
        (["--role", "work", "--url", "sqlite:///no/such/directory/t.db", "--", "true"], b"directory' does not exist"),
        (["--role", "work", "--", ""], b"COMMAND is empty"),
        (["--role", "work", "--grace", "nan", "--", "true"], b"is not a number of seconds"),
        (["--role", "work", "--restart", "--no-wait", "--", "true"], b"give one of them"),
        (["--role", "work", "--restart", "--hold", "1", "--", "true"], b"give one of them"),
    ],
)
def test_usage_errors_are_2(sqlite_url, arguments, words):
    done = run(*arguments, url=sqlite_url)
    assert done.returncode == 2
    assert words in done.stderr
    assert b"Traceback" not in done.stderr


@pytest.mark.twin("postgres")
def test_who_may_not_wait_leaves_at_once_and_who_waits_leaves_in_time(tmp_path, one_url, start):
    begun = tmp_path / "begun"
    start("--", "sh", "-c", writes(begun) + "exec sleep 1000", url=one_url)
    eventually(begun.exists, "the command")
    assert run("--role", "work", "--no-wait", "--", "false", url=one_url).returncode == 75
    done = run("--role", "work", "--wait-timeout", "0.1", "--", "false", url=one_url)
    assert (done.returncode, done.stdout, done.stderr) == (124, b"", b"")


def test_who_may_not_wait_needs_a_url_since_cron_starts_it_on_every_machine(tmp_path):
    begun = tmp_path / "begun"
    job = ["--role", "work", "--no-wait", "--", "sh", "-c", writes(begun)]
    cron = {"env": {"HOME": str(tmp_path), "PATH": os.defpath}, "capture_output": True, "timeout": PATIENCE_S}
    done = subprocess.run([*TENURE, "run", *job], check=False, **cron)
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"--no-wait needs a URL" in done.stderr
    assert b"TENURE_URL" in done.stderr
    assert list(tmp_path.iterdir()) == []
    given = ["--url", f"sqlite:///{tmp_path}/some.db"]
    done = subprocess.run([*TENURE, "run", *given, *job], check=False, **cron)
    assert (done.returncode, done.stderr, begun.exists()) == (0, b"", True)


def test_who_may_not_wait_takes_over_from_one_that_is_provably_dead(one_url):
    program = "import os, tenure; n = tenure.Node().start(); n.election('work').wait(); os._exit(0)"
    subprocess.run([sys.executable, "-c", program], env={**os.environ, "TENURE_URL": one_url}, check=True)
    done = run("--role", "work", "--no-wait", "--", "sh", "-c", "echo $TENURE_TOKEN", url=one_url)
    assert (done.returncode, done.stdout) == (0, b"2\n")


@pytest.mark.long
def test_twenty_that_may_not_wait_run_the_command_once(tmp_path, one_url, start):
    begun, over = tmp_path / "begun", tmp_path / "over"
    script = f"echo $TENURE_TOKEN >>{begun}; while ! [ -e {over} ]; do sleep 0.02; done"
    runners = [start("--no-wait", "--", "sh", "-c", script, url=one_url) for _ in range(20)]
    eventually(lambda: sum(runner.process.poll() is not None for runner in runners) == 19, "all but one to leave")
    over.touch()
    assert sorted(runner.wait() for runner in runners) == [0] + [75] * 19
    assert len(begun.read_text().split()) == 1


def test_who_holds_on_keeps_a_second_run_from_starting_although_the_first_is_over(tmp_path, one_url, start):
    begun = tmp_path / "begun"
    first = start("--no-wait", "--hold", "1000", "--", "sh", "-c", writes(begun), url=one_url)
    eventually(begun.exists, "the command")
    eventually(lambda: not children(children(first.process.pid)[0]), "its end")
    assert run("--role", "work", "--no-wait", "--", "false", url=one_url).returncode == 75
    first.signal(signal.SIGTERM)
    assert first.wait() == 143


def test_restart_waits_for_a_database_that_is_not_there_yet(tmp_path, postgres_server, postgres_url, start):
    begun = tmp_path / "begun"
    postgres_server.stop()
    script = writes(begun) + "exec sleep 1000"
    runner = start("--restart", "--", "sh", "-c", script, url=postgres_url, stderr=subprocess.PIPE)
    assert runner.process.stderr.readline().endswith(b"; waiting for the database\n")
    postgres_server.start()
    eventually(begun.exists, "the command")
    assert run("--role", "work", "--wait-timeout", "0.1", "--", "true", url=postgres_url).returncode == 124


def test_no_wait_is_an_error_if_there_is_no_leader(postgres_url):
    with tenure.Node(postgres_url):
        pass
    with connected(postgres_url) as connection:
        connection.execute("lock table tenure.terms in exclusive mode")
        done = run("--role", "work", "--no-wait", "--", "true", url=postgres_url)
    assert done.returncode == 2
    assert b"there is no leader, and none was elected within 5 s" in done.stderr


def test_restart_runs_it_again_under_a_new_token(tmp_path, sqlite_url, start):
    log = tmp_path / "log"
    runner = start("--restart", "--", "sh", "-c", f"echo $TENURE_TOKEN >>{log}; exit 1", url=sqlite_url)
    eventually(lambda: log.exists() and log.read_text().split() == ["1", "2"], "the second run")
    runner.signal(signal.SIGTERM)
    assert runner.wait() == 143


# --- signals and the terminal ---------------------------------------------------------------------------------


@pytest.mark.twin("postgres")
def test_signals_are_passed_on_and_those_that_end_it_hand_the_role_over(tmp_path, one_url, start):
    heard = tmp_path / "heard"
    names = ["HUP", "QUIT", "USR1", "USR2", "WINCH", "INT", "TERM"]
    traps = "".join(f"trap 'echo {name} >>{heard}' {name}; " for name in names[:-1])
    script = f"{traps} trap 'echo TERM >>{heard}; exit 0' TERM; echo begun >{heard}; while :; do sleep 0.01; done"
    runner = start("--", "sh", "-c", script, url=one_url)
    for number, name in enumerate(["begun", *names]):
        if number:
            runner.signal(getattr(signal, f"SIG{name}"))
        eventually(lambda name=name: heard.exists() and name in heard.read_text().split(), name)
    assert runner.wait() == 143
    assert run("--role", "work", "--no-wait", "--", "true", url=one_url).returncode == 0


def test_a_command_that_does_not_end_is_killed_after_the_grace(tmp_path, sqlite_url, start):
    begun = tmp_path / "begun"
    script = f"trap '' TERM; {writes(begun)} sleep 1000"
    runner = start("--grace", "0.1", "--", "sh", "-c", script, url=sqlite_url)
    eventually(begun.exists, "the command")
    runner.signal(signal.SIGTERM)
    assert runner.wait() == 143


def test_a_signal_ends_one_that_waits(tmp_path, sqlite_url, start):
    begun = tmp_path / "begun"
    start("--", "sh", "-c", writes(begun) + "exec sleep 1000", url=sqlite_url)
    eventually(begun.exists, "the leader")
    waiting = start("-v", "--", "false", url=sqlite_url)
    eventually(lambda: len(children(waiting.process.pid)) == 1, "its guard")
    waiting.signal(signal.SIGINT)
    assert waiting.wait() == 130


class Terminal:
    """A session on a terminal, with a job-control shell of a few lines in it that runs one job."""

    SHELL = """
import os, signal, sys
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
job = os.fork()
if not job:
    os.setpgid(0, 0)
    os.tcsetpgrp(0, os.getpid())
    signal.signal(signal.SIGTTOU, signal.SIG_DFL)
    os.execvp(sys.argv[1], sys.argv[1:])
while True:
    _, status = os.waitpid(job, os.WUNTRACED)
    os.tcsetpgrp(0, os.getpgrp())
    if not os.WIFSTOPPED(status):
        break
    print("stopped", flush=True)
    input()
    os.tcsetpgrp(0, job)
    print("resumed", flush=True)
    os.killpg(job, signal.SIGCONT)
print("code", os.waitstatus_to_exitcode(status), flush=True)
"""

    def __init__(self, *arguments, url):
        self.output = b""
        self.pid, self.terminal = pty.fork()
        if not self.pid:
            os.environ["TENURE_URL"] = url
            program = [sys.executable, "-c", self.SHELL, *TENURE, "run", "--role", "work", *arguments]
            os.execv(program[0], program)

    def type(self, text):
        os.write(self.terminal, text)

    def expect(self, text):
        deadline = time.monotonic() + PATIENCE_S
        while text not in self.output:
            assert time.monotonic() < deadline, (text, self.output)
            with contextlib.suppress(OSError):  # the other side is closed
                self.output += os.read(self.terminal, 4096)
        self.output = self.output.partition(text)[2]

    def close(self):
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.terminal)


# One child, before it is stopped: a shell in vfork() whose child is stopped before it executes anything hangs, as it
# does without `tenure run`.
TRAPPED = "trap 'echo trapped; exit 5' INT; sleep 1000 & echo ready; while :; do wait; done"


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_the_terminal_works_input_and_ctrl_z_and_ctrl_c(sqlite_url):
    script = "echo begun; read a; echo got $a; read b; echo and $b; " + TRAPPED
    terminal = Terminal("--", "sh", "-c", script, url=sqlite_url)
    with contextlib.closing(terminal):
        terminal.expect(b"begun")
        terminal.type(b"hello\n")
        terminal.expect(b"got hello")
        terminal.type(b"\x1a")
        terminal.expect(b"stopped")
        terminal.type(b"fg\n")
        terminal.expect(b"resumed")
        terminal.type(b"world\n")
        terminal.expect(b"and world")
        terminal.expect(b"ready")
        terminal.type(b"\x03")
        terminal.expect(b"trapped")
        terminal.expect(b"code 5")


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_ctrl_c_reaches_a_command_that_never_reads_the_terminal(sqlite_url):
    terminal = Terminal("--", "sh", "-c", f"echo begun; {TRAPPED}", url=sqlite_url)
    with contextlib.closing(terminal):
        terminal.expect(b"ready")
        terminal.type(b"\x1a")
        terminal.expect(b"stopped")
        terminal.type(b"fg\n")
        terminal.expect(b"resumed")
        terminal.type(b"\x03")
        terminal.expect(b"trapped")
        terminal.expect(b"code 130")


# --- how quickly it starts ------------------------------------------------------------------------------------


def test_run_brings_no_driver_and_nothing_for_screens(sqlite_url):
    program = (
        "import sys\nfrom tenure.cli import main\n"
        "try: main(['run', '--role', 'work', '--', 'true'])\nexcept SystemExit: pass\n"
        "print(*{name.split('.')[0] for name in sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "TENURE_URL": sqlite_url}, capture_output=True, check=True
    )
    loaded = set(done.stdout.decode().split())
    assert not loaded & {"psycopg", "rich", "anyio", "asyncio", "subprocess"}


def test_guard_imports_the_two_files_beside_it_and_nothing_else_that_is_installed():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.shutdown(socket.SHUT_WR)  # so that it ends at once
        program = [sys.executable, "-I", "-S", "-v", GUARD, str(theirs.fileno())]
        done = subprocess.run(program, pass_fds=[theirs.fileno()], capture_output=True, text=True, check=True)
    imported = set(re.findall(r"^import '([\w.]+)'", done.stderr, re.MULTILINE))
    assert {"channel", "processes"} <= imported
    assert not {
        name for name in imported if name.split(".")[0] not in {*sys.stdlib_module_names, "channel", "processes"}
    }
    assert not imported & {"typing", "pathlib", "ctypes.util", "threading"}  # which are slow
