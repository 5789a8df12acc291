"""The handlers of `/v1/graphs`."""

from functools import partial
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from mallee.api.entry.asking import Asking
from mallee.api.entry.middleware import caller_of
from mallee.api.graphs.requests import GraphMaker, GraphRequest, ResultRequest
from mallee.api.graphs.running import GraphRun
from mallee.api.graphs.store import GraphStore
from mallee.api.graphs.wishes import GraphWishes, Wish, graph_name
from mallee.api.jobs import JobMaker
from mallee.api.prompts import PromptReader
from mallee.api.serve import Server, json_response
from mallee.api.sse import EventStream, unless_gone
from mallee.protocol.errors import BadRequest, InternalError, InvalidParameter, MalleeError
from mallee.protocol.ids import Scope
from mallee.runtime.config import HttpSettings

MAX_WHY: Final = 1024  # characters of a tool's error


class GraphHandlers:
    """Runs graphs at the gateway that takes them; any gateway passes on what is asked of one."""

    def __init__(
        self,
        server: Server,
        maker: JobMaker,
        reader: PromptReader,
        asking: Asking,
        *,
        settings: HttpSettings,
    ) -> None:
        self._server = server
        self._asking = asking
        self._check_model = maker.check_model
        self._maker = GraphMaker(
            maker,
            reader,
            n_ctx=server.gateway.context.model.max_model_len,
            fork=settings.max_branches,
        )
        self._store = GraphStore(
            max_running=settings.max_graphs, ttl_s=settings.graph_ttl_s, clock=server.clock
        )
        self._wishes = GraphWishes(
            server, self._store, self._maker, asking, ttl_s=settings.graph_ttl_s
        )

    async def create(self, request: Request) -> Response:
        asked = await self._asking.read(request, GraphRequest)
        self._store.check_room()
        plan = await self._asking.make(request, asked, self._maker.plan)
        name, done = asked.body.resume, None
        if name is not None:
            done = await unless_gone(request.receive, self._wishes.resumed(name, plan))
        bound = self._server.bound_of(plan.budget, plan.scope, plan.terms)
        account = None
        if bound is not None:
            account = await self._server.budgets.begin(bound, plan.budget, 0)
        try:
            self._store.check_room(name)  # others may have come meanwhile
        except MalleeError:
            if account is not None:
                account.close()
            raise
        caller, gateway = caller_of(request), self._server.gateway
        name = graph_name(gateway.requests.new_name(asked.scope)) if name is None else name
        run = GraphRun(
            name,
            plan,
            server=self._server,
            maker=self._maker,
            asking=self._asking,
            visit=caller.visit,
            names_workers=caller.is_operator,
            copy=partial(self._wishes.copy, name, plan.scope),
            done=done,
            bound=bound,
            account=account,
        )
        self._store.add(run)
        self._server.gateway.tasks.spawn(self._work(run))

        async def close() -> None:
            run.cancel()

        if run.events is not None:
            return EventStream(run.events.read(), close, {})
        try:
            await unless_gone(request.receive, run.is_over.wait())
        finally:
            run.cancel()
        if not run.has_ended:
            raise InternalError(f"graph {run.name} came to no end; the log says why")
        return json_response(run.body(names_workers=caller.is_operator))

    async def get(self, request: Request) -> Response:
        wish = Wish("get", caller_of(request).is_operator)
        return await self._answer(request, wish, self._asking.scope(request))

    async def delete(self, request: Request) -> Response:
        return await self._answer(request, Wish("delete"), self._asking.scope(request))

    async def result(self, request: Request) -> Response:
        asked = await self._asking.read(request, ResultRequest)
        body = asked.body
        self._check_model(body.model)
        if (body.output is None) == (body.error is None):
            raise BadRequest("give either output or error", param="output")
        if body.error is not None and not 1 <= len(body.error) <= MAX_WHY:
            raise InvalidParameter("error", body.error, f"give 1 to {MAX_WHY} characters")
        node = request.path_params["node"]
        wish = Wish("result", node=node, output=body.output, error=body.error or "")
        return await self._answer(request, wish, asked.scope)

    async def _work(self, run: GraphRun) -> None:
        try:
            await run.work()
        finally:
            self._store.ended(run)

    async def _answer(self, request: Request, wish: Wish, scope: Scope) -> Response:
        name = request.path_params["graph"]
        raw = await unless_gone(request.receive, self._wishes.run(name, wish, scope))
        return Response(raw, media_type="application/json")
