"""What an examination of a database finds, as plain values, and the checks that the databases have in common.

An examination is an iterator of findings. It reads and tries, and leaves nothing behind. A check that fails does not
prevent the next one. None may hang: each statement has a time limit, and :func:`diagnosed` limits the whole.
"""

from __future__ import annotations

import contextlib
import re
import statistics
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from tenure.base.durations import duration, exact
from tenure.base.moments import seconds_between
from tenure.core import timing
from tenure.core.servers import Confirmed
from tenure.databases import refusals
from tenure.databases.connecting import Connector
from tenure.databases.guards import guarded_tables
from tenure.databases.hosts import Host
from tenure.errors import ConfigError, StoreUnavailable, TenureError
from tenure.settings import NodeSettings
from tenure.store import migrations, statements, tables
from tenure.store.control import confirmed
from tenure.store.records import overdue
from tenure.store.session import Failed, Gone, Session, Step

LIMIT_S = 60.0
"""How long a whole examination may take, whatever the server, the network or the disk does."""
PHASE_S = 20.0
"""How long the checks on one connection may take."""
STATEMENT_TIMEOUT_S = 5.0
ROUND_TRIPS = 11
CONNECTIONS_PER_NODE = 2
FEW_CONNECTIONS = 10
KEPT_RENEWALS = 10
"""A renewal should take at most a tenth of the renewal interval, which leaves time for a second try."""


@dataclass(frozen=True)
class Finding:
    """What one check found, and what to do about it."""

    check: str
    level: str
    """``ok``, ``warning`` (works, at a price that the text names) or ``error`` (a node would not work)."""
    text: str
    remedy: str | None = None


def ok(check: str, text: str) -> Finding:
    """Return a finding that needs no action."""
    return Finding(check, "ok", text)


def warning(check: str, text: str, remedy: str) -> Finding:
    """Return a finding with which a node works, at a price that the text names."""
    return Finding(check, "warning", text, remedy)


def error(check: str, text: str, remedy: str) -> Finding:
    """Return a finding with which a node does not work."""
    return Finding(check, "error", text, remedy)


@dataclass
class Case:
    """What the checks examine."""

    settings: NodeSettings
    session: Session
    """A connection as a node opens it."""


@dataclass
class ServerCase(Case):
    """What the checks examine, on a database that is a server."""

    user: str
    round_trip_s: float


AnyCase = TypeVar("AnyCase", bound=Case)
Checks = tuple[Callable[[AnyCase], Iterator[Finding]], ...]
"""The checks, in the order in which they run. A check is called as its function is."""


def examination_of(settings: NodeSettings) -> Iterator[Finding]:
    """Return the examination of the database that the settings name. The doctors of the others are not loaded."""
    if settings.database == "sqlite":
        from tenure.databases.sqlite.doctor import examine as examine_sqlite  # noqa: PLC0415 - it imports this module

        return examine_sqlite(settings)
    if settings.database == "mysql":
        from tenure.databases.mysql.doctor import examine as examine_mysql  # noqa: PLC0415 - as above

        return examine_mysql(settings)
    from tenure.databases.postgres.doctor import examine  # noqa: PLC0415 - as above

    return examine(settings)


def diagnosed(examination: Iterable[Finding], limit_s: float = LIMIT_S) -> list[Finding]:
    """Return what an examination finds within the limit. If it hangs, that is a finding, too."""
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
    return [*findings, error("answer", f"no answer {after} within {limit_s:g} s", "check the database's machine")]


def run_checks(checks: Checks[AnyCase], case: AnyCase) -> Iterator[Finding]:
    """Run the checks one after the other. If one fails, go on with the next, as long as the connection can be used."""
    for check in checks:
        name = check.__name__.strip("_").replace("_", "-")
        try:
            yield from check(case)
        except Failed as failure:
            remedy = "fix the cause that the message gives, and run the doctor again"
            yield warning(name, f"could not be checked: {one_line(failure)}", remedy)
        except (Gone, StoreUnavailable) as failure:
            yield error(name, f"the connection was lost: {one_line(failure)}", "see the server's log")
            return


def one_line(failure: object) -> str:
    """Return a message as one line."""
    return " ".join(str(failure).split())


# A server ------------------------------------------------------------------------------------------------------


