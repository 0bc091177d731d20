"""The few words in which the databases differ. Everything else in ``statements`` is the same text everywhere.

A text is written once, with ``:name`` for a parameter and ``{word}`` for a word of this table.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

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

    def text(self, statement: str) -> str:
        """Return the statement in this dialect."""
        return _compiled(self, statement)


@lru_cache(maxsize=256)
def _compiled(dialect: Dialect, statement: str) -> str:
    tables = {name: dialect.prefix + name for name in TABLES}
    filled = statement.format(**dialect.words, **tables)
    replacement: Callable[[re.Match[str]], str] = lambda match: dialect.parameter.format(match[1])  # noqa: E731
    return _PARAMETER.sub(replacement, filled)


def listed(values: tuple[str, ...]) -> str:
    """Return a list of names as the one parameter that ``{listed}`` takes apart."""
    return json.dumps(values, ensure_ascii=False)  # SQL_ASCII databases cannot read \u escapes


TABLES = ("meta", "namespaces", "members", "roles", "candidates", "terms")


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
            "skip_locked": "for update skip locked",
            "incarnation": quoted + "incarnation()",
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
        "skip_locked": "",
        "incarnation": "'sqlite'",
        "roomy": "",
        "index": "tenure_",
    },
)
