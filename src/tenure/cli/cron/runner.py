"""Runs the commands of a crontab as the jobs of a schedule, each under a guard process."""

from __future__ import annotations

import contextlib
import select
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from tenure import AsyncTerm, ConfigError, Node, Run, Schedule, TenureError
from tenure.cli.cron.crontab import Entry
from tenure.cli.internals import run_in_thread, wait_for
from tenure.cli.output import Ended, say
from tenure.cli.run.guard_process import GuardedCommand, GuardProcess
from tenure.cli.run.runner import SETTLE_S, RunOptions, check_sight

COMPARE_EVERY_S = 5.0
LOOK_EVERY_MS = 100
"""How often a run reports the term's state to its guard."""


class CommandFailed(TenureError):
    """A command ended with an exit code other than 0, or could not be started."""


class CronSchedule(Schedule):
    """The schedule of a crontab. It waits a moment after an election, as ``tenure run`` does."""

    def __init__(self, begin: Callable[[AsyncTerm], object], **settings: Any) -> None:
        super().__init__(**settings)
        self._begin = begin

    async def __call__(self, term: AsyncTerm) -> None:
        """Compare the crontabs, and run the jobs."""
        await run_in_thread(lambda: self._begin(term))
        await super().__call__(term)


class CronRunner:
    """The jobs of a crontab on this machine."""

    def __init__(
        self, entries: list[Entry], options: dict[str, Any], settings: dict[str, Any], url: str | None
    ) -> None:
        self._role: str = options.pop("role")
        self._lock_id: str | None = options.pop("lock_id")
        self._grace: float = options.pop("grace")
        self._group_only: bool = options.pop("group_only")
        self._verbose: bool = options.pop("verbose")
        self._settings = settings
        self._url = url
        self._schedule = CronSchedule(self._elected, workers=len(entries) + 1)
        for entry in entries:
            try:
                add = self._schedule.cron(entry.expression, name=entry.name, zone=entry.zone, **options)
            except ConfigError as error:
                raise ConfigError(f"{entry.place}: {error}" if entry.place else str(error)) from None
            add(self._job(entry))

    def run(self) -> None:
        """Run the jobs until SIGTERM or SIGINT."""
        guard = GuardProcess(group_only=self._group_only)
        try:
            check_sight(guard, group_only=self._group_only)
        finally:
            guard.close()
        self._node = Node(**self._settings, start="wait")
        drain_within = self._grace + 5.0
        self._node.leader_only(
            self._role, self._schedule, name="cron", drain_within=drain_within, lock_id=self._lock_id
        )
        self._note(f"stands for role {self._role!r}, with the jobs {', '.join(self._schedule.jobs)}")
        self._node.run()

    def _elected(self, term: AsyncTerm) -> None:
        """Wait for a leader that was cut off to end its commands, and begin to compare the crontabs."""
        self._note(f"leads, with token {term.token}")
        wait_for(self._node.election(self._role), lambda: term.lost_reason is not None, SETTLE_S)
        threading.Thread(target=self._compare, args=(term,), daemon=True).start()

    def _compare(self, term: AsyncTerm) -> None:
        """Warn if another machine has another crontab, as long as this one leads."""
        election, mine = self._node.election(self._role), self._settings["metadata"]["crontab"]
        said = set()
        with contextlib.suppress(TenureError):
            while True:
                for other in election.candidates():
                    theirs = other.metadata.get("crontab")
                    if theirs not in (mine, None) and (other.name, theirs) not in said:
                        said.add((other.name, theirs))
                        say(
                            f"the crontab of {other.name} differs from that of {self._node.name} ({theirs}, not "
                            f"{mine}): the crontab of the machine that leads counts"
                        )
                if wait_for(election, lambda: term.lost_reason is not None, COMPARE_EVERY_S):
                    return

    def _job(self, entry: Entry) -> Callable[[Run], None]:
        def job(run: Run) -> None:
            self._note(f"{entry.name}, due {run.due.isoformat()}: started")
            code = self._supervise(entry, run)
            if code != 0:
                say(f"{entry.name}, due {run.due.isoformat()}: failed with exit code {code}")
                raise CommandFailed(f"exit code {code}")
            self._note(f"{entry.name}, due {run.due.isoformat()}: done")

        return job

    def _supervise(self, entry: Entry, run: Run) -> int:
        """Run a command under a guard of its own until it has ended; return its exit code."""
        options = RunOptions(
            role=self._role,
            command=entry.command,
            restart=False,
            no_wait=False,
            wait_timeout=None,
            hold=None,
            grace=self._grace,
            verbose=False,
            group_only=self._group_only,
            url=self._url,
            environment={
                **entry.environment,
                "TENURE_JOB": run.job,
                "TENURE_DUE": run.due.isoformat(),
                "TENURE_ATTEMPT": str(run.attempt),
            },
        )
        guard = GuardProcess(group_only=self._group_only)
        try:
            command = GuardedCommand(options, self._node, run.term, guard)
            command.start()
            poll = select.poll()
            poll.register(guard.channel, select.POLLIN)
            asked = False
            while command.code is None:
                command.follow()
                poll.poll(LOOK_EVERY_MS)
                if run.stopping and not asked:
                    asked = True
                    guard.send("end", int(signal.SIGTERM))
                command.receive()
        except Ended as error:
            raise CommandFailed(str(error)) from None
        finally:
            guard.close()
        return command.code

    def _note(self, message: str) -> None:
        if self._verbose:
            say(message)
            sys.stderr.flush()
