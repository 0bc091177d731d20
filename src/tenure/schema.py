"""The tables, and how they come to be.

Whichever node comes first creates them, under a lock, so that any number may start at once. ``meta`` holds two numbers:
``version``, the newest migration that has run, and ``oldest``, the oldest release (by its own newest migration) that
can still work beside it. A migration only adds (tables, columns with defaults, functions under new names), so a node
of the previous release goes on running beside it; one that cannot keep to that raises ``oldest``: an older node does
not start then, and one that runs already hears of it with its next renewal and lets go of its connection (see
``Store``).

On PostgreSQL a change of a table waits until nobody uses it, and whoever comes after it waits as well: behind one
forgotten transaction that has read ``members``, every node's renewals would stand still. So a migration waits for a
moment only, gives up, and tries again later. The pause comes before each try, under the lock that lets one node try at
a time: however many nodes of the new release start at once, the tables are free most of the time.

On MariaDB every change of a table commits by itself. The version is written last, and what is there already when a
migration runs, was made by a node that died on the way: the next one goes on where it stopped.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Any

from tenure import statements
from tenure.dialects import MYSQL, SQLITE, TABLES, Dialect, postgresql
from tenure.errors import ConfigError, StoreUnavailable
from tenure.session import Failed, Run, Session, Step
from tenure.settings import check_schema

FENCED = "TN001"
"""The SQLSTATE with which the fence refuses a term."""
NOT_FENCED_HERE = "TN002"
"""The SQLSTATE with which the fence refuses to stand inside a savepoint."""
ANOTHER_SERVER = "TN003"
"""The SQLSTATE of a transaction that a pooler has led to another server than the ones before."""

PATIENCE_S = 20.0
"""How long a node that starts waits for others that migrate, and tries to get at tables that are in use."""
PAUSE_S = 0.25
WAIT_S = 0.1
"""How long a try leaves the tables alone, and how long it then waits for them: the shortest TTL is 1 s."""
_IN_USE = ("55P03", "40P01", 1205, 1213)  # lock_not_available, deadlock_detected; MariaDB's numbers for the same
NO_SUCH_TABLE = 1146
_THERE_ALREADY = (1050, 1060, 1061, 1062)  # a table, a column, an index, a row: MariaDB's numbers
_MYSQL_LOCK = "concat('tenure_schema_', md5(database()))"


@dataclass(frozen=True)
class Migration:
    """What one version of the tables adds to the one before."""

    version: int
    tables: tuple[str, ...]
    functions: tuple[str, ...] = ()
    """For databases that can raise errors of their own (PostgreSQL)."""
    oldest: int = 1


_TABLES = (
    """
create table {namespaces} (
    name {text} primary key,
    incarnation {text} not null,
    base bigint not null,
    max_ttl_ms integer not null
) {engine}
""",
    """
create table {members} (
    namespace {text} not null,
    id {text} primary key,
    name {text} not null,
    host {text} not null,
    pid integer not null,
    version {text} not null,
    metadata text not null,
    takeover {text} not null,
    ttl_ms integer not null,
    renewals bigint not null,
    sentinel_key integer,
    sentinel_epoch integer not null,
    server_start {text} not null,
    incarnation {text} not null,
    control_pid {backend},
    control_start {text},
    watch_pid {backend},
    watch_start {text},
    joined_at {time} not null,
    renewed_at {time} not null,
    ended_at {time},
    end_reason {text}
) {roomy}
""",
    "create index {index}members_namespace on {members} (namespace)",
    """
create table {roles} (
    namespace {text} not null,
    name {text} not null,
    token bigint not null,
    holder {text},
    reserved_for {text},
    request_token bigint,
    request_to {text},
    primary key (namespace, name)
) {roomy}
""",
    "create index {index}roles_holder on {roles} (holder)",
    """
create table {candidates} (
    namespace {text} not null,
    role {text} not null,
    member_id {text} not null,
    primary key (namespace, role, member_id)
) {engine}
""",
    "create index {index}candidates_member on {candidates} (member_id)",
    """
