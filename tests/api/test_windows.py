"""Tenure without fork, flock and most signals, as on Windows. `make test WINDOWS=1` runs more of the suite that way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WINDOWS = {**os.environ, "PYTHONPATH": f"{ROOT}/tests/support/windows"}
TENURE = Path(sys.executable).with_name("tenure")


def windows(*command, **environment):
    """Run a Python program in a process that lacks what Windows lacks."""
    command = [sys.executable, *map(str, command)]
    return subprocess.run(
        command, env={**WINDOWS, **environment}, capture_output=True, text=True, timeout=60, check=False
    )


def refused(done):
    """The one line of a refusal."""
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    return line


@pytest.mark.harness
@pytest.mark.parametrize("name", ["os.fork", "signal.SIGSTOP", "signal.SIGKILL", "socket.AF_UNIX", "select.poll"])
def test_simulated_windows_lacks_what_windows_lacks(name):
    module = name.partition(".")[0]
    assert "Windows lacks it" in windows("-c", f"import {module}; {name}").stderr
    assert windows("-c", f"import {module}; assert not hasattr({module}, {name.partition('.')[2]!r})").returncode == 0
    assert "No module named 'fcntl'" in windows("-c", "import fcntl").stderr


ELECT = """
import threading, tenure
with tenure.Node(start="raise") as node, node.lead("r", timeout=30) as term:
    with term.transaction() as transaction:
        transaction.execute("select 1")
    print("led in mode", node.mode)
"""


@pytest.mark.parametrize("database", ["postgres", "mariadb"], ids="on-{}".format)  # so that MariaDB is not "long"
def test_a_server_elects_as_everywhere_else(database, request):
    done = windows("-c", ELECT, TENURE_URL=request.getfixturevalue(f"{database}_url"))
    assert (done.stdout, done.stderr) == ("led in mode hybrid\n", "")


RUN = """
import asyncio, os, signal, threading, time, tenure

node = tenure.{kind}Node()

@node.leader_only("r")
{definition}
    os.kill(os.getpid(), signal.SIGTERM)
    {wait}

{run}
print("ended")
"""


@pytest.mark.parametrize(
    ("kind", "definition", "wait", "run"),
    [
        ("", "def work(term: tenure.Term):", "term.wait_lost()", "node.run()"),
        ("Async", "async def work(term: tenure.AsyncTerm):", "await asyncio.sleep(60)", "asyncio.run(node.run())"),
    ],
)
def test_run_ends_on_sigterm(kind, definition, wait, run, postgres_url):
    """asyncio on Windows has no handlers of signals."""
    program = RUN.format(kind=kind, definition=definition, wait=wait, run=run)
    done = windows("-c", program, TENURE_URL=postgres_url)
    assert (done.stdout, done.stderr) == ("ended\n", "")


@pytest.mark.parametrize(
    ("arguments", "instead"),
    [
        (("run", "--role", "r", "--", "true"), "use node.leader_only() in a Python program"),
        (("cron", "* * * * *", "--name", "j", "--", "true"), "give node.leader_only() a tenure.Schedule"),
        (("demo",), "start examples/three_terminals.py three times"),
    ],
)
def test_commands_that_guard_processes_are_refused_in_one_line(arguments, instead, postgres_url):
    line = refused(windows(TENURE, *arguments, **({} if arguments == ("demo",) else {"TENURE_URL": postgres_url})))
    assert line.startswith(
        f"tenure: `tenure {arguments[0]}` does not run on this system, which lacks os.fork and os.killpg"
    )
    assert instead in line


def test_the_other_commands_and_every_help_work(postgres_url):
    assert "demo" in windows(TENURE, "--help").stdout
    for command in ("run", "cron", "demo"):
        assert windows(TENURE, command, "--help").returncode == 0
    for command in ("init", "status", "doctor"):
        done = windows(TENURE, command, "--url", postgres_url)
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr


def test_sqlite_is_refused_and_the_refusal_names_the_others(tmp_path):
    url = f"sqlite:///{tmp_path}/t.db"
    line = refused(windows(TENURE, "status", "--url", url))
    assert "which this system lacks: use PostgreSQL or MariaDB" in line
    programs = ("tenure.Node({!r}).start()", "tenure.Registry({!r}).__enter__()", "tenure.manual.use({!r})")
    for program in programs:
        done = windows("-c", f"import tenure; {program.format(url)}")
        assert done.stderr.splitlines()[-1].startswith("tenure.errors.ConfigError: SQLite needs locks on files")
    doctor = windows(TENURE, "doctor", "--url", url)
    assert (doctor.returncode, "Traceback" in doctor.stderr) == (2, False)
    assert "which this system lacks" in doctor.stdout
    assert list(tmp_path.iterdir()) == []
