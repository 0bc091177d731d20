"""Creates the tables, brings them up to date, and refuses those that this release cannot work with.

The first node creates the tables, under a lock, so any number of nodes may start at once. On PostgreSQL that is an
advisory lock, which any database user can hold, so a node goes on without it after a while. The lock only keeps the
server's log clean: the catalog's own keys let one node create the tables, and a lock on a row of ``meta`` lets one node
migrate them. A node that comes second waits for the first, fails, and finds the work done.

``meta`` holds two numbers. ``version`` is the newest migration that has run. ``oldest`` is the oldest release (by its
own newest migration) that can still work with the tables. An older node does not start. One that is already running
reads ``oldest`` with its next renewal and gives up its connection (see ``ControlStore``).

On PostgreSQL a change of a table waits until no transaction uses the table, and every later statement on the table
queues behind it: one forgotten transaction that has read ``members`` would stop the renewals of every node. So a
migration waits for a moment only, gives up, and tries again later. It pauses before each try, under the lock that lets
one node try at a time: however many nodes of the new release start at once, the tables are free most of the time.

On MariaDB every change of a table commits by itself. The version is written last. What a migration finds in place was
created by a node that died halfway, and the migration continues from there.
"""

from __future__ import annotations

import abc
import time
from typing import Any

from tenure.errors import ConfigError, StoreUnavailable
from tenure.store import tables
from tenure.store.dialects import Dialect
from tenure.store.session import Failed, Run, Session, Step
from tenure.store.tables import Migration

PATIENCE_S = 20.0
"""How long a starting node waits for others that migrate, and keeps trying to change tables that are in use."""
PAUSE_S = 0.25
"""How long a node pauses before each try, so that others can renew: the shortest TTL is 1 s."""


class Schema(abc.ABC):
    """How a database handles the tables. The defaults suit SQLite, where a writer locks the whole database."""

    location = "this database"
    """Where the tables are, for messages."""
    has_functions = False
    """Whether the database has functions that raise errors."""
    commits_each_change = False
    """Whether every change of a table commits by itself, so that a node that dies leaves a migration half done."""
    before: tuple[str, ...] = ()
    """The statements that create the schema in which the tables are."""
    short_wait = ""
    """The statement that bounds the wait for tables in use; empty if a change does not block readers."""
    shown_by: str
    """Where operators see which transactions are open."""
    privileges_needed = ""
    """Which privileges a node needs, as the end of an error message."""
    in_use: tuple[object, ...] = ()
    """The codes of errors that mean: another transaction uses the tables, or is creating them. Trying again helps."""
    not_permitted: tuple[object, ...] = ()
    """The codes of errors that mean: the database user may not do that."""
    there_already: tuple[object, ...] = ()
    """The codes of errors that mean: the object exists, since a node that died halfway has created it."""
    missing: tuple[object, ...] = ()
    """The codes of errors that mean: there is no such table."""
    shut_out: tuple[str, ...] = ()
    """The statements that wait for members that are joining, and let none join before the transaction ends."""
    before_shut_out = ""
    """The statement before the transaction of ``shut_out``; empty if it needs none."""

    def __init__(self, dialect: Dialect) -> None:
        self.dialect = dialect

    @abc.abstractmethod
    def exists(self) -> Step:
        """Return the step that finds a row if the tables exist."""

    def lock(self, run: Run) -> None:
        """Let one node at a time create or change the tables. Raise ``Failed`` if the others take too long."""

    def unlock(self, run: Run) -> None:
        """Release the lock, if it does not end with the transaction."""

    def is_missing(self, error: BaseException | None) -> bool:
        """Whether the driver's error says that the tables do not exist."""
        return error_code(error) in self.missing

    def check_privileges(self, session: Session) -> None:
        """Raise ``Failed`` if the database user lacks a privilege on the tables that a node needs."""

    def grants(self, user: str) -> list[str]:  # noqa: ARG002 - a database without users has none
        """Return the statements that let a database user run nodes on tables that exist already."""
        return []

    def statements_of(self, migration: Migration) -> list[str]:
        """Return the statements of a migration, before the dialect's words are filled in."""
        texts = []
        if migration.version == 1:
            texts.append("create table {meta} (name {text} primary key, value integer not null) {engine}")
            texts.append("insert into {meta} (name, value) values ('version', 0), ('oldest', 1)")
        # Functions come first, because a column's default may call one.
        if self.has_functions:
            texts += migration.functions
        texts += migration.tables
        texts.append(f"update {{meta}} set value = {migration.version} where name = 'version'")
        # The number never decreases: an operator's word may need a newer release (R17).
        needed = migration.oldest
        texts.append(f"update {{meta}} set value = {needed} where name = 'oldest' and value < {needed}")
        return texts

    def statements(self) -> list[str]:
        """Return the statements that create the tables, in the database's dialect."""
        texts = [text for migration in tables.MIGRATIONS for text in self.statements_of(migration)]
        return [*self.before, *(self.dialect.text(text).strip() for text in texts)]


