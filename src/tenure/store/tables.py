"""The tables, as the statements that create them, in versions.

A migration only adds: tables, columns with defaults, functions under new names, or a function that does or refuses more
than the one that it replaces. So nodes of the previous release can go on running. A migration that cannot keep to
this rule raises ``oldest`` (see ``migrations``).
"""

from __future__ import annotations

import re
from typing import NamedTuple

from tenure.store import guards, statements

FENCED = "TN001"
"""The SQLSTATE with which the fence refuses a term."""
NOT_FENCED_HERE = "TN002"
"""The SQLSTATE with which the fence refuses a call inside a savepoint."""
ANOTHER_SERVER = "TN003"
"""The SQLSTATE that refuses a transaction which a pooler has sent to another server than the earlier ones."""


class Migration(NamedTuple):
    """What one version of the tables adds to the one before."""

    version: int
    tables: tuple[str, ...]
    functions: tuple[str, ...] = ()
    """For databases whose functions can raise errors (PostgreSQL)."""
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
"""The runs of jobs, by their due times in microseconds since 1970 (UTC). No clock is read: a due time is data."""

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

# The lock must belong to the transaction, not to a savepoint: a rollback to the savepoint would drop the lock and leave
# the transaction open. A row lock shows in xmax: as the transaction's id if it is the only lock, else as a multixact.
# So the same check allows a second fence inside a savepoint of a transaction that is fenced already.
_FENCE = (
    """
create function {schema}fence(the_namespace text, the_role text, the_token bigint, the_member text,
                              bound_ms integer)
returns void language plpgsql set search_path = pg_catalog as $$
declare
    locker xid;
    top xid := (pg_current_xact_id())::xid;
    is_latest boolean;
    timeout text;
    present interval;
    mark text;
    marks text;
begin
    perform 1 from {roles} r where"""
    + statements.IS_LATEST.replace(":namespace", "the_namespace")
    .replace(":role", "the_role")
    .replace(":token", "the_token")
    .replace(":id", "the_member")
    + """
    for share of r;
    is_latest := found;
    if not is_latest then
        -- A snapshot from before the term shows the term before it.
        if current_setting('transaction_isolation') in ('repeatable read', 'serializable') and exists (
            select 1 from {roles} r
            where r.namespace = the_namespace and r.name = the_role and r.token < the_token
        ) then
            raise exception using errcode = '40001',
                message = format('role %s: term %s began after this transaction', the_role, the_token);
        end if;
        -- A refusal inside a savepoint must not be taken for one that ends the transaction. A lock tells where we are.
        perform 1 from {roles} r where r.namespace = the_namespace and r.name = the_role for share skip locked;
    end if;
    select r.xmax into locker from {roles} r where r.namespace = the_namespace and r.name = the_role and found;
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
    if not is_latest then
        raise exception using errcode = '"""
    + FENCED
    + """', message = format('role %s: term %s is not the latest', the_role, the_token);
    end if;
    -- Bound the transaction on the server, never loosening what the caller has set.
    foreach timeout in array array['idle_in_transaction_session_timeout', 'transaction_timeout'] loop
        present := current_setting(timeout, true)::interval;  -- null where the server has no such setting
        if present = '0'::interval or present > make_interval(secs => bound_ms / 1000.0) then
            perform set_config(timeout, bound_ms::text, true);
        end if;
    end loop;
"""
    + guards.MARK
    + """end $$
"""
)

# The time-out is caught here: one that reaches the client leaves an error in the server's log.
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

# A node of an older release passes the incarnation alone.
_SAME_SERVER = (
    """
create function {schema}same_server(expected text) returns void language plpgsql stable
set search_path = pg_catalog as $$
begin
    if expected not in ({schema}incarnation(), {schema}incarnation() || ' ' || {schema}place()) then
        raise exception using errcode = '"""
    + ANOTHER_SERVER
    + """', message = 'the pooler leads to another server now';
    end if;
end $$
"""
)

