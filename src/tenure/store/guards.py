"""Guarded tables: triggers with which the database refuses a write outside the fence of a role.

PostgreSQL: the fence leaves a mark in a setting that ends with the transaction, and it holds a lock on the role's row.
The trigger checks both. Every program can set the mark. The lock alone cannot be recognised with certainty: ``xmax``
does not say whether it is a transaction or a multixact, and the two are numbered independently.

MariaDB: a variable of the session outlives the transaction, so a mark in it would prove nothing. Instead the fence
notes its term in such a variable, and the trigger fences again with that term, for every row. A term that is over is
refused then, whatever the variable says.

SQLite has neither triggers per statement nor variables, so a trigger cannot know who writes: nothing is guarded there.
"""

from __future__ import annotations

from tenure.store import statements
from tenure.store.dialects import MYSQL, literal

UNFENCED = "TN004"
"""The SQLSTATE with which a guarded table refuses a write."""
UNFENCED_ON_MYSQL = 31004
"""The number of that error on MariaDB, where PyMySQL knows errors by their numbers. No error of a server has it."""

# PostgreSQL ------------------------------------------------------------------------------------------------------

MARK = """
    -- Guarded tables look for this mark (see guard()). It ends with the transaction.
    mark := format('%I/%I=%s;', the_namespace, the_role, the_token);
    marks := coalesce(nullif(current_setting('tenure.fenced', true), ''), ';');
    if position(';' || mark in marks) = 0 then
        perform set_config('tenure.fenced', marks || mark, true);
    end if;
"""
"""The last statements of the function ``fence``."""

# The fence takes its lock before every savepoint, so the lock carries the id of the whole transaction. If other
# transactions share the lock, xmax is a multixact. A transaction is in it once for each strength of its lock.
_GUARD = """
create function {schema}guard() returns trigger language plpgsql security definer
set search_path = pg_catalog, pg_temp as $$
declare
    me xid := (pg_current_xact_id_if_assigned())::xid;
    locker xid;
begin
    select r.xmax into locker from {roles} r
    where r.namespace = tg_argv[0] and r.name = tg_argv[1]
        and position(format(';%I/%I=%s;', r.namespace, r.name, r.token) in current_setting('tenure.fenced', true)) > 0;
    if locker <> me then
        begin
            locker := (select m.xid from pg_get_multixact_members(locker) m where m.xid = me limit 1);
        exception when others then  -- it is not a multixact
            locker := null;
        end;
    end if;
    if locker is null or me is null then
        raise exception using errcode = 'TN004', schema = tg_table_schema, table = tg_table_name, message = format(
            '%s on %I.%I is guarded by role %s%s: call term.fence(connection) first, or use term.transaction()',
            tg_op, tg_table_schema, tg_table_name, tg_argv[1],
            case when tg_argv[0] <> 'default' then ' of namespace ' || tg_argv[0] end);
    end if;
    if tg_op = 'DELETE' then
        return old;
    end if;
    return new;
end $$
"""

# A trigger per statement costs least. On a partitioned table it would not fire for a write to a partition. There a
# trigger per row is used, which the server copies to every partition, also to those that are attached later. No trigger
# per row fires for TRUNCATE, so each partition gets one more for that.
_GUARD_TABLE = """
create function {schema}guard_table(the_table regclass, the_namespace text, the_role text) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    call text := format('{schema}guard(%L, %L)', the_namespace, the_role);
    kind record;
    part regclass;
begin
    select c.relkind, c.relispartition, c.relpersistence, c.relnamespace into kind from pg_class c
    where c.oid = the_table;
    if kind.relkind not in ('r', 'p') or kind.relpersistence = 't' then
        raise exception using errcode = '42809', message = format('%s is not a permanent table', the_table);
    elsif kind.relispartition then
        raise exception using errcode = '42809',
            message = format('%s is a partition: guard the table that it is a part of', the_table);
    elsif kind.relnamespace = (select c.relnamespace from pg_class c where c.oid = to_regclass('{roles}')) then
        raise exception using errcode = '42809', message = format('%s is a table of Tenure', the_table);
    end if;
    if exists (
        select 1 from pg_trigger t where t.tgrelid = the_table
            and (t.tgname = 'tenure_guard' or t.tgfoid = to_regprocedure('{schema}guard()'))
            and (t.tgfoid <> to_regprocedure('{schema}guard()')
                 or t.tgargs <> convert_to(the_namespace, getdatabaseencoding()) || decode('00', 'hex')
                     || convert_to(the_role, getdatabaseencoding()) || decode('00', 'hex'))
    ) then
        raise exception using errcode = '42710',
            message = format('%s is guarded by another role: remove that guard first', the_table);
    end if;
    perform {schema}unguard_table(the_table);
    if kind.relkind = 'r' then
        execute format('create trigger tenure_guard before insert or update or delete or truncate on %s '
                       'for each statement execute function %s', the_table, call);
        execute format('alter table only %s enable always trigger tenure_guard', the_table);
    else
        execute format('create trigger tenure_guard before insert or update or delete on %s '
                       'for each row execute function %s', the_table, call);
        for part in select relid from pg_partition_tree(the_table) loop
            execute format('create trigger tenure_guard_truncate before truncate on %s '
                           'for each statement execute function %s', part, call);
            execute format('alter table only %s enable always trigger tenure_guard', part);
            execute format('alter table only %s enable always trigger tenure_guard_truncate', part);
        end loop;
    end if;
end $$
"""

