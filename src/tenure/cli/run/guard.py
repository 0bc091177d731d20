"""The guard of ``tenure run``: a small process between it and the command, so that the command dies first.

    tenure run ──socket── guard ──parent of── command ── its children, and theirs

The guard holds duplicates of the descriptors that hold the sentinel of ``tenure run``. So the sentinel is still held
when ``tenure run`` dies, however it dies. The guard sees the end of its socket, kills the command with all of its
descendants, waits until they are dead, and only then ends. That releases the sentinel, and another node takes over.
When ``tenure run`` hangs or is stopped, the guard ends the command by the last deadline that it was sent.

The guard finds the command's processes by descent, not only by process group. It is their subreaper, so a process that
loses its parent becomes a child of the guard, and "no child left" is the proof that all are dead. If the guard itself
is killed, the kernel kills the command, and ``tenure run``, the next subreaper, kills the rest. If guard and command
are frozen together (a paused container or machine), only the fence keeps the command from writing after its term.

/proc lists the descendants. If it is missing, or belongs to another PID namespace, the guard cannot find all processes
that it must kill. Then ``tenure run`` refuses, unless the command's process group is enough (``--group-only``).

The guard runs this file in a fresh interpreter, without site-packages, and imports only two files of Tenure, which are
beside this one. So it starts as fast as a bare interpreter, inherits no lock, thread or connection, and has little that
could fail.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
import struct
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from tenure.cli.run.channel import MessageChannel
    from tenure.cli.run.processes import PR_SET_PDEATHSIG, adopt_orphans, descendants, kill_all, prctl, signal_all
else:
    # The interpreter runs with -I: it has left out this directory, and ignores PYTHONDONTWRITEBYTECODE.
    sys.path.append(os.path.dirname(__file__))  # noqa: PTH120 - pathlib is slow to import
    sys.dont_write_bytecode = True
    from channel import MessageChannel
    from processes import PR_SET_PDEATHSIG, adopt_orphans, descendants, kill_all, prctl, signal_all

if sys.platform == "linux":
    # The deadlines that `tenure run` sends are moments on the clock of `tenure.base.clock`.
    CLOCK = time.CLOCK_BOOTTIME
else:
    CLOCK = time.CLOCK_MONOTONIC

NEVER = float("inf")
WARNING = 0.15
"""The command gets SIGTERM this share of the TTL before trust ends."""
LAST_MOMENT = 0.05
"""The command is killed this share of the TTL before trust ends."""

TFD_FLAGS = os.O_CLOEXEC | os.O_NONBLOCK
TFD_TIMER_ABSTIME = 1


class Guard:
    """Runs one command after the other for ``tenure run``, and ends each before trust in its term ends."""

    def __init__(self, channel: MessageChannel, *, group_only: bool) -> None:
        self.channel = channel
        self.group_only = group_only
        self.descriptors: list[int] = []
        self.pid = 0
        """The id of the command's process and process group; 0 while no command runs."""
        self.status: int | None = None
        """How the command ended; descendants of it may still run."""
        self.cause = "exit"
        self.frozen = False
        self.warn_at = self.lapse_at = self.end_at = NEVER
        self.ttl = self.grace = 0.0
        # Without this the kernel would stop the guard when it gives the terminal to another process group.
        self.mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTTOU,))
        self.terminal = _terminal()
        self.runner_group = os.getpgid(os.getppid())
        self.timer = _Timer()
        self.alarm = _alarm()

    def run(self) -> None:
        """Handle messages until the channel ends; then kill what is left."""
        handlers: dict[object, Callable[..., None]] = {
            "run": self.on_run,
            "trust": self.on_trust,
            "doubt": self.on_doubt,
            "signal": self.on_signal,
            "end": self.on_end,
            "kill": self.on_kill,
            "continue": self.on_continue,
        }
        poll = select.poll()
        for descriptor in (self.channel.fileno(), self.alarm.fileno(), self.timer.descriptor):
            if descriptor >= 0:
                poll.register(descriptor, select.POLLIN)
        while True:
            due = min(self.warn_at, self.lapse_at, self.end_at) if self.pid else NEVER
            poll.poll(self.timer.set(due))
            with contextlib.suppress(BlockingIOError):
                while self.alarm.recv(4096):
                    pass
            # Read all messages before checking the deadlines: one of them may extend them.
            messages = self.channel.receive()
            if messages is None:
                break
            for message, descriptors in messages:
                handlers[message[0]](*message[1:], descriptors)
            self.keep_time()
            if self.pid and not self.reap():
                self.over()
        self.kill()

    # Messages from ``tenure run``

    def on_run(
        self,
        argv: list[bytes],
        extra: dict[bytes, bytes],
        ttl: float,
        grace: float,
        deadline: float,
        descriptors: list[int],
    ) -> None:
        """Start the command, in its own process group."""
        self.ttl, self.grace = ttl, grace
        self.status, self.cause, self.has_terminal = None, "exit", False
        self.end_at = NEVER
        self.on_trust(deadline, descriptors)
        if now() >= self.lapse_at:
            # It is too late to start the command.
            self.channel.send("over", 0, "deadline")
            self.drop_descriptors()
            return
        reading, writing = os.pipe()
        me = os.getpid()
        self.pid = os.fork()
        if not self.pid:
            self.become(argv, {**os.environb, **extra}, writing, me)
        os.close(writing)
        with open(reading, "rb") as file:  # noqa: PTH123
            failure = file.read()
        if failure:
            os.waitpid(self.pid, 0)
            self.channel.send("failed", int(failure))
            self.pid = 0
            self.drop_descriptors()

    def become(self, argv: list[bytes], environment: dict[bytes, bytes], writing: int, guard: int) -> None:
        """Turn the forked child into the command; write the number of the error to the pipe if that fails."""
        try:
            os.setpgid(0, 0)
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != guard:
                os._exit(1)
            # Python ignores these signals, and the command would inherit that.
            for name in ("SIGPIPE", "SIGXFSZ"):
                signal.signal(getattr(signal, name), signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)
            os.execvpe(argv[0], argv, environment)  # noqa: S606 - the caller wants this command
        except OSError as error:
            os.write(writing, str(error.errno or errno.EINVAL).encode())
        finally:
            os._exit(127)

    def on_trust(self, deadline: float, descriptors: list[int]) -> None:
        """Set a new deadline, and keep the descriptors that hold the sentinel now."""
        self.drop_descriptors()
        self.descriptors = descriptors
        if self.frozen:
            self.frozen = False
            # Parents come last, so that they do not see stopped children.
            signal_all(self.family()[::-1], signal.SIGCONT)
        # A command that was asked to end because of its deadline must end, even if a later deadline comes.
        if self.cause != "deadline":
            self.warn_at = deadline - WARNING * self.ttl
            self.lapse_at = deadline - LAST_MOMENT * self.ttl

    def on_doubt(self, _: list[int]) -> None:
        """Freeze the command and its descendants until there is trust again: another node may lead by now."""
        if self.pid:
            self.frozen = True
            signal_all([-self.pid] if self.status is None else [], signal.SIGSTOP)
            signal_all(self.family(), signal.SIGSTOP)

    def on_signal(self, number: int, _: list[int]) -> None:
        """Pass a signal on to the command's process group."""
        if self.pid and self.status is None:
            signal_all([-self.pid], number)

    def on_end(self, number: int, _: list[int]) -> None:
        """Send the command a signal, and kill it if it has not ended after the grace."""
        self.on_signal(number, _)
        self.end_at = min(self.end_at, now() + self.grace)

    def on_kill(self, _: list[int]) -> None:
        """Kill the command now: its term is over."""
        if self.pid:
            self.cause = "lost"
            self.kill()

    def on_continue(self, _: list[int]) -> None:
        """Wake a stopped command; give it the terminal back if it had it before and ``tenure run`` has it now."""
        if self.pid and self.status is None:
            if self.has_terminal:
                self.pass_terminal(self.runner_group, self.pid)
            signal_all([-self.pid], signal.SIGCONT)

    def family(self) -> list[int]:
        """Return the processes of the command: all descendants, or with ``--group-only`` its process group."""
        if self.group_only:
            return [-self.pid] if self.pid else []
        return descendants(os.getpid())

    # Deadlines, and the end of the command

    def keep_time(self) -> None:
        """End the command before trust ends."""
        if not self.pid:
            return
        time_now = now()
        if time_now >= min(self.lapse_at, self.end_at):
            self.cause = "deadline" if time_now >= self.lapse_at else self.cause
            self.kill()
        elif time_now >= self.warn_at:
            self.cause, self.warn_at = "deadline", NEVER
            signal_all(self.family(), signal.SIGTERM)

    def kill(self) -> None:
        """Kill the command and its descendants, and wait until they are dead."""
        if self.pid and self.status is None:
            # One call kills the whole group at once.
            signal_all([-self.pid], signal.SIGKILL)
        ended = kill_all(self.family)
        if self.pid:
            self.status = ended.get(self.pid, self.status)
            self.over()

    def reap(self) -> bool:
        """Handle the children that have stopped or died; False if no child is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            except ChildProcessError:
                return False
            if not pid:
                return True
            if pid == self.pid and os.WIFSTOPPED(status):
                self.stopped(os.WSTOPSIG(status))
            elif pid == self.pid:
                self.status = status
                # This time is for the descendants that the command left behind.
                self.end_at = min(self.end_at, now() + self.grace)
                signal_all(self.family(), signal.SIGTERM)

    def over(self) -> None:
        """Report how the command ended, when none of its processes is left."""
        if self.group_only:
            # The kernel does not report the end of a group.
            signal_all(self.family(), signal.SIGKILL)
        self.take_terminal_back()
        self.channel.send("over", self.status, self.cause)
        self.pid = 0
        self.frozen = False
        self.warn_at = self.lapse_at = self.end_at = NEVER
        self.drop_descriptors()

    def drop_descriptors(self) -> None:
        """Close the duplicates of the sentinel's descriptors."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = []

    # The terminal

    has_terminal = False
    """Whether the guard has given the terminal to the command's process group."""

    def stopped(self, number: int) -> None:
        """Give the terminal to a command that stopped because it needs it; else let ``tenure run`` stop, too.

        The command does not get it at the start: in ``tenure run … | less`` the terminal's input is not for the
        command.
        """
        if number in (signal.SIGTTIN, signal.SIGTTOU) and self.pass_terminal(self.runner_group, self.pid):
            self.has_terminal = True
            signal_all([-self.pid], signal.SIGCONT)
        elif number in (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU):
            self.pass_terminal(self.pid, self.runner_group)
            self.channel.send("stopped")

    def pass_terminal(self, old: int, new: int) -> bool:
        """Put the process group ``new`` in the foreground if ``old`` is there; return whether it was."""
        try:
            if self.terminal is not None and os.tcgetpgrp(self.terminal) == old:
                os.tcsetpgrp(self.terminal, new)
                return True
        except OSError:
            # This process has lost its terminal.
            pass
        return False

    def take_terminal_back(self) -> None:
        """Put ``tenure run`` in the foreground if the foreground group, of the command or one of its jobs, is dead."""
        if self.terminal is not None and self.has_terminal:
            foreground = os.tcgetpgrp(self.terminal)
            try:
                os.killpg(foreground, 0)
            except OSError:
                self.pass_terminal(foreground, self.runner_group)


