"""Every rule of the design is necessary: take it away, and the simulator shows the promise that breaks.

A mutation replaces text in a copy of ``src/tenure`` (each piece must occur exactly once, so that a refactoring cannot
turn a mutation into nothing) and tells the story that needs the rule, with the real SQL. The story must end badly, in
the way that is expected; and with the same seeds and the code as it is, it must end well.

Not here: the fence without its lock. SQLite lets one transaction write at a time, so only a real PostgreSQL shows it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import tenure
from tests.simulation.runner import run

SEEDS = 6
SOURCE = Path(tenure.__file__).parent
ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Mutation:
    """What is taken away, and the story that shows it."""

    rule: str
    scenario: str
    breaks: str
    """How the story must end: a pattern."""
    edits: tuple[tuple[str, str, str], ...]


TWO_LEADERS = "two leaders|while it leads"
NOBODY_LEADS = "not every role is led again"

MUTATIONS = [
    Mutation(
        "trust anchored at the answer",
        "late-answers",
        TWO_LEADERS,
        (
            (
                "protocol.py",
                "        self.expire(now)  # first: an answer that comes after the deadline revives nothing\n",
                "        self.expire(now)\n        self._sent = now\n",
            ),
        ),
    ),
    Mutation(
        "silence counted from the question",
        "delayed-look",
        TWO_LEADERS,
        (
            (
                "protocol.py",
                "        if self._look_at_once:\n",
                "        self._asked = now\n        if self._look_at_once:\n",
            ),
            (
                "protocol.py",
                "self._observation.look(looked, self._member.id, now)",
                "self._observation.look(looked, self._member.id, self._asked)",
            ),
        ),
    ),
    Mutation(
        "end without the count",
        "delayed-end",
        TWO_LEADERS,
        (("statements.py", "ended_at is null and renewals = :renewals", "ended_at is null"),),
    ),
    Mutation(
        "renewal of an ended member",
        "ender-dies",
        NOBODY_LEADS,
        (
            (
                "statements.py",
                "    watch_pid = :watch_pid, watch_start = :watch_start\nwhere id = :id and ended_at is null\n",
                "    watch_pid = :watch_pid, watch_start = :watch_start\nwhere id = :id\n",
            ),
        ),
    ),
    Mutation(
        "no acquire of my own lapsed role",
        "long-outage",
        NOBODY_LEADS,
        (("statements.py", "(holder is null or holder = :id\n", "(holder is null\n"),),
    ),
    Mutation(
        "observation kept across a broken connection",
        "outage",
        "the same node leads|nobody is ended",
        (
            (
                "protocol.py",
                "            self._watch_open = False\n            self._observation = Observation()\n",
                "            self._watch_open = False\n",
            ),
            (
                "protocol.py",
                "            self._look_at_once = True\n            self._observation = Observation()\n",
                "            self._look_at_once = True\n",
            ),
        ),
    ),
    Mutation(
        "acquire on an unconfirmed server",
        "promotion-lacks-acquire",
        TWO_LEADERS,
        (
            (
                "protocol.py",
                "return self._confirmed is not None and self._confirmed.incarnation == self._known_server.incarnation",
                "return self._confirmed is not None",
            ),
        ),
    ),
    Mutation(
        "a new server confirmed at once",
        "promotion-lacks-acquire",
        TWO_LEADERS,
        (
            (
                "protocol.py",
                "return self._unconfirmed[1] + (timing.silence(self._confirmed.max_ttl) if self._confirmed else 0)",
                "return self._unconfirmed[1]",
            ),
        ),
    ),
    Mutation(
        "resume across incarnations",
        "promotion-lacks-takeover",
        TWO_LEADERS,
        (
            ("protocol.py", "if self._membership.server.incarnation != opened.server.incarnation:", "if False:"),
            (
                "statements.py",
                "where id = :id and ended_at is null and incarnation = :incarnation\n",
                "where id = :id and ended_at is null\n",
            ),
        ),
    ),
    Mutation(
        "end without the sentinel's epoch and the server's start time",
        "stale-proof",
        TWO_LEADERS,
        (
            (
                "statements.py",
                "ended_at is null and sentinel_epoch = :epoch and server_start = :server_start",
                "ended_at is null",
            ),
        ),
    ),
    Mutation(
        "proof of death on another server",
        "short-restart",
        "the same node leads|under the same token",
        (("observation.py", "            and member.server_start == self._server.start\n", ""),),
    ),
    Mutation(
        "proof of death without the fresh connection",
        "fast-stop",
        "two leaders|while it leads|the same node leads|under the same token",
        (
            (
                "protocol.py",
                "        if not looked.vacancy:\n",
                "        self._judge(self._observation.knocked(accepted=True))\n        if not looked.vacancy:\n",
            ),
        ),
    ),
    Mutation(
        "strict members take a sentinel as well",
        "strict-leader-cut",
        TWO_LEADERS,
        (("protocol.py", 'self._sentinels and self.settings.takeover == "instant"', "self._sentinels"),),
    ),
    Mutation(
        "no doubt",
        "instant-leader-cut",
        TWO_LEADERS,
        (("protocol.py", '            self._step("sentinel lost")\n', ""),),
    ),
    Mutation(
        "server's keepalive shorter than the TTL",
        "partition",
        TWO_LEADERS,
        (("timing.py", "return ttl + margin(ttl)", "return ttl / 2"),),
    ),
    Mutation(
        "silence shorter than trust",
        "partition-leader",
        TWO_LEADERS,
        (("timing.py", "return ttl * 1.02", "return ttl * 0.8"),),
    ),
    Mutation(
        "no margin between trust and silence",
        "clock-drift",
        TWO_LEADERS,
        (("timing.py", "return ttl - margin(ttl)", "return ttl"),),
    ),
    Mutation(
        "token from the old row",
        "lagging-promotion",
        r"was given r \d+ after",
        (("statements.py", "{greatest}(token + 1, :floor, ", "{greatest}(token + 1, "),),
    ),
    Mutation(
        "reused member id",
        "lagging-promotion",
        NOBODY_LEADS,
        (
            (
                "protocol.py",
                "id=str(uuid.UUID(int=self._chance.getrandbits(128), version=4))",
                "id=str(uuid.uuid5(uuid.NAMESPACE_OID, self.settings.name))",
            ),
        ),
    ),
    Mutation(
        "fence that ignores ended holders",
        "fenced-stream",
        "in spite of open transactions",
        (
            (
                "statements.py",
                "m.id = r.holder and m.ended_at is null\n                and m.incarnation",
                "m.id = r.holder\n                and m.incarnation",
            ),
        ),
    ),
    Mutation(
        "fence that ignores the incarnation",
        "stale-fence-after-promotion",
        "a write fenced with",
        (
            (
                "statements.py",
                "m.ended_at is null\n                and m.incarnation = {incarnation})",
                "m.ended_at is null)",
            ),
        ),
    ),
    Mutation(
        "adoption of a dropped token",
        "long-pause",
        r"announces r \d+ after|takes up r \d+ again",
        (("candidacy.py", "elif token > self._dropped.get(role, 0):", "elif True:"),),
    ),
    Mutation(
        "an answer after the deadline revives a term",
        "pause-across-an-answer",
        "after it had lapsed",
        (
            (
                "protocol.py",
                "        self.expire(now)  # first: an answer that comes after the deadline revives nothing\n",
                "",
            ),
        ),
    ),
    Mutation(
        "elected although trust has lapsed",
        "late-acquire",
        "without trust in it",
        (("candidacy.py", "        elif trusted:\n", "        elif True:\n"),),
    ),
    Mutation(
        "an adopted term is acquired again",
        "lost-acquire",
        "although its term of s was",
        (("candidacy.py", "            self.wanted.discard(role)\n            self.busy", "            self.busy"),),
    ),
    Mutation(
        "verdicts forgotten that came in while others were carried out",
        "two-die-one-after-the-other",
        "the second death is acted upon",
        (("protocol.py", "if v not in ask.verdicts and v.incarnation == here]", "if False]"),),
    ),
    Mutation(
        "a term is resumed that was never suspended",
        "acquire-lost-in-a-restart",
        r"Resumed\(role='s'.* although its term of s was",
        (
            (
                "protocol.py",
                "for role, token in self.roles.holding.items() if before.get(role) == token]",
                "for role, token in self.roles.holding.items()]",
            ),
        ),
    ),
    Mutation(
        "a reservation outlives its member",
        "heir-dies",
        "nobody led",
        (
            (
                "statements.py",
                "\n       or not exists (select 1 from {members} w where w.id = reserved_for and w.ended_at is null))",
                ")",
            ),
        ),
    ),
]


def mutated(mutation: Mutation, directory: Path) -> Path:
    """A copy of the package with the rule taken away."""
    copy = directory / "tenure"
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for name, old, new in mutation.edits:
        text = (copy / name).read_text()
        assert text.count(old) == 1, f"{mutation.rule}: this must occur exactly once in {name}:\n{old}"
        (copy / name).write_text(text.replace(old, new))
    return copy


PROGRAM = """
import sys, tenure
from tests.simulation.runner import run
assert tenure.__path__[0] == sys.argv[1], tenure.__path__
for seed in range(int(sys.argv[3])):
    print(seed, run(sys.argv[2], seed, sql=True).violation)
"""


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.rule.replace(" ", "-"))
def test_without_this_rule_a_promise_breaks(mutation: Mutation, tmp_path: Path) -> None:
    copy = mutated(mutation, tmp_path)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(copy), mutation.scenario, str(SEEDS)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    assert re.search(mutation.breaks, result.stdout), f"nobody noticed:\n{result.stdout}"


@pytest.mark.parametrize("scenario", sorted({mutation.scenario for mutation in MUTATIONS}))
def test_with_the_rules_as_they_are_the_story_ends_well(scenario: str) -> None:
    for seed in range(SEEDS):
        outcome = run(scenario, seed, sql=True)
        assert outcome.violation is None, f"{outcome.violation}\n{outcome.replay}\n{outcome.tail()}"
