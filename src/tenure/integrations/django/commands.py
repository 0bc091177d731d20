"""Management commands that work only while their process leads."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from django.core.management.base import BaseCommand, CommandError

from tenure import Election, Fenced, LeadershipLost, Node, TenureError, WaitTimeout
from tenure.integrations.django.conf import node_arguments

CommandT = TypeVar("CommandT", bound=BaseCommand)


def leader_command(
    role: str, *, wait: bool | float = True, lock_id: int | str | None = None
) -> Callable[[type[CommandT]], type[CommandT]]:
    """Let a command's ``handle()`` run only while this process leads ``role``: a decorator for its class.

    ``wait`` is what the command does while another node leads: wait (True), wait so many seconds (a number), or exit
    (False). ``handle()`` finds the term in ``self.term``. It should call ``self.term.ensure()`` from time to time, and
    fence its writes. Nothing stops it from outside: if it must not outlive its term, use ``manage.py tenure_run``.
    ``lock_id`` is that of ``node.election()``.

    The exit codes are those of ``tenure run``, with a line that gives the reason: 75 another node leads, 124 not
    elected in time, 76 leadership lost, 2 the database cannot be used.
    """

    def decorate(command: type[CommandT]) -> type[CommandT]:
        from tenure.cli import exit_codes  # noqa: PLC0415 - loads click, which a process that serves does not need

        handle = command.handle

        @functools.wraps(handle)
        def led(self: Any, *args: Any, **options: Any) -> Any:
            try:
                with Node(**node_arguments()) as node:
                    election = node.election(role, lock_id=lock_id)
                    _stand(election, role, wait, self.stderr, options.get("verbosity", 1))
                    with node.lead(role, timeout=None if wait is True else float(wait)) as term:
                        self.term = term
                        return handle(self, *args, **options)
            except (LeadershipLost, Fenced) as error:
                raise CommandError(str(error), returncode=exit_codes.LEADERSHIP_LOST) from error
            except WaitTimeout as error:
                raise CommandError(str(error), returncode=exit_codes.TIMED_OUT) from error
            except TenureError as error:
                raise CommandError(str(error), returncode=exit_codes.USAGE) from error

        command.handle = led
        return command

    return decorate


def _stand(election: Election, role: str, wait: bool | float, stderr: Any, verbosity: int) -> None:
    """Wait until the election is decided. If another node leads, say so; exit if ``wait`` is False."""
    from tenure.cli import exit_codes, internals  # noqa: PLC0415 - as above

    patience_s = exit_codes.DECIDED_WITHIN_S if wait is False else 1.0
    internals.wait_for(election, lambda: election.is_leader or internals.is_decided(election), patience_s)
    if election.is_leader:
        return
    leader = election.leader()
    text = f"role {role!r}: {leader.name if leader else 'no node'} leads"
    if wait is False:
        raise CommandError(f"{text}; nothing was done", returncode=exit_codes.ANOTHER_LEADS)
    if verbosity:
        stderr.write(f"{text}; waiting")
