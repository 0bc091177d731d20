"""asyncpg."""

from __future__ import annotations

import re
from typing import Any

from tenure.errors import ConfigError
from tenure.fence.adapter import Adapter
from tenure.fence.verdicts import AUTOCOMMIT
from tenure.store.session import FetchedResult, Result, Step

_PARAMETER = re.compile(r"%\((\w+)\)s")


class AsyncpgAdapter(Adapter):
    """asyncpg.Connection, from a pool or not."""

    is_async = True

    async def check_transaction(self) -> None:
        if not self.connection.is_in_transaction():
            raise ConfigError(AUTOCOMMIT)

    async def execute(self, step: Step) -> Result:
        # Do not use connection.prepare(), although it returns both the rows and their number: it names the statement,
        # and behind a pooler another client may have a statement of that name on the same server.
        text, values = _numbered(self.dialect.text(step.text).strip(), step.parameters)
        if text.startswith("select"):
            rows = [tuple(row) for row in await self.connection.fetch(text, *values)]
            return FetchedResult(rows, len(rows))
        status = await self.connection.execute(text, *values)
        return FetchedResult([], int(status.split()[-1]))


def _numbered(text: str, parameters: dict[str, Any]) -> tuple[str, list[Any]]:
    """Return the text with ``$1`` and so on for its parameters, and their values in that order."""
    names = list(dict.fromkeys(_PARAMETER.findall(text)))
    numbered = _PARAMETER.sub(lambda match: f"${names.index(match[1]) + 1}", text)
    return numbered, [parameters[name] for name in names]


KINDS = {"asyncpg.Connection": AsyncpgAdapter, "asyncpg.PoolConnectionProxy": AsyncpgAdapter}