create table {terms} (
    namespace {text} not null,
    role {text} not null,
    token bigint not null,
    member_id {text} not null,
    member_name {text} not null,
    began_at {time} not null,
    resigned_at {time},
    ended_at {time},
    end_reason {text},
    primary key (namespace, role, token)
) {engine}
""",
    "create index {index}terms_member on {terms} (member_id)",
)

_JOBS = (
    """
create table {jobs} (
    namespace {text} not null,
    role {text} not null,
    job {text} not null,
    anchor_us bigint,
    claimed_us bigint,
    done_us bigint,
    token bigint not null,
    primary key (namespace, role, job)
) {roomy}
""",
)
"""The runs of jobs, in microseconds since 1970 (UTC): due times are what is claimed, so they are data, no clock's."""

_INCARNATION = """
create function {schema}incarnation() returns text language plpgsql stable set search_path = pg_catalog as $$
begin
    return (select system_identifier from pg_control_system()) || ':'
        || ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::bigint;
exception when insufficient_privilege or undefined_function or feature_not_supported then
    -- A hosted server that hides them: every restart counts as a new server.
    return extract(epoch from pg_postmaster_start_time())::text || ':' || '1';
end $$
"""

# The lock must be the transaction's own, not a savepoint's, or a rollback to it would drop the lock and leave the
# transaction standing. A row lock shows in xmax: the transaction's own id where it is the only one, a multixact
# otherwise. So the same look allows a second fence inside a savepoint of a transaction that is fenced already.
_FENCE = (
    """
create function {schema}fence(the_namespace text, the_role text, the_token bigint, the_member text,
                              bound_ms integer)
returns void language plpgsql set search_path = pg_catalog as $$
declare
    locker xid;
    top xid := (pg_current_xact_id())::xid;
    timeout text;
    present interval;
begin
    perform 1 from {roles} r where"""
    + statements.FENCE_GUARD.replace(":namespace", "the_namespace")
    .replace(":role", "the_role")
    .replace(":token", "the_token")
    .replace(":id", "the_member")
    + """
    for share of r;
    if not found then
        raise exception using errcode = '"""
    + FENCED
    + """', message = format('role %s: term %s is not the latest', the_role, the_token);
    end if;
    select r.xmax into locker from {roles} r where r.namespace = the_namespace and r.name = the_role;
    if locker <> top then
        begin
            perform 1 from pg_get_multixact_members(locker) where xid = top;
            if not found then
                raise exception using errcode = '"""
    + NOT_FENCED_HERE
    + """';
            end if;
        exception when others then
            raise exception using errcode = '"""
    + NOT_FENCED_HERE
    + """', message = 'a fence inside a savepoint does not hold: call it before the savepoint';
        end;
    end if;
    -- Bound the transaction on the server, never loosening what the caller has set.
    foreach timeout in array array['idle_in_transaction_session_timeout', 'transaction_timeout'] loop
        present := current_setting(timeout, true)::interval;  -- null where the server has no such setting
        if present = '0'::interval or present > make_interval(secs => bound_ms / 1000.0) then
            perform set_config(timeout, bound_ms::text, true);
        end if;
    end loop;
end $$
"""
)

# The wait is caught here because a time-out that reaches the client leaves an error in the server's log.
_WAIT_FOR_ROLE = """
create function {schema}wait_for_role(the_namespace text, the_role text) returns boolean
language plpgsql set search_path = pg_catalog as $$
begin
    perform 1 from {roles} where namespace = the_namespace and name = the_role for update;
    return true;
exception when lock_not_available then
    return false;
end $$
"""

_SAME_SERVER = (
    """
create function {schema}same_server(expected text) returns void language plpgsql stable
set search_path = pg_catalog as $$
begin
    if {schema}incarnation() <> expected then
        raise exception using errcode = '"""
    + ANOTHER_SERVER
    + """', message = 'the pooler leads to another server now';
    end if;
end $$
"""
)

