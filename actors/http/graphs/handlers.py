"""The handlers of `/v1/graphs`."""

from typing import Any, Final, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from mallee.actors.config import HttpSettings
from mallee.actors.http.entry.asking import Asking
from mallee.actors.http.entry.middleware import caller_of
from mallee.actors.http.graphs.requests import GraphMaker, GraphRequest, ResultRequest
from mallee.actors.http.graphs.running import GraphRun
from mallee.actors.http.graphs.store import GraphStore
from mallee.actors.http.jobs import JobMaker
from mallee.actors.http.prompts import PromptReader
from mallee.actors.http.serve import Server, json_response
from mallee.actors.http.sse import EventStream, unless_gone
from mallee.graphs.run import Output
from mallee.protocol.codec import Decoder, encode
from mallee.protocol.errors import (
    BadRequest,
    InternalError,
    InvalidParameter,
    MalleeError,
    ToolFailed,
    Unavailable,
    UnknownGraph,
    from_wire,
)
from mallee.protocol.ids import RequestId, Scope

ID_PREFIX: Final = "graph_"
_REQUEST_PREFIX: Final = "req_"
_VERB: Final = "graph.verb"
WAIT_S: Final = 5.0  # for another gateway
MAX_WHY: Final = 1024  # characters of a tool's error
MAX_NBYTES: Final = 900 << 10  # between gateways: a broker takes 1 MiB at once


class _Verb(msgspec.Struct, frozen=True, array_like=True):
    """A wish for a graph. `node`, `output`, `error` are of a result; `names_workers` of a look."""

    kind: Literal["get", "delete", "result"]
    names_workers: bool = False
    node: str = ""
    output: str | list[str] | None = None
    error: str = ""


class _Outcome(msgspec.Struct, frozen=True, array_like=True):
    """The body of the answer, or an error."""

    body: bytes = b""
    error: tuple[str, str, dict[str, Any]] | None = None


_decode_verb: Final = Decoder(_Verb, "a wish for a graph")
_decode_outcome: Final = Decoder(_Outcome, "what became of a wish for a graph")


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
            n_ctx=server.service.model.max_model_len,
            fork=settings.max_branches,
        )
        self._store = GraphStore(
            max_running=settings.max_graphs, ttl_s=settings.graph_ttl_s, clock=server.clock
        )
        server.service.records.share(_VERB, self._tell)

    async def create(self, request: Request) -> Response:
        asked = await self._asking.read(request, GraphRequest)
        self._store.check_room()
        plan = await self._asking.make(request, asked, self._maker.plan)
        bound = self._server.bound_of(plan.budget, plan.scope, plan.terms)
        account = None
        if bound is not None:
            account = await self._server.budgets.begin(bound, plan.budget, 0)
        try:
            self._store.check_room()  # others may have come meanwhile
        except MalleeError:
            if account is not None:
                account.close()
            raise
        caller, service = caller_of(request), self._server.service
        run = GraphRun(
            _graph_name(service.new_name(asked.scope)),
            plan,
            server=self._server,
            maker=self._maker,
            asking=self._asking,
            visit=caller.visit,
            names_workers=caller.is_operator,
            bound=bound,
            account=account,
        )
        self._store.add(run)
        self._server.tasks.spawn(self._work(run))

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
        verb = _Verb("get", caller_of(request).is_operator)
        return await self._answer(request, verb, self._asking.scope(request))

    async def delete(self, request: Request) -> Response:
        return await self._answer(request, _Verb("delete"), self._asking.scope(request))

    async def result(self, request: Request) -> Response:
        asked = await self._asking.read(request, ResultRequest)
        body = asked.body
        self._check_model(body.model)
        if (body.output is None) == (body.error is None):
            raise BadRequest("give either output or error", param="output")
        if body.error is not None and not 1 <= len(body.error) <= MAX_WHY:
            raise InvalidParameter("error", body.error, f"give 1 to {MAX_WHY} characters")
        node = request.path_params["node"]
        verb = _Verb("result", node=node, output=body.output, error=body.error or "")
        return await self._answer(request, verb, asked.scope)

    async def _work(self, run: GraphRun) -> None:
        try:
            await run.work()
        finally:
            self._store.ended(run)

    # Wishes, here or at the gateway that has the graph

    async def _answer(self, request: Request, verb: _Verb, scope: Scope) -> Response:
        name = request.path_params["graph"]
        raw = await unless_gone(request.receive, self._run(name, verb, scope))
        return Response(raw, media_type="application/json")

    async def _run(self, name: str, verb: _Verb, scope: Scope) -> bytes:
        try:
            run = self._store.get(name, scope)
        except UnknownGraph:
            return await self._elsewhere(name, verb, scope)
        return await self._here(run, verb)

    async def _here(self, run: GraphRun, verb: _Verb) -> bytes:
        match verb.kind:
            case "get":
                return msgspec.json.encode(run.body(names_workers=verb.names_workers))
            case "delete":
                was_running = not run.has_ended
                run.cancel()
                self._store.forget(run)
                body = {"id": run.name, "object": "graph.deleted", "deleted": True}
                return msgspec.json.encode({**body, "cancelled": was_running})
            case "result":
                await self._take_result(run, verb)
                body = {"id": run.name, "object": "graph.result", "node": verb.node}
                return msgspec.json.encode(body)

    async def _take_result(self, run: GraphRun, verb: _Verb) -> None:
        tool = run.tool(verb.node)
        result: Output | MalleeError = ToolFailed(tool.call, verb.error)
        if verb.output is not None:
            texts = [verb.output] if isinstance(verb.output, str) else verb.output
            items = None if isinstance(verb.output, str) else tuple(texts)
            # However short: it is not often that a tool answers.
            await self._asking.in_pool(lambda: self._maker.read_result(tool, texts, run.scope))
            result = Output("\n".join(texts), items)
        run.take_result(verb.node, result)

    async def _elsewhere(self, name: str, verb: _Verb, scope: Scope) -> bytes:
        given = encode(verb)
        if len(given) > MAX_NBYTES:
            remedy = f"at most {MAX_NBYTES} bytes go to the gateway that runs the graph; shorten it"
            raise InvalidParameter("output", len(given), remedy)
        records = self._server.service.records
        raw = await records.fetch(_VERB, _request_name(name), scope, given=given, wait_s=WAIT_S)
        if raw is None:
            raise UnknownGraph(name)
        outcome = _decode_outcome(raw)
        if outcome.error is not None:
            raise from_wire(outcome.error)
        return outcome.body

    async def _tell(self, key: str, scope: Scope, given: bytes) -> bytes | None:
        try:
            run = self._store.get(_graph_name(RequestId(key)), scope)
        except UnknownGraph:
            return None
        try:
            body = await self._here(run, _decode_verb(given))
            if len(body) > MAX_NBYTES:
                raise Unavailable(
                    f"the graph is at another gateway, and its {len(body)} bytes are too many to be passed"
                    " on; read its stream"
                )
        except MalleeError as error:
            return encode(_Outcome(error=error.to_wire()))
        return encode(_Outcome(body))


def _graph_name(request: RequestId) -> str:
    return ID_PREFIX + request.removeprefix(_REQUEST_PREFIX)


def _request_name(graph: str) -> RequestId:
    """The name from which that of a graph was made: it tells its scope."""
    return RequestId(_REQUEST_PREFIX + graph.removeprefix(ID_PREFIX))