# The copies of a trigger on partitions go with the trigger. The function returns how many triggers it has dropped.
_UNGUARD_TABLE = """
create function {schema}unguard_table(the_table regclass) returns integer
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    trigger record;
    dropped integer := 0;
begin
    for trigger in
        select t.tgname, t.tgrelid::regclass as tgtable from pg_trigger t
        where t.tgfoid = to_regprocedure('{schema}guard()') and t.tgparentid = 0
            and (t.tgrelid = the_table or t.tgrelid in (select relid from pg_partition_tree(the_table)))
    loop
        execute format('drop trigger %I on %s', trigger.tgname, trigger.tgtable);
        dropped := dropped + 1;
    end loop;
    return dropped;
end $$
"""

FUNCTIONS = (_GUARD, _GUARD_TABLE, _UNGUARD_TABLE)

# MariaDB ---------------------------------------------------------------------------------------------------------

EVENTS = ("insert", "update", "delete")
MESSAGE_LENGTH = 128
"""How many characters the message of a trigger may have on MySQL. MariaDB permits 512.

An older trigger whose role was cut has a message of just this length, so no message is that long now.
"""
REMEDIES = (
    ": call term.fence(connection) first, or use term.transaction()",
    ": call term.fence(connection) first",
    ": call term.fence() first",
)
"""The shorter ones are for long names."""
SHORTEST_TABLE = 12
"""How many characters of a table's name a message keeps at least. Then the longest names fit on MariaDB."""

# The role's row is locked until the transaction ends, as by the fence. A transaction whose session has noted no term
# does not even look, so it locks nothing. ``skip locked``: a transaction that holds the fence's lock finds the row; any
# other is refused at once and waits for nothing.
_TRIGGER = """create trigger {trigger} before {event} on {table} for each row
if {variable} is null or not exists (
    select 1 from {roles} r
    where r.namespace = {namespace} and r.name = {role}
        and cast(concat(r.token, ' ', r.holder) as binary) = cast({variable} as binary)
    /*M! lock in share mode skip locked */ /*!80000 for share skip locked */
) then
    signal sqlstate '45000' set mysql_errno = {number}, message_text = {message};
end if"""


def fence_by_share(namespace: str, role: str) -> str:
    """Return MariaDB's fence: it locks only the role's row, against a successor, and notes the term for triggers."""
    noted = f"{variable_of(namespace, role)} := cast(concat(r.token, ' ', r.holder) as binary)"
    return f"select {noted} from {{roles}} r where " + statements.IS_LATEST + "{for_share}"


def mysql_triggers(table: str, namespace: str, role: str) -> list[str]:
    """Return the statements that guard a table of MariaDB, which must be in the database of Tenure's tables."""
    words = {
        "roles": MYSQL.prefix + "roles",
        "namespace": literal("mysql", namespace),
        "role": literal("mysql", role),
        "variable": variable_of(namespace, role),
        "table": quoted(table),
        "number": str(UNFENCED_ON_MYSQL),
    }
    texts = mysql_drops(table)
    for event in EVENTS:
        message = _message(event.upper(), table, namespace, role)
        named = {"trigger": trigger_of(table, event), "event": event, "message": message}
        texts.append(_TRIGGER.format(**words, **named))
    return texts


def _message(event: str, table: str, namespace: str, role: str) -> str:
    """Return the literal of a trigger's message, which always has the whole role."""
    of_namespace = "" if namespace == "default" else f" of namespace {namespace}"
    by_role = f" is guarded by role {role}{of_namespace}"
    room = max(MESSAGE_LENGTH - 1 - len(f"{event} on {by_role}{REMEDIES[-1]}"), SHORTEST_TABLE)
    shortened = table if len(table) <= room else table[: room - 1] + "…"
    texts = [f"{event} on {table}{by_role}{remedy}" for remedy in REMEDIES]
    texts.append(f"{event} on {shortened}{by_role}{REMEDIES[-1]}")
    fitting = [text for text in texts if len(text) < MESSAGE_LENGTH]
    if fitting:
        return literal("mysql", fitting[0])
    # MySQL would fail with another error. A text that was cut in its role lacks the remedy, by which a role is found.
    return f"/*M! {literal('mysql', texts[-1])} */ /*!80000 {literal('mysql', texts[-1][: MESSAGE_LENGTH - 1])} */"


def mysql_drops(table: str) -> list[str]:
    """Return the statements that remove the guard of a table of MariaDB."""
    return [f"drop trigger if exists {trigger_of(table, event)}" for event in EVENTS]


def quoted(name: str) -> str:
    """Return the name of a table as MariaDB reads it."""
    return "`" + name.replace("`", "``") + "`"


def variable_of(namespace: str, role: str) -> str:
    """Return the variable of a session of MariaDB in which the fence notes its term."""
    return "@tenure_" + _digest(f"{namespace}\0{role}")[:32]


def trigger_of(table: str, event: str) -> str:
    """Return the name of a trigger on MariaDB, where the triggers of all tables share one space of names."""
    return f"tenure_guard_{_digest(table)[:16]}_{event}"


def _digest(text: str) -> str:
    import hashlib  # noqa: PLC0415 - it loads OpenSSL, which a node on SQLite does without

    return hashlib.sha256(text.encode()).hexdigest()
