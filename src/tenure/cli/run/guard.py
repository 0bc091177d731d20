"""The guard of ``tenure run``: a small process between it and the command, so that the command dies first.

    tenure run ──socket── guard ──parent of── command ── its children, and theirs

The guard holds duplicates of the descriptors on which the sentinel of ``tenure run`` stands. When ``tenure run`` dies,
however it dies, the sentinel still stands; the guard reads the end of the file, kills the command with everything that
came of it, waits until they are dead, and only then ends itself: the sentinel falls, and the others take over. When
``tenure run`` hangs or is stopped, the guard has the last deadline that it was told, and keeps it by itself.

What came of the command is found by descent, not by process group only: the guard is the subreaper, so whoever loses
its parent becomes a child of the guard, and "no child left" is the proof. If the guard itself is killed, the kernel
kills the command, and ``tenure run``, the next subreaper, kills the rest. Guard and command frozen together (a paused
container or machine) are beyond all of that: there only the fence protects.

It runs as a file of its own in a fresh interpreter, and imports nothing of Tenure: it starts in the time of a bare
interpreter, inherits no lock, no thread and no connection, and has little that could fail.
"""

from __future__ import annotations

import contextlib
import errno
import marshal
import os
import select
import signal
import socket
import struct
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # it takes long to import
    from typing import Any

if sys.platform == "linux":
    CLOCK = time.CLOCK_BOOTTIME  # as tenure.clock has it
else:
    CLOCK = time.CLOCK_MONOTONIC

NEVER = float("inf")
WARNING = 0.15
"""This share of the TTL before trust ends, the command is told to end by SIGTERM."""
LAST_MOMENT = 0.05
"""This share of the TTL before trust ends, it is killed."""

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
TFD_FLAGS = os.O_CLOEXEC | os.O_NONBLOCK
TFD_TIMER_ABSTIME = 1

RECEIVE_FLAGS = socket.MSG_DONTWAIT | getattr(socket, "MSG_CMSG_CLOEXEC", 0)  # the command must not inherit any

# The line between the two ---------------------------------------------------------------------------------------


class Line:
    """Messages (tuples of plain values) over a socket, with descriptors beside them."""

    def __init__(self, connection: socket.socket) -> None:
        """Use one end of a socket pair."""
        self._socket = connection
        self._received = b""
        self._descriptors: list[int] = []

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self._socket.fileno()

    def send(self, *message: Any, descriptors: list[int] | None = None) -> None:
        """Send a message; the other end gets duplicates of the descriptors. Nothing happens if it is gone."""
        body = marshal.dumps(message)
        data = struct.pack("=II", len(body), len(descriptors or ())) + body
        rights = (
            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(descriptors)}i", *descriptors))]
            if descriptors
            else []
        )
        with contextlib.suppress(OSError):  # gone: its end of file is seen where messages are read
            sent = self._socket.sendmsg([data], rights)
            self._socket.sendall(data[sent:])

    def receive(self) -> list[tuple[tuple[Any, ...], list[int]]] | None:
        """Return the messages that are there, each with its descriptors; None at the end of the file."""
        while True:
            try:
                data, rights, _, _ = self._socket.recvmsg(65536, 1024, RECEIVE_FLAGS)
            except BlockingIOError:
                break
            except ConnectionError:
                return None
            if not data:
                return None
            for _, _, packed in rights:
                self._descriptors.extend(struct.unpack(f"{len(packed) // 4}i", packed))
            self._received += data
        messages = []
        while len(self._received) >= 8:
            size, count = struct.unpack("=II", self._received[:8])
            if len(self._received) < 8 + size:
                break
            body, self._received = self._received[8 : 8 + size], self._received[8 + size :]
            mine, self._descriptors = self._descriptors[:count], self._descriptors[count:]
            messages.append((marshal.loads(body), mine))  # noqa: S302 - from our own other half
        return messages

    def close(self) -> None:
        """Close this end."""
        self._socket.close()


# Processes ------------------------------------------------------------------------------------------------------


def now() -> float:
    """Return the time by which deadlines are told."""
    return time.clock_gettime(CLOCK)


