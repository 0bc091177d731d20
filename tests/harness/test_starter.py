"""The starter of tests/support/starter.py: its children are like processes that were started in the usual way."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest

from tests.support import starter
from tests.support.store_by_hand import until

pytestmark = [pytest.mark.harness, pytest.mark.skipif(sys.platform != "linux", reason="it forks on Linux only")]

TELLS = """
import json, logging, os, random, signal, sys, threading
if __name__ == "__main__":
    told = {
        "arguments": sys.argv[1:], "variables": dict(os.environ), "directory": os.getcwd(), "path": sys.path[0],
        "pid": os.getpid(), "group": os.getpgid(0), "session": os.getsid(0), "main": sys.modules["__main__"].__file__,
        "files": sorted(map(int, os.listdir("/proc/self/fd")))[:-1], "threads": threading.active_count(),
        "signals": [repr(signal.getsignal(number)) for number in (1, 2, 3, 10, 12, 13, 15, 17)],
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "logging": repr(logging.getLogger().handlers),
    }
    print(json.dumps(told), flush=True)
    print(random.random(), file=sys.stderr, flush=True)
    sys.exit(int(sys.stdin.readline()))
"""


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "tells.py").write_text(TELLS)
    return tmp_path


@contextlib.contextmanager
def started(directory, *arguments, by=starter.start):
    process = by(
        "tells", *arguments, env={**os.environ, "ANSWER": "42"}, cwd=directory, stdin=PIPE, stdout=PIPE, stderr=PIPE
    )
    with process.stdin, process.stdout, process.stderr:
        yield process
        process.kill()
        process.wait(10)


def by_itself(module, *arguments, **options):
    return subprocess.Popen([sys.executable, "-m", module, *arguments], **options)


def test_child_finds_what_a_process_started_in_the_usual_way_finds(directory):
    with started(directory, "a b", "") as child, started(directory, "a b", "", by=by_itself) as usual:
        found, expected = json.loads(child.stdout.readline()), json.loads(usual.stdout.readline())
        assert (found.pop("pid"), expected.pop("pid")) == (child.pid, usual.pid)
        assert found == expected


def test_children_have_chance_of_their_own(directory):
    with started(directory) as one, started(directory) as other:
        assert float(one.stderr.readline()) != float(other.stderr.readline()) != random.random()


@pytest.mark.parametrize("code", [0, 3])
def test_status_is_the_childs(directory, code):
    with started(directory) as child:
        assert child.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.01)
        child.stdin.write(b"%d\n" % code)
        child.stdin.flush()
        assert child.wait(10) == child.poll() == child.returncode == code
        child.send_signal(signal.SIGKILL)  # whoever has its pid by now


def test_child_is_stopped_and_killed_like_any_other(directory):
    with started(directory) as child, started(directory) as other:
        child.stdout.readline()
        child.send_signal(signal.SIGSTOP)
        child.wait_until_stopped()
        assert starter.state(Path(f"/proc/{child.pid}")) == "T"
        child.kill()
        assert child.wait(10) == -signal.SIGKILL
        assert other.poll() is None


def test_children_that_ask_for_it_die_with_a_test_that_is_killed(tmp_path):
    program = (
        "import os, signal\n"
        "from subprocess import PIPE\n"
        "from tests.support import starter\n"
        'told = \'{"name": "a", "role": "r", "sample_every_s": 1, "record": "%s/a.jsonl"}\'\n'
        "env = os.environ | {'TENURE_URL': 'sqlite://'}\n"
        "node = starter.start('tests.support.node_process', told, env=env, stdin=PIPE, stdout=PIPE)\n"
        "node.stdout.readline()\n"
        "print(node.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = [sys.executable, "-c", program % tmp_path]
    done = subprocess.run(command, cwd=starter.ROOT, stdout=PIPE, check=False, timeout=60)
    node = Path(f"/proc/{int(done.stdout)}")
    until(lambda: not node.exists() or starter.state(node) in "ZX", "the node is gone")
