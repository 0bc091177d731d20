"""A management command that works only while it leads."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from django.core.management.base import BaseCommand, CommandError

from tenure.errors import Fenced, LeadershipLost, TenureError, WaitTimeout
from tenure.integrations.django.conf import node_arguments
from tenure.node import Node

SOMEBODY_ELSE_LEADS, LEADERSHIP_LOST, TIMED_OUT, UNUSABLE = 75, 76, 124, 2
"""The exit codes of ``tenure run``."""
DECIDED_WITHIN_S = 5.0

CommandT = TypeVar("CommandT", bound=BaseCommand)


def leader_command(role: str, *, wait: bool | float = True) -> Callable[[type[CommandT]], type[CommandT]]:
    """Let a command's ``handle()`` run only while this process leads ``role``: a decorator for its class.

    ``wait`` is what it does while somebody else leads: wait (True), wait for so many seconds, or end at once (False).
    ``handle()`` finds the term in ``self.term``: it calls ``self.term.ensure()`` as it goes, and fences what it writes.
    Nobody can stop it from outside; where it must not outlive its term, use ``manage.py tenure_run``.

    The command ends as ``tenure run`` does, with a line that says why: 75 somebody else leads, 124 not elected in
    time, 76 leadership lost, 2 the database cannot be used.
    """

    def decorate(command: type[CommandT]) -> type[CommandT]:
        handle = command.handle

        @functools.wraps(handle)
        def led(self: Any, *args: Any, **options: Any) -> Any:
            try:
                with Node(**node_arguments()) as node:
                    _stand(node, role, wait, self.stderr, options.get("verbosity", 1))
                    with node.lead(role, timeout=None if wait is True else float(wait)) as term:
                        self.term = term
                        return handle(self, *args, **options)
            except (LeadershipLost, Fenced) as error:
                raise CommandError(str(error), returncode=LEADERSHIP_LOST) from error
            except WaitTimeout as error:
                raise CommandError(str(error), returncode=TIMED_OUT) from error
            except TenureError as error:
                raise CommandError(str(error), returncode=UNUSABLE) from error

        command.handle = led
        return command

    return decorate


def _stand(node: Node, role: str, wait: bool | float, stderr: Any, verbosity: int) -> None:
    """Stand for the role until it is decided; say who leads, and leave if that is somebody else and nobody waits."""
    election = node.election(role)
    election.wait_for(lambda: election.is_leader or election.settled, DECIDED_WITHIN_S if wait is False else 1.0)
    if election.is_leader:
        return
    leader = election.leader()
    said = f"role {role!r}: {leader.name if leader else 'nobody'} leads"
    if wait is False:
        raise CommandError(f"{said}; nothing was done", returncode=SOMEBODY_ELSE_LEADS)
    if verbosity:
        stderr.write(f"{said}; waiting")
