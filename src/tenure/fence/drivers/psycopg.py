"""psycopg 3, blocking and asynchronous."""

from __future__ import annotations

from typing import Any

from tenure.databases.connecting import load
from tenure.errors import ConfigError
from tenure.fence.adapter import Adapter
from tenure.fence.verdicts import AUTOCOMMIT
from tenure.store.dialects import Dialect
from tenure.store.session import FetchedResult, Result, Step


class PsycopgAdapter(Adapter):
    """psycopg.Connection."""

    cursor = "Cursor"

    async def check_transaction(self) -> None:
        if self.connection.autocommit:
            await self._sync()
            if self.connection.info.transaction_status == load().pq.TransactionStatus.IDLE:
                raise ConfigError(AUTOCOMMIT)

    async def execute(self, step: Step) -> Result:
        psycopg = load()
        cursor = getattr(psycopg, self.cursor)(self.connection, row_factory=psycopg.rows.tuple_row)
        await self._answer(cursor.execute(self.dialect.text(step.text), step.parameters, prepare=False))
        await self._sync()
        return FetchedResult(await self._answer(cursor.fetchall()) if cursor.description else [], cursor.rowcount)

    async def _answer(self, answer: Any) -> Any:
        return answer

    async def _sync(self) -> None:
        """In pipeline mode, wait for the server's answers: before that, results and transaction state are unknown."""
        if self.connection.pgconn.pipeline_status:
            with self.connection.pipeline() as pipeline:
                pipeline.sync()


class AsyncPsycopgAdapter(PsycopgAdapter):
    """psycopg.AsyncConnection."""

    is_async = True
    cursor = "AsyncCursor"

    async def _answer(self, answer: Any) -> Any:
        return await answer

    async def _sync(self) -> None:
        if self.connection.pgconn.pipeline_status:
            async with self.connection.pipeline() as pipeline:
                await pipeline.sync()


def run_together(connection: Any, dialect: Dialect, *steps: Step) -> list[Result]:
    """Run steps that share their parameters in one message; return their results.

    The server stops at the first step that fails.
    """
    psycopg = load()
    cursor = psycopg.ClientCursor(connection, row_factory=psycopg.rows.tuple_row)
    parameters = {name: value for step in steps for name, value in step.parameters.items()}
    cursor.execute("; ".join(dialect.text(step.text) for step in steps), parameters)
    results: list[Result] = []
    while True:
        results.append(FetchedResult(cursor.fetchall() if cursor.description else [], cursor.rowcount))
        if not cursor.nextset():
            return results


KINDS = {"psycopg.Connection": PsycopgAdapter, "psycopg.AsyncConnection": AsyncPsycopgAdapter}
