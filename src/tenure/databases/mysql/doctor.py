"""The examination of a MariaDB or MySQL database, on one connection as a node opens it."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tenure import diagnosis, schema
from tenure.diagnosis import Finding, error, fine, made, one_line, warning
from tenure.dialing import is_here
from tenure.errors import ConfigError, PoolerDetected, StoreUnavailable
from tenure.mysql import MySqlSession, wire
from tenure.mysql_connector import MySqlConnector, is_encrypted
from tenure.session import Failed, Gone, Step
from tenure.settings import NodeSettings
from tenure.user_locks import UserLockSentinel

STATEMENT_TIMEOUT_S = 5.0
PHASE_S = 20.0
FEW_CONNECTIONS = 10
PER_NODE = 2


@dataclass
class Case:
    """What the checks look at."""

    settings: NodeSettings
    connector: MySqlConnector
    session: MySqlSession
    variables: dict[str, str]
    """What the server is set to."""
    user: str
    round_trip_s: float


def examine(settings: NodeSettings) -> Iterator[Finding]:
    """Examine the database that the settings name, as a node with these settings would find it."""
    connector = MySqlConnector(settings.url, settings.ttl, f"{settings.namespace}/{settings.name}", settings.password)
    try:
        session = connector.open("doctor")
    except PoolerDetected as refusal:
        yield error("connection", one_line(refusal), "give the URL of the server itself")
        return
    except ConfigError as refusal:
        yield error("server", one_line(refusal), "use MariaDB 10.6 or newer, and a server of its own")
        return
    except StoreUnavailable as failure:
        if "is read-only" in str(failure):
            yield error("primary", one_line(failure), "give the primary's URL")
        else:
            remedy = "start the server, or correct the URL, the network or the password"
            yield error("reachable", one_line(failure), remedy)
        return
    with contextlib.closing(session), connector.limited(session.connection, PHASE_S):
        yield fine("reachable", repr(connector))
        connector.hurry(session, STATEMENT_TIMEOUT_S)
        try:
            yield from _examined(settings, connector, session)
        except (Failed, Gone) as failure:
            yield error("answer", one_line(failure), "see the server's log")


def _examined(settings: NodeSettings, connector: MySqlConnector, session: MySqlSession) -> Iterator[Finding]:
    who, variables = session.read(Step("select version(), current_user()", {}), Step("show global variables", {}))
    ((version, user),) = who.rows
    if "mariadb" in version.lower():
        yield fine("server", f"MariaDB {version}")
    else:
        yield warning("server", f"MySQL {version}, on which Tenure was never tested", "use MariaDB, or PostgreSQL")
    yield fine("primary", "this server takes writes, and is no Galera cluster")
    round_trip_s, finding = diagnosis.round_trip(session)
    yield finding
    yield from made(CHECKS, Case(settings, connector, session, dict(variables.rows), user, round_trip_s))


def _connection(case: Case) -> Iterator[Finding]:
    """Take a lock and look for it."""
    sentinel = UserLockSentinel(case.session)
    key = random.getrandbits(31)
    stands = sentinel.hold(key) and key in sentinel.standing([key])
    sentinel.release(key)
    if stands:
        yield fine("connection", "direct, and user-level locks hold: a node picks mode hybrid")
    else:
        text = "user-level locks (GET_LOCK) lock nothing on this server"
        yield error("connection", text, "use mode='lease', or MariaDB itself")


def _tls(case: Case) -> Iterator[Finding]:
    line = wire(case.session.connection)
    if line.family == socket.AF_UNIX or is_here(line.getpeername()[0]):
        yield fine("tls", "the connection does not leave this machine")
    elif is_encrypted(case.session.connection):
        yield fine("tls", "the connection is encrypted")
    else:
        text = (
            "the connection is not encrypted: what is sent, fenced writes included, can be read and changed on its way"
        )
        yield warning("tls", text, "give the server a certificate, and the URL ssl_ca=… and ssl_verify_identity=true")


def _keepalive(case: Case) -> Iterator[Finding]:
    """Set what a node sets, and see whether the server took it."""
    case.connector.guard(case.session)
    ((taken,),) = case.session.read(Step("select @@wait_timeout", {}))[0].rows
    wanted = case.connector.patience_s
    if taken == wanted:
        yield fine("keepalive", f"the server took wait_timeout={taken}: so long may a control connection be silent")
    else:
        text = f"the server did not take wait_timeout={wanted}, it is {taken}; a lost network is noticed late"
        yield warning("keepalive", text, "use takeover='strict' if that is too late")


def _connections(case: Case) -> Iterator[Finding]:
    (status,) = case.session.read(Step("show global status like 'Threads_connected'", {}))
    left = 1 + int(case.variables["max_connections"]) - int(status.rows[0][1])  # ours is given back
    text = f"room for {max(0, left)} more; a node takes {PER_NODE}, and one for each open transaction()"
    remedy = "raise max_connections, or end connections that nobody uses"
    if left < PER_NODE:
        yield error("connections", text, remedy)
    elif left < FEW_CONNECTIONS:
        yield warning("connections", text, remedy)
    else:
        yield fine("connections", text)


def _timeouts(case: Case) -> Iterator[Finding]:
    """Say what would cut the application's transactions short."""
    short = []
    for name, what in TIMEOUTS.items():
        value_s = float(case.variables.get(name, 0))
        if 0 < value_s < case.settings.ttl:
            short.append(name)
            text = f"{name} is {value_s:g} s, for the whole server: a node overrides it for itself, but {what}"
            yield warning("time-outs", text, f"set global {name} = {case.settings.ttl:.0f}, or more")
    if not short:
        yield fine("time-outs", "none is shorter than the TTL")


