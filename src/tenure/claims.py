"""Runs of jobs, claimed under the fence: which due times of a job somebody has claimed, and which are done.

A job has one row for each role, so the table stays as small as the list of jobs. A run is named by the moment at which
it is due, and the row keeps the latest that was claimed and the latest that was done: a claim of that one or of an
earlier one is refused. The fence comes first, so a claim speaks for the latest term, and whoever leads next sees every
claim of the terms before it. Two transactions of one term that claim the same job wait for each other at its row.

All of it belongs to the caller's transaction: what is rolled back was never claimed, and what is written beside the
claim happens exactly as often as the claim.
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

from tenure import atomic, connections, mysql, statements
from tenure.connections import Claim as Term
from tenure.connections import judged, kind_of, roll_back, undone, unknown
from tenure.dialects import MYSQL, SQLITE, postgresql
from tenure.dialing import load
from tenure.errors import ConfigError
from tenure.session import Result, Step
from tenure.settings import check_name
from tenure.sqlite import FetchedResult
from tenure.values import EPOCH, job_records, moment

Steps = tuple[Step, ...]


@dataclass(frozen=True)
class Ask:
    """Some statements about one job, and what the last one's answer means."""

    steps: tuple[Step, ...]
    meaning: Callable[[Result], Any]


def claim(term: Term, job: str, due: datetime) -> Ask:
    """Ask for the run of ``job`` that is due then; True if nobody has claimed it or a later one."""
    return _ask(term, job, _changed, statements.ADD_JOB, statements.CLAIM, us=_microseconds("due", due))


def finish(term: Term, job: str, due: datetime) -> Ask:
    """Mark that run as done; True if neither it nor a later one was."""
    return _ask(term, job, _changed, statements.ADD_JOB, statements.FINISH, us=_microseconds("due", due))


def anchor(term: Term, job: str, at: datetime) -> Ask:
    """Set the moment from which a job's interval is counted, if it has none; give the one that stands."""
    texts = (statements.ADD_JOB, statements.SET_ANCHOR, statements.ANCHOR)
    return _ask(term, job, lambda result: moment(result.rows[0][0]), *texts, us=_microseconds("at", at))


def forget(term: Term, job: str) -> Ask:
    """Delete a job's row; True if there was one."""
    return _ask(term, job, _changed, statements.FORGET_JOB)


def jobs(term: Term) -> Ask:
    """Give the records of all jobs of the term's role."""
    step = Step(statements.JOBS, {"namespace": term.namespace, "role": term.role})
    return Ask((step,), lambda result: job_records(result.rows))


def perform(connection: Any, term: Term, bound_s: float, ask: Ask) -> Any:
    """Fence the transaction of ``connection``, then ask in it."""
    connections.fence(connection, term, bound_s)
    return ask.meaning(_run(connection, term, ask.steps)[-1])


async def perform_async(connection: Any, term: Term, bound_s: float, ask: Ask) -> Any:
    """Do as ``perform`` does, on a connection whose driver is asynchronous."""
    await connections.fence_async(connection, term, bound_s)
    how = kind_of(connection, _ASYNC_KINDS)
    if how is None:
        raise unknown(connection)
    return ask.meaning((await how(connection, term, ask.steps))[-1])


def _microseconds(what: str, at: datetime) -> int:
    """Return the number that stands for a moment, or say what is wrong with it."""
    if not isinstance(at, datetime):
        raise ConfigError(f"{what}={at!r} must be a datetime with a time zone")
    if at.utcoffset() is None:
        raise ConfigError(
            f"{what}={at!r} has no time zone, so it names another moment on every machine: give it one, as in "
            "datetime.now(timezone.utc)"
        )
    try:
        at.astimezone(timezone.utc)
    except OverflowError:
        raise ConfigError(f"{what}={at!r} is not within the years 1 to 9999 in UTC, so nobody could read it") from None
    return (at - EPOCH) // timedelta(microseconds=1)


def _ask(term: Term, job: str, meaning: Callable[[Result], Any], *texts: str, **parameters: Any) -> Ask:
    named = {"namespace": term.namespace, "role": term.role, "token": term.token, "job": check_name("job", job)}
    return Ask(tuple(Step(text, named | parameters) for text in texts), meaning)


def _changed(result: Result) -> bool:
    return result.count == 1


# --- drivers ------------------------------------------------------------------------------------------------


def _run_psycopg(connection: Any, term: Term, steps: Steps) -> list[Result]:
    psycopg = load()
    cursor = psycopg.Cursor(connection, row_factory=psycopg.rows.tuple_row)
    found: list[Result] = []
    with judged(term):
        for step in steps:
            cursor.execute(postgresql(term.schema).text(step.text), step.parameters, prepare=False)
            if connection.pgconn.pipeline_status:
                with connection.pipeline() as pipeline:
                    pipeline.sync()  # until then nothing has come of it
            found.append(FetchedResult(cursor.fetchall() if cursor.description else [], cursor.rowcount))
    return found