def unreachable(connector: Connector, failure: StoreUnavailable) -> Finding:
    """Return the finding that no connection could be opened."""
    return error("reachable", refusals.brief(str(failure)), connector.remedy())


def refused(check: str, refusal: TenureError) -> Finding:
    """Return the finding that a node refuses the server. The message ends with the remedy."""
    text, _, remedy = one_line(refusal).rpartition(": ")
    return error(check, text, remedy)


class HostLook(NamedTuple):
    """What one of several hosts is."""

    why_no_primary: str | None
    """None if it takes writes."""
    server: str
    """Which server it leads to: two names may lead to the same."""


def hosts(connector: Connector, look: Callable[[Host], HostLook]) -> Generator[Finding, None, bool]:
    """Dial each host of a URL that has several, and say what it is. All at once: the dead ones take their time.

    Return False if all of them answer, and none takes writes or is accepted.
    """
    named = connector.hosts.named()
    if len(named) == 1:
        return True

    with ThreadPoolExecutor(len(named)) as pool:
        looks = pool.map(lambda host: _looked_at(host, look), (host for _, host in named))
        found = dict(zip((name for name, _ in named), looks, strict=True))
    primaries: dict[str, str] = {}
    refusals: set[str] = set()
    for name, seen in found.items():
        if isinstance(seen, StoreUnavailable):
            why = one_line(seen).removeprefix(f"cannot connect to {connector!r}: ")
            remedy = "start it, or remove it from the URL: a new connection may wait for it for a moment"
            yield warning("hosts", f"{name} is dead: {why}", remedy)
        elif isinstance(seen, TenureError):
            # The text is about the URL as a whole: a missing privilege is missing on every host.
            if str(seen) not in refusals:
                yield refused("hosts", seen)
            refusals.add(str(seen))
        elif seen.why_no_primary is not None:
            yield ok("hosts", f"{name} {seen.why_no_primary}")
        else:
            primaries.setdefault(seen.server, name)
            yield ok("hosts", f"{name} takes writes")
    if not primaries and all(isinstance(seen, HostLook) for seen in found.values()):
        remedy = "promote one, or add the primary to the URL"
        yield error("hosts", f"no host takes writes: {', '.join(found)}", remedy)
        return False
    if all(isinstance(seen, TenureError) and not isinstance(seen, StoreUnavailable) for seen in found.values()):
        return False
    if len(primaries) > 1:
        both = " and ".join(primaries.values())
        text = f"{both} take writes: a node that reaches only one of them does not see the leader on the other"
        yield warning("hosts", text, "stop the old primary, or make it a replica of the new one")
    return True


def _looked_at(host: Host, look: Callable[[Host], HostLook]) -> HostLook | TenureError:
    try:
        return look(host)
    except TenureError as failure:
        return failure
    except (Failed, Gone) as failure:
        return StoreUnavailable(str(failure))


def examine_server(connector: Any, session: Any, examination: Iterator[Finding]) -> Iterator[Finding]:
    """Examine a server on an open session, and close the session."""
    with contextlib.closing(session), connector.time_limit(session.connection, PHASE_S):
        yield ok("reachable", repr(connector))
        try:
            yield from examination
        except (Failed, Gone) as failure:
            yield error("answer", one_line(failure), "see the server's log")


def round_trip(session: Session) -> tuple[float, Finding]:
    """Measure a round trip to the server; return the seconds, and the finding."""
    seconds = median_s(lambda: session.read(Step("select 1", {}))[0].rows, ROUND_TRIPS)
    return seconds, ok("round trip", f"{duration(seconds)}, the median of {ROUND_TRIPS}")


def tls(*, is_local: bool, is_encrypted: bool, remedy: str) -> Finding:
    """Say whether others can read what is sent."""
    if is_local:
        return ok("tls", "the connection does not leave this machine")
    if is_encrypted:
        return ok("tls", "the connection is encrypted")
    text = "the connection is not encrypted: what is sent, fenced writes included, can be read and changed on its way"
    return warning("tls", text, remedy)


def free_connections(left: int, remedy: str) -> Finding:
    """Say whether the server accepts as many connections as nodes need."""
    text = f"room for {max(0, left)} more; a node takes {CONNECTIONS_PER_NODE}, and one for each open transaction()"
    if left < CONNECTIONS_PER_NODE:
        return error("connections", text, remedy)
    return warning("connections", text, remedy) if left < FEW_CONNECTIONS else ok("connections", text)


