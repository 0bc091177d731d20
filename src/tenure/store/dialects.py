"""The few words in which the databases differ. The rest of every text in ``statements`` is the same for all of them.

A text is written once, with ``:name`` for a parameter and ``{word}`` for a word that the dialect fills in.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from tenure.errors import ConfigError
from tenure.settings import check_schema

_PARAMETER = re.compile(r"(?<![:\w]):([a-z_]+)\b")


@dataclass(frozen=True)
class Dialect:
    """The words of one database."""

    name: str
    prefix: str
    """The prefix of every table's name: ``"tenure".`` or ``tenure_``."""
    parameter: str
    """How the driver writes a named parameter."""
    words: dict[str, str] = field(hash=False)
    lists: tuple[str, ...] = ()
    """The parameters made by :func:`listed` that the driver also gets as lists, which it expands itself."""

    def text(self, statement: str) -> str:
        """Return the statement in this dialect."""
        return _compiled(self, statement)

    def arguments(self, parameters: dict[str, Any]) -> dict[str, Any]:
        """Return a statement's parameters, together with the lists that this dialect's words refer to."""
        lists = {f"{name}_list": json.loads(parameters[name]) or [None] for name in self.lists if name in parameters}
        return parameters | lists


@lru_cache(maxsize=256)
def _compiled(dialect: Dialect, statement: str) -> str:
    tables = {name: dialect.prefix + name for name in TABLES}
    filled = statement.format(**dialect.words, **tables)
    return _PARAMETER.sub(lambda match: dialect.parameter.format(match[1]), filled)


def listed(values: tuple[str, ...]) -> str:
    """Return names as one parameter, which ``{listed}`` expands."""
    # Databases in SQL_ASCII cannot read \u escapes.
    return json.dumps(values, ensure_ascii=False)


TABLES = ("meta", "namespaces", "members", "roles", "candidates", "terms", "jobs", "runs")


_SHARED = {
    "greatest": "greatest",
    "least": "least",
    "skip_locked": "for update skip locked",
    "keep": "",
    "end_keep": "",
    "patiently": "",
    "wait_for_role": "",
    "of_this_place": "",
    "bytewise": "",
    "in_few": "in",
    "end_few": "",
    "if_living": "where ended_at is null",
    "if_ended": "where ended_at is not null",
    "if_requested": "where request_token is not null",
    "was_replica": "0",
    "ripe": "least(max_ttl_ms, coalesce(ripe_ttl_ms, 60000))",
    "serial": "0",
    "standbys": "null",
    "replicated": "null",
    "for_key_share": "",
    "insert": "insert",
    "or_nothing": "on conflict do nothing",
    "or_lock": "on conflict do nothing",
    "text": "text",
    "backend": "integer",
    "engine": "",
    "index": "",
}
"""The words of most databases."""


def postgresql(schema: str) -> Dialect:
    """Return PostgreSQL's words for tables in ``schema``. Every name is qualified: no search_path is trusted."""
    quoted = '"' + schema.replace('"', '""') + '".'
    return Dialect(
        name="postgresql",
        prefix=quoted,
        parameter="%({})s",
        words={
            **_SHARED,
            "schema": quoted,
            "time": "timestamptz",
            "now": "pg_catalog.clock_timestamp()",
            "now_us": "cast(extract(epoch from pg_catalog.clock_timestamp()) * 1000000 as bigint)",
            "listed": "(select pg_catalog.jsonb_array_elements_text(cast(:names as jsonb)))",
            "unreserved": "(select pg_catalog.jsonb_array_elements_text(cast(:unreserved as jsonb)))",
            # The names stay on the server, so that the statement which uses them can be sent with the one that locks.
            "keep": "select pg_catalog.set_config('tenure.locked', coalesce("
            "cast(pg_catalog.jsonb_agg(l.name) as text), '[]'), true) from (",
            "end_keep": ") as l",
            "locked": "(select pg_catalog.jsonb_array_elements_text(cast(pg_catalog.current_setting('tenure.locked')"
            " as jsonb)))",
            "from_listed": "pg_catalog.jsonb_array_elements_text(cast(:names as jsonb)) as listed(value)",
            "for_share": "for share",
            "for_key_share": "for key share",
            "standbys": "pg_catalog.current_setting('synchronous_standby_names')",
            "replicated": "case when promotion = 'loses-nothing' and pg_catalog.current_setting('synchronous_commit')"
            " in ('off', 'local', 'remote_write')"
            " then pg_catalog.set_config('synchronous_commit', 'on', true) end",
            "wait_for_role": f"and {quoted}wait_for_role(namespace, name)",
            # The timeline shows whether the server was a replica.
            "incarnation": quoted + "incarnation()",
            "place": quoted + "place()",
            "of_this_place": f"not null default {quoted}place()",
            # As Python compares, whatever the database's collation is.
            "bytewise": 'collate "C"',
            # A search in an index for each one: a join would read the whole table, since nested loops are off.
            "in_few": "= any (array",
            "end_few": ")",
            "serial": "cast(cast(pg_catalog.pg_current_xact_id() as text) as bigint)",
            "roomy": "with (fillfactor = 50)",
        },
    )


