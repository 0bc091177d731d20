"""What an examination of a database finds, as plain values, and the checks that every database has in common.

An examination is an iterator of findings. It reads and tries, and leaves nothing behind. No check keeps the others from
being made, and none may hang: each statement is bounded where it is made, and the whole by :func:`diagnosed`.
"""

from __future__ import annotations

import re
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from tenure import schema, statements, timing, values
from tenure.errors import ConfigError, StoreUnavailable
from tenure.session import Failed, Gone, Session, Step
from tenure.settings import NodeSettings

T = TypeVar("T")

LIMIT_S = 60.0
"""How long a whole examination may take, whatever the server, the network or the disk does."""
ROUND_TRIPS = 11
TOO_OLD_TTLS = 3
"""A member that has not renewed for so many TTLs is not being watched by anybody."""
KEPT_RENEWALS = 10
"""A renewal shall take a tenth of the renewal interval at most: there is time for a second try then."""


@dataclass(frozen=True)
class Finding:
    """What one check found, and what to do about it."""

    check: str
    level: str
    """``ok``, ``warning`` (works, at a price that the text names) or ``error`` (a node would not work)."""
    text: str
    remedy: str | None = None


def fine(check: str, text: str) -> Finding:
    """Return a finding that needs nothing."""
    return Finding(check, "ok", text)


def warning(check: str, text: str, remedy: str) -> Finding:
    """Return a finding that costs something."""
    return Finding(check, "warning", text, remedy)


def error(check: str, text: str, remedy: str) -> Finding:
    """Return a finding with which a node does not work."""
    return Finding(check, "error", text, remedy)


def diagnosed(examination: Iterable[Finding], limit_s: float = LIMIT_S) -> list[Finding]:
    """Return what an examination finds, within the limit: what hangs is a finding, too."""
    findings: list[Finding] = []
    failures: list[BaseException] = []

    def examine() -> None:
        try:
            for finding in examination:
                findings.append(finding)  # noqa: PERF402 - one by one: the next may hang
        except BaseException as failure:  # noqa: BLE001 - raised below
            failures.append(failure)

    thread = threading.Thread(target=examine, name="tenure-doctor", daemon=True)
    thread.start()
    thread.join(limit_s)
    for failure in failures:
        raise failure
    if not thread.is_alive():
        return findings
    after = f"after {findings[-1].check!r}" if findings else "at all"
    silence = error("answer", f"no answer {after} within {limit_s:g} s", "see whether the database's machine is well")
    return [*findings, silence]


def made(checks: dict[str, Callable[[T], Iterator[Finding]]], case: T) -> Iterator[Finding]:
    """Make the checks one after the other; one that fails keeps nobody from the next."""
    for name, check in checks.items():
        try:
            yield from check(case)
        except Failed as failure:
            yield warning(
                name, f"could not be checked: {one_line(failure)}", "mend what the message says, and look again"
            )
        except (Gone, StoreUnavailable) as failure:
            yield error(name, f"the connection was lost: {one_line(failure)}", "see the server's log")
            return


def one_line(failure: object) -> str:
    """Return a message of any length in one line."""
    return " ".join(str(failure).split())


# The tables ----------------------------------------------------------------------------------------------------


def version(session: Session, *, may_migrate: bool) -> Iterator[Finding]:
    """Say which version the tables are of. They are there, at least in part."""
    known = schema.MIGRATIONS[-1].version
    try:
        present = schema.require(session)
    except ConfigError as refusal:
        yield error("tables", one_line(refusal), "upgrade Tenure here")
        return
    except (Failed, IndexError) as failure:
        remedy = "end who keeps them locked; if they are not Tenure's, give it a schema or a file of its own"
        yield error("tables", f"their version cannot be read: {one_line(failure)}", remedy)
        return
    if present >= known:
        try:
            schema.check_shape(session)
        except ConfigError as refusal:
            yield error(
                "tables", one_line(refusal), "bring back what is missing: a backup has it, and `tenure sql` the form"
            )
            return
    if present < known and may_migrate:
        text = f"version {present}, and this release has {known}: a node that starts brings them up to date"
        yield warning("tables", text, "run `tenure init`, or start a node")
    elif present < known:
        text = f"version {present}, this release needs {known}, and this user does not own them"
        yield error("tables", text, "run `tenure init` as their owner")
    elif present > known:
        text = f"version {present}, newer than this release's {known}, which can still work with them"
        yield warning("tables", text, "upgrade Tenure here")
    else:
        yield fine("tables", f"version {present}")


