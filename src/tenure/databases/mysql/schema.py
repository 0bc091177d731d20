"""The tables on MariaDB and MySQL, where every change of a table commits by itself."""

from __future__ import annotations

from tenure.store.dialects import TABLES
from tenure.store.migrations import PATIENCE_S, Schema, error_code
from tenure.store.session import Failed, Run, Session, Step

NO_SUCH_TABLE = 1146
_LOCK = "concat('tenure_schema_', md5(database()))"


class MySqlSchema(Schema):
    """The tables in a MariaDB database."""

    commits_each_change = True
    # On MariaDB 0 means that the statement does not wait at all. The smallest value of MySQL is 1.
    short_wait = "set session lock_wait_timeout = 1 /*M! - 1 */"
    shown_by = "show processlist"
    privileges_needed = (
        " (the database user needs CREATE, ALTER and INDEX on the database or, once the tables exist, what "
        "`tenure sql --dialect mysql --grants USER` prints)"
    )
    in_use = (1205, 1213)
    """The codes for a lock wait that timed out, and for a deadlock."""
    not_permitted = (1044, 1142, 1370)
    """The codes for a database, a table and a routine."""
    there_already = (1050, 1060, 1061, 1062)
    """The codes for a table, a column, an index and a row."""
    missing = (NO_SUCH_TABLE,)
    # This locks the gap in the index, where new rows would come. READ COMMITTED would lock no gaps. The level is that
    # of the next transaction only.
    shut_out = ("select id from {members} where namespace = :namespace for update",)
    before_shut_out = "set transaction isolation level repeatable read"

    def exists(self) -> Step:
        """Return the step that finds a row if the tables exist."""
        text = "select 1 from information_schema.tables where table_schema = database() and table_name = 'tenure_meta'"
        return Step(text, {})

    def lock(self, run: Run) -> None:
        """Let one node at a time change the tables, by a user-level lock, which outlives the transaction."""
        _, locked = run(
            Step(f"set session lock_wait_timeout = {PATIENCE_S:.0f}", {}),
            Step(f"select get_lock({_LOCK}, {PATIENCE_S:g})", {}),
        )
        if locked.rows[0][0] != 1:
            raise Failed(f"other nodes have been changing the tables for {PATIENCE_S:g} s")

    def unlock(self, run: Run) -> None:
        """Release the lock, and those of earlier tries that failed."""
        run(Step("do release_all_locks()", {}))

    def check_privileges(self, session: Session) -> None:
        """Raise ``Failed`` if a privilege is missing: run statements that need it and change nothing."""
        try:
            session.run(*(Step(text, {}) for name in TABLES if name != "meta" for text in _nothing_done(name)))
        except Failed as error:
            # The method check_shape() reports a missing table.
            if error_code(error.__cause__) != NO_SUCH_TABLE:
                raise

    def grants(self, user: str) -> list[str]:
        """Return the least privileges of a user who runs nodes, given as ``name`` or ``name@host``."""
        name, _, host = user.partition("@")
        account = "@".join("'" + part.replace("'", "''") + "'" for part in (name, host or "%"))
        prefix = self.dialect.prefix
        changing = (
            f"grant select, insert, update, delete on {prefix}{table} to {account}"
            for table in TABLES
            if table != "meta"
        )
        return [f"grant select on {prefix}meta to {account}", *changing]


def _nothing_done(table: str) -> tuple[str, ...]:
    """Return a statement for each privilege on a table that a node needs, none of which changes anything."""
    column = "name" if table == "namespaces" else "namespace"
    return (
        f"insert into {{{table}}} select * from {{{table}}} where false",
        f"update {{{table}}} set {column} = {column} where false",
        f"delete from {{{table}}} where false",
    )