def error_code(error: BaseException | None) -> Any:
    """Return the code by which a database names an error: MariaDB's number, PostgreSQL's SQLSTATE."""
    number = next(iter(getattr(error, "args", ())), None)
    return number if isinstance(number, int) else getattr(error, "sqlstate", None)


def prepare(session: Session, migrations: tuple[Migration, ...] | None = None) -> None:
    """Create the tables, or bring them up to this release's version; do nothing if they have it already."""
    known = migrations or tables.MIGRATIONS
    mine = known[-1].version
    if _version(session, mine) >= mine:
        return
    schema = session.schema
    give_up_at = time.monotonic() + PATIENCE_S
    while True:
        try:
            _migrate(session, known)
        except Failed as error:
            code = error_code(error.__cause__)
            if code in schema.not_permitted and (present := _version(session, mine)):
                raise ConfigError(
                    f"the tables are of version {present}, this release needs version {mine}, and this database user "
                    f"may not change them ({str(error).splitlines()[0]}): run `tenure init` of this release as their "
                    "owner, then run what `tenure sql --grants USER` prints"
                ) from None
            if code not in schema.in_use:
                raise
            if time.monotonic() >= give_up_at:
                raise StoreUnavailable(
                    f"cannot bring the tables to version {mine} within {PATIENCE_S:g} s "
                    f"({str(error).splitlines()[0]}): rename what has the name of a table of Tenure, or end the "
                    f"transactions that keep the tables locked ({schema.shown_by} shows them), then start again"
                ) from None
            time.sleep(PAUSE_S)
        else:
            return


def _migrate(session: Session, known: tuple[Migration, ...]) -> None:
    schema = session.schema
    with session.transaction() as run:
        schema.lock(run)
        present = _read_version(run, schema)
        if 0 < present < known[-1].version and schema.short_wait:
            time.sleep(PAUSE_S)
            run(Step(schema.short_wait, {}))
        for migration in known:
            if migration.version > present:
                _apply(run, schema, migration)
        schema.unlock(run)


def _apply(run: Run, schema: Schema, migration: Migration) -> None:
    texts = schema.statements_of(migration)
    if not schema.there_already:
        run(*(Step(text, {}) for text in texts))
        return
    for text in texts:
        try:
            _ = run(Step(text, {}))[0].count
        except Exception as error:
            if error_code(error) not in schema.there_already:
                raise


def oldest() -> int:
    """Return the oldest version that a release must know to work with this release's tables."""
    return max(migration.oldest for migration in tables.MIGRATIONS)


def no_tables(location: str = Schema.location) -> str:
    """Return the error message for a database without Tenure's tables."""
    return f"there are no tables of Tenure in {location}: start a node, or run `tenure init`"


def require(session: Session) -> int:
    """Return the version of the tables; raise ConfigError if there are none, or if they are too new."""
    version = _version(session, tables.MIGRATIONS[-1].version)
    if not version:
        raise ConfigError(no_tables(session.schema.location))
    return version


def require_newest(session: Session) -> None:
    """Raise ConfigError if the tables lack what this release adds. For callers that must not migrate them."""
    version, mine = require(session), tables.MIGRATIONS[-1].version
    if version < mine:
        raise ConfigError(
            f"the tables are of version {version}, and this release needs version {mine}: start a node of this "
            "release, or run `tenure init`"
        )


def check_shape(session: Session) -> None:
    """Raise ConfigError if a table or a column is missing: an operator created the tables by hand, or changed them."""
    looks = [
        f"(select {', '.join(columns)} from {{{name}}} where 1 = 0) as {name}"
        for name, columns in tables.COLUMNS.items()
    ]
    try:
        _ = session.read(Step(f"select 1 from {', '.join(looks)}", {}))[0].rows
    except Failed as error:
        raise ConfigError(
            f"the tables are not as Tenure creates them: {str(error).splitlines()[0]}; restore what is missing: "
            "`tenure sql` prints the definitions"
        ) from None


def _version(session: Session, mine: int) -> int:
    """Return the version of the tables, or 0 if there are none; raise ConfigError if they are too new."""
    version = _read_version(session.read, session.schema)
    if version <= mine:
        return version
    ((oldest,),) = session.read(Step("select value from {meta} where name = 'oldest'", {}))[0].rows
    if oldest > mine:
        raise ConfigError(
            f"the tables are of version {version}, which needs a release that knows at least version {oldest}; "
            f"this one knows {mine}: upgrade Tenure here"
        )
    return version


def _read_version(run: Run, schema: Schema) -> int:
    (there,) = run(schema.exists())
    if not there.rows:
        return 0
    (version,) = run(Step("select value from {meta} where name = 'version'", {}))
    if not version.rows and schema.commits_each_change:
        return 0
    if not version.rows:
        raise ConfigError("the table meta holds no version: its row was deleted; insert it as `tenure sql` prints it")
    return int(version.rows[0][0])
