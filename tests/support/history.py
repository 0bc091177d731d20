"""What the nodes believed and did, and what that proves: recorder and checkers for tests with real processes.

Each process writes JSON lines to a file of its own, stamped by one clock for all (CLOCK_BOOTTIME,
nanoseconds; so the processes of a history are on one machine). Afterwards the checkers, pure functions,
look for broken promises.

Kinds of lines; every one has `node`, `pid`, `at_before` and `at`, and the thing happened between those two:

    read     role, leader, token      an answer of `is_leader`, and the token it was given under
             reads, gap               how many reads since the last line, and the widest step between two
    term     role, event, token       "elected", "deposed", "suspended", "resumed", when the node heard of it
    write    role, token, ok          a fenced write; `at_before` is taken just before the COMMIT is sent
    fault    fault, target            what the test did to whom

What is proven, and what not:

* A *belief* is a run of True reads of one process with one token, not interrupted by a False one. It lasts
  from before the first read to after the last, gaps between the reads included: a term that lapsed is never
  taken up again, so nobody else may lead between two reads of the same term, whether somebody looked or
  not.
* A read that took long (the process was stopped in the middle of it, say) happened at an unknown moment in
  there. Such a *wide* read at either end of a belief counts from its late or to its early side, else every
  SIGSTOP would look like a second leader.
* Nobody knows what a process believed after its last read or between a False and the next True. The report
  prints how far apart reads were: an overlap shorter than that may have been missed. A process that is
  killed loses the reads since its last heartbeat, too.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
WIDE_NS = 100_000
GAP_NS = 50_000_000

TermEvent = Literal["elected", "deposed", "suspended", "resumed"]


def now_ns() -> int:
    """The one clock of a history: it counts suspend, and is the same in every process of the machine."""
    return time.clock_gettime_ns(CLOCK)


# --- recording ----------------------------------------------------------------------------------------------


class Recorder:
    """Appends what one process sees to a file. Each line is one write(2), so a kill -9 leaves whole lines.

    Reads are many and mostly alike. Written are the first and the last of each run of equal ones, both
    sides of a step longer than the heartbeat, and one per heartbeat; `heartbeat_s=0` writes all. Only one
    thread may record the reads of a role; everything else may come from anywhere.
    """

    def __init__(self, path: Path | str, node: str, *, heartbeat_s: float = 0.01) -> None:
        self.node = node
        self._heartbeat_ns = round(heartbeat_s * 1e9)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._written: dict[str, dict[str, Any]] = {}  # by role: the last read that is in the file
        self._pending: dict[str, dict[str, Any]] = {}  # by role: the last read, if it is not

    def sample(self, role: str, is_leader: Callable[[], bool], token: Callable[[], int | None]) -> bool:
        """Ask `is_leader` and time the question; record the answer with the token that it was given under.

        A True between two different tokens may belong to either, and is left out: the next one will do.
        """
        token_before = token()
        at_before = now_ns()
        leader = is_leader()
        at = now_ns()
        if not leader:
            self.read(role, False, None, at_before=at_before, at=at)
        elif token() == token_before:
            self.read(role, True, token_before, at_before=at_before, at=at)
        return leader

    def read(self, role: str, leader: bool, token: int | None, *, at_before: int, at: int) -> None:
        pending = self._pending.get(role)
        last = pending or self._written.get(role)
        changed = last is None or (last["leader"], last["token"]) != (leader, token)
        reads, gap = 1, at - last["at_before"] if last else 0
        if changed or gap > self._heartbeat_ns:
            self._flush(role)
        elif pending:
            reads, gap = pending["reads"] + 1, max(gap, pending["gap"])
        self._pending[role] = {
            "pid": os.getpid(), "role": role, "leader": leader, "token": token,
            "at_before": at_before, "at": at, "reads": reads, "gap": gap,
        }  # fmt: skip
        if changed or at - self._written[role]["at"] >= self._heartbeat_ns:
            self._flush(role)

    def term(self, role: str, event: TermEvent, token: int, **details: Any) -> None:
        self._write("term", role=role, event=event, token=token, **_stamps(details))

    def write(self, role: str, token: int, *, ok: bool, at_before: int, **details: Any) -> None:
        """A fenced write whose COMMIT was sent at `at_before`; `ok` if its success was acknowledged just now.

        An unknown outcome is not ok. Where the fence refused it, `at_before` is that of the fence.
        """
        self._write("write", role=role, token=token, ok=ok, **_stamps({"at_before": at_before} | details))

    def fault(self, fault: str, target: str | None = None, **details: Any) -> None:
        """Pass `at_before`, taken before the deed, where the deed takes long."""
        self._write("fault", fault=fault, target=target, **_stamps(details))

    def note(self, kind: str, **details: Any) -> None:
        """Anything else, of a kind of its own."""
        self._write(kind, **_stamps(details))

    def close(self) -> None:
        for role in list(self._pending):
            self._flush(role)
        os.close(self._file)

    def _flush(self, role: str) -> None:
        if line := self._pending.pop(role, None):
            self._written[role] = line
            self._write("read", **line)

    def _write(self, kind: str, **fields: Any) -> None:
        # The pid is asked each time, for a read when it is read: a forked child is another process.
        line = json.dumps({"kind": kind, "node": self.node, "pid": os.getpid(), **fields}) + "\n"
        written = os.write(self._file, line.encode())
        assert written == len(line.encode()), "the disk is full"


def _stamps(details: dict[str, Any]) -> dict[str, Any]:
    at = details.get("at", now_ns())
    return {"at_before": details.get("at_before", at), "at": at} | details


# --- reading it back ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Line:
    """One line; see the top of the file. `process` tells the processes of one node's name apart."""

    kind: str
    node: str
    at_before: int
    at: int
    pid: int | None = None
    role: str = ""
    leader: bool = False
    token: int | None = None
    reads: int = 1
    gap: int | None = None
    event: str = ""
    ok: bool = False
    fault: str = ""
    target: str | None = None
    details: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Line:
        known = {name: value for name, value in fields.items() if name in cls.__slots__}
        return cls(**known, details={name: value for name, value in fields.items() if name not in known})

    @property
    def process(self) -> tuple[str, int | None]:
        return self.node, self.pid

    @property
    def is_wide(self) -> bool:
        return self.at - self.at_before > WIDE_NS


