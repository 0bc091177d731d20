"""The examination of a PostgreSQL database.

It opens two connections, as many as a node does. The plain one has the settings of server, database and role, as the
application's connections do. The other one is opened as a node opens it.
"""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass

from tenure.databases import doctor
from tenure.databases.connecting import is_here
from tenure.databases.doctor import Checks, Finding, error, ok, one_line, run_checks, warning
from tenure.databases.hosts import Host
from tenure.databases.postgres.connect import PostgresConnector
from tenure.databases.postgres.sentinel import CLASS_ID, AdvisorySentinel, Stranger, foreign_lock_holders
from tenure.databases.postgres.session import PostgresSession
from tenure.errors import ConfigError, PoolerDetected, StoreUnavailable
from tenure.settings import NodeSettings
from tenure.store.dialects import listed
from tenure.store.session import Step

LOOK_AGAIN_S = 0.5
"""How long to wait before the keys are read again. A starting node has a key for less time before its row names it."""

TIMEOUTS = {
    "idle_session_timeout": "an application's connection that is idle for longer is closed",
    "idle_in_transaction_session_timeout": "an application's fenced transaction that is idle for longer is ended",
    "transaction_timeout": "an application's fenced transaction that takes longer is ended",
    "statement_timeout": "an application's fenced transaction fails when a statement takes longer",
    "lock_timeout": "an application's fenced transaction fails when it waits longer for a lock, the fence's included",
}
SOURCES = {
    "user": "for this role",
    "database": "for this database",
    "database user": "for this role in this database",
    "global": "for every role",
    "client": "by the URL or the environment",
}


@dataclass
class PostgresCase(doctor.ServerCase):
    """What the checks examine on PostgreSQL."""

    session: PostgresSession
    connector: PostgresConnector
    plain: PostgresSession
    role: str
    """The user in this database, as ``alter`` expects it: ``role … in database …``."""


def examine(settings: NodeSettings) -> Iterator[Finding]:
    """Examine the database that the settings name, as a node with these settings would find it."""
    label = f"{settings.namespace}/{settings.name}"
    connector = PostgresConnector(settings.url, settings.schema, settings.ttl, label, settings.password)
    if not (yield from doctor.hosts(connector, lambda host: _look(connector, host))):
        return
    try:
        plain = connector.open_plain("doctor")
    except ConfigError as refusal:
        yield doctor.refused("server", refusal)
        return
    except StoreUnavailable as failure:
        yield doctor.unreachable(connector, failure)
        return
    yield from doctor.examine_server(connector, plain, _first_looks(settings, connector, plain))


def _look(connector: PostgresConnector, host: Host) -> doctor.HostLook:
    """See what one of several hosts is."""
    session = connector.open_plain("doctor", {**host, "target_session_attrs": "any"})
    with contextlib.closing(session), connector.time_limit(session.connection, doctor.STATEMENT_TIMEOUT_S):
        ((in_recovery, _, _),) = session.read(Step(_WHERE, {}))[0].rows
        return doctor.HostLook("is a standby" if in_recovery else None, session.server_start)


def _first_looks(settings: NodeSettings, connector: PostgresConnector, plain: PostgresSession) -> Iterator[Finding]:
    """Check for what a node refuses. If there is nothing, connect as a node does, and run all the checks."""
    yield ok("server", f"PostgreSQL {plain.connection.info.parameter_status('server_version')}")
    round_trip_s, finding = doctor.round_trip(plain)
    yield finding
    ((in_recovery, user, role),) = plain.read(Step(_WHERE, {}))[0].rows
    try:
        connector.check_primary(plain.connection, in_recovery=in_recovery)
    except StoreUnavailable as refusal:
        yield doctor.refused("primary", refusal)
        return
    yield ok("primary", "this server takes writes")
    try:
        node = connector.open("doctor", doctor.STATEMENT_TIMEOUT_S)
    except PoolerDetected as refusal:
        remedy = "use pool_mode = transaction there, or give the URL of PostgreSQL itself"
        yield error("connection", one_line(refusal), remedy)
        return
    except StoreUnavailable as failure:
        text = f"a second connection failed, and a node needs two: {one_line(failure)}"
        yield error("connection", text, "permit more connections")
        return
    with contextlib.closing(node), connector.time_limit(node.connection, doctor.PHASE_S):
        settings = doctor.as_members(settings, node)
        yield from run_checks(CHECKS, PostgresCase(settings, node, user, round_trip_s, connector, plain, role))


_WHERE = """
select pg_catalog.pg_is_in_recovery(), session_user,
    pg_catalog.format('role %I in database %I', session_user, pg_catalog.current_database())
"""


# The connection ------------------------------------------------------------------------------------------------


def _connection(case: PostgresCase) -> Iterator[Finding]:
    """Say whether the connection leads to the server directly, and which mode a node picks."""
    later = "a crash is noticed after the TTL instead of at once"
    if case.session.pooled:
        text = f"through a connection pooler: a node picks mode lease, and {later}"
        yield warning(
            "connection", text, "give nodes a direct_url= that leads to PostgreSQL itself, and examine that URL, too"
        )
    elif not AdvisorySentinel(case.session).holds():
        text = f"direct, but advisory locks have no effect on this server: a node picks mode lease, and {later}"
        yield warning("connection", text, "use PostgreSQL itself, if that is too late")
    else:
        yield ok("connection", "direct, and advisory locks hold: a node picks mode hybrid")


