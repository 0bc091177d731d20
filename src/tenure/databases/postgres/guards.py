"""Finds the guarded tables of a PostgreSQL database, and how each could be written to all the same."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

from tenure.store.records import GuardedTable
from tenure.store.session import Session, Step

# A row for each guarded table, and for each of its partitions and heirs. In tgtype, 4 is INSERT and 32 is TRUNCATE.
_FOUND = """
with recursive tree(root, args, part, function) as (
    select t.tgrelid, t.tgargs, t.tgrelid, t.tgfoid from pg_catalog.pg_trigger t
    where t.tgfoid = pg_catalog.to_regprocedure('{schema}guard()') and t.tgparentid = 0 and t.tgtype & 4 <> 0
    union all
    select tree.root, tree.args, i.inhrelid, tree.function
    from tree join pg_catalog.pg_inherits i on i.inhparent = tree.part
)
select pg_catalog.format('%I.%I', rn.nspname, r.relname), pg_catalog.encode(tree.args, 'hex'),
    pg_catalog.format('%I.%I', pn.nspname, p.relname), r.relkind = 'p',
    (select cast(t.tgenabled as text) from pg_catalog.pg_trigger t
     where t.tgrelid = tree.part and t.tgfoid = tree.function and t.tgtype & 4 <> 0),
    (select cast(t.tgenabled as text) from pg_catalog.pg_trigger t
     where t.tgrelid = tree.part and t.tgfoid = tree.function and t.tgtype & 36 = 32),
    (select pg_catalog.format('%I.%I', n.nspname, c.relname) from pg_catalog.pg_inherits i
     join pg_catalog.pg_class c on c.oid = i.inhparent join pg_catalog.pg_namespace n on n.oid = c.relnamespace
     where i.inhrelid = tree.root and not exists (
         select 1 from pg_catalog.pg_trigger t where t.tgrelid = c.oid and t.tgfoid = tree.function)
     limit 1),
    exists (select 1 from pg_catalog.pg_subscription_rel s where s.srrelid = tree.part),
    case when exists (select 1 from pg_catalog.pg_roles u where u.rolsuper and pg_catalog.pg_has_role(u.oid, 'MEMBER'))
            then 'is a superuser, or may SET ROLE to one,'
        when pg_catalog.pg_has_role(r.relowner, 'MEMBER') then 'is the owner, or may SET ROLE to it,'
    end, cast(current_user as text)
from tree
join pg_catalog.pg_class r on r.oid = tree.root join pg_catalog.pg_namespace rn on rn.oid = r.relnamespace
join pg_catalog.pg_class p on p.oid = tree.part join pg_catalog.pg_namespace pn on pn.oid = p.relnamespace
order by 1, 2, 3
"""


class Part(NamedTuple):
    """A guarded table, or one of its partitions or heirs."""

    table: str
    arguments: str
    part: str
    is_partitioned: bool
    guard: str | None
    """Whether the trigger fires: ``A`` always, ``O`` unless the session replicates, ``D`` never; None: no trigger."""
    truncate: str | None
    above: str | None
    """A table without a guard that the guarded table is a partition or an heir of."""
    is_subscribed: bool
    power: str | None
    """Why this database user could disable the trigger."""
    user: str


def guarded_tables(session: Session) -> list[GuardedTable]:
    """Return the guarded tables, and their leaks."""
    parts = [Part(*row) for row in session.read(Step(_FOUND, {}))[0].rows]
    found = []
    for (table, arguments), same in groupby(parts, key=lambda part: part[:2]):
        namespace, role, _ = (name.decode(session.encoding) for name in bytes.fromhex(arguments).split(b"\0"))
        leaks = list(dict.fromkeys(leak for part in same for leak in _leaks(part)))
        found.append(GuardedTable(table, namespace, role, tuple(leaks)))
    return found


def _leaks(part: Part) -> Iterator[str]:
    again = "guard the table again"
    what = part.part if part.part == part.table else f"{part.part}, a part of it,"
    if part.guard is None:
        yield f"{what} has no guard: {again}" if part.is_partitioned else f"{what} has no guard: guard it, too"
    elif part.is_partitioned and part.truncate is None:
        yield f"{what} can be truncated, because it was attached later: {again}"
    for trigger, state in (("tenure_guard", part.guard), ("tenure_guard_truncate", part.truncate)):
        if state == "D":
            yield f"trigger {trigger} of {part.part} is disabled: {again}"
        elif state not in ("A", None):
            yield f"trigger {trigger} of {part.part} is not ENABLE ALWAYS, so a replicating session passes: {again}"
    if part.above is not None:
        yield f"a write to {part.above}, which {part.table} is a part of, fires no trigger of a part: guard that table"
    if part.is_subscribed and not part.is_partitioned:
        yield f"{what} is written by a subscription, which fires no trigger per statement: fence at the publisher"
    if part.power is not None:
        yield f"user {part.user!r} {part.power} and can disable its trigger: let programs use another user"
