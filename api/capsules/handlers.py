"""The handlers of `/v1/capsules`."""

from collections.abc import Awaitable, Callable
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from mallee.api.answers import FORK, RESTORE, capsule_body
from mallee.api.branches.subtrees import Subtrees
from mallee.api.capsules.bulk import (
    Bulk,
    check_wanted,
    read_bool,
    read_filter,
    release_each,
)
from mallee.api.entry.asking import Asking
from mallee.api.entry.middleware import caller_of
from mallee.api.entry.pages import read_paging
from mallee.api.files.sending import CapsuleFile
from mallee.api.files.taking import read_query, take_file
from mallee.api.jobs import JobMaker
from mallee.api.serve import Server, json_response
from mallee.api.sse import unless_gone
from mallee.api.terms import read_terms
from mallee.gateway.capsules.capsules import CapsuleInfo
from mallee.protocol.api.capsules import (
    Capsule,
    CapsuleDeleted,
    CapsuleList,
    CapsulePruned,
    CapsuleRequest,
    CapsulesDeleted,
    CapsuleText,
    CaptureRequest,
    DemoteRequest,
    PinRequest,
    RewindRequest,
)
from mallee.protocol.api.generate import ForkRequest, RestoreRequest
from mallee.protocol.api.shared import OMITTED, AnyRequest
from mallee.protocol.errors import InvalidParameter, QuotaExceeded, QuotaTooSmall
from mallee.protocol.ids import CapsuleId, RequestId

MAX_START_DIGITS: Final = 9
MAX_INLINE_TOKENS: Final = 4096  # that are decoded on the event loop