def adopt_orphans() -> None:
    """Become the parent of every descendant that loses its own."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        import ctypes  # noqa: PLC0415 - not while ``tenure run`` starts

        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def descendants(root: int) -> list[int]:
    """Return the processes that came of ``root``, those nearer to it first."""
    found = [root]
    for parent in found:
        try:
            for thread in os.listdir(f"/proc/{parent}/task"):  # noqa: PTH208 - as below
                with open(f"/proc/{parent}/task/{thread}/children") as file:  # noqa: PTH123 - pathlib is slow to import
                    found.extend(map(int, file.read().split()))
        except OSError:
            continue  # it is gone, and its children are somebody else's: the next look shows whose
    return found[1:]


def kill_descendants() -> dict[int, int]:
    """Kill everything that came of this process, and wait until it is dead; return how its children ended.

    One look may miss who is being born; but when no child is left, there is no grandchild either. While a look finds
    new ones there is no time for a pause: some run away from parent to child.
    """
    ended: dict[int, int] = {}
    known: set[int] = set()
    pause = 0.0005
    while True:
        try:
            while (child := os.waitpid(-1, os.WNOHANG))[0]:
                ended[child[0]] = child[1]
        except ChildProcessError:
            return ended
        found = descendants(os.getpid())
        signal_all(found, signal.SIGKILL)
        if known.issuperset(found):
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        known.update(found)


def signal_all(processes: list[int], number: int) -> None:
    """Send a signal to processes, and to groups (negative numbers)."""
    for pid in processes:
        with contextlib.suppress(OSError):  # gone; or another user's, who outlives everybody without the right
            os.kill(pid, number)


# The guard ------------------------------------------------------------------------------------------------------


class Guard:
    """Runs one command after the other, as ``tenure run`` says, and ends each of them in time."""

    def __init__(self, line: Line) -> None:
        """Take care of nothing yet."""
        self.line = line
        self.descriptors: list[int] = []
        self.pid = 0
        """The command's process, and its group; 0 if there is none."""
        self.status: int | None = None
        """How the command ended; there may still be something that came of it."""
        self.cause = "exit"
        self.frozen = False
        self.warn_at = self.lapse_at = self.end_at = NEVER
        self.grace = 0.0
        self.ttl = 0.0
        self.mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTTOU,))  # so that it may pass the terminal on
        self.terminal = _terminal()
        self.runner_group = os.getpgid(os.getppid())
        self.timer = _Timer()
        self.alarm = _alarm()

    def run(self) -> None:
        """Do as told until the line ends; then kill what is left."""
        poll = select.poll()
        for descriptor in (self.line.fileno(), self.alarm.fileno(), self.timer.descriptor):
            if descriptor >= 0:
                poll.register(descriptor, select.POLLIN)
        while True:
            due = min(self.warn_at, self.lapse_at, self.end_at) if self.pid else NEVER
            poll.poll(self.timer.set(due))
            with contextlib.suppress(BlockingIOError):
                while self.alarm.recv(4096):
                    pass
            messages = self.line.receive()  # all of them, before any deadline counts: there may be a new one
            if messages is None:
                break
            for message, descriptors in messages:
                getattr(self, f"on_{message[0]}")(*message[1:], descriptors)
            self.keep_time()
            self.look_after()
        self.kill()  # and with the process go the descriptors

    # What ``tenure run`` says

    def on_run(
        self,
        argv: list[bytes],
        extra: dict[bytes, bytes],
        ttl: float,
        grace: float,
        deadline: float,
        descriptors: list[int],
    ) -> None:
        """Start the command, in a process group of its own."""
        self.ttl, self.grace = ttl, grace
        self.status, self.cause, self.has_terminal = None, "exit", False
        self.end_at = NEVER
        self.on_trust(deadline, descriptors)
        if now() >= self.lapse_at:  # too late already
            self.line.send("over", 0, "deadline")
            self.let_go()
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
            self.line.send("failed", int(failure))
            self.pid = 0
            self.let_go()

    def become(self, argv: list[bytes], environment: dict[bytes, bytes], writing: int, guard: int) -> None:
        """Turn the forked child into the command, or tell by the pipe why that cannot be."""
        try:
            os.setpgid(0, 0)
            _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != guard:
                os._exit(1)
            for name in ("SIGPIPE", "SIGXFSZ"):  # which Python ignores
                signal.signal(getattr(signal, name), signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)
            os.execvpe(argv[0], argv, environment)  # noqa: S606 - that is what it is for
        except OSError as error:
            os.write(writing, str(error.errno or errno.EINVAL).encode())
        finally:
            os._exit(127)

    def on_trust(self, deadline: float, descriptors: list[int]) -> None:
        """Take a new deadline, and the descriptors on which the sentinel stands now."""
        self.let_go()
        self.descriptors = descriptors
        if self.frozen:
            self.frozen = False
            signal_all(descendants(os.getpid())[::-1], signal.SIGCONT)  # parents last: they need not hear of it
        if self.cause != "deadline":  # a command that was told to end for want of trust is not called back
            self.warn_at = deadline - WARNING * self.ttl
            self.lapse_at = deadline - LAST_MOMENT * self.ttl

    def on_doubt(self, _: list[int]) -> None:
        """Freeze everything until there is trust again: somebody else may lead by now, or nobody has noticed."""
        if self.pid:
            self.frozen = True
            signal_all([-self.pid] if self.status is None else [], signal.SIGSTOP)
            signal_all(descendants(os.getpid()), signal.SIGSTOP)

    def on_signal(self, number: int, _: list[int]) -> None:
        """Pass a signal on to the command's group."""
        if self.pid and self.status is None:
            signal_all([-self.pid], number)

    def on_end(self, number: int, _: list[int]) -> None:
        """Have the command end by a signal, and kill it after the grace."""
        self.on_signal(number, _)
        self.end_at = min(self.end_at, now() + self.grace)

    def on_kill(self, _: list[int]) -> None:
        """Kill it now: it must not run any more."""
        if self.pid:
            self.cause = "lost"
            self.kill()

    def on_continue(self, _: list[int]) -> None:
        """Wake a command that stopped, and give it the terminal back if it had that and ``tenure run`` has it now."""
        if self.pid and self.status is None:
            if self.has_terminal:
                self.pass_terminal(self.runner_group, self.pid)
            signal_all([-self.pid], signal.SIGCONT)

    # What time and the command do

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
            self.terminate()

    def terminate(self) -> None:
        """Ask everything that came of the command to end."""
        signal_all(descendants(os.getpid()), signal.SIGTERM)

    def kill(self) -> None:
        """Kill everything that came of the command, and wait until it is dead."""
        if self.pid and self.status is None:
            signal_all([-self.pid], signal.SIGKILL)  # all of the group at one stroke
        ended = kill_descendants()
        if self.pid:
            self.status = ended.get(self.pid, self.status)
            self.over()

    def look_after(self) -> None:
        """See who stopped and who died; when nobody is left, it is over."""
        if self.pid and not self.reap():
            self.over()

    def reap(self) -> bool:
        """Reap who has died; False if no child is left."""
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
                self.end_at = min(self.end_at, now() + self.grace)  # for what it has left behind
                self.terminate()

    def over(self) -> None:
        """Tell how the command ended: nothing of it is left."""
        self.take_terminal_back()
        self.line.send("over", self.status, self.cause)
        self.pid = 0
        self.frozen = False
        self.warn_at = self.lapse_at = self.end_at = NEVER
        self.let_go()

    def let_go(self) -> None:
        """Close the duplicates."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = []

    # The terminal

    has_terminal = False
    """Whether the command's group was given the terminal: it is, as soon as it asks for it."""

    def stopped(self, number: int) -> None:
        """Give the terminal to a command that stopped for want of it; else let ``tenure run`` stop, too.

        By need, and not at the start: in ``tenure run … | less`` the terminal's input is not for the command.
        """
        if number in (signal.SIGTTIN, signal.SIGTTOU) and self.pass_terminal(self.runner_group, self.pid):
            self.has_terminal = True
            signal_all([-self.pid], signal.SIGCONT)
        elif number in (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU):
            self.pass_terminal(self.pid, self.runner_group)
            self.line.send("stopped")

    def pass_terminal(self, old: int, new: int) -> bool:
        """Put a process group in the foreground if the one named is there."""
        try:
            if self.terminal is not None and os.tcgetpgrp(self.terminal) == old:
                os.tcsetpgrp(self.terminal, new)
                return True
        except OSError:
            pass  # no terminal of ours any more
        return False

    def take_terminal_back(self) -> None:
        """Put ``tenure run`` in the foreground, if the command or one of its jobs was there and is dead."""
        if self.terminal is not None and self.has_terminal:
            foreground = os.tcgetpgrp(self.terminal)
            try:
                os.killpg(foreground, 0)
            except OSError:
                self.pass_terminal(foreground, self.runner_group)


