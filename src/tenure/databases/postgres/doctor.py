"""The examination of a PostgreSQL database.

Two connections, as many as a node has: a plain one with the settings that server, database and role give to everybody
(the application's connections have those), and one as a node opens it.
"""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tenure import diagnosis
from tenure.advisory import CLASS_ID, AdvisorySentinel, Stranger, strangers
from tenure.connector import OLDEST_VERSION, PostgresConnector
from tenure.diagnosis import Finding, error, fine, made, one_line, warning
from tenure.dialing import stays_here
from tenure.errors import PoolerDetected, StoreUnavailable
from tenure.postgres import PostgresSession
from tenure.session import Failed, Gone, Step
from tenure.settings import NodeSettings

STATEMENT_TIMEOUT_S = 5.0
PHASE_S = 20.0
"""How long the checks on one connection may take."""
FEW_CONNECTIONS = 10
PER_NODE = 2
LOOK_AGAIN_S = 0.5
"""Between two looks at who has keys: longer than a node that starts holds one without a row that says whose it is."""

TIMEOUTS = {
    "idle_session_timeout": "a connection of the application that rests for longer is cut",
    "idle_in_transaction_session_timeout": "a fenced transaction of the application that rests for longer is ended",
    "transaction_timeout": "a fenced transaction of the application that takes longer is ended",
    "statement_timeout": "a fenced transaction of the application fails when a statement takes longer",
    "lock_timeout": "a fenced transaction of the application fails when it waits longer for a lock (the fence's, too)",
}
SOURCES = {
    "user": "for this role",
    "database": "for this database",
    "database user": "for this role in this database",
    "global": "for every role",
    "client": "by the URL or the environment",
}


@dataclass
class Case:
    """What the checks look at."""

    settings: NodeSettings
    connector: PostgresConnector
    plain: PostgresSession
    node: PostgresSession
    user: str
    role: str
    """The user in this database, as ALTER wants it."""
    round_trip_s: float


def examine(settings: NodeSettings) -> Iterator[Finding]:
    """Examine the database that the settings name, as a node with these settings would find it."""
    label = f"{settings.namespace}/{settings.name}"
    connector = PostgresConnector(settings.url, settings.schema, settings.ttl, label, settings.password)
    try:
        plain = connector.open_plain("doctor")
    except StoreUnavailable as failure:
        yield error("reachable", one_line(failure), "start the server, or correct the URL, the network or the password")
        return
    with contextlib.closing(plain), connector.limited(plain.connection, PHASE_S):
        yield fine("reachable", repr(connector))
        try:
            yield from _first_looks(settings, connector, plain)
        except (Failed, Gone) as failure:
            yield error("answer", one_line(failure), "see the server's log")


def _first_looks(settings: NodeSettings, connector: PostgresConnector, plain: PostgresSession) -> Iterator[Finding]:
    """Look at what a node refuses; if there is nothing of that kind, connect as a node and make all the checks."""
    release = plain.connection.info.parameter_status("server_version")
    if plain.connection.info.server_version < OLDEST_VERSION:
        yield error("server", f"PostgreSQL {release}; Tenure needs 14 or newer", "upgrade the server")
        return
    yield fine("server", f"PostgreSQL {release}")
    round_trip_s, finding = diagnosis.round_trip(plain)
    yield finding
    ((in_recovery, user, role),) = plain.read(Step(_WHERE, {}))[0].rows
    if in_recovery:
        remedy = "give the primary's URL, or one of all hosts with target_session_attrs=read-write"
        yield error("primary", "this is a hot standby, and leaders are elected on the primary", remedy)
        return
    yield fine("primary", "this server takes writes")
    try:
        node = connector.open("doctor", STATEMENT_TIMEOUT_S)
    except PoolerDetected as refusal:
        remedy = "use pool_mode = transaction there, or give the URL of PostgreSQL itself"
        yield error("connection", one_line(refusal), remedy)
        return
    except StoreUnavailable as failure:
        yield error("connection", f"no second one, and a node needs two: {one_line(failure)}", "make room for more")
        return
    with contextlib.closing(node), connector.limited(node.connection, PHASE_S):
        yield from made(CHECKS, Case(settings, connector, plain, node, user, role, round_trip_s))


