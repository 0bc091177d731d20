"""The tutorial, step by step, as its reader does it: its program, its commands, and the shape of their outputs."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from datetime import datetime, timedelta
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text()
(PROGRAM,) = re.findall(r"^```py\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
OUTPUTS = dict(re.findall(r"^```text\n\$ (tenure [^\n]+)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))
TICK = re.compile(r"\d\d:\d\d:\d\d  tick, under token (\d+)\n")
PATIENCE_S = 60.0


class Terminals:
    """A terminal for each replica, and one to look."""

    def __init__(self, directory):
        self.directory = directory
        (directory / "jobs.py").write_text(PROGRAM)
        (url,) = re.findall(r"^export TENURE_URL=(\S+)", PAGE, re.MULTILINE)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environment = {**os.environ, "TENURE_URL": url, "PATH": path, "TZ": "Asia/Tokyo"}
        self.replicas = {}

    def start(self, name):
        if name in self.replicas:
            self.replicas[name].wait(PATIENCE_S)
        (command,) = {line for line in PAGE.splitlines() if line == "TENURE_NAME=a python jobs.py"}
        _, *command = shlex.split(command)
        with (self.directory / f"{name}.log").open("a") as log:
            self.replicas[name] = subprocess.Popen(
                command,
                cwd=self.directory,
                env={**self.environment, "TENURE_NAME": name},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def close(self):
        for replica in self.replicas.values():
            with contextlib.suppress(ProcessLookupError):
                replica.kill()
            replica.wait()

    def says(self, name):
        return (self.directory / f"{name}.log").read_text()

    def run(self, command):
        """Run a command, and return the lines that it prints."""
        return subprocess.run(
            shlex.split(command), cwd=self.directory, env=self.environment, capture_output=True, text=True, check=True
        ).stdout.splitlines()

    def tenure(self, command):
        """Run a command of the page, and return the lines that it prints: its head must be the one on the page."""
        lines = self.run(command)
        shown = OUTPUTS[command]
        if shown.split()[0].isupper():
            assert lines[0].split() == shown.split("\n")[0].split()
        return lines

    def wait_for_token(self, token):
        """Wait until a replica ticks under a token; return its name."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            for name in self.replicas:
                if str(token) in TICK.findall(self.says(name)):
                    return name
            time.sleep(0.05)
        raise AssertionError({name: self.says(name) for name in self.replicas})

    def pid_of(self, name):
        """Return the process id that `tenure status` shows, as the reader finds it."""
        (row,) = [line.split() for line in self.tenure("tenure status")[3:] if line.split()[:1] == [name]]
        return int(row[2])


@pytest.fixture
def terminals(tmp_path):
    opened = Terminals(tmp_path)
    yield opened
    opened.close()


def test_the_tutorial_goes_as_it_says(terminals):
    terminals.start("a")
    assert terminals.wait_for_token(1) == "a"
    terminals.start("b")
    terminals.start("c")
    deadline = time.monotonic() + PATIENCE_S
    while terminals.tenure("tenure status")[1].split()[-1] != "2":
        assert time.monotonic() < deadline, "two that stand by"
        time.sleep(0.1)

    os.kill(terminals.pid_of("a"), signal.SIGKILL)
    second = terminals.wait_for_token(2)
    newest, before = terminals.tenure("tenure history scheduler")[1:3]
    assert (newest.split()[:2], "goes on" in newest) == (["2", second], True)
    assert (before.split()[:2], "death" in before) == (["1", "a"], True)

    frozen = terminals.pid_of(second)
    os.kill(frozen, signal.SIGSTOP)
    third = terminals.wait_for_token(3)
    os.kill(frozen, signal.SIGCONT)
    (line,) = re.findall(r"^b: (Lost leadership .*)$", PAGE, re.MULTILINE)
    while f"{second}: {line}" not in terminals.says(second):
        assert time.monotonic() < deadline + PATIENCE_S, terminals.says(second)
        time.sleep(0.05)
    assert {*TICK.findall(terminals.says(second))} == {"2"}, "not a single tick more"
    done = [row for row in terminals.tenure("tenure runs tick --limit 5") if " done " in row]
    printed = "".join(terminals.says(name) for name in terminals.replicas)
    dues = {re.findall(r"\d\d:\d\d:\d\d", row)[0] for row in done}
    assert set() < dues <= {*re.findall(r"\S+(?=  tick)", printed)}, (
        "the program and the command line print the same clock"
    )
    # How many ticks come due without a leader depends on the moment of the freeze, and of the kill before it.
    rows = [row for row in terminals.run("tenure runs tick --limit 1000") if row.startswith("tick ")]
    due = sorted(datetime.fromisoformat(" ".join(row.split()[1:3])) for row in rows if "skipped" not in row)
    are_missed = any(later - earlier > timedelta(seconds=2) for earlier, later in itertools.pairwise(due))
    assert any("skipped: missed" in row for row in rows) == are_missed, rows

    terminals.start("a")
    deadline = time.monotonic() + PATIENCE_S
    while not any(row.startswith("a ") for row in terminals.tenure("tenure status")[3:]):
        assert time.monotonic() < deadline, "the new replica is a member"
        time.sleep(0.1)
    assert terminals.tenure("tenure resign scheduler --to a") == ["scheduler: a leads now, with token 4"]
    assert "resigned" in terminals.tenure("tenure history scheduler")[2]
    assert terminals.wait_for_token(4) == "a"
    assert third != second

    with subprocess.Popen(
        ["tenure", "ui", "--bind", "127.0.0.1:0"],
        cwd=terminals.directory,
        env=terminals.environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as dashboard:
        assert dashboard.stdout is not None
        said = dashboard.stdout.readline()
        dashboard.terminate()
    assert said.split("/", 3)[3] == OUTPUTS["tenure ui"].split("/", 3)[3]

    leader = terminals.replicas["a"]
    leader.send_signal(signal.SIGINT)
    assert leader.wait(PATIENCE_S) == 0
    assert terminals.wait_for_token(5) in "bc"
