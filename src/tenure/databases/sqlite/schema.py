"""The tables in a SQLite file. A transaction that creates them holds the whole file."""

from __future__ import annotations

from tenure.store.migrations import Schema
from tenure.store.session import Step


class SqliteSchema(Schema):
    """The tables in a SQLite file."""

    shown_by = "fuser"

    def exists(self) -> Step:
        """Return the step that finds a row if the tables exist."""
        return Step("select 1 from sqlite_master where name = 'tenure_meta'", {})

    def is_missing(self, error: BaseException | None) -> bool:
        """Whether the error's message says that a table is missing: SQLite has no code for that."""
        return str(error).startswith("no such table")