TIMEOUTS = {
    "wait_timeout": "a connection of the application that rests for longer is cut",
    "idle_transaction_timeout": "a fenced transaction of the application that rests for longer is ended",
    "max_statement_time": "a fenced transaction of the application fails when a statement takes longer",
    "innodb_lock_wait_timeout": "a fenced transaction of the application fails when it waits longer for a lock",
}


def _durability(case: Case) -> Iterator[Finding]:
    flush = case.variables.get("innodb_flush_log_at_trx_commit")
    method = case.variables.get("innodb_flush_method")
    wrong = [("innodb_flush_log_at_trx_commit", flush, "1")] if flush != "1" else []
    wrong += [("innodb_flush_method", method, "fsync or O_DIRECT")] if method == "nosync" else []
    for name, value, right in wrong:
        text = f"{name} is {value}: after a power failure tokens may come back, and old terms pass the fence"
        yield warning("durability", text, f"set {name} to {right}, unless the data is for tests")
    if wrong:
        return
    yield fine("durability", "innodb_flush_log_at_trx_commit is 1: no token comes back after a crash")


def _replication(case: Case) -> Iterator[Finding]:
    if case.variables.get("log_bin") == "ON" and case.variables.get("binlog_format") == "STATEMENT":
        text = "binlog_format is STATEMENT, with which InnoDB refuses the isolation level of nodes"
        yield error("replication", text, "set global binlog_format = 'MIXED', or ROW")
    elif case.variables.get("log_bin") == "ON":
        text = (
            "the server writes a binary log: a replica that is promoted may lack the last terms, so nobody is elected "
            "there for the largest permitted TTL; tokens have no floor there and may come again"
        )
        yield fine("replication", text)
    else:
        yield fine("replication", "no binary log, so no replicas")


def _tables(case: Case) -> Iterator[Finding]:
    """Look at the tables, what this user may do with them and, if that is enough, at what is in them."""
    (names,) = case.session.read(
        Step("select table_name, engine from information_schema.tables where table_schema = database()", {})
    )
    engines = dict(names.rows)
    wanted = [f"tenure_{name}" for name in ("meta", *diagnosis.created("table"))]
    missing = [name for name in wanted if name not in engines]
    if len(missing) == len(wanted):
        text = "none that this user may see: a node that starts creates them, if it may"
        yield warning("tables", text, "run `tenure init`")
        return
    if missing:
        remedy = "give this user the privileges (`tenure sql --dialect mysql --grants`), or restore them from a backup"
        yield error("tables", f"missing, or not to be seen by {case.user}: {', '.join(missing)}", remedy)
        return
    foreign = [name for name in wanted if engines[name] != "InnoDB"]
    if foreign:
        remedy = f"alter table {foreign[0]} engine = InnoDB"
        yield error("tables", f"not in InnoDB, so that no transaction holds there: {', '.join(foreign)}", remedy)
        return
    try:
        schema.check_privileges(case.session)
    except Failed as failure:
        remedy = f"as an administrator, run what `tenure sql --dialect mysql --grants '{case.user}'` prints"
        yield error("privileges", one_line(failure), remedy)
        return
    (finding,) = diagnosis.version(case.session, may_migrate=True)
    yield finding
    yield fine("privileges", "this user may do what a node does")
    if finding.level != "error":
        yield from made(CHECKS_OF_TABLES, case)


def _identity(case: Case) -> Iterator[Finding]:
    text = f"the server is {case.session.server().incarnation.rpartition(':')[0]}: its id, its host's name and its port"
    yield fine("identity", text)


CHECKS: dict[str, Callable[[Case], Iterator[Finding]]] = {
    "connection": _connection,
    "tls": _tls,
    "keepalive": _keepalive,
    "connections": _connections,
    "time-outs": _timeouts,
    "durability": _durability,
    "replication": _replication,
    "ttl": lambda case: diagnosis.pace(case.settings, case.round_trip_s),
    "tables": _tables,
}
CHECKS_OF_TABLES: dict[str, Callable[[Case], Iterator[Finding]]] = {
    "identity": _identity,
    "namespace": lambda case: diagnosis.namespace(case.session, case.settings),
    "members": lambda case: diagnosis.members(case.session, case.settings),
}
