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
from tests.verification.simulation.runner import run

pytestmark = pytest.mark.long  # `make check` runs these while the torture waits

SEEDS = 6
SOURCE = Path(tenure.__file__).parent
ROOT = Path(__file__).parents[3]


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
                "core/protocol.py",
                "        # Before anything else: an answer that comes after the deadline revives nothing.\n",
                "        self._connection.sent = now\n",
            ),
        ),
    ),
    Mutation(
        "silence counted from the question",
        "delayed-look",
        TWO_LEADERS,
        (
            (
                "core/watch_lane.py",
                "        reach = self._evidence.reach\n",
                "        self._asked = now\n        reach = self._evidence.reach\n",
            ),
            (
                "core/watch_lane.py",
                "self._evidence.look(looked, me, now)",
                "self._evidence.look(looked, me, self._asked)",
            ),
        ),
    ),
    Mutation(
        "end without the count",
        "delayed-end",
        TWO_LEADERS,
        (("store/statements.py", "ended_at is null and renewals = :renewals", "ended_at is null"),),
    ),
    Mutation(
        "renewal of an ended member",
        "ender-dies",
        NOBODY_LEADS,
        (
            (
                "store/statements.py",
                "    watch_pid = :watch_pid, watch_start = :watch_start\nwhere id = :id and ended_at is null\n",
                "    watch_pid = :watch_pid, watch_start = :watch_start\nwhere id = :id\n",
            ),
        ),
    ),
    Mutation(
        "no acquire of my own lapsed role",
        "long-outage",
        NOBODY_LEADS,
        (("store/statements.py", "(holder is null or holder = :id\n", "(holder is null\n"),),
    ),
    Mutation(
        "observation kept across a broken connection",
        "outage",
        "the same node leads|nobody is ended",
        (
            (
                "core/watch_lane.py",
                "            self._open = False\n            self._evidence = Evidence()\n",
                "            self._open = False\n",
            ),
            (
                "core/watch_lane.py",
                "            self._evidence = Evidence(spread=self._retry.drawn())\n",
                "            self._evidence._spread = self._retry.drawn()\n",
            ),
        ),
    ),
    Mutation(
        "acquire on an unconfirmed server",
        "promotion-lacks-acquire",
        TWO_LEADERS,
        (("core/confirmation.py", "return self.confirmed.line == self.server.line", "return True"),),
    ),
    Mutation(
        "a new server confirmed at once",
        "promotion-lacks-acquire",
        TWO_LEADERS,
        (
            (
                "core/confirmation.py",
                "self._unconfirmed[1] + timing.silence(self.confirmed.longest_lease)",
                "self._unconfirmed[1]",
            ),
        ),
    ),
    Mutation(
        "confirmed at once on a line that may lack commits",
        "promotion-lacks-acquire",
        TWO_LEADERS,
        (("core/servers.py", "return self.loses_nothing and server.follows(before)", "return server.follows(before)"),),
    ),
    Mutation(
        "a commit counts although its wait for the replica was cancelled",
        "cancelled-wait",
        TWO_LEADERS,
        (("store/control.py", "if loses_nothing and self.session.unreplicated:", "if False:"),),
    ),
    Mutation(
        "the word that promotions lose nothing counts for an earlier promotion",
        "word-after-promotion",
        TWO_LEADERS,
        (
            (
                "store/statements.py",
                "or incarnation = {incarnation} and coalesce(place, {place}) = {place})",
                "or 1 = 1)",
            ),
        ),
    ),
    Mutation(
        "a term that is resumed on a promoted server keeps its old incarnation",
        "switchover",
        "and may write",
        (
            (
                "store/statements.py",
                "server_start = :server_start, incarnation = :incarnation\n",
                "server_start = :server_start\n",
            ),
        ),
    ),
    Mutation(
        "a raise of the largest TTL is ripe at once",
        "promotion-lacks-raise",
        TWO_LEADERS,
        (
            (
                "store/statements.py",
                "set ripe_ttl_ms = {least}({ripe}, :max_ttl_ms), limits",
                "set ripe_ttl_ms = :max_ttl_ms, limits",
            ),
        ),
    ),
    Mutation(
        "a node's own raise of the largest TTL is ripe at once",
        "promotion-lacks-own-raise",
        TWO_LEADERS,
        (("store/statements.py", "set ripe_ttl_ms = {ripe}, limits", "set ripe_ttl_ms = :ttl_ms, limits"),),
    ),
    Mutation(
        "a raise ripens before a replica must have it",
        "promotion-lacks-raise",
        TWO_LEADERS,
        (("core/timing.py", "RIPENS_AFTER_S = 600.0", "RIPENS_AFTER_S = 6.0"),),
    ),
    Mutation(
        "a limit that was changed and changed back goes on ripening",
        "limit-set-twice",
        TWO_LEADERS,
        (
            (
                "core/confirmation.py",
                "(seen := (server.line, confirmed._replace(replicated=True)))",
                "(seen := (server.line, confirmed.max_ttl, confirmed.ripe_ttl))",
            ),
        ),
    ),
    Mutation(
        "a missing namespace is confirmed at once",
        "promotion-lacks-namespace",
        TWO_LEADERS,
        (("store/statements.py", "or (:promoted = 0 and not exists", "or (1 = 1 or not exists"),),
    ),
    Mutation(
        "a missing namespace waits for its own limit only",
        "promotion-lacks-namespace",
        TWO_LEADERS,
        (
            (
                "core/servers.py",
                "max(self.max_ttl, timing.DEFAULT_MAX_TTL_S) if self.made_on_a_promoted_server else self.max_ttl",
                "self.max_ttl",
            ),
        ),
    ),
    Mutation(
        "a restored copy is taken for the original",
        "restored-dump",
        "a write fenced with|was given",
        (
            ("store/statements.py", ' and coalesce(m.place, {place}) = {place}"', '"'),
            (
                "core/servers.py",
                """        return f"{self.incarnation} {self.place}"

    @property
    def floor""",
                """        return self.incarnation

    @property
    def floor""",
            ),
            (
                "core/servers.py",
                """        return f"{self.incarnation} {self.place}"

    @property
    def made""",
                """        return self.incarnation

    @property
    def made""",
            ),
        ),
    ),
    Mutation(
        "tokens of a restored copy follow those in the dump",
        "restored-dump",
        r"was given r \d+ after",
        (("store/statements.py", "else 4294967296 + {serial} + {greatest}", "else {greatest}"),),
    ),
    Mutation(
        "resume across incarnations",
        "promotion-lacks-takeover",
        TWO_LEADERS,
        (
            ("core/protocol.py", "if not opened.confirmed.lacks_nothing(row.server, opened.server):", "if False:"),
            (
                "store/statements.py",
                "ended_at is null and incarnation in (:was, :incarnation) and coalesce",
                "ended_at is null and coalesce",
            ),
        ),
    ),
    Mutation(
        "end without the sentinel's epoch and the server's start time",
        "stale-proof",
        TWO_LEADERS,
        (
            (
                "store/statements.py",
                "ended_at is null and sentinel_epoch = :epoch and server_start = :server_start",
                "ended_at is null",
            ),
        ),
    ),
    Mutation(
        "a delayed resume replaces the one that came instead",
        "delayed-resume",
        "two leaders|while it leads|the same node leads|under the same token",
        (("store/statements.py", "\n  and sentinel_epoch < :epoch\n", "\n"),),
    ),
    Mutation(
        "proof of death on another server",
        "short-restart",
        "the same node leads|under the same token",
        (("core/evidence.py", " and member.server_start == self.server_start", ""),),
    ),
    Mutation(
        "proof of death without the fresh connection",
        "fast-stop",
        "two leaders|while it leads|the same node leads|under the same token",
        (
            (
                "core/watch_lane.py",
                "        if not looked.vacancy:\n",
                "        self._judge(self._evidence.knocked(accepted=True), now)\n        if not looked.vacancy:\n",
            ),
        ),
    ),
    Mutation(
        "a knock proves the death of members whose sentinel fell after it",
        "stop-during-a-look",
        "the same node leads|under the same token|while it leads|two leaders",
        (("core/evidence.py", "if key in (None, member.key))", "if True)"),),
    ),
    Mutation(
        "strict members take a sentinel as well",
        "strict-leader-cut",
        TWO_LEADERS,
        (("core/protocol.py", '.sentinels and self.settings.takeover == "instant"', ".sentinels"),),
    ),
    Mutation(
        "no doubt",
        "instant-leader-cut",
        TWO_LEADERS,
        (("core/protocol.py", "            self._suspend()\n", "            pass\n"),),
    ),
    Mutation(
        "server's keepalive shorter than the TTL",
        "partition",
        TWO_LEADERS,
        (("core/timing.py", "return ttl + margin(ttl)", "return ttl / 2"),),
    ),
    Mutation(
        "silence shorter than trust",
        "partition-leader",
        TWO_LEADERS,
        (("core/timing.py", "return ttl * 1.02", "return ttl * 0.8"),),
    ),
    Mutation(
        "no margin between trust and silence",
        "clock-drift",
        TWO_LEADERS,
        (("core/timing.py", "return ttl - margin(ttl)", "return ttl"),),
    ),
    Mutation(
        "token from the old row",
        "lagging-promotion",
        r"was given r \d+ after",
        (("store/statements.py", "{{greatest}}(token + 1, :floor, ", "{{greatest}}(token + 1, "),),
    ),
    Mutation(
        "reused member id",
        "lagging-promotion",
        NOBODY_LEADS,
        (
            (
                "core/protocol.py",
                "id=random_uuid(self._chance.getrandbits(128))",
                "id=random_uuid(random.Random(self.settings.name).getrandbits(128))",
            ),
        ),
    ),
    Mutation(
        "fence that ignores ended holders",
        "fenced-stream",
        "in spite of open transactions",
        (
            (
                "store/statements.py",
                "m.id = r.holder and m.ended_at is null\n                and {HERE}",
                "m.id = r.holder\n                and {HERE}",
            ),
        ),
    ),
    Mutation(
        "fence that ignores the incarnation",
        "stale-fence-after-promotion",
        "a write fenced with",
        (("store/statements.py", "m.ended_at is null\n                and {HERE})", "m.ended_at is null)"),),
    ),
    Mutation(
        "adoption of a dropped token",
        "long-pause",
        r"announces r \d+ after|takes up r \d+ again",
        (("core/roles.py", "elif token > self._dropped.get(role, 0):", "elif True:"),),
    ),
    Mutation(
        "an answer after the deadline revives a term",
        "pause-across-an-answer",
        "after it had lapsed",
        (
            (
                "core/protocol.py",
                "comes after the deadline revives nothing.\n        self.expire(now)\n",
                "comes after the deadline revives nothing.\n",
            ),
        ),
    ),
    Mutation(
        "elected although trust has lapsed",
        "late-acquire",
        "without trust in it",
        (("core/roles.py", "        elif trusted:\n", "        elif True:\n"),),
    ),
    Mutation(
        "an adopted term is acquired again",
        "lost-acquire",
        "although its term of s was",
        (
            (
                "core/roles.py",
                "            self.wanted.discard(role)\n            self.claims.discard(role)\n            self.busy",
                "            self.claims.discard(role)\n            self.busy",
            ),
        ),
    ),
    Mutation(
        "verdicts forgotten that came in while others were carried out",
        "two-die-one-after-the-other",
        "the second death is acted upon",
        (("core/watch_lane.py", "if v not in request.verdicts and v.line == line]", "if False]"),),
    ),
    Mutation(
        "a term is resumed that was never suspended",
        "acquire-lost-in-a-restart",
        r"Resumed\(role='s'.* although its term of s was",
        (("core/protocol.py", "self.roles.holding.items() if term in before", "self.roles.holding.items()"),),
    ),
    Mutation(
        "a reservation outlives its member",
        "heir-dies",
        "nobody led",
        (
            (
                "store/statements.py",
                "\n       or not exists (select 1 from {members} w where w.id = reserved_for and w.ended_at is null))",
                ")",
            ),
        ),
    ),
    Mutation(
        "a holder that is not a neighbour is not watched",
        "leader-far-away",
        "neighbours froze with it: nobody led",
        (
            (
                "core/roles.py",
                "return tuple(sorted(islice(others, LOOKED_AT)))",
                "return tuple(sorted(islice(others, 0)))",
            ),
        ),
    ),
    Mutation(
        "a node never looks farther back than its neighbours",
        "silent-neighbours",
        "neighbours froze with it: nobody led",
        (("core/evidence.py", "self.reach_grew = len(ring) == self.reach and", "self.reach_grew = False and"),),
    ),
    Mutation(
        "a neighbour that was never seen to renew counts as well",
        "silent-neighbours",
        "neighbours froze with it: nobody led",
        (("core/evidence.py", "and self._has_renewed(member))", "and now < self._first_seen(member, now)[1] + 5)"),),
    ),
    Mutation(
        "a node that finds no neighbour well waits before it looks on",
        "dead-neighbours",
        "neighbours died with it: nobody led",
        (("core/watch_lane.py", "if self.look_at_once or self._evidence.reach_grew:", "if self.look_at_once:"),),
    ),
    Mutation(
        "a leader that meets a promoted server waits as the others do",
        "leader-claims",
        "the leader leads on the promoted server: not within",
        (("core/protocol.py", "claims = self._membership.trusts(now) and", "claims = False and"),),
    ),
    Mutation(
        "a claim respects the holder that a promoted server shows",
        "leader-claims",
        "the leader leads on the promoted server: not within",
        (("store/control.py", "statements.CLAIM if request.claim else statements.TAKE", "statements.TAKE"),),
    ),
    Mutation(
        "a leader claims its role although its trust is over",
        "lapsed-leader-meets-a-promoted-server",
        TWO_LEADERS,
        (
            ("core/protocol.py", "claims = self._membership.trusts(now) and", "claims ="),
            (
                "core/protocol.py",
                "self.roles.claims = set(self.roles.holding)",
                "self.roles.claims = set(self.roles._dropped)",
            ),
        ),
    ),
    Mutation(
        "a leader in doubt claims its role",
        "leader-in-doubt-meets-a-promoted-server",
        TWO_LEADERS,
        (("core/protocol.py", "claims = self._membership.trusts(now) and", "claims ="),),
    ),
    Mutation(
        "a late claim takes a role from its new leader",
        "late-claim",
        TWO_LEADERS,
        (("store/statements.py", "(holder = :id or token < :floor)", "token >= 0"),),
    ),
    Mutation(
        "a claim outlives the server that it was for",
        "claim-for-another-server",
        TWO_LEADERS,
        (
            (
                "core/roles.py",
                "            self._server = server\n            self.claims.clear()\n",
                "            self._server = server\n",
            ),
        ),
    ),
    Mutation(
        "a takeover that ignores open transactions",
        "fenced-stream",
        "a write fenced with",
        (
            (
                "store/control.py",
                "self._step(statements.LOCK_LEFT, id=me, names=listed(ids))",
                'self._step(statements.LOCK_LEFT + " ", id=me, names=listed(ids))',  # which the simulator does not lock
            ),
        ),
    ),
    Mutation(
        "a role is taken by a member of another place",
        "restored-dump",
        "was given",
        (
            (
                "store/statements.py",
                '_LIVING = f"exists (select 1 from {{members}} m where m.id = :id and m.ended_at is null and {HERE})"',
                '_LIVING = "1 = 1"',
            ),
        ),
    ),
    Mutation(
        "every node that sees a death acts at once",
        "deaths-in-a-fleet",
        "knocks instead of at most",
        (("core/evidence.py", "        if self._spread is None:\n", "        if True:\n"),),
    ),
    Mutation(
        "every candidate acts on a resignation",
        "named-successor",
        "attempts for one role",
        (
            (
                "core/protocol.py",
                "sender == self.member_id or (heir and heir != self.member_id)",
                "sender == self.member_id",
            ),
        ),
    ),
    Mutation(
        "only the named successor takes a role",
        "frozen-heir",
        "its heir was frozen: nobody led",
        (("core/watch_lane.py", "        if not looked.vacancy:\n", "        if True:\n"),),
    ),
    Mutation(
        "nodes that a notification made renew together go on doing so",
        "resignation-in-a-fleet",
        "renewals within",
        (("core/membership.py", "early = sent < self._planned", "early = False"),),
    ),
    Mutation(
        "a look wakes the control lane for nothing that it has found",
        "crash-instant",
        "nobody led for",
        (("core/protocol.py", "return bool(self._watch.verdicts) or now", "return now"),),
    ),
    Mutation(
        "only the next member on the ring acts on a death",
        "frozen-successor",
        "its successor was frozen: nobody led",
        (("core/evidence.py", "return TURN_S * steps * (1 + self._spread)", "return timing.NEVER if steps else 0.0"),),
    ),
    Mutation(
        "a member that held nothing is not ended",
        "deaths-in-a-fleet",
        "every dead member was ended",
        (("core/evidence.py", "NOT_URGENT = 3\n", "NOT_URGENT = 3000\n"),),
    ),
    Mutation(
        "a renewal after a lost answer reads only what changed",
        "lost-acquire-among-many-roles",
        NOBODY_LEADS,
        (
            ("core/protocol.py", "        self.roles.read_all_at = LONG_AGO\n", "        pass\n"),
            (
                "core/roles.py",
                "self.read_all_at = LONG_AGO\n        self._read_all_until = now + server_patience(self._ttl)\n",
                "pass\n",
            ),
        ),
    ),
    Mutation(
        "a renewal that reads what changed reads no requests",
        "request-among-many-roles",
        "the request to resign is heard",
        (("store/statements.py", 'HELD + "  and request_token is not null', 'HELD + "  and request_token < 0'),),
    ),
    Mutation(
        "a renewal that reads what changed misses the roles of ended members",
        "vacancy-among-many-roles",
        NOBODY_LEADS,
        (("store/statements.py", "where exists ({ENDED_HOLDERS})\n", "where 1 = 0\n"),),
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
from tests.verification.simulation.runner import run
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
