"""What people did through the dashboard: asked for, done, and recorded.

Every action is logged twice, when it is asked for and when it has ended, with the visitor's name. The last ones of this
process are also kept for the page. The log is the record: a process that ends takes its list with it.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone

from tenure import Registry, TenureError
from tenure.dashboard.subjects import number

log = logging.getLogger("tenure.dashboard")

KEPT = 200
HAND_OVER_WITHIN_S = 10.0
LONGEST_REASON = 200


@dataclass(frozen=True)
class Action:
    """One action: who did what, when, and what came of it."""

    id: str
    """By chance: numbers would mix up the actions of two worker processes."""
    at: datetime
    """By the clock of this process."""
    who: str
    what: str
    outcome: str = "under way"
    failed: bool = False


class Actions:
    """The actions of this process, one at a time."""

    def __init__(self, connect: Callable[[], Registry]) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._one_at_a_time = threading.Lock()
        self._kept: deque[Action] = deque(maxlen=KEPT)

    def latest(self) -> list[Action]:
        """Return the last actions, newest first."""
        with self._lock:
            return list(reversed(self._kept))

    def find(self, sought: str | None) -> Action | None:
        """Return one of the last actions, by its id."""
        return next((action for action in self.latest() if action.id == sought), None)

    def perform(self, who: str, form: Mapping[str, str]) -> Action:
        """Do what a form asks for; wait until it is done, and return how it ended."""
        verb = VERBS[form["what"]]
        action = self._begin(who, verb.describe(form))
        try:
            with self._one_at_a_time, self._connect() as registry:
                outcome, failed = verb.act(registry, form), False
        except TenureError as error:
            outcome, failed = str(error), True
        except BaseException:
            self._end(action, "failed: see the log of the application", failed=True)
            raise
        return self._end(action, outcome, failed=failed)

    def _begin(self, who: str, what: str) -> Action:
        action = Action(secrets.token_hex(8), datetime.now(timezone.utc), who, what)
        with self._lock:
            self._kept.append(action)
        log.info("%r asks through the dashboard: %s", who, what)
        return action

    def _end(self, action: Action, outcome: str, *, failed: bool) -> Action:
        ended = replace(action, outcome=outcome, failed=failed)
        with self._lock:
            for index, kept in enumerate(self._kept):
                if kept.id == action.id:
                    self._kept[index] = ended
        log.log(logging.WARNING if failed else logging.INFO, "%r: %s: %s", action.who, action.what, outcome)
        return ended


@dataclass(frozen=True)
class Verb:
    """One kind of action."""

    fields: tuple[str, ...]
    """What its form must have."""
    describe: Callable[[Mapping[str, str]], str]
    act: Callable[[Registry, Mapping[str, str]], str]
    """Does it, and returns what came of it."""


def _hand_over(registry: Registry, form: Mapping[str, str]) -> str:
    """Hand over, if the term is still the one that the visitor saw: a form that is sent twice acts once."""
    seen = number(form["token"], 0)
    after = registry.resign(form["role"], to=form["to"], timeout=HAND_OVER_WITHIN_S, token=seen)
    return "no other candidate took over" if after is None else f"{after.name} leads, token {after.token}"


def _trigger(registry: Registry, form: Mapping[str, str]) -> str:
    asked = registry.trigger(form["job"], role=form["role"])
    return "the leader runs it within seconds" if asked else "a run was asked for before and has not begun yet"


def _pause(registry: Registry, form: Mapping[str, str]) -> str:
    registry.pause(form["job"], form.get("reason", "")[:LONGEST_REASON], role=form["role"])
    return "paused"


def _resume(registry: Registry, form: Mapping[str, str]) -> str:
    registry.resume(form["job"], role=form["role"])
    return "runs again from its next due time on"


VERBS = {
    "hand-over": Verb(
        ("role", "to", "token"), lambda form: f"hand over role {form['role']!r} to {form['to']!r}", _hand_over
    ),
    "trigger": Verb(("role", "job"), lambda form: f"run job {form['job']!r} of role {form['role']!r} now", _trigger),
    "pause": Verb(("role", "job"), lambda form: f"pause job {form['job']!r} of role {form['role']!r}", _pause),
    "resume": Verb(("role", "job"), lambda form: f"resume job {form['job']!r} of role {form['role']!r}", _resume),
}
