"""The routes of docs/api.md: parse, make jobs, run them, encode."""

from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from functools import cache
from operator import attrgetter
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route, Router
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as AsgiScope

from mallee.api.answers import (
    CHAT,
    COMPLETION,
    FORCED_CHAT,
)
from mallee.api.branches.budgets import Budgets
from mallee.api.branches.handlers import BranchHandlers
from mallee.api.branches.records import RecordHandlers
from mallee.api.callbacks.callbacks import Callbacks
from mallee.api.capsules.handlers import CapsuleHandlers
from mallee.api.chat.reading import ChatReader
from mallee.api.entry.asking import SALT_HEADER, Asking
from mallee.api.entry.idempotency import IdempotencyMiddleware
from mallee.api.entry.middleware import (
    AuthMiddleware,
    caller_of,
)
from mallee.api.errors import RETRY_AFTER_S
from mallee.api.jobs import JobMaker
from mallee.api.messages.errors import PATH as MESSAGES
from mallee.api.messages.errors import AnthropicErrors
from mallee.api.messages.handlers import MessagesHandlers
from mallee.api.openapi.document import document
from mallee.api.openapi.operations import (
    HTML,
    OPERATIONS,
)
from mallee.api.openapi.page import page
from mallee.api.operators import OperatorHandlers
from mallee.api.prompts import PromptReader
from mallee.api.responses.conversation_routes import ConversationHandlers
from mallee.api.responses.room import Responses
from mallee.api.responses.turns import TurnMaker
from mallee.api.search.handlers import SearchHandlers
from mallee.api.search.policies import installed_policies
from mallee.api.serve import Server, json_response
from mallee.api.sessions.handlers import SessionHandlers
from mallee.api.sse import Client
from mallee.api.text.chat import ChatTemplate
from mallee.api.text.tokenizer import Tokenizer
from mallee.api.tokenizing import Tokenizing
from mallee.api.ui.handlers import UiHandlers
from mallee.gateway.access.access import Access
from mallee.gateway.access.quotas import Shared
from mallee.gateway.access.scopes import Scopes
from mallee.gateway.gateway import Gateway
from mallee.gateway.store.leases import Lessee
from mallee.protocol.api.generate import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Model,
    ModelList,
    TokenizeRequest,
)
from mallee.protocol.api.operator import Status
from mallee.protocol.api.sessions import RecordDeleted
from mallee.protocol.api.shared import AnyRequest
from mallee.protocol.errors import NotFound, NoWorker
from mallee.protocol.ids import Scope
from mallee.runtime.config import ChatSettings, HttpSettings, ResponsesSettings

PAGE_HEADERS: Final = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}
DEFAULT_CHATS: Final = ChatSettings()
DEFAULT_RESPONSES: Final = ResponsesSettings()
_SERVING: Final = ("ok", "degraded")  # of the gateway's health

R = TypeVar("R", bound=AnyRequest)