_WHERE = """
select pg_catalog.pg_is_in_recovery(), session_user,
    pg_catalog.format('role %I in database %I', session_user, pg_catalog.current_database())
"""


# The connection ------------------------------------------------------------------------------------------------


def _connection(case: Case) -> Iterator[Finding]:
    """Say how it leads to the server, and which mode a node picks."""
    later = "a crash is noticed after the TTL instead of at once"
    if case.node.pooled:
        text = f"through a connection pooler: a node picks mode lease, and {later}"
        yield warning(
            "connection", text, "give nodes a direct_url= that leads to PostgreSQL itself (and look there, too)"
        )
    elif not AdvisorySentinel(case.node).holds():
        text = f"direct, but advisory locks lock nothing on this server: a node picks mode lease, and {later}"
        yield warning("connection", text, "use PostgreSQL itself, if that is too late")
    else:
        yield fine("connection", "direct, and advisory locks hold: a node picks mode hybrid")


def _tls(case: Case) -> Iterator[Finding]:
    if stays_here(case.plain.connection):
        yield fine("tls", "the connection does not leave this machine")
    elif case.plain.connection.pgconn.ssl_in_use:
        yield fine("tls", "the connection is encrypted")
    else:
        text = (
            "the connection is not encrypted: what is sent, fenced writes included, can be read and changed on its way"
        )
        yield warning("tls", text, "add sslmode=require to the URL, or better verify-full")


def _keepalive(case: Case) -> Iterator[Finding]:
    if case.node.pooled:
        yield fine("keepalive", "the server's end is the pooler's; a lost network is noticed by the lease")
        return
    if case.node.connection.info.host.startswith("/"):
        yield fine("keepalive", "a Unix socket needs none")
        return
    settings = case.connector.keepalive(case.node)
    refused = [f"{name} is {taken or 'unknown'} instead of {told}" for name, told, taken in settings if told != taken]
    if refused:
        text = f"the server did not take what a node sets: {', '.join(refused)}; a lost network is noticed late"
        yield warning("keepalive", text, "use takeover='strict' if that is too late, or a server on Linux")
    else:
        yield fine("keepalive", "the server took " + ", ".join(f"{name}={taken}" for name, _, taken in settings))


def _connections(case: Case) -> Iterator[Finding]:
    if case.plain.pooled:
        yield fine("connections", "the pooler's to give")
        return
    ((left,),) = case.plain.read(Step(_LEFT, {}))[0].rows
    text = f"room for {max(0, left)} more; a node takes {PER_NODE}, and one for each open transaction()"
    remedy = "raise max_connections (or the limit of the role or database), or end connections that nobody uses"
    if left < PER_NODE:
        yield error("connections", text, remedy)
    elif left < FEW_CONNECTIONS:
        yield warning("connections", text, remedy)
    else:
        yield fine("connections", text)


# What two connections of ours take is given back. Background processes show no database.
_LEFT = """
select 2 + least(
    cast(pg_catalog.current_setting('max_connections') as integer)
        - cast(pg_catalog.current_setting('superuser_reserved_connections') as integer)
        - coalesce(cast(pg_catalog.current_setting('reserved_connections', true) as integer), 0)
        - (select count(*) from pg_catalog.pg_stat_activity where datid is not null),
    case when r.rolconnlimit >= 0 and not r.rolsuper then r.rolconnlimit
        - (select count(*) from pg_catalog.pg_stat_activity where usesysid = r.oid and datid is not null) end,
    case when d.datconnlimit >= 0 and not r.rolsuper then d.datconnlimit
        - (select count(*) from pg_catalog.pg_stat_activity where datid = d.oid) end)
from pg_catalog.pg_roles r, pg_catalog.pg_database d
where r.rolname = session_user and d.datname = pg_catalog.current_database()
"""


# What server, database and role are set to ---------------------------------------------------------------------


