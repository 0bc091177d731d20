"""Starts programs of the tests by a fork, from a process that has imported Tenure and its drivers already.

`python -m tests.support.node_process` takes 0.25 s of CPU before its first line, nearly all of it for imports. So each
test process has one starter, which has imported everything, and has neither a thread nor a connection. It forks a
child for each request. The child is a process like any other: it has its own files, variables, directory and arguments,
and it can be stopped and killed. It differs in one thing: its parent is the starter, and only a parent learns how a
process ended. So the starter writes into a pipe for each child: first its pid, later its status.

    process = start("tests.support.node_process", "{}", env=os.environ | {…}, stdin=PIPE, stdout=PIPE)

Use `subprocess` where the start itself is tested, where the environment is not the test's own with more in it, and for
other releases' sources. Where the system is not Linux, start() does so itself.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
IMPORTED = ("psycopg", "pymysql", "sqlite3", "ctypes", "encodings.idna", "tests.support.history")
"""What the programs need beside Tenure. Not the programs themselves: a child runs its own as `__main__`."""
LEFT_OUT = ("tenure.aio", "tenure.cli.run.guard", "tenure.dashboard", "tenure.integrations", "tenure.testing")
"""What most programs do not use, or what is a program itself: the guard."""
NUMBER = struct.Struct("q")
LONGEST_REQUEST = 2**18


class Started:
    """A process that the starter has forked, with what the tests use of `subprocess.Popen`."""

    def __init__(self, told: int, streams: list[IO[bytes] | None]) -> None:
        self._told = told
        self.stdin, self.stdout, self.stderr = streams
        self.returncode: int | None = None
        self.pid = self._next(60)

    def _next(self, timeout: float | None) -> int:
        """What the starter says next about it."""
        if not select.select([self._told], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("a process of the starter", timeout or 0)
        said = os.read(self._told, NUMBER.size)
        assert said, "the starter is gone"
        return int(NUMBER.unpack(said)[0])

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(self._next(timeout))
            os.close(self._told)
        return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait_until_stopped(self) -> None:
        """Return when all of its threads stand still after SIGSTOP."""
        while any(state(task) != "T" for task in Path(f"/proc/{self.pid}/task").iterdir()):
            time.sleep(0.001)


def state(task: Path) -> str:
    """The state of a thread: the field after its name, which may have spaces in it. X if it has just ended."""
    with contextlib.suppress(OSError):
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    return "X"


def start(
    module: str,
    *arguments: str,
    env: Mapping[str, str],
    cwd: Path | str = ROOT,
    stdin: int | IO[bytes] | None = None,
    stdout: int | IO[bytes] | None = None,
    stderr: int | IO[bytes] | None = None,
) -> Started | subprocess.Popen[bytes]:
    """Start `python -m module arguments…`. The streams are as for `subprocess.Popen`."""
    if sys.platform != "linux":
        command = [sys.executable, "-m", module, *arguments]
        return subprocess.Popen(command, env=env, cwd=cwd, stdin=stdin, stdout=stdout, stderr=stderr)
    request = json.dumps({"argv": [module, *arguments], "env": dict(env), "cwd": str(cwd)}).encode()
    assert len(request) <= LONGEST_REQUEST
    with contextlib.ExitStack() as stack:
        ends = [_end(stack, number, stream) for number, stream in enumerate((stdin, stdout, stderr))]
        told, tells = os.pipe()
        stack.callback(os.close, tells)
        socket.send_fds(_starter(), [request], [*(theirs for theirs, _ in ends), tells])
    return Started(told, [ours for _, ours in ends])


def run(
    module: str, *arguments: str, env: Mapping[str, str], cwd: Path | str = ROOT, timeout: float = 60
) -> subprocess.CompletedProcess[bytes]:
    """Run `python -m module arguments…` to its end, as `subprocess.run(…, capture_output=True)` does."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = start(module, *arguments, env=env, cwd=cwd, stdin=DEVNULL, stdout=out, stderr=err)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess([module, *arguments], code, out.read(), err.read())