async def _run_psycopg_async(connection: Any, term: Term, steps: Steps) -> list[Result]:
    psycopg = load()
    cursor = psycopg.AsyncCursor(connection, row_factory=psycopg.rows.tuple_row)
    found: list[Result] = []
    with judged(term):
        for step in steps:
            await cursor.execute(postgresql(term.schema).text(step.text), step.parameters, prepare=False)
            if connection.pgconn.pipeline_status:
                async with connection.pipeline() as pipeline:
                    await pipeline.sync()
            found.append(FetchedResult(await cursor.fetchall() if cursor.description else [], cursor.rowcount))
    return found


async def _run_asyncpg(connection: Any, term: Term, steps: Steps) -> list[Result]:
    found: list[Result] = []
    with judged(term):
        for step in steps:
            text, values = _numbered(postgresql(term.schema).text(step.text), step.parameters)
            prepared = await connection.prepare(text)
            rows = [tuple(row) for row in await prepared.fetch(*values)]
            found.append(FetchedResult(rows, int(prepared.get_statusmsg().split()[-1])))
    return found


def _numbered(text: str, parameters: dict[str, Any]) -> tuple[str, list[Any]]:
    """Return a text with ``$1`` and so on for its parameters, and their values in that order."""
    names = list(dict.fromkeys(re.findall(r"%\((\w+)\)s", text)))
    numbered = re.sub(r"%\((\w+)\)s", lambda match: f"${names.index(match[1]) + 1}", text)
    return numbered, [parameters[name] for name in names]


def _run_sqlite(connection: sqlite3.Connection, term: Term, steps: Steps) -> list[Result]:
    found: list[Result] = []
    with undone(lambda: roll_back(connection)), judged(term):
        for step in steps:
            cursor = sqlite3.Cursor(connection)
            cursor.row_factory = None  # whatever the caller's connection makes of rows
            cursor.execute(SQLITE.text(step.text), step.parameters)
            found.append(FetchedResult(cursor.fetchall(), cursor.rowcount))
    return found


async def _run_aiosqlite(connection: Any, term: Term, steps: Steps) -> list[Result]:
    found: list[Result] = await connection._execute(_run_sqlite, connection._conn, term, steps)  # noqa: SLF001
    return found


def _run_pymysql(connection: Any, term: Term, steps: Steps) -> list[Result]:
    cursor = mysql.load().cursors.Cursor(connection)
    found: list[Result] = []
    with undone(connection.rollback), judged(term):
        for step in steps:
            count = cursor.execute(MYSQL.text(step.text), step.parameters)
            found.append(FetchedResult(list(cursor.fetchall()), count))
    return found


def _run_session(session: Any, term: Term, steps: Steps) -> list[Result]:
    return _run_sqlalchemy(session.connection(), term, steps, session.rollback)


def _run_sqlalchemy(connection: Any, term: Term, steps: Steps, *roll_backs: Callable[[], object]) -> list[Result]:
    from tenure.borrowed import BorrowedSession  # noqa: PLC0415 - for nobody else

    on_error: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if connection.dialect.name != "postgresql":
        on_error = undone(*roll_backs, connection.rollback)
    with on_error, judged(term):
        return list(BorrowedSession(connection, term.schema).run(*steps))


async def _run_run_sync(connection: Any, term: Term, steps: Steps) -> list[Result]:
    found: list[Result] = await connection.run_sync(_run, term, steps)
    return found


async def _run_scoped(scoped: Any, term: Term, steps: Steps) -> list[Result]:
    return await _run_run_sync(scoped(), term, steps)


def _run_django(connection: Any, term: Term, steps: Steps) -> list[Result]:
    with atomic.spoiled(connection), judged(term):
        return atomic.run(connection, term.schema, *steps)


def _run_django_proxy(proxy: Any, term: Term, steps: Steps) -> list[Result]:
    return _run(proxy._connections[proxy._alias], term, steps)  # noqa: SLF001


def _run(connection: Any, term: Term, steps: Steps) -> list[Result]:
    how = kind_of(connection, _KINDS)
    if how is None:
        raise unknown(connection)
    return how(connection, term, steps)


# --- kinds, as in ``connections`` ---------------------------------------------------------------------------

_KINDS: dict[str, Callable[[Any, Term, Steps], list[Result]]] = {
    "django.BaseDatabaseWrapper": _run_django,
    "django.ConnectionProxy": _run_django_proxy,
    "psycopg.Connection": _run_psycopg,
    "pymysql.Connection": _run_pymysql,
    "sqlalchemy.Connection": _run_sqlalchemy,
    "sqlalchemy.Session": _run_session,
    "sqlalchemy.scoped_session": _run_session,
    "sqlite3.Connection": _run_sqlite,
}
_ASYNC_KINDS: dict[str, Callable[[Any, Term, Steps], Awaitable[list[Result]]]] = {
    "aiosqlite.Connection": _run_aiosqlite,
    "asyncpg.Connection": _run_asyncpg,
    "asyncpg.PoolConnectionProxy": _run_asyncpg,
    "psycopg.AsyncConnection": _run_psycopg_async,
    "sqlalchemy.AsyncConnection": _run_run_sync,
    "sqlalchemy.AsyncSession": _run_run_sync,
    "sqlalchemy.async_scoped_session": _run_scoped,
}