def _timeouts(case: Case) -> Iterator[Finding]:
    rows = case.plain.read(Step(_TIMEOUTS, {"names": list(TIMEOUTS)}))[0].rows
    for name, value_ms, source in rows:
        where = SOURCES.get(source, "for the whole server")
        text = f"{name} is {value_ms / 1000:g} s, set {where}: a node overrides it for itself, but {TIMEOUTS[name]}"
        if name == "idle_session_timeout" or value_ms < case.settings.ttl * 1000:
            longer = 0 if name == "idle_session_timeout" else f"'{case.settings.ttl:g}s'"
            remedy = f"alter {case.role} set {name} = {longer}"
            yield warning("time-outs", text, "take it out of there" if source == "client" else remedy)
        else:
            yield fine("time-outs", text)
    if not rows:
        yield fine("time-outs", "none set for this role, database or server")


_TIMEOUTS = """
select name, cast(setting as bigint), source from pg_catalog.pg_settings
where name = any(:names) and setting <> '0' order by name
"""


def _durability(case: Case) -> Iterator[Finding]:
    query = "select pg_catalog.current_setting('synchronous_commit'), pg_catalog.current_setting('fsync')"
    ((synchronous_commit, fsync),) = case.plain.read(Step(query, {}))[0].rows
    if fsync == "off":
        text = "fsync is off: after a power failure tokens may come back, and old terms pass the fence"
        yield warning("durability", text, "turn fsync on, unless the data is for tests")
    elif synchronous_commit == "off":
        text = (
            "synchronous_commit is off: a node uses `local` for itself, so no token comes back after a crash, but "
            "writes of the application that were acknowledged may be gone, fenced or not"
        )
        yield warning("durability", text, f"alter {case.role} set synchronous_commit = on")
    else:
        yield fine("durability", f"synchronous_commit is {synchronous_commit}: no token comes back after a crash")


def _replication(case: Case) -> Iterator[Finding]:
    ((names, waits, replicas, synchronous, hidden),) = case.plain.read(Step(_REPLICATION, {}))[0].rows
    many = f"{replicas} replica" + ("" if replicas == 1 else "s")
    if names and waits and not synchronous and not hidden:
        text = f"{many}, none that synchronous_standby_names = {names!r} waits for: every commit waits for ever"
        yield error("replication", text, "bring such a replica back, or take it out of synchronous_standby_names")
    elif names and waits:
        yield fine("replication", f"{many}, synchronous: no term begins before one that may be promoted has it")
    elif replicas:
        text = (
            f"{many}, asynchronous: one that is promoted may lack the last terms, so nobody is elected there for the "
            "largest permitted TTL, and tokens go on above all of the old server's"
        )
        yield fine("replication", text)
    else:
        yield fine("replication", "no replicas")


_REPLICATION = """
select pg_catalog.current_setting('synchronous_standby_names'),
       pg_catalog.current_setting('synchronous_commit') not in ('off', 'local'),
       count(*), count(*) filter (where sync_state in ('sync', 'quorum')), count(*) filter (where sync_state is null)
from pg_catalog.pg_stat_replication
"""


# The tables ----------------------------------------------------------------------------------------------------


def _tables(case: Case) -> Iterator[Finding]:
    """Look at the tables, what this user may do with them and, if that is enough, at what is in them."""
    name = case.settings.schema
    wanted = {"tables": ["meta", *diagnosis.created("table")], "functions": diagnosis.created("function")}
    there = case.node.read(Step(_THERE, {"schema": name, **wanted}))[0].rows
    if not there:
        yield from _no_tables(case)
        return
    missing = {*wanted["tables"], *wanted["functions"]}.difference(found for found, _, _ in there)
    if missing:
        remedy = "restore them from a backup, or drop the schema while no node runs (tokens begin anew then)"
        yield error("tables", f"missing in schema {name!r}: {', '.join(sorted(missing))}", remedy)
        return
    may_use, may_create = _rights(case, "USAGE"), _rights(case, "CREATE")
    denied = [f"{rights} on {found}" for found, rights, _ in there if rights]
    if denied or not may_use:
        text = ", ".join(denied if may_use else [f"USAGE on schema {name!r}", *denied])
        remedy = f"as their owner, run what `tenure sql --schema {name} --grants {shlex.quote(case.user)}` prints"
        yield error("privileges", f"this user lacks {text}", remedy)
        return
    (finding,) = diagnosis.version(case.node, may_migrate=bool(may_create) and all(owns for _, _, owns in there))
    yield finding
    yield fine("privileges", "this user may do what a node does")
    if finding.level != "error":
        yield from made(CHECKS_OF_TABLES, case)


