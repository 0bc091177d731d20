"""Finds the guarded tables of a MariaDB database, and how each could be written to all the same."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tenure.errors import ConfigError
from tenure.store import statements
from tenure.store.guards import EVENTS
from tenure.store.records import GuardedTable
from tenure.store.session import Session, Step

OLDEST = (0, 2)
"""The first release whose fence notes its term."""

# Where names have no case, the server may show one table's name in several ways.
_NAME = "if(@@lower_case_table_names, lower({0}), {0})"
_TABLE = f"""
select engine, {_NAME.format("table_name")} from information_schema.tables
where table_schema = database() and table_name = :table
"""
_CASCADES = """
select constraint_name from information_schema.referential_constraints
where constraint_schema = database() and table_name = :table
    and (delete_rule not in ('RESTRICT', 'NO ACTION') or update_rule not in ('RESTRICT', 'NO ACTION'))
"""
_TRIGGERS = f"""
select {_NAME.format("event_object_table")}, lower(event_manipulation), action_statement, trigger_name
from information_schema.triggers
where trigger_schema = database() and left(trigger_name, 13) = 'tenure_guard_' order by 1
"""
_MAY_TRUNCATE = """
select 1 from information_schema.user_privileges where privilege_type = 'DROP'
union select 1 from information_schema.schema_privileges where privilege_type = 'DROP' and database() like table_schema
union select 1 from information_schema.table_privileges
where privilege_type = 'DROP' and table_schema = database() and table_name = :table
"""
# The server leaves out `_utf8mb4` when it keeps the text of a trigger.
_NAMES = re.compile(r"r\.name(?:space)? = (?:'([^']*)'|(?:_utf8mb4)? *x'([0-9a-f]*)')")


UNKNOWN = "?"
"""Instead of a name that this user may not see: that needs the privilege TRIGGER on the table."""


def checked(session: Session, namespace: str, table: str, role: str) -> str:
    """Return the table's name as the server has it.

    Raise ConfigError if triggers could not guard the table, or would refuse nodes of an older release.
    """
    found, cascades, members = session.read(
        Step(_TABLE, {"table": table}),
        Step(_CASCADES, {"table": table}),
        Step(statements.MEMBERS, {"namespace": namespace}),
    )
    if not found.rows:
        raise ConfigError(f"table {table!r} cannot be guarded: there is none in the database of Tenure's tables")
    engine, table = found.rows[0]
    if table.startswith(session.dialect.prefix):
        raise ConfigError(f"table {table!r} cannot be guarded: it is a table of Tenure")
    if engine != "InnoDB":
        raise ConfigError(f"table {table!r} cannot be guarded: it is not in InnoDB, so it has no transactions")
    if cascades.rows:
        raise ConfigError(
            f"table {table!r} cannot be guarded: MariaDB fires no trigger for rows that the foreign key "
            f"{cascades.rows[0][0]!r} changes by a cascade: make it ON DELETE RESTRICT ON UPDATE RESTRICT"
        )
    if any(
        other.table == table and (other.namespace, other.role) != (namespace, role) for other in guarded_tables(session)
    ):
        raise ConfigError(f"table {table!r} is guarded by another role: remove that guard first")
    older = [f"{name!r} ({version})" for _, name, _, _, version, *_ in members.rows if _release(version) < OLDEST]
    if older:
        raise ConfigError(
            f"table {table!r} cannot be guarded yet: these members run an older release, whose fence does not say who "
            f"writes, so their writes would be refused: upgrade them first ({', '.join(older)})"
        )
    return str(table)


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def guarded_tables(session: Session) -> list[GuardedTable]:
    """Return the guarded tables, and their leaks."""
    tables: dict[str, dict[str, str]] = {}
    for table, event, body, _ in session.read(Step(_TRIGGERS, {}))[0].rows:
        tables.setdefault(table, {})[event] = body or ""
    found = []
    for table, bodies in tables.items():
        names = [plain or bytes.fromhex(coded).decode() for plain, coded in _NAMES.findall(next(iter(bodies.values())))]
        namespace, role = names if len(names) == 2 else (UNKNOWN, UNKNOWN)
        found.append(GuardedTable(table, namespace, role, tuple(_leaks(session, table, bodies))))
    return found


def drops(session: Session, table: str) -> list[str]:
    """Return the statements that drop the triggers of a table, also those of another name that it had."""
    found, triggers = session.read(Step(_TABLE, {"table": table}), Step(_TRIGGERS, {}))
    names = [name for _, name in found.rows]
    return [f"drop trigger {name}" for guarded, _, _, name in triggers.rows if guarded in names]


def _leaks(session: Session, table: str, bodies: dict[str, str]) -> Iterator[str]:
    named = {"table": table}
    engine, cascades, may_truncate = session.read(*(Step(text, named) for text in (_TABLE, _CASCADES, _MAY_TRUNCATE)))
    if engine.rows and engine.rows[0][0] != "InnoDB":
        yield f"the table has no transactions in {engine.rows[0][0]}: alter it to InnoDB"
    for event in EVENTS:
        if event not in bodies:
            yield f"the trigger for {event} is missing: guard the table again"
    for (name,) in cascades.rows:
        yield f"foreign key {name!r} changes rows by a cascade, which fires no trigger: make it RESTRICT"
    if may_truncate.rows:
        yield "this user may TRUNCATE the table, which fires no trigger: let programs use a user without DROP"
