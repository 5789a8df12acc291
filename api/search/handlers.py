"""The handler of `/v1/search`."""

import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from mallee.api.entry.asking import Asking
from mallee.api.entry.middleware import age_s, caller_of
from mallee.api.errors import error_body, unexpected
from mallee.api.jobs import JobMaker
from mallee.api.search.requests import SearchAnswer, SearchPlan, SearchRequest, read_search
from mallee.api.search.running import Requests, Run
from mallee.api.serve import Server, json_response
from mallee.api.sse import DONE, EventStream, event, unless_gone
from mallee.protocol.errors import MalleeError
from mallee.search.results import node_result, num_blocks

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
        terms = asked.terms._replace(ends_session=False)  # more than one request follows
        read = partial(read_search, kinds=self._kinds, maker=self._maker, draw_seed=self._draw_seed)
        plan = await self._asking.make(
            request, asked, lambda body, scope, _: read(body, scope, terms)
        )
        requests = Requests(
            self._server,
            self._maker,
            self._asking,
            plan,
            scope=asked.scope,
            terms=terms,
            visit=caller_of(request).visit,
        )
        run, is_streamed = await unless_gone(request.receive, requests.begin()), False
        try:
            if not asked.body.stream:
                return await unless_gone(request.receive, self._whole(request, run, plan))
            is_streamed = True
        finally:
            if not is_streamed:
                await run.release()
        return EventStream(self._events(request, run, plan), run.release, {})

    async def _whole(self, request: Request, run: Run, plan: SearchPlan) -> Response:
        async with aclosing(run.runner.nodes()) as nodes:
            async for _ in nodes:
                pass
        return json_response(self._result(request, run, plan))

    async def _events(
        self, request: Request, run: Run, plan: SearchPlan
    ) -> AsyncGenerator[bytes, None]:
        """An event for nodes that join the tree together, and one with the whole tree at the end."""
        try:
            async with aclosing(run.runner.nodes()) as nodes:
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

    def _result(self, request: Request, run: Run, plan: SearchPlan) -> SearchAnswer:
        """The result of a search, which is counted now."""
        server, result = self._server, run.search.result()
        server.gateway.context.metrics.searched(result.reason, age_s(request))
        size = server.gateway.context.router.config.block_size
        return SearchAnswer(
            **msgspec.structs.asdict(result),
            object="search",
            created=int(server.clock()),
            model=server.model_name,
            seed=plan.seed,
            blocks=num_blocks(run.search.tree.nodes, run.begun, size),
            spent=run.requests.spent,
        )
