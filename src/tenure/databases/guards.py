"""Guards tables of the application, and finds those that are guarded. ``store.guards`` has the triggers."""

from __future__ import annotations

from tenure.databases.mysql import guards as mysql
from tenure.databases.postgres import guards as postgres
from tenure.errors import ConfigError
from tenure.settings import check_choice, check_name, check_schema
from tenure.store import dialects, guards
from tenure.store.migrations import error_code, require_newest
from tenure.store.records import GuardedTable
from tenure.store.session import Failed, Result, Session, Step

UNKNOWN = mysql.UNKNOWN
NOT_ON_SQLITE = (
    "SQLite cannot guard a table: its triggers cannot know who writes; fence every transaction that writes there"
)
LOCK_TIMEOUT_S = 5
"""How long to wait for a table in use. Meanwhile every other write to the table waits, too."""
_BEFORE = {
    # The table is found as the database user's other programs find it.
    "postgresql": (
        f"select pg_catalog.set_config('lock_timeout', '{LOCK_TIMEOUT_S}s', true)",
        "set local search_path to default",
    ),
    "mysql": (f"set session lock_wait_timeout = {LOCK_TIMEOUT_S}",),
}
_IN_USE = ("55P03", 1205)


def guard_sql(
    table: str,
    role: str,
    *,
    namespace: str = "default",
    schema: str = "tenure",
    database: str = "postgresql",
    remove: bool = False,
) -> list[str]:
    """Return the statements that guard a table, or remove its guard, for your own migrations.

    Only transactions that are fenced by the latest term of ``role`` can then write to the table. ``table`` is written
    as in SQL on PostgreSQL (``invoices``, ``billing.invoices``, ``"Odd Name"``). On MariaDB (``database="mysql"``) it
    is the bare name of a table in the database of Tenure's tables. Tenure's tables must exist. On PostgreSQL, guard a
    partitioned table again after you have attached partitions.
    """
    names = check_name("namespace", namespace), check_name("role", role)
    if remove:
        return unguard_sql(table, schema, database)
    table, schema = _checked(table, schema, database)
    if database != "postgresql":
        return guards.mysql_triggers(table, *names)
    literals = ", ".join(dialects.literal(database, text) for text in (table, *names))
    return [f"select {dialects.postgresql(schema).prefix}guard_table({literals})"]


def unguard_sql(table: str, schema: str, database: str) -> list[str]:
    """Return the statements that remove the guard of a table, whatever its role is."""
    table, schema = _checked(table, schema, database)
    if database != "postgresql":
        return guards.mysql_drops(table)
    return [f"select {dialects.postgresql(schema).prefix}unguard_table({dialects.literal(database, table)})"]


def _checked(table: str, schema: str, database: str) -> tuple[str, str]:
    if check_choice("database", database, dialects.NAMES) == "sqlite":
        raise ConfigError(NOT_ON_SQLITE)
    if database != "postgresql" and "." in table:
        raise ConfigError(
            f"table={table!r} must be the bare name of a table in the database of Tenure's tables, without the database"
        )
    return check_name("table", table), check_schema(schema)


def guard(session: Session, namespace: str, table: str, role: str) -> None:
    """Guard a table; raise ConfigError if that cannot work."""
    database, schema = session.dialect.name, _schema(session)
    texts = guard_sql(table, role, namespace=namespace, schema=schema, database=database)
    require_newest(session)
    if database == "mysql":
        table = mysql.checked(session, namespace, table, role)
        texts = guard_sql(table, role, namespace=namespace, schema=schema, database=database)
        texts = mysql.drops(session, table) + texts
    _run(session, table, texts)


def unguard(session: Session, table: str) -> None:
    """Remove the guard of a table; raise ConfigError if there is none."""
    texts = unguard_sql(table, _schema(session), session.dialect.name)
    require_newest(session)
    if session.dialect.name == "mysql":
        # By the triggers that there are: a table that was renamed has those of its old name.
        texts = mysql.drops(session, table)
        _run(session, table, texts)
        dropped = len(texts)
    else:
        ((dropped,),) = _run(session, table, texts).rows
    if not dropped:
        raise ConfigError(f"table {table!r} is not guarded: `tenure guards` shows those that are")


def guarded_tables(session: Session) -> list[GuardedTable]:
    """Return the tables that are guarded by a role of these tables of Tenure, in any namespace."""
    if session.dialect.name == "sqlite":
        return []
    return postgres.guarded_tables(session) if session.dialect.name == "postgresql" else mysql.guarded_tables(session)


def _schema(session: Session) -> str:
    """Return the schema of Tenure's tables; the default where there are no schemas."""
    return session.dialect.prefix.strip('".') if session.dialect.name == "postgresql" else "tenure"


def _run(session: Session, table: str, texts: list[str]) -> Result:
    steps = [Step(text.replace("{", "{{").replace("}", "}}"), {}) for text in (*_BEFORE[session.dialect.name], *texts)]
    try:
        result = session.run(*steps)[-1]
        _ = result.count
    except Failed as error:
        if error_code(error.__cause__) in _IN_USE:
            raise ConfigError(
                f"table {table!r} is in use: another transaction kept it locked for {LOCK_TIMEOUT_S} s; try again when "
                "that has ended"
            ) from None
        raise ConfigError(f"the guard of table {table!r} cannot be changed: {str(error).splitlines()[0]}") from None
    return result
