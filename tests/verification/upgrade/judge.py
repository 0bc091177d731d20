"""What a phase must show, and its line in the table: pure functions over the recorded history and the ledger."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.support import history as histories
from tests.support.history import History
from tests.verification.torture.checkers import lost_writes

KINDS = ("kill", "freeze", "restart", "leave", "resign", "otherwise")
"""What was done when nobody led: kill -9, SIGSTOP past the lease, a restart of the server, `close()`, `resign()`, and
nothing of these."""


@dataclass(frozen=True)
class Deed:
    """Something that was done, until somebody led after it."""

    kind: str
    since: int
    until: int


@dataclass(frozen=True)
class Verdict:
    """One line of the table."""

    database: str
    phase: str
    tables: int = 0
    terms: Counter[str] = field(default_factory=Counter)
    """By release."""
    gaps: dict[str, list[float]] = field(default_factory=dict)
    """By kind of deed: for how long nobody led, each time."""
    writes: Counter[str] = field(default_factory=Counter)
    """By the error that came of them: none is an acknowledgement, `Fenced` a refusal, and any other a failure."""
    found: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.found

    def cells(self) -> list[str]:
        """The line, as HEADS says."""
        refused, written = self.writes["Fenced"], self.writes[""]
        return [
            self.database,
            self.phase,
            str(self.tables or "-"),
            f"{self.terms['old']}, {self.terms['new']}",
            *(f"{max(gaps):.2f} ({len(gaps)})" if (gaps := self.gaps.get(kind)) else "-" for kind in KINDS),
            f"{written}, {refused}, {self.writes.total() - written - refused}",
            "PASSED" if self.passed else "FAILED",
        ]


HEADS = [
    "database",
    "phase",
    "tables",
    "terms: old, new",
    *(f"{kind}, s" for kind in KINDS),
    "writes: done, refused, failed",
    "result",
]
WIDTHS = "without a leader: the longest time in seconds, and in brackets how often it was done"


def release_of(node: str) -> str:
    """`old` or `new`: the first word of a node's name."""
    return node.partition("-")[0]


def broken(recorded: History, ledger: Sequence[tuple[int, int, str]]) -> list[str]:
    """Every promise that is broken so far. `ledger` has the order, the token and the element of each row.

    No connection of a living leader is cut at the server's end, so instant mode permits no overlap either. The history
    must be older than the ledger: what is acknowledged meanwhile is no loss.
    """
    return [
        *histories.overlaps(recorded),
        *histories.token_regressions(recorded),
        *histories.stale_writes(recorded),
        *histories.ledger_regressions((order, token) for order, token, _ in ledger),
        *lost_writes(recorded, (element for _, _, element in ledger)),
    ]


def verdict(
    recorded: History,
    deeds: Sequence[Deed],
    *,
    since: int,
    database: str,
    phase: str,
    tables: int,
    found: Sequence[str],
) -> Verdict:
    """The line of a phase that began at `since` (ns) and ends with the history."""
    gaps: dict[str, list[float]] = {}
    for deed in deeds:
        spans = histories.leaderless(recorded, deed.since, deed.until)
        gaps.setdefault(deed.kind, []).append(max((span.length for span in spans), default=0) / 1e9)
    terms = {(belief.token, release_of(belief.node)) for belief in recorded.beliefs() if belief.until >= since}
    writes = Counter(str(line.details.get("error", "")) for line in recorded.of_kind("write") if line.at >= since)
    led = Counter(release for _, release in terms)
    return Verdict(database, phase, tables, led, gaps, writes, tuple(found))


def table(verdicts: Sequence[Verdict]) -> str:
    """All lines, as people read them."""
    rows = [HEADS, *(verdict.cells() for verdict in verdicts)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