def _no_tables(case: Case) -> Iterator[Finding]:
    name = case.settings.schema
    may_use = _rights(case, "USAGE")
    ((on_database,),) = case.node.read(Step(_MAY_CREATE_SCHEMA, {}))[0].rows
    may_create = on_database if may_use is None else may_use and _rights(case, "CREATE")
    if may_create:
        yield warning("tables", f"none in schema {name!r} yet: a node that starts creates them", "run `tenure init`")
        yield fine("privileges", "this user may create the tables")
        return
    print_ = f"as an owner, run what `tenure sql --schema {name}` prints"
    yield error("tables", f"none in schema {name!r}", print_)
    where = "in this database" if may_use is None else f"in schema {name!r}"
    grants = f"{print_}, and then what it prints with `--grants {shlex.quote(case.user)}`"
    yield error("privileges", f"this user may not create tables {where}, and there are none", grants)


def _rights(case: Case, right: str) -> bool | None:
    """Whether the user has a right on the schema; None if there is no such schema."""
    rows = case.node.read(Step(_ON_SCHEMA, {"schema": case.settings.schema, "right": right}))[0].rows
    return bool(rows[0][0]) if rows else None


_MAY_CREATE_SCHEMA = "select pg_catalog.has_database_privilege(pg_catalog.current_database(), 'CREATE')"
_ON_SCHEMA = "select pg_catalog.has_schema_privilege(oid, :right) from pg_catalog.pg_namespace where nspname = :schema"
_THERE = """
select c.relname, pg_catalog.array_to_string(array(
        select wanted from pg_catalog.unnest(case c.relname when 'meta' then array['SELECT']
            else array['SELECT', 'INSERT', 'UPDATE', 'DELETE'] end) as wanted
        where not pg_catalog.has_table_privilege(c.oid, wanted)), ', '),
    pg_catalog.pg_has_role(c.relowner, 'USAGE')
from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
where n.nspname = :schema and c.relname = any(:tables) and c.relkind in ('r', 'p')
union all
select p.proname, case when pg_catalog.has_function_privilege(p.oid, 'EXECUTE') then '' else 'EXECUTE' end,
    pg_catalog.pg_has_role(p.proowner, 'USAGE')
from pg_catalog.pg_proc p join pg_catalog.pg_namespace n on n.oid = p.pronamespace
where n.nspname = :schema and p.proname = any(:functions)
order by 1
"""


def _identity(case: Case) -> Iterator[Finding]:
    if "." in case.node.server().incarnation:  # the time of its start stands for it
        text = (
            "the server hides its system identifier and timeline: every restart counts as another server, the leader "
            "changes with each, and tokens may repeat after the promotion of a replica that lacks the last terms"
        )
        yield warning("identity", text, "grant execute on function pg_catalog.pg_control_system() to public")
    else:
        yield fine("identity", "the server shows its system identifier and timeline: tokens grow across promotions")


def _keys(case: Case) -> Iterator[Finding]:
    """Look twice: a node that is just starting has a key before its row says so."""
    seen = strangers(case.node)
    if seen:
        time.sleep(LOOK_AGAIN_S)
        again = strangers(case.node)
        seen = [one for one in seen if one in again]
    for one in seen:
        yield _about(one)
    if not seen:
        yield fine("keys", "held by members only")


def _about(one: Stranger) -> Finding:
    does = "holds" if one.granted else "waits for"
    who = f"connection {one.pid} (user {one.user!r}, application {one.application!r}) {does}"
    remedy = (
        f"select pg_terminate_backend({one.pid}), and see that nobody else takes advisory locks of class {CLASS_ID}"
    )
    if one.member is None:
        return warning("keys", f"{who} key {one.key} of Tenure's, and is no member's", remedy)
    return error("keys", f"{who} the key of {one.member!r}, whose death would be noticed after the TTL only", remedy)


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
    "namespace": lambda case: diagnosis.namespace(case.node, case.settings),
    "keys": _keys,
    "members": lambda case: diagnosis.members(case.node, case.settings),
}
