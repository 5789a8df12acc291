"""The routes of docs/api.md: parse, make jobs, run them, encode."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from typing import Final, Generic, NamedTuple, TypeVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Receive, Send
from starlette.types import Scope as AsgiScope

from mallee.actors.access.access import Access
from mallee.actors.access.scopes import Scopes
from mallee.actors.config import HttpSettings
from mallee.actors.gateway.service import METRICS_CONTENT_TYPE, Service
from mallee.actors.http.answers import (
    CHAT,
    COMPLETION,
    FORK,
    capsule_body,
    model_body,
)
from mallee.actors.http.errors import RETRY_AFTER_S, install
from mallee.actors.http.jobs import JobMaker
from mallee.actors.http.middleware import AuthMiddleware, CountAnswer, caller_of, header, read_body
from mallee.actors.http.prompts import PromptReader
from mallee.actors.http.schemas import (
    LEAST_VALUES,
    AnyRequest,
    CapsuleRequest,
    ChatRequest,
    CompletionRequest,
    ForkRequest,
    parse,
)
from mallee.actors.http.serve import Server, json_response
from mallee.actors.http.sse import unless_gone
from mallee.actors.http.terms import checked_salt, read_terms
from mallee.actors.text.chat import ChatTemplate
from mallee.actors.text.tokenizer import Tokenizer
from mallee.protocol.errors import Forbidden, InvalidParameter
from mallee.protocol.ids import CapsuleId, RequestId, Scope, WorkerId
from mallee.router.dispatch.jobs import QueueTerms

SALT_HEADER: Final = "x-cache-salt"  # where the body has no cache_salt
INLINE_BODY_BYTES: Final = 32 << 10  # larger bodies are read off the event loop
MAX_DECISIONS: Final = 128
MAX_CANDIDATES: Final = 4096

R = TypeVar("R", bound=AnyRequest)
J = TypeVar("J")


class Api:
    """The handlers. All state is the service's."""

    def __init__(
        self,
        server: Server,
        maker: JobMaker,
        scopes: Scopes,
        limits: HttpSettings,
        pool: Executor | None,
        *,
        created: int,
    ) -> None:
        self._server = server
        self._pool = pool
        self._service = server.service
        self._maker = maker
        self._scopes = scopes
        self._limits = limits
        # The ids of a prompt as long as the window, and the rest of a body.
        self._max_values = max(LEAST_VALUES, server.service.model.max_model_len + LEAST_VALUES // 2)
        self._model = model_body(server.model_name, created, server.service.model.max_model_len)

    async def completions(self, request: Request) -> Response:
        asked = await self._asked(request, CompletionRequest)
        plan = await self._made(request, asked, self._maker.completion)
        return await self._server.answer(request, plan, COMPLETION)

    async def chat(self, request: Request) -> Response:
        asked = await self._asked(request, ChatRequest)
        plan = await self._made(request, asked, self._maker.chat)
        return await self._server.answer(request, plan, CHAT)

    async def fork(self, request: Request) -> Response:
        asked = await self._asked(request, ForkRequest)
        info = await self._service.capsule(_capsule(request), asked.scope)
        plan = await self._made(
            request, asked, lambda body, scope, terms: self._maker.fork(body, info, scope, terms)
        )
        return await self._server.answer(request, plan, FORK)

    async def create_capsule(self, request: Request) -> Response:
        asked = await self._asked(request, CapsuleRequest)
        job = await self._made(request, asked, self._maker.capsule)
        return await self._server.capsule(request, job)

    async def get_capsule(self, request: Request) -> Response:
        info = await self._service.capsule(_capsule(request), self._scope(request))
        names_workers = caller_of(request).is_operator
        return json_response(
            capsule_body(info, self._server.model_name, names_workers=names_workers)
        )

    async def delete_capsule(self, request: Request) -> Response:
        capsule = _capsule(request)
        await self._service.release_capsule(capsule, self._scope(request))
        return json_response({"id": capsule, "object": "capsule.deleted", "deleted": True})

    async def models(self, _: Request) -> Response:
        return json_response({"object": "list", "data": [self._model]})

    async def model(self, request: Request) -> Response:
        self._maker.check_model(request.path_params["model"])
        return json_response(self._model)

    async def explain(self, request: Request) -> Response:
        _check_operator(request)
        query = request.query_params
        name = query.get("request")
        if name == "":
            raise InvalidParameter("request", name, "give the id of an answer, or leave it out")
        limit = _count(query.get("limit"), "limit", 64 if name else 16, MAX_DECISIONS)
        candidates = _count(query.get("candidates"), "candidates", 16, MAX_CANDIDATES)
        request_id = RequestId(name) if name else None
        return json_response(self._service.decisions(request_id, limit, candidates))

    async def workers(self, request: Request) -> Response:
        _check_operator(request)
        return json_response(self._service.workers())

    async def drain_worker(self, request: Request) -> Response:
        _check_operator(request)
        worker = WorkerId(request.path_params["worker"])
        await self._service.drain_worker(worker)
        return json_response({"worker": worker, "object": "worker.draining"}, 202)

    async def health(self, request: Request) -> Response:
        health = self._service.health()
        if not caller_of(request).is_operator:
            health = {"status": health["status"]}
        if health.get("status") in ("ok", "degraded"):
            return json_response(health)
        return json_response(health, 503, {"retry-after": str(RETRY_AFTER_S)})

    async def metrics(self, request: Request) -> Response:
        _check_operator(request)
        return Response(self._service.metrics(), headers={"content-type": METRICS_CONTENT_TYPE})

    async def _asked(self, request: Request, kind: type[R]) -> "Asked[R]":
        raw = await read_body(request, self._limits.max_body_bytes)
        caller, salt = caller_of(request), _salt(request)

        def work() -> Asked[R]:
            body = parse(raw, kind, self._max_values)
            scope = self._scopes.scope(caller.tenant, checked_salt(body.cache_salt) or salt)
            return Asked(body, scope, read_terms(body, caller), len(raw) > INLINE_BODY_BYTES)

        return await self._off_loop(request, work, is_large=len(raw) > INLINE_BODY_BYTES)

    async def _made(
        self, request: Request, asked: "Asked[R]", make: Callable[[R, Scope, QueueTerms], J]
    ) -> J:
        return await self._off_loop(
            request,
            lambda: make(asked.body, asked.scope, asked.terms),
            is_large=asked.is_large,
        )

    async def _off_loop(self, request: Request, work: Callable[[], J], *, is_large: bool) -> J:
        """The result of `work`: seconds of tokenizing must not hold up the tokens of other requests."""
        if not is_large:
            return work()

        async def result() -> J:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)

        return await unless_gone(request.receive, result())

    def _scope(self, request: Request) -> Scope:
        """The scope of a request without a body."""
        return self._scopes.scope(caller_of(request).tenant, _salt(request))