def ttl(case: ServerCase) -> Iterator[Finding]:
    """Say whether the TTL leaves room for renewals over this distance."""
    yield pace(case.settings, case.round_trip_s)


# The tables ----------------------------------------------------------------------------------------------------


def contents(case: AnyCase, checks: Checks[AnyCase], *findings: Finding, may_migrate: bool) -> Iterator[Finding]:
    """Check the version of the tables, and add ``findings``. If a node can use the tables, check their contents."""
    finding = version(case.session, may_migrate=may_migrate)
    yield from (finding, *findings)
    if finding.level != "error":
        yield from run_checks(checks, case)


def version(session: Session, *, may_migrate: bool) -> Finding:
    """Say which version the tables have. At least some of them exist."""
    known = tables.MIGRATIONS[-1].version
    try:
        present = migrations.require(session)
    except ConfigError as refusal:
        return error("tables", one_line(refusal), "upgrade Tenure here")
    except (Failed, IndexError) as failure:
        remedy = "end the session that keeps them locked; if they are not Tenure's, give Tenure its own schema or file"
        return error("tables", f"their version cannot be read: {one_line(failure)}", remedy)
    if present >= known:
        try:
            migrations.check_shape(session)
        except ConfigError as refusal:
            remedy = "restore what is missing from a backup; `tenure sql` prints the definitions"
            return error("tables", one_line(refusal), remedy)
    return _compared(present, known, may_migrate=may_migrate)


def _compared(present: int, known: int, *, may_migrate: bool) -> Finding:
    if present < known and may_migrate:
        text = f"version {present}, and this release has {known}: a node that starts brings them up to date"
        return warning("tables", text, "run `tenure init`, or start a node")
    if present < known:
        text = f"version {present}, this release needs {known}, and this user does not own them"
        return error("tables", text, "run `tenure init` as their owner")
    if present > known:
        text = f"version {present}, newer than this release's {known}, which can still work with them"
        return warning("tables", text, "upgrade Tenure here")
    return ok("tables", f"version {present}")


def created(word: str) -> list[str]:
    """Return the names of the tables or functions that this release's migrations create."""
    texts = [text for step in tables.MIGRATIONS for text in (*step.tables, *step.functions)]
    return [name for text in texts for name in re.findall(rf"create {word} {{(?:schema}})?(\w+)", text)]


def namespace(case: Case) -> Iterator[Finding]:
    """Say whether leaders are elected in the namespace on this server, and whether the TTL is permitted there."""
    name, ttl_s = case.settings.namespace, case.settings.ttl
    texts = (statements.CONFIRMED, "select limit_by from {namespaces} where name = :namespace")
    found, limit = case.session.read(*(Step(text, {"namespace": name}) for text in texts))
    if not found.rows:
        yield ok("namespace", f"{name!r} is new: the first node creates it")
        return
    server = case.session.server()
    row = confirmed(found, server)
    largest_s = row.max_ttl
    # `tenure init` may leave the limit open. Then the first node sets it.
    left_open = limit.rows[0][0] == "open"
    if row.made_on_a_promoted_server:
        text = (
            f"{name!r} is waiting: it was created on a promoted replica, which may have lost a namespace of that name; "
            f"no node is elected before every lease of the lost one is over, {exact(row.longest_lease)} after a node "
            "first saw the new one"
        )
        yield warning("namespace", text, "start a node, and wait; or run `tenure init` in your deployment")
    elif row.line != server.line:
        text = (
            f"{name!r} is waiting: its tables came from another server (a promotion, a restored dump), and no node is "
            f"elected before every lease given there is over, {exact(largest_s)} after a node first saw this server"
        )
        yield warning("namespace", text, "start a node, and wait")
    else:
        largest = "the first node sets the largest permitted TTL"
        if not left_open:
            largest = f"the largest permitted TTL is {exact(largest_s)}"
        yield ok("namespace", f"{name!r} is confirmed here; {largest}")
    yield from _promotion(name, row)
    if row.ripe_ttl < largest_s:
        text = f"the largest TTL of {name!r} was raised recently: until a node has seen the new one for 10 minutes"
        yield ok("largest ttl", f"{text}, nodes join with at most {exact(row.ripe_ttl)}")
    if ttl_s > largest_s and not left_open:
        text = f"ttl={ttl_s:g} is above the largest permitted in {name!r}, {exact(largest_s)}: nodes refuse to start"
        yield error("largest ttl", text, f"use a shorter TTL, or `tenure init --max-ttl {ttl_s:g}`")


