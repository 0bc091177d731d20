"""``tenure run``: a command that runs only while this process leads."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
import sys
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from tenure.cli import guard
from tenure.cli.common import Seconds, database, one_line, without_password
from tenure.errors import StoreUnavailable, TenureError

if TYPE_CHECKING:
    from tenure.election import Election
    from tenure.node import Node
    from tenure.term import Term

SOMEBODY_ELSE_LEADS = 75
LEADERSHIP_LOST = 76
TIMED_OUT = 124
NOT_EXECUTABLE = 126
NOT_FOUND = 127
SIGNALLED = 128

ENDING = (signal.SIGTERM, signal.SIGINT)
"""What ends ``tenure run`` too, after the command."""
HARMLESS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH)
"""What does nothing while there is no command."""
FORWARDED = (*ENDING, *HARMLESS, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP)
LONGEST_WAIT_MS = 1e9
RETRY_S = 1.0
DECIDED_WITHIN_S = 5.0
"""How long --no-wait gives a database that answers slowly, or a role whose row is locked."""
SETTLE_S = 0.2
"""How long a new leader leaves one that was taken for dead. If only its connection was cut, it has frozen its command
at once, and kills it as soon as it has connected again: a moment in which the two would be there side by side."""
BACKOFF_S = (0.5, 30.0)
"""How long --restart waits after a command that ended: at first, and at most. One that ran for longer than the latter
begins anew."""


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--role", required=True, help="The role to lead.")
@click.option("--ttl", type=float, help="Seconds for which the lease is good; else TENURE_TTL, else 10.")
@click.option("--takeover", type=click.Choice(["instant", "strict"]), default="instant", show_default=True)
@click.option("--name", help="Who this is, for people; else TENURE_NAME, else host and process id.")
@click.option("--restart", is_flag=True, help="Go on: lead again and run it again, whenever it ended or was ended.")
@click.option("--no-wait", is_flag=True, help="Exit with 75 at once if somebody else leads.")
@click.option("--wait-timeout", type=Seconds(), help="Exit with 124 if not elected by then.")
@click.option("--hold", type=Seconds(), help="Lead for so long at least: see below about cron.")
@click.option("--grace", type=Seconds(), default=10.0, show_default=True,
              help="Between SIGTERM and SIGKILL, where there is time.")  # fmt: skip
@click.option("-v", "--verbose", is_flag=True, help="Say on stderr what happens.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@database
def run(
    *,
    command: tuple[str, ...],
    role: str,
    restart: bool,
    no_wait: bool,
    wait_timeout: float | None,
    hold: float | None,
    grace: float,
    verbose: bool,
    **settings: Any,
) -> None:
    """Run COMMAND only while this process leads ROLE.

    \b
    tenure run --role scheduler --restart -- python -m scheduler
    tenure run --role backup --no-wait --hold 60 -- ./backup      # from cron, on every machine
    tenure run --role worker --restart --url postgresql://localhost/app -- ./worker

    COMMAND finds TENURE_ROLE, TENURE_TOKEN, TENURE_NAMESPACE and TENURE_MEMBER in its environment (and TENURE_URL, if a
    URL was given). Its input and output are not touched, signals are passed on. When leadership is lost or in danger,
    COMMAND and everything that it started is ended before anybody else may lead: by SIGTERM if there is time, then by
    SIGKILL. So it is if this process is killed, or stopped. What is frozen together with its guard (a paused container
    or machine) may wake up late: only fenced writes protect against that.

    Without --restart it ends with the command, and when leadership is lost (`tenure resign` included). With --restart
    it also waits for a database that is not there yet.

    --no-wait alone keeps a command from running twice at the same time. Cron starts it on every machine at the same
    time, more or less: --hold 60 keeps the role for a minute after the start, so that of one tick only one runs.

    \b
    Exit codes: that of COMMAND (128+n for signal n); 75 somebody else leads (--no-wait);
    76 leadership lost; 124 --wait-timeout; 126 and 127 COMMAND cannot be run; 128+n ended
    by signal n; 2 usage, or the database cannot be used.
    """
    _check_command(command[0])
    for option, given in (("--no-wait", no_wait), ("--hold", hold is not None)):
        if restart and given:
            raise click.UsageError(f"--restart goes on for ever, and {option} is for a single run: give one of them")
    url = _absolute(settings["url"])
    mission = Mission(role, command, restart, no_wait, wait_timeout, hold or 0.0, grace, verbose, url)
    sys.exit(Runner(mission, settings).run())


def _check_command(name: str) -> None:
    """Leave at once if there is no such command: not only when this process is elected, some night."""
    if not name:
        raise click.UsageError("COMMAND is empty")
    places = [name] if os.sep in name else [os.path.join(place, name) for place in os.get_exec_path()]  # noqa: PTH118
    found = [place for place in places if os.path.exists(place)]  # noqa: PTH110 - pathlib decodes
    if not any(os.access(place, os.X_OK) and not os.path.isdir(place) for place in found):  # noqa: PTH112
        raise Ended(*_refusal(name, errno.EACCES if found else errno.ENOENT))


def _refusal(name: str, number: int) -> tuple[int, str]:
    code = NOT_FOUND if number == errno.ENOENT else NOT_EXECUTABLE
    return code, f"{without_password(name)}: {'command not found' if code == NOT_FOUND else os.strerror(number)}"


class Ended(click.ClickException):
    """The end, with an exit code and, if there is something to say, a line."""

    def __init__(self, code: int, message: str = "") -> None:
        """Keep both."""
        super().__init__(message)
        self.exit_code = code  # type: ignore[misc]

    def show(self, file: Any = None) -> None:  # noqa: ARG002 - click's
        """Say it."""
        if self.message:
            _say(self.message)


def _say(message: str) -> None:
    click.echo("tenure: " + message, err=True)


@dataclass(frozen=True)
class Mission:
    """What to run, and when."""

    role: str
    command: tuple[str, ...]
    restart: bool
    no_wait: bool
    wait_timeout: float | None
    hold: float
    grace: float
    verbose: bool
    url: str | None = None
    """What the command finds in TENURE_URL; what this process finds there, if it is None."""


class GuardProcess:
    """The guard, as seen from here."""

    def __init__(self) -> None:
        """Start it, in a process group of its own: what is sent to ours by the terminal is none of its business."""
        ours, theirs = socket.socketpair()
        with theirs:
            theirs.set_inheritable(True)
            argv = [sys.executable, "-I", "-S", str(Path(guard.__file__)), str(theirs.fileno())]
            self.pid = os.posix_spawn(sys.executable, argv, os.environ, setpgroup=0)
        self.line = guard.Line(ours)
        self._lock = threading.Lock()

    def send(self, *message: object, descriptors: list[int] | None = None) -> None:
        """Tell it something; from any thread. Who stopped it does not keep us from being heard, or from going on."""
        self.wake()
        with self._lock:
            self.line.send(*message, descriptors=descriptors)

    def wake(self) -> None:
        """Let it go on, if somebody has stopped it."""
        guard.signal_all([self.pid], signal.SIGCONT)

    @property
    def alive(self) -> bool:
        """Whether it is there: somebody may have killed it."""
        if self.pid:
            with contextlib.suppress(ChildProcessError):
                return os.waitpid(self.pid, os.WNOHANG)[0] == 0
        return False

    def close(self) -> None:
        """Have it kill whatever it still guards, and end. May be called twice."""
        if self.pid:
            self.wake()
            self.line.close()
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
            self.pid = 0


class Command:
    """One run of the command, under one term."""

    def __init__(self, mission: Mission, node: Node, term: Term, keeper: GuardProcess) -> None:
        """Start nothing yet."""
        self._mission = mission
        self._node = node
        self._term = term
        self._guard = keeper
        self._told = self._doubted = False
        self._lock = threading.Lock()
        self._deadline = float("-inf")
        self.code: int | None = None
        """How it ended: its exit code, as a shell has it."""
        self.lost = False
        """Whether it was ended for want of leadership."""

    def start(self) -> None:
        """Have the guard start it."""
        url = self._mission.url
        environment = {
            "TENURE_ROLE": self._term.role,
            "TENURE_TOKEN": str(self._term.token),
            "TENURE_NAMESPACE": self._node.namespace,
            "TENURE_MEMBER": self._term.member_id,
            **({} if url is None else {"TENURE_URL": url}),
        }
        encoded = {os.fsencode(name): os.fsencode(value) for name, value in environment.items()}
        argv = [os.fsencode(argument) for argument in self._mission.command]
        self._deadline = self._term.trusted_until
        self._tell("run", argv, encoded, self._node.ttl, self._mission.grace, self._deadline)

    @property
    def trust(self) -> tuple[float, str | None]:
        """Until when the term is trusted, and why it is over, if it is."""
        return self._term.trusted_until, self._term.lost_reason

    def follow(self) -> None:
        """Tell the guard what has become of the term.

        In doubt the command is frozen, and the deadline that the guard knows still holds. Whoever was asked to resign
        keeps the role until the command has ended. In any other case somebody else may lead at this moment, and there
        is no time left.
        """
        with self._lock:
            trusted_until, reason = self.trust
            if trusted_until > self._deadline or (self._doubted and trusted_until == self._deadline):
                self._deadline, self._doubted = trusted_until, False
                self._tell("trust", trusted_until)
            elif trusted_until < self._deadline and reason is None and not self._doubted:
                self._doubted = True
                self._guard.send("doubt")
            if reason is not None and not self._told:
                self._told = True
                if reason == "resigned":
                    self._guard.send("end", int(signal.SIGTERM))
                else:
                    self._guard.send("kill")

    def hear(self) -> None:
        """Take in what the guard says."""
        messages = self._guard.line.receive()
        if messages is None:  # somebody killed it: the kernel kills the command, and what it leaves behind is ours
            guard.kill_descendants()
            self._guard.close()
            self.code = SIGNALLED + signal.SIGKILL
        for (kind, *details), _ in messages or ():
            getattr(self, f"on_{kind}")(*details)

    def on_stopped(self) -> None:
        """Stop as the command did, by the terminal's wish; wake it when we are woken."""
        _stop()
        self._guard.send("continue")

    def on_failed(self, number: int) -> None:
        """Leave: the command could not be started."""
        raise Ended(*_refusal(self._mission.command[0], number))

    def on_over(self, status: int, cause: str) -> None:
        """Take in how it ended: nothing of it is left."""
        code = os.waitstatus_to_exitcode(status)
        self.code = code if code >= 0 else SIGNALLED - code
        self.lost = cause != "exit" or self._term.lost_reason is not None

    def _tell(self, *message: object) -> None:
        """Send a message, and with it the descriptors on which the sentinel stands now."""
        descriptors = self._node.sentinel_descriptors()
        try:
            self._guard.send(*message, descriptors=descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)


