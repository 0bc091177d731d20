"""The pages: what each is made of, and the answers that refuse. The templates escape every name."""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import secrets
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timedelta, timezone
from importlib import resources
from typing import Any
from urllib.parse import urlencode

import jinja2
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tenure import Candidate, ConfigError, RoleInfo, TenureError, __version__, reports
from tenure.base.durations import duration, exact
from tenure.dashboard import subjects, timeline
from tenure.dashboard.access import Refused, address_of, path_below
from tenure.dashboard.actions import Actions
from tenure.dashboard.snapshot import Reader, Snapshot
from tenure.dashboard.source import Source
from tenure.dashboard.subjects import number

log = logging.getLogger("tenure.dashboard")

Page = Callable[[Request], Awaitable[Response]]

ROWS = 50
"""How many rows a page has."""
RENDERED = 32
"""How many pages are kept to be sent again."""
STATIC = {"style.css": "text/css", "live.js": "text/javascript", "icon.svg": "image/svg+xml"}
THIS_PROCESS = secrets.token_hex(4)
"""Snapshots are numbered in each process, so their numbers alone would mix up those of two workers."""
LONGEST_SEARCH = 200
MENU = {"./": "Roles", "members": "Members", "jobs": "Jobs", "waits": "Waits", "doctor": "Doctor", "actions": "Actions"}


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("tenure.dashboard"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "duration": duration,
        "exact": exact,
        "definition": reports.definition,
        "attempt": reports.attempt,
        "took": reports.took,
        "first_line": reports.first_line,
        "moment": _moment,
        "iso": lambda moment: moment.isoformat(),
        "query": urlencode,
    }
    environment.globals |= {"menu": MENU, "version": __version__, "static_version": _static_version()}
    return environment


def _moment(moment: datetime | None) -> str:
    """Return a moment for people, in UTC. The page says that its times are in UTC."""
    return "-" if moment is None else f"{moment.astimezone(timezone.utc):%Y-%m-%d %H:%M:%S}"


@functools.cache
def _static(name: str) -> bytes:
    return resources.files("tenure.dashboard").joinpath("static").joinpath(name).read_bytes()


@functools.cache
def _static_version() -> str:
    return hashlib.sha256(b"".join(map(_static, STATIC))).hexdigest()[:8]


async def static_file(request: Request) -> Response:
    """Answer with one of our own files. There are no others: a path leads nowhere."""
    name = request.path_params["name"]
    if name not in STATIC:
        raise HTTPException(404)
    return Response(_static(name), media_type=STATIC[name], headers={"cache-control": "private, max-age=86400"})


