"""The routes of docs/api.md: parse, make jobs, run them, encode."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from typing import Any, Final, Generic, NamedTuple, TypeVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Receive, Send
from starlette.types import Scope as AsgiScope

from mallee.actors.access.access import Access
from mallee.actors.access.scopes import Scopes
from mallee.actors.config import ChatSettings, HttpSettings
from mallee.actors.gateway.service import CapsuleInfo, Service, metrics_type
from mallee.actors.http.answers import (
    CHAT,
    COMPLETION,
    FORK,
    RESTORE,
    capsule_body,
    model_body,
)
from mallee.actors.http.bulk import Bulk, check_wanted, read_bool, read_filter
from mallee.actors.http.chat.reading import ChatReader
from mallee.actors.http.entry.middleware import (
    AuthMiddleware,
    CountAnswer,
    caller_of,
    header,
    read_body,
)
from mallee.actors.http.errors import RETRY_AFTER_S, install
from mallee.actors.http.files.sending import CapsuleFile
from mallee.actors.http.files.taking import read_query, take_file
from mallee.actors.http.jobs import JobMaker
from mallee.actors.http.openapi.document import document
from mallee.actors.http.openapi.operations import (
    HTML,
    MAX_CANDIDATES,
    MAX_DECISIONS,
    MAX_LISTED,
    OPERATIONS,
)
from mallee.actors.http.openapi.page import page
from mallee.actors.http.prompts import PromptReader
from mallee.actors.http.schemas import (
    LEAST_VALUES,
    AnyRequest,
    CapsuleRequest,
    CaptureRequest,
    ChatRequest,
    CompletionRequest,
    DemoteRequest,
    DetokenizeRequest,
    ForkRequest,
    PinRequest,
    RestoreRequest,
    RewindRequest,
    TokenizeRequest,
    WeightsRequest,
    parse,
)
from mallee.actors.http.serve import Server, json_response
from mallee.actors.http.sse import unless_gone
from mallee.actors.http.terms import checked_salt, read_terms
from mallee.actors.http.tokenizing import Tokenizing
from mallee.actors.text.chat import ChatTemplate
from mallee.actors.text.tokenizer import Tokenizer
from mallee.protocol.errors import Forbidden, InvalidParameter, QuotaExceeded
from mallee.protocol.ids import CapsuleId, RequestId, Scope, WorkerId
from mallee.router.dispatch.jobs import QueueTerms

SALT_HEADER: Final = "x-cache-salt"  # where the body has no cache_salt
INLINE_BODY_BYTES: Final = 32 << 10  # larger bodies are read off the event loop
MAX_LABEL_CHARS: Final = 128
MAX_CHANGE_S: Final = 3600
PAGE_HEADERS: Final = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}
DEFAULT_CHATS: Final = ChatSettings()
_SERVING: Final = ("ok", "degraded")  # of the service's health

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
        tokenizing: Tokenizing,
        pool: Executor | None,
        *,
        created: int,
    ) -> None:
        self._server = server
        self._tokenizing = tokenizing
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

    async def tokenize(self, request: Request) -> Response:
        return await self._tokens(request, TokenizeRequest, self._tokenizing.tokenize)

    async def detokenize(self, request: Request) -> Response:
        return await self._tokens(request, DetokenizeRequest, self._tokenizing.detokenize)

    async def _tokens(
        self, request: Request, kind: type[R], make: Callable[[R, Scope], bytes]
    ) -> Response:
        asked = await self._asked(request, kind)
        self._maker.check_model(asked.body.model)
        raw = await self._made(request, asked, lambda body, scope, _: make(body, scope))
        return Response(raw, media_type="application/json")

    async def create_capsule(self, request: Request) -> Response:
        asked = await self._asked(request, CapsuleRequest)
        job = await self._made(request, asked, self._maker.capsule)
        return await self._server.capsule(request, job)

    async def get_capsule(self, request: Request) -> Response:
        info = await self._service.inspect(_capsule(request), self._scope(request))
        return json_response(self._capsule_body(request, info))

    async def list_capsules(self, request: Request) -> Response:
        query = request.query_params
        bulk = self._bulk(request, ("limit", "after"))
        limit = _count(query.get("limit"), "limit", 20, MAX_LISTED)
        listed = bulk.page(query.get("after", ""), limit)
        found, has_more, num_unknown = await unless_gone(request.receive, listed)
        bodies = [self._capsule_body(request, info) for info in found]
        last = bodies[-1]["id"] if bodies else None
        body = {"object": "list", "data": bodies, "last_id": last, "has_more": has_more}
        return json_response({**body, "unknown": num_unknown})

    async def count_capsules(self, request: Request) -> Response:
        counted = self._bulk(request).count()
        return json_response(await unless_gone(request.receive, counted))

    async def delete_capsules(self, request: Request) -> Response:
        bulk = self._bulk(request, ("all",))
        check_wanted(bulk.wanted, read_bool(request.query_params, "all"))
        deleted = bulk.delete(caller_of(request).visit.unkeep)
        num = await unless_gone(request.receive, deleted)
        return json_response({"object": "capsules.deleted", "deleted": num})

    def _bulk(self, request: Request, others: tuple[str, ...] = ()) -> Bulk:
        """The capsules that a query means, which may have `others` too. Raises InvalidParameter."""
        wanted = read_filter(request.query_params, others)
        return Bulk(self._service, self._scope(request), wanted, self._server.clock)

    async def restore(self, request: Request) -> Response:
        asked = await self._asked(request, RestoreRequest)
        info = await self._service.capsule(_capsule(request), asked.scope)
        plan = self._maker.restore(asked.body, info, asked.scope, asked.terms)
        return await self._server.answer(request, plan, RESTORE)

    async def rewind(self, request: Request) -> Response:
        asked = await self._asked(request, RewindRequest)
        info = await self._service.capsule(_capsule(request), asked.scope)
        to, ttl_s = self._maker.rewind(asked.body, info)

        return await self._kept(
            request, to, lambda: self._service.rewind(info.capsule, to, ttl_s, asked.scope)
        )

    async def capture(self, request: Request) -> Response:
        asked = await self._asked(request, CaptureRequest)
        name, branch = RequestId(request.path_params["request"]), asked.body.branch
        ttl_s = self._maker.pin(PinRequest(model=asked.body.model, ttl_s=asked.body.ttl_s))
        with caller_of(request).visit.making(0, self._service.is_kept):
            info = await self._service.capture(name, branch, ttl_s, asked.scope)

        async def made() -> CapsuleInfo:
            return info

        try:
            return await self._kept(request, info.boundary, made)
        except QuotaExceeded:  # its size is known by now alone
            await self._service.release_capsule(info.capsule, asked.scope)
            raise

    async def pin(self, request: Request) -> Response:
        asked = await self._asked(request, PinRequest)
        info = await self._service.capsule(_capsule(request), asked.scope)
        ttl_s = self._maker.pin(asked.body)
        return await self._kept(
            request,
            info.boundary,
            lambda: self._service.pin(info.capsule, ttl_s, asked.scope),
        )

    async def unpin(self, request: Request) -> Response:
        info = await self._service.pin(_capsule(request), None, self._scope(request))
        caller_of(request).visit.unkeep(info.capsule)
        return json_response(self._capsule_body(request, info))

    async def demote(self, request: Request) -> Response:
        asked = await self._asked(request, DemoteRequest)
        tier = self._maker.demote(asked.body)
        moved = self._service.demote(_capsule(request), tier, asked.scope)
        info = await unless_gone(request.receive, moved)
        return json_response(self._capsule_body(request, info))

    async def promote(self, request: Request) -> Response:
        asked = await self._asked(request, AnyRequest)
        self._maker.check_model(asked.body.model)
        share = asked.terms.share
        moved = self._service.promote(_capsule(request), share, asked.scope)
        info = await unless_gone(request.receive, moved)
        return json_response(self._capsule_body(request, info))

    async def export(self, request: Request) -> Response:
        capsule = _capsule(request)
        exported = self._service.export(capsule, self._scope(request))
        return CapsuleFile(await unless_gone(request.receive, exported), capsule)

    async def import_capsule(self, request: Request) -> Response:
        asked, caller = read_query(request.query_params), caller_of(request)
        self._maker.check_import(asked)
        scope, terms = self._scope(request), read_terms(asked, caller, request.headers)
        with caller.visit.making(0, self._service.is_kept):
            pass  # a key that may keep no more is told before it sends gigabytes
        incoming = await self._service.begin_import()
        try:
            found = await take_file(request, incoming, self._service.max_import_nbytes)
            job = self._maker.imported(asked, found, scope, terms)
            return await self._server.capsule(request, job, found.nbytes)
        finally:
            incoming.close()

    async def _kept(
        self, request: Request, tokens: int, make: Callable[[], Awaitable[CapsuleInfo]]
    ) -> Response:
        """The answer to what pins a capsule; its key may keep no more than its quota."""
        with caller_of(request).visit.making(tokens, self._service.is_kept) as keep:
            info = await make()
            keep(info.capsule)
        return json_response(self._capsule_body(request, info))

    def _capsule_body(self, request: Request, info: CapsuleInfo) -> dict[str, Any]:
        names_workers = caller_of(request).is_operator
        return capsule_body(info, self._server.model_name, names_workers=names_workers)

    async def delete_capsule(self, request: Request) -> Response:
        capsule = _capsule(request)
        await self._service.release_capsule(capsule, self._scope(request))
        caller_of(request).visit.unkeep(capsule)
        return json_response({"id": capsule, "object": "capsule.deleted", "deleted": True})

    async def get_record(self, request: Request) -> Response:
        session = request.path_params["session"]
        raw = await self._service.read_record(session, self._scope(request))
        return Response(raw, headers={"content-type": "application/octet-stream"})

    async def delete_record(self, request: Request) -> Response:
        session = request.path_params["session"]
        await self._service.delete_record(session, self._scope(request))
        body = {"session": session, "object": "session.record.deleted", "deleted": True}
        return json_response(body)

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

    async def metrics_targets(self, request: Request) -> Response:
        _check_operator(request)
        return json_response(self._service.metrics_targets())

    async def drain_worker(self, request: Request) -> Response:
        _check_operator(request)
        worker = WorkerId(request.path_params["worker"])
        await self._service.drain_worker(worker)
        return json_response({"worker": worker, "object": "worker.draining"}, 202)

    async def change_weights(self, request: Request) -> Response:
        _check_operator(request)
        raw = await read_body(request, self._limits.max_body_bytes)
        body = parse(raw, WeightsRequest, self._max_values)
        if not 1 <= len(body.version) <= MAX_LABEL_CHARS:
            raise InvalidParameter(
                "version", body.version, f"give 1 to {MAX_LABEL_CHARS} characters"
            )
        for name, seconds in (("drain_s", body.drain_s), ("wait_s", body.wait_s)):
            if not 0 <= seconds <= MAX_CHANGE_S:
                raise InvalidParameter(name, seconds, f"give 0 to {MAX_CHANGE_S} seconds")
        found = await self._service.change_weights(
            body.version, path=body.path, drain_s=body.drain_s, wait_s=body.wait_s
        )
        is_done = all(worker["state"] == "serving" for worker in found["workers"])
        return json_response(found, 200 if is_done else 202)

    async def weights(self, request: Request) -> Response:
        _check_operator(request)
        return json_response(self._service.weights())

    async def health(self, request: Request) -> Response:
        health = self._service.health()
        shown = health if caller_of(request).is_operator else {"status": health["status"]}
        if health["status"] in _SERVING:
            return json_response(shown)
        return json_response(shown, 503, {"retry-after": str(RETRY_AFTER_S)})

    async def live(self, _: Request) -> Response:
        """The process's loop turns: this was answered."""
        return json_response({"status": "live"})

    async def ready(self, _: Request) -> Response:
        """Whether requests can be served; the gate answers once it is closed."""
        if self._service.health()["status"] in _SERVING:
            return json_response({"status": "ready"})
        return json_response({"status": "unavailable"}, 503, {"retry-after": str(RETRY_AFTER_S)})

    async def metrics(self, request: Request) -> Response:
        _check_operator(request)
        accept = request.headers.get("accept", "")
        headers = {"content-type": metrics_type(accept)}
        return Response(self._service.metrics(accept), headers=headers)

    async def openapi(self, _: Request) -> Response:
        return json_response(document())

    async def page(self, _: Request) -> Response:
        return Response(page(document()), media_type=HTML, headers=PAGE_HEADERS)

    async def _asked(self, request: Request, kind: type[R]) -> "Asked[R]":
        raw = await read_body(request, self._limits.max_body_bytes)
        caller, salt = caller_of(request), _salt(request)

        def work() -> Asked[R]:
            body = parse(raw, kind, self._max_values)
            scope = self._scopes.scope(caller.tenant, checked_salt(body.cache_salt) or salt)
            terms = read_terms(body, caller, request.headers)
            return Asked(body, scope, terms, len(raw) > INLINE_BODY_BYTES)

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
    chats: ChatSettings = DEFAULT_CHATS,
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
    chat_reader = ChatReader(reader, chat, tokenizer.added_tokens, chats)
    maker = JobMaker(
        service.model,
        reader,
        chat_reader,
        model_name=model_name,
        limits=limits,
        draw_seed=draw_seed,
    )
    server = Server(service, tokenizer, model_name, clock, new_id)
    tokenizing = Tokenizing(reader, chat_reader, tokenizer, service.model.max_model_len)
    api = Api(server, maker, scopes, limits, tokenizing, pool, created=created)
    app = Starlette(routes=_routes(api))
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
    return [
        _Named(each.path, _Endpoint(getattr(api, each.handler)), methods=[each.method])
        for each in OPERATIONS
    ]