def _end(stack: contextlib.ExitStack, number: int, stream: int | IO[bytes] | None) -> tuple[int, IO[bytes] | None]:
    """The child's end of a stream, and ours if it is a pipe. The stack closes what only the child needs."""
    if stream == PIPE:
        readable, writable = os.pipe()
        theirs, ours, mode = (readable, writable, "wb") if number == 0 else (writable, readable, "rb")
        stack.callback(os.close, theirs)
        return theirs, os.fdopen(ours, mode)
    if stream == DEVNULL:
        theirs = os.open(os.devnull, os.O_RDWR)
        stack.callback(os.close, theirs)
        return theirs, None
    if stream is None:
        return number, None
    return (stream if isinstance(stream, int) else stream.fileno()), None


@functools.cache
def _starter_of(_pid: int) -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LONGEST_REQUEST)
    with theirs:
        command = [sys.executable, "-m", "tests.support.starter", str(theirs.fileno())]
        process = subprocess.Popen(command, cwd=ROOT, stdin=DEVNULL, pass_fds=[theirs.fileno()])

    def end() -> None:
        ours.close()
        process.wait(30)

    atexit.register(end)
    return ours


def _starter() -> socket.socket:
    """The way to the starter of this process: a fork of a test does not share its parent's."""
    return _starter_of(os.getpid())


# --- the starter itself -------------------------------------------------------------------------------------


def serve(requests: socket.socket) -> dict[str, Any] | None:
    """Fork a child for each request. Return its request in the child, and None in the starter when the test is gone."""
    with selectors.DefaultSelector() as selector:
        selector.register(requests, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is not requests:
                    selector.unregister(key.fd)
                    _report(key.fd, *key.data)
                    continue
                said, files, _, _ = socket.recv_fds(requests, LONGEST_REQUEST, 4)
                if not said:
                    return None
                *streams, tells = files
                pid = os.fork()
                if pid == 0:
                    selector.close()
                    requests.close()
                    _take(streams)
                    return dict(json.loads(said))
                for file in streams:
                    os.close(file)
                os.write(tells, NUMBER.pack(pid))
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, tells))


def _report(pidfd: int, pid: int, tells: int) -> None:
    """Tell the test how a child ended."""
    os.close(pidfd)
    with contextlib.suppress(BrokenPipeError):  # it does not listen any more
        os.write(tells, NUMBER.pack(os.waitpid(pid, 0)[1]))
    os.close(tells)


def _take(streams: list[int]) -> None:
    """Have these streams as the standard ones, and no other file of the starter's."""
    for number, file in enumerate(streams):
        os.dup2(file, number)
    for file in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if file > 2:
            with contextlib.suppress(OSError):  # the listing itself was one
                os.close(file)


def _modules_of_tenure() -> Iterator[str]:
    """Each by its name: `import tenure` itself loads a module only when one of its names is used."""
    import tenure

    package = Path(tenure.__file__).parent
    for path in sorted(package.rglob("*.py")):
        name = ".".join(path.relative_to(package.parent).with_suffix("").parts)
        if not name.startswith(LEFT_OUT) and not name.endswith("__main__"):
            yield name.removesuffix(".__init__")


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the test decides when we end
    for module in (*_modules_of_tenure(), *IMPORTED):
        try:
            importlib.import_module(module)
        except (AttributeError, ImportError) as error:
            if "Windows lacks it" not in str(error):  # `make test WINDOWS=1`: programs that use the module fail there
                raise
    if os.environ.get("FACADE") == "async":
        importlib.import_module("tests.support.async_as_sync")
    gc.collect()
    gc.freeze()
    request = serve(socket.socket(fileno=int(sys.argv[1])))
    if request is None:
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["env"])
    time.tzset()
    os.chdir(request["cwd"])
    sys.path[0] = request["cwd"]
    sys.argv = request["argv"]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
