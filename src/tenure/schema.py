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
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from tenure import statements
from tenure.dialects import TABLES, Dialect
from tenure.errors import ConfigError, StoreUnavailable
from tenure.session import Failed, Run, Session, Step

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
_IN_USE = ("55P03", "40P01")  # lock_not_available, deadlock_detected


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
    name text primary key,
    incarnation text not null,
    base bigint not null,
    max_ttl_ms integer not null
)
""",
    """
create table {members} (
    namespace text not null,
    id text primary key,
    name text not null,
    host text not null,
    pid integer not null,
    version text not null,
    metadata text not null,
    takeover text not null,
    ttl_ms integer not null,
    renewals bigint not null,
    sentinel_key integer,
    sentinel_epoch integer not null,
    server_start text not null,
    incarnation text not null,
    control_pid integer,
    control_start text,
    watch_pid integer,
    watch_start text,
    joined_at {time} not null,
    renewed_at {time} not null,
    ended_at {time},
    end_reason text
) {roomy}
""",
    "create index {index}members_namespace on {members} (namespace)",
    """
create table {roles} (
    namespace text not null,
    name text not null,
    token bigint not null,
    holder text,
    reserved_for text,
    request_token bigint,
    request_to text,
    primary key (namespace, name)
) {roomy}
""",
    "create index {index}roles_holder on {roles} (holder)",
    """
create table {candidates} (
    namespace text not null,
    role text not null,
    member_id text not null,
    primary key (namespace, role, member_id)
)
""",
    "create index {index}candidates_member on {candidates} (member_id)",
    """
create table {terms} (
    namespace text not null,
    role text not null,
    token bigint not null,
    member_id text not null,
    member_name text not null,
    began_at {time} not null,
    resigned_at {time},
    ended_at {time},
    end_reason text,
    primary key (namespace, role, token)
)
""",
    "create index {index}terms_member on {terms} (member_id)",
)

_INCARNATION = """
create function {schema}incarnation() returns text language plpgsql stable set search_path = pg_catalog as $$
begin
    return (select system_identifier from pg_control_system()) || ':'
        || ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::bigint;
exception when insufficient_privilege or undefined_function or feature_not_supported then
    -- A hosted server that hides them: every restart counts as a new server.
    return extract(epoch from pg_postmaster_start_time())::text || ':1';
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

MIGRATIONS: tuple[Migration, ...] = (Migration(1, _TABLES, (_INCARNATION, _FENCE, _WAIT_FOR_ROLE, _SAME_SERVER)),)


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
            if getattr(error.__cause__, "sqlstate", None) not in _IN_USE:
                raise
            if time.monotonic() >= give_up_at:
                raise StoreUnavailable(
                    f"cannot bring the tables to version {mine}: other transactions keep them locked, for "
                    f"{PATIENCE_S:g} s now; end those that stay open (pg_stat_activity shows them), then start again"
                ) from None
        else:
            return


def _migrate(session: Session, known: tuple[Migration, ...]) -> None:
    with session.transaction() as run:
        run(*_lock(session.dialect))
        present = _read_version(run, session.dialect)
        if present == 0 and session.dialect.name != "sqlite" and not run(_schema_exists(session.dialect))[0].rows:
            run(Step(_create_schema(session.dialect), {}))
        if 0 < present < known[-1].version and session.dialect.name != "sqlite":  # that lets others read on
            time.sleep(PAUSE_S)
            run(Step(f"select pg_catalog.set_config('lock_timeout', '{WAIT_S * 1000:.0f}ms', true)", {}))
        for migration in known:
            if migration.version > present:
                _apply(run, session.dialect, migration)


def require(session: Session) -> int:
    """Return the version of the tables; raise if there are none, or none that this release can read."""
    version = _version(session, MIGRATIONS[-1].version)
    if not version:
        where = "this file" if session.dialect.name == "sqlite" else f"schema {_schema_of(session.dialect)!r}"
        raise ConfigError(f"there are no tables of Tenure in {where}: start a node, or run `tenure init`")
    return version


def check_privileges(session: Session) -> None:
    """Raise Failed if the database user may not do with the tables what a node does, now rather than bit by bit."""
    if session.dialect.name == "sqlite":
        return
    (missing,) = session.read(Step(_MISSING_PRIVILEGES, {"schema": _schema_of(session.dialect)}))
    if missing.rows:
        raise Failed("the privileges are missing for " + ", ".join(what for (what,) in missing.rows))


_MISSING_PRIVILEGES = """
select wanted.privilege || ' on ' || c.relname
from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
cross join pg_catalog.unnest(array['SELECT', 'INSERT', 'UPDATE', 'DELETE']) as wanted(privilege)
where n.nspname = :schema and c.relname in ('namespaces', 'members', 'roles', 'candidates', 'terms')
    and not pg_catalog.has_table_privilege(c.oid, wanted.privilege)
order by c.relname, wanted.privilege
"""


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
    return int(version.rows[0][0])


def _exists(dialect: Dialect) -> Step:
    if dialect.name == "sqlite":
        return Step("select 1 from sqlite_master where name = 'tenure_meta'", {})
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
    return [
        Step(f"select pg_catalog.set_config('lock_timeout', '{PATIENCE_S:g}s', true)", {}),
        Step(f"select pg_catalog.set_config('statement_timeout', '{PATIENCE_S:g}s', true)", {}),
        Step("select pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtextextended('tenure schema', 0))", {}),
    ]


def _apply(run: Run, dialect: Dialect, migration: Migration) -> None:
    for text in _texts(dialect, migration):
        run(Step(text, {}))


def _texts(dialect: Dialect, migration: Migration) -> list[str]:
    """Return the statements of one migration, in the common text."""
    texts = []
    if migration.version == 1:
        texts.append("create table {meta} (name text primary key, value integer not null)")
        texts.append("insert into {meta} (name, value) values ('version', 0), ('oldest', 1)")
    texts += migration.tables
    if dialect.name == "postgresql":
        texts += migration.functions
    texts.append(f"update {{meta}} set value = {migration.version} where name = 'version'")
    texts.append(f"update {{meta}} set value = {migration.oldest} where name = 'oldest'")
    return texts


def script(dialect: Dialect) -> list[str]:
    """Return the statements that create the tables, for people who run them by hand."""
    texts = [] if dialect.name == "sqlite" else [_create_schema(dialect)]
    texts += [text for one in MIGRATIONS for text in _texts(dialect, one)]
    return ["begin", *(dialect.text(text).strip() for text in texts), "commit"]


def grants(dialect: Dialect, user: str) -> list[str]:
    """Return the least privileges of a database user who runs nodes on tables that are there already."""
    schema, quoted = dialect.prefix.rstrip("."), '"' + user.replace('"', '""') + '"'
    changing = ", ".join(dialect.prefix + name for name in TABLES if name != "meta")
    return [
        f"grant usage on schema {schema} to {quoted}",
        f"grant select on {dialect.prefix}meta to {quoted}",
        f"grant select, insert, update, delete on {changing} to {quoted}",
        f"grant execute on all functions in schema {schema} to {quoted}",
    ]