def _promotion(name: str, row: Confirmed) -> Iterator[Finding]:
    """Say whether what an operator said about promotions can be true."""
    if row.loses_nothing and row.replicated:
        yield ok("promotion", f"{name!r} loses nothing: a promoted replica is trusted at once")
    elif row.loses_nothing:
        text = (
            f"{name!r} is said to lose nothing, but synchronous_standby_names is empty: commits do not wait for a "
            "replica, and a promotion now could give two leaders"
        )
        yield error("promotion", text, "set synchronous_standby_names, or run `tenure init --promotion may-lose`")


def members(case: Case) -> Iterator[Finding]:
    """Say how many members there are, and which are overdue, as ``tenure status`` does."""
    rows = case.session.read(Step(statements.MEMBERS, {"namespace": case.settings.namespace}))[0].rows
    late = False
    for _, name, host, pid, _, _, _, ttl_ms, _, renewed, now in rows:
        silent_s = seconds_between(renewed, now)
        if overdue(silent_s, ttl_ms):
            late = True
            text = (
                f"{name!r} (process {pid} on {host}) is overdue: it renewed {duration(silent_s)} ago, its TTL is "
                f"{exact(ttl_ms / 1000)}, and no node has ended it"
            )
            remedy = (
                "run the doctor again: a running node ends it within a TTL and takes its roles; if it is still listed, "
                "no node is running: start a node"
            )
            yield warning("members", text, remedy)
    if not late:
        yield ok("members", f"{len(rows)} living, all renewing" if rows else "none at this moment")


def guards(case: Case) -> Iterator[Finding]:
    """Say which tables are guarded, and how a write could get around each guard."""
    found = guarded_tables(case.session)
    for table in found:
        for leak in table.leaks:
            text, _, remedy = leak.rpartition(": ")
            yield warning("guards", f"{table.table} (role {table.role!r}): {text or leak}", remedy)
    tight = [f"{table.table} (role {table.role!r})" for table in found if not table.leaks]
    if tight or not found:
        yield ok("guards", ", ".join(tight) or "no table is guarded")


# Times ---------------------------------------------------------------------------------------------------------


def as_members(settings: NodeSettings, session: Session) -> NodeSettings:
    """Return the settings with the TTL of the living members, if there are some and no TTL was given."""
    if not settings.ttl_source:
        return settings
    try:
        rows = session.read(Step(statements.MEMBERS, {"namespace": settings.namespace}))[0].rows
    except Failed:
        # The tables do not exist, or this user may not read them. Another check reports that.
        return settings
    ttls = {ttl_ms / 1000 for _, _, _, _, _, _, _, ttl_ms, *_ in rows}
    if not ttls:
        return settings
    source = "as the living members have it" if len(ttls) == 1 else "the shortest of the living members"
    ttl_s = min(ttls)
    return replace(settings, ttl=ttl_s, renew_every=timing.renewal_interval(ttl_s), ttl_source=source)


def pace(settings: NodeSettings, round_trip_s: float) -> Finding:
    """Say whether the TTL leaves room for renewals that take as long as a round trip."""
    every_s = timing.renewal_interval(settings.ttl)
    source = f", {settings.ttl_source}" if settings.ttl_source else ""
    text = f"ttl={settings.ttl:g}{source}: a renewal every {every_s:g} s, and a round trip takes "
    text += duration(round_trip_s)
    needed_s = max(1, round(4 * KEPT_RENEWALS * round_trip_s + 0.5))
    remedy = f"use a TTL of {needed_s} s or more, or a database that is nearer"
    if round_trip_s * 2 > every_s:
        return error("ttl", f"{text}: renewals come too late", remedy)
    if round_trip_s * KEPT_RENEWALS > every_s:
        return warning("ttl", f"{text}: if a few are slow, the leader loses its term", remedy)
    return ok("ttl", text)


def median_s(call: Callable[[], object], times: int) -> float:
    """Return the median of how long a call takes."""
    taken = []
    for _ in range(times):
        before = time.perf_counter()
        call()
        taken.append(time.perf_counter() - before)
    return statistics.median(taken)
