"""The examination of a MariaDB or MySQL database, on one connection as a node opens it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from tenure.databases import doctor
from tenure.databases.connecting import is_here
from tenure.databases.doctor import Checks, Finding, error, ok, one_line, run_checks, warning
from tenure.databases.mysql.connect import MySqlConnector, is_encrypted, replicates_from
from tenure.databases.mysql.sentinel import UserLockSentinel
from tenure.databases.mysql.session import MySqlSession, is_local_socket, wire
from tenure.errors import ConfigError, PoolerDetected, StoreUnavailable
from tenure.settings import NodeSettings
from tenure.store.session import Failed, Step

TIMEOUTS = {
    "wait_timeout": "an application's connection that is idle for longer is closed",
    "idle_transaction_timeout": "an application's fenced transaction that is idle for longer is ended",
    "max_statement_time": "an application's fenced transaction fails when a statement takes longer",
    "innodb_lock_wait_timeout": "an application's fenced transaction fails when it waits longer for a lock",
}


@dataclass
class MySqlCase(doctor.ServerCase):
    """What the checks examine on MariaDB."""

    session: MySqlSession
    connector: MySqlConnector
    variables: dict[str, str]
    """The server's global variables."""


def examine(settings: NodeSettings) -> Iterator[Finding]:
    """Examine the database that the settings name, as a node with these settings would find it."""
    connector = MySqlConnector(settings.url, settings.ttl, f"{settings.namespace}/{settings.name}", settings.password)
    if not (yield from doctor.hosts(connector, lambda host: doctor.HostLook(*connector.look(host)))):
        return
    try:
        session = connector.open("doctor")
    except PoolerDetected as refusal:
        yield doctor.refused("connection", refusal)
        return
    except ConfigError as refusal:
        yield doctor.refused("server", refusal)
        return
    except StoreUnavailable as failure:
        read_only = "is read-only" in str(failure)
        yield doctor.refused("primary", failure) if read_only else doctor.unreachable(connector, failure)
        return
    yield from doctor.examine_server(connector, session, _examined(settings, connector, session))


def _examined(settings: NodeSettings, connector: MySqlConnector, session: MySqlSession) -> Iterator[Finding]:
    connector.set_statement_timeout(session, doctor.STATEMENT_TIMEOUT_S)
    who, variables = session.read(Step("select version(), current_user()", {}), Step("show global variables", {}))
    ((version, user),) = who.rows
    if "mariadb" in version.lower():
        yield ok("server", f"MariaDB {version}")
    else:
        yield warning("server", f"MySQL {version}, on which Tenure was never tested", "use MariaDB, or PostgreSQL")
    yield _primary(session)
    round_trip_s, finding = doctor.round_trip(session)
    yield finding
    settings = doctor.as_members(settings, session)
    yield from run_checks(CHECKS, MySqlCase(settings, session, user, round_trip_s, connector, dict(variables.rows)))


def _primary(session: MySqlSession) -> Finding:
    """Say whether the server that takes writes is a primary. A URL with several hosts leads to no replica."""
    sources = replicates_from(session.connection)
    if not sources:
        return ok("primary", "this server takes writes, and is not part of a Galera cluster")
    text = (
        f"this server takes writes, and is a replica of {', '.join(sources)}: what nodes write here is not there, and "
        "a node whose URL names the other server does not see the leader here"
    )
    return warning("primary", text, "give all nodes the URL of the primary; here, set global read_only = 1")


def _connection(case: MySqlCase) -> Iterator[Finding]:
    """Check that user-level locks work: take one, and see whether the server shows it."""
    sentinel = UserLockSentinel(case.session)
    key = random.getrandbits(31)
    stands = sentinel.hold(key) and key in sentinel.standing([key])
    sentinel.release(key)
    if stands:
        yield ok("connection", "direct, and user-level locks hold: a node picks mode hybrid")
    else:
        text = "user-level locks (GET_LOCK) have no effect on this server"
        yield error("connection", text, "use mode='lease', or MariaDB itself")


def _tls(case: MySqlCase) -> Iterator[Finding]:
    connection = case.session.connection
    yield doctor.tls(
        is_local=is_local_socket(connection) or is_here(wire(connection).getpeername()[0]),
        is_encrypted=is_encrypted(connection),
        remedy="give the server a certificate, and add ssl_ca=… and ssl_verify_identity=true to the URL",
    )


def _keepalive(case: MySqlCase) -> Iterator[Finding]:
    """Check that the server accepts the time-out that a node sets for silent connections."""
    case.connector.set_idle_timeout(case.session)
    ((taken,),) = case.session.read(Step("select @@wait_timeout", {}))[0].rows
    wanted = case.connector.patience_s
    if taken == wanted:
        yield ok("keepalive", f"the server accepted wait_timeout={taken}: it closes silent control connections")
    else:
        text = f"the server did not accept wait_timeout={wanted}, it is {taken}; a lost network is noticed late"
        yield warning("keepalive", text, "use takeover='strict' if that is too late")


