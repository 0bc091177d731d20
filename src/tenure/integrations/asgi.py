"""Tenure in FastAPI, Starlette and any other ASGI application.

    node = tenure.AsyncNode()
    app = FastAPI(lifespan=tenure_lifespan(node))             starts and closes the node with the server
    term: Annotated[AsyncTerm, Depends(term_of(node, "r"))]   the term, or 503 with the leader's name
    Mount("/jobs", routes, middleware=[Middleware(LeaderOnly, node=node, role="r")])
    app.mount("/health", health(node, "r"))                   /healthz, /readyz, /leader

A request only compares the node's term with the clock (``is_leader``), without the database. The name of another leader
is the last that this node has learned: it learns the name with every renewal, and at once if the database can notify.
Only if it has learned no name yet does it ask the database, once in 30 s and for at most 1 s. As soon as the node is
started, it stands for the roles that these calls name.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import anyio

from tenure import AsyncNode, ConfigError, Elected, Event, LeaderChanged, Node, NodeClosed, TenureError
from tenure.aio.bridge import run_in_thread
from tenure.base.clock import now
from tenure.base.durations import duration
from tenure.integrations import extra
from tenure.services.service import ServiceState
from tenure.settings import check_lock_id, check_name, check_seconds

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
REFUSAL_HEADERS = {**HEADERS, "retry-after": "1"}
TRY_AGAIN_LATER = 1013
"""The close code of a WebSocket that another replica should serve."""
ASK_WITHIN_S = 1.0
"""How long a request for the leader's name may wait for the database."""
ASK_AGAIN_S = 30.0
"""How long after that such requests are answered without asking the database again."""
STAYS_S = 2.0
"""How long a lingering leader must see another candidate before it leaves. A candidate that is also being shut down
disappears within this time."""
LOOK_EVERY_S = 0.1


class RoleView:
    """A role, for a web server: whether this node leads, or which other node does, without asking the database.

    The node does not stand for the role at first, since it may not be running yet.
    """

    def __init__(self, node: AsyncNode | Node, role: str) -> None:
        self.node = node
        self.role = role
        self.lock_id: int | None = None
        self.election: Any = None
        """None until the node was started."""
        self._last: tuple[int, str | None] = (0, None)
        """The latest known token, and the name of its leader."""
        self._ask_at = 0.0

    def stand(self) -> None:
        """Stand for the role, if the node is running."""
        if self.election is None:
            with contextlib.suppress(NodeClosed):
                election = self.node.election(self.role, lock_id=self.lock_id)
                election.on_event(self._happened)
                self.election = election

    @property
    def term(self) -> Any:
        """The term that this node holds and that is valid now; else None."""
        self.stand()
        return self.election.term if self.election is not None else None

    async def leader(self) -> str | None:
        """Return the name of the leader that this node last learned of; None if it has learned none, or leads."""
        if self._last[0] == 0 and self.election is not None and now() >= self._ask_at:
            self._ask_at = now() + ASK_AGAIN_S
            with anyio.move_on_after(ASK_WITHIN_S), contextlib.suppress(TenureError):
                info = await _call(self.election.leader)
                if info is not None:
                    self._learn(info.token, info.name)
        return self._last[1]

    def _happened(self, event: Event) -> None:
        if isinstance(event, LeaderChanged):
            self._learn(event.token, event.name if event.member_id != self.node.member_id else None)
        elif isinstance(event, Elected):
            # This object asks for the name only when its node no longer leads.
            self._learn(event.token, None)

    def _learn(self, token: int, name: str | None) -> None:
        if token >= self._last[0]:
            self._last = (token, name)


_views: weakref.WeakValueDictionary[tuple[int, str], RoleView] = weakref.WeakValueDictionary()
"""The views in use, by the id of their node and by role. A view holds its node, so the id stays valid."""


def _view(node: AsyncNode | Node, role: str, lock_id: int | str | None = None) -> RoleView:
    if not isinstance(node, (AsyncNode, Node)):
        raise ConfigError(f"node must be a tenure.AsyncNode or a tenure.Node, not {type(node).__name__}")
    role = check_name("role", role)
    view = _views.setdefault((id(node), role), RoleView(node, role))
    if lock_id is not None:
        number = check_lock_id(lock_id)
        if view.lock_id not in (None, number):
            raise ConfigError(f"role {role!r} already has lock_id={view.lock_id} here: give that, not {lock_id}")
        view.lock_id = number
    return view