def _tls(case: PostgresCase) -> Iterator[Finding]:
    yield doctor.tls(
        is_local=is_here(case.plain.connection.info.hostaddr),
        is_encrypted=bool(case.plain.connection.pgconn.ssl_in_use),
        remedy="add sslmode=require to the URL, or better verify-full",
    )


def _keepalive(case: PostgresCase) -> Iterator[Finding]:
    if case.session.pooled:
        yield ok("keepalive", "the pooler connects to the server; a lost network is noticed by the lease")
        return
    if case.session.connection.info.host.startswith("/"):
        yield ok("keepalive", "not needed on a Unix socket")
        return
    settings = case.connector.keepalive(case.session)
    refused = [
        f"{name} is {taken or 'unknown'} instead of {wanted}" for name, wanted, taken in settings if wanted != taken
    ]
    if refused:
        text = f"the server did not accept what a node sets: {', '.join(refused)}; a lost network is noticed late"
        yield warning("keepalive", text, "use takeover='strict' if that is too late, or a server on Linux")
    else:
        yield ok("keepalive", "the server accepted " + ", ".join(f"{name}={taken}" for name, _, taken in settings))


def _connections(case: PostgresCase) -> Iterator[Finding]:
    if case.plain.pooled:
        yield ok("connections", "the pooler limits them")
        return
    ((left,),) = case.plain.read(Step(_LEFT, {}))[0].rows
    remedy = "raise max_connections (or the limit of the role or database), or close connections that are not in use"
    yield doctor.free_connections(left, remedy)


# The two connections of this examination do not count. Background processes have no database.
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


def _time_outs(case: PostgresCase) -> Iterator[Finding]:
    rows = case.plain.read(Step(_TIMEOUTS, {"names": listed(tuple(TIMEOUTS))}))[0].rows
    for name, value_ms, source in rows:
        where = SOURCES.get(source, "for the whole server")
        text = f"{name} is {value_ms / 1000:g} s, set {where}: a node overrides it for itself, but {TIMEOUTS[name]}"
        if name == "idle_session_timeout" or value_ms < case.settings.ttl * 1000:
            longer = 0 if name == "idle_session_timeout" else f"'{case.settings.ttl:g}s'"
            remedy = f"alter {case.role} set {name} = {longer}"
            yield warning("time-outs", text, "remove it there" if source == "client" else remedy)
        else:
            yield ok("time-outs", text)
    if not rows:
        yield ok("time-outs", "none set for this role, database or server")


_TIMEOUTS = """
select name, cast(setting as bigint), source from pg_catalog.pg_settings
where name in {listed} and setting <> '0' order by name
"""


def _durability(case: PostgresCase) -> Iterator[Finding]:
    query = "select pg_catalog.current_setting('synchronous_commit'), pg_catalog.current_setting('fsync')"
    ((synchronous_commit, fsync),) = case.plain.read(Step(query, {}))[0].rows
    if fsync == "off":
        text = "fsync is off: after a power failure tokens may be issued again, and old terms pass the fence"
        yield warning("durability", text, "turn fsync on, unless the data is for tests")
    elif synchronous_commit == "off":
        text = (
            "synchronous_commit is off: a node uses `local` for itself, so no token is issued again after a crash, but "
            "the application may lose writes that were acknowledged, fenced or not"
        )
        yield warning("durability", text, f"alter {case.role} set synchronous_commit = on")
    else:
        yield ok("durability", f"synchronous_commit is {synchronous_commit}: no token is issued again after a crash")


def _replication(case: PostgresCase) -> Iterator[Finding]:
    ((names, waits, replicas, synchronous, hidden),) = case.plain.read(Step(_REPLICATION, {}))[0].rows
    many = f"{replicas} replica" + ("" if replicas == 1 else "s")
    if names and waits and not synchronous and not hidden:
        text = f"{many}, none that synchronous_standby_names = {names!r} waits for: every commit waits for ever"
        yield error("replication", text, "bring such a replica back, or remove it from synchronous_standby_names")
    elif names and waits:
        yield ok("replication", f"{many}, synchronous: no term begins before a replica that may be promoted has it")
    elif replicas:
        text = (
            f"{many}, asynchronous: a promoted one may lack the last terms, so no node is elected there for the "
            "largest permitted TTL, except a strict leader that still trusts its lease; its tokens are above all of "
            "the old server's"
        )
        yield ok("replication", text)
    else:
        yield ok("replication", "no replicas")


_REPLICATION = """
select pg_catalog.current_setting('synchronous_standby_names'),
       pg_catalog.current_setting('synchronous_commit') not in ('off', 'local'),
       count(*), count(*) filter (where sync_state in ('sync', 'quorum')), count(*) filter (where sync_state is null)
from pg_catalog.pg_stat_replication
"""


# The tables ----------------------------------------------------------------------------------------------------


