"""The process of the guard, as ``tenure run`` controls it, and one run of the command under it."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tenure.cli import exit_codes
from tenure.cli.internals import sentinel_descriptors, trusted_until
from tenure.cli.output import Ended, without_password
from tenure.cli.run.channel import MessageChannel
from tenure.cli.run.processes import descendants, signal_all
from tenure.events import EndReason

if TYPE_CHECKING:
    from tenure import Node, Term
    from tenure.cli.run.runner import RunOptions

GUARD = Path(__file__).with_name("guard.py")
SCAN_EVERY_S = 0.002

_guards: set[int] = set()
"""The processes of the guards: ``tenure cron`` has one for each command that runs."""
_guards_lock = threading.Lock()
"""Held while a guard is started: another guard must not inherit its socket, and ``kill_orphans`` must not find it."""


class GuardProcess:
    """The process that runs ``guard.py``. It has its own process group, so the terminal does not signal it."""

    def __init__(self, *, group_only: bool) -> None:
        ours, theirs = socket.socketpair()
        with _guards_lock, theirs:
            theirs.set_inheritable(True)
            argv = [sys.executable, "-I", "-S", str(GUARD), str(theirs.fileno())]
            argv += ["--group-only"] if group_only else []
            self.pid = os.posix_spawn(sys.executable, argv, os.environ, setpgroup=0)
            _guards.add(self.pid)
        self.channel = MessageChannel(ours)
        self._lock = threading.Lock()

    def send(self, *message: object, descriptors: Sequence[int] = ()) -> None:
        """Send a message, from any thread. A guard that an operator has stopped is woken to read it."""
        self.wake()
        with self._lock:
            self.channel.send(*message, descriptors=descriptors)

    def wake(self) -> None:
        """Let the guard continue, if an operator has stopped it."""
        signal_all([self.pid], signal.SIGCONT)

    @property
    def alive(self) -> bool:
        """Whether the guard is running: an operator may have killed it."""
        if self.pid:
            with contextlib.suppress(ChildProcessError):
                if not os.waitpid(self.pid, os.WNOHANG)[0]:
                    return True
            self._ended()
        return False

    def close(self) -> None:
        """Have the guard kill what it still guards, and end. May be called twice."""
        if self.pid:
            self.wake()
            self.channel.close()
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
            self._ended()

    def _ended(self) -> None:
        _guards.discard(self.pid)
        self.pid = 0


class GuardedCommand:
    """One run of the command, under one term."""

    def __init__(self, options: RunOptions, node: Node, term: Term, guard: GuardProcess) -> None:
        self._options = options
        self._node = node
        self._term = term
        self._guard = guard
        self._ending = self._doubted = False
        self._lock = threading.Lock()
        self._deadline = float("-inf")
        self.code: int | None = None
        """The exit code of the command, as a shell reports it; None while the command runs."""
        self.lost = False
        """Whether the command was ended because the term was lost."""

    def start(self) -> None:
        """Have the guard start the command."""
        url = self._options.url
        environment = {
            "TENURE_ROLE": self._term.role,
            "TENURE_TOKEN": str(self._term.token),
            "TENURE_NAMESPACE": self._node.namespace,
            "TENURE_MEMBER": self._term.member_id,
            **({} if url is None else {"TENURE_URL": url}),
            **self._options.environment,
        }
        encoded = {os.fsencode(name): os.fsencode(value) for name, value in environment.items()}
        argv = [os.fsencode(argument) for argument in self._options.command]
        self._deadline = trusted_until(self._term)
        self._send_with_sentinel("run", argv, encoded, self._node.ttl, self._options.grace, self._deadline)

    @property
    def trust(self) -> tuple[float, str | None]:
        """Until when the term is trusted, and why it is over, if it is."""
        return trusted_until(self._term), self._term.lost_reason

    def follow(self) -> None:
        """Report the state of the term to the guard.

        While the term is in doubt the command is frozen, and the last deadline still holds. A node that was asked to
        resign keeps the role until the command has ended. If the term ended for any other reason, another node may lead
        already, and the command is killed at once.
        """
        with self._lock:
            deadline, reason = self.trust
            if deadline > self._deadline or (self._doubted and deadline == self._deadline):
                self._deadline, self._doubted = deadline, False
                self._send_with_sentinel("trust", deadline)
            elif deadline < self._deadline and reason is None and not self._doubted:
                self._doubted = True
                self._guard.send("doubt")
            if reason is not None and not self._ending:
                self._ending = True
                if reason == EndReason.RESIGNED:
                    self._guard.send("end", int(signal.SIGTERM))
                else:
                    self._guard.send("kill")

    def receive(self) -> None:
        """Handle what the guard has sent."""
        messages = self._guard.channel.receive()
        if messages is None:
            # The guard was killed. The kernel kills the command; its descendants are now children of this process.
            self._guard.close()
            if not self._options.group_only:
                kill_orphans()
            self.code = exit_codes.SIGNALLED + signal.SIGKILL
        handlers: dict[object, Callable[..., None]] = {
            "stopped": self.on_stopped,
            "failed": self.on_failed,
            "over": self.on_over,
        }
        for (name, *details), _ in messages or ():
            handlers[name](*details)

    def on_stopped(self) -> None:
        """Stop this process, as the terminal stopped the command; wake the command when this process continues."""
        stop_job()
        self._guard.send("continue")

    def on_failed(self, number: int) -> None:
        """End: the command could not be started."""
        raise cannot_run(self._options.command[0], number)

    def on_over(self, status: int, cause: str) -> None:
        """Note how the command ended; none of its processes is left."""
        code = os.waitstatus_to_exitcode(status)
        self.code = code if code >= 0 else exit_codes.SIGNALLED - code
        self.lost = cause != "exit" or self._term.lost_reason is not None

    def _send_with_sentinel(self, *message: object) -> None:
        """Send a message, and with it the descriptors that hold the sentinel now."""
        descriptors = sentinel_descriptors(self._node)
        try:
            self._guard.send(*message, descriptors=descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)


def kill_orphans() -> None:
    """Kill the processes that a killed guard has left to this process, and wait until they are dead.

    Other guards and their commands are spared. When this process has no other child, it has no other descendant either.
    A scan can miss a process, so two scans in a row must find none.
    """
    known: set[int] = set()
    empty = 0
    while empty < 2:
        with _guards_lock:
            found = descendants(os.getpid(), spared=_guards)
            signal_all(found, signal.SIGKILL)
        for pid in found:
            # The process may be a child of another process, which reaps it.
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        empty = 0 if found else empty + 1
        # A process may fork faster than it is killed. So the loop pauses only after a scan that finds no new process.
        if known.issuperset(found):
            time.sleep(SCAN_EVERY_S)
        known.update(found)


def cannot_run(name: str, number: int) -> Ended:
    """Return the error that ends ``tenure run`` if a command cannot be run; ``number`` is the errno."""
    missing = number == errno.ENOENT
    code = exit_codes.NOT_FOUND if missing else exit_codes.NOT_EXECUTABLE
    return Ended(code, f"{without_password(name)}: {'command not found' if missing else os.strerror(number)}")


def stop_job() -> None:
    """Stop this process and its job, as Ctrl-Z does, until the shell continues them.

    The second signal goes to this thread, so that it takes effect before the next line. It is SIGTSTP because the
    kernel drops that signal if no shell could continue the process.
    """
    handler = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    os.killpg(0, signal.SIGTSTP)
    signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    signal.pthread_kill(threading.get_ident(), signal.SIGTSTP)
    signal.signal(signal.SIGTSTP, handler)
