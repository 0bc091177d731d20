"""Finds how a database handles the tables, by the database's name."""

from __future__ import annotations

from tenure.databases.mysql.schema import MySqlSchema
from tenure.databases.postgres.schema import PostgresSchema
from tenure.databases.sqlite.schema import SqliteSchema
from tenure.settings import check_choice, check_schema
from tenure.store import dialects
from tenure.store.dialects import Dialect
from tenure.store.migrations import Schema

_SCHEMAS: dict[str, type[Schema]] = {"postgresql": PostgresSchema, "mysql": MySqlSchema, "sqlite": SqliteSchema}


def schema_for(dialect: Dialect) -> Schema:
    """Return how a database handles the tables."""
    return _SCHEMAS[dialect.name](dialect)


def tables_sql(database: str = "postgresql", *, schema: str = "tenure") -> list[str]:
    """Return the statements that create the tables, for your own migrations; run them in one transaction.

    ``database`` is ``postgresql``, ``sqlite`` or ``mysql`` (MariaDB), as SQLAlchemy's dialects are called; ``schema``
    is for PostgreSQL. Nodes then find the tables and create nothing.
    """
    check_choice("database", database, dialects.NAMES)
    return schema_for(dialects.for_name(database, check_schema(schema))).statements()