def _connections(case: MySqlCase) -> Iterator[Finding]:
    (status,) = case.session.read(Step("show global status like 'Threads_connected'", {}))
    # This connection is closed when the examination is over.
    left = 1 + int(case.variables["max_connections"]) - int(status.rows[0][1])
    yield doctor.free_connections(left, "raise max_connections, or close connections that are not in use")


def _time_outs(case: MySqlCase) -> Iterator[Finding]:
    """Say which settings would end the application's transactions early."""
    short = []
    for name, what in TIMEOUTS.items():
        value_s = float(case.variables.get(name, 0))
        if 0 < value_s < case.settings.ttl:
            short.append(name)
            text = f"{name} is {value_s:g} s, for the whole server: a node overrides it for itself, but {what}"
            yield warning("time-outs", text, f"set global {name} = {case.settings.ttl:.0f}, or more")
    if not short:
        yield ok("time-outs", "none is shorter than the TTL")


def _durability(case: MySqlCase) -> Iterator[Finding]:
    flush = case.variables.get("innodb_flush_log_at_trx_commit")
    method = case.variables.get("innodb_flush_method")
    wrong = [("innodb_flush_log_at_trx_commit", flush, "1")] if flush != "1" else []
    wrong += [("innodb_flush_method", method, "fsync or O_DIRECT")] if method == "nosync" else []
    for name, value, right in wrong:
        text = f"{name} is {value}: after a power failure tokens may be issued again, and old terms pass the fence"
        yield warning("durability", text, f"set {name} to {right}, unless the data is for tests")
    if not wrong:
        yield ok("durability", "innodb_flush_log_at_trx_commit is 1: no token is issued again after a crash")


def _replication(case: MySqlCase) -> Iterator[Finding]:
    if case.variables.get("log_bin") == "ON" and case.variables.get("binlog_format") == "STATEMENT":
        text = "binlog_format is STATEMENT, with which InnoDB refuses the isolation level of nodes"
        yield error("replication", text, "set global binlog_format = 'MIXED', or ROW")
    elif case.variables.get("log_bin") == "ON":
        text = (
            "the server writes a binary log: a promoted replica may lack the last terms, so no node is elected "
            "there for the largest permitted TTL; tokens may repeat there"
        )
        yield ok("replication", text)
    else:
        yield ok("replication", "no binary log, so no replicas")


def _tables(case: MySqlCase) -> Iterator[Finding]:
    """Check the tables, this user's privileges on them and, if these are enough, what the tables contain."""
    (names,) = case.session.read(
        Step("select table_name, engine from information_schema.tables where table_schema = database()", {})
    )
    engines = dict(names.rows)
    wanted = [f"tenure_{name}" for name in ("meta", *doctor.created("table"))]
    missing = [name for name in wanted if name not in engines]
    if len(missing) == len(wanted):
        text = "none that this user may see: a node that starts creates them, if it has the privileges"
        yield warning("tables", text, "run `tenure init`")
        return
    if missing:
        remedy = "give this user the privileges (`tenure sql --dialect mysql --grants`), or restore them from a backup"
        yield error("tables", f"missing, or hidden from {case.user}: {', '.join(missing)}", remedy)
        return
    foreign = [name for name in wanted if engines[name] != "InnoDB"]
    if foreign:
        remedy = f"alter table {foreign[0]} engine = InnoDB"
        yield error("tables", f"not in InnoDB, so transactions have no effect on them: {', '.join(foreign)}", remedy)
        return
    try:
        case.session.schema.check_privileges(case.session)
    except Failed as failure:
        remedy = f"as an administrator, run what `tenure sql --dialect mysql --grants '{case.user}'` prints"
        yield error("privileges", one_line(failure), remedy)
        return
    permitted = ok("privileges", "this user may do what a node does")
    yield from doctor.contents(case, CHECKS_OF_TABLES, permitted, may_migrate=True)


def _identity(case: MySqlCase) -> Iterator[Finding]:
    text = f"the server is {case.session.server().incarnation.rpartition(':')[0]}: its id, its host's name and its port"
    yield ok("identity", text)


CHECKS_OF_SERVER: Checks[MySqlCase] = (
    *(_connection, _tls, _keepalive, _connections),
    *(_time_outs, _durability, _replication),
)
CHECKS: Checks[MySqlCase] = (*CHECKS_OF_SERVER, doctor.ttl, _tables)
CHECKS_OF_TABLES: Checks[MySqlCase] = (_identity, doctor.namespace, doctor.members, doctor.guards)