# The lifespan ------------------------------------------------------------------------------------------------------


def tenure_lifespan(node: AsyncNode | Node, lifespan: Lifespan | None = None, *, linger: float = 0.0) -> Lifespan:
    """Return a lifespan that starts the node, and closes it when the server shuts down.

    A node with ``start="raise"`` that cannot reach its database keeps the server from starting. With ``start="wait"``
    the server starts all the same, and the node joins when the database can be reached.

    Args:
        node: a node that was not started.
        lifespan: your own lifespan, which encloses this one: the node's services can use what it opens, and end before
            it ends. The state that it yields is passed on.
        linger: for how many seconds a leader that is being shut down goes on leading while its roles have no other
            candidate. For servers that end the old workers before the new ones have started (gunicorn on SIGHUP).
    """
    patience = check_seconds("linger", linger) if linger else 0.0

    @contextlib.asynccontextmanager
    async def with_node(app: Any) -> AsyncIterator[Any]:
        outer = lifespan(app) if lifespan is not None else contextlib.nullcontext()
        async with outer as state, contextlib.AsyncExitStack() as stack:
            if node.waits:
                tasks = await stack.enter_async_context(anyio.create_task_group())
                tasks.start_soon(_start_in_background, node)
            else:
                await _start(node)
            try:
                yield state
            finally:
                with anyio.CancelScope(shield=True):
                    await _linger(node, patience)
                    await (node.close() if isinstance(node, AsyncNode) else run_in_thread(node.close))

    return with_node


async def _start(node: AsyncNode | Node) -> None:
    await _call(node.start)
    for view in list(_views.values()):
        if view.node is node:
            view.stand()


async def _start_in_background(node: AsyncNode | Node) -> None:
    """Start when the database can be reached. The server is already running, so a failure can only be logged."""
    try:
        await _start(node)
    except NodeClosed:
        pass
    except TenureError:
        log.exception("node %s cannot start, so this replica never leads, and /readyz answers 503", node.name)


async def _linger(node: AsyncNode | Node, patience: float) -> None:
    """Go on leading until the same roles have had another candidate for a while."""
    seen_since: dict[str, float] = {}
    with anyio.move_on_after(patience), contextlib.suppress(TenureError):
        while patience and (leads := [role.role for role in node.stats().roles if role.is_leader]):
            others = set.intersection(*[await _others(node, role) for role in leads])
            seen_since = {member_id: seen_since.get(member_id, now()) for member_id in others}
            if any(now() - since >= STAYS_S for since in seen_since.values()):
                return
            await anyio.sleep(LOOK_EVERY_S)


async def _others(node: AsyncNode | Node, role: str) -> set[str]:
    candidates = await _call(node.election(role).candidates)
    return {candidate.member_id for candidate in candidates} - {node.member_id}


async def _call(function: Callable[[], Any]) -> Any:
    """Call a method of an AsyncNode here, or a method of a Node in a thread."""
    if inspect.iscoroutinefunction(function):
        return await function()
    return await run_in_thread(function, abandon=True)


# Requests that only the leader serves ------------------------------------------------------------------------------


def term_of(node: AsyncNode | Node, role: str, *, lock_id: int | str | None = None) -> Callable[[], Awaitable[Any]]:
    """Return a dependency that gives the term under which this node leads ``role``.

    Use it with FastAPI's ``Depends``, at a parameter or in ``dependencies=`` of a route, router or application. If the
    node does not lead, the answer to the request is 503, with the leader's name in its JSON. The term is valid when the
    request begins. Only the fence can tell whether it is still valid when you write. ``lock_id`` is that of
    ``node.election()``.
    """
    view = _view(node, role, lock_id)

    async def term() -> Any:
        held = view.term
        if held is None:
            detail = await _refusal(view)
            raise HTTPException(503, detail, headers=REFUSAL_HEADERS)  # type: ignore[arg-type]
        return held

    return term