MIGRATIONS: tuple[Migration, ...] = (
    Migration(1, _TABLES, (_INCARNATION, _FENCE, _WAIT_FOR_ROLE, _SAME_SERVER)),
    Migration(2, _JOBS),
)


def prepare(session: Session, migrations: tuple[Migration, ...] | None = None) -> None:
    """Bring the tables up to the newest version that this release knows; do nothing if they are there."""
    known = migrations or MIGRATIONS
    mine = known[-1].version
    if _version(session, mine) >= mine:
        return
    give_up_at = time.monotonic() + PATIENCE_S
    while True:
        try:
            _migrate(session, known)
        except Failed as error:
            if _number(error.__cause__) not in _IN_USE:
                raise
            if time.monotonic() >= give_up_at:
                raise StoreUnavailable(
                    f"cannot bring the tables to version {mine}: other transactions keep them locked, for "
                    f"{PATIENCE_S:g} s now; end those that stay open ({_SHOWN_BY[session.dialect.name]} shows them), "
                    "then start again"
                ) from None
        else:
            return


_SHOWN_BY = {"postgresql": "pg_stat_activity", "mysql": "show processlist", "sqlite": "fuser"}


def _number(error: BaseException | None) -> Any:
    """Return the code by which a database names an error: MariaDB's number, PostgreSQL's SQLSTATE."""
    number = next(iter(getattr(error, "args", ())), None)
    return number if isinstance(number, int) else getattr(error, "sqlstate", None)


def _migrate(session: Session, known: tuple[Migration, ...]) -> None:
    dialect = session.dialect
    with session.transaction() as run:
        locked = run(*_lock(dialect))
        if dialect.name == "mysql" and locked[-1].rows[0][0] != 1:
            raise Failed(f"other nodes have been changing the tables for {PATIENCE_S:g} s")
        present = _read_version(run, dialect)
        if present == 0 and dialect.name == "postgresql" and not run(_schema_exists(dialect))[0].rows:
            run(Step(_create_schema(dialect), {}))
        if 0 < present < known[-1].version and dialect.name != "sqlite":  # that lets others read on
            time.sleep(PAUSE_S)
            run(_hurry(dialect))
        for migration in known:
            if migration.version > present:
                _apply(run, dialect, migration)
        run(*_unlock(dialect))


def _hurry(dialect: Dialect) -> Step:
    """Return the step that bounds the wait for tables in use. MariaDB counts in seconds, and 0 is no wait at all."""
    if dialect.name == "mysql":
        return Step("set session lock_wait_timeout = 1 /*M! - 1 */", {})
    return Step(f"select pg_catalog.set_config('lock_timeout', '{WAIT_S * 1000:.0f}ms', true)", {})


def no_tables(dialect: Dialect) -> str:
    """Return what to say where there are none."""
    where = f"schema {_schema_of(dialect)!r}" if dialect.name == "postgresql" else "this database"
    return f"there are no tables of Tenure in {where}: start a node, or run `tenure init`"


def require(session: Session) -> int:
    """Return the version of the tables; raise if there are none, or none that this release can read."""
    version = _version(session, MIGRATIONS[-1].version)
    if not version:
        raise ConfigError(no_tables(session.dialect))
    return version


def check_shape(session: Session) -> None:
    """Raise ConfigError if a table or a column is missing: somebody made the tables by hand, or changed them."""
    looks = [
        f"(select {', '.join(columns)} from {{{name}}} where 1 = 0) as {name}" for name, columns in _COLUMNS.items()
    ]
    try:
        _ = session.read(Step(f"select 1 from {', '.join(looks)}", {}))[0].rows
    except Failed as error:
        raise ConfigError(
            f"the tables are not as Tenure makes them: {str(error).splitlines()[0]}; `tenure sql` prints how they are "
            "made, and where there are none a node makes them"
        ) from None


_COLUMNS = {
    table[1]: re.findall(r"^    (?!primary key)(\w+) ", table[0], re.MULTILINE)
    for table in re.finditer(r"create table {(\w+)} \(.*?\n\)", "".join((*_TABLES, *_JOBS)), re.DOTALL)
}
"""The columns of every table, as it was first made."""


