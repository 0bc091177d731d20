"""The few words in which the databases differ. Everything else in ``statements`` is the same text everywhere.

A text is written once, with ``:name`` for a parameter and ``{word}`` for a word of this table.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

_PARAMETER = re.compile(r"(?<![:\w]):([a-z_]+)\b")


@dataclass(frozen=True)
class Dialect:
    """One database's words."""

    name: str
    prefix: str
    """What stands before every table's name: ``"tenure".`` or ``tenure_``."""
    parameter: str
    """How the driver writes a named parameter."""
    words: dict[str, str] = field(hash=False)
    lists: tuple[str, ...] = ()
    """The parameters of :func:`listed` that go to the driver as lists, too: it takes them apart better."""

    def text(self, statement: str) -> str:
        """Return the statement in this dialect."""
        return _compiled(self, statement)

    def arguments(self, parameters: dict[str, Any]) -> dict[str, Any]:
        """Return a statement's parameters as this dialect's words name them."""
        lists = {f"{name}_list": json.loads(parameters[name]) or [None] for name in self.lists if name in parameters}
        return parameters | lists


@lru_cache(maxsize=256)
def _compiled(dialect: Dialect, statement: str) -> str:
    tables = {name: dialect.prefix + name for name in TABLES}
    filled = statement.format(**dialect.words, **tables)
    replacement: Callable[[re.Match[str]], str] = lambda match: dialect.parameter.format(match[1])  # noqa: E731
    return _PARAMETER.sub(replacement, filled)


def listed(values: tuple[str, ...]) -> str:
    """Return a list of names as the one parameter that ``{listed}`` takes apart."""
    return json.dumps(values, ensure_ascii=False)  # SQL_ASCII databases cannot read \u escapes


TABLES = ("meta", "namespaces", "members", "roles", "candidates", "terms", "jobs")


def postgresql(schema: str) -> Dialect:
    """Return PostgreSQL's words for tables in ``schema``. Every name is qualified: no search_path is trusted."""
    quoted = '"' + schema.replace('"', '""') + '".'
    return Dialect(
        name="postgresql",
        prefix=quoted,
        parameter="%({})s",
        words={
            "schema": quoted,
            "time": "timestamptz",
            "now": "pg_catalog.clock_timestamp()",
            "greatest": "greatest",
            "listed": "(select pg_catalog.jsonb_array_elements_text(cast(:names as jsonb)))",
            "unreserved": "(select pg_catalog.jsonb_array_elements_text(cast(:unreserved as jsonb)))",
            "from_listed": "pg_catalog.jsonb_array_elements_text(cast(:names as jsonb)) as listed(value)",
            "for_share": "for share",
            "wait_for_role": f"and {quoted}wait_for_role(namespace, name)",
            "patiently": "",
            "skip_locked": "for update skip locked",
            "incarnation": quoted + "incarnation()",
            "insert": "insert",
            "or_nothing": "on conflict do nothing",
            "or_lock": "on conflict do nothing",
            "text": "text",
            "backend": "integer",
            "engine": "",
            "roomy": "with (fillfactor = 50)",
            "index": "",
        },
    )


SQLITE = Dialect(
    name="sqlite",
    prefix="tenure_",
    parameter=":{}",
    words={
        "schema": "tenure_",
        "time": "text",
        "now": "strftime('%Y-%m-%dT%H:%M:%fZ', 'now')",
        "greatest": "max",
        "listed": "(select value from json_each(:names))",
        "unreserved": "(select value from json_each(:unreserved))",
        "from_listed": "json_each(:names) as listed",
        # One writer at a time holds the whole file (BEGIN IMMEDIATE), so no row needs a lock of its own.
        "for_share": "",
        "wait_for_role": "",
        "patiently": "",
        "skip_locked": "",
        "incarnation": "'sqlite'",
        "insert": "insert",
        "or_nothing": "on conflict do nothing",
        "or_lock": "on conflict do nothing",
        "text": "text",
        "backend": "integer",
        "engine": "",
        "roomy": "",
        "index": "tenure_",
    },
)

# Names are compared byte by byte, blanks at the end included; each of the two servers has its own word for that.
_MYSQL_TEXT = "varchar(255) character set utf8mb4 collate /*M! utf8mb4_nopad_bin */ /*!80000 utf8mb4_0900_bin */"

MYSQL = Dialect(
    name="mysql",
    prefix="tenure_",
    parameter="%({})s",
    lists=("names", "unreserved"),
    words={
        "schema": "tenure_",
        "time": "datetime(6)",
        "now": "utc_timestamp(6)",
        "greatest": "greatest",
        "listed": ":names_list",
        "unreserved": ":unreserved_list",
        "from_listed": f"json_table(:names, '$[*]' columns (value {_MYSQL_TEXT} path '$')) as listed",
        "for_share": "lock in share mode",
        # A wait that times out is an error there, and would end the transaction: the next attempt is soon enough.
        "wait_for_role": "",
        "patiently": "for update skip locked",
        "skip_locked": "for update skip locked",
        # Replicas must differ in their server ids; the rest tells servers apart that nobody has given one.
        "incarnation": "concat(@@server_id, '@', @@hostname, '/', @@port, ':1')",
        # Not `on duplicate key update`: that locks rows that are there already.
        "insert": "insert ignore",
        "or_nothing": "",
        # What `insert ignore` finds it locks in share mode: two that then update it would wait for each other.
        "or_lock": "on duplicate key update job = job",
        "text": _MYSQL_TEXT,
        "backend": "bigint",
        "engine": "engine = InnoDB",
        "roomy": "engine = InnoDB",
        "index": "",
    },
)
"""MariaDB and MySQL."""