class CapsuleHandlers:
    """Makes, shows, forks, moves and forgets capsules. All state is the gateway's."""

    def __init__(self, server: Server, maker: JobMaker, asking: Asking) -> None:
        self._server = server
        self._gateway = server.gateway
        self._maker = maker
        self._asking = asking
        self._subtrees = Subtrees(server.gateway)

    async def create(self, request: Request) -> Response:
        asked = await self._asking.read(request, CapsuleRequest)
        job = await self._asking.make(request, asked, self._maker.capsule)
        if not asked.body.wait:
            return await self._server.promise(request, job)
        return await self._server.capsule(request, job)

    async def get(self, request: Request) -> Response:
        info = await self._gateway.capsules.inspect(_capsule(request), self._asking.scope(request))
        return json_response(self._body(request, info))

    async def text(self, request: Request) -> Response:
        """The text from token `start` on; a character that begins before it is left out."""
        capsule, asked = _capsule(request), request.query_params.get("start", "0")
        returns_ids = read_bool(request.query_params, "return_token_ids")
        if not (asked.isascii() and asked.isdecimal() and len(asked) <= MAX_START_DIGITS):
            raise InvalidParameter("start", asked, "give the number of tokens to leave out")
        reading = self._gateway.capsules.tokens(capsule, self._asking.scope(request))
        tokens = await unless_gone(request.receive, reading)
        start = min(int(asked), len(tokens))

        def decode() -> str:
            ids = tokens[start:].tolist()
            text = self._server.tokenizer.decode(ids, skip_special_tokens=False)
            return text.lstrip("\ufffd") if start else text

        is_large = len(tokens) - start > MAX_INLINE_TOKENS
        text = await self._asking.off_loop(request, decode) if is_large else decode()
        return json_response(
            CapsuleText(
                id=capsule,
                start=start,
                tokens=len(tokens),
                text=text,
                token_ids=tokens[start:].tolist() if returns_ids else OMITTED,
            )
        )

    async def list(self, request: Request) -> Response:
        bulk = self._bulk(request, ("limit", "after"))
        paging = read_paging(request.query_params)
        await caller_of(request).visit.ready()
        with caller_of(request).visit:
            listed = bulk.page(paging.after, paging.most)
            found, num_unknown = await unless_gone(request.receive, listed)
        bodies = [self._body(request, info) for info in found]
        return json_response(paging.page(CapsuleList, bodies, unknown=num_unknown))

    async def count(self, request: Request) -> Response:
        bulk = self._bulk(request)
        await caller_of(request).visit.ready()
        with caller_of(request).visit:
            return json_response(await unless_gone(request.receive, bulk.count()))

    async def delete_many(self, request: Request) -> Response:
        bulk = self._bulk(request, ("all",))
        check_wanted(bulk.wanted, read_bool(request.query_params, "all"))
        visit = caller_of(request).visit
        await visit.ready()
        with visit:
            num = await unless_gone(request.receive, bulk.delete(visit.unkeep))
        return json_response(CapsulesDeleted(deleted=num))

    async def fork(self, request: Request) -> Response:
        asked = await self._asking.read(request, ForkRequest)
        info = await self._gateway.capsules.show(_capsule(request), asked.scope)
        plan = await self._asking.make(
            request, asked, lambda body, scope, terms: self._maker.fork(body, info, scope, terms)
        )
        return await self._server.answer(request, plan, FORK)

    async def restore(self, request: Request) -> Response:
        asked = await self._asking.read(request, RestoreRequest)
        info = await self._gateway.capsules.show(_capsule(request), asked.scope)
        plan = self._maker.restore(asked.body, info, asked.scope, asked.terms)
        return await self._server.answer(request, plan, RESTORE)

    async def rewind(self, request: Request) -> Response:
        asked = await self._asking.read(request, RewindRequest)
        info = await self._gateway.capsules.show(_capsule(request), asked.scope)
        to, ttl_s = self._maker.rewind(asked.body, info)
        return await self._kept(
            request, to, lambda: self._gateway.capsules.rewind(info.capsule, to, ttl_s, asked.scope)
        )

    async def capture(self, request: Request) -> Response:
        asked = await self._asking.read(request, CaptureRequest)
        name, branch = RequestId(request.path_params["request"]), asked.body.branch
        ttl_s = self._maker.pin(PinRequest(model=asked.body.model, ttl_s=asked.body.ttl_s))
        with caller_of(request).visit.making(0, self._gateway.capsules.is_kept):
            info = await self._gateway.requests.capture(name, branch, ttl_s, asked.scope)

        async def made() -> CapsuleInfo:
            return info

        try:
            return await self._kept(request, info.boundary, made)
        except (QuotaExceeded, QuotaTooSmall):  # its size is known by now alone
            await self._gateway.capsules.release(info.capsule, asked.scope)
            raise

    async def prune(self, request: Request) -> Response:
        asked = await self._asking.read(request, AnyRequest)
        self._maker.check_model(asked.body.model)
        capsule, visit = _capsule(request), caller_of(request).visit
        pruning = self._subtrees.prune(capsule, asked.scope)
        requests, capsules = await unless_gone(request.receive, pruning)
        await visit.ready()
        with visit:
            releasing = release_each(self._gateway, capsules, asked.scope, visit.unkeep)
            num = await unless_gone(request.receive, releasing)
        body = CapsulePruned(id=capsule, requests=requests, released=num, left=len(capsules) - num)
        return json_response(body)

    async def pin(self, request: Request) -> Response:
        asked = await self._asking.read(request, PinRequest)
        info = await self._gateway.capsules.show(_capsule(request), asked.scope)
        ttl_s = self._maker.pin(asked.body)
        return await self._kept(
            request,
            info.boundary,
            lambda: self._gateway.capsules.pin(info.capsule, ttl_s, asked.scope),
        )

    async def unpin(self, request: Request) -> Response:
        info = await self._gateway.capsules.pin(
            _capsule(request), None, self._asking.scope(request)
        )
        caller_of(request).visit.unkeep(info.capsule)
        return json_response(self._body(request, info))

    async def demote(self, request: Request) -> Response:
        asked = await self._asking.read(request, DemoteRequest)
        tier = self._maker.demote(asked.body)
        moved = self._gateway.capsules.demote(_capsule(request), tier, asked.scope)
        info = await unless_gone(request.receive, moved)
        return json_response(self._body(request, info))

    async def promote(self, request: Request) -> Response:
        asked = await self._asking.read(request, AnyRequest)
        self._maker.check_model(asked.body.model)
        share = asked.terms.share
        moved = self._gateway.capsules.promote(_capsule(request), share, asked.scope)
        info = await unless_gone(request.receive, moved)
        return json_response(self._body(request, info))

    async def export(self, request: Request) -> Response:
        capsule = _capsule(request)
        exported = self._gateway.capsules.export(capsule, self._asking.scope(request))
        return CapsuleFile(await unless_gone(request.receive, exported), capsule)

    async def take(self, request: Request) -> Response:
        asked, caller = read_query(request.query_params), caller_of(request)
        self._maker.check_import(asked)
        scope, terms = self._asking.scope(request), read_terms(asked, caller, request)
        with caller.visit.making(0, self._gateway.capsules.is_kept):
            pass  # a key that may keep no more is told before it sends gigabytes
        incoming = await self._gateway.capsules.begin_import()
        try:
            found = await take_file(request, incoming, self._gateway.capsules.max_import_nbytes)
            job = self._maker.imported(asked, found, scope, terms)
            return await self._server.capsule(request, job, found.nbytes)
        finally:
            incoming.close()

    async def delete(self, request: Request) -> Response:
        capsule = _capsule(request)
        await self._gateway.capsules.release(capsule, self._asking.scope(request))
        caller_of(request).visit.unkeep(capsule)
        return json_response(CapsuleDeleted(id=capsule))

    def _bulk(self, request: Request, others: tuple[str, ...] = ()) -> Bulk:
        """The capsules that a query means, which may have `others` too. Raises InvalidParameter."""
        wanted = read_filter(request.query_params, others)
        return Bulk(self._gateway, self._asking.scope(request), wanted, self._server.clock)

    async def _kept(
        self, request: Request, tokens: int, make: Callable[[], Awaitable[CapsuleInfo]]
    ) -> Response:
        """The answer to what pins a capsule; its key may keep no more than its quota."""
        await caller_of(request).visit.ready(capsules=1, capsule_tokens=tokens)
        with caller_of(request).visit.making(tokens, self._gateway.capsules.is_kept) as keep:
            info = await make()
            keep(info.capsule)
        return json_response(self._body(request, info))

    def _body(self, request: Request, info: CapsuleInfo) -> Capsule:
        names_workers = caller_of(request).is_operator
        return capsule_body(info, self._server.model_name, names_workers=names_workers)


def _capsule(request: Request) -> CapsuleId:
    return CapsuleId(request.path_params["capsule"])