class Pages:
    """What people see."""

    def __init__(self, source: Source, reader: Reader, actions: Actions, *, signs_in: bool) -> None:
        self._source = source
        self._reader = reader
        self._actions = actions
        self._signs_in = signs_in
        self._rendered: dict[str, str] = {}
        """The last pages, by ETag: many who look at the same see the same."""
        self.routes: dict[str, Page] = {
            "": self._roles,
            "role": self._role,
            "members": self._members,
            "jobs": self._jobs,
            "waits": self._waits,
            "doctor": self._doctor,
            "actions": self._actions_page,
        }

    async def _roles(self, request: Request) -> Response:
        latest = await subjects.snapshot(self._reader)
        roles = latest.overview.roles if latest.overview else []
        matches = _search(request)
        found = [role for role in roles if matches(role.role, role.leader.name if role.leader else "")]
        counts = {state: sum(_state(role) == state for role in roles) for state in ("vacant", "overdue")}
        troubled_first = sorted(found, key=lambda role: (_state(role) == "led", role.role))
        values = {**_paged(request, troubled_first), "counts": counts, "total": len(roles), "state": _state}
        values["standing_by"] = reports.standing_by
        return self._render(request, latest, "roles.html", "./", values)

    async def _role(self, request: Request) -> Response:
        name, span = request.query_params.get("name", ""), request.query_params.get("span", "all")
        detail = await subjects.role(self._reader, name)
        latest = await subjects.snapshot(self._reader)
        role = next((role for role in latest.overview.roles if role.role == name), None) if latest.overview else None
        if latest.overview is None or role is None:
            raise subjects.Unknown(f"there is no role {name!r}")
        values = {
            "role": role,
            "state": _state(role),
            "detail": detail,
            "choices": _choices(role, sorted(detail.candidates, key=lambda candidate: candidate.name)),
            "timeline": timeline.draw(detail.terms, latest.overview.as_of, span),
            "span": span,
            "spans": (*timeline.SPANS, "all"),
            **_paged(request, detail.terms, 20),
        }
        return self._render(request, latest, "role.html", "./", values)

    async def _members(self, request: Request) -> Response:
        latest = await subjects.snapshot(self._reader)
        members = latest.overview.members if latest.overview else []
        matches = _search(request)
        found = [member for member in members if matches(member.name, member.host)]
        values = {**_paged(request, reports.by_name(found)), "total": len(members)}
        return self._render(request, latest, "members.html", "members", values)

    async def _jobs(self, request: Request) -> Response:
        role, job = request.query_params.get("role"), request.query_params.get("job")
        known = await subjects.jobs(self._reader)
        runs = await subjects.runs(self._reader, role, job) if job else known.runs
        newest = reports.newest_tokens(known.jobs)
        latest = await subjects.snapshot(self._reader)
        led = reports.led_roles(latest.overview) if latest.overview else ()
        jobs = reports.without_stale_next(known.jobs, newest)
        found = [record for record in jobs if not job or (record.job == job and role in (None, record.role))]
        values = {
            **_paged(request, found),
            "runs": runs[:ROWS],
            "job": job,
            "total": len(known.jobs),
            "state": lambda record: reports.state_of(record, newest[record.role], led),
            "notes": reports.about_states(reports.state_of(record, newest[record.role], led) for record in found),
            "awaits_leader": lambda record: reports.awaits_leader(record, led),
        }
        return self._render(request, latest, "jobs.html", "jobs", values)

    async def _waits(self, request: Request) -> Response:
        latest, known = await subjects.snapshot(self._reader), await subjects.jobs(self._reader)
        of_nodes = await subjects.waits(self._reader)
        found = reports.all_waits(latest.overview, of_nodes, known.jobs) if latest.overview else []
        values = {**_paged(request, found), "total": len(found)}
        return self._render(request, latest, "waits.html", "waits", values)

    async def _doctor(self, request: Request) -> Response:
        found, seconds = await self._reader.threads.run(self._source.findings)
        values = {"findings": found, "examined": datetime.now(timezone.utc) - timedelta(seconds=seconds)}
        return self._render(request, await subjects.snapshot(self._reader), "doctor.html", "doctor", values)

    async def _actions_page(self, request: Request) -> Response:
        values = _paged(request, self._actions.latest())
        return self._render(request, await subjects.snapshot(self._reader), "actions.html", "actions", values)

    def _render(
        self, request: Request, latest: Snapshot, template: str, current: str, values: dict[str, Any]
    ) -> Response:
        """Return a page, or 304 if the browser has it already."""
        visitor, actions = request.scope["tenure.visitor"], self._actions.latest()
        known = (THIS_PROCESS, latest.number, latest.stale, visitor, actions[:1], str(request.url))
        etag = f'"{hashlib.sha256(repr(known).encode()).hexdigest()[:20]}"'
        headers = {"etag": etag, "tenure-next": str(math.ceil(self._reader.next_in * 1000)), "vary": "cookie"}
        if latest.overview is None:
            return self.refusal(request, Refused(503, latest.problem or "the database does not answer"))
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=304, headers=headers)
        context = {
            **values,
            "latest": latest,
            "visitor": visitor,
            "current": current,
            "namespace": self._source.namespace,
            "signs_in": self._signs_in,
            "done": self._actions.find(request.query_params.get("done")),
        }
        if etag not in self._rendered:
            while len(self._rendered) >= RENDERED:
                self._rendered.pop(next(iter(self._rendered)))
            self._rendered[etag] = _environment().get_template(template).render(context)
        return Response(self._rendered[etag], media_type="text/html", headers=headers)

    def refusal(self, request: Request, refused: Refused) -> Response:
        """Return the answer to a request that is refused: a page for people, JSON for programs.

        What would have changed something leaves a line in the log.
        """
        path = path_below(request.scope)
        if request.method not in ("GET", "HEAD"):
            who, asked = request.scope.get("tenure.visitor"), "tenure.visitor" in request.scope
            of = f" of {who.name if who else 'unknown'!r}" if asked else ", before asking whose it is,"
            sent = (request.method, of, address_of(request), path[:200])
            log.warning("refused %r%s from %r: %r: %s", *sent, refused.reason)
        headers = {"www-authenticate": 'Bearer realm="tenure"'} if refused.status == 401 else {}
        if path.startswith("/api/"):
            return JSONResponse({"error": refused.reason}, refused.status, headers)
        offers = {
            "sign_in": self._signs_in and refused.status == 401,
            "back": refused.status == 404 and path.count("/") == 1,
        }
        context = {"refused": refused, **offers, "namespace": None, "latest": None, "visitor": None}
        page = _environment().get_template("refused.html").render(context)
        return Response(page, refused.status, headers, media_type="text/html")

    async def refused(self, request: Request, error: Exception) -> Response:
        """Return the answer to a request that leads nowhere, or by the wrong method."""
        status = error.status_code if isinstance(error, HTTPException) else 500
        reasons = {404: "there is no such page", 405: "this address takes another method"}
        return self.refusal(request, Refused(status, reasons.get(status, "this did not work")))

    async def failed(self, request: Request, error: Exception) -> Response:
        """Return the answer to a request that Tenure could not serve."""
        status = 404 if isinstance(error, subjects.Unknown) else 400 if isinstance(error, ConfigError) else 503
        return self.refusal(request, Refused(status, str(error) if isinstance(error, TenureError) else ""))


def _state(role: RoleInfo) -> str:
    return "vacant" if role.leader is None else "overdue" if role.overdue else "led"


def _choices(role: RoleInfo, candidates: list[Candidate]) -> list[dict[str, Any]]:
    """Return the candidates, each with what a form calls it: its name, or its id if the name is not the only one."""
    names = [candidate.name for candidate in candidates]
    return [
        {
            "candidate": candidate,
            "leads": role.leader is not None and role.leader.member_id == candidate.member_id,
            "value": candidate.name if names.count(candidate.name) == 1 else candidate.member_id,
        }
        for candidate in candidates
    ]


def _find(request: Request) -> str:
    return request.query_params.get("find", "")[:LONGEST_SEARCH]


def _search(request: Request) -> Callable[..., bool]:
    """Return what says whether one of some texts has what the visitor looks for."""
    wanted = _find(request).casefold()
    return lambda *texts: any(wanted in text.casefold() for text in texts)


def _paged(request: Request, rows: Sequence[Any], size: int = ROWS) -> dict[str, Any]:
    """Return the rows of the page that is asked for, and where the others are."""
    last = max(1, math.ceil(len(rows) / size))
    page = max(1, min(number(request.query_params.get("page"), 1), last))
    others = [(key, value) for key, value in request.query_params.items() if key not in ("page", "done")]
    return {
        "rows": rows[(page - 1) * size : page * size],
        "found": len(rows),
        "page": page,
        "last": last,
        "find": _find(request),
        "page_query": lambda number: "?" + urlencode([*others, ("page", number)]),
    }