# A physical replica has the oids of its primary, and commands that rewrite a table keep them. Tables that are restored
# from a dump have other oids, and so has a copy of the whole database.
_PLACE = """
create function {schema}place() returns text language plpgsql stable set search_path = pg_catalog as $$
begin
    return (select oid from pg_database where datname = current_database()) || '/' || to_regclass('{roles}')::oid;
end $$
"""

_LIMITS_AND_PLACES = (
    "alter table {namespaces} add column ripe_ttl_ms integer",
    "alter table {namespaces} add column limits integer not null default 0",
    "alter table {namespaces} add column limit_set_at {time}",
    "alter table {namespaces} add column waited_on {text}",
    "alter table {namespaces} add column place {text} {of_this_place}",
    "alter table {members} add column place {text} {of_this_place}",
    "update {namespaces} set limit_set_at = {now}",
)
"""The columns that R14 and R15 need, and the place of the tables. Rows of older releases have the defaults: without
``ripe_ttl_ms`` a raise above 60 s counts as not ripe."""

_RUNS = (
    "alter table {jobs} add column spec {text}",
    "alter table {jobs} add column since_us bigint",
    "alter table {jobs} add column zone_data {text}",
    "alter table {jobs} add column listed_token bigint",
    "alter table {jobs} add column paused_us bigint",
    "alter table {jobs} add column paused_reason {text}",
    "alter table {jobs} add column requested_us bigint",
    "alter table {jobs} add column jitter_us bigint",
    "alter table {namespaces} add column requests integer not null default 0",
    """
create table {runs} (
    namespace {text} not null,
    role {text} not null,
    job {text} not null,
    due_us bigint not null,
    attempt smallint not null,
    first_us bigint not null,
    covers bigint not null,
    outcome {text} not null,
    detail {text},
    token bigint not null,
    member {text},
    began_at {time} not null,
    ended_at {time},
    primary key (namespace, role, job, due_us, attempt)
) {engine}
""",
)
"""Schedules: the definition of each job, and a row for each run (see ``job_statements``)."""

_FLEETS = (
    "create index {index}members_living on {members} (namespace, id {bytewise}) {if_living}",
    "create index {index}members_ended on {members} (namespace, ended_at) {if_ended}",
    "create index {index}roles_requested on {roles} (holder, request_token) {if_requested}",
)
"""What a look and a renewal read, so that their cost does not grow with the number of members and roles (R19, R20)."""

_PROMOTION = (
    "alter table {namespaces} add column limit_by {text}",
    "alter table {namespaces} add column promotion {text}",
)
"""Who set the largest TTL (R16): ``nodes``, or an ``operator``; it is ``open`` while it is not set. And whether a
promotion loses commits (R17). Older releases write neither: their limits count as an operator's, and promotions may
lose commits."""

MIGRATIONS: tuple[Migration, ...] = (
    Migration(1, _TABLES, (_INCARNATION, _FENCE, _WAIT_FOR_ROLE, _SAME_SERVER)),
    Migration(2, _JOBS),
    Migration(3, _LIMITS_AND_PLACES, (_PLACE, _SAME_SERVER.replace("create function", "create or replace function"))),
    Migration(4, _RUNS),
    Migration(5, (), (_FENCE.replace("create function", "create or replace function"), *guards.FUNCTIONS)),
    Migration(6, (*_FLEETS, *_PROMOTION)),
)


def _columns() -> dict[str, list[str]]:
    """Return the columns of every table, as read from the statements that create the tables."""
    columns = {
        table[1]: re.findall(r"^    (?!primary key)(\w+) ", table[0], re.MULTILINE)
        for table in re.finditer(r"create table {(\w+)} \(.*?\n\)", "".join((*_TABLES, *_JOBS, *_RUNS)), re.DOTALL)
    }
    for statement in (*_LIMITS_AND_PLACES, *_RUNS, *_PROMOTION):
        if added := re.match(r"alter table {(\w+)} add column (\w+)", statement):
            columns[added[1]].append(added[2])
    return columns


COLUMNS = _columns()
"""The columns of every table."""