class _Timer:
    """An alarm on the clock that counts suspend, so that a machine that wakes up does not first sleep on."""

    def __init__(self) -> None:
        self.descriptor = -1
        self._set = NEVER
        if sys.platform == "linux":
            import ctypes  # noqa: PLC0415

            self._libc = ctypes.CDLL(None)
            self.descriptor = self._libc.timerfd_create(CLOCK, TFD_FLAGS)

    def set(self, due: float) -> float | None:
        """Ring at ``due``; return how many milliseconds a wait may last where there is no such alarm."""
        if self.descriptor < 0:
            return None if due == NEVER else max(0.0, due - now()) * 1000
        if due != self._set:
            self._set = due
            seconds = 0.0 if due == NEVER else max(due, 0.001)  # all zeros is "never"
            ring = struct.pack("@4l", 0, 0, int(seconds), int(seconds % 1 * 1e9))
            self._libc.timerfd_settime(self.descriptor, TFD_TIMER_ABSTIME, ring, None)
        return None


def _terminal() -> int | None:
    try:
        return os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return None


def _alarm() -> socket.socket:
    """Return what is readable when a child has stopped or died; signals that are not for the guard go nowhere.

    Into handlers, not ignored: what is ignored would stay so in the command.
    """
    reading, writing = socket.socketpair()
    reading.setblocking(False)
    writing.setblocking(False)
    signal.set_wakeup_fd(writing.detach(), warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP):
        if number == signal.SIGCHLD or signal.getsignal(number) != signal.SIG_IGN:  # ignored deaths are not told
            signal.signal(number, lambda *_: None)
    return reading


def main() -> None:
    """Guard, over the socket whose descriptor is the only argument."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    adopt_orphans()
    Guard(Line(connection)).run()


if __name__ == "__main__":
    main()
