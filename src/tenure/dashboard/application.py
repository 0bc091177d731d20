"""The ASGI application: which request is answered by what, and what every answer carries."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from urllib.parse import parse_qsl, urlencode

import anyio
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from tenure import ConfigError, TenureError
from tenure.base.tracebacks import without_locals
from tenure.dashboard import access as rights
from tenure.dashboard.access import AccessFunction, Refused, User, Users, Visitor
from tenure.dashboard.actions import VERBS, Action, Actions
from tenure.dashboard.api import Api
from tenure.dashboard.pages import Pages, static_file
from tenure.dashboard.snapshot import Reader
from tenure.dashboard.source import Source
from tenure.dashboard.threads import Busy, Threads
from tenure.settings import Password

log = logging.getLogger("tenure.dashboard")

LARGEST_FORM = 8 * 1024
FORM_WITHIN_S = 5.0
"""How long a client may take to send a form."""
SENT_WITHIN_S = 30.0
"""How long a client may take to receive an answer."""

HEADERS = {
    # Nothing from elsewhere, no script or style but our own files, no frame around us, no form that leads away.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "x-frame-options": "DENY",
    "x-content-type-options": "nosniff",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    # Not `no-referrer`: with it, browsers send `Origin: null` with our own forms.
    "referrer-policy": "same-origin",
    "cache-control": "no-store",
}


@without_locals
def dashboard(
    url: str | None = None,
    *,
    namespace: str | None = None,
    schema: str = "tenure",
    password: Password | None = None,
    access: AccessFunction | None = None,
    users: Iterable[User] | None = None,
) -> Dashboard:
    """Return an ASGI application that shows a namespace, to be mounted in yours.

    It connects when a request arrives, and reads at most once a second, however many requests arrive.

    Args:
        url: the database, as for a node.
        namespace: as for a node.
        schema: as for a node.
        password: as for a node.
        access: called with Starlette's ``Request``, in a thread unless it is a coroutine function. It returns None to
            refuse, ``"view"``, ``"operate"``, or one of these and the visitor's name, as ``("operate", "alice")``.
        users: who may use the dashboard; each signs in with a token.

    Without ``access`` and ``users``, it answers requests of this machine only, and permits no actions. A request that
    was passed on by a proxy does not count as one of this machine.
    """
    if access is not None and users is not None:
        raise ConfigError("access= and users= exclude each other: give one of them")
    source = Source(url, namespace, schema, password)
    return Dashboard(source, access or rights.only_this_machine, None if users is None else Users(users))


class Dashboard:
    """An ASGI application. :func:`dashboard` returns one."""

    def __init__(self, source: Source, access: AccessFunction, users: Users | None = None) -> None:
        self._access = access if users is None else users.access
        self._users = users
        self._asking = Threads("too many requests wait to be let in: try again")
        self._acting = Threads("too many actions are under way: nothing was done, try again")
        self._reader = Reader(source.registry)
        self._actions = Actions(source.registry)
        self._pages = Pages(source, self._reader, self._actions, signs_in=users is not None)
        api = Api(source, self._reader)
        self._application = Starlette(
            routes=[
                *(Route(f"/{name}", page) for name, page in self._pages.routes.items()),
                *(Route(f"/api/{name}", answer) for name, answer in api.routes.items()),
                Route("/static/{name}", static_file),
                Route("/act", self._act, methods=["POST"]),
                Route("/sign-in", self._sign_in, methods=["POST"]),
                Route("/sign-out", self._sign_out, methods=["POST"]),
            ],
            middleware=[Middleware(GZipMiddleware, minimum_size=600, compresslevel=6)],
            exception_handlers={TenureError: self._pages.failed, 404: self._pages.refused, 405: self._pages.refused},
        )
        # A redirect would make an absolute URL from the Host header.
        self._application.router.redirect_slashes = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request if the dashboard permits it; otherwise refuse it."""
        if scope["type"] == "lifespan":
            await self._application(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await self._http(scope, receive, _with_headers(send))

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        refused = rights.malformed(request) or rights.foreign(request)
        if refused is None:
            try:
                scope["tenure.visitor"] = await rights.visitor(self._access, request, self._asking)
                refused = self._not_permitted(request, scope["tenure.visitor"])
            except Busy as error:
                refused = Refused(503, str(error))
        if refused is None:
            await self._application(scope, receive, send)
        else:
            await self._pages.refusal(request, refused)(scope, receive, send)

    def _not_permitted(self, request: Request, visitor: Visitor | None) -> Refused | None:
        """Refuse who may not see anything, but for what the page needs on which users sign in."""
        if visitor is not None:
            return None
        if self._users is None:
            if self._access is rights.only_this_machine:
                return Refused(403, rights.ONLY_THIS_MACHINE)
            return Refused(403, "you may not see this dashboard")
        path = rights.path_below(request.scope)
        if path.startswith("/static/") or path == "/sign-in":
            return None
        return Refused(401, "sign in with your token")

    async def _act(self, request: Request) -> Response:
        visitor = request.scope["tenure.visitor"]
        form = await _form(request)
        verb = VERBS.get(form.get("what", ""))
        complete = verb is not None and all(form.get(field) for field in verb.fields)
        if not visitor.operates:
            asked = verb.describe(form) if verb is not None and complete else "a form that is not complete"
            log.warning("%r may only view, and asked through the dashboard: %s", visitor.name, asked)
            return self._pages.refusal(request, Refused(403, "you may look, and not operate"))
        if not complete:
            return self._pages.refusal(request, Refused(400, "the form is not complete"))
        action = await self._acting.run(lambda: self._perform(visitor, form))
        after = {"name": form["role"]} if form["what"] == "hand-over" else {"role": form["role"], "job": form["job"]}
        page = "role" if form["what"] == "hand-over" else "jobs"
        return RedirectResponse(f"{page}?{urlencode({**after, 'done': action.id})}", 303)

    def _perform(self, visitor: Visitor, form: Mapping[str, str]) -> Action:
        action = self._actions.perform(visitor.name, form)
        self._reader.read_again()
        return action

    async def _sign_in(self, request: Request) -> Response:
        if self._users is None:
            return self._pages.refusal(request, Refused(404, "there is no such page"))
        token = (await _form(request)).get("token", "").strip()
        user = self._users.of_token(token)
        if user is None:
            return self._pages.refusal(request, Refused(401, "no user has this token"))
        log.info("%r signs in to the dashboard from %r", user.name, rights.address_of(request))
        answer = RedirectResponse("./", 303)
        # Without a path the cookie is for the directory that this dashboard is mounted on, whatever a proxy calls it.
        # The scheme of the request is the one of a proxy, if there is one; the browser's own is in its Origin.
        safe = request.headers["origin"].lower().startswith("https:")
        answer.set_cookie(
            rights.COOKIE, self._users.cookie(user), path=None, secure=safe, httponly=True, samesite="strict"
        )
        return answer

    async def _sign_out(self, _: Request) -> Response:
        answer = RedirectResponse("./", 303)
        answer.set_cookie(rights.COOKIE, "", max_age=0, path=None, httponly=True, samesite="strict")
        return answer


def _with_headers(send: Send) -> Send:
    """Add what every answer carries; give up on a client that does not receive it."""
    headers = [(name.encode(), value.encode()) for name, value in HEADERS.items()]

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            given = {name.lower() for name, _ in message["headers"]}
            message["headers"] = [*message["headers"], *(pair for pair in headers if pair[0] not in given)]
        with anyio.fail_after(SENT_WITHIN_S):
            await send(message)

    return sending


async def _form(request: Request) -> dict[str, str]:
    """Return the fields of a form; an empty dict if it is too large, too slow, or no form, or has many fields."""
    body = b""
    try:
        with anyio.fail_after(FORM_WITHIN_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > LARGEST_FORM:
                    return {}
    except (TimeoutError, ClientDisconnect):
        return {}
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/x-www-form-urlencoded":
        return {}
    try:
        return dict(parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True, max_num_fields=20))
    except ValueError:
        return {}
