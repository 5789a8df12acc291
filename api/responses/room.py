"""The routes of the Responses API."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from mallee.api.entry.asking import Asked, Asking, read_count
from mallee.api.entry.middleware import age_s, caller_of
from mallee.api.entry.pages import read_paging
from mallee.api.responses.conversations import (
    Change,
    Conversations,
    check_room,
    pending,
    place,
)
from mallee.api.responses.items import page, shown
from mallee.api.responses.listing import SharedList
from mallee.api.responses.requests import conversation_of
from mallee.api.responses.running import Background, Run
from mallee.api.responses.sharing import ID_PREFIX, SharedResponses, request_of
from mallee.api.responses.store import Record, ResponseStore
from mallee.api.responses.tools import offered
from mallee.api.responses.turns import PlannedTurn, TurnMaker
from mallee.api.responses.writing import Writer, opening, sse
from mallee.api.serve import Server, json_response
from mallee.api.sse import EventStream, unless_gone
from mallee.protocol.api.responses import (
    ResponseDeleted,
    ResponseList,
    ResponseRequest,
    ResponseSummary,
)
from mallee.protocol.codec import Decoder, encode
from mallee.protocol.errors import (
    BadRequest,
    InvalidParameter,
    LookupIncomplete,
    MalleeError,
    NotFound,
    Unavailable,
)
from mallee.protocol.ids import Scope
from mallee.router.dispatch.jobs import QueueTerms
from mallee.runtime.config import ResponsesSettings
from mallee.runtime.tasks import Tasks

MAX_EVENTS: Final = 10**9
NEWS_S: Final = 5.0  # for which another gateway's question for events waits for the next one,
NEWS_WAIT_S: Final = 8.0  # the gateway that asks for its answer,
BATCH_S: Final = 0.1  # and events for others to leave with
MAX_BATCH: Final = 4096  # events
_EVENTS: Final = "response.events"


class _Events(msgspec.Struct, frozen=True, array_like=True):
    """Events of a response on their way to another gateway; `is_over`: none comes after them."""

    events: list[bytes]
    is_over: bool


_decode_events: Final = Decoder(_Events, "events of a response")
_decode_number: Final = Decoder(int, "the number of an event")


class TooManyInBackground(Unavailable):
    status = 429
    code = "too_many_in_background"


class Responses:
    """The handlers. Responses are stored where they were made, and found from every gateway."""

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
        self.store = ResponseStore(settings, server.clock)
        self.conversations = Conversations(
            server.gateway.records,
            self.store,
            new_name=server.gateway.requests.new_name,
            clock=server.clock,
        )
        self._shared = SharedResponses(server.gateway.records, self.store, tasks, self._end)
        self._list = SharedList(
            server.gateway.records,
            self.store,
            ID_PREFIX,
            ResponseSummary,
            new_name=server.gateway.requests.new_name,
        )
        self._background: dict[str, Background] = {}  # those that run
        server.gateway.records.share(_EVENTS, self._tell_events)

    async def create(self, request: Request) -> Response:
        asked = await self._asking.read(request, ResponseRequest)
        body = asked.body
        conversation = await self._conversation(body, asked.scope)
        previous = await self._previous(body, asked.scope)
        more: Sequence[dict[str, Any]] = ()
        if conversation is not None:
            previous = conversation if conversation.turn is not None else None
            more = pending(conversation)
        has_capsule = previous is not None and await self._has_capsule(previous)

        def plan(given: ResponseRequest, scope: Scope, terms: QueueTerms) -> PlannedTurn:
            return self._turns.plan(
                given, scope, terms, previous, has_capsule=has_capsule, pending=more
            )

        async def plan_whole() -> PlannedTurn:
            whole = (body, asked.scope, asked.terms, previous)
            return await self._asking.in_pool(
                lambda: self._turns.plan(*whole, has_capsule=False, pending=more)
            )

        planned = await self._asking.make(request, asked, plan)
        run, record = await self._run(request, asked, planned, previous, conversation, plan_whole)
        if body.background:
            return self._in_background(request, run, record, streams=body.stream)
        run.admit(caller_of(request).visit)
        first = await unless_gone(request.receive, run.open(age_s(request)))
        if body.stream:
            headers = self._headers(request, run)
            return EventStream(_written(run.events(first)), run.close, headers)

        async def whole() -> None:
            try:
                async for _ in run.events(first):
                    pass
            finally:
                await run.close()

        await unless_gone(request.receive, whole())
        if run.error is not None:
            raise run.error
        return json_response(run.writer.body, headers=self._headers(request, run))

    async def list(self, request: Request) -> Response:
        paging = read_paging(request.query_params)
        finding = self._list.find(self._asking.scope(request), paging)
        found = await unless_gone(request.receive, finding)
        return json_response(paging.page(ResponseList, found))

    async def get(self, request: Request) -> Response:
        record = await self._record(request)
        query = request.query_params
        if query.get("stream", "false").lower() not in ("true", "1"):
            return json_response(record.body)
        given = query.get("starting_after")
        after = -1 if given in (None, "0") else read_count(given, "starting_after", 1, MAX_EVENTS)
        after = 0 if given == "0" else after
        if record.is_copy:
            first = await unless_gone(request.receive, self._events_elsewhere(record, after))
            events = self._follow_elsewhere(record, after, first)
        else:
            background = self._streamed(record)
            events = background.follow(after) if background else _replayed(record, after)

        async def close() -> None:
            pass

        return EventStream(events, close, {})

    async def delete(self, request: Request) -> Response:
        record = await self._record(request)
        await self._shared.forget(record)
        return json_response(ResponseDeleted(id=record.id))

    async def cancel(self, request: Request) -> Response:
        record = await self._record(request)
        if not record.body["background"]:
            raise BadRequest(
                "only a response made with background=true can be cancelled; of others hang up"
            )
        record = await self._shared.end(record)
        return json_response(record.body)

    async def input_items(self, request: Request) -> Response:
        record = await self._record(request)
        items = shown(record.items, record.id.removeprefix(ID_PREFIX))
        return json_response(page(items, request.query_params))

    # Events

    def _streamed(self, record: Record) -> Background | None:
        """The response as it runs here; None: its events are all there. Raises BadRequest: it has none."""
        background = self._background.get(record.id)
        if not (background.streams if background is not None else record.events):
            raise BadRequest(
                "only a response made with background=true and stream=true can be streamed again",
                param="stream",
            )
        return background

    async def _tell_events(self, key: str, scope: Scope, given: bytes) -> bytes | None:
        """Those after number `given`; waits for some if there are none yet."""
        record, after = self._shared.own(key, scope), _decode_number(given)
        if record is None:
            return None
        background = self._streamed(record)
        if background is not None and not background.is_over:
            with suppress(TimeoutError):
                async with asyncio.timeout(NEWS_S):
                    await anext(background.follow(after), None)
                    await asyncio.sleep(BATCH_S)
        events = record.events[after + 1 : after + 1 + MAX_BATCH]
        is_over = background is None or background.is_over
        return encode(_Events(events, is_over and after + 1 + len(events) >= len(record.events)))

    async def _events_elsewhere(self, record: Record, after: int) -> _Events:
        """Raises BadRequest, LookupIncomplete."""
        raw = await self._server.gateway.records.fetch(
            _EVENTS,
            request_of(record.id),
            record.scope,
            given=encode(after),
            wait_s=NEWS_WAIT_S,
        )
        if raw is None:
            remedy = "its events went with the gateway that made it; leave stream out"
            raise InvalidParameter("stream", True, remedy)
        return _decode_events(raw)

    async def _follow_elsewhere(
        self, record: Record, after: int, told: _Events
    ) -> AsyncGenerator[bytes, None]:
        """`told`, and those to come. Raises ConnectionError: its gateway is gone, or silent."""
        while True:
            if told.events:
                after += len(told.events)
                yield b"".join(told.events)
            if told.is_over:
                return
            try:
                told = await self._events_elsewhere(record, after)
            except MalleeError as error:
                raise ConnectionError(f"the events of a response break off: {error}") from error

    # Steps

    async def _conversation(self, body: ResponseRequest, scope: Scope) -> Record | None:
        """The conversation that is gone on from. Raises UnknownConversation, BadRequest."""
        name = conversation_of(body)
        if name is None:
            return None
        return await self.conversations.find(name, scope, "conversation")

    async def _previous(self, body: ResponseRequest, scope: Scope) -> Record | None:
        """The response that is gone on from. Raises UnknownResponse, BadRequest."""
        if body.previous_response_id is None:
            return None
        param = "previous_response_id"
        record = await self._shared.find(body.previous_response_id, scope, param)
        if record.turn is None:
            status = record.body["status"]
            remedy = f"it is {status} and has no answer to go on from"
            raise InvalidParameter(param, record.id, remedy)
        return record

    async def _has_capsule(self, record: Record) -> bool:
        """Whether the response's capsule can be forked here, of these weights."""
        if record.left is None:
            return False
        left = record.left
        try:
            info = await self._server.gateway.capsules.show(left.capsule, record.scope)
        except (NotFound, LookupIncomplete):
            return False
        return not info.is_stale and info.boundary == left.prompt_tokens + len(left.drawn)

    async def _run(
        self,
        request: Request,
        asked: Asked[ResponseRequest],
        planned: PlannedTurn,
        previous: Record | None,
        conversation: Record | None,
        plan_whole: Callable[[], Awaitable[PlannedTurn]],
    ) -> tuple[Run, Record]:
        body, scope = asked.body, asked.scope
        left = previous.left if previous is not None else None
        bound = await self._server.bound(planned.plan, left.capsule if left is not None else None)
        named = self._server.named(scope, bound)
        begun = opening(
            body,
            f"{ID_PREFIX}{named.name.removeprefix('req_')}",
            int(self._server.clock()),
            self._server.model_name,
            offered(body.tools) or [],
        )
        if conversation is not None:
            check_room(conversation, len(planned.items), "conversation")
            begun["conversation"] = {"id": conversation.id}
        writer = Writer(
            body,
            begun,
            self._server.tokenizer.token_bytes,
            names_workers=caller_of(request).is_operator,
        )
        record = Record(begun["id"], scope, begun, planned.items, planned.head)

        async def tell(answer: Record) -> None:
            if conversation is not None:
                made = self.conversations.with_ids(scope, planned.items)
                items = [*made, *writer.output]
                change = Change(items=items, at=place(conversation))
                await self.conversations.change(conversation, change, answer)

        given = (self._server, self.store, planned, record, writer, named)
        return Run(*given, is_stored=body.store, tell=tell, plan_whole=plan_whole), record

    def _in_background(
        self, request: Request, run: Run, record: Record, *, streams: bool
    ) -> Response:
        caller = caller_of(request)
        self._check_background(caller.tenant)
        background = Background(run, record, caller.visit, tenant=caller.tenant, streams=streams)
        record.is_running = True
        record.measure()
        self.store.keep(record)
        answer = {**record.body}

        async def work() -> None:
            try:
                await background.work()
            finally:
                self._background.pop(record.id, None)

        self._background[record.id] = background
        background.task = self._tasks.spawn(work(), name="background response")
        if streams:

            async def close() -> None:
                pass

            return EventStream(background.follow(-1), close, {})
        return json_response(answer)

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

    async def _end(self, record: Record) -> None:
        """Cancel what runs of it; returns once it is over."""
        background = self._background.get(record.id)
        if background is None or background.task is None:
            return
        if not background.is_ending:
            background.is_ending = True
            self._tasks.cancel(background.task)
        try:
            await asyncio.wait([background.task])
        finally:
            background.cancel()  # if its task never began
            background.finish()
            self._background.pop(record.id, None)

    async def _record(self, request: Request) -> Record:
        name = request.path_params["response"]
        return await self._shared.find(name, self._asking.scope(request))

    def _headers(self, request: Request, run: Run) -> dict[str, str]:
        return {"x-mallee-worker": run.worker} if caller_of(request).is_operator else {}


async def _written(
    groups: AsyncGenerator[list[dict[str, Any]], None],
) -> AsyncGenerator[bytes, None]:
    async for events in groups:
        if events:
            yield b"".join(map(sse, events))


async def _replayed(record: Record, after: int) -> AsyncGenerator[bytes, None]:
    if rest := record.events[after + 1 :]:
        yield b"".join(rest)
