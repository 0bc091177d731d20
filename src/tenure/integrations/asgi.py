"""Tenure in FastAPI, Starlette and any other ASGI application.

    node = tenure.AsyncNode()
    app = FastAPI(lifespan=tenure_lifespan(node))             starts and closes the node with the server
    term: Annotated[AsyncTerm, Depends(term_of(node, "r"))]   the term, or 503 with the leader's name
    Mount("/jobs", routes, middleware=[Middleware(LeaderOnly, node=node, role="r")])
    app.mount("/tenure", health(node, "r"))                   /healthz, /readyz, /leader

Whether this node leads is read off the clock (``is_leader``) for every request. Who else leads is what this node last
heard: with every renewal, and at once where the database can notify. Only where it has heard nothing yet is the
database asked, once in 30 s and for 1 s at most. A node stands for the roles that are asked about here, from its start
on.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import anyio

from tenure.async_node import AsyncNode
from tenure.clock import now
from tenure.errors import ConfigError, NodeClosed, TenureError
from tenure.events import Elected, Event, LeaderChanged
from tenure.integrations import extra
from tenure.loops import run
from tenure.node import BaseNode, Node
from tenure.settings import check_name, check_timeout

with extra("asgi"):
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route
    from starlette.types import ASGIApp, Receive, Scope, Send
    from starlette.websockets import WebSocket

log = logging.getLogger("tenure.asgi")

__all__ = ["LeaderOnly", "health", "tenure_lifespan", "term_of"]

Lifespan = Callable[[Any], contextlib.AbstractAsyncContextManager[Any]]

HEADERS = {"cache-control": "no-store"}
RETRY_AFTER_S = 1
TRY_AGAIN_LATER = 1013
"""The code with which a WebSocket is closed that another replica should have got."""
ASK_WITHIN_S = 1.0
ASK_AGAIN_S = 30.0
"""Who leads is asked of the database only if no event has told it yet: that long, and no more often than that."""
STAYS_S = 2.0
"""How long a leader that lingers must have seen another candidate before it goes: who is shut down as well leaves."""
LOOK_EVERY_S = 0.1


class Office:
    """A role, as a web server needs it: whether this node leads, and who else does, without asking the database."""

    def __init__(self, node: BaseNode[Any], role: str) -> None:
        """Begin without standing: the node may not run yet."""
        self.node = node
        self.role = role
        self._election: Any = None
        self._last: tuple[int, str | None] = (0, None)
        """The token last heard of, and the name of its holder."""
        self._ask_at = 0.0

    def stand(self) -> None:
        """Stand for the role, if the node runs."""
        if self._election is None:
            with contextlib.suppress(NodeClosed):
                election = self.node.election(self.role)
                election.on_event(self._happened)
                self._election = election

    @property
    def runs(self) -> bool:
        """Whether the node was ever started."""
        return self._election is not None

    @property
    def term(self) -> Any:
        """The term that this node holds and that is valid now; else None."""
        self.stand()
        return self._election.term if self._election is not None else None

    async def leader(self) -> str | None:
        """Return the name of whoever leads, as this node last heard of it; None if that is nobody."""
        if self._last[0] == 0 and self._election is not None and now() >= self._ask_at:
            self._ask_at = now() + ASK_AGAIN_S
            with anyio.move_on_after(ASK_WITHIN_S), contextlib.suppress(TenureError):
                info = await _call(self._election.leader)
                if info is not None:
                    self._heard(info.token, info.name)
        return self._last[1]

    def _happened(self, event: Event) -> None:
        if isinstance(event, LeaderChanged):
            self._heard(event.token, event.name if event.member_id != self.node.member_id else None)
        elif isinstance(event, Elected):
            self._heard(event.token, None)  # asked for where this node does not lead: then nobody is known to

    def _heard(self, token: int, name: str | None) -> None:
        if token >= self._last[0]:
            self._last = (token, name)


def _offices(node: BaseNode[Any]) -> dict[str, Office]:
    """Return the roles of this node that somebody asks about here; kept with it, so that they go with it."""
    offices: dict[str, Office] = vars(node).setdefault("asgi_offices", {})
    return offices


def _office(node: BaseNode[Any], role: str) -> Office:
    if not isinstance(node, BaseNode):
        raise ConfigError(f"node must be a tenure.AsyncNode or a tenure.Node, not {type(node).__name__}")
    role = check_name("role", role)
    return _offices(node).setdefault(role, Office(node, role))


# The lifespan ------------------------------------------------------------------------------------------------------


def tenure_lifespan(node: AsyncNode | Node, lifespan: Lifespan | None = None, *, linger: float = 0.0) -> Lifespan:
    """Return a lifespan that starts the node, and closes it when the server shuts down.

    A node with ``start="raise"`` that cannot reach its database keeps the server from starting. One with
    ``start="wait"`` does not: the server serves, and the node joins when the database is there.

    Args:
        node: a node that was not started.
        lifespan: yours, around it: what it opens is there for the node's services, and closed after them. What it
            yields is yielded.
        linger: seconds for which a leader that is shut down stays in office if nobody else stands for its roles. For
            servers that end the old workers before the new ones are there (gunicorn on SIGHUP).
    """
    patience = check_timeout(linger) or 0.0
    outer = lifespan if lifespan is not None else _nothing

    @contextlib.asynccontextmanager
    async def with_node(app: Any) -> AsyncIterator[Any]:
        async with outer(app) as state, contextlib.AsyncExitStack() as stack:
            if node.waits:
                tasks = await stack.enter_async_context(anyio.create_task_group())
                tasks.start_soon(_start_some_time, node)
            else:
                await _start(node)
            try:
                yield state
            finally:
                with anyio.CancelScope(shield=True):
                    await _linger(node, patience)
                    await (node.close() if isinstance(node, AsyncNode) else run(node.close))

    return with_node


@contextlib.asynccontextmanager
async def _nothing(_: object) -> AsyncIterator[None]:
    yield


async def _start(node: BaseNode[Any]) -> None:
    await _call(node.start)  # type: ignore[attr-defined]
    for office in _offices(node).values():
        office.stand()


async def _start_some_time(node: BaseNode[Any]) -> None:
    """Start when the database is there. The server serves already, so it can only be told that this failed."""
    try:
        await _start(node)
    except NodeClosed:
        pass
    except TenureError:
        log.exception("node %s: not started, so this replica never leads; /readyz says so", node.name)


async def _linger(node: BaseNode[Any], patience: float) -> None:
    """Lead on until somebody else who stands for the same roles is here to stay."""
    beside: dict[str, float] = {}
    with anyio.move_on_after(patience), contextlib.suppress(TenureError):
        while patience and (leads := [one.role for one in node.stats().roles if one.is_leader]):
            others = [await _others(node, role) for role in leads]
            here = set.intersection(*others)
            beside = {member_id: beside.get(member_id, now()) for member_id in here}
            if any(now() - since >= STAYS_S for since in beside.values()):
                return
            await anyio.sleep(LOOK_EVERY_S)


async def _others(node: BaseNode[Any], role: str) -> set[str]:
    candidates = await _call(node.election(role).candidates)
    return {candidate.member_id for candidate in candidates} - {node.member_id}


async def _call(function: Callable[[], Any]) -> Any:
    """Call a method of either facade: a coroutine function here, a plain one in a thread of its own."""
    if inspect.iscoroutinefunction(function):
        return await function()
    return await run(function, abandon=True)


# Requests that only the leader answers -----------------------------------------------------------------------------


def term_of(node: AsyncNode | Node, role: str) -> Callable[[], Awaitable[Any]]:
    """Return a dependency that gives the term under which this node leads ``role``.

    Where it does not lead, the answer to the request is 503, with the leader's name in its JSON. For ``Depends`` of
    FastAPI, at a parameter or in ``dependencies=`` of a route, router or application. The term is valid when the
    request begins; whether it is when you write, the fence knows.
    """
    office = _office(node, role)

    async def term() -> Any:
        """Give the term, or answer with 503."""
        held = office.term
        if held is None:
            detail = await _refusal(office)
            raise HTTPException(503, detail, headers={**HEADERS, "retry-after": str(RETRY_AFTER_S)})  # type: ignore[arg-type]
        return held

    return term


class LeaderOnly:
    """Lets requests through to ``app`` while this node leads ``role``; answers them with 503 else.

    ASGI middleware: around any application, or as Starlette's ``Middleware(LeaderOnly, node=node, role="scheduler")``
    on a Route, a Mount, a Router or the whole application. WebSockets are refused as well.
    """

    def __init__(self, app: ASGIApp, node: AsyncNode | Node, role: str) -> None:
        """Guard ``app``."""
        self._app = app
        self._office = _office(node, role)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] not in ("http", "websocket") or self._office.term is not None:
            await self._app(scope, receive, send)
            return
        if scope["type"] == "websocket" and "websocket.http.response" not in scope.get("extensions", {}):
            await WebSocket(scope, receive, send).close(TRY_AGAIN_LATER)
            return
        body = {"detail": await _refusal(self._office)}
        headers = {**HEADERS, "retry-after": str(RETRY_AFTER_S)}
        await JSONResponse(body, 503, headers)(scope, receive, send)


async def _refusal(office: Office) -> dict[str, Any]:
    error = f"this replica does not lead {office.role!r}"
    if not office.runs:
        error = "the node of this replica does not run: is it started by the application's lifespan?"
    return {"error": error, "role": office.role, "node": office.node.name, "leader": await office.leader()}


# What load balancers and orchestrators ask -------------------------------------------------------------------------


def health(node: AsyncNode | Node, *roles: str) -> Starlette:
    """Return a small application that says how this node is, in JSON. Without ``roles``: those of the node's services.

    ``/healthz`` is 503 if a restart of the process would help: the node was closed, or a service will not stop.

    ``/readyz`` is 200 on leader and followers alike. It is 503 before the node has joined, when its lease has not been
    renewed for longer than the TTL (the database cannot be reached from here), and while a service that belongs
    everywhere does not run.

    ``/leader`` is 200 on the leader of the role and 503 on the others; with several roles ``/leader?role=NAME``.
    """
    return _Health(node, roles).application()


class _Health:
    def __init__(self, node: AsyncNode | Node, roles: tuple[str, ...]) -> None:
        self._node = node
        self._given = [_office(node, role).role for role in roles]
        self._joined = False

    def application(self) -> Starlette:
        paths: dict[str, Callable[[Request], Awaitable[JSONResponse]]] = {
            "/healthz": self._healthz,
            "/readyz": self._readyz,
            "/leader": self._leader,
        }
        return Starlette(routes=[Route(path, answer) for path, answer in paths.items()])

    async def _healthz(self, _: Request) -> JSONResponse:
        renewed_ago = self._renewed_ago()
        stuck = [f"service {info.name} does not stop" for info in self._node.services() if info.state == "stuck"]
        closed = ["the node was closed"] if self._joined and renewed_ago is None else []
        return self._answer(*closed, *stuck)

    async def _readyz(self, _: Request) -> JSONResponse:
        renewed_ago = self._renewed_ago()
        problems = []
        if renewed_ago is None:
            problems.append("the node does not run")
        elif not self._joined:
            problems.append("the node has not joined yet")
        elif renewed_ago > self._node.ttl:
            problems.append(f"the lease was last renewed {renewed_ago:.1f} s ago")
        services = [info for info in self._node.services() if info.role is None and info.state != "running"]
        return self._answer(*problems, *(f"service {info.name}: {info.state}" for info in services))

    def _renewed_ago(self) -> float | None:
        """Return how old the lease is; None if the node does not run here: not yet, no more, or in another process."""
        self._joined = self._joined or self._node.member_id is not None
        with contextlib.suppress(NodeClosed):
            return self._node.stats().renewed_ago
        return None

    def _answer(self, *problems: str) -> JSONResponse:
        return _json({"ok": not problems, "node": self._node.name, "problems": problems}, ok=not problems)

    async def _leader(self, request: Request) -> JSONResponse:
        roles = self._given or sorted({info.role for info in self._node.services() if info.role is not None})
        role = request.query_params.get("role", roles[0] if len(roles) == 1 else None)
        if role not in roles:
            problem = f"no role {role!r} here" if role is not None else "which role? say /leader?role=NAME"
            if not roles:
                problem = "no role is known here: name them in health(node, 'scheduler', …)"
            return _json({"error": problem, "roles": roles}, ok=False, status=400 if role is None else 404)
        office = _office(self._node, role)
        term = office.term
        answer: Mapping[str, Any] = {
            "role": role,
            "node": self._node.name,
            "is_leader": term is not None,
            "token": None if term is None else term.token,
            "leader": self._node.name if term is not None else await office.leader(),
        }
        return _json(answer, ok=term is not None)


def _json(answer: Mapping[str, Any], *, ok: bool, status: int = 503) -> JSONResponse:
    return JSONResponse(dict(answer), 200 if ok else status, HEADERS)