class LeaderOnly:
    """Passes requests on to ``app`` while this node leads ``role``; otherwise answers them with 503.

    ASGI middleware: around any application, or as Starlette's ``Middleware(LeaderOnly, node=node, role="scheduler")``
    on a Route, a Mount, a Router or the whole application. WebSockets are refused as well.
    """

    def __init__(self, app: ASGIApp, node: AsyncNode | Node, role: str, *, lock_id: int | str | None = None) -> None:
        self._app = app
        self._view = _view(node, role, lock_id)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on while this node leads the role; otherwise refuse it."""
        if scope["type"] not in ("http", "websocket") or self._view.term is not None:
            await self._app(scope, receive, send)
            return
        if scope["type"] == "websocket" and "websocket.http.response" not in scope.get("extensions", {}):
            await WebSocket(scope, receive, send).close(TRY_AGAIN_LATER)
            return
        body = {"detail": await _refusal(self._view)}
        await JSONResponse(body, 503, REFUSAL_HEADERS)(scope, receive, send)


async def _refusal(view: RoleView) -> dict[str, Any]:
    error = f"this replica does not lead {view.role!r}"
    if view.election is None:
        error = "the node of this replica is not running: start it in the lifespan, with tenure_lifespan(node)"
    return {"error": error, "role": view.role, "node": view.node.name, "leader": await view.leader()}


# What load balancers and orchestrators ask -------------------------------------------------------------------------


def health(node: AsyncNode | Node, *roles: str) -> Starlette:
    """Return a small application that reports the state of this node, in JSON.

    ``roles`` are the roles that ``/leader`` reports; by default those of the node's services.

    ``/healthz`` is 503 if a restart of the process would help: the node was closed, or a service does not stop.

    ``/readyz`` is 200 on leader and followers alike. It is 503 before the node has joined, when its lease has not been
    renewed for longer than the TTL (the database cannot be reached from here), and while a service that should run
    everywhere is not running.

    ``/leader`` is 200 on the leader of the role and 503 on the others; for several roles use ``/leader?role=NAME``.
    """
    answers = _Health(node, roles)
    paths = {"/healthz": answers.healthz, "/readyz": answers.readyz, "/leader": answers.leader}
    return Starlette(routes=[Route(path, answer) for path, answer in paths.items()])


class _Health:
    def __init__(self, node: AsyncNode | Node, roles: tuple[str, ...]) -> None:
        self._node = node
        self._views = {view.role: view for view in [_view(node, role) for role in roles]}
        self._given = [*self._views]
        self._joined = False

    async def healthz(self, _: Request) -> JSONResponse:
        renewed_ago = self._renewed_ago()
        stuck = [
            f"service {info.name} does not stop" for info in self._node.services() if info.state == ServiceState.STUCK
        ]
        closed = ["the node was closed"] if self._joined and renewed_ago is None else []
        return self._answer(*closed, *stuck)

    async def readyz(self, _: Request) -> JSONResponse:
        renewed_ago = self._renewed_ago()
        problems = []
        if renewed_ago is None:
            problems.append("the node is not running")
        elif not self._joined:
            problems.append("the node has not joined yet")
        elif renewed_ago > self._node.ttl:
            problems.append(f"the lease was last renewed {duration(renewed_ago)} ago")
        services = [info for info in self._node.services() if info.role is None and info.state != ServiceState.RUNNING]
        return self._answer(*problems, *(f"service {info.name}: {info.state}" for info in services))

    def _renewed_ago(self) -> float | None:
        """Return how old the lease is; None if the node is not running in this process (any more)."""
        self._joined = self._joined or self._node.member_id is not None
        with contextlib.suppress(NodeClosed):
            return self._node.stats().renewed_ago
        return None

    def _answer(self, *problems: str) -> JSONResponse:
        return _json({"ok": not problems, "node": self._node.name, "problems": problems}, ok=not problems)

    async def leader(self, request: Request) -> JSONResponse:
        roles = self._given or sorted({info.role for info in self._node.services() if info.role is not None})
        role = request.query_params.get("role", roles[0] if len(roles) == 1 else None)
        if role not in roles:
            problem = f"no role {role!r} is reported here" if role is not None else "ask for a role: /leader?role=NAME"
            if not roles:
                problem = "no roles are reported here: name them, as in health(node, 'scheduler', …)"
            return _json({"error": problem, "roles": roles}, ok=False, status=400 if role is None else 404)
        view = self._views.setdefault(role, _view(self._node, role))
        term = view.term
        answer = {
            "role": role,
            "node": self._node.name,
            "is_leader": term is not None,
            "token": None if term is None else term.token,
            "leader": self._node.name if term is not None else await view.leader(),
        }
        return _json(answer, ok=term is not None)


def _json(answer: Mapping[str, Any], *, ok: bool, status: int = 503) -> JSONResponse:
    return JSONResponse(dict(answer), 200 if ok else status, HEADERS)