class Asked(NamedTuple, Generic[R]):
    """A request that was read."""

    body: R
    scope: Scope
    terms: QueueTerms
    is_large: bool


def _salt(request: Request) -> str:
    return checked_salt(header(request.headers, SALT_HEADER) or "", SALT_HEADER)


def _check_operator(request: Request) -> None:
    if not caller_of(request).is_operator:
        raise Forbidden("this path needs an operator's key")


def build_api(
    service: Service,
    tokenizer: Tokenizer,
    chat: ChatTemplate,
    *,
    access: Access,
    scopes: Scopes,
    model_name: str,
    limits: HttpSettings,
    created: int,
    clock: Callable[[], float],
    new_id: Callable[[], str],
    draw_seed: Callable[[], int],
    count_answer: CountAnswer = lambda endpoint, status: None,
    pool: Executor | None = None,
) -> Starlette:
    """The ASGI app over `service`.

    `created` and `clock` are seconds since the epoch; `new_id` names failures in the log;
    `draw_seed` gives integers in [0, 2**64), from any thread.
    `count_answer(endpoint, status)` is called when an answer begins. `pool` reads large requests, by
    default the loop's own.
    """
    reader = PromptReader(
        tokenizer, chat, service.model.vocab_size, max_model_len=service.model.max_model_len
    )
    maker = JobMaker(
        service.model, reader, model_name=model_name, limits=limits, draw_seed=draw_seed
    )
    server = Server(service, tokenizer, model_name, clock, new_id)
    app = Starlette(routes=_routes(Api(server, maker, scopes, limits, pool, created=created)))
    app.router.redirect_slashes = False
    install(app)
    app.add_middleware(AuthMiddleware, access=access, new_id=new_id, count_answer=count_answer)
    return app


class _Endpoint:
    """A handler as an ASGI app: without Starlette's second net for errors around each."""

    def __init__(self, handler: Callable[[Request], Awaitable[Response]]) -> None:
        self._handler = handler

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        response = await self._handler(Request(scope, receive, send))
        await response(scope, receive, send)


class _Named(Route):
    """A route that names itself in the scope: answers are counted by it."""

    def matches(self, scope: AsgiScope) -> tuple[Match, AsgiScope]:
        match, child = super().matches(scope)
        if match is not Match.NONE:
            child["route"] = self
        return match, child


def _count(text: str | None, name: str, default: int, most: int) -> int:
    """A query parameter from 1 to `most`. Raises InvalidParameter."""
    if text is None:
        return default
    is_short = text.isascii() and text.isdecimal() and len(text) <= len(str(most))
    if not is_short or not 1 <= int(text) <= most:
        raise InvalidParameter(name, text, f"give a whole number from 1 to {most}")
    return int(text)


def _capsule(request: Request) -> CapsuleId:
    return CapsuleId(request.path_params["capsule"])


def _routes(api: Api) -> list[Route]:
    routes: tuple[tuple[str, str, Callable[[Request], Awaitable[Response]]], ...] = (
        ("GET", "/v1/models", api.models),
        ("GET", "/v1/models/{model:path}", api.model),
        ("POST", "/v1/completions", api.completions),
        ("POST", "/v1/chat/completions", api.chat),
        ("POST", "/v1/capsules", api.create_capsule),
        ("GET", "/v1/capsules/{capsule}", api.get_capsule),
        ("DELETE", "/v1/capsules/{capsule}", api.delete_capsule),
        ("POST", "/v1/capsules/{capsule}/fork", api.fork),
        ("GET", "/v1/router/explain", api.explain),
        ("GET", "/v1/router/workers", api.workers),
        ("POST", "/v1/router/workers/{worker}/drain", api.drain_worker),
        ("GET", "/health", api.health),
        ("GET", "/metrics", api.metrics),
    )
    return [_Named(path, _Endpoint(handler), methods=[method]) for method, path, handler in routes]
