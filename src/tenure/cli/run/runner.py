"""The runner: waits to be elected, and has the guard run the command under each term."""

from __future__ import annotations

import contextlib
import select
import signal
import socket
import threading
from collections import deque
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

from tenure.base.clock import now
from tenure.cli import exit_codes
from tenure.cli.internals import claim_run, end_run, hold_role, is_decided, restart_pauses, stop_standing, wait_for
from tenure.cli.output import Ended, one_line, say
from tenure.cli.run.guard_process import GuardedCommand, GuardProcess, stop_job
from tenure.cli.run.processes import adopt_orphans, sees
from tenure.errors import StoreUnavailable, TenureError
from tenure.events import EndReason

if TYPE_CHECKING:
    from tenure import Election, Node, Run, Term

ENDING = (signal.SIGTERM, signal.SIGINT)
"""Signals that end ``tenure run`` too, after the command."""
HARMLESS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH)
"""Signals that do nothing while no command runs."""
FORWARDED = (*ENDING, *HARMLESS, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP)
LONGEST_WAIT_MS = 1e9
RETRY_S = 1.0
SETTLE_S = 0.2
"""How long a new leader waits after it took over from a leader that it found dead. If only the connection of the old
leader was cut, that leader has frozen its command at once, and kills it when it has connected again. Without the wait
the frozen command and the new one would both exist for a moment."""


@dataclass(frozen=True)
class RunOptions:
    """The command, and when to run it."""

    role: str
    command: tuple[str, ...]
    restart: bool
    no_wait: bool
    wait_timeout: float | None
    hold: float | None
    grace: float
    verbose: bool
    group_only: bool = False
    """Whether to end only the command's process group, since its other descendants cannot be found."""
    url: str | None = field(default=None, repr=False)
    """The TENURE_URL of the command; None to keep that of this process."""
    claim: str | None = None
    """The job whose run is claimed before the command is started."""
    due: datetime | None = None
    """When that run is due."""
    environment: dict[str, str] = field(default_factory=dict, repr=False)
    """Further variables of the command."""
    lock_id: str | None = None
    """The advisory lock that this process must hold to lead."""


