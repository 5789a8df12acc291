"""The routes of docs/api.md: parse, make jobs, run them, encode."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

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
from mallee.actors.http.middleware import AuthMiddleware, CountAnswer, read_body
from mallee.actors.http.prompts import PromptReader
from mallee.actors.http.schemas import (
    AnyRequest,
    CapsuleRequest,
    ChatRequest,
    CompletionRequest,
    ForkRequest,
    parse,
)
from mallee.actors.http.serve import Server, json_response
from mallee.actors.http.sse import unless_gone
from mallee.actors.http.terms import TENANT_HEADER, read_terms
from mallee.actors.text.chat import ChatTemplate
from mallee.actors.text.tokenizer import Tokenizer
from mallee.protocol.errors import InvalidParameter
from mallee.protocol.ids import CapsuleId, RequestId, WorkerId
from mallee.router.dispatch.jobs import QueueTerms

INLINE_BODY_BYTES: Final = 32 << 10  # larger bodies are read off the event loop
MAX_DECISIONS: Final = 128
MAX_CANDIDATES: Final = 4096

R = TypeVar("R", bound=AnyRequest)
J = TypeVar("J")


class Api:
    """The handlers. All state is the service's."""

    def __init__(
        self, server: Server, maker: JobMaker, limits: HttpSettings, *, created: int
    ) -> None:
        self._server = server
        self._service = server.service
        self._maker = maker
        self._limits = limits
        self._model = model_body(server.model_name, created, server.service.model.max_model_len)

    async def completions(self, request: Request) -> Response:
        plan = await self._read(request, CompletionRequest, self._maker.completion)
        return await self._server.answer(request, plan, COMPLETION)

    async def chat(self, request: Request) -> Response:
        plan = await self._read(request, ChatRequest, self._maker.chat)
        return await self._server.answer(request, plan, CHAT)

    async def fork(self, request: Request) -> Response:
        info = await self._service.capsule(_capsule(request))
        plan = await self._read(
            request, ForkRequest, lambda body, terms: self._maker.fork(body, info, terms)
        )
        return await self._server.answer(request, plan, FORK)

    async def create_capsule(self, request: Request) -> Response:
        job = await self._read(request, CapsuleRequest, self._maker.capsule)
        return await self._server.capsule(request, job)

    async def get_capsule(self, request: Request) -> Response:
        info = await self._service.capsule(_capsule(request))
        return json_response(capsule_body(info, self._server.model_name))

    async def delete_capsule(self, request: Request) -> Response:
        capsule = _capsule(request)
        await self._service.release_capsule(capsule)
        return json_response({"id": capsule, "object": "capsule.deleted", "deleted": True})

    async def models(self, _: Request) -> Response:
        return json_response({"object": "list", "data": [self._model]})

    async def model(self, request: Request) -> Response:
        self._maker.check_model(request.path_params["model"])
        return json_response(self._model)

    async def explain(self, request: Request) -> Response:
        query = request.query_params
        name = query.get("request")
        if name == "":
            raise InvalidParameter("request", name, "give the id of an answer, or leave it out")
        limit = _count(query.get("limit"), "limit", 64 if name else 16, MAX_DECISIONS)
        candidates = _count(query.get("candidates"), "candidates", 16, MAX_CANDIDATES)
        request_id = RequestId(name) if name else None
        return json_response(self._service.decisions(request_id, limit, candidates))

    async def workers(self, _: Request) -> Response:
        return json_response(self._service.workers())

    async def drain_worker(self, request: Request) -> Response:
        worker = WorkerId(request.path_params["worker"])
        await self._service.drain_worker(worker)
        return json_response({"worker": worker, "object": "worker.draining"}, 202)

    async def health(self, _: Request) -> Response:
        health = self._service.health()
        if health.get("status") in ("ok", "degraded"):
            return json_response(health)
        return json_response(health, 503, {"retry-after": str(RETRY_AFTER_S)})

    async def metrics(self, _: Request) -> Response:
        return Response(self._service.metrics(), headers={"content-type": METRICS_CONTENT_TYPE})

    async def _read(self, request: Request, kind: type[R], make: Callable[[R, QueueTerms], J]) -> J:
        raw = await read_body(request, self._limits.max_body_bytes)
        tenant = request.headers.get(TENANT_HEADER)

        def work() -> J:
            body = parse(raw, kind)
            return make(body, read_terms(body, tenant))

        if len(raw) <= INLINE_BODY_BYTES:
            return work()
        # Seconds of tokenizing must not hold up the tokens of other requests.
        return await unless_gone(request.receive, asyncio.to_thread(work))


def build_api(
    service: Service,
    tokenizer: Tokenizer,
    chat: ChatTemplate,
    *,
    model_name: str,
    limits: HttpSettings,
    created: int,
    clock: Callable[[], float],
    new_id: Callable[[], str],
    draw_seed: Callable[[], int],
    count_answer: CountAnswer = lambda endpoint, status: None,
) -> Starlette:
    """The ASGI app over `service`.

    `created` and `clock` are seconds since the epoch; `new_id` names failures in the log;
    `draw_seed` gives integers in [0, 2**64), from any thread.
    `count_answer(endpoint, status)` is called when an answer begins.
    """
    reader = PromptReader(
        tokenizer, chat, service.model.vocab_size, max_model_len=service.model.max_model_len
    )
    maker = JobMaker(
        service.model, reader, model_name=model_name, limits=limits, draw_seed=draw_seed
    )
    server = Server(service, tokenizer, model_name, clock, new_id)
    app = Starlette(routes=_routes(Api(server, maker, limits, created=created)))
    app.router.redirect_slashes = False
    install(app)
    app.add_middleware(
        AuthMiddleware, api_key=limits.api_key, new_id=new_id, count_answer=count_answer
    )
    return app


class _Endpoint:
    """A handler as an ASGI app: without Starlette's second net for errors around each."""

    def __init__(self, handler: Callable[[Request], Awaitable[Response]]) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._handler(Request(scope, receive, send))
        await response(scope, receive, send)


class _Named(Route):
    """A route that names itself in the scope: answers are counted by it."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
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
