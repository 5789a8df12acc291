"""The handlers of `/v1/sessions`: a scope's sessions as trees of capsules."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from starlette.requests import Request
from starlette.responses import Response

from mallee.api.branches.accounts import read_budget
from mallee.api.entry.asking import Asking
from mallee.api.entry.middleware import caller_of
from mallee.api.entry.pages import read_paging
from mallee.api.serve import Server, json_response
from mallee.api.sessions.budgets import SessionBudgets
from mallee.api.sessions.names import check_session
from mallee.api.sse import unless_gone
from mallee.gateway.capsules.capsules import CapsuleInfo
from mallee.gateway.sessions.sessions import SessionView
from mallee.protocol.api.sessions import (
    BoundSession,
    Session,
    SessionClosed,
    SessionFork,
    SessionForkRequest,
    SessionList,
    SessionNode,
    SessionRequest,
    SessionTree,
)
from mallee.protocol.errors import InvalidParameter, LookupIncomplete, NotFound
from mallee.protocol.gateways.session_notes import NodeNote
from mallee.protocol.ids import CapsuleId, Scope

Infos: TypeAlias = list[CapsuleInfo | None]

NUM_ASKED: Final = 64  # questions to workers at once, of one request


class SessionHandlers:
    """Lists, shows, bounds, forks and closes sessions. All state is the gateway's, and its budgets'."""

    def __init__(self, server: Server, asking: Asking, *, draw_seed: Callable[[], int]) -> None:
        self._gateway = server.gateway
        self._budgets = SessionBudgets(server.gateway, server.budgets)
        self._asking = asking
        self._draw_seed = draw_seed

    async def list(self, request: Request) -> Response:
        paging, scope = read_paging(request.query_params), self._asking.scope(request)
        found = await self._gateway.sessions.page(scope, paging.after, paging.most)
        return json_response(paging.page(SessionList, [Session(**_body(view)) for view in found]))

    async def put(self, request: Request) -> Response:
        asked = await self._asking.read(request, SessionRequest)
        name, body = _session(request), asked.body
        check_session(name, "session")
        check_session(body.parent, "parent")
        budget = read_budget(body.budget, "budget")
        if budget is None:
            raise InvalidParameter("budget", None, "give tokens, branches or wall_s")
        parent = body.parent if body.parent != name else ""
        giving = self._budgets.give(name, asked.scope, budget, parent, asked.terms.tenant)
        await unless_gone(request.receive, giving)
        view = await self._gateway.sessions.show(name, asked.scope)
        known = _body(view) | {"budget": await self._budgets.body(view, asked.scope)}
        return json_response(BoundSession(**known))

    async def show(self, request: Request) -> Response:
        scope = self._asking.scope(request)
        view = await self._gateway.sessions.show(_session(request), scope)
        names_workers = caller_of(request).is_operator
        infos = await unless_gone(request.receive, self._inspect(view.nodes, scope))
        nodes = [
            _node(node, info, names_workers=names_workers)
            for node, info in zip(view.nodes, infos, strict=True)
        ]
        known = _body(view) | {"budget": await self._budgets.body(view, scope)}
        return json_response(SessionTree(**known, children=[*view.children], nodes=nodes))

    async def fork(self, request: Request) -> Response:
        asked = await self._asking.read(request, SessionForkRequest)
        check_session(asked.body.session, "session")
        new = asked.body.session or f"session_{self._draw_seed():016x}"
        source = _session(request)
        budget = read_budget(asked.body.budget, "budget")
        place = source, asked.scope, new, asked.body.capsule
        if budget is None:
            view = await self._gateway.sessions.fork(*place)
        else:
            view = await unless_gone(request.receive, self._budgets.fork(*place, budget))
        known = _body(view) | {"budget": await self._budgets.body(view, asked.scope)}
        return json_response(SessionFork(**known, capsule=view.nodes[0].capsule))

    async def close(self, request: Request) -> Response:
        session, scope = _session(request), self._asking.scope(request)
        closed = await self._gateway.sessions.close(session, scope)
        for capsule in closed.released:
            caller_of(request).visit.unkeep(capsule)
        return json_response(
            SessionClosed(
                id=session,
                released=len(closed.released),
                left=closed.num_left,
                cancelled=closed.num_cancelled,
            )
        )

    async def _inspect(self, nodes: Sequence[NodeNote], scope: Scope) -> "Infos":
        """The nodes' capsules as their workers tell; None: it is gone, or no worker is known to have it."""
        turns = asyncio.Semaphore(NUM_ASKED)

        async def ask(node: NodeNote) -> CapsuleInfo | None:
            async with turns:
                try:
                    return await self._gateway.capsules.inspect(CapsuleId(node.capsule), scope)
                except (NotFound, LookupIncomplete):  # a gateway that has just begun knows few
                    return None

        return await asyncio.gather(*map(ask, nodes))


def _session(request: Request) -> str:
    name: str = request.path_params["session"]
    return name


def _body(view: SessionView) -> dict[str, Any]:
    """The fields of a `Session`."""
    return {
        "id": view.name,
        "parent": view.parent or None,
        "created": int(view.created),
        "last_used": int(view.used),
        "capsules": view.num_capsules,
        "running": view.num_running,
    }


def _node(node: NodeNote, info: CapsuleInfo | None, *, names_workers: bool) -> SessionNode:
    status = None if info is None else info.status
    known: dict[str, Any] = {}
    if status is not None:
        known = {"pinned": status.is_pinned, "tier": status.tier}
    return SessionNode(
        capsule=node.capsule,
        parent=node.parent or None,
        request=node.request,
        tokens=node.tokens,
        created=int(node.created),
        is_root=node.is_root,
        held=info is not None and info.worker is not None,
        worker=info.worker if info is not None and names_workers else None,
        **known,
    )
