"""The routes of the Responses API."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from mallee.api.deltas import TextDelta
from mallee.api.entry.asking import Asked, Asking, read_count
from mallee.api.entry.gate import staying
from mallee.api.entry.middleware import age_s, caller_of
from mallee.api.entry.pages import read_paging
from mallee.api.responses.background import Background, follow, replay
from mallee.api.responses.conversations import Conversations, Talk, check_room
from mallee.api.responses.items import page, shown
from mallee.api.responses.requests import conversation_of
from mallee.api.responses.running import Run, has_capsule_after
from mallee.api.responses.store import ID_PREFIX, Record, State, StoredResponses
from mallee.api.responses.tools import offered
from mallee.api.responses.turns import PlannedTurn, TurnMaker
from mallee.api.responses.writing import Writer, opening, sse
from mallee.api.serve import Server, json_response
from mallee.api.sse import EventStream, unless_gone
from mallee.protocol.api.responses import ResponseDeleted, ResponseList, ResponseRequest
from mallee.protocol.errors import (
    BadRequest,
    InvalidParameter,
    PeerSilent,
    StoreAway,
    StoreFull,
    Unavailable,
)
from mallee.protocol.ids import Scope
from mallee.router.dispatch.jobs import QueueTerms
from mallee.runtime.config import ResponsesSettings
from mallee.runtime.tasks import Tasks

MAX_EVENTS: Final = 10**9
END_S: Final = 5.0  # for a response to end
_END: Final = "response.end"  # asked of the gateway that runs it

Events = list[dict[str, Any]]


class TooManyInBackground(Unavailable):
    status = 429
    code = "too_many_in_background"


class Responses:
    """The handlers. What runs in the background runs here; all else is in the gateways' store."""

    def __init__(
        self,
        asking: Asking,
        server: Server,
        turns: TurnMaker,
        settings: ResponsesSettings,
        tasks: Tasks,
    ) -> None:
        self._asking = asking
        self._server = server
        self._turns = turns
        self._settings = settings
        self._tasks = tasks
        gateway = server.gateway
        self._background: dict[str, Background] = {}  # those that run
        self._peers = gateway.peers
        self._stored = StoredResponses(
            gateway.store,
            gateway.peers,
            settings,
            runs=lambda name: name in self._background,
        )
        self.conversations = Conversations(
            gateway.store, settings, new_name=gateway.requests.new_name, clock=server.clock
        )
        gateway.peers.share(_END, self._on_end)

    async def create(self, request: Request) -> Response:
        asked = await self._asking.read(request, ResponseRequest)
        body, scope = asked.body, asked.scope
        if body.store or body.conversation is not None:
            self._stored.check_up()
        talk = await self._conversation(body, scope)
        previous = await self._previous(body, scope) if talk is None else talk.state
        more: Sequence[dict[str, Any]] = () if talk is None else talk.pending
        has_capsule = previous is not None and await has_capsule_after(
            self._server.gateway, previous, scope
        )

        def plan(given: ResponseRequest, scope: Scope, terms: QueueTerms) -> PlannedTurn:
            return self._turns.plan(
                given, scope, terms, previous, has_capsule=has_capsule, pending=more
            )

        async def plan_whole() -> PlannedTurn:
            whole = (body, scope, asked.terms, previous)
            return await self._asking.in_pool(
                lambda: self._turns.plan(*whole, has_capsule=False, pending=more)
            )

        planned = await self._asking.make(request, asked, plan)
        self._server.warn_of_tools(request, planned.plan)
        run = await self._run(request, asked, planned, previous, talk, plan_whole)
        await caller_of(request).visit.ready(**planned.plan.needs)
        if body.background:
            return await self._in_background(request, run, streams=body.stream)
        run.admit(caller_of(request).visit)
        first = await unless_gone(request.receive, run.open(age_s(request)))
        events = self._answered(run, first, is_stored=body.store)
        if body.stream:
            return EventStream(_written(events), run.close, self._headers(request, run))

        async def whole() -> None:
            try:
                async for _ in events:
                    pass
            finally:
                await run.close()

        await unless_gone(request.receive, whole())
        if run.error is not None:
            raise run.error
        return json_response(run.writer.body, headers=self._headers(request, run))

    async def list(self, request: Request) -> Response:
        paging = read_paging(request.query_params)
        finding = self._stored.page(self._asking.scope(request), paging)
        found = await unless_gone(request.receive, finding)
        return json_response(paging.page(ResponseList, found))

    async def get(self, request: Request) -> Response:
        record = await self._record(request)
        query = request.query_params
        if query.get("stream", "false").lower() not in ("true", "1"):
            return json_response(record.body)
        if record.num_events is None:
            raise BadRequest(
                "only a response made with background=true and stream=true can be streamed again",
                param="stream",
            )
        given = query.get("starting_after")
        after = -1 if given in (None, "0") else read_count(given, "starting_after", 1, MAX_EVENTS)
        after = 0 if given == "0" else after
        return _streamed(await self._events(self._asking.scope(request), record, after))

    async def delete(self, request: Request) -> Response:
        record, scope = await self._record(request), self._asking.scope(request)
        if not record.is_over:
            await self._end(record, scope)
        await self._stored.delete(scope, record.id)
        return json_response(ResponseDeleted(id=record.id))

    async def cancel(self, request: Request) -> Response:
        record = await self._record(request)
        if not record.body.background:
            raise BadRequest(
                "only a response made with background=true can be cancelled; of others hang up"
            )
        if not record.is_over:
            record = await self._end(record, self._asking.scope(request))
        return json_response(record.body)

    async def input_items(self, request: Request) -> Response:
        record = await self._record(request)
        items = shown(record.items, record.id.removeprefix(ID_PREFIX))
        return json_response(page(items, request.query_params))

    # Steps

    async def _conversation(self, body: ResponseRequest, scope: Scope) -> Talk | None:
        """The conversation that is gone on from. Raises UnknownConversation, BadRequest."""
        name = conversation_of(body)
        if name is None:
            return None
        return await self.conversations.talk(name, scope, "conversation")

    async def _previous(self, body: ResponseRequest, scope: Scope) -> State | None:
        """The response that is gone on from. Raises UnknownResponse, BadRequest."""
        if body.previous_response_id is None:
            return None
        param = "previous_response_id"
        record = await self._stored.find(body.previous_response_id, scope, param)
        if record.state is None:
            status = record.body.status
            remedy = f"it is {status} and has no answer to go on from"
            raise InvalidParameter(param, record.id, remedy)
        return record.state

    async def _run(
        self,
        request: Request,
        asked: Asked[ResponseRequest],
        planned: PlannedTurn,
        previous: State | None,
        talk: Talk | None,
        plan_whole: Callable[[], Awaitable[PlannedTurn]],
    ) -> Run:
        body, scope = asked.body, asked.scope
        left = previous.left if previous is not None else None
        bound = await self._server.bound(planned.plan, left.capsule if left is not None else None)
        named = self._server.named(scope, bound)
        name = conversation_of(body)
        if talk is not None:
            check_room(talk, len(planned.items), "conversation")
        begun = opening(
            body,
            f"{ID_PREFIX}{named.name.removeprefix('req_')}",
            int(self._server.clock()),
            body.model or self._server.model_name,
            tools=offered(body.tools) or [],
            conversation=name,
        )
        writer = Writer(
            body,
            begun,
            self._server.tokenizer.token_bytes,
            names_workers=caller_of(request).is_operator,
        )

        async def tell(state: State) -> None:
            if name is not None and talk is not None:
                made = self.conversations.with_ids(scope, planned.items)
                items = [*made, *writer.output]

                def change(now: Talk) -> Talk:
                    check_room(now, len(items), "conversation")
                    return now.with_answer(items, state, talk)

                await self.conversations.change(name, scope, change)

        given = (self._server, scope, planned, writer, named)
        return Run(*given, tell=tell, plan_whole=plan_whole)

    async def _answered(
        self, run: Run, first: TextDelta, *, is_stored: bool
    ) -> AsyncGenerator[Events, None]:
        """All events of an answer, which is stored before the last one, or that says that it is not."""
        async for events in run.events(first):
            yield events
        if is_stored:
            try:
                await self._stored.put(run.scope, run.record())
            except (StoreAway, StoreFull) as error:
                run.writer.not_stored(error)
        yield [run.last()]

    async def _in_background(self, request: Request, run: Run, *, streams: bool) -> Response:
        caller = caller_of(request)
        self._check_background(caller.tenant)
        background = Background(
            run, self._stored, caller.visit, tenant=caller.tenant, streams=streams
        )
        answer = run.writer.shown
        name = answer.id
        self._background[name] = background
        background.start(self._tasks)
        background.life.add_done_callback(lambda _: self._background.pop(name))
        inside = ExitStack()
        inside.enter_context(staying(request.scope))
        background.life.add_done_callback(lambda _: inside.close())
        await background.begun()
        return _streamed(background.follow(-1)) if streams else json_response(answer)

    def _check_background(self, tenant: str) -> None:
        """Raises Unavailable, TooManyInBackground."""
        most, running = self._settings.max_background, self._background.values()
        if len(running) >= most:
            raise Unavailable(f"{most} background responses run already; retry later")
        most = self._settings.max_tenant_background
        if tenant and sum(each.tenant == tenant for each in running) >= most:
            raise TooManyInBackground(
                f"{most} background responses of this tenant run already; retry later"
            )

    async def _events(
        self, scope: Scope, record: Record, after: int
    ) -> AsyncGenerator[bytes, None]:
        """Those from number `after` + 1 on, and those to come. Raises InvalidParameter."""
        if record.is_over:
            return replay(await self._stored.events_of(scope, record), record, after)
        if (background := self._background.get(record.id)) is not None:
            return background.follow(after)
        return follow(self._stored, scope, record.id, after)

    async def _end(self, record: Record, scope: Scope) -> Record:
        """End a response where it runs; what became of it. Raises Unavailable, UnknownResponse."""
        if record.gateway == self._peers.gateway:
            await self._end_here(record.id)
        else:
            with suppress(PeerSilent):  # it may have gone meanwhile, or have ended it
                await self._peers.ask(record.gateway, _END, record.id, scope, wait_s=END_S)
        found = await self._stored.find(record.id, scope)
        if not found.is_over:
            raise Unavailable(
                "the gateway that runs this response did not end it; retry in 1 s",
                retry_after_s=1.0,
            )
        return found

    async def _end_here(self, name: str) -> None:
        """Returns once it is over, and that is stored."""
        if (background := self._background.get(name)) is not None:
            background.end(self._tasks)
            await asyncio.wait([background.life], timeout=END_S)

    async def _on_end(self, name: str, scope: Scope, _: bytes) -> bytes | None:
        background = self._background.get(name)
        if background is None or background.scope != scope:
            return None
        await self._end_here(name)
        return b""

    async def _record(self, request: Request) -> Record:
        name = request.path_params["response"]
        return await self._stored.find(name, self._asking.scope(request))

    def _headers(self, request: Request, run: Run) -> dict[str, str]:
        return {"x-mallee-worker": run.worker} if caller_of(request).is_operator else {}


async def _written(
    groups: AsyncGenerator[Events, None],
) -> AsyncGenerator[bytes, None]:
    async for events in groups:
        if events:
            yield b"".join(map(sse, events))


def _streamed(events: AsyncGenerator[bytes, None]) -> EventStream:
    """An answer whose client may go without an end to what it reads."""

    async def close() -> None:
        pass

    return EventStream(events, close, {})