class Runner:
    """Stands for the role, and has the command run under each term."""

    def __init__(self, mission: Mission, settings: dict[str, Any]) -> None:
        """Prepare; nothing is connected, and no process started yet."""
        self._mission = mission
        self._settings = settings
        self._signals: deque[int] = deque()
        self._connecting = True
        self._ending: int | None = None
        """The signal that ends this process."""
        self._command: Command | None = None
        self._closed = False
        self._wakee, self._waker = socket.socketpair()
        self._wakee.setblocking(False)
        self._waker.setblocking(False)

    def run(self) -> int:
        """Do it all; return the exit code."""
        self._listen()
        self._guard = GuardProcess()  # first: it starts while the node does
        try:
            with contextlib.closing(self._started()) as node:
                self._connecting = False
                try:
                    return self._campaign(node)
                finally:
                    self._closed = True
                    self._guard.close()  # and only then the node leaves
        finally:
            self._guard.close()

    def _started(self) -> Node:
        """Connect. With --restart, wait for a database that is away."""
        from tenure.node import Node  # noqa: PLC0415 - it takes longer to import than to start the guard

        said = False
        while True:
            try:
                return Node(**self._settings).start()
            except StoreUnavailable as error:
                if not self._mission.restart:
                    raise
                if not said:
                    said = True
                    _say(self._about(f"{one_line(error)}; waiting for it"))
                self._pause(RETRY_S)

    def _campaign(self, node: Node) -> int:
        election = node.election(self._mission.role)
        threading.Thread(target=self._watch, args=(election,), daemon=True).start()
        pause = BACKOFF_S[0]
        while True:
            term = self._elected(node.election(self._mission.role))
            self._note(f"leads, with token {term.token}")
            if self._found_dead(node, election):
                self._pause(SETTLE_S)
            begun = guard.now()
            code, loss = self._supervise(node, election, term)
            self._note(f"the command has ended, with exit code {code}")
            if self._ending is not None:
                return SIGNALLED + self._ending
            if loss and not self._mission.restart:
                raise Ended(LEADERSHIP_LOST, self._about(f"leadership lost ({loss})"))
            if not self._mission.restart:
                self._pause(begun + self._mission.hold - guard.now())
                return code
            if loss:
                _say(self._about(f"leadership lost ({loss}); the command was ended"))
            if election.term is term:  # its command is not started anew under the same token
                election.withdraw()
            if not loss:
                pause = BACKOFF_S[0] if guard.now() - begun > BACKOFF_S[1] else pause
                self._pause(pause)
                pause = min(2 * pause, BACKOFF_S[1])

    def _elected(self, election: Election) -> Term:
        """Wait to be elected, as long as the mission allows."""
        begun = guard.now()
        timeout = self._mission.wait_timeout
        patience = DECIDED_WITHIN_S if self._mission.no_wait else timeout
        waiting = False
        while (term := election.term) is None:
            waited = guard.now() - begun
            if self._mission.no_wait and (election.settled or waited > DECIDED_WITHIN_S):
                self._leave(election)
            if timeout is not None and waited > timeout:
                self._note(f"not elected within {timeout:g} s")
                raise Ended(TIMED_OUT)
            if self._mission.verbose and election.settled and not waiting:
                waiting = True
                leader = election.leader()
                self._note(f"waits; {leader.name if leader else 'nobody'} leads")
            self._wait(None if patience is None else patience - waited)
            self._obey_alone()
        return term

    def _leave(self, election: Election) -> NoReturn:
        """Leave because of somebody else who leads, if there is one."""
        leader = election.leader()
        if leader is None and not election.settled:
            raise StoreUnavailable(
                self._about(
                    f"nobody leads, and nobody could be elected within {DECIDED_WITHIN_S:g} s: see `tenure doctor`"
                )
            )
        self._note(f"{leader.name if leader else 'somebody else'} leads")
        raise Ended(SOMEBODY_ELSE_LEADS)

    def _found_dead(self, node: Node, election: Election) -> bool:
        """Whether the leader before was taken for dead: a server may cut the connection of one that lives."""
        with contextlib.suppress(TenureError):
            return node.database != "sqlite" and any(past.reason == "death" for past in election.history(2)[1:])
        return True

    def _supervise(self, node: Node, election: Election, term: Term) -> tuple[int, str | None]:
        """Run the command until it ends, or must; return its exit code, and why it had to end if it had to."""
        if not self._guard.alive:
            self._guard = GuardProcess()
        command = Command(self._mission, node, term, self._guard)
        election.work(goes_on=True)
        try:
            command.start()
            guard.adopt_orphans()  # of the guard, should somebody kill it
            self._command = command
            command.follow()
            while command.code is None:
                self._wait(None, self._guard.line)
                while self._signals:
                    self._forward(self._signals.popleft())
                command.hear()
        finally:
            self._command = None
            loss = (term.lost_reason or "no renewal in time") if command.lost else None
            if loss and not self._mission.restart:
                election.withdraw()  # no new term for one that is about to leave
            election.work(goes_on=False)
        return command.code, loss

    def _pause(self, seconds: float) -> None:
        until = guard.now() + seconds
        while (left := until - guard.now()) > 0:
            self._wait(left)
            self._obey_alone()

    # Signals

    def _listen(self) -> None:
        """Take signals in, to be dealt with in their turn. What our parent ignores stays ignored, as under nohup."""
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        for number in FORWARDED:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._signalled)

    def _signalled(self, number: int, _: object) -> None:
        self._signals.append(number)
        if self._connecting:
            self._obey_alone()  # nobody waits for them yet, and connecting may take long

    def _obey_alone(self) -> None:
        """Do what signals say while there is no command."""
        while self._signals:
            number = self._signals.popleft()
            if number == signal.SIGTSTP:
                _stop()
            elif number not in HARMLESS:
                raise Ended(SIGNALLED + number)

    def _forward(self, number: int) -> None:
        if number in ENDING:
            self._ending = number
            self._guard.send("end", number)
        else:
            self._guard.send("signal", number)

    # Waiting

    def _watch(self, election: Election) -> None:
        """Follow the term for the guard, and wake the main thread, whenever something changes; a thread of its own."""

        def seen() -> tuple[object, ...]:
            command = self._command
            return command.trust if command else None, election.term, election.settled, self._closed

        before: tuple[object, ...] = ()
        while not self._closed:
            election.wait_for(lambda before=before: seen() != before, None)  # type: ignore[misc]
            before = seen()
            if (command := self._command) is not None:
                command.follow()
            with contextlib.suppress(OSError):
                self._waker.send(b"!")

    def _wait(self, seconds: float | None, *files: Any) -> None:
        """Wait until something has changed, a signal came, or a file can be read; for so long at most."""
        poll = select.poll()
        for file in (self._wakee, *files):
            poll.register(file, select.POLLIN)
        poll.poll(None if seconds is None else min(max(1.0, seconds * 1000), LONGEST_WAIT_MS))
        with contextlib.suppress(BlockingIOError):
            while self._wakee.recv(4096):
                pass

    def _about(self, message: str) -> str:
        return f"role {self._mission.role!r}: {message}"

    def _note(self, message: str) -> None:
        if self._mission.verbose:
            _say(self._about(message))


def _absolute(url: str | None) -> str | None:
    """Return a URL that leads to the same file from anywhere."""
    scheme, separator, path = (url or "").partition(":///")
    if scheme.startswith("sqlite") and separator:
        return f"{scheme}{separator}{Path(path).absolute()}"
    return url


def _stop() -> None:
    """Stop this process and its job, as Ctrl-Z would, until the shell wakes them up.

    To this very thread, so that it happens before the next line; and by SIGTSTP, which the kernel drops where no shell
    is there to wake anybody up.
    """
    ours = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
    os.killpg(0, signal.SIGTSTP)
    signal.signal(signal.SIGTSTP, signal.SIG_DFL)
    signal.pthread_kill(threading.get_ident(), signal.SIGTSTP)
    signal.signal(signal.SIGTSTP, ours)