SQLITE = Dialect(
    name="sqlite",
    prefix="tenure_",
    parameter=":{}",
    words={
        **_SHARED,
        "schema": "tenure_",
        "time": "text",
        "now": "strftime('%Y-%m-%dT%H:%M:%fZ', 'now')",
        "now_us": "strftime('%s', 'now') * 1000000 + substr(strftime('%f', 'now'), 4) * 1000",
        "greatest": "max",
        "least": "min",
        "listed": "(select value from json_each(:names))",
        "unreserved": "(select value from json_each(:unreserved))",
        "locked": "(select value from json_each(:locked))",
        "from_listed": "json_each(:names) as listed",
        # One writer at a time holds the whole file (BEGIN IMMEDIATE), so no row needs a lock.
        "for_share": "",
        "skip_locked": "",
        "incarnation": "'sqlite'",
        "place": "''",
        # There are no replicas, so no node waits until a raised limit has reached them.
        "ripe": "max_ttl_ms",
        "roomy": "",
        "index": "tenure_",
    },
)

# Names are compared byte by byte, trailing blanks included. MariaDB and MySQL have different collations for that.
_MYSQL_TEXT = "varchar(255) character set utf8mb4 collate /*M! utf8mb4_nopad_bin */ /*!80000 utf8mb4_0900_bin */"

MYSQL = Dialect(
    name="mysql",
    prefix="tenure_",
    parameter="%({})s",
    lists=("names", "unreserved", "locked"),
    words={
        # `wait_for_role` is empty here: a wait that times out is an error, which would end the transaction, and the
        # next attempt comes soon enough.
        **_SHARED,
        "schema": "tenure_",
        "time": "datetime(6)",
        "now": "utc_timestamp(6)",
        "now_us": "timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))",
        "listed": ":names_list",
        "unreserved": ":unreserved_list",
        "locked": ":locked_list",
        "from_listed": f"json_table(:names, '$[*]' columns (value {_MYSQL_TEXT} path '$')) as listed",
        "for_share": "lock in share mode",
        "patiently": "for update skip locked",
        # Replicas must have different server ids. Host and port distinguish servers whose id was not configured.
        "incarnation": "concat(@@server_id, '@', @@hostname, '/', @@port, ':1')",
        "place": "lower(database())",
        # MariaDB remembers how far it has followed another server. MySQL has nothing as simple.
        "was_replica": "/*M! @@global.gtid_slave_pos <> '' */ /*!80000 0 */",
        # Not `on duplicate key update`, which locks rows that exist already.
        "insert": "insert ignore",
        "or_nothing": "",
        # `insert ignore` locks a row that it finds in share mode: two transactions that then update the row would wait
        # for each other.
        "or_lock": "on duplicate key update job = job",
        # There are no partial indexes.
        "if_living": "",
        "if_ended": "",
        "if_requested": "",
        "text": _MYSQL_TEXT,
        "backend": "bigint",
        "engine": "engine = InnoDB",
        "roomy": "engine = InnoDB",
    },
)
"""MariaDB and MySQL."""

NAMES = ("postgresql", "sqlite", "mysql", "mariadb")
"""The databases that Tenure supports, by the names of SQLAlchemy's dialects and Django's vendors."""


def for_name(name: str, schema: str) -> Dialect:
    """Return the dialect of a database; raise ConfigError if it is not supported. ``schema`` is for PostgreSQL."""
    if name not in NAMES:
        raise ConfigError(f"Tenure does not support the database {name!r}: use PostgreSQL, MariaDB or SQLite")
    if name == "postgresql":
        return postgresql(check_schema(schema))
    return SQLITE if name == "sqlite" else MYSQL


# Literals ------------------------------------------------------------------------------------------------------------


def durably(local: str) -> str:
    """Return a call that turns ``synchronous_commit`` on if it is off, and otherwise keeps it as it is.

    Without it, a crash of PostgreSQL could take a token back. It is for the transaction if ``local`` is ``"true"``, and
    for the session if it is ``"false"``; then it holds even if the server's setting changes later.
    """
    present = "pg_catalog.current_setting('synchronous_commit')"
    kept = f"case when {present} operator(pg_catalog.=) 'off' then 'local' else {present} end"
    return f"pg_catalog.set_config('synchronous_commit', {kept}, {local})"


def literal(database: str, text: str) -> str:
    """Return a text as a literal that means the same whatever the settings of the server and the connection are."""
    if database == "postgresql":
        # Neither a setting of the server nor a driver's search for placeholders can misread an escape.
        escaped = re.sub(r"[!-,/:-@[-^`{-~]", lambda match: f"\\u{ord(match[0]):04x}", text)
        return f"'{text}'" if escaped == text else f"E'{escaped}'"
    if database == "sqlite":
        return "'" + text.replace("'", "''") + "'"
    return f"'{text}'" if re.fullmatch(r"[\w .-]*", text, re.ASCII) else f"_utf8mb4 x'{text.encode().hex()}'"