def check_privileges(session: Session) -> None:
    """Raise Failed if the database user may not do with the tables what a node does, now rather than bit by bit."""
    if session.dialect.name == "sqlite":
        return
    if session.dialect.name == "mysql":  # which checks them before it finds that there is nothing to do
        try:
            session.run(*(Step(text, {}) for name in TABLES if name != "meta" for text in _nothing_done(name)))
        except Failed as error:
            if _number(error.__cause__) != NO_SUCH_TABLE:  # of that tells check_shape()
                raise
        return
    (missing,) = session.read(Step(_MISSING_PRIVILEGES, {"schema": _schema_of(session.dialect)}))
    if missing.rows:
        raise Failed("the privileges are missing for " + ", ".join(what for (what,) in missing.rows))


_MISSING_PRIVILEGES = """
select wanted.privilege || ' on ' || c.relname
from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
cross join pg_catalog.unnest(array['SELECT', 'INSERT', 'UPDATE', 'DELETE']) as wanted(privilege)
where n.nspname = :schema and c.relname in ('namespaces', 'members', 'roles', 'candidates', 'terms', 'jobs')
    and not pg_catalog.has_table_privilege(c.oid, wanted.privilege)
order by c.relname, wanted.privilege
"""


def _nothing_done(table: str) -> tuple[str, ...]:
    """Return a statement for each privilege on a table that a node needs, none of which changes anything."""
    column = "name" if table == "namespaces" else "namespace"
    return (
        f"insert into {{{table}}} select * from {{{table}}} where false",
        f"update {{{table}}} set {column} = {column} where false",
        f"delete from {{{table}}} where false",
    )


def _schema_of(dialect: Dialect) -> str:
    return dialect.prefix.rstrip(".").strip('"')


def _version(session: Session, mine: int) -> int:
    """Return the version of the tables, 0 where there are none; refuse tables that are too new."""
    with session.transaction() as run:
        version = _read_version(run, session.dialect)
        if version <= mine:
            return version
        ((oldest,),) = run(Step("select value from {meta} where name = 'oldest'", {}))[0].rows
    if oldest > mine:
        msg = (
            f"the tables are of version {version}, which needs a release that knows at least version {oldest}; "
            f"this one knows {mine}: upgrade Tenure here"
        )
        raise ConfigError(msg)
    return version


def _read_version(run: Run, dialect: Dialect) -> int:
    (there,) = run(_exists(dialect))
    if not there.rows:
        return 0
    (version,) = run(Step("select value from {meta} where name = 'version'", {}))
    if dialect.name == "mysql" and not version.rows:
        return 0
    if not version.rows:
        raise ConfigError("the table meta says no version: somebody has deleted it; `tenure sql` prints what it held")
    return int(version.rows[0][0])


def _exists(dialect: Dialect) -> Step:
    if dialect.name == "sqlite":
        return Step("select 1 from sqlite_master where name = 'tenure_meta'", {})
    if dialect.name == "mysql":
        text = "select 1 from information_schema.tables where table_schema = database() and table_name = 'tenure_meta'"
        return Step(text, {})
    # A look at the catalog's rows: to_regclass() answers from a cache that a wait for the lock above does not refresh,
    # so of several nodes that start at once on an empty database the second would create the tables again.
    text = """
        select 1 from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
        where n.nspname = :schema and c.relname = 'meta'"""
    return Step(text, {"schema": _schema_of(dialect)})


def _schema_exists(dialect: Dialect) -> Step:
    """Look by ourselves: `create schema if not exists` wants CREATE on the database even where it has nothing to do."""
    return Step("select 1 from pg_catalog.pg_namespace where nspname = :schema", {"schema": _schema_of(dialect)})


def _create_schema(dialect: Dialect) -> str:
    return "create schema if not exists " + dialect.prefix.rstrip(".")