@dataclass(frozen=True, slots=True)
class Belief:
    """A process read True from `since` to `until` (ns) under one token; see the top of the file.

    `asked` is when the first of those reads was begun: earlier than `since` if that one is wide.
    """

    role: str
    node: str
    pid: int | None
    token: int | None
    asked: int
    since: int
    until: int
    reads: int
    widest_gap: int

    @classmethod
    def of(cls, run: list[Line]) -> Belief:
        first, last = run[0], run[-1]
        since = first.at if first.is_wide else first.at_before
        until = last.at_before if last.is_wide else last.at
        widest = max((gap_before(a, b) for a, b in itertools.pairwise(run)), default=0)
        reads = 1 + sum(line.reads for line in run[1:])
        until = max(since, until)  # a single wide read has no length at all, not a negative one
        who = (first.role, first.node, first.pid, first.token)
        return cls(*who, first.at_before, since, until, reads, widest)


def gap_before(before: Line, line: Line) -> int:
    """The widest step between reads on the way from one recorded read to the next."""
    return line.gap if line.gap is not None else line.at - before.at_before


class History:
    """All lines of all processes, in the order of their `at`."""

    def __init__(self, lines: Iterable[Line | dict[str, Any]], *, torn: int = 0) -> None:
        every = (line if isinstance(line, Line) else Line.of(line) for line in lines)
        self.lines = sorted(every, key=lambda line: line.at)
        self.torn = torn
        self.start = min((line.at_before for line in self.lines), default=0)
        self.end = max((line.at for line in self.lines), default=0)
        self._by_role: dict[str, list[Line]] = defaultdict(list)
        for line in self.lines:
            self._by_role[line.role].append(line)
        self.roles = sorted(role for role in self._by_role if role)

    @classmethod
    def load(cls, paths: Iterable[Path | str]) -> History:
        """Read the files. A last line without its end was cut by a kill and is only counted."""
        lines, torn = [], 0
        for path in paths:
            *whole, rest = Path(path).read_bytes().split(b"\n")
            torn += bool(rest)
            for number, text in enumerate(whole, 1):
                try:
                    lines.append(Line.of(json.loads(text)))
                except (ValueError, TypeError) as error:
                    raise ValueError(f"{path}, line {number}: {error}: {text!r}") from None
        return cls(lines, torn=torn)

    def of_kind(self, kind: str, role: str | None = None) -> list[Line]:
        """The lines of one kind, of all roles or of one."""
        return [line for line in self.of_role(role) if line.kind == kind]

    def of_role(self, role: str | None) -> list[Line]:
        return self.lines if role is None else self._by_role.get(role, [])

    def reads_by_process(self, role: str | None = None) -> dict[tuple[str, int | None, str], list[Line]]:
        """The reads of each (node, pid, role), in their order."""
        found: dict[tuple[str, int | None, str], list[Line]] = defaultdict(list)
        for line in self.of_kind("read", role):
            found[line.node, line.pid, line.role].append(line)
        return found

    def beliefs(self, role: str | None = None) -> list[Belief]:
        """Who believed to lead, from when to when, in the order of their beginnings."""
        found = []
        for reads in self.reads_by_process(role).values():
            for (leader, _), run in itertools.groupby(reads, key=lambda line: (line.leader, line.token)):
                if leader:
                    found.append(Belief.of(list(run)))
        return sorted(found, key=lambda belief: (belief.role, belief.since))

    def seconds(self, at: int) -> str:
        """A moment as people read it: seconds since the first line."""
        return f"{(at - self.start) / 1e9:.6f} s"