class Api:
    """The handlers, those of each room of its own in an attribute. All state is the gateway's."""

    def __init__(
        self,
        server: Server,
        maker: JobMaker,
        asking: Asking,
        *,
        tokenizing: Tokenizing,
        responses: Responses,
        messages: MessagesHandlers,
        branches: BranchHandlers,
        aliases: Sequence[str],
        created: int,
        draw_seed: Callable[[], int],
    ) -> None:
        self.messages = messages
        self.sessions = SessionHandlers(server, asking, draw_seed=draw_seed)
        self.branches = branches
        self.capsules = CapsuleHandlers(server, maker, asking)
        self.records = RecordHandlers(server, asking)
        self.searches = SearchHandlers(
            server, maker, asking, installed_policies(), draw_seed=draw_seed
        )
        self.responses = responses
        self.conversations = ConversationHandlers(asking, responses.conversations)
        self.operators = OperatorHandlers(server.gateway, asking)
        self.ui = UiHandlers(server, asking)
        self._server = server
        self._tokenizing = tokenizing
        self._gateway = server.gateway
        self._maker = maker
        self._asking = asking
        max_len = server.gateway.context.model.max_model_len
        self._models = {
            name: Model(id=name, created=created, max_model_len=max_len)
            for name in (server.model_name, *aliases)
        }

    async def completions(self, request: Request) -> Response:
        asked = await self._asking.read(request, CompletionRequest)
        plan = await self._asking.make(request, asked, self._maker.completion)
        return await self._server.answer(request, plan, COMPLETION)

    async def chat(self, request: Request) -> Response:
        asked = await self._asking.read(request, ChatRequest)
        plan = await self._asking.make(request, asked, self._maker.chat)
        is_forced = plan.reading is not None and plan.reading.is_forced
        return await self._server.answer(request, plan, FORCED_CHAT if is_forced else CHAT)

    async def tokenize(self, request: Request) -> Response:
        return await self._tokens(request, TokenizeRequest, self._tokenizing.tokenize)

    async def detokenize(self, request: Request) -> Response:
        return await self._tokens(request, DetokenizeRequest, self._tokenizing.detokenize)

    async def _tokens(
        self, request: Request, kind: type[R], make: Callable[[R, Scope], bytes]
    ) -> Response:
        asked = await self._asking.read(request, kind)
        self._maker.check_model(asked.body.model)
        raw = await self._asking.make(request, asked, lambda body, scope, _: make(body, scope))
        return Response(raw, media_type="application/json")

    async def get_record(self, request: Request) -> Response:
        session = request.path_params["session"]
        recorder = self._gateway.requests.recorder
        raw = await recorder.read(self._asking.scope(request), session)
        if not raw:
            raise _unrecorded()
        return Response(raw, headers={"content-type": "application/octet-stream"})

    async def delete_record(self, request: Request) -> Response:
        session = request.path_params["session"]
        recorder = self._gateway.requests.recorder
        if not await recorder.delete(self._asking.scope(request), session):
            raise _unrecorded()
        return json_response(RecordDeleted(session=session))

    async def models(self, _: Request) -> Response:
        self._check_served()
        return json_response(ModelList(data=[*self._models.values()]))

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        self._maker.check_model(name)
        self._check_served()
        return json_response(self._models[name])

    def _check_served(self) -> None:
        """Raises NoWorker: clients that wait for a model to be listed send requests next."""
        if self._gateway.operator.health()["status"] not in _SERVING:
            raise NoWorker("none is alive")

    async def health(self, request: Request) -> Response:
        health = self._gateway.operator.health()
        shown = health if caller_of(request).is_operator else {"status": health["status"]}
        if health["status"] in _SERVING:
            return json_response(shown)
        return json_response(shown, 503, {"retry-after": str(RETRY_AFTER_S)})

    async def live(self, _: Request) -> Response:
        """The process's loop turns: this was answered."""
        return json_response(Status(status="live"))

    async def ready(self, _: Request) -> Response:
        """Whether requests can be served; the gate answers once it is closed."""
        if self._gateway.operator.health()["status"] in _SERVING:
            return json_response(Status(status="ready"))
        return json_response(Status(status="unavailable"), 503, {"retry-after": str(RETRY_AFTER_S)})

    async def openapi(self, _: Request) -> Response:
        return Response(_document_bytes(), media_type="application/json")

    async def page(self, _: Request) -> Response:
        return Response(_page_bytes(), media_type=HTML, headers=PAGE_HEADERS)


@cache
def _document_bytes() -> bytes:
    return msgspec.json.encode(document())


@cache
def _page_bytes() -> bytes:
    return page(document()).encode()


class ServedModel(NamedTuple):
    """The model as clients know it, also by its `aliases`; `created` is in seconds since the epoch."""

    name: str
    tokenizer: Tokenizer
    template: ChatTemplate
    created: int
    aliases: tuple[str, ...] = ()


class Entry(NamedTuple):
    """Callers and their scopes. `pool` reads large requests, by default the loop's own."""

    access: Access
    scopes: Scopes
    pool: Executor | None = None


class ApiSettings(NamedTuple):
    http: HttpSettings = HttpSettings()
    chat: ChatSettings = DEFAULT_CHATS
    responses: ResponsesSettings = DEFAULT_RESPONSES


class Draws(NamedTuple):
    """`new_id` names failures in the log; `seed` gives integers in [0, 2**64), from any thread."""

    new_id: Callable[[], str]
    seed: Callable[[], int]