def _lock(dialect: Dialect) -> list[Step]:
    """Let one node at a time create the tables. SQLite's write lock is held already."""
    if dialect.name == "sqlite":
        return []
    if dialect.name == "mysql":
        return [
            Step(f"set session lock_wait_timeout = {PATIENCE_S:.0f}", {}),
            Step(f"select get_lock({_MYSQL_LOCK}, {PATIENCE_S:g})", {}),
        ]
    return [
        Step(f"select pg_catalog.set_config('lock_timeout', '{PATIENCE_S:g}s', true)", {}),
        Step(f"select pg_catalog.set_config('statement_timeout', '{PATIENCE_S:g}s', true)", {}),
        Step("select pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtextextended('tenure schema', 0))", {}),
    ]


def _unlock(dialect: Dialect) -> list[Step]:
    """Let the next one look; where the lock is the transaction's it goes by itself, and with the connection always."""
    return [Step("do release_all_locks()", {})] if dialect.name == "mysql" else []  # a try that failed took it, too


def _apply(run: Run, dialect: Dialect, migration: Migration) -> None:
    for text in _texts(dialect, migration):
        try:
            _ = run(Step(text, {}))[0].count
        except Exception as error:
            if _number(error) not in _THERE_ALREADY:
                raise


def _texts(dialect: Dialect, migration: Migration) -> list[str]:
    """Return the statements of one migration, in the common text."""
    texts = []
    if migration.version == 1:
        texts.append("create table {meta} (name {text} primary key, value integer not null) {engine}")
        texts.append("insert into {meta} (name, value) values ('version', 0), ('oldest', 1)")
    texts += migration.tables
    if dialect.name == "postgresql":
        texts += migration.functions
    texts.append(f"update {{meta}} set value = {migration.version} where name = 'version'")
    texts.append(f"update {{meta}} set value = {migration.oldest} where name = 'oldest'")
    return texts


def script(dialect: Dialect) -> list[str]:
    """Return the statements that create the tables, for people who run them by hand."""
    return ["begin", *statements_of(dialect), "commit"]


def tables_sql(database: str = "postgresql", *, schema: str = "tenure") -> list[str]:
    """Return the statements that create the tables, for a migration of yours; run them in one transaction.

    ``database`` is ``postgresql``, ``sqlite`` or ``mysql`` (MariaDB), as SQLAlchemy's dialects are called; ``schema``
    is for PostgreSQL. Nodes find the tables and create nothing then.
    """
    known = {"postgresql": postgresql(check_schema(schema)), "sqlite": SQLITE, "mysql": MYSQL, "mariadb": MYSQL}
    if database not in known:
        raise ConfigError(f"database={database!r} must be one of {', '.join(map(repr, known))}")
    return statements_of(known[database])


def statements_of(dialect: Dialect) -> list[str]:
    """Return the statements of every migration, in the words of a database."""
    texts = [_create_schema(dialect)] if dialect.name == "postgresql" else []
    texts += [text for one in MIGRATIONS for text in _texts(dialect, one)]
    return [dialect.text(text).strip() for text in texts]


def grants(dialect: Dialect, user: str) -> list[str]:
    """Return the least privileges of a database user who runs nodes on tables that are there already.

    On MariaDB a user is ``name`` or ``name@host``.
    """
    if dialect.name == "mysql":
        name, _, host = user.partition("@")
        account = "@".join("'" + part.replace("'", "''") + "'" for part in (name, host or "%"))
        return [
            f"grant select on {dialect.prefix}meta to {account}",
            *(
                f"grant select, insert, update, delete on {dialect.prefix}{name} to {account}"
                for name in TABLES
                if name != "meta"
            ),
        ]
    schema, quoted = dialect.prefix.rstrip("."), '"' + user.replace('"', '""') + '"'
    changing = ", ".join(dialect.prefix + name for name in TABLES if name != "meta")
    return [
        f"grant usage on schema {schema} to {quoted}",
        f"grant select on {dialect.prefix}meta to {quoted}",
        f"grant select, insert, update, delete on {changing} to {quoted}",
        f"grant execute on all functions in schema {schema} to {quoted}",
    ]