def _tables(case: PostgresCase) -> Iterator[Finding]:
    """Check the tables, this user's privileges on them and, if these are enough, what the tables contain."""
    name = case.settings.schema
    wanted = ("meta", *doctor.created("table"), *doctor.created("function"))
    there = case.session.read(Step(_THERE, {"schema": name, "names": listed(wanted)}))[0].rows
    if not there:
        yield from _no_tables(case)
        return
    missing = set(wanted).difference(found for found, _, _ in there)
    if missing:
        remedy = "restore them from a backup, or drop the schema while no node is running (tokens then begin anew)"
        yield error("tables", f"missing in schema {name!r}: {', '.join(sorted(missing))}", remedy)
        return
    may_use, may_create = _rights(case, "USAGE"), _rights(case, "CREATE")
    denied = [f"{rights} on {found}" for found, rights, _ in there if rights]
    if denied or not may_use:
        text = ", ".join(denied if may_use else [f"USAGE on schema {name!r}", *denied])
        remedy = f"as their owner, run what `tenure sql --schema {name} --grants {shlex.quote(case.user)}` prints"
        yield error("privileges", f"this user lacks {text}", remedy)
        return
    permitted = ok("privileges", "this user may do what a node does")
    may_migrate = bool(may_create) and all(owns for _, _, owns in there)
    yield from doctor.contents(case, CHECKS_OF_TABLES, permitted, may_migrate=may_migrate)


def _no_tables(case: PostgresCase) -> Iterator[Finding]:
    name = case.settings.schema
    may_use = _rights(case, "USAGE")
    ((on_database,),) = case.session.read(Step(_MAY_CREATE_SCHEMA, {}))[0].rows
    may_create = on_database if may_use is None else may_use and _rights(case, "CREATE")
    if may_create:
        yield warning("tables", f"none in schema {name!r} yet: a node that starts creates them", "run `tenure init`")
        yield ok("privileges", "this user may create the tables")
        return
    create = f"as an owner, run what `tenure sql --schema {name}` prints"
    yield error("tables", f"none in schema {name!r}", create)
    where = "in this database" if may_use is None else f"in schema {name!r}"
    grants = f"{create}, and then what it prints with `--grants {shlex.quote(case.user)}`"
    yield error("privileges", f"this user may not create tables {where}, and there are none", grants)


def _rights(case: PostgresCase, right: str) -> bool | None:
    """Return whether the user has a right on the schema; None if there is no such schema."""
    rows = case.session.read(Step(_ON_SCHEMA, {"schema": case.settings.schema, "right": right}))[0].rows
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
where n.nspname = :schema and c.relname in {listed} and c.relkind in ('r', 'p')
union all
select p.proname, case when pg_catalog.has_function_privilege(p.oid, 'EXECUTE') then '' else 'EXECUTE' end,
    pg_catalog.pg_has_role(p.proowner, 'USAGE')
from pg_catalog.pg_proc p join pg_catalog.pg_namespace n on n.oid = p.pronamespace
where n.nspname = :schema and p.proname in {listed}
order by 1
"""


def _identity(case: PostgresCase) -> Iterator[Finding]:
    # A server that hides its identifier is known by the time of its start, which has a dot.
    if "." in case.session.server().incarnation:
        text = (
            "the server hides its system identifier and timeline: every restart counts as another server, the leader "
            "changes with each, and tokens may repeat after the promotion of a replica that lacks the last terms"
        )
        yield warning("identity", text, "grant execute on function pg_catalog.pg_control_system() to public")
    else:
        yield ok("identity", "the server shows its system identifier and timeline: tokens grow across promotions")


def _keys(case: PostgresCase) -> Iterator[Finding]:
    """Check that only members hold keys. Read them twice: a starting node has a key before its row names it."""
    holders = foreign_lock_holders(case.session)
    if holders:
        time.sleep(LOOK_AGAIN_S)
        again = foreign_lock_holders(case.session)
        holders = [holder for holder in holders if holder in again]
    for holder in holders:
        yield _foreign_key(holder)
    if not holders:
        yield ok("keys", "held by members only")


def _foreign_key(holder: Stranger) -> Finding:
    verb = "holds" if holder.granted else "waits for"
    who = f"connection {holder.pid} (user {holder.user!r}, application {holder.application!r}) {verb}"
    remedy = (
        f"select pg_terminate_backend({holder.pid}), and see that no other program takes advisory locks of class "
        f"{CLASS_ID}"
    )
    if holder.member is None:
        return warning("keys", f"{who} Tenure's key {holder.key}, and belongs to no member", remedy)
    text = f"{who} the key of {holder.member!r}, so that member's death would be noticed only after the TTL"
    return error("keys", text, remedy)


CHECKS_OF_SERVER: Checks[PostgresCase] = (
    *(_connection, _tls, _keepalive, _connections),
    *(_time_outs, _durability, _replication),
)
CHECKS: Checks[PostgresCase] = (*CHECKS_OF_SERVER, doctor.ttl, _tables)
CHECKS_OF_TABLES: Checks[PostgresCase] = (_identity, doctor.namespace, _keys, doctor.members, doctor.guards)
