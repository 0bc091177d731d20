"""What the pages and the API ask the reader for: the overview, and the subjects that only some pages need."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from tenure import Candidate, ConfigError, JobRecord, Overview, Registry, RunRecord, StoreUnavailable, WaitInfo
from tenure.dashboard.snapshot import Read, Reader, Snapshot
from tenure.reports import HistoryRow, last_terms

TERMS = 100
RUNS = 100


@dataclass(frozen=True)
class RoleView:
    """The terms of a role, newest first, and who stands for it."""

    terms: list[HistoryRow]
    candidates: list[Candidate]


@dataclass(frozen=True)
class Jobs:
    """Every job, and the last runs of all of them."""

    jobs: list[JobRecord]
    runs: list[RunRecord]


class Unknown(ConfigError):
    """There is no role or job of that name."""


async def snapshot(reader: Reader) -> Snapshot:
    """Return the latest snapshot; wait in a thread if there is none yet."""
    latest = reader.fresh()
    return latest if latest is not None else await reader.threads.run(reader.snapshot)


async def overview(reader: Reader) -> Overview:
    """Return the latest overview. Raises StoreUnavailable if it is not there, or old."""
    latest = await snapshot(reader)
    if latest.overview is None or latest.stale:
        raise StoreUnavailable(latest.problem or "the database does not answer")
    return latest.overview


async def role(reader: Reader, name: str) -> RoleView:
    """Return the details of a role. Raises Unknown if there is no such role: strangers' names are not asked for."""
    latest = await snapshot(reader)
    if latest.overview is not None and all(info.role != name for info in latest.overview.roles):
        raise Unknown(f"namespace {latest.overview.namespace!r} has no role {name!r}")

    def read(registry: Registry) -> RoleView:
        return RoleView(last_terms(registry, name, TERMS), registry.candidates(name))

    detail: RoleView = await _read(reader, ("role", name), read)
    return detail


async def jobs(reader: Reader) -> Jobs:
    """Return every job, and the last runs."""
    known: Jobs = await _read(reader, "jobs", lambda registry: Jobs(registry.jobs(), registry.runs(limit=RUNS)))
    return known


async def waits(reader: Reader) -> list[WaitInfo]:
    """Return what the nodes are waiting for."""
    found: list[WaitInfo] = await _read(reader, "waits", lambda registry: registry.waits())
    return found


async def runs(reader: Reader, role: str | None, job: str) -> list[RunRecord]:
    """Return the last runs of a job. Raises Unknown if there is no such job: strangers' names are not asked for."""
    if all(record.job != job or role not in (None, record.role) for record in (await jobs(reader)).jobs):
        raise Unknown(f"there is no job {job!r}" + ("" if role is None else f" of role {role!r}"))
    found: list[RunRecord] = await _read(
        reader, ("runs", role, job), lambda registry: registry.runs(job, RUNS, role=role)
    )
    return found


async def _read(reader: Reader, key: Hashable, read: Read) -> Any:
    subject = reader.known(key, read)
    if subject is None:
        subject = await reader.threads.run(lambda: reader.subject(key, read))
    if isinstance(subject.failure, StoreUnavailable):
        raise StoreUnavailable(str(subject.failure))
    if subject.failure is not None:
        raise ConfigError(str(subject.failure))
    return subject.value


def number(text: str | None, otherwise: int) -> int:
    """Return the number that a request gives, or another if it gives none, or one too long to be meant."""
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 20 else otherwise


def limit(text: str | None) -> int:
    """Return how many rows a request asks for: 20 unless it says so, as on the command line."""
    rows = 20 if text is None else number(text, 0)
    if not 1 <= rows <= TERMS:
        raise ConfigError(f"limit must be a number from 1 to {TERMS}, not {text!r}")
    return rows