def created(word: str) -> list[str]:
    """Return the names of the tables or functions that this release's migrations create."""
    texts = [text for one in schema.MIGRATIONS for text in (*one.tables, *one.functions)]
    return [name for text in texts for name in re.findall(rf"create {word} {{(?:schema}})?(\w+)", text)]


def namespace(session: Session, settings: NodeSettings) -> Iterator[Finding]:
    """Say whether leaders are elected in the namespace on this server, and whether the TTL is permitted there."""
    name = settings.namespace
    rows = session.read(Step(statements.CONFIRMED, {"namespace": name}))[0].rows
    if not rows:
        yield fine("namespace", f"{name!r} is new: the first node makes it")
        return
    confirmed, _, max_ttl_ms, _ = rows[0]
    largest_s = max_ttl_ms / 1000
    if confirmed != session.server().incarnation:
        text = (
            f"{name!r} is waiting: its tables came from another server (a promotion, a restored dump), and nobody is "
            f"elected before every lease given there is over, {largest_s:g} s after a node first saw this one"
        )
        yield warning("namespace", text, "start a node, and wait")
    else:
        text = f"{name!r} is confirmed here; the largest permitted TTL is {largest_s:g} s"
        yield fine("namespace", text)
    if settings.ttl > largest_s:
        text = f"ttl={settings.ttl:g} is above the largest permitted in {name!r}, {largest_s:g}: nodes refuse to start"
        yield error("largest ttl", text, f"use a shorter TTL, or `tenure init --max-ttl {settings.ttl:g}`")


def members(session: Session, settings: NodeSettings) -> Iterator[Finding]:
    """Say how many live, and who has not renewed for so long that nobody can be watching it."""
    rows = session.read(Step(statements.MEMBERS, {"namespace": settings.namespace}))[0].rows
    late = False
    for _, name, host, pid, _, _, _, ttl_ms, _, renewed, now in rows:
        silent_s = values.seconds_between(renewed, now)
        if silent_s * 1000 > TOO_OLD_TTLS * ttl_ms:
            late = True
            text = (
                f"{name!r} (process {pid} on {host}) renewed {silent_s:.0f} s ago, its TTL is {ttl_ms / 1000:g} s, and "
                "nobody has ended it: no node is running that could"
            )
            yield warning("members", text, "start a node: it ends those that are silent or dead, and takes their roles")
    if not late:
        yield fine("members", f"{len(rows)} living, all renewing" if rows else "none at this moment")


def pace(settings: NodeSettings, round_trip_s: float) -> Iterator[Finding]:
    """Say whether the TTL leaves room for renewals over this distance."""
    every_s = timing.renewal_interval(settings.ttl)
    text = f"ttl={settings.ttl:g}: a renewal every {every_s:g} s, and a round trip takes {milliseconds(round_trip_s)}"
    longer = (
        f"use a TTL of {max(1, round(4 * KEPT_RENEWALS * round_trip_s + 0.5))} s or more, or a database that is nearer"
    )
    if round_trip_s * 2 > every_s:
        yield error("ttl", f"{text}: renewals come too late", longer)
    elif round_trip_s * KEPT_RENEWALS > every_s:
        yield warning("ttl", f"{text}: a few slow ones cost the leadership", longer)
    else:
        yield fine("ttl", text)


def median_s(what: Callable[[], object], times: int) -> float:
    """Return how long something takes, in the median."""
    taken = []
    for _ in range(times):
        before = time.perf_counter()
        what()
        taken.append(time.perf_counter() - before)
    return statistics.median(taken)


def round_trip(session: Session) -> tuple[float, Finding]:
    """Measure how far the server is; return the seconds, and the finding."""
    seconds = median_s(lambda: session.read(Step("select 1", {}))[0].rows, ROUND_TRIPS)
    return seconds, fine("round trip", f"{milliseconds(seconds)}, the median of {ROUND_TRIPS}")


def milliseconds(seconds: float) -> str:
    """Return a short time for people."""
    return f"{seconds * 1000:.1f} ms"
