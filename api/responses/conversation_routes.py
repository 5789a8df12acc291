"""The routes of the Conversations API."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mallee.api.entry.asking import Asking
from mallee.api.entry.pages import read_paging
from mallee.api.responses.conversations import Change, Conversations, check_room
from mallee.api.responses.items import page, read_input
from mallee.api.responses.store import Record
from mallee.api.serve import json_response
from mallee.api.sse import unless_gone
from mallee.protocol.api.responses import (
    MAX_NEW_ITEMS,
    ConversationDeleted,
    ConversationList,
    ConversationRequest,
    ConversationUpdate,
    ItemsRequest,
)
from mallee.protocol.errors import BadRequest, InvalidParameter, NotFound


class UnknownItem(NotFound):
    code = "item_not_found"


class ConversationHandlers:
    """The handlers. A cache salt comes by its header alone."""

    def __init__(self, asking: Asking, conversations: Conversations) -> None:
        self._asking = asking
        self._conversations = conversations

    async def create(self, request: Request) -> Response:
        body = await self._asking.read_plain(request, ConversationRequest)
        items = [] if body.items in (None, []) else _read_items(body.items)
        scope = self._asking.scope(request)
        record = self._conversations.create(scope, items, body.metadata or {})
        return json_response(record.body)

    async def list(self, request: Request) -> Response:
        paging = read_paging(request.query_params)
        finding = self._conversations.all.find(self._asking.scope(request), paging)
        found = await unless_gone(request.receive, finding)
        return json_response(paging.page(ConversationList, found))

    async def get(self, request: Request) -> Response:
        return json_response((await self._record(request)).body)

    async def update(self, request: Request) -> Response:
        body = await self._asking.read_plain(request, ConversationUpdate)
        if body.metadata is None:
            raise BadRequest("metadata is required", param="metadata")
        record = await self._record(request)
        record = await self._conversations.change(record, Change(metadata=body.metadata))
        return json_response(record.body)

    async def delete(self, request: Request) -> Response:
        record = await self._record(request)
        self._conversations.forget(record)
        return json_response(ConversationDeleted(id=record.id))

    async def list_items(self, request: Request) -> Response:
        record = await self._record(request)
        return json_response(page(record.items, request.query_params))

    async def add_items(self, request: Request) -> Response:
        body = await self._asking.read_plain(request, ItemsRequest)
        items = _read_items(body.items)
        record = await self._record(request)
        check_room(record, len(items), "items")
        made = self._conversations.with_ids(record.scope, items)
        await self._conversations.change(record, Change(items=made))
        return json_response(page(made, {"order": "asc", "limit": str(MAX_NEW_ITEMS)}))

    async def get_item(self, request: Request) -> Response:
        return json_response(_item(await self._record(request), request))

    async def delete_item(self, request: Request) -> Response:
        record = await self._record(request)
        item = _item(record, request)
        record = await self._conversations.change(record, Change(without=item["id"]))
        return json_response(record.body)

    async def _record(self, request: Request) -> Record:
        name = request.path_params["conversation"]
        return await self._conversations.find(name, self._asking.scope(request))


def _read_items(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, str):
        raise InvalidParameter("items", value, "give a list of items")
    items, _ = read_input(value, "items")
    if len(items) > MAX_NEW_ITEMS:
        raise InvalidParameter("items", len(items), f"give at most {MAX_NEW_ITEMS} at once")
    return items


def _item(record: Record, request: Request) -> dict[str, Any]:
    name: str = request.path_params["item"]
    for item in record.items:
        if item["id"] == name:
            return item
    raise UnknownItem(f"item {name[:80]!r} is not in conversation {record.id}; list its items")