# --- checking -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Overlap:
    """Two processes believed to lead one role at once, from `since` to `until` (ns)."""

    role: str
    one: Belief
    other: Belief
    since: int
    until: int


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time (ns) in which something was missing: a leader of `role`, or the reads of `node`."""

    role: str
    since: int
    until: int
    node: str = ""

    @property
    def length(self) -> int:
        return self.until - self.since


def overlap_spans(history: History) -> list[Overlap]:
    """Every stretch in which two processes led one role, for those who want to bound it."""
    found = []
    for role in history.roles:
        for one, other in itertools.combinations(history.beliefs(role), 2):
            since, until = max(one.since, other.since), min(one.until, other.until)
            if since < until:  # a process's own beliefs never do: its reads come one after the other
                found.append(Overlap(role, one, other, since, until))
    return found


def overlaps(history: History, longer_than_ns: float = 0) -> list[str]:
    """Promise 1: no two processes read True at the same instant; or not for longer than a documented exception."""
    return [
        f"role {found.role!r}: {found.one.node} (token {found.one.token}) and {found.other.node} (token"
        f" {found.other.token}) both led for {(found.until - found.since) / 1e6:.3f} ms,"
        f" from {history.seconds(found.since)} to {history.seconds(found.until)}"
        for found in overlap_spans(history)
        if found.until - found.since > longer_than_ns
    ]


def token_regressions(history: History) -> list[str]:
    """Promise 3: tokens only grow, and each is one process's.

    The order across processes is that of the reads, since an event may be heard late (the process was stopped
    meanwhile); the order of a single process's own elections is that of its events as well.
    """
    found = []
    for role in history.roles:
        beliefs = history.beliefs(role)
        found += [
            f"role {role!r}: {belief.node} led without a token from {history.seconds(belief.since)}"
            for belief in beliefs
            if belief.token is None
        ]
        elected = [line for line in history.of_kind("term", role) if line.event == "elected"]
        owners: dict[int, dict[tuple[str, int | None], None]] = defaultdict(dict)
        claims = [(belief.token, belief.node, belief.pid) for belief in beliefs]
        for token, node, pid in claims + [(line.token, line.node, line.pid) for line in elected]:
            if token is not None:
                owners[token][node, pid] = None
        for token, processes in sorted(owners.items()):
            if len(processes) > 1:
                names = ", ".join(f"{node} (pid {pid})" for node, pid in processes)
                found.append(f"role {role!r}: token {token} was used by {names}")
        found += _events_going_back(history, role, elected) + _beliefs_going_back(history, role, beliefs)
    return found


def _events_going_back(history: History, role: str, elected: list[Line]) -> list[str]:
    found = []
    last: dict[tuple[str, int | None], Line] = {}
    for line in elected:
        before = last.get(line.process)
        if before is not None and (before.token or 0) >= (line.token or 0):
            found.append(
                f"role {role!r}: {line.node} was elected with token {line.token} at"
                f" {history.seconds(line.at)}, after token {before.token} at {history.seconds(before.at)}"
            )
        last[line.process] = line
    return found


def _beliefs_going_back(history: History, role: str, beliefs: list[Belief]) -> list[str]:
    """Beliefs that began, or began again, when a later token was already in force."""
    found = []
    begun = _begun(history, role)
    for belief in beliefs:
        later = _later_term(begun, belief.token, belief.asked)
        if later is not None:
            found.append(
                f"role {role!r}: {belief.node} began to lead with token {belief.token} at"
                f" {history.seconds(belief.since)}, after token {later.token} was {later.node}'s at"
                f" {history.seconds(later.at)}"
            )
    return found


def stale_writes(history: History) -> list[str]:
    """Promise 2: after a term with a higher token began, no write fenced with a lower one commits.

    Proven only where the COMMIT was *sent* after that: the moment of the commit itself is not known. The
    order in the database is the sharper witness: see ledger_regressions().
    """
    found = []
    for role in history.roles:
        begun = _begun(history, role)
        for write in history.of_kind("write", role):
            later = _later_term(begun, write.token, write.at_before)
            if write.ok and later is not None:
                found.append(
                    f"role {role!r}: {write.node}'s write with token {write.token}, sent at"
                    f" {history.seconds(write.at_before)}, was committed though token {later.token} was"
                    f" {later.node}'s at {history.seconds(later.at)}"
                )
    return found


def _begun(history: History, role: str) -> dict[int, Line]:
    """For each token the first line by whose `at` its term had surely begun.

    An election is announced only after it has committed, so hearing of it is proof. So is a True read, and a
    write that the fence let pass.
    """
    first: dict[int, Line] = {}
    for line in history.of_role(role):  # in the order of `at`
        elected = line.kind == "term" and line.event == "elected"
        proof = elected or (line.kind == "read" and line.leader) or (line.kind == "write" and line.ok)
        if proof and line.token is not None:
            first.setdefault(line.token, line)
    return first


def _later_term(begun: dict[int, Line], token: int | None, at: int) -> Line | None:
    """The first sign of a token higher than `token` before the moment `at`."""
    later = [line for other, line in begun.items() if token is not None and other > token and line.at < at]
    return min(later, key=lambda line: line.at, default=None)


def ledger_regressions(rows: Iterable[tuple[Any, int]]) -> list[str]:
    """Promise 2 as the database tells it: the tokens of one role's fenced writes, (order, token), never fall.

    `order` must be the order in which the rows were written, for example from a sequence: a fenced
    transaction under T holds off the term T+1, so whatever it writes comes first.
    """
    ordered = sorted(rows)
    return [
        f"row {order} has token {token}, after row {before_order} with token {before}"
        for (before_order, before), (order, token) in itertools.pairwise(ordered)
        if token < before
    ]


def leaderless(
    history: History, since: int | None = None, until: int | None = None, *, role: str | None = None
) -> list[Span]:
    """The stretches between `since` and `until` (ns) in which nobody led, for each role or for one."""
    since, until = history.start if since is None else since, history.end if until is None else until
    found = []
    for each in history.roles if role is None else [role]:
        covered = since
        for belief in history.beliefs(each):
            if covered < min(belief.since, until):
                found.append(Span(each, covered, min(belief.since, until)))
            covered = max(covered, belief.until)
        if covered < until:
            found.append(Span(each, covered, until))
    return found


def sampling_gaps(history: History, longer_than: int = GAP_NS) -> list[Span]:
    """Where a process's reads were more than `longer_than` (ns) apart: what lies between may be missed."""
    return [
        Span(role, line.at - gap_before(before, line), line.at, node)
        for (node, _, role), reads in history.reads_by_process().items()
        for before, line in itertools.pairwise(reads)
        if gap_before(before, line) > longer_than
    ]


