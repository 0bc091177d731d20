"""``/api/…``: the JSON of the command line, from the snapshot that the pages show."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from tenure.dashboard import subjects
from tenure.dashboard.snapshot import Reader
from tenure.dashboard.source import Source
from tenure.reports import Status, all_waits, to_json

Endpoint = Callable[[Request], Awaitable[Response]]


class Api:
    """What programs read."""

    def __init__(self, source: Source, reader: Reader) -> None:
        self._source = source
        self._reader = reader
        self.routes: dict[str, Endpoint] = {
            "status": self._status,
            "members": self._members,
            "history": self._history,
            "jobs": self._jobs,
            "runs": self._runs,
            "waits": self._waits,
            "doctor": self._doctor,
        }

    async def _status(self, _: Request) -> Response:
        overview, waits = await subjects.overview(self._reader), await subjects.waits(self._reader)
        return _json(Status.made(overview, waits))

    async def _members(self, _: Request) -> Response:
        return _json((await subjects.overview(self._reader)).members)

    async def _history(self, request: Request) -> Response:
        # This raises an error while the database is down.
        await subjects.overview(self._reader)
        role = request.query_params.get("role", "")
        detail = await subjects.role(self._reader, role)
        return _json(detail.terms[: subjects.limit(request.query_params.get("limit"))])

    async def _jobs(self, _: Request) -> Response:
        await subjects.overview(self._reader)
        return _json((await subjects.jobs(self._reader)).jobs)

    async def _runs(self, request: Request) -> Response:
        await subjects.overview(self._reader)
        role, job = request.query_params.get("role"), request.query_params.get("job")
        runs = await subjects.runs(self._reader, role, job) if job else (await subjects.jobs(self._reader)).runs
        return _json(runs[: subjects.limit(request.query_params.get("limit"))])

    async def _waits(self, _: Request) -> Response:
        overview, known = await subjects.overview(self._reader), await subjects.jobs(self._reader)
        return _json(all_waits(overview, await subjects.waits(self._reader), known.jobs))

    async def _doctor(self, _: Request) -> Response:
        found, _seconds = await self._reader.threads.run(self._source.findings)
        return _json(found)


def _json(value: object) -> Response:
    return Response(to_json(value, None), media_type="application/json")