class _Timer:
    """A timer on a clock that runs while the machine is suspended: on a late wake-up it has expired already."""

    def __init__(self) -> None:
        self.descriptor = -1
        self._set = NEVER
        if sys.platform == "linux":
            import ctypes  # noqa: PLC0415

            self._libc = ctypes.CDLL(None)
            self.descriptor = self._libc.timerfd_create(CLOCK, TFD_FLAGS)

    def set(self, due: float) -> float | None:
        """Expire at ``due``; if the system has no such timer, return how many milliseconds a wait may last."""
        if self.descriptor < 0:
            return None if due == NEVER else max(0.0, due - now()) * 1000
        if due != self._set:
            self._set = due
            # Zero would disarm the timer.
            seconds = 0.0 if due == NEVER else max(due, 0.001)
            expiry = struct.pack("@4l", 0, 0, int(seconds), int(seconds % 1 * 1e9))
            self._libc.timerfd_settime(self.descriptor, TFD_TIMER_ABSTIME, expiry, None)
        return None


def now() -> float:
    """Return the time on the clock of the deadlines."""
    return time.clock_gettime(CLOCK)


def _terminal() -> int | None:
    try:
        return os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return None


def _alarm() -> socket.socket:
    """Return a socket that is readable when a child has stopped or died. Other signals have no effect on the guard.

    Their handlers do nothing. If the guard ignored the signals instead, the command would ignore them, too.
    """
    reading, writing = socket.socketpair()
    reading.setblocking(False)
    writing.setblocking(False)
    signal.set_wakeup_fd(writing.detach(), warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP):
        # SIGCHLD always gets a handler, since an ignored SIGCHLD is not delivered.
        if number == signal.SIGCHLD or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    return reading


def main() -> None:
    """Run the guard; the first argument is the descriptor of the socket, ``--group-only`` may be the second."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    group_only = "--group-only" in sys.argv
    # With --group-only, the guard adopts no orphans. It would wait for those of other groups, which it cannot end.
    if not group_only:
        adopt_orphans()
    Guard(MessageChannel(connection), group_only=group_only).run()


if __name__ == "__main__":
    main()