def violations(history: History) -> list[str]:
    """All broken promises. (In `instant` mode one fault permits an overlap: there, call the parts.)"""
    return overlaps(history) + token_regressions(history) + stale_writes(history)


def report(history: History, longer_than: int = GAP_NS) -> str:
    """The history as a short text: print it where a check fails, and read how far the check could see."""
    out = []
    for role in history.roles:
        out.append(f"role {role!r}")
        out.append(f"  {'token':>14}  {'node':<12} {'from':>14} {'to':>14} {'reads':>7} {'widest gap':>12}")
        out += [
            f"  {belief.token!s:>14}  {belief.node:<12} {history.seconds(belief.since):>14}"
            f" {history.seconds(belief.until):>14} {belief.reads:>7} {belief.widest_gap / 1e6:>9.1f} ms"
            for belief in history.beliefs(role)
        ]
        writes = history.of_kind("write", role)
        if writes:
            committed = sum(line.ok for line in writes)
            out.append(f"  writes: {committed} acknowledged, {len(writes) - committed} not")
        out += [
            f"  nobody led for {span.length / 1e6:.1f} ms from {history.seconds(span.since)}"
            for span in leaderless(history, role=role)
        ]
    for line in history.of_kind("fault"):
        out.append(f"fault at {history.seconds(line.at_before)}: {line.fault} {line.target or ''}".rstrip())
    for gap in sorted(sampling_gaps(history, longer_than), key=lambda gap: gap.since):
        until = history.seconds(gap.until)
        out.append(f"no reads of {gap.role!r} by {gap.node} for {gap.length / 1e6:.1f} ms until {until}")
    widest = max((gap.length for gap in sampling_gaps(history, 0)), default=0)
    out.append(f"reads were at most {widest / 1e6:.1f} ms apart; {history.torn} torn lines")
    return "\n".join(out)
