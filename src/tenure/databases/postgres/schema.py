"""The tables on PostgreSQL: in a schema, with functions, and behind an advisory lock while they are created."""

from __future__ import annotations

from tenure.store.dialects import TABLES, Dialect
from tenure.store.migrations import PATIENCE_S, Schema
from tenure.store.session import Failed, Run, Session, Step

COURTESY_S = 1.0
"""How long a node waits for the advisory lock. Creating the tables takes some 50 ms."""
WAIT_S = 0.1
"""How long a change waits for tables that are in use: the shortest TTL is 1 s."""

_WAIT_A_WHILE = f"""
do $wait$ begin
    perform pg_catalog.set_config('lock_timeout', '{COURTESY_S:g}s', true);
    perform pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtextextended('tenure schema', 0));
    perform pg_catalog.set_config('lock_timeout', '{PATIENCE_S:g}s', true);
exception when lock_not_available then null;
end $wait$
"""
# This reads the catalog's rows. to_regclass() answers from a cache that a wait for the lock does not refresh, so the
# second of several nodes that start at once on an empty database would create the tables again.
_EXISTS = """
        select 1 from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
        where n.nspname = :schema and c.relname = 'meta'"""
# `create schema if not exists` needs CREATE on the database even if it has nothing to do. So a node checks first.
_SCHEMA_EXISTS = "select 1 from pg_catalog.pg_namespace where nspname = :schema"
_MISSING_PRIVILEGES = """
select wanted.privilege || ' on ' || c.relname
from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
cross join pg_catalog.unnest(array['SELECT', 'INSERT', 'UPDATE', 'DELETE']) as wanted(privilege)
where n.nspname = :schema and c.relname in ('namespaces', 'members', 'roles', 'candidates', 'terms', 'jobs', 'runs')
    and not pg_catalog.has_table_privilege(c.oid, wanted.privilege)
order by c.relname, wanted.privilege
"""


class PostgresSchema(Schema):
    """The tables in a schema of a PostgreSQL database."""

    has_functions = True
    short_wait = f"select pg_catalog.set_config('lock_timeout', '{WAIT_S * 1000:.0f}ms', true)"
    shown_by = "pg_stat_activity"
    # lock_not_available, deadlock_detected. The others mean that another node was quicker: a key, a schema, a table, a
    # column, an object or a function exists.
    in_use = ("55P03", "40P01", "23505", "42P06", "42P07", "42701", "42710", "42723")
    not_permitted = ("42501",)
    # These mean that a schema, a function or a table does not exist.
    missing = ("3F000", "42883", "42P01")
    # A row that is not there yet cannot be locked, so this locks the table. Renewals wait meanwhile.
    shut_out = ("set local lock_timeout = '50ms'", "lock table {members} in share row exclusive mode")

    def __init__(self, dialect: Dialect) -> None:
        super().__init__(dialect)
        self._quoted = dialect.prefix.rstrip(".")
        name = self._quoted.strip('"')
        self._named = {"schema": name}
        self.before = (f"create schema if not exists {self._quoted}",)
        self.location = f"schema {name!r}"
        self.privileges_needed = (
            f" (the database user needs CREATE on the database or, once the tables exist, USAGE on schema {name!r} "
            "and SELECT, INSERT, UPDATE and DELETE on its tables)"
        )

    def exists(self) -> Step:
        """Return the step that finds a row if the tables exist."""
        return Step(_EXISTS, self._named)

    def lock(self, run: Run) -> None:
        """Wait for other nodes, by the advisory lock and by the row that holds the version; create the schema."""
        run(
            Step(f"select pg_catalog.set_config('lock_timeout', '{PATIENCE_S:g}s', true)", {}),
            Step(f"select pg_catalog.set_config('statement_timeout', '{PATIENCE_S:g}s', true)", {}),
            Step(_WAIT_A_WHILE, {}),
        )
        there, has_schema = run(self.exists(), Step(_SCHEMA_EXISTS, self._named))
        if there.rows:
            run(Step("select 1 from {meta} where name = 'version' for update", {}))
        elif not has_schema.rows:
            run(*(Step(text, {}) for text in self.before))

    def check_privileges(self, session: Session) -> None:
        """Raise ``Failed`` if privileges are missing. The catalog shows all of them at once."""
        (missing,) = session.read(Step(_MISSING_PRIVILEGES, self._named))
        if missing.rows:
            raise Failed("this database user lacks " + ", ".join(what for (what,) in missing.rows))

    def grants(self, user: str) -> list[str]:
        """Return the least privileges of a user who runs nodes."""
        quoted, prefix = '"' + user.replace('"', '""') + '"', self.dialect.prefix
        changing = ", ".join(prefix + name for name in TABLES if name != "meta")
        return [
            f"grant usage on schema {self._quoted} to {quoted}",
            f"grant select on {prefix}meta to {quoted}",
            f"grant select, insert, update, delete on {changing} to {quoted}",
            f"grant execute on all functions in schema {self._quoted} to {quoted}",
        ]