class Runner:
    """Stands for the role, and has the command run under each term."""

    def __init__(self, options: RunOptions, settings: dict[str, Any]) -> None:
        self._options = options
        self._settings = settings
        self._signals: deque[int] = deque()
        self._connecting = True
        self._ending: int | None = None
        """The signal that ends this process."""
        self._command: GuardedCommand | None = None
        self._closed = False
        self._wakee, self._waker = socket.socketpair()
        self._wakee.setblocking(False)
        self._waker.setblocking(False)

    def run(self) -> int:
        """Run the command under each term, as the options say; return the exit code."""
        self._listen()
        # First, so that it starts while the node does.
        self._guard = GuardProcess(group_only=self._options.group_only)
        try:
            check_sight(self._guard, group_only=self._options.group_only)
            with contextlib.closing(self._started()) as node:
                self._connecting = False
                try:
                    return self._campaign(node)
                finally:
                    self._closed = True
                    # The guard must have killed the command before the node leaves.
                    self._guard.close()
        finally:
            self._guard.close()

    def _started(self) -> Node:
        """Connect. With --restart, wait for a database that cannot be reached."""
        from tenure import Node  # noqa: PLC0415 - it takes longer to import than to start the guard

        said = False
        while True:
            try:
                return Node(**self._settings).start()
            except StoreUnavailable as error:
                if not self._options.restart:
                    raise
                if not said:
                    said = True
                    say(self._about(f"{one_line(error)}; waiting for the database"))
                self._pause(RETRY_S)

    def _campaign(self, node: Node) -> int:
        election = node.election(self._options.role, lock_id=self._options.lock_id)
        threading.Thread(target=self._watch, args=(election,), daemon=True).start()
        pauses = restart_pauses()
        while True:
            term = self._elected(node.election(self._options.role))
            self._note(f"leads, with token {term.token}")
            if self._found_dead(node, election):
                self._pause(SETTLE_S)
            run = self._claimed(term)
            if run is None and self._options.claim:
                return 0
            begun = now()
            code, loss = self._supervise(node, election, term, run)
            self._note(f"the command has ended, with exit code {code}")
            if self._ending is not None:
                return exit_codes.SIGNALLED + self._ending
            if loss and not self._options.restart:
                raise Ended(exit_codes.LEADERSHIP_LOST, self._about(f"leadership lost ({loss})"))
            if not self._options.restart:
                self._pause(begun + (self._options.hold or 0.0) - now())
                return code
            if loss:
                say(self._about(f"leadership lost ({loss}); the command was ended"))
            if election.term is term:
                # The command must not start again under the same token.
                election.withdraw()
            if not loss:
                ended = now()
                self._pause(pauses.ended(begun, ended) - ended)

    def _elected(self, election: Election) -> Term:
        """Wait to be elected, as long as the options allow."""
        begun = now()
        timeout = self._options.wait_timeout
        patience = exit_codes.DECIDED_WITHIN_S if self._options.no_wait else timeout
        waiting = False
        while (term := election.term) is None:
            waited = now() - begun
            if self._options.no_wait and (is_decided(election) or waited > exit_codes.DECIDED_WITHIN_S):
                self._leave(election)
            if timeout is not None and waited > timeout:
                self._note(f"not elected within {timeout:g} s")
                raise Ended(exit_codes.TIMED_OUT)
            if self._options.verbose and is_decided(election) and not waiting:
                waiting = True
                leader = election.leader()
                self._note(f"waits; {leader.name if leader else 'no node'} leads")
            self._wait(None if patience is None else patience - waited)
            self._obey_alone()
        return term

    def _leave(self, election: Election) -> NoReturn:
        """Exit because another node leads; raise if the election is undecided."""
        leader = election.leader()
        if leader is None and not is_decided(election):
            within = f"{exit_codes.DECIDED_WITHIN_S:g} s"
            raise StoreUnavailable(
                self._about(f"there is no leader, and none was elected within {within}: run `tenure doctor`")
            )
        self._note(f"{leader.name if leader else 'another node'} leads")
        raise Ended(exit_codes.ANOTHER_LEADS)

    def _claimed(self, term: Term) -> Run | None:
        """Claim the run that the options name; None if there is none, or if another machine has claimed it."""
        job, due = self._options.claim, self._options.due
        if job is None or due is None:
            return None
        run = claim_run(term, job, due)
        if run is None:
            self._note(f"{job}, due {due.isoformat()}, was claimed before: there is nothing to do")
        return run

    def _found_dead(self, node: Node, election: Election) -> bool:
        """Whether the previous leader was found dead: it may still run, if only its connection was cut."""
        with contextlib.suppress(TenureError):
            return node.database != "sqlite" and any(past.reason == EndReason.DEATH for past in election.history(2)[1:])
        return True

    def _supervise(self, node: Node, election: Election, term: Term, run: Run | None) -> tuple[int, str | None]:
        """Run the command until it has ended; return its exit code, and why the term was lost (None if it was not)."""
        if not self._guard.alive:
            self._guard = GuardProcess(group_only=self._options.group_only)
        command = GuardedCommand(self._options, node, term, self._guard)
        hold_role(election, held=True)
        try:
            command.start()
            self._command = command
            command.follow()
            while command.code is None:
                self._wait(None, self._guard.channel)
                while self._signals:
                    self._forward(self._signals.popleft())
                command.receive()
            if run is not None and not command.lost:
                end_run(run, command.code)
        finally:
            self._command = None
            loss = (term.lost_reason or "no renewal in time") if command.lost else None
            if loss and not self._options.restart:
                # This process is about to exit, so it must not be elected again.
                stop_standing(election)
            hold_role(election, held=False)
        return command.code, loss

    def _pause(self, seconds: float) -> None:
        until = now() + seconds
        while (left := until - now()) > 0:
            self._wait(left)
            self._obey_alone()

    # Signals

    def _listen(self) -> None:
        """Queue signals for the main loop. A signal that this process inherited as ignored stays so, as under nohup."""
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        for number in FORWARDED:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._signalled)

    def _signalled(self, number: int, _: object) -> None:
        self._signals.append(number)
        if self._connecting:
            # The main loop is not running yet, and connecting may take long.
            self._obey_alone()

    def _obey_alone(self) -> None:
        """Act on signals while no command runs."""
        while self._signals:
            number = self._signals.popleft()
            if number == signal.SIGTSTP:
                stop_job()
            elif number not in HARMLESS:
                raise Ended(exit_codes.SIGNALLED + number)

    def _forward(self, number: int) -> None:
        if number in ENDING:
            self._ending = number
        self._guard.send("end" if number in ENDING else "signal", number)

    # Waiting

    def _watch(self, election: Election) -> None:
        """At every change, report the term's state to the guard, and wake the main thread. Runs in its own thread."""

        def seen() -> tuple[object, ...]:
            command = self._command
            return command.trust if command else None, election.term, is_decided(election), self._closed

        before: tuple[object, ...] = ()
        while not self._closed:
            wait_for(election, lambda before=before: seen() != before)  # type: ignore[misc]
            before = seen()
            if (command := self._command) is not None:
                command.follow()
            with contextlib.suppress(OSError):
                self._waker.send(b"!")

    def _wait(self, seconds: float | None, *files: Any) -> None:
        """Wait up to ``seconds`` until something changes, a signal arrives, or a file can be read."""
        poll = select.poll()
        for file in (self._wakee, *files):
            poll.register(file, select.POLLIN)
        poll.poll(None if seconds is None else min(max(1.0, seconds * 1000), LONGEST_WAIT_MS))
        with contextlib.suppress(BlockingIOError):
            while self._wakee.recv(4096):
                pass

    def _about(self, message: str) -> str:
        return f"role {self._options.role!r}: {message}"

    def _note(self, message: str) -> None:
        if self._options.verbose:
            say(self._about(message))


def check_sight(guard: GuardProcess, *, group_only: bool) -> None:
    """Refuse to run if descendants of the command cannot be found, and so could outlive its term."""
    if group_only or (adopt_orphans() and sees(guard.pid)):
        return
    raise Ended(
        exit_codes.USAGE,
        "the command cannot be guarded here: processes that it starts cannot be found and could outlive its term, "
        "because /proc is not mounted, belongs to another PID namespace, or is missing on this system; mount "
        "/proc, or give --group-only if it is enough to end the command's process group",
    )