def build_api(
    gateway: Gateway, model: ServedModel, entry: Entry, settings: ApiSettings, draws: Draws
) -> Starlette:
    """The ASGI app over `gateway`, which has its clock, counts its answers and closes its tasks."""
    context, limits, tokenizer = gateway.context, settings.http, model.tokenizer
    window = context.model.max_model_len
    reader = PromptReader(tokenizer, model.template, context.model.vocab_size, max_model_len=window)
    chat_reader = ChatReader(
        reader,
        model.template,
        tokenizer.added_tokens,
        settings.chat,
        leaves_states=context.model.has_states,
    )
    maker = JobMaker(
        context.model,
        reader,
        chat_reader,
        model_name=model.name,
        aliases=model.aliases,
        limits=limits,
        draw_seed=draws.seed,
    )
    lessee = Lessee(
        context.gateway,
        others=lambda: None if gateway.peers.is_alone else gateway.peers.others,
        is_gone=gateway.peers.is_gone,
        new_key=lambda: f"{draws.seed():016x}",
    )
    server = Server(
        gateway=gateway,
        tokenizer=tokenizer,
        model_name=model.name,
        clock=context.wall_clock,
        new_id=draws.new_id,
        budgets=Budgets(
            gateway.store,
            lessee,
            clock=context.wall_clock,
            new_key=lambda: f"{draws.seed():016x}",
        ),
        callbacks=Callbacks(
            timeout_s=limits.callback_timeout_s,
            tasks=gateway.tasks,
            count=context.metrics.called_back,
        ),
    )
    entry.access.shared = Shared(gateway.store, lessee, clock=context.wall_clock)
    asking = Asking(entry.scopes, limits, max_model_len=window, pool=entry.pool)
    turns = TurnMaker(reader, chat_reader, maker)
    responses = Responses(asking, server, turns, settings.responses, gateway.tasks)
    threads = responses.conversations
    api = Api(
        server,
        maker,
        asking,
        tokenizing=Tokenizing(reader, chat_reader, tokenizer, window),
        responses=responses,
        messages=MessagesHandlers(server, maker, asking, reader, chat_reader, turns, threads),
        branches=BranchHandlers(gateway, maker, reader, asking),
        aliases=model.aliases,
        created=model.created,
        draw_seed=draws.seed,
    )
    routes = _Routes(_routes(api))
    replays = IdempotencyMiddleware(
        routes.app,
        store=gateway.store,
        peers=gateway.peers,
        owner=entry.scopes.scope,
        ttl_s=limits.replay_ttl_s,
        max_nbytes=limits.replay_max_mib << 20,
        max_body_bytes=limits.max_body_bytes,
        salt_header=SALT_HEADER,
    )
    guarded = AuthMiddleware(
        routes.app,
        replays,
        access=entry.access,
        new_id=draws.new_id,
        count_answer=context.metrics.answered,
    )
    app = App(routes, guarded, AnthropicErrors(guarded, new_id=draws.new_id))
    if limits.cors_origins:
        from starlette.middleware.cors import CORSMiddleware  # most services have no use for it

        app.add_middleware(
            CORSMiddleware,
            allow_origins=limits.cors_origins,
            allow_methods=("*",),
            allow_headers=("*",),
            expose_headers=("*",),
        )
    return app


class App(Starlette):
    """Routes behind `AuthMiddleware`, which answers errors: without Starlette's nets for them.

    `guarded` takes requests, `shaped` those on Anthropic's paths.
    """

    def __init__(self, routes: "_Routes", guarded: ASGIApp, shaped: ASGIApp) -> None:
        super().__init__()
        self.router = routes
        self._guarded = guarded
        self._shaped = shaped

    def build_middleware_stack(self) -> ASGIApp:
        app: ASGIApp = self._taken
        for middleware, args, options in reversed(self.user_middleware):
            app = middleware(app, *args, **options)
        return app

    def _taken(self, scope: AsgiScope, receive: Receive, send: Send) -> Awaitable[None]:
        is_shaped = scope.get("path", "").startswith(MESSAGES)
        return (self._shaped if is_shaped else self._guarded)(scope, receive, send)


class _Routes(Router):
    """Finds a path by its segments in one step, whatever its parameters are; names routes in the scope."""

    def __init__(self, routes: Sequence[Route]) -> None:
        super().__init__(routes, redirect_slashes=False)
        self._by_shape: dict[tuple[int, ...], dict[tuple[str, ...], Route]] = {}
        for route in routes:
            if ":" in route.path:
                continue  # its parameter takes several segments
            segments = route.path.split("/")
            # The number of segments, and the places of parameters among them.
            places = [i for i, each in enumerate(segments) if "{" in each]
            known = self._by_shape.setdefault((len(segments), *places), {})
            for i in places:
                segments[i] = ""
            known |= {(method, *segments): route for method in route.methods or ()}
        self._by_shape = dict(sorted(self._by_shape.items(), key=lambda each: len(each[0])))

    def app(self, scope: AsgiScope, receive: Receive, send: Send) -> Any:
        given = scope.get("path", "").split("/")
        for (num, *places), known in self._by_shape.items():
            if num != len(given):
                continue
            segments = [scope.get("method", ""), *given]
            for i in places:
                segments[i + 1] = ""
            route = known.get(tuple(segments))
            if route is not None and all(map(given.__getitem__, places)):
                params = zip(route.param_convertors, map(given.__getitem__, places), strict=True)
                scope["route"], scope["path_params"] = route, dict(params)
                return route.app(scope, receive, send)
        return super().app(
            scope, receive, send
        )  # refuses it, unless a parameter takes several segments


class _Named(Route):
    """A route that names itself in the scope: answers are counted by it."""

    def matches(self, scope: AsgiScope) -> tuple[Match, AsgiScope]:
        match, child = super().matches(scope)
        if match is not Match.NONE:
            child["route"] = self
        return match, child


class _Endpoint:
    """A handler as an ASGI app."""

    def __init__(self, handler: Callable[[Request], Awaitable[Response]]) -> None:
        self._handler = handler

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        client = Client(receive)
        try:
            response = await self._handler(Request(scope, client, send))
            await response(scope, client, send)
        finally:
            client.close()


def _unrecorded() -> NotFound:
    return NotFound("no session of that name is recorded here", param="session")


def _routes(api: Api) -> list[Route]:
    return [
        _Named(each.path, _Endpoint(attrgetter(each.handler)(api)), methods=[each.method])
        for each in OPERATIONS
    ]
