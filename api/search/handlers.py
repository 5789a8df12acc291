"""The handler of `/v1/search`."""

import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from mallee.api.capsules.bulk import release_each
from mallee.api.entry.asking import Asking
from mallee.api.entry.middleware import age_s, caller_of
from mallee.api.errors import error_body, unexpected
from mallee.api.jobs import JobMaker
from mallee.api.search.requests import SearchPlan, SearchRequest, read_search
from mallee.api.search.running import Run
from mallee.api.serve import Server, json_response
from mallee.api.sse import DONE, EventStream, event, unless_gone
from mallee.protocol.errors import MalleeError, UnknownCapsule
from mallee.protocol.ids import CapsuleId, RequestId, Scope
from mallee.search.results import node_result

_log = logging.getLogger(__name__)


class SearchHandlers:
    """Runs searches by the policies of `kinds`. `draw_seed` gives a seed where none was given."""

    def __init__(
        self,
        server: Server,
        maker: JobMaker,
        asking: Asking,
        kinds: Mapping[str, type[msgspec.Struct]],
        *,
        draw_seed: Callable[[], int],
    ) -> None:
        self._server = server
        self._maker = maker
        self._asking = asking
        self._kinds = kinds
        self._draw_seed = draw_seed

    async def create(self, request: Request) -> Response:
        asked = await self._asking.read(request, SearchRequest)
        plan = await self._asking.make(
            request,
            asked,
            lambda body, scope, terms: read_search(body, self._kinds, self._maker, self._draw_seed),
        )
        begun = 0
        if plan.capsule is not None:
            found = await self._server.gateway.capsules.show(CapsuleId(plan.capsule), asked.scope)
            begun = found.boundary
        run, is_streamed = self._run(request, plan, asked.scope, begun), False

        async def release() -> None:
            await self._release(request, run, asked.scope, is_own=plan.capsule is None)

        try:
            await unless_gone(request.receive, run.begin())
            if not asked.body.stream:
                return await unless_gone(request.receive, self._whole(request, run, plan))
            is_streamed = True
        finally:
            if not is_streamed:
                await release()
        return EventStream(self._events(request, run, plan), release, {})

    def _run(self, request: Request, plan: SearchPlan, scope: Scope, begun: int) -> Run:
        name, callbacks = RequestId(self._server.new_id()), self._server.callbacks
        return Run(request, plan, name=name, callbacks=callbacks, scope=scope, begun=begun)

    async def _whole(self, request: Request, run: Run, plan: SearchPlan) -> Response:
        async with aclosing(run.nodes()) as nodes:
            async for _ in nodes:
                pass
        return json_response(self._result(request, run, plan))

    async def _events(
        self, request: Request, run: Run, plan: SearchPlan
    ) -> AsyncGenerator[bytes, None]:
        """An event for nodes that join the tree together, and one with the whole tree at the end."""
        try:
            async with aclosing(run.nodes()) as nodes:
                async for fresh in nodes:
                    body = {"object": "search.nodes", "nodes": list(map(node_result, fresh))}
                    yield event(body)
            yield event(self._result(request, run, plan)) + DONE
        except MalleeError as error:
            yield event(error_body(error))
        except Exception:
            request_id = self._server.new_id()
            _log.exception("search %s failed after its first byte", request_id)
            yield event(error_body(unexpected(request_id)))

    def _result(self, request: Request, run: Run, plan: SearchPlan) -> dict[str, Any]:
        """The result of a search, which is counted now."""
        self._server.count_search(run.result.reason, age_s(request))
        return {
            "object": "search",
            "created": int(self._server.clock()),
            "model": self._server.model_name,
            "seed": plan.seed,
            "blocks": run.num_blocks(self._server.gateway.context.router.config.block_size),
            "spent": run.spent._asdict(),
            **msgspec.structs.asdict(run.result),
        }

    async def _release(self, request: Request, run: Run, scope: Scope, *, is_own: bool) -> None:
        """Forget the capsule that it made to begin with; all below it too, if it has no result.

        Of one that began at a capsule of its caller's, what went on from its nodes.
        """
        own = [CapsuleId(run.root)] if is_own and run.root is not None else []
        found = list(own)
        if not run.is_whole and run.root is not None:
            nodes = list(map(CapsuleId, run.capsules))
            with suppress(UnknownCapsule):  # it was deleted meanwhile
                below = self._server.gateway.requests.prune_below(
                    CapsuleId(run.root), own or nodes, scope
                )
                nodes = [*dict.fromkeys((*nodes, *below.left))]
            found += nodes
        unkeep = caller_of(request).visit.unkeep
        num = await release_each(self._server.gateway, found, scope, unkeep)
        if num < len(found):
            _log.warning("%d capsules of a search are left: no worker answers", len(found) - num)
